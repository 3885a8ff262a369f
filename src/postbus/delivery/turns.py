"""Whose turn it is: one event per key at a time, the others behind it in the order they came."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postbus.delivery.work import Work

__all__ = ["Turns"]


class Turns:
    """The turns of one lane. Events without a key wait for nobody, unless ``strict`` makes all wait for each other."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._behind: dict[str, deque[Work]] = {}

    def key(self, work: Work) -> str | None:
        """Return what an event takes its turn by; None when it waits for nobody."""
        return "" if self._strict else work.event.key

    def taken(self, work: Work) -> bool:
        """Say whether another event has the turn that this one would need."""
        return self.key(work) in self._behind

    def take(self, work: Work) -> bool:
        """Take the turn; when another event has it say False and wait behind it."""
        key = self.key(work)
        if key is None:
            return True
        behind = self._behind.get(key)
        if behind is None:
            self._behind[key] = deque()
            return True
        behind.append(work)
        work.behind = True
        return False

    def pass_on(self, work: Work) -> Work | None:
        """End an event's turn; return the one whose turn it is now."""
        key = self.key(work)
        if key is None:
            return None
        behind = self._behind[key]
        if not behind:
            del self._behind[key]
            return None
        following = behind.popleft()
        following.behind = False
        return following
