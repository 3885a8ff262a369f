"""What an extension is, what it may provide, and what the kernel hands to it.

An extension is a class with any of the methods of ``Extension``; what it provides is found by looking at which of the
protocols below it fulfils. One class may fulfil several.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from postbus.model import PostbusError, Trust

if TYPE_CHECKING:
    from postbus.kernel.context import ExtensionContext
    from postbus.kernel.topics import SecureInputRequest

__all__ = [
    "AgentDescription",
    "AgentInvocationContext",
    "AgentProvider",
    "AgentResponse",
    "ApprovalDecision",
    "ApprovalGate",
    "ApprovalPrompt",
    "ApprovingChannel",
    "ChannelProvider",
    "Extension",
    "ExtensionState",
    "ExtensionStatus",
    "Health",
    "KernelPart",
    "KernelReport",
    "OutgoingMessage",
    "SchedulerProvider",
    "SecretDeclined",
    "SecretVault",
    "SecureChannel",
    "ServiceProvider",
    "StreamingChannel",
    "ToolCall",
    "ToolDenied",
    "ToolProvider",
    "ToolSpec",
]


# --- life of an extension ---------------------------------------------------------------------------------------------


class ExtensionState(StrEnum):
    """How far an extension has come. ``error`` has a reason."""

    DISCOVERED = "discovered"
    LOADED = "loaded"
    INITIALIZED = "initialized"
    RUNNING = "running"
    STOPPED = "stopped"
    DISABLED = "disabled"
    ERROR = "error"


class Health(msgspec.Struct, frozen=True):
    """What an extension says about itself."""

    ok: bool
    detail: str = ""


class Extension:
    """The base of extensions. Each method may be left out; deriving from this class is not needed.

    ``initialize`` gets the context and subscribes; ``start`` begins work; ``stop`` ends it, and may still emit;
    ``destroy`` frees what is left, after the last handler has ended. ``initialize`` and ``start`` run in the order of
    the dependencies, the other two in the reverse order, each at most once per loading.
    """

    async def initialize(self, context: ExtensionContext) -> None:
        """Take the context and subscribe."""

    async def start(self) -> None:
        """Begin work; everything that could be initialised is, and events flow."""

    async def stop(self) -> None:
        """End work."""

    async def destroy(self) -> None:
        """Free what is left."""

    async def health(self) -> Health:
        """Say how it is."""
        return Health(ok=True)


class ExtensionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one extension, for ``doctor`` and ``extensions``. ``where``: file and line of the reason."""

    id: str
    name: str
    state: ExtensionState
    folder: str
    reason: str = ""
    where: str = ""
    stage: str = ""
    depends_on: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    publishes: tuple[str, ...] = ()
    subscribes: tuple[str, ...] = ()
    generation: int = 0
    health: Health | None = None
    warnings: tuple[str, ...] = ()


