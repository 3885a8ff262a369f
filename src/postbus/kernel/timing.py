"""When a schedule fires: an instant, an interval from an anchor, or cron in a zone; and the records of schedules."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from postbus import strict_json
from postbus.envelope import draft, parse_instant
from postbus.kernel.topics import RECORDS, SystemTopics, check_payload
from postbus.model import Forbidden, Invalid, LimitExceeded, instant
from postbus.schedule import schedule

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ScheduleEntry", "Timing", "check_fire", "make_timing", "shown"]

SOURCE = "scheduler"
SECONDS_MAX = 10 * 366 * 86_400.0
LATE_S = 60.0
# Of the system's topics, these may be fired: nobody schedules what a user says or allows.
FIRED = {SystemTopics.USER_NOTIFY, SystemTopics.AGENT_TASK, SystemTopics.AGENT_BACKGROUND}


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """When: exactly one of ``at_us``, ``every_us`` and ``cron``. ``until_us`` is the last instant it may fire at."""

    at_us: int | None = None
    every_us: int | None = None
    cron: str | None = None
    zone: str = "UTC"
    anchor_us: int
    until_us: int | None = None

    @property
    def recurring(self) -> bool:
        """Whether it fires more than once."""
        return self.at_us is None

    def after(self, after_us: int) -> int | None:
        """Return the first fire time after an instant; None when there is none."""
        if self.at_us is not None:
            return self.at_us if self.at_us > after_us else None
        found = self._rule()(after_us)
        return None if found is None or (self.until_us is not None and found > self.until_us) else found

    def late_us(self) -> int:
        """Return how late a recurring fire may be and still be one."""
        late_us = round(LATE_S * 1e6)
        return late_us if self.every_us is None else min(late_us, self.every_us)

    def _rule(self) -> Callable[[int], int | None]:
        every_s = None if self.every_us is None else self.every_us / 1e6
        return schedule(None, every_s, self.cron, self.zone, self.anchor_us)


class ScheduleEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule and how far it has come. ``skipped`` counts fire times that passed while nothing ran."""

    id: str
    timing: Timing
    topic: str
    payload: bytes
    trust: str
    made_by: str
    correlation_id: str | None
    user_id: str | None
    session_id: str | None
    state: str
    error: str | None
    next_us: int | None
    last_us: int | None
    fires: int
    skipped: int
    created_at_us: int

    def described(self) -> dict[str, Any]:
        """Return it as a JSON value; what it does not have is left out."""
        timing = self.timing
        facts = {
            "schedule_id": self.id,
            "state": self.state,
            "next_fire_at": self.next_us if self.state == "active" else None,
            "last_fire_at": self.last_us,
            "at": timing.at_us,
            "every_seconds": None if timing.every_us is None else timing.every_us / 1e6,
            "cron": timing.cron,
            "zone": timing.zone if timing.cron is not None else None,
            "until": timing.until_us,
            "topic": self.topic,
            "payload": strict_json.parse(self.payload),
            "fires": self.fires,
            "skipped": self.skipped,
            "error": self.error,
        }
        instants = {"next_fire_at", "last_fire_at", "at", "until"}
        return {name: shown(value) if name in instants else value for name, value in facts.items() if value is not None}


def make_timing(
    now_us: int,
    *,
    at: str | None = None,
    delay_s: float | None = None,
    every_s: float | None = None,
    cron: str | None = None,
    zone: str = "UTC",
    until: str | None = None,
) -> Timing:
    """Return the timing that exactly one of ``at``, ``delay_s``, ``every_s`` and ``cron`` describes, or refuse it."""
    if sum(one is not None for one in (at, delay_s, every_s, cron)) != 1:
        raise Invalid("a schedule has exactly one of an instant, a delay, an interval and cron")
    until_us = None if until is None else parse_instant(until)
    if until_us is not None and (at is not None or delay_s is not None):
        raise Invalid("what happens once has no until")
    if delay_s is not None:
        at_us = now_us + round(_seconds(delay_s, "a delay", least=0) * 1e6)
        return Timing(at_us=at_us, anchor_us=now_us)
    if at is not None:
        at_us = parse_instant(at)
        if at_us <= now_us:
            raise Invalid(f"{at} has passed: it is {shown(now_us)} now")
        return Timing(at_us=at_us, anchor_us=now_us)
    every_us = None if every_s is None else round(_seconds(every_s, "an interval", least=1) * 1e6)
    timing = Timing(every_us=every_us, cron=cron, zone=zone, anchor_us=now_us, until_us=until_us)
    if timing.after(now_us) is None:
        raise Invalid(f"this never comes before {until}" if until is not None else "this never comes")
    return timing


def check_fire(topic: str, payload: Any) -> bytes:
    """Return the payload of what a schedule publishes as JSON, or refuse it."""
    if topic in RECORDS and topic not in FIRED:
        message = f"{topic} cannot be scheduled"
        raise Forbidden(message, hint=f"of the system's topics, there are {', '.join(sorted(FIRED))}")
    if not isinstance(payload, dict):
        raise Invalid(f"the payload of a schedule is an object, not {type(payload).__name__}")
    check_payload(topic, payload)
    return draft(topic, SOURCE, strict_json.encode(payload)).payload_json


def shown(at_us: int) -> str:
    """Return an instant as text."""
    return f"{instant(at_us):%Y-%m-%dT%H:%M:%S.%fZ}".replace(".000000Z", "Z")


def _seconds(value: object, what: str, *, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise Invalid(f"{what} is a number of seconds, at least {least:g}, not {value!r}")
    if value > SECONDS_MAX:
        raise LimitExceeded(f"{what} is at most {SECONDS_MAX:.0f} seconds, not {value:g}")
    return float(value)
