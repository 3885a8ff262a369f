"""Postbus's bus as a contender: one subscriber, many subscribers, and a long backlog."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

from benchmarks.handling import PATIENCE_S, Handling, Loop
from benchmarks.harness import AsyncContender, Options, until_steady
from benchmarks.load import DRAFTS, PAYLOAD_BYTES, Stopwatch
from benchmarks.ours import fill, settle
from postbus.bus import EventBus
from postbus.log.sqlite import SqliteLog
from postbus.model import Event

__all__ = ["Backlog", "BusHandling", "FanOut"]

TOPIC = "bench.orders.created"
SOURCE = "bench:load"
SUBSCRIBER = "counter"
PROBE_S = 0.2
PARTS = 10
BURST = DRAFTS * 2


class BusHandling(Handling):
    """One subscriber, which is there only while it is measured; before that, the same publishers without it."""

    def __init__(self, name: str, options: Options, loop: Loop, durability: str = "full") -> None:
        super().__init__(name, options, loop)
        self._durability = durability
        self._bus: EventBus | None = None

    def open(self, folder: Path) -> None:
        """See ``Contender.open``."""
        super().open(folder)
        try:
            until_steady(folder / "postbus.db-wal", self._write, self._options.warm_bytes)
            self.do(self.warm())
        except BaseException:
            self.close()
            raise

    async def start(self, folder: Path) -> None:
        """See ``Contender.open``."""
        self._bus = EventBus(folder, durability=self._durability)
        await self._bus.start()
        self._log: SqliteLog = await self._bus.open()

    async def stop(self) -> None:
        """See ``Contender.close``."""
        if self._bus is not None:
            await self._bus.stop()

    async def turn(self) -> dict[str, float]:
        """See ``Contender.run``; the low rate comes first, as for everybody."""
        numbers = await self.attached(self._low_rate())
        seconds = self._options.pick(1.0, 0.2)
        watch = Stopwatch()
        published = await self.saturate(lambda: watch.over(seconds))
        self.aside["publish only"] = watch.rate(published)
        await settle(self._log)
        numbers |= await self.attached(self._saturated(seconds))
        numbers["settle_s"] = await settle(self._log)
        return numbers

    async def attach(self) -> None:
        """Subscribe from here on, and see that it works."""
        self.bus.subscribe(TOPIC, self._handle, SUBSCRIBER, start="latest")
        published, before = 0, self.handled
        self._entry.clear()
        while not self._entry.is_set():
            await self.publish(0)
            published += 1
            try:
                async with asyncio.timeout(PROBE_S):
                    await self._entry.wait()
            except TimeoutError:
                assert published * PROBE_S < PATIENCE_S, "the subscriber receives nothing"
        await self.acked(before + 1)

    async def detach(self) -> None:
        """Delete the subscription."""
        await self.bus.delete_subscription(SUBSCRIBER)

    async def publish(self, number: int) -> None:
        """See ``Handling.publish``."""
        del number
        await self.bus.publish(TOPIC, SOURCE, self.payload())

    async def nothing_left(self) -> bool:
        """See ``Handling.nothing_left``."""
        return (await self._log.get_consumer_lag(self.bus.journal, SUBSCRIBER)).total == 0

    @property
    def bus(self) -> EventBus:
        """The open bus."""
        assert self._bus is not None
        return self._bus

    async def _handle(self, _event: Event) -> None:
        self.note()

    def _write(self, size: int) -> None:
        events = size // PAYLOAD_BYTES // len(DRAFTS) * len(DRAFTS)
        self.do(fill(self._log, [self.bus.journal], events, len(DRAFTS)))
        self.do(settle(self._log))


class FanOut(AsyncContender):
    """So many subscribers of one topic, all caught up, receive 2,000 events that were appended at once; and again.

    As many as fit into the log's tail cache, so that one subscriber reads from memory just as a hundred do.
    """

    def __init__(self, name: str, subscribers: int, deliveries: int, loop: Loop) -> None:
        super().__init__(name, loop)
        self._ids = [f"counter-{number}" for number in range(subscribers)]
        self._deliveries = deliveries
        self._handled = self._goal = 0
        self._done = asyncio.Event()
        self._bus: EventBus | None = None

    async def start(self, folder: Path) -> None:
        """See ``Contender.open``."""
        bus = self._bus = EventBus(folder)
        for name in self._ids:
            bus.subscribe(TOPIC, self._handle, name)
        await bus.start()
        self._log: SqliteLog = await bus.open()
        for _ in range(3):
            await self._burst()

    async def turn(self) -> dict[str, float]:
        """See ``Contender.run``."""
        wall = cpu = 0.0
        deliveries = 0
        while deliveries < self._deliveries:
            taken = await self._burst()
            deliveries += int(taken[0])
            wall += taken[1]
            cpu += taken[2]
        await settle(self._log)
        per = 1e6 / deliveries
        return {"delivery_us": wall * per, "delivery_cpu_us": cpu * per, "deliveries_s": deliveries / wall}

    async def stop(self) -> None:
        """See ``Contender.close``."""
        if self._bus is not None:
            await self._bus.stop()

    async def _handle(self, _event: Event) -> None:
        self._handled += 1
        if self._handled == self._goal:
            self._done.set()

    async def _burst(self) -> tuple[int, float, float]:
        """Append the events, then time until all are acknowledged; return deliveries, wall and processor time."""
        assert self._bus is not None
        journal = self._bus.journal
        self._goal = self._handled + len(BURST) * len(self._ids)
        self._done.clear()
        await self._log.append(journal, BURST)
        already = self._handled
        wall, cpu = time.perf_counter(), time.process_time()
        async with asyncio.timeout(PATIENCE_S):
            await self._done.wait()
            for name in self._ids:
                while (await self._log.get_consumer_lag(journal, name)).total:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.0003)  # whoever spins takes processor time from what is measured
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        assert self._handled == self._goal
        return self._goal - already, wall, cpu


class Backlog(AsyncContender):
    """A subscriber that comes back to a long backlog. It is drained once, and every turn says what was seen then."""

    def __init__(self, name: str, events: int, loop: Loop) -> None:
        super().__init__(name, loop)
        self._events = events
        self._handled = 0
        self._marks: list[float] = []
        self._numbers: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.slowest: dict[str, float] = {}

    async def start(self, folder: Path) -> None:
        """See ``Contender.open``: subscribe and leave, publish the backlog, leave again."""
        self._folder = folder
        bus = self._subscribed()
        async with bus:
            pass
        bus = EventBus(folder)
        try:
            log = await bus.open()
            await fill(log, [bus.journal], self._events)
            await settle(log)
        finally:
            await bus.stop()

    async def turn(self) -> dict[str, float]:
        """See ``Contender.run``."""
        if not self._numbers:
            await self._drain()
        return self._numbers

    async def stop(self) -> None:
        """See ``Contender.close``; every bus was stopped where it was started."""

    def _subscribed(self) -> EventBus:
        bus = EventBus(self._folder)
        bus.subscribe(TOPIC, self._handle, SUBSCRIBER, start="earliest")
        return bus

    async def _handle(self, _event: Event) -> None:
        self._handled += 1
        if self._handled % (self._events // PARTS) == 0:
            self._marks.append(time.perf_counter())

    async def _drain(self) -> None:
        bus = self._subscribed()
        watch = Stopwatch()
        self._marks = [time.perf_counter()]  # starting belongs to the first tenth: who waits for a lease shows it
        async with bus:
            log = await bus.open()
            while self._handled < self._events or (await log.get_consumer_lag(bus.journal, SUBSCRIBER)).total:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.002)
            self._marks[-1] = time.perf_counter()  # and the last acknowledgement to the last
            whole = watch.rate(self._events)
        assert self._handled == self._events
        marks = self._marks
        rates = [self._events / PARTS / (end - start) for start, end in itertools.pairwise(marks)]
        assert len(rates) == PARTS
        self.first = {"events_s": rates[0]}
        self.slowest = {"events_s": min(rates)}
        self._numbers = {"events_s": rates[-1], "whole_events_s": whole["events_s"], "cpu_us": whole["cpu_us"]}
        self._numbers |= {f"part_{number}_events_s": rate for number, rate in enumerate(rates, 1)}