class KernelReport(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel at one moment: written beside the data so that another process can read it."""

    pid: int
    running: bool
    written_at_us: int
    orchestrator: str | None
    channels: tuple[str, ...]
    extensions: tuple[ExtensionStatus, ...]


# --- channels ---------------------------------------------------------------------------------------------------------


class OutgoingMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A text for the user. The same message may come twice after a crash, with the same ``id``: show it once."""

    id: str
    text: str
    channel_id: str
    user_id: str | None = None
    session_id: str | None = None
    correlation_id: str | None = None
    trust: Trust = Trust.TRUSTED


@runtime_checkable
class ChannelProvider(Protocol):
    """A way to the user. What the user says goes in through ``context.receive``."""

    @property
    def channel_id(self) -> str:
        """Its name, ``[A-Za-z0-9_-]{1,80}``; the same over restarts."""

    async def send(self, message: OutgoingMessage) -> None:
        """Show a message and return; raises when it cannot, and is then called again later."""


@runtime_checkable
class StreamingChannel(Protocol):
    """A channel that also shows an answer while it is being made; the message itself still comes with ``send``."""

    async def send_delta(self, session_id: str, text: str) -> None:
        """Show a piece of an answer."""


class SecretDeclined(Exception):
    """Raised by a channel: the user gives no secret."""


@runtime_checkable
class SecureChannel(Protocol):
    """A channel that can ask for a secret without showing or recording it."""

    async def read_secret(self, request: SecureInputRequest) -> str:
        """Ask, and return what the user typed to the kernel, which puts it in the vault; raises ``SecretDeclined``."""


class ApprovalPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What a human is asked to allow. ``digest`` names tool and arguments exactly."""

    request_id: str
    tool_name: str
    arguments: dict[str, Any]
    server_alias: str
    digest: str
    expires_at_us: int
    channel_id: str


@runtime_checkable
class ApprovingChannel(Protocol):
    """A channel that can ask a human. It answers, any time later, with ``context.answer_approval``."""

    async def show_approval(self, prompt: ApprovalPrompt) -> None:
        """Show the question and return. It may come twice, with the same ``request_id``."""


# --- agents -----------------------------------------------------------------------------------------------------------


class AgentDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent is called and good for. ``mode``: ``orchestrator`` answers users, ``tool`` serves other agents."""

    id: str
    name: str = ""
    description: str = ""
    mode: str = "tool"


class AgentResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent answers."""

    text: str
    metadata: dict[str, Any] = {}


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool: its name, what it does, the JSON Schema of its arguments, and whether a human must allow each call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "object"})
    needs_approval: bool = False
    server_alias: str = ""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool. ``id`` is the same when the work that makes it is repeated after a crash or a failure."""

    id: str
    name: str
    arguments: dict[str, Any]
    extension_id: str = ""
    server_alias: str = ""
    correlation_id: str | None = None
    session_id: str | None = None
    channel_id: str | None = None
    user_id: str | None = None
    trust: Trust = Trust.TRUSTED


class AgentInvocationContext(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows about the call: on whose behalf, in which chain, and what it may use.

    ``invocation_id`` is the same when the call is repeated after a crash. ``trust`` is untrusted as soon as any event
    of the chain was; text from such events is in the task only as marked data.
    """

    invocation_id: str
    correlation_id: str
    session_id: str
    channel_id: str | None = None
    user_id: str | None = None
    caller: str = ""
    depth: int = 0
    attempt: int = 1
    trust: Trust = Trust.TRUSTED
    tools: tuple[ToolSpec, ...] = ()
    call_tool: Callable[[str, dict[str, Any]], Awaitable[Any]]
    delta: Callable[[str], Awaitable[None]]


@runtime_checkable
class AgentProvider(Protocol):
    """Somebody who answers."""

    async def invoke(self, task: str, context: AgentInvocationContext) -> AgentResponse | str:
        """Answer a task; raises when it cannot, and is then called again by the rules of the event."""


# --- tools, schedules, services ---------------------------------------------------------------------------------------


class ToolDenied(PostbusError):
    """A human did not allow the call, or nobody did in time."""

    code = "tool_denied"


@runtime_checkable
class ToolProvider(Protocol):
    """Something agents can use."""

    def get_tools(self) -> Sequence[ToolSpec]:
        """Return the tools there are now; asked again before each invocation of an agent."""

    async def call_tool(self, call: ToolCall) -> Any:
        """Run a tool and return a JSON value. Arguments are checked and, where asked for, approved before."""


@runtime_checkable
class SchedulerProvider(Protocol):
    """Work at set times: the kernel calls ``execute`` by the schedule and tells the user ``{"text": …}`` of it."""

    def get_schedule(self) -> str:
        """Return five cron fields, and a time zone behind them if it is not UTC: ``*/5 * * * * Europe/Amsterdam``."""

    async def execute(self) -> dict[str, Any] | None:
        """Do it."""


@runtime_checkable
class ServiceProvider(Protocol):
    """Something that runs all the time."""

    async def run_background(self) -> None:
        """Run until cancelled. When it raises, the extension is in error and ``system.extension.error`` says so."""


# --- parts of the kernel ----------------------------------------------------------------------------------------------


class KernelPart(Protocol):
    """A part of the kernel with handlers of its own. ``wire`` subscribes; ``start`` and ``stop`` frame its work."""

    def wire(self) -> None:
        """Subscribe to the system topics it handles."""

    async def start(self) -> None:
        """Begin; extensions are initialised and wired."""

    async def stop(self) -> None:
        """End, and interrupt whoever waits for it; handlers and extensions still run."""


class ApprovalDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request. ``status``: approved, denied, expired."""

    request_id: str
    status: str
    principal: str | None = None
    reason: str | None = None


class ApprovalGate(Protocol):
    """Asks a human before a tool runs. The answer holds for one call of this tool with these arguments."""

    async def ask(self, call: ToolCall) -> ApprovalDecision:
        """Wait for the decision on a call, over restarts: the same ``call.id`` and arguments are the same question."""

    async def spend(self, request_id: str) -> bool:
        """Use up an approval, durably, before the tool runs; False when it was used or has expired."""

    async def answer(
        self, request_id: str, principal: str, channel_id: str, *, approved: bool, reason: str | None = None
    ) -> None:
        """Take a human's answer from a channel; raises ``NotFound``, ``Conflict`` (answered already or too late)."""


class SecretVault(Protocol):
    """Where secrets are, and nowhere else."""

    async def put(self, secret_id: str, value: str, *, owner: str, request: str = "") -> None:
        """Keep a secret for its owner, in place of the one of that name; raises ``Conflict`` if that is another's."""

    async def get(self, secret_id: str, *, reader: str) -> str:
        """Return a secret to an extension that may have it; raises ``NotFound``, ``Forbidden``."""

    async def delete(self, secret_id: str) -> bool:
        """Forget a secret; False when there was none."""
