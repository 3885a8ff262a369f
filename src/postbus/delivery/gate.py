"""One at a time over all lanes of a process: events that were in flight when a process died."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from postbus.clock import Clock

__all__ = ["PATIENCE_S", "Gate"]

PATIENCE_S = 1.0


class Gate:
    """Lets one lane in at a time, so that of several suspects only the one that ends the process is blamed for it.

    One that runs for longer than ``PATIENCE_S`` no longer keeps the others waiting.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holder: object = None
        self._since_s = 0.0
        self._waiting: dict[object, Callable[[], None]] = {}

    def enter(self, who: object, wake: Callable[[], None]) -> bool:
        """Take the gate; when somebody else has it say False, and call ``wake`` once it is worth another try."""
        now = self._clock.monotonic_s()
        if self._holder not in (None, who) and now - self._since_s < PATIENCE_S:
            self._waiting[who] = wake
            return False
        self._holder, self._since_s = who, now
        self._waiting.pop(who, None)
        return True

    def leave(self, who: object) -> None:
        """Give the gate back; nothing happens when somebody else has it."""
        if self._holder is who:
            self._holder = None
            waiting, self._waiting = self._waiting, {}
            for wake in waiting.values():
                wake()
