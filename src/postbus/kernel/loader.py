"""The life of extensions: discover, load, initialise, wire, start, stop, and reload one while the others run.

What goes wrong with one extension is its own: it is in error with the reason, so is what depends on it, and the others
go on.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import Context
from typing import TYPE_CHECKING, Any

from postbus.kernel.context import ExtensionContext
from postbus.kernel.contract import (
    AgentDescription,
    AgentProvider,
    ChannelProvider,
    ExtensionState,
    Health,
    ServiceProvider,
    ToolProvider,
)
from postbus.kernel.discovery import check_dependencies, discover, load_code, load_entries
from postbus.kernel.entry import Entry
from postbus.kernel.entrypoint import describe_error, forget_code
from postbus.kernel.graph import arrange, dependents
from postbus.kernel.manifest import read_manifest
from postbus.kernel.topics import SystemTopics
from postbus.kernel.wiring import wire
from postbus.model import Conflict, Invalid, NotFound, PostbusError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from postbus.kernel.contract import ExtensionStatus
    from postbus.kernel.discovery import AgentFactory
    from postbus.kernel.kernel import Kernel

__all__ = ["Loader"]

logger = logging.getLogger("postbus.kernel")

HEALTH_S_MAX = 5.0


class Loader:
    """The extensions of one kernel."""

    def __init__(self, kernel: Kernel, folders: Sequence[Path], factory: AgentFactory) -> None:
        self._kernel = kernel
        self._folders = list(folders)
        self._factory = factory
        self._order: list[Entry] = []
        self._reloading = asyncio.Lock()
        self.entries: dict[str, Entry] = {}

    # --- the pipeline ---

    def discover(self) -> None:
        """Find the extensions and read their manifests."""
        self.entries = discover(self._folders, self._kernel.settings)

    def load_all(self) -> None:
        """Load the code of all that can run."""
        self._order = load_entries(self.entries, self._kernel.settings, self._factory)

    async def initialize_all(self) -> None:
        """Give each its context, in the order of the dependencies."""
        for entry in self._order:
            if check_dependencies(entry, self.entries):
                await self._try(entry, "initialize", self._initialize)

    async def detect_and_wire_all(self) -> None:
        """Find out what each provides, and make it known."""
        for entry in self._order:
            if check_dependencies(entry, self.entries):
                await self._try(entry, "wire", self._detect)

    async def wire_event_subscriptions(self) -> None:
        """Subscribe what the manifests declare."""
        for entry in self._order:
            if check_dependencies(entry, self.entries):
                await self._try(entry, "wire", self._wire)

    async def start(self) -> None:
        """Start each, in the order of the dependencies, and tell of those that failed."""
        for entry in self._order:
            if check_dependencies(entry, self.entries):
                await self._try(entry, "start", self._start)
        for entry in self.entries.values():
            if entry.state is ExtensionState.ERROR:
                await self._release(entry)
                await self._tell(entry)

    async def stop(self) -> None:
        """Stop each, in the reverse order."""
        for entry in reversed(self._order):
            await self._release(entry)
            if entry.alive:
                entry.state = ExtensionState.STOPPED

    # --- the steps ---

    async def _try(self, entry: Entry, stage: str, step: Any) -> None:
        """Take a step; what goes wrong is the extension's own."""
        try:
            await step(entry)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is somebody else's code; the reason is kept
            entry.mark_failed(stage, error)
            _log_failure(entry, error)
            await self._release(entry)

    async def _initialize(self, entry: Entry) -> None:
        assert entry.file is not None  # noqa: S101 - only what was loaded comes here
        manifest, settings = entry.file.manifest, self._kernel.settings
        config = {**manifest.config, **settings.extensions.get(entry.id, {})}
        data_dir = self._kernel.state_dir / "extensions" / entry.id
        entry.context = ExtensionContext(self._kernel, entry.file, config, data_dir)
        entry.generation += 1
        await self._call(entry.instance, "initialize", entry.context)
        entry.state = ExtensionState.INITIALIZED

    async def _detect(self, entry: Entry) -> None:
        assert entry.file is not None  # noqa: S101 - as above
        instance, manifest = entry.instance, entry.file.manifest
        if isinstance(instance, ChannelProvider):
            self._kernel.router.attach(instance)
            entry.channel_id = instance.channel_id
        if isinstance(instance, ToolProvider):
            entry.tools = self._kernel.tools.attach(entry.id, instance)
        if isinstance(instance, AgentProvider):
            agent = manifest.agent
            description = AgentDescription(
                id=entry.id,
                name=manifest.name or entry.id,
                description=(agent.description if agent is not None else "") or manifest.description,
                mode="tool" if agent is None else agent.integration_mode,
            )
            self._kernel.agents.attach(description, instance)

    async def _wire(self, entry: Entry) -> None:
        assert entry.context is not None  # noqa: S101 - as above
        entry.context.open()
        wire(self._kernel, entry, self.entries.values())

    async def _start(self, entry: Entry) -> None:
        await self._call(entry.instance, "start")
        entry.state, entry.started = ExtensionState.RUNNING, True
        if isinstance(entry.instance, ServiceProvider):
            entry.background = asyncio.get_running_loop().create_task(self._run(entry, entry.instance))

    async def _run(self, entry: Entry, service: ServiceProvider) -> None:
        try:
            await service.run_background()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is somebody else's code; the reason is kept
            entry.background = None
            await self.fail(entry.id, "background", error)

    # --- the end of one ---

    async def fail(self, extension_id: str, stage: str, error: BaseException) -> None:
        """Put a running extension, and what depends on it, in error; tell of it."""
        entry = self.entries[extension_id]
        entry.mark_failed(stage, error)
        _log_failure(entry, error)
        await self._take_along(entry)
        self._kernel.write_report()

    async def _take_along(self, entry: Entry) -> None:
        """Put what depends on an extension in error with it, and tell of them all."""
        fallen = [other for other in self._order if other.alive and not check_dependencies(other, self.entries)]
        for other in (*reversed(fallen), entry):
            await self._release(other)
            await self._tell(other)

    async def _release(self, entry: Entry) -> None:
        """Let the handlers of an extension end, take away all it has in the kernel, stop and destroy it. Idempotent."""
        context, entry.context = entry.context, None
        if context is not None:
            names = {subscriber for _, subscriber in context.subscriptions}
            context.close()
            await self._kernel.detach(names)
            await self._detach(entry)
        package, entry.package = entry.package, ""
        if package:
            forget_code(package)

    async def _detach(self, entry: Entry) -> None:
        instance, kernel = entry.instance, self._kernel
        started, entry.started = entry.started, False
        if entry.background is not None:
            entry.background.cancel()
            await asyncio.gather(entry.background, return_exceptions=True)
            entry.background = None
        if entry.channel_id is not None:
            kernel.router.detach(entry.channel_id)
            entry.channel_id = None
        kernel.tools.detach(entry.id)
        kernel.agents.detach(entry.id)
        if not await kernel.usage.idle(entry.id, kernel.settings.event_bus.stop_grace_s):
            logger.warning("%s still works for somebody; it is stopped nevertheless", entry.id)
        for step in ("stop", "destroy") if started else ("destroy",):
            try:
                await self._call(instance, step)
            except (Exception, SystemExit):
                logger.exception("extension %s failed to %s", entry.id, step)

    async def _tell(self, entry: Entry) -> None:
        """Publish that an extension is in error, once."""
        if entry.told:
            return
        entry.told = True
        payload = {"extension_id": entry.id, "stage": entry.stage, "reason": entry.reason}
        try:
            await self._kernel.bus.publish(SystemTopics.EXTENSION_ERROR, "kernel", payload)
        except PostbusError as error:
            logger.warning("the error of %s could not be published: %s", entry.id, error.message)

    # --- reload ---

    async def reload(self, extension_id: str) -> ExtensionStatus:
        """Load an extension anew: its manifest, its code, its handlers. Others go on, and its place in the log stays.

        When the new manifest or code cannot be loaded the old one goes on and this raises: ``NotFound``, ``Invalid``,
        ``Conflict``. When the new one cannot be initialised or started it is in error, with what depends on it; events
        wait for the next reload, and so does what depends on it.
        """
        # What is started now belongs to nothing that is being handled.
        work = self._reload(extension_id)
        return await asyncio.get_running_loop().create_task(work, context=Context())

    async def _reload(self, extension_id: str) -> ExtensionStatus:
        async with self._reloading:
            with self._kernel.usage.renewing(extension_id):
                status = await self._renew(extension_id)
            if status.state is ExtensionState.RUNNING:
                await self._revive(extension_id)
            self._kernel.write_report()
            return status

    async def _renew(self, extension_id: str) -> ExtensionStatus:
        fresh = await self._prepare(extension_id)
        old = self.entries.get(extension_id)
        if old is not None:
            await self._release(old)
            fresh.generation = old.generation
        mended = [name for name, entry in self.entries.items() if entry.file is None and entry.folder == fresh.folder]
        for name in mended:  # its manifest could not be read, so it was known by its folder
            del self.entries[name]
        self.entries[extension_id] = fresh
        self._order = self._ordered()
        steps = (
            ("initialize", self._initialize),
            ("wire", self._detect),
            ("wire", self._wire),
            ("start", self._start),
        )
        for stage, step in steps:
            if fresh.alive:
                await self._try(fresh, stage, step)
        if not fresh.alive:
            await self._take_along(fresh)
        return fresh.status()

    async def _revive(self, extension_id: str) -> None:
        """Load what was in error only because this extension was."""
        waiting = dependents(extension_id, {name: entry.depends_on for name, entry in self.entries.items()})
        for name in [entry.id for entry in self._order if entry.id in waiting]:
            entry = self.entries[name]
            if entry.state is ExtensionState.ERROR and entry.stage == "depends_on":
                try:
                    await self._renew(name)
                except PostbusError as error:
                    logger.warning("%s stays in error: %s", name, error.message)

    async def _prepare(self, extension_id: str) -> Entry:
        known = self.entries.get(extension_id)
        found = discover(self._folders, self._kernel.settings).get(extension_id) if known is None else None
        folder = known.folder if known is not None else found.folder if found is not None else None
        if extension_id in self._kernel.settings.kernel.disabled:
            raise Conflict(f"the settings disable {extension_id}")
        if folder is None:
            raise NotFound(f"there is no extension {extension_id}", hint="`postbus extensions` lists them")
        file = read_manifest(folder / "manifest.yaml")
        if file.manifest.id != extension_id:
            now = file.manifest.id
            raise Conflict(f"{folder} is now {now}, not {extension_id}", hint=f"reload {now}")
        fresh = Entry(extension_id, folder, file)
        needs = {name: entry.depends_on for name, entry in self.entries.items()} | {extension_id: fresh.depends_on}
        reason = arrange(needs)[1].get(extension_id)
        if reason is not None:
            raise file.refuse(reason, "depends_on")
        if not check_dependencies(fresh, self.entries):
            raise Conflict(fresh.reason)
        try:
            fresh.instance, fresh.package = load_code(file, self._kernel.settings, self._factory)
        except PostbusError:
            raise
        except (Exception, SystemExit) as error:
            fresh.mark_failed("load", error)
            where = f"{fresh.where}: " if fresh.where else ""
            raise Invalid(f"{where}{extension_id} cannot be loaded: {fresh.reason}") from error
        fresh.state = ExtensionState.LOADED
        return fresh

    def _ordered(self) -> list[Entry]:
        names, _ = arrange({name: entry.depends_on for name, entry in self.entries.items()})
        return [self.entries[name] for name in names]

    async def _call(self, instance: Any, name: str, *arguments: Any, limit_s: float | None = None) -> Any:
        """Call a method of an extension, if it has it; raises ``TimeoutError`` when it does not come back."""
        method = getattr(instance, name, None)
        if method is None:
            return None
        limit_s = limit_s or self._kernel.settings.kernel.step_timeout_s
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await method(*arguments)
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"{name} took longer than {limit_s:g}s") from None
            raise

    # --- looking ---

    async def check_health(self) -> None:
        """Ask each running extension how it is."""
        for entry in self._order:
            if entry.state is not ExtensionState.RUNNING:
                continue
            try:
                said = await self._call(entry.instance, "health", limit_s=HEALTH_S_MAX)
                entry.health = said if isinstance(said, Health) else Health(ok=True)
            except Exception as error:  # noqa: BLE001 - it is somebody else's code; the reason is kept
                entry.health = Health(ok=False, detail=describe_error(error))


def _log_failure(entry: Entry, error: BaseException) -> None:
    """Say what failed; a refusal's sentence says it all, anything else is shown with its way."""
    where = f" ({entry.where})" if entry.where else ""
    shown = None if isinstance(error, PostbusError) else error
    logger.error("extension %s failed to %s: %s%s", entry.id, entry.stage, entry.reason, where, exc_info=shown)
