"""What passes between a lane and its runner: an event to be handled, and what that came to."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from postbus.delivery.lane import Lane
    from postbus.delivery.table import Row
    from postbus.model import Draft, Event

__all__ = ["LaneSettings", "Outcome", "Staff", "Verdict", "Work"]


class Verdict(StrEnum):
    """What a handler's run came to."""

    DONE = "done"
    RETRY = "retry"
    DEAD = "dead"


class Outcome(NamedTuple):
    """A verdict with what goes with it: the error, how long to wait, or where the dead letter goes."""

    verdict: Verdict
    error: str | None = None
    delay_s: float = 0.0
    dead: tuple[str, Draft] | None = None


class Work:
    """One event to be handled, its attempt, and its row if it has one.

    ``behind``: it waits for another event of its key. ``started``: its handler was called for this attempt.
    ``since_s``: when that was, or when it became the first that is not over.
    """

    __slots__ = ("attempt", "behind", "event", "lane", "row", "since_s", "started")

    def __init__(self, lane: Lane, event: Event, attempt: int, row: Row | None) -> None:
        self.lane = lane
        self.event = event
        self.attempt = attempt
        self.row = row
        self.since_s: float | None = None
        self.behind = False
        self.started = False


class LaneSettings(NamedTuple):
    """How a lane works."""

    batch: int
    window: int
    strict: bool
    lease_s: float
    poll_s: float
    backlog_max: int | None = None


class Staff(NamedTuple):
    """What a lane asks of its runner.

    ``wants_topic`` and ``wants`` say which events are for it, ``make_ready`` takes one to be handled, ``crashed``
    judges one that was in flight when a process died, ``revive`` finds the event of a row, and ``overflowed`` makes the
    dead letters, by offset, of those that nobody will start.
    """

    wants_topic: Callable[[str], bool]
    wants: Callable[[Event], bool]
    make_ready: Callable[[Work], None]
    crashed: Callable[[Work], Outcome | None]
    revive: Callable[[Row], Awaitable[Event | None]]
    overflowed: Callable[[list[Event]], dict[int, tuple[str, Draft]]]
