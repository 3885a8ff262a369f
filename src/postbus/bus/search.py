"""Finding events: the latest ones that fit a topic, a correlation, a span of time, a status.

Looks through the projections from the newest row back, and through the few rows that are not projected yet, so that it
reads little of a long log and misses nothing.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import msgspec

from postbus.model import DeliveryStatus, Event
from postbus.store.records import EVENT_FIELDS
from postbus.topics import check_pattern, matches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import apsw

    from postbus.log.sqlite import SqliteLog

__all__ = ["UNSETTLED", "EventQuery", "Found", "FoundPage", "find_events", "find_news", "find_page"]

BLOCK = 256
PAGE_BYTES_MAX = 4 * 1024 * 1024
SCANNED_MAX = 10_000
LAST_SEQ = (1 << 63) - 1

NEXT_SEQ = "SELECT IFNULL((SELECT next_seq FROM projection_place WHERE name = 'log'), 0)"
NAME = "(SELECT name FROM stream_registry s WHERE s.stream_id = events.stream_id)"
SELECT = f"SELECT seq, {NAME}, {EVENT_FIELDS} FROM events WHERE "  # noqa: S608 - constants only
ROW = SELECT + "seq = ?"
ROWS = SELECT + "seq BETWEEN ? AND ? ORDER BY seq DESC"
CORRELATED = """
    SELECT seq FROM correlation_rows WHERE correlation_id = ? AND seq BETWEEN ? AND ? ORDER BY seq DESC
"""
NEWS = f"{SELECT}seq > ? ORDER BY seq LIMIT {SCANNED_MAX}"
END = "SELECT IFNULL(max(seq), 0) FROM events"
TOPICS = "SELECT DISTINCT topic FROM topic_blocks"
BLOCKS = "SELECT block FROM topic_blocks WHERE topic = ? AND block BETWEEN ? AND ?"
SPAN = "SELECT min(first_seq), max(last_seq) FROM time_buckets WHERE minute BETWEEN ? AND ?"
STATUS = "SELECT status, error, processed_at FROM event_journal WHERE id = ?"
# Every event that may be something else than done: it has a row, or some subscription has not passed it yet.
UNSETTLED = """
    SELECT e.seq FROM delivery_rows d JOIN events e USING (stream_id, partition, "offset") WHERE d.status <> 'done'
    UNION
    SELECT e.seq FROM partitions p JOIN stream_registry s ON s.stream_id = p.stream_id AND s.name NOT GLOB '*-dlq'
    JOIN events e ON e.stream_id = p.stream_id AND e.partition = p.partition
        AND e."offset" >= IFNULL((SELECT min(c.next_offset) FROM cursors c
            WHERE c.stream_id = p.stream_id AND c.partition = p.partition AND (c.consumer = '_dispatch'
                OR EXISTS (SELECT 1 FROM subscription_registry r WHERE r.subscription = c.consumer))), 0)
"""
# The same for one status. What is done is most of the log, and is looked for in the log itself.
CANDIDATES = {
    DeliveryStatus.FAILED: """
        SELECT e.seq FROM delivery_rows d JOIN events e USING (stream_id, partition, "offset") WHERE d.status = 'failed'
    """,
    DeliveryStatus.PROCESSING: """
        SELECT e.seq FROM delivery_rows d JOIN events e USING (stream_id, partition, "offset")
        WHERE d.status = 'processing'
        UNION
        SELECT e.seq FROM lanes l JOIN cursors c USING (stream_id, consumer, partition)
        JOIN events e ON e.stream_id = l.stream_id AND e.partition = l.partition
            AND e."offset" >= c.next_offset AND e."offset" < l.reach
        WHERE l.owner IS NOT NULL
    """,
    DeliveryStatus.PENDING: UNSETTLED,
}


class EventQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What to look for; every part that is given must hold. ``topic`` is a pattern, the span is half-open.

    ``before`` is the number in ``event_journal`` below which to look.
    """

    tenant: str
    topic: str | None = None
    correlation_id: str | None = None
    since_us: int | None = None
    until_us: int | None = None
    status: DeliveryStatus | None = None
    before: int | None = None
    limit: int = 100


class Found(msgspec.Struct, frozen=True):
    """An event with its number in ``event_journal`` and what became of it: the worst over its subscriptions."""

    journal_id: int
    event: Event
    status: DeliveryStatus
    error: str | None
    processed_at_us: int | None


class FoundPage(msgspec.Struct, frozen=True):
    """Some events that fit, in the order they were appended.

    ``older``: the number before which to look for more, None when there are no more. ``end``: the number after which
    news will be.
    """

    events: list[Found]
    older: int | None
    end: int


