"""What is known of a target, and what passes between the table of targets and whoever wakes."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from postbus.inbox.targets import Target
    from postbus.inbox.wakes.marks import Mark

__all__ = ["Attempt", "Avoided", "Counters", "Failure", "Sight", "State", "TargetRow", "TargetState"]


class State(enum.StrEnum):
    """What a target is doing. ``sending``, ``leased`` and ``retrying`` end at an instant."""

    IDLE = "idle"
    SENDING = "sending"
    LEASED = "leased"
    RETRYING = "retrying"
    OFFLINE = "offline"
    REMOVED = "removed"
    PULL = "pull"


class Avoided(enum.StrEnum):
    """Why a wake was not made."""

    ACKED = "acked"
    NOTHING_NEW = "nothing_new"
    REMOVED = "removed"
    MIN_UNACKED = "min_unacked"
    COALESCED = "coalesced"


class TargetRow(msgspec.Struct, kw_only=True):
    """The row of one target."""

    place: str
    state: State = State.IDLE
    why: str | None = None
    mark: Mark
    short: int = 0
    failures: int = 0
    activation: str | None = None
    answered: int = 0
    owner: str | None = None
    token: int = 0
    boot: str = ""
    until_us: int = 0
    until_at_us: int = 0


class Sight(NamedTuple):
    """A target as a look at the store found it: how much is new, as far as that matters, and until when it is held."""

    agent_no: int
    target: Target
    state: State
    until_us: int
    news: int


class Attempt(NamedTuple):
    """A wake that is on record and may be made now, by whoever holds its token."""

    activation: str
    token: int
    agent_no: int
    tenant: str
    agent: str
    target: Target
    number: int
    new_item_count: int
    first: int
    last: int
    sequences: tuple[int, ...]
    created_at_us: int


class Failure(NamedTuple):
    """Why a wake did not arrive; a permanent one is not tried again."""

    message: str
    permanent: bool = False
    retry_after_s: float = 0.0


class TargetState(msgspec.Struct, frozen=True, kw_only=True):
    """What an owner sees of a target. ``until_at_us``: when its lease or its wait for another try ends."""

    target: str
    kind: str
    state: State
    new_items: int
    failures: int = 0
    why: str | None = None
    until_at_us: int | None = None


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What a target has cost and saved.

    ``events``: matches of subscriptions behind the items; ``items``: what was announced, or acked before it had to be;
    ``wakes``: those that arrived; ``failures``: those that did not; ``avoided``: wakes not made, by reason.
    """

    events: int = 0
    items: int = 0
    wakes: int = 0
    failures: int = 0
    avoided: dict[str, int] = {}
