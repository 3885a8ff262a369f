"""``Kernel``: extensions on a bus. Joins the loader, the router, the agents, the tools and the system's own parts."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from postbus.kernel.agents import Agents, Invocation
from postbus.kernel.contract import AgentProvider, ExtensionState, KernelReport, ToolCall
from postbus.kernel.discovery import discover, load_entries
from postbus.kernel.entrypoint import forget_code
from postbus.kernel.identity import ambient_correlation, ambient_trust, new_work, work_id
from postbus.kernel.loader import Loader
from postbus.kernel.parts import Parts
from postbus.kernel.router import MessageRouter
from postbus.kernel.settings import Settings
from postbus.kernel.status import write_report
from postbus.kernel.templates import MarkedPrompt, mark
from postbus.kernel.tools import Tools
from postbus.kernel.topics import SystemTopics, read_payload
from postbus.kernel.trace import Trace
from postbus.kernel.usage import Usage
from postbus.model import Conflict, Invalid, NotFound, PostbusError, Reject, StorageError, Trust

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from types import TracebackType

    from postbus.bus import Context, EventBus
    from postbus.kernel.contract import AgentResponse, ApprovalGate, ExtensionStatus, SecretVault
    from postbus.kernel.discovery import AgentFactory
    from postbus.kernel.manifest import ManifestFile
    from postbus.kernel.schedules import Schedules
    from postbus.kernel.topics import ExtensionReload
    from postbus.model import Event, RetryPolicy

__all__ = ["Kernel", "inspect_extensions"]

logger = logging.getLogger("postbus.kernel")

REPORT_S = 30.0


class Kernel:
    """Extensions, wired onto a bus. ``async with kernel:`` starts them and stops them at the end.

    The bus is recovered and started with the kernel unless it runs already, and then stopped with it.
    """

    def __init__(
        self,
        bus: EventBus,
        extensions_dir: str | Path | Sequence[str | Path] | None = None,
        settings: Settings | None = None,
        *,
        agent_factory: AgentFactory | None = None,
    ) -> None:
        self.bus = bus
        self.clock = bus.clock
        self.settings = settings or Settings()
        self.router = MessageRouter(bus, self.settings.kernel.default_channel)
        self.trace = Trace(bus)
        self.usage = Usage(self.clock)
        self.tools = Tools(self.trace, self.usage, lambda: self.approvals)
        self.agents = Agents(
            self.clock,
            self.router,
            self.trace,
            self.usage,
            self.tools.specs,
            self.tools.call,
            self.settings.kernel.orchestrator,
            self.settings.kernel.agent_timeout_s,
        )
        self.loader = Loader(self, _folders(extensions_dir), agent_factory or default_agent)
        self.parts = Parts(self)
        self._state_dir: Path | None = None
        self._handled: set[str] = set()
        self._owns_bus = False
        self._reporting: asyncio.Task[None] | None = None
        self._started = self._up = False

    # --- life ---

    @property
    def state_dir(self) -> Path:
        """The kernel's folder beside the store; raises ``StorageError`` before the start."""
        if self._state_dir is None:
            raise StorageError("the kernel has not started")
        return self._state_dir

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        await self.stop()

    async def start(self) -> None:
        """Load and start the extensions; those that fail are in error, the kernel runs. Once per kernel.

        Raises ``Invalid`` for a folder or a shipped extension that is not there, and ``Conflict`` when called again.
        """
        if self._started:
            raise Conflict("this kernel was started before", hint="make a new one")
        self._started = True
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        log = await self.bus.open()
        self._state_dir = Path(log.store.folder.path) / "kernel"
        self._owns_bus = not self.bus._running  # noqa: SLF001 - whoever starts the bus stops it
        self.bus.middleware(self._around)
        loader, parts = self.loader, self.parts.all()
        loader.discover()
        loader.load_all()
        await loader.initialize_all()
        await loader.detect_and_wire_all()
        await loader.wire_event_subscriptions()
        reload_s = 10 * self.settings.kernel.step_timeout_s  # four steps of each, and those who depend on it
        self.handle(SystemTopics.EXTENSION_RELOAD, self._on_reload, "reload", concurrency=1, timeout=reload_s)
        for part in parts:
            part.wire()
        if self._owns_bus:
            await self.bus.recover()
            await self.bus.start()
        await loader.start()
        for part in parts:
            await part.start()
        await loader.check_health()
        self._up = True
        self.write_report()
        self._reporting = asyncio.get_running_loop().create_task(self._report_on())

    async def stop(self) -> None:
        """Stop the system's handlers, the extensions in the reverse order, and the bus if it is the kernel's own."""
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)
            self._reporting = None
        leaving = self._leave(self._handled)  # nothing new begins; what runs may need an extension to come to its end
        self._handled.clear()
        for part in reversed(self.parts.all()):  # who waits for a human is interrupted
            await part.stop()
        await self.loader.stop()
        await asyncio.gather(*leaving)
        if self._up:
            self._up = False
            self.write_report()
        if self._owns_bus:
            self._owns_bus = False
            await self.bus.stop()

    async def reload(self, extension_id: str) -> ExtensionStatus:
        """Load one extension anew while the others run; see ``Loader.reload``."""
        if not self._up:
            raise Conflict("the kernel does not run")
        return await self.loader.reload(extension_id)

    async def _on_reload(self, event: Event, asked: ExtensionReload) -> None:  # noqa: ARG002 - the shape of a handler
        """Reload what somebody asked for; what goes wrong is told, and asked for again by whoever mended it."""
        try:
            await self.reload(asked.extension_id)
        except PostbusError as error:
            logger.warning("%s was not reloaded: %s", asked.extension_id, error.message)
            told = {"extension_id": asked.extension_id, "stage": "reload", "reason": error.message}
            await self.bus.publish(SystemTopics.EXTENSION_ERROR, "kernel", told)

    async def fail(self, extension_id: str, stage: str, error: BaseException) -> None:
        """Put a running extension, and what depends on it, in error."""
        await self.loader.fail(extension_id, stage, error)

    # --- handlers ---

    def handle(
        self,
        topic: str,
        handler: Callable[[Event, Any], Awaitable[None]],
        name: str,
        *,
        retry: RetryPolicy | None = None,
        timeout: float = 300.0,
        concurrency: int = 10,
    ) -> None:
        """Subscribe a handler of a system topic under the id ``kernel.<name>``. It gets the event and its record.

        A payload that is not of its topic's shape becomes a dead letter at once.
        """

        async def handle(event: Event) -> None:
            try:
                payload = read_payload(event.topic, event.payload)
            except Invalid as error:
                raise Reject(error.message) from None
            await handler(event, payload)

        subscriber = f"kernel.{name}"
        self.bus.subscribe(topic, handle, subscriber, retry=retry, timeout=timeout, concurrency=concurrency)
        self._handled.add(subscriber)

    async def _around(self, event: Event, context: Context, call_next: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ARG002 - the shape of a middleware
        """Count the steps a handler takes, so that they have the same ids when it runs again."""
        new_work(context)
        return await call_next()

    async def detach(self, subscribers: Iterable[str]) -> None:
        """Detach all handlers of these subscriptions and wait until those that run have ended.

        They keep their places in the log. A handler that outlasts the grace of the bus is cancelled, to be run again.
        """
        await asyncio.gather(*self._leave(subscribers))

    def _leave(self, subscribers: Iterable[str]) -> list[asyncio.Task[None]]:
        names = sorted({*subscribers})
        for name in names:
            with suppress(NotFound):
                self.bus.unsubscribe(None, name)
        leaving = self.bus._leaving  # noqa: SLF001 - the bus goes on by itself; only a kernel has to wait for it
        return [leaving[name] for name in names if name in leaving]

    # --- agents, tools, extensions ---

    @property
    def vault(self) -> SecretVault:
        """Where secrets are."""
        return self.parts.vault

    @property
    def approvals(self) -> ApprovalGate:
        """Who asks humans."""
        return self.parts.approvals

    @property
    def schedules(self) -> Schedules:
        """What happens at set times."""
        return self.parts.schedules

    async def invoke_agent(
        self,
        prompt: str,
        *,
        caller: str,
        agent: str | None = None,
        channel_id: str | None = None,
        session_id: str | None = None,
        user_id: str | None = None,
        correlation_id: str | None = None,
    ) -> AgentResponse:
        """Have the orchestrator, or the agent of that name, answer; one at a time per session."""
        if not prompt.strip():
            raise Invalid("a prompt is not empty")
        if ambient_trust() is not Trust.TRUSTED and not isinstance(prompt, MarkedPrompt):
            prompt = mark(f"{caller} asks, with text from outside", prompt)
        asked = Invocation(
            task=prompt,
            caller=caller,
            agent=agent,
            channel_id=channel_id,
            session_id=session_id,
            user_id=user_id,
            correlation_id=correlation_id,
        )
        return await self.agents.invoke(asked)

    async def call_tool(self, name: str, arguments: dict[str, Any], *, caller: str) -> Any:
        """Call a tool for an extension."""
        call = ToolCall(
            id=work_id(self.clock),
            name=name,
            arguments=arguments,
            correlation_id=ambient_correlation(self.clock),
            session_id=caller,
            trust=ambient_trust(),
        )
        return await self.tools.call(call)

    def channel_of(self, extension_id: str) -> str | None:
        """Return the channel an extension provides."""
        entry = self.loader.entries.get(extension_id)
        return None if entry is None else entry.channel_id

    def instance(self, extension_id: str) -> Any:
        """Return a running extension; raises ``NotFound`` with the reason when it does not run."""
        entry = self.loader.entries.get(extension_id)
        if entry is None or entry.state not in (ExtensionState.INITIALIZED, ExtensionState.RUNNING):
            reason = "" if entry is None else f": it is {entry.state}{f', {entry.reason}' if entry.reason else ''}"
            raise NotFound(f"extension {extension_id} does not run{reason}")
        return entry.instance

    # --- looking ---

    def report(self) -> KernelReport:
        """Return the state of everything."""
        return KernelReport(
            pid=os.getpid(),
            running=self._up,
            written_at_us=self.clock.now_us(),
            orchestrator=self.agents.orchestrator,
            channels=tuple(self.router.channels),
            extensions=tuple(entry.status() for entry in self.loader.entries.values()),
        )

    def write_report(self) -> None:
        """Put the report where other processes find it; a full disk stops nothing."""
        try:
            write_report(self.state_dir, self.report())
        except OSError as error:
            logger.warning("the report could not be written: %s", error)

    async def _report_on(self) -> None:
        while True:
            await self.clock.sleep(REPORT_S)
            await self.loader.check_health()
            self.write_report()


def inspect_extensions(
    extensions_dir: str | Path | Sequence[str | Path] | None,
    settings: Settings | None = None,
    *,
    agent_factory: AgentFactory | None = None,
) -> KernelReport:
    """Look at extensions without running them: manifests, dependencies, code that can be imported."""
    settings = settings or Settings()
    entries = discover(_folders(extensions_dir), settings)
    load_entries(entries, settings, agent_factory or default_agent)
    statuses = tuple(entry.status() for entry in entries.values())
    for entry in entries.values():
        if entry.package:
            forget_code(entry.package)
    return KernelReport(
        pid=os.getpid(), running=False, written_at_us=0, orchestrator=None, channels=(), extensions=statuses
    )


def default_agent(file: ManifestFile, settings: Settings) -> AgentProvider:
    """Return the agent of a manifest without code: one on the server that the settings name."""
    made: AgentProvider = importlib.import_module("postbus.kernel.openai").make_agent(file, settings)
    return made


def _folders(given: str | Path | Sequence[str | Path] | None) -> list[Path]:
    if given is None:
        return []
    return [Path(given)] if isinstance(given, str | Path) else [Path(one) for one in given]
