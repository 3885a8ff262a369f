"""Projections: look-ups by topic, correlation and time, kept by an internal reader of the log.

The append path writes no index for them. A task follows the log by row and catches up milliseconds after a commit: it
sums up a chunk of rows on a connection of its own, so that publishers need not wait, and writes the few rows that
come of it. A look-up scans what is not projected yet, so it never misses any. Projections hold nothing of their own:
they can be dropped and rebuilt at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import apsw

from postbus.log.tail import ANY
from postbus.model import Event, PostbusError
from postbus.store.records import EVENT_FIELDS, MINUTE
from postbus.topics import check_pattern, matches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from postbus.log.tail import Waiters
    from postbus.store import Store

__all__ = ["Projections"]

BLOCK = 256
CHUNK = 4096
DELAY_S = 0.1
REST_S = 5.0

NEXT_SEQ = "SELECT next_seq FROM projection_place WHERE name = 'log'"
SAVE_NEXT_SEQ = "INSERT OR REPLACE INTO projection_place VALUES ('log', ?)"
# How far the next chunk reaches: the last of the next CHUNK rows, NULL when there is none.
REACH = f"SELECT max(seq) FROM (SELECT seq FROM events WHERE seq >= ? ORDER BY seq LIMIT {CHUNK})"  # noqa: S608 - a constant
# What a chunk of rows comes to.
SUMS = f"""
    SELECT topic, seq / {BLOCK} AS block, {MINUTE} AS m, stream_id, partition, min(seq), max(seq), count(*),
           count(correlation_id)
    FROM events WHERE seq BETWEEN ? AND ? GROUP BY topic, block, m, stream_id, partition
"""  # noqa: S608 - constants only
# Whether a chunk is still what it was: how many rows, and which is its last (numbers are given out again from the end).
STILL = """
    SELECT (SELECT count(*) FROM events WHERE seq BETWEEN ? AND ?), (SELECT chain FROM events WHERE seq = ?)
"""
SAVE_BLOCK = "INSERT OR IGNORE INTO topic_blocks VALUES (?, ?)"
SAVE_CORRELATIONS = """
    INSERT OR IGNORE INTO correlation_rows SELECT correlation_id, seq FROM events
    WHERE seq BETWEEN ? AND ? AND correlation_id IS NOT NULL
"""
SAVE_BUCKET = """
    INSERT INTO time_buckets VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET first_seq = min(first_seq, excluded.first_seq),
                              last_seq = max(last_seq, excluded.last_seq), events = events + excluded.events
"""
EMPTY = (
    "DELETE FROM topic_blocks",
    "DELETE FROM correlation_rows",
    "DELETE FROM time_buckets",
    "DELETE FROM projection_place",
)

NAME = "(SELECT name FROM stream_registry s WHERE s.stream_id = events.stream_id)"
SELECT = f"SELECT {NAME}, {EVENT_FIELDS} FROM events WHERE "  # noqa: S608 - constants only
BY_ROWS = SELECT + "seq BETWEEN ? AND ? ORDER BY seq"
TOPICS = "SELECT DISTINCT topic FROM topic_blocks"
TOPIC_BLOCKS = "SELECT block FROM topic_blocks WHERE topic = ? ORDER BY block"
CORRELATED = SELECT + "seq IN (SELECT seq FROM correlation_rows WHERE correlation_id = ?) ORDER BY seq"  # noqa: S608 - constants only
BUCKETS = """
    SELECT min(first_seq), max(last_seq) FROM time_buckets WHERE minute BETWEEN ? AND ? AND first_seq IS NOT NULL
"""
RATES = """
    SELECT minute, sum(events) FROM time_buckets WHERE minute BETWEEN ? AND ? GROUP BY minute ORDER BY minute
