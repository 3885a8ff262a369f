"""Postbus as a contender: its log with concurrent publishers, one publisher, batches, and reading."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import apsw

from benchmarks.bare import quantiles_us
from benchmarks.harness import AsyncContender, Contender, Options, until_steady
from benchmarks.load import DRAFTS, PAYLOAD_BYTES, Stopwatch
from postbus.log import Log, SqliteLog, open_log
from postbus.model import Event

__all__ = ["BareReader", "Batches", "OnePublisher", "Publishers", "Reader", "fill", "publish", "settle"]

STREAM = "bench.default.orders"
PUBLISHERS = 100
READ_BATCH = 1_000

Loop = Callable[[], asyncio.AbstractEventLoop] | None


async def publish(log: Log, streams: list[str], enough: Callable[[int], bool]) -> int:
    """Have 100 tasks each await one append after the other until there is enough; return how many were acknowledged."""
    done = 0

    async def publisher(number: int) -> None:
        nonlocal done
        stream, turn = streams[number % len(streams)], number
        while not enough(done):
            await log.append(stream, [DRAFTS[turn % len(DRAFTS)]])
            turn += PUBLISHERS
            done += 1

    await asyncio.gather(*(publisher(number) for number in range(PUBLISHERS)))
    return done


async def fill(log: Log, streams: list[str], events: int, batch: int = 5_000) -> None:
    """Append so many events in batches, turn by turn to each stream."""
    batch = min(batch, -(-events // len(streams)))
    drafts = (DRAFTS * (batch // len(DRAFTS) + 1))[:batch]
    for number, start in enumerate(range(0, events, batch)):
        await log.append(streams[number % len(streams)], drafts[: events - start])


async def settle(log: Log) -> float:
    """Let the log finish what it does in the background, so that nobody else pays for it; return how long that took."""
    assert isinstance(log, SqliteLog)
    started = time.perf_counter()
    await log.projections.catch_up()
    taken = time.perf_counter() - started
    await asyncio.sleep(0.1)  # a checkpoint may be under way
    return taken


class Publishers(AsyncContender):
    """100 concurrent publishers on one stream, each awaiting every append."""

    def __init__(self, name: str, options: Options, loop: Loop) -> None:
        super().__init__(name, loop)
        self._options = options
        self._log: Log | None = None
        self._appended = 0

    def open(self, folder: Path) -> None:
        """See ``Contender.open``."""
        super().open(folder)
        try:
            until_steady(folder / "postbus.db-wal", self._write, self._options.warm_bytes)
        except BaseException:
            self.close()
            raise

    async def start(self, folder: Path) -> None:
        """See ``Contender.open``."""
        self._log = await open_log(str(folder))
        await self._log.ensure_stream(STREAM)

    async def turn(self) -> dict[str, float]:
        """See ``Contender.run``."""
        log = self.log
        watch = Stopwatch()
        events, numbers = await self.work(log, watch)
        numbers = watch.rate(events) | numbers
        self._appended += events
        numbers["settle_s"] = await settle(log)
        stats = await log.get_stream_stats(STREAM)
        assert stats.partitions[0].high_water_mark == self._appended
        return numbers

    async def work(self, log: Log, watch: Stopwatch) -> tuple[int, dict[str, float]]:
        """Append for the length of a round; return how many events, and further numbers."""
        return await publish(log, [STREAM], lambda _done: watch.over(self._options.round_s)), {}

    async def stop(self) -> None:
        """See ``Contender.close``."""
        if self._log is not None:
            await self._log.close()

    @property
    def log(self) -> Log:
        """The open log."""
        assert self._log is not None
        return self._log

    def _write(self, size: int) -> None:
        events = size // PAYLOAD_BYTES // len(DRAFTS) * len(DRAFTS)
        self.do(fill(self.log, [STREAM], events, len(DRAFTS)))
        self.do(settle(self.log))
        self._appended += events


class OnePublisher(Publishers):
    """One publisher, each append timed."""

    async def work(self, log: Log, watch: Stopwatch) -> tuple[int, dict[str, float]]:
        """See ``Publishers.work``."""
        taken: list[float] = []
        while not watch.over(self._options.round_s):
            batch = [DRAFTS[len(taken) % len(DRAFTS)]]
            started = time.perf_counter()
            await log.append(STREAM, batch)
            taken.append(time.perf_counter() - started)
        return len(taken), quantiles_us(taken)


class Batches(Publishers):
    """One caller that appends 1,000 events at a time."""

    async def work(self, log: Log, watch: Stopwatch) -> tuple[int, dict[str, float]]:
        """See ``Publishers.work``."""
        events = 0
        while not watch.over(self._options.round_s):
            await log.append(STREAM, DRAFTS)
            events += len(DRAFTS)
        return events, {}


class Reader(AsyncContender):
    """Reads a whole stream from the table, 1,000 events at a time: the log was reopened, so its tail cache is empty."""

    def __init__(self, name: str, events: int, loop: Loop = None) -> None:
        super().__init__(name, loop)
        self._events = events
        self._log: Log | None = None

    async def start(self, folder: Path) -> None:
        """See ``Contender.open``."""
        log = self._log = await open_log(str(folder))
        await log.ensure_stream(STREAM)
        await fill(log, [STREAM], self._events)
        await settle(log)
        await log.close()
        self.database = folder / "postbus.db"
        self._log = await open_log(str(folder))

    async def turn(self) -> dict[str, float]:
        """See ``Contender.run``."""
        assert self._log is not None
        watch, offset = Stopwatch(), 0
        events: list[Event] = []
        while offset < self._events:
            events = await self._log.fetch(STREAM, 0, offset, READ_BATCH)
            offset += len(events)
        assert events[-1].offset == self._events - 1
        return watch.rate(self._events)

    async def stop(self) -> None:
        """See ``Contender.close``."""
        if self._log is not None:
            await self._log.close()


class BareReader(Contender):
    """Reads the same columns of the same table by rowid with bare apsw, 1,000 rows at a time, into lists."""

    SELECT = """
        SELECT partition, "offset", topic, source, variant, key, payload, metadata, headers, correlation_id, native_id,
               delivery_handle, occurred_at_us, created_at_us, trust
        FROM events WHERE seq > ? ORDER BY seq LIMIT ?
    """

    def __init__(self, name: str, reader: Reader, events: int) -> None:
        self.name = name
        self._reader = reader
        self._events = events

    def open(self, folder: Path) -> None:
        """See ``Contender.open``; the table is the one the reader made in its own folder."""
        del folder
        self._db = apsw.Connection(str(self._reader.database), flags=apsw.SQLITE_OPEN_READONLY)

    def run(self) -> dict[str, float]:
        """See ``Contender.run``."""
        watch, done = Stopwatch(), 0
        while done < self._events:
            done += len(list(self._db.execute(self.SELECT, (done, READ_BATCH))))
        assert done == self._events
        return watch.rate(done)

    def close(self) -> None:
        """See ``Contender.close``."""
        self._db.close()