async def find_events(log: SqliteLog, query: EventQuery) -> list[Found]:
    """Return the latest events that fit, in the order they were appended; dead-letter streams are left out."""
    if query.topic is not None:
        check_pattern(query.topic)

    def look(db: apsw.Connection) -> list[Found]:
        newest = (_found(db, row) for row in _candidates(db, query) if _fits(row, query))
        chosen = (found for found in newest if query.status in (None, found.status))
        return list(itertools.islice(chosen, query.limit))[::-1]

    return await log.store.read(look)


async def find_page(log: SqliteLog, query: EventQuery, visible: Callable[[str], bool]) -> FoundPage:
    """Return the latest events that fit, of the streams that are visible; looks at a bounded part of the log."""
    if query.topic is not None:
        check_pattern(query.topic)

    def look(db: apsw.Connection) -> FoundPage:
        end, chosen, size, older = int(db.execute(END).get), list[Found](), 0, None
        rows = _candidates(db, query) if query.limit else iter(())
        for scanned, row in enumerate(rows):
            if len(chosen) == query.limit or size > PAGE_BYTES_MAX or scanned == SCANNED_MAX:
                return FoundPage(chosen[::-1], older, end)
            older = row[0]
            if _fits(row, query) and visible(row[1]):
                found = _found(db, row)
                if query.status in (None, found.status):
                    chosen.append(found)
                    size += len(found.event.payload_json)
        return FoundPage(chosen[::-1], None, end)

    return await log.store.read(look)


async def find_news(log: SqliteLog, query: EventQuery, after: int, visible: Callable[[str], bool]) -> FoundPage:
    """Return the first events after a number in ``event_journal`` that fit; whoever goes on from ``end`` misses none.

    Numbers are given anew after the very last events of the log were removed: then it goes on from its end.
    """
    if query.topic is not None:
        check_pattern(query.topic)

    def look(db: apsw.Connection) -> FoundPage:
        end, chosen, size = min(after, int(db.execute(END).get)), list[Found](), 0
        for row in db.execute(NEWS, (end,)):
            if len(chosen) == query.limit or size > PAGE_BYTES_MAX:
                break
            end = row[0]
            if _fits(row, query) and visible(row[1]):
                chosen.append(_found(db, row))
                size += len(chosen[-1].event.payload_json)
        return FoundPage(chosen, None, end)

    return await log.store.read(look)


def _candidates(db: apsw.Connection, query: EventQuery) -> Iterator[tuple[Any, ...]]:
    """Yield rows that may fit, newest first."""
    following = int(db.execute(NEXT_SEQ).get)
    top = LAST_SEQ if query.before is None else query.before - 1
    first, last = 0, min(following - 1, top)
    if query.since_us is not None or query.until_us is not None:
        minutes = ((query.since_us or 0) // 60_000_000, (query.until_us or LAST_SEQ) // 60_000_000)
        low, high = db.execute(SPAN, minutes).get
        first, last = (following, following - 1) if low is None else (low, min(high, last))
    if query.status in CANDIDATES:
        for (seq,) in db.execute(f"{CANDIDATES[query.status]} ORDER BY 1 DESC"):
            if seq <= top and (seq >= following or first <= seq <= last):
                yield from db.execute(ROW, (seq,))
        return
    yield from db.execute(ROWS, (following, top))
    if query.correlation_id is not None:
        for (seq,) in db.execute(CORRELATED, (query.correlation_id, first, last)):
            yield from db.execute(ROW, (seq,))
    elif query.topic is not None:
        for block in _blocks(db, query.topic, first, last):
            yield from db.execute(ROWS, (max(block * BLOCK, first), min(block * BLOCK + BLOCK - 1, last)))
    else:
        yield from db.execute(ROWS, (first, last))


def _blocks(db: apsw.Connection, pattern: str, first: int, last: int) -> list[int]:
    found: set[int] = set()
    for (topic,) in list(db.execute(TOPICS)):
        if matches(pattern, topic):
            found.update(block for (block,) in db.execute(BLOCKS, (topic, first // BLOCK, last // BLOCK)))
    return sorted(found, reverse=True)


def _fits(row: tuple[Any, ...], query: EventQuery) -> bool:
    _, stream, _, _, topic, *_ = row
    correlation_id, occurred_us = row[11], row[14]
    return (
        str(stream).startswith(f"{query.tenant}.")
        and not str(stream).endswith("-dlq")
        and (query.topic is None or matches(query.topic, topic))
        and query.correlation_id in (None, correlation_id)
        and (query.since_us is None or occurred_us >= query.since_us)
        and (query.until_us is None or occurred_us < query.until_us)
    )


def _found(db: apsw.Connection, row: tuple[Any, ...]) -> Found:
    seq, *facts = row
    status, error, processed = db.execute(STATUS, (seq,)).get
    return Found(
        seq, Event(*facts), DeliveryStatus(status), error, None if processed is None else round(processed * 1e6)
    )
