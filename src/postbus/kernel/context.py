"""``ExtensionContext``: everything an extension may do with the bus, the user, the agents and the tools."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from postbus import strict_json
from postbus.kernel.identity import stable_id
from postbus.kernel.router import HOOKS, check_hook
from postbus.kernel.templates import MarkedPrompt, render
from postbus.kernel.topics import MARKED, SystemTopics, check_payload
from postbus.model import Conflict, Forbidden, Invalid, NotFound, SchemaMismatch, Trust
from postbus.topics import check_id, check_pattern

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from datetime import datetime
    from pathlib import Path

    from postbus.bus import EventBus
    from postbus.clock import Clock
    from postbus.kernel.contract import AgentResponse, ApprovalGate, SecretVault, ToolSpec
    from postbus.kernel.manifest import ManifestFile
    from postbus.kernel.router import MessageRouter
    from postbus.kernel.schedules import Schedules
    from postbus.kernel.tools import Tools
    from postbus.model import Event, Receipt, RetryPolicy

__all__ = ["ExtensionContext", "Host"]


class Host(Protocol):
    """What a context needs of the kernel."""

    bus: EventBus
    clock: Clock
    router: MessageRouter
    tools: Tools

    @property
    def vault(self) -> SecretVault:
        """Where secrets are."""

    @property
    def approvals(self) -> ApprovalGate:
        """Who asks humans."""

    @property
    def schedules(self) -> Schedules:
        """What happens at set times."""

    def channel_of(self, extension_id: str) -> str | None:
        """Return the channel an extension provides."""

    def instance(self, extension_id: str) -> Any:
        """Return a running extension; raises ``NotFound`` with the reason when it does not run."""

    async def call_tool(self, name: str, arguments: dict[str, Any], *, caller: str) -> Any:
        """Call a tool for somebody."""

    async def invoke_agent(
        self,
        prompt: str,
        *,
        caller: str,
        agent: str | None = None,
        channel_id: str | None = None,
        session_id: str | None = None,
        correlation_id: str | None = None,
    ) -> AgentResponse:
        """Have an agent answer; one at a time per session."""


class ExtensionContext:
    """One extension's view of the kernel. Extensions use nothing else of it.

    Inside a handler, what is emitted derives from the event being handled: it inherits the correlation, and it is
    untrusted if that event is.
    """

    def __init__(self, host: Host, file: ManifestFile, config: Mapping[str, Any], data_dir: Path) -> None:
        manifest = file.manifest
        self._host = host
        self._manifest = manifest
        self._schemas = file.schemas
        self.extension_id = manifest.id
        self.config = config
        self.folder = file.folder
        self._data_dir = data_dir
        self.logger = logging.getLogger(f"postbus.extension.{manifest.id}")
        self._subscriptions: list[tuple[str, str]] = []
        self._waiting: list[tuple[tuple[str, str], Callable[[], None]]] | None = []
        self._hooks: list[tuple[str, Callable[..., Any]]] = []
        self._closed = False

    @property
    def clock(self) -> Clock:
        """The one source of time and of ids."""
        return self._host.clock

    @property
    def data_dir(self) -> Path:
        """A folder of its own, made when first asked for."""
        self._data_dir.mkdir(parents=True, exist_ok=True)
        return self._data_dir

    # --- durable events ---

    async def emit(
        self,
        topic: str,
        payload: dict[str, Any],
        correlation_id: str | None = None,
        *,
        key: str | None = None,
        native_id: str | None = None,
        headers: dict[str, str] | None = None,
        metadata: dict[str, Any] | None = None,
        occurred_at: datetime | str | None = None,
        trust: Trust | None = None,
    ) -> Receipt:
        """Publish an event with this extension as its source; return once it is durable.

        ``trust`` is what the manifest says of the topic, or trusted; ``untrusted`` marks text from outside. Raises as
        ``EventBus.publish``, ``Invalid`` for a payload that a system topic does not take, and ``SchemaMismatch`` for
        one that the manifest's schema does not.
        """
        if not isinstance(payload, dict):
            raise Invalid(f"the payload of an event is a dict, not {type(payload).__name__}")
        if topic == SystemTopics.TOOL_APPROVAL_RESPONSE:
            message = "an approval is answered by a channel, with context.answer_approval"
            raise Forbidden(message)
        check_payload(topic, payload)
        encoded = strict_json.encode(payload)
        schema = self._schemas.get(topic)
        if schema is not None and (issues := schema.issues(encoded)):
            message = f"this is no payload of {topic} as the manifest declares it: {issues[0].message}"
            raise SchemaMismatch(message, issues=issues)
        return await self._host.bus.publish(
            topic,
            self.extension_id,
            encoded,
            correlation_id,
            key=key,
            native_id=native_id,
            headers=headers,
            metadata=metadata,
            occurred_at=occurred_at,
            trust=self._manifest.trust_of(topic) if trust is None else trust,
        )

    def subscribe_event(
        self,
        topic: str,
        handler: Callable[..., Awaitable[None]],
        *,
        name: str | None = None,
        filter: dict[str, Any] | None = None,  # noqa: A002 - the word of the model
        retry: RetryPolicy | None = None,
        **settings: Any,
    ) -> None:
        """Register a handler for a topic or pattern. Handlers run in the order they were registered.

        All handlers of an extension share one durable subscription, named by its id. With ``name`` the handler gets one
        of its own, ``<extension>.<name>``, with settings of its own (as ``EventBus.subscribe`` takes them).
        """
        self._check_open()
        if name is None and (filter is not None or retry is not None or settings):
            raise Invalid("a handler with settings of its own needs a subscription of its own", hint="give it a name")
        subscriber = self.extension_id if name is None else f"{self.extension_id}.{check_id(name, 'name')}"
        check_pattern(topic)
        subscribe = partial(
            self._host.bus.subscribe, topic, handler, subscriber, filter=filter, retry=retry, **settings
        )
        if self._waiting is None:
            subscribe()
        else:
            self._waiting.append(((topic, subscriber), subscribe))
        if (topic, subscriber) not in self._subscriptions:
            self._subscriptions.append((topic, subscriber))

    def unsubscribe_event(self, topic: str, *, name: str | None = None) -> None:
        """Detach the handlers of a topic; the subscription keeps its place. Raises ``NotFound``."""
        subscriber = self.extension_id if name is None else f"{self.extension_id}.{name}"
        if (topic, subscriber) not in self._subscriptions:
            raise NotFound(f"{subscriber} is not subscribed to {topic}")
        self._subscriptions.remove((topic, subscriber))
        if self._waiting is None:
            self._host.bus.unsubscribe(topic, subscriber)
        else:
            self._waiting = [one for one in self._waiting if one[0] != (topic, subscriber)]

    # --- hooks of the router ---

    def subscribe(self, event: str, handler: Callable[..., Any]) -> None:
        """Be called at once, in memory, on ``user_message`` or ``agent_response``. Nothing is kept or retried."""
        self._check_open()
        self._host.router.subscribe(check_hook(event), handler)
        self._hooks.append((event, handler))

    def unsubscribe(self, event: str, handler: Callable[..., Any]) -> None:
        """Be called no more."""
        self._host.router.unsubscribe(check_hook(event), handler)
        self._hooks.remove((event, handler))

    # --- the user ---

    async def notify_user(self, text: str, channel_id: str | None = None) -> Receipt:
        """Send a message to the user, on the active channel unless one is named; it is delivered in the end."""
        payload = {"text": text} if channel_id is None else {"text": text, "channel_id": channel_id}
        return await self.emit(SystemTopics.USER_NOTIFY, payload)

    async def receive(
        self,
        text: str,
        user_id: str,
        *,
        session_id: str | None = None,
        message_id: str | None = None,
        correlation_id: str | None = None,
    ) -> Receipt:
        """Take in what a user said on this channel; for channels only.

        Hooks see it at once; the agent works on it once it is durable. With ``message_id``, the channel's own name for
        the message, giving it twice is harmless.
        """
        channel = self._channel()
        session = session_id or f"{channel}:{user_id}"
        payload = {"text": text, "user_id": user_id, "channel_id": channel, "session_id": session}
        check_payload(SystemTopics.USER_MESSAGE, payload)
        native_id = None if message_id is None else stable_id("message", channel, message_id)
        receipt = await self.emit(
            SystemTopics.USER_MESSAGE, payload, correlation_id, key=session_key(session), native_id=native_id
        )
        if not receipt.duplicate:
            self._host.router.active_channel = channel
            await self._host.router.fire(HOOKS.USER_MESSAGE, payload)
        return receipt

    async def answer_approval(
        self, request_id: str, principal: str, *, approved: bool, reason: str | None = None
    ) -> None:
        """Hand in what a human said to an approval shown on this channel; for channels only.

        ``principal`` names the human. Raises ``NotFound``, ``Conflict`` when it was answered or is too late.
        """
        channel = self._channel()
        await self._host.approvals.answer(request_id, principal, channel, approved=approved, reason=reason)

    # --- agents and tools ---

    async def request_agent_task(
        self, prompt: str, channel_id: str | None = None, correlation_id: str | None = None
    ) -> Receipt:
        """Ask the orchestrator to handle a task; the answer goes to the user."""
        payload = _without_none(prompt=prompt, channel_id=channel_id, correlation_id=correlation_id)
        return await self.emit(SystemTopics.AGENT_TASK, payload, correlation_id, metadata=_marks(prompt))

    async def request_agent_background(self, prompt: str, correlation_id: str | None = None) -> Receipt:
        """Ask the orchestrator to work on something; the user gets no answer."""
        payload = _without_none(prompt=prompt, correlation_id=correlation_id)
        return await self.emit(SystemTopics.AGENT_BACKGROUND, payload, correlation_id, metadata=_marks(prompt))

    async def invoke_agent(
        self,
        prompt: str,
        *,
        agent: str | None = None,
        channel_id: str | None = None,
        session_id: str | None = None,
        correlation_id: str | None = None,
    ) -> AgentResponse:
        """Have the orchestrator, or the agent of that name, answer now, and return its answer. Nobody is notified.

        In the handler of an untrusted event all of a prompt counts as text from outside and is marked as such, unless
        ``prompt`` made it.
        """
        return await self._host.invoke_agent(
            prompt,
            caller=self.extension_id,
            agent=agent,
            channel_id=channel_id,
            session_id=session_id,
            correlation_id=correlation_id,
        )

    def prompt(self, template: str, event: Event) -> str:
        """Return a prompt made from an event: ``{{ payload.subject }}`` is filled in, marked if it is from outside."""
        return render(template, event)

    def tools(self) -> tuple[ToolSpec, ...]:
        """Return the tools that all extensions provide."""
        return self._host.tools.specs()

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool, after a human allowed it where it asks for that; raises ``NotFound``, ``ToolDenied``."""
        return await self._host.call_tool(name, arguments, caller=self.extension_id)

    # --- secrets and other extensions ---

    async def request_secret(self, secret_id: str, prompt: str, target_channel: str) -> Receipt:
        """Have a channel ask the user for a secret. Its id is the handle; the value is read with ``secret``."""
        payload = {"secret_id": secret_id, "prompt": prompt, "target_channel": target_channel}
        return await self.emit(SystemTopics.SECURE_INPUT_REQUEST, payload)

    async def secret(self, secret_id: str) -> str:
        """Return a secret from the vault; raises ``NotFound``, ``Forbidden``. Never emit, log or prompt with it."""
        return await self._host.vault.get(secret_id, reader=self.extension_id)

    @property
    def schedules(self) -> Schedules:
        """What happens at set times, as the scheduler extension keeps and fires it."""
        return self._host.schedules

    def extension(self, extension_id: str) -> Any:
        """Return the running instance of an extension this one depends on.

        Ask each time: a reload replaces it. Raises ``Forbidden`` for one that ``depends_on`` does not name, and
        ``NotFound`` with the reason when it does not run.
        """
        if extension_id not in self._manifest.depends_on:
            message = f"{self.extension_id} does not depend on {extension_id}"
            raise Forbidden(message, hint="name it under depends_on")
        return self._host.instance(extension_id)

    # --- for the kernel ---

    @property
    def subscriptions(self) -> tuple[tuple[str, str], ...]:
        """The (pattern, subscriber id) pairs it has handlers for."""
        return tuple(self._subscriptions)

    def open(self) -> None:
        """Subscribe what waited for the end of ``initialize``: all at once, so that no event passes one of them by."""
        waiting, self._waiting = self._waiting or [], None
        for _, subscribe in waiting:
            subscribe()

    def close(self) -> None:
        """Take no more subscriptions and remove the hooks; the kernel detaches the handlers."""
        self._closed, self._waiting = True, None
        for event, hook in self._hooks:
            self._host.router.unsubscribe(event, hook)
        self._hooks.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise Conflict(f"{self.extension_id} was stopped; this context is of its past")

    def _channel(self) -> str:
        channel = self._host.channel_of(self.extension_id)
        if channel is None:
            message = f"{self.extension_id} is no channel"
            raise Forbidden(message, hint="a channel has channel_id and send")
        return channel


def session_key(session_id: str) -> str:
    """Return the key of what belongs to a session: it is handled one after the other."""
    return f"session:{session_id}"[:200]


def _marks(prompt: str) -> dict[str, Any] | None:
    return {MARKED: True} if isinstance(prompt, MarkedPrompt) else None


def _without_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
