"""What every contender of the suite "bus" does in a turn: publish, have it handled, have that acknowledged.

A turn has two parts. At a *low rate* one event is under way at a time, and what counts is the time from just before
``publish`` until the handler is entered. *Saturated*, 100 publishers publish one event after the other each for a
while, and the clock stops when everything they published is handled and acknowledged.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from benchmarks.bare import quantiles_us
from benchmarks.harness import AsyncContender, Contender, Options
from benchmarks.load import PAYLOADS, Stopwatch

__all__ = ["PATIENCE_S", "PUBLISHERS", "Aside", "Handling", "Loop"]

PUBLISHERS = 100
PAUSE_S = 0.004
PATIENCE_S = 120.0

Loop = Callable[[], asyncio.AbstractEventLoop] | None


class Handling(AsyncContender):
    """One consumer and 100 publishers. The consumer's handler is ``note`` and nothing else."""

    def __init__(self, name: str, options: Options, loop: Loop = None) -> None:
        super().__init__(name, loop)
        self._options = options
        self._payloads = itertools.cycle(PAYLOADS)
        self._entry = asyncio.Event()
        self._entered_s = 0.0
        self.handled = 0
        self.aside: dict[str, dict[str, float]] = {}

    async def turn(self) -> dict[str, float]:
        """See ``Contender.run``."""
        low = await self.attached(self._low_rate())
        return low | await self.attached(self._saturated(self._options.pick(1.0, 0.2)))

    async def warm(self) -> None:
        """Take a turn that nobody times."""
        await self.attached(self._saturated(self._options.pick(1.0, 0.1)))

    async def attached(self, work: Coroutine[Any, Any, dict[str, float]]) -> dict[str, float]:
        """Do something while the consumer consumes."""
        try:
            await self.attach()
            return await work
        finally:
            work.close()
            await self.detach()

    def payload(self) -> bytes:
        """Return the next payload."""
        return next(self._payloads)

    def note(self) -> None:
        """Be the handler: say when it was entered, and count."""
        self._entered_s = time.perf_counter()
        self.handled += 1
        self._entry.set()

    async def _low_rate(self) -> dict[str, float]:
        ends: list[float] = []
        publishes: list[float] = []
        os.sync()  # the disk is not busy with what somebody else has written
        for _ in range(self._options.pick(120, 20)):
            await asyncio.sleep(PAUSE_S)
            self._entry.clear()
            started = time.perf_counter()
            await self.publish(0)
            publishes.append(time.perf_counter() - started)
            await self.entry()
            ends.append(self._entered_s - started)
        await self.acked(self.handled)
        self.aside["publish()"] = quantiles_us(publishes)
        return quantiles_us(ends)

    async def _saturated(self, seconds: float) -> dict[str, float]:
        before = self.handled
        watch = Stopwatch()
        published = await self.saturate(lambda: watch.over(seconds))
        await self.acked(before + published)
        numbers = watch.rate(published)
        assert self.handled == before + published
        return numbers

    async def saturate(self, over: Callable[[], bool]) -> int:
        """Have 100 tasks publish one event after the other each until it is over; return how many were published."""
        done = 0

        async def publisher(number: int) -> None:
            nonlocal done
            while True:  # at least one each, however slow the machine
                await self.publish(number)
                done += 1
                if over():
                    return

        await asyncio.gather(*(publisher(number) for number in range(PUBLISHERS)))
        return done

    async def entry(self) -> None:
        """Wait until the handler has been entered."""
        async with asyncio.timeout(PATIENCE_S):
            await self._entry.wait()

    async def acked(self, handled: int) -> None:
        """Wait until so many events have been handled and none is left to acknowledge."""
        async with asyncio.timeout(PATIENCE_S):
            while self.handled < handled or not await self.nothing_left():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.001)

    async def attach(self) -> None:
        """Begin to consume, where that is not done all the time."""

    async def detach(self) -> None:
        """Cease to consume."""

    @abstractmethod
    async def publish(self, number: int) -> None:
        """Publish one event as this publisher and return when that is acknowledged."""

    @abstractmethod
    async def nothing_left(self) -> bool:
        """Say whether every event is acknowledged by the consumer; asked once they have all been handled."""


class Aside(Contender):
    """Numbers that another contender took beside its own in its turn just before, to compare those with."""

    def __init__(self, name: str, taken: Callable[[], dict[str, float]]) -> None:
        self.name = name
        self._taken = taken

    def open(self, folder: Path) -> None:
        """See ``Contender.open``."""

    def run(self) -> dict[str, float]:
        """See ``Contender.run``."""
        return self._taken()

    def close(self) -> None:
        """See ``Contender.close``."""
