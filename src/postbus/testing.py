"""The public test kit: the real engine in memory, on a clock that you move.

``async with BusKit() as kit:`` gives a running bus. Publish, then ``await kit.settle()`` until nothing is left to do;
``await kit.advance(seconds)`` to let retries, timeouts and leases come due, without waiting for any of them.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import TYPE_CHECKING, Any, Self

from postbus.bus import EventBus
from postbus.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from postbus.delivery.dead import DeadEntry
    from postbus.model import Event, Receipt

__all__ = ["BusKit", "FakeClock"]

START_US = 1_750_000_000_000_000
STEPS_MAX = 200_000
IDLE_ROUNDS = 6


class FakeClock(SystemClock):
    """A clock that stands still until it is moved. Wall and monotonic time move together unless the wall is set."""

    def __init__(self, now_us: int = START_US) -> None:
        self._wall_us = now_us
        self._monotonic_us = 1_000_000_000
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = 0

    def now_us(self) -> int:
        """Return the wall time that was set."""
        return self._wall_us

    def monotonic_s(self) -> float:
        """Return the monotonic time."""
        return self._monotonic_us / 1e6

    def set_wall(self, now_us: int) -> None:
        """Make the wall clock jump; monotonic time does not notice."""
        self._wall_us = now_us

    def advance(self, seconds: float) -> None:
        """Move both clocks and wake everybody whose time has come."""
        step = round(seconds * 1e6)
        self._wall_us += step
        self._monotonic_us += step
        while self._sleepers and self._sleepers[0][0] <= self._monotonic_us:
            future = heapq.heappop(self._sleepers)[2]
            if not future.done():
                future.get_loop().call_soon_threadsafe(_finish, future)

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has been moved that far."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (self._monotonic_us + round(seconds * 1e6), self._count, future))
        await future

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait for an event or until the clock has been moved that far."""
        if event.is_set():
            return True
        loop = asyncio.get_running_loop()
        waits = [loop.create_task(event.wait()), loop.create_task(self.sleep(seconds))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return event.is_set()
        finally:
            for task in waits:
                task.cancel()


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class BusKit:
    """A bus in memory on a fake clock, with what a test wants to ask of it."""

    def __init__(self, **settings: Any) -> None:
        self.clock = FakeClock()
        self.bus = EventBus("memory:", clock=self.clock, **settings)

    async def __aenter__(self) -> Self:
        """Recover and start."""
        await self.bus.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, without waiting on the fake clock."""
        stopping = asyncio.get_running_loop().create_task(self.bus.stop())
        while not stopping.done():
            await asyncio.sleep(0.002)
            self.clock.advance(1.0)
        await stopping

    async def publish(self, topic: str, payload: Any, **fields: Any) -> Receipt:
        """Publish as source ``test`` unless one is given."""
        return await self.bus.publish(topic, fields.pop("source", "test"), payload, **fields)

    async def settle(self) -> None:
        """Wait until everything that can happen without time passing has happened."""
        quiet = 0
        before = await self._picture()
        for _ in range(STEPS_MAX):
            await asyncio.sleep(0.002)
            now = await self._picture()
            quiet = quiet + 1 if now == before else 0
            before = now
            if quiet >= IDLE_ROUNDS:
                return
        raise TimeoutError("the bus does not come to rest: do two handlers answer each other for ever?")

    async def advance(self, seconds: float) -> None:
        """Let time pass, then settle."""
        await self.settle()
        self.clock.advance(seconds)
        await self.settle()

    async def until(self, holds: Callable[[], bool], *, step_s: float = 1.0, steps: int = 1000) -> None:
        """Let time pass in steps until something holds."""
        for _ in range(steps):
            await self.settle()
            if holds():
                return
            self.clock.advance(step_s)
        raise TimeoutError(f"still not so after {steps * step_s:g} s of fake time")

    async def events(self) -> list[Event]:
        """Return everything in the journal."""
        log = await self.bus.open()
        return await log.fetch(self.bus.journal, 0, 0, 1_000_000)

    async def dead(self) -> list[DeadEntry]:
        """Return the open dead letters."""
        await self.bus.open()
        return await self.bus.dead_letters.find()

    async def journal(self) -> list[tuple[Any, ...]]:
        """Return the rows of the ``event_journal`` view."""
        log = await self.bus.open()
        return await log.store.read(lambda db: list(db.execute("SELECT * FROM event_journal ORDER BY id")))

    async def _picture(self) -> object:
        log = await self.bus.open()
        counts = [tuple(s.counts.values()) for s in self.bus._subscribers.values()]  # noqa: SLF001 - the kit is part of the bus
        rows = await log.store.read(
            lambda db: list(
                db.execute('SELECT stream_id, consumer, partition, "offset", status, attempt FROM delivery_rows')
            )
        )
        cursors = await log.store.read(
            lambda db: list(
                db.execute("SELECT consumer, partition, next_offset FROM cursors WHERE consumer <> '_dispatch'")
            )
        )
        head = (await log.get_stream_stats(self.bus.journal)).count
        return counts, rows, cursors, head