"""


class Projections:
    """Keeps and asks the projections of one store."""

    def __init__(self, store: Store, waiters: Waiters) -> None:
        self._store = store
        self._waiters = waiters
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Follow the log from now on, in the running event loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        """Stop following. Idempotent; what is missing is projected by whoever follows next."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def catch_up(self, progress: Callable[[int], None] = lambda _rows: None) -> None:
        """Project everything there is; ``progress`` gets the number of rows of each chunk."""
        while True:
            chunk = await self._store.read(_look)
            if chunk is None:
                return
            if await self._store.write(chunk.save, heavy=chunk.correlated):
                progress(chunk.rows)
                if chunk.rows < CHUNK:  # asking once more would find what came meanwhile, again and again
                    return

    async def rebuild(self, progress: Callable[[int], None] = lambda _rows: None) -> None:
        """Drop the projections and make them again."""
        await self._store.write(_empty)
        await self.catch_up(progress)

    async def _follow(self) -> None:
        while True:
            try:
                if await self._store.read(_behind):
                    await self.catch_up()
            except PostbusError:
                await asyncio.sleep(1.0)  # full or failed: appends say so; this only comes later
            await self._waiters.wait(ANY, lambda: False, REST_S)
            await asyncio.sleep(DELAY_S)  # one pass for many commits

    # --- look-ups, in arrival order ---

    async def by_topic(self, pattern: str, limit: int = 100) -> list[Event]:
        """Return the first events whose topic matches the pattern."""
        check_pattern(pattern)
        return await self._store.read(lambda db: _take(_topic_rows(db, pattern), limit))

    async def by_correlation(self, correlation_id: str) -> list[Event]:
        """Return every event of a correlation."""

        def look(db: apsw.Connection) -> list[Event]:
            found = _take(db.execute(CORRELATED, (correlation_id,)), None)
            return found + [event for event in _recent(db) if event.correlation_id == correlation_id]

        return await self._store.read(look)

    async def between(self, since_us: int, until_us: int, limit: int = 100) -> list[Event]:
        """Return the first events that happened in [since, until)."""

        def look(db: apsw.Connection) -> list[Event]:
            low, high = db.execute(BUCKETS, (since_us // 60_000_000, until_us // 60_000_000)).get
            start = db.execute(NEXT_SEQ).get or 0
            old = db.execute(BY_ROWS, (low, min(high, start - 1))) if low is not None else ()
            every = itertools.chain(itertools.starmap(Event, old), _recent(db))
            return list(itertools.islice((e for e in every if since_us <= e.occurred_at_us < until_us), limit))

        return await self._store.read(look)

    async def rates(self, since_us: int, until_us: int) -> list[tuple[int, int]]:
        """Return (minute since 1970, events that happened in it) for every minute that has any."""
        span = (since_us // 60_000_000, until_us // 60_000_000)
        return await self._store.read(lambda db: [(row[0], row[1]) for row in db.execute(RATES, span)])


def _empty(db: apsw.Connection) -> None:
    for statement in EMPTY:
        db.execute(statement)


class _Chunk(NamedTuple):
    """Rows that are to be projected, summed up."""

    start: int
    end: int
    rows: int
    last: bytes
    blocks: set[tuple[str, int]]
    buckets: list[tuple[int, ...]]
    correlated: bool

    def save(self, db: apsw.Connection) -> bool:
        """Write what the rows come to; False when they are not what they were, or others have projected them."""
        span = (self.start, self.end)
        if (db.execute(NEXT_SEQ).get or 0) != self.start or db.execute(STILL, (*span, self.end)).get != (
            self.rows,
            self.last,
        ):
            return False
        db.executemany(SAVE_BLOCK, self.blocks)
        db.executemany(SAVE_BUCKET, self.buckets)
        if self.correlated:
            db.execute(SAVE_CORRELATIONS, span)
        db.execute(SAVE_NEXT_SEQ, (self.end + 1,))
        return True


def _look(db: apsw.Connection) -> _Chunk | None:
    """Sum up the next rows; None when there are none."""
    start = db.execute(NEXT_SEQ).get or 0
    end = db.execute(REACH, (start,)).get
    if end is None:
        return None
    sums = list(db.execute(SUMS, (start, end)))
    rows, last = db.execute(STILL, (start, end, end)).get
    blocks = {(topic, block) for topic, block, *_ in sums}
    return _Chunk(start, end, rows, last, blocks, [row[2:8] for row in sums], any(row[8] for row in sums))


def _behind(db: apsw.Connection) -> bool:
    start = db.execute(NEXT_SEQ).get or 0
    return bool(db.execute("SELECT EXISTS (SELECT 1 FROM events WHERE seq >= ?)", (start,)).get)


def _recent(db: apsw.Connection) -> Iterable[Event]:
    """Yield what is not projected yet."""
    start = db.execute(NEXT_SEQ).get or 0
    for row in db.execute(BY_ROWS, (start, 1 << 62)):
        yield Event(*row)


def _topic_rows(db: apsw.Connection, pattern: str) -> Iterable[Event]:
    blocks: set[int] = set()
    for (topic,) in list(db.execute(TOPICS)):
        if matches(pattern, topic):
            blocks.update(block for (block,) in db.execute(TOPIC_BLOCKS, (topic,)))
    start = db.execute(NEXT_SEQ).get or 0
    for block in sorted(blocks):
        for row in db.execute(BY_ROWS, (block * BLOCK, min(block * BLOCK + BLOCK, start) - 1)):
            if matches(pattern, row[3]):
                yield Event(*row)
    yield from (event for event in _recent(db) if matches(pattern, event.topic))


def _take(found: Iterable[Any], limit: int | None) -> list[Event]:
    events = (row if isinstance(row, Event) else Event(*row) for row in found)
    return list(itertools.islice(events, limit))
