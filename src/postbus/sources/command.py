"""The kind ``command``: runs a program now and then and takes its lines of JSON as events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from postbus.model import Invalid, instant
from postbus.outside import run_program
from postbus.sources.contract import Common, Polled
from postbus.sources.lines import event_of

if TYPE_CHECKING:
    from postbus.clock import Clock
    from postbus.model import Source

__all__ = ["CommandSettings", "CommandSource"]

TOPIC = "command.line"
ARGUMENTS_MAX = 64


class CommandSettings(Common, frozen=True, kw_only=True):
    """``argv``: the program and its arguments; no shell reads them. ``id_field``: where in a line its own id is."""

    argv: tuple[str, ...]
    id_field: str | None = None
    interval_s: Annotated[float, msgspec.Meta(ge=1)] = 60.0
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 30.0
    cwd: str | None = None


class CommandSource:
    """Each run that ended is taken once. The program sees when it ran before as ``POSTBUS_SINCE`` (RFC 3339)."""

    def __init__(self, source: Source, settings: CommandSettings, clock: Clock) -> None:
        self._source = source
        self._settings = settings
        self._clock = clock
        self.interval_s = settings.interval_s

    @staticmethod
    def check(settings: CommandSettings) -> None:
        """Refuse settings that could never work."""
        if not 1 <= len(settings.argv) <= ARGUMENTS_MAX or not settings.argv[0]:
            raise Invalid(f"argv names a program and up to {ARGUMENTS_MAX - 1} arguments")
        if any("\0" in word for word in settings.argv):
            raise Invalid("argv holds a NUL character")

    async def poll(self, checkpoint: Any) -> Polled:
        """See ``Poller.poll``; what a failing program printed counts too, and so does its failure."""
        settings, before = self._settings, checkpoint or {"run": 0}
        run, began = before["run"] + 1, instant(self._clock.now_us()).isoformat()
        ended = await run_program(
            settings.argv,
            timeout_s=settings.timeout_s,
            cwd=settings.cwd,
            environment={"POSTBUS_SINCE": before["since"]} if "since" in before else None,
        )
        drafts = []
        for number, line in enumerate(ended.out.split(b"\n")):
            name = f"{self._source.created_at_us}.{run}:{number}"
            made = event_of(self._source, settings, TOPIC, line, name, settings.id_field)
            drafts += [] if made is None else [made]
        problem = None
        if ended.code:
            why = ended.err.rsplit("\n", 1)[-1]
            problem = f"{settings.argv[0]} ended with exit code {ended.code}{': ' + why if why else ''}"
        return Polled(drafts=drafts, checkpoint={"run": run, "since": began}, problem=problem)
