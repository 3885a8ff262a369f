"""The public test kit: the real engine in memory, on a clock that you move.

``async with BusKit() as kit:`` gives a running bus. Publish, then ``await kit.settle()`` until nothing is left to do;
``await kit.advance(seconds)`` to let retries, timeouts and leases come due, without waiting for any of them;
``await kit.crash()`` to see what is left when the process ends in the middle of everything.
"""

from __future__ import annotations

import asyncio
import heapq
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from postbus.bus import EventBus
from postbus.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from postbus.delivery import Runner
    from postbus.delivery.dead import DeadEntry
    from postbus.model import Event, Receipt

__all__ = ["BusKit", "FakeClock"]

START_US = 1_750_000_000_000_000
SETTLE_S_MAX = 60.0
STEP_S = 0.0005
QUIET_STEPS = 3
TURNS = 10


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

    def next_in_s(self) -> float | None:
        """Return how far to move until the next sleeper wakes; None when nobody sleeps."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        return (self._sleepers[0][0] - self._monotonic_us) / 1e6 if self._sleepers else None

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
    """A bus on a fake clock, in memory unless a path is given, with what a test wants to ask of it."""

    def __init__(self, path: str | Path | None = None, *, clock: FakeClock | None = None, **settings: Any) -> None:
        self.clock = clock or FakeClock()
        self._folder = None if path is not None else tempfile.mkdtemp(prefix="postbus-kit-", dir=_memory())
        self._path = path if path is not None else self._folder
        self._settings = settings
        self._watched: object = None
        self._reads = 0
        self.bus = self._make()

    def _make(self) -> EventBus:
        return EventBus(str(self._path), clock=self.clock, **self._settings)

    async def __aenter__(self) -> Self:
        """Recover and start."""
        await self.bus.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, without waiting on the fake clock."""
        await self.stop()
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def start(self) -> None:
        """Recover and start the bus, after ``stop`` or ``crash``."""
        await self.bus.__aenter__()

    async def stop(self) -> None:
        """Stop the bus; while a handler still runs time passes, until its grace is over."""
        runners = self._runners()
        stopping = asyncio.get_running_loop().create_task(self.bus.stop())
        while not stopping.done():
            await asyncio.wait([stopping], timeout=0.01)
            if any(runner.running for runner in runners) or self.bus._leaving:  # noqa: SLF001 - the kit is part of the bus
                self.clock.advance(1.0)
        await stopping

    def _runners(self) -> list[Runner]:
        subscribers = self.bus._subscribers.values()  # noqa: SLF001 - as above
        return [subscriber._runner for subscriber in subscribers if subscriber._runner is not None]  # noqa: SLF001 - as above

    async def crash(self) -> None:
        """End as a killed process does: nothing that runs is finished, nothing is given back.

        ``kit.bus`` is then a new bus on the same store, without handlers and not started.
        """
        bus = self.bus
        log = await bus.open()
        tasks = [*bus._tasks, *bus._replies._tasks, *(task for runner in self._runners() for task in runner.tasks())]  # noqa: SLF001 - as above
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        owner = bus._owner  # noqa: SLF001 - as above
        await log.transact(lambda tx: tx.run("UPDATE lanes SET owner = 'dead' WHERE owner = ?", (owner,)))
        await log.close()
        self.bus = self._make()

    async def publish(self, topic: str, payload: Any, **fields: Any) -> Receipt:
        """Publish as source ``test`` unless one is given."""
        return await self.bus.publish(topic, fields.pop("source", "test"), payload, **fields)

    async def settle(self) -> None:
        """Wait until everything that can happen without time passing has happened."""
        quiet = 0
        before = self._picture()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE_S_MAX
        while loop.time() < deadline:
            for _ in range(TURNS):  # one thing leads to another within the loop
                await asyncio.sleep(0)
            await asyncio.sleep(STEP_S)
            now = self._picture()
            quiet = quiet + 1 if now == before and now is not None else 0
            before = now
            if quiet >= QUIET_STEPS:
                return
        raise TimeoutError("the bus does not come to rest: do two handlers answer each other for ever?")

    async def advance(self, seconds: float) -> None:
        """Let time pass from one thing that comes due to the next, settling in between."""
        left = seconds
        while True:
            await self.settle()
            following = self.clock.next_in_s()
            if following is None or following > left:
                break
            self.clock.advance(following)
            left -= following
        self.clock.advance(left)
        await self.settle()

    async def jump(self, seconds: float) -> None:
        """Let all that time pass at once: what came due meanwhile comes due now, however late. Then settle."""
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
        return await self.query("SELECT * FROM event_journal ORDER BY id")

    async def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of any SQL query on the store."""
        log = await self.bus.open()
        return await log.store.read(lambda db: list(db.execute(statement, values)))

    def _watch_reads(self, log: Any) -> None:
        """Count the reads that are on their way from now on."""
        self._watched, self._reads = log, 0
        read = log.store.read

        async def counted(call: Callable[[Any], Any]) -> Any:
            self._reads += 1
            try:
                return await read(call)
            finally:
                self._reads -= 1

        log.store.read = counted

    def _picture(self) -> object:
        """Return what a resting bus looks like; None while it is at work."""
        bus = self.bus
        log, subscribers = bus._log, bus._subscribers.values()  # noqa: SLF001 - the kit is part of the bus
        if log is None:
            return ()
        if log is not self._watched:
            self._watch_reads(log)
        writer = log.store.writer
        if self._reads or writer._queue or writer._lock.locked():  # noqa: SLF001 - as above
            return None
        if getattr(log, "behind", False):  # the copy of a remote has not all that was published
            return None
        if bus._running and any(subscriber.busy for subscriber in subscribers):  # noqa: SLF001 - as above
            return None
        return [tuple(s.counts.values()) for s in subscribers], log.known_heads()


def _memory() -> str | None:
    """Return a folder that is kept in memory, where the system has one."""
    shared = Path("/dev/shm")  # noqa: S108 - the folder made in it is private
    return str(shared) if shared.is_dir() else None
