"""Subscriptions that stand at one place of a partition: read once, matched together, moved together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from postbus.bus.registry import whole
from postbus.filters import Filter, FilterIndex, View, compile_filter
from postbus.inbox.door import Match, Move

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.inbox.agents import InboxSubscription
    from postbus.model import Event

__all__ = ["Cohort", "Member", "match_one", "resource_of"]


REASONS_MAX = 1_000


class Member:
    """A subscription with its compiled filters and the number of its agent."""

    __slots__ = ("_reasons", "agent_no", "filter", "subscription", "terminal")

    def __init__(self, subscription: InboxSubscription, agent_no: int) -> None:
        self.subscription = subscription
        self.agent_no = agent_no
        self.filter = compile_filter(subscription.filter)
        self._reasons: dict[str, str] = {}
        ending = subscription.cleanup.on_terminal if subscription.cleanup is not None else None
        self.terminal: Filter | None = compile_filter(ending) if ending is not None else None

    def reason(self, topic: str) -> str:
        """Return why an event of this topic is for the agent."""
        known = self._reasons.get(topic)
        if known is None:
            if len(self._reasons) >= REASONS_MAX:
                self._reasons.clear()
            known = self._reasons[topic] = _reason(self.subscription, topic)
        return known


class Cohort:
    """Members at ``offset``. ``saved`` is where each one's cursor stands on disk; it follows when there is a reason."""

    def __init__(self, stream: str, offset: int) -> None:
        self.stream = stream
        self.offset = offset
        self.unsaved = 0
        self.saved: dict[str, int] = {}
        self.members: dict[str, Member] = {}
        self._index: FilterIndex[str] = FilterIndex()

    def add(self, member: Member, saved: int) -> None:
        """Take a member in; its cursor on disk is at ``saved``."""
        name = member.subscription.id
        pattern = member.subscription.pattern
        self.members[name] = member
        self.saved[name] = saved
        self._index.add(name, ">" if whole(pattern, self.stream) else pattern, member.filter)

    def remove(self, name: str) -> None:
        """Let a member go."""
        del self.members[name], self.saved[name]
        self._index.remove(name)

    def join(self, other: Cohort) -> None:
        """Take in everyone of a cohort that has come to the same place."""
        for name, member in other.members.items():
            self.add(member, other.saved[name])
        self.unsaved = max(self.unsaved, other.unsaved)

    def match(self, event: Event) -> tuple[list[Match], list[Member]]:
        """Return what agents are owed of an event, and the members whose last event it is."""
        view = View(event)
        # Those that begin together with one further back do not see what lies before their own place.
        names = [name for name in self._index.match(view) if self.saved[name] <= event.offset]
        if not names:
            return [], []
        found: dict[int, list[Member]] = {}
        for name in names:
            member = self.members[name]
            found.setdefault(member.agent_no, []).append(member)
        matches = [_match(view, event, agent_no, members) for agent_no, members in found.items()]
        ended = [
            member
            for members in found.values()
            for member in members
            if member.terminal is not None and member.terminal.matches(view)
        ]
        return matches, ended

    def moves(self, names: Sequence[str], following: int) -> list[Move]:
        """Return the moves that bring members' cursors to where the cohort has read."""
        return [Move(name, self.saved[name], following) for name in names if self.saved[name] < following]


def match_one(member: Member, event: Event) -> list[Match]:
    """Return what a member's agent is owed of an event that is known to be meant for it."""
    return [_match(View(event), event, member.agent_no, [member])]


def _match(view: View, event: Event, agent_no: int, members: list[Member]) -> Match:
    names = tuple(member.subscription.id for member in members)
    digest = next((one.subscription.digest for one in members if one.subscription.digest is not None), None)
    resource = resource_of(view, digest.by) if digest is not None else None
    if len(members) == 1:
        reason = members[0].reason(event.topic)
    else:
        reason = "; ".join(dict.fromkeys(one.reason(event.topic) for one in members))
    return Match(event.offset, agent_no, names, reason, digest, resource)


def _reason(subscription: InboxSubscription, topic: str) -> str:
    parts = [f"topic {topic} matches {subscription.pattern}"]
    parts += [f"{part} filter" for part in ("metadata", "payload") if part in subscription.filter]
    if "expr" in subscription.filter:
        parts.append("expr")
    return parts[0] if len(parts) == 1 else f"{parts[0]} and its {', '.join(parts[1:])}"


def resource_of(view: View, path: str) -> str | None:
    """Return the text at a path of an event, e.g. ``metadata.resource``; None when there is none."""
    first, *rest = path.split(".")
    value: Any = getattr(view, first)
    for name in rest:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value) or None
