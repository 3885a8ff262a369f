"""The circuit breaker: stops asking what does not answer, and finds out with one question at a time when it does."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

import msgspec

from postbus.clock import Clock, SystemClock
from postbus.model import PostbusError, Unreachable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["Breaker", "BreakerState", "Change"]

logger = logging.getLogger("postbus.broker")

T = TypeVar("T")


class BreakerState(StrEnum):
    """``closed``: calls pass. ``open``: calls are refused. ``half_open``: one call at a time finds out."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class Change(msgspec.Struct, frozen=True):
    """A breaker went from one state to another; ``error`` is what opened it, ``open_s`` for how long."""

    name: str
    before: BreakerState
    state: BreakerState
    at_us: int
    open_s: float = 0.0
    error: str = ""


class Breaker:
    """Guards calls to something that may be away. Only ``Unreachable`` counts as a failure: a refusal is an answer."""

    def __init__(
        self,
        name: str,
        *,
        clock: Clock | None = None,
        failures_max: int = 5,
        successes_min: int = 2,
        open_s: float = 10.0,
        open_s_max: float = 120.0,
    ) -> None:
        self.name = name
        self._clock = clock or SystemClock()
        self._failures_max = failures_max
        self._successes_min = successes_min
        self._first_open_s = open_s
        self._open_s_max = open_s_max
        self._state = BreakerState.CLOSED
        self._failures = self._successes = 0
        self._open_s = open_s
        self._until_s = 0.0
        self._hints = 0
        self._probing = False
        self._turn = 0
        self._listeners: list[Callable[[Change], None]] = []

    @property
    def state(self) -> BreakerState:
        """The state; an open breaker whose time is over stays open until somebody asks."""
        return self._state

    @property
    def wait_s(self) -> float:
        """How long until a call may pass; 0 when one may now, or as soon as the one that finds out is back."""
        return max(0.0, self._until_s - self._clock.monotonic_s()) if self._state is BreakerState.OPEN else 0.0

    def listen(self, told: Callable[[Change], None]) -> None:
        """Have this called with every change of state, at once and in order."""
        self._listeners.append(told)

    def hint(self) -> None:
        """Somebody saw it come back: let the next call find out, without waiting for the time to be over.

        A call that is on its way may still fail for what was before; the next one finds out then as well.
        """
        self._hints += 1
        if self._state is BreakerState.OPEN:
            self._until_s = self._clock.monotonic_s()

    async def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make the call if calls may pass, and learn from its outcome; raises ``Unreachable`` when they may not."""
        turn, probe = self._enter()
        hints = self._hints
        try:
            result = await call()
        except Unreachable as error:
            self._failed(turn, str(error), probe=probe, outdated=self._hints > hints)
            raise
        except PostbusError:
            self._succeeded(turn, probe=probe)
            raise
        except BaseException:  # cancelled, or a fault of ours: nothing was learnt
            self._leave(turn, probe=probe)
            raise
        self._succeeded(turn, probe=probe)
        return result

    def _enter(self) -> tuple[int, bool]:
        if self._state is BreakerState.OPEN:
            if self.wait_s > 0:
                raise Unreachable(f"{self.name} is away; it is asked again in {self.wait_s:.1f} s")
            self._successes = 0
            self._move(BreakerState.HALF_OPEN)
        if self._state is BreakerState.CLOSED:
            return self._turn, False
        if self._probing:
            raise Unreachable(f"{self.name} was away; one call is finding out whether it is back")
        self._probing = True
        return self._turn, True

    def _leave(self, turn: int, *, probe: bool) -> bool:
        """End a call; False when the state it began in is over, so that its outcome says nothing new."""
        if turn != self._turn:
            return False
        if probe:
            self._probing = False
        return True

    def _failed(self, turn: int, error: str, *, probe: bool, outdated: bool) -> None:
        if not self._leave(turn, probe=probe):
            return
        self._failures += 1
        if probe and not outdated:
            self._open_s = min(self._open_s * 2, self._open_s_max)
        elif not probe and self._failures < self._failures_max:
            return
        self._until_s = self._clock.monotonic_s() + (0.0 if outdated else self._open_s)
        self._move(BreakerState.OPEN, error)

    def _succeeded(self, turn: int, *, probe: bool) -> None:
        if not self._leave(turn, probe=probe):
            return
        self._failures = 0
        if probe:
            self._successes += 1
            if self._successes >= self._successes_min:
                self._open_s = self._first_open_s
                self._move(BreakerState.CLOSED)

    def _move(self, state: BreakerState, error: str = "") -> None:
        opens = state is BreakerState.OPEN
        change = Change(
            self.name, self._state, state, self._clock.now_us(), self._open_s if opens else 0.0, error if opens else ""
        )
        self._state = state
        self._turn += 1
        self._failures = 0
        self._probing = False
        logger.warning("%s: %s -> %s %s", self.name, change.before, state, change.error)
        for told in self._listeners:
            told(change)
