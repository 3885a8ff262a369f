"""The kind ``timer``: an event at an instant, every so often, or by a cron schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from postbus.model import Draft, instant
from postbus.schedule import schedule
from postbus.sources.contract import Common, Polled, made

if TYPE_CHECKING:
    from postbus.clock import Clock
    from postbus.model import Source

__all__ = ["TimerSettings", "TimerSource"]

TOPIC = "timer.fired"
LATE_S = 60.0


class TimerSettings(Common, frozen=True, kw_only=True):
    """Exactly one of ``at`` (RFC 3339), ``every_s`` and ``cron`` (five fields, in ``zone``), and what to say then."""

    at: str | None = None
    every_s: float | None = None
    cron: str | None = None
    zone: str = "UTC"
    payload: Any = msgspec.field(default_factory=dict)
    trusted: bool = True


class TimerSource:
    """Fires once per fire time, whoever asks how often. A one-shot that is overdue fires once.

    Recurring fire times that were missed by more than a minute, because nothing ran, are passed over.
    """

    interval_s = 3600.0

    def __init__(self, source: Source, settings: TimerSettings, clock: Clock) -> None:
        self._source = source
        self._settings = settings
        self._clock = clock
        self._next = _schedule(settings, source.created_at_us)

    @staticmethod
    def check(settings: TimerSettings) -> None:
        """Refuse settings that could never work."""
        _schedule(settings, 0)

    async def poll(self, checkpoint: Any) -> Polled:
        """See ``Poller.poll``."""
        now_us, settings = self._clock.now_us(), self._settings
        after_us = self._source.created_at_us if checkpoint is None else int(checkpoint["through_us"])
        if settings.at is not None:
            after_us = -1 if checkpoint is None else after_us
        else:
            late_s = LATE_S if settings.every_s is None else min(LATE_S, settings.every_s)
            after_us = max(after_us, now_us - round(late_s * 1e6))
        drafts: list[Draft] = []
        while (due_us := self._next(after_us)) is not None and due_us <= now_us:
            drafts.append(self._fired(due_us))
            after_us = due_us
        through_us = after_us if drafts or checkpoint is not None else self._source.created_at_us
        kept = checkpoint if settings.at is not None and not drafts else {"through_us": through_us}
        return Polled(drafts=drafts, checkpoint=kept, due_at_us=due_us)

    def _fired(self, due_us: int) -> Draft:
        due = f"{instant(due_us):%Y-%m-%dT%H:%M:%S.%fZ}"
        settings = self._settings
        name = settings.at or settings.cron or f"every {settings.every_s:g} s"
        metadata = {"due": due, "schedule": name}
        key = f"{self._source.created_at_us}:{due}"
        return made(self._source, settings, TOPIC, settings.payload, native_id=key, metadata=metadata, occurred_at=due)


def _schedule(settings: TimerSettings, anchor_us: int) -> Any:
    return schedule(settings.at, settings.every_s, settings.cron, settings.zone, anchor_us)
