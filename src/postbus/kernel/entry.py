"""One extension as the loader knows it: its manifest, its code, and how far it has come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from postbus.kernel.contract import (
    AgentProvider,
    ApprovingChannel,
    ChannelProvider,
    ExtensionState,
    ExtensionStatus,
    SchedulerProvider,
    SecureChannel,
    ServiceProvider,
    StreamingChannel,
    ToolProvider,
)
from postbus.kernel.entrypoint import describe_error, place_of

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

    from postbus.kernel.context import ExtensionContext
    from postbus.kernel.contract import Health
    from postbus.kernel.manifest import ManifestFile

__all__ = ["Entry"]

PROVIDERS = (
    ChannelProvider,
    StreamingChannel,
    SecureChannel,
    ApprovingChannel,
    AgentProvider,
    ToolProvider,
    SchedulerProvider,
    ServiceProvider,
)


class Entry:
    """An extension: what was found, what became of it."""

    def __init__(self, id: str, folder: Path, file: ManifestFile | None = None) -> None:  # noqa: A002 - the word of the model
        self.id = id
        self.folder = folder
        self.file = file
        self.state = ExtensionState.DISCOVERED
        self.stage = ""
        self.reason = ""
        self.where = ""
        self.instance: Any = None
        self.package = ""
        self.context: ExtensionContext | None = None
        self.background: asyncio.Task[None] | None = None
        self.channel_id: str | None = None
        self.tools: tuple[str, ...] = ()
        self.generation = 0
        self.started = False
        self.told = False
        self.health: Health | None = None
        self.warnings: list[str] = []

    @property
    def depends_on(self) -> tuple[str, ...]:
        """Whom it needs."""
        return () if self.file is None else tuple(self.file.manifest.depends_on)

    @property
    def alive(self) -> bool:
        """Whether nothing has gone wrong with it so far, and it is meant to run."""
        return self.state in (
            ExtensionState.DISCOVERED,
            ExtensionState.LOADED,
            ExtensionState.INITIALIZED,
            ExtensionState.RUNNING,
        )

    def mark_failed(self, stage: str, error: BaseException | str) -> None:
        """Remember that it failed, where and why."""
        self.state, self.stage = ExtensionState.ERROR, stage
        self.reason = error if isinstance(error, str) else describe_error(error)
        self.where = "" if isinstance(error, str) else place_of(error, self.folder)

    def provides(self) -> tuple[str, ...]:
        """Return the names of the protocols it fulfils."""
        if self.instance is None:
            return ()
        return tuple(kind.__name__ for kind in PROVIDERS if isinstance(self.instance, kind))

    def status(self) -> ExtensionStatus:
        """Return what is known of it."""
        manifest = None if self.file is None else self.file.manifest
        return ExtensionStatus(
            id=self.id,
            name=(manifest.name if manifest is not None else "") or self.id,
            state=self.state,
            folder=str(self.folder),
            reason=self.reason,
            where=self.where,
            stage=self.stage,
            depends_on=self.depends_on,
            provides=self.provides(),
            tools=self.tools,
            publishes=() if manifest is None else tuple(one.topic for one in manifest.events.publishes),
            subscribes=self._subscribes(),
            generation=self.generation,
            health=self.health,
            warnings=tuple(self.warnings),
        )

    def _subscribes(self) -> tuple[str, ...]:
        declared = () if self.file is None else tuple(one.topic for one in self.file.manifest.events.subscribes)
        live = () if self.context is None else tuple(topic for topic, _ in self.context.subscriptions)
        return tuple(dict.fromkeys((*declared, *live)))
