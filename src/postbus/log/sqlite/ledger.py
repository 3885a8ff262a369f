"""What the embedded log knows of its database: streams, heads and consumers, loaded once and kept while it holds.

The ledger belongs to the writer: it is used under the writer's lock only. What event loops may see of it is published
after each commit (see ``sqlite.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from postbus.log.heads import Head, empty_head
from postbus.model import Consumer, Cursor, Start, Stream, StreamSettings
from postbus.store.records import seal

if TYPE_CHECKING:
    import apsw

__all__ = ["Kept", "Ledger", "View", "load_consumer", "load_consumers", "load_head", "load_stream", "save_consumer"]

# One stream that was not deleted.
STREAM = "SELECT stream_id, name, settings, epoch, created_at_us FROM stream_registry WHERE name = ? AND NOT deleted"

# The beginnings of a stream's partitions.
BEGINNINGS = """
    SELECT partition, slot, first_offset, base_bytes, base_chain FROM partitions WHERE stream_id = ? ORDER BY partition
"""

# The last event of a partition: its place, its chain, and the running counters.
LAST_EVENT = """
    SELECT "offset", chain, bytes_through, COALESCE(latest_at_us, occurred_at_us, created_at_us) FROM events
    WHERE stream_id = ? AND partition = ? ORDER BY "offset" DESC LIMIT 1
"""

# A running counter of one event.
SIZE_THROUGH = 'SELECT bytes_through FROM events WHERE stream_id = ? AND partition = ? AND "offset" = ?'
LATEST_AT = """
    SELECT COALESCE(latest_at_us, occurred_at_us, created_at_us) FROM events
    WHERE stream_id = ? AND partition = ? AND "offset" = ?
"""

# The first event from an offset on that happened, or was appended, at or after an instant.
FIRST_OCCURRED = """
    SELECT "offset" FROM events WHERE stream_id = ? AND partition = ? AND "offset" >= ?
    AND IFNULL(occurred_at_us, created_at_us) >= ? ORDER BY "offset" LIMIT 1
"""
FIRST_CREATED = """
    SELECT "offset" FROM events WHERE stream_id = ? AND partition = ? AND "offset" >= ?
    AND created_at_us >= ? ORDER BY "offset" LIMIT 1
"""

# Readers of a stream and their cursors.
READERS = """
    SELECT r.consumer, r.start, r.epoch, r.created_at_us, c.partition, c.next_offset, c.committed, c.skipped,
           c.updated_at_us
    FROM readers r LEFT JOIN cursors c USING (stream_id, consumer)
    WHERE r.stream_id = ?1 AND (?2 IS NULL OR r.consumer = ?2)
    ORDER BY r.consumer, c.partition
"""

SAVE_READER = "INSERT OR REPLACE INTO readers VALUES (?, ?, ?, ?, ?, ?)"
SAVE_CURSOR = "INSERT OR REPLACE INTO cursors VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
DELETE_READER = "DELETE FROM readers WHERE stream_id = ? AND consumer = ?"
DELETE_CURSORS = "DELETE FROM cursors WHERE stream_id = ? AND consumer = ?"
AUDIT = """
    INSERT INTO consumer_commits (stream_id, consumer, partition, kind, committed_offset, committed_at_us)
    VALUES (?, ?, ?, ?, ?, ?)
"""


# A flipped bit can make another type of a value, which is damage like any other (``refusals.MISREAD``). The events are
# not looked at when a store is opened, so what is computed with is checked where it is read.
_LastEvent = tuple[int, bytes, int, int]


class Kept:
    """One stream as the database keeps it."""

    def __init__(self, stream_id: int, stream: Stream, beginnings: list[tuple[int, int, int, int, bytes]]) -> None:
        self.stream_id = stream_id
        self.stream = stream
        self.slots = [row[1] for row in beginnings]
        self.firsts = [row[2] for row in beginnings]
        self.base_bytes = [row[3] for row in beginnings]
        self.base_chains = [row[4] for row in beginnings]
        self.turn = 0


def load_stream(db: apsw.Connection, name: str) -> Kept | None:
    """Read a stream and the beginnings of its partitions; None when there is none."""
    row = db.execute(STREAM, (name,)).get
    if row is None:
        return None
    stream_id, name, settings, epoch, created = row
    stream = Stream(name, msgspec.json.decode(settings, type=StreamSettings), epoch, created)
    return Kept(stream_id, stream, list(db.execute(BEGINNINGS, (stream_id,))))


def load_head(db: apsw.Connection, kept: Kept, partition: int) -> Head:
    """Read where a partition ends."""
    row = db.execute(LAST_EVENT, (kept.stream_id, partition)).get
    if row is not None:
        offset, chain, size, latest = msgspec.convert(row, _LastEvent)
        return Head(partition, offset + 1, chain, size, latest)
    head = empty_head(kept.stream, partition)
    head.next_offset = kept.firsts[partition]
    head.chain = kept.base_chains[partition]
    head.size = kept.base_bytes[partition]
    return head


def load_consumers(db: apsw.Connection, kept: Kept, name: str | None = None) -> list[Consumer]:
    """Read the consumers of a stream (or one of them), by id."""
    found: dict[str, Consumer] = {}
    for consumer, start, epoch, created, partition, following, committed, skipped, updated in db.execute(
        READERS, (kept.stream_id, name)
    ):
        if consumer not in found:
            cursors = tuple(Cursor(number, 0) for number in range(kept.stream.settings.partitions))
            made = Consumer(
                consumer, kept.stream.name, msgspec.json.decode(start, type=Start), epoch, cursors, created, created
            )
            found[consumer] = made
        if partition is not None and partition < kept.stream.settings.partitions:
            known = found[consumer]
            cursor = Cursor(partition, following, committed, skipped)
            cursors = (*known.cursors[:partition], cursor, *known.cursors[partition + 1 :])
            latest = max(known.updated_at_us, updated)
            found[consumer] = msgspec.structs.replace(known, cursors=cursors, updated_at_us=latest)
    return list(found.values())


def load_consumer(db: apsw.Connection, kept: Kept, name: str) -> Consumer | None:
    """Read one consumer."""
    found = load_consumers(db, kept, name)
    return found[0] if found else None


def save_consumer(
    db: apsw.Connection, kept: Kept, old: Consumer | None, new: Consumer | None, kind: str, now_us: int
) -> None:
    """Write what changed between two states of a consumer, with its audit."""
    if new is None:
        if old is not None:
            db.execute(DELETE_READER, (kept.stream_id, old.id))
            db.execute(DELETE_CURSORS, (kept.stream_id, old.id))
        return
    if old is None or old.epoch != new.epoch:
        start = msgspec.json.encode(new.start).decode()
        row: tuple[Any, ...] = (kept.stream_id, new.id, start, new.epoch, new.created_at_us)
        db.execute(SAVE_READER, (*row, seal(*row)))
    for cursor in new.cursors:
        if old is None or cursor not in old.cursors:
            row = (
                kept.stream_id,
                new.id,
                cursor.partition,
                cursor.next_offset,
                cursor.committed,
                cursor.skipped,
                now_us,
            )
            db.execute(SAVE_CURSOR, (*row, seal(*row)))
            if kind:
                audit = (kept.stream_id, new.id, cursor.partition, kind, cursor.next_offset - 1, now_us)
                db.execute(AUDIT, audit)


class Ledger:
    """The writer's knowledge. ``forget`` when the database may have changed in another way than through the doors."""

    def __init__(self) -> None:
        self._streams: dict[str, Kept] = {}
        self._heads: dict[tuple[int, int], Head] = {}
        self._consumers: dict[tuple[int, str], Consumer | None] = {}

    def forget(self) -> None:
        """Drop everything."""
        self._streams.clear()
        self._heads.clear()
        self._consumers.clear()

    def stream(self, db: apsw.Connection, name: str) -> Kept | None:
        """Return a stream, or None."""
        kept = self._streams.get(name)
        if kept is None:
            kept = load_stream(db, name)
            if kept is not None:
                self._streams[name] = kept
        return kept

    def head(self, db: apsw.Connection, kept: Kept, partition: int) -> Head:
        """Return where a partition ends."""
        key = (kept.stream_id, partition)
        head = self._heads.get(key)
        if head is None:
            head = self._heads[key] = load_head(db, kept, partition)
        return head

    def put_head(self, kept: Kept, head: Head) -> None:
        """Replace a head after a commit."""
        self._heads[kept.stream_id, head.partition] = head

    def consumer(self, db: apsw.Connection, kept: Kept, name: str) -> Consumer | None:
        """Return a consumer, or None."""
        key = (kept.stream_id, name)
        if key not in self._consumers:
            self._consumers[key] = load_consumer(db, kept, name)
        return self._consumers[key]

    def put_consumer(self, kept: Kept, name: str, consumer: Consumer | None) -> None:
        """Replace a consumer after a commit."""
        self._consumers[kept.stream_id, name] = consumer


class View:
    """The extents of one stream, asked inside a transaction (see ``cursors.Extents`` and ``retention.Retained``)."""

    def __init__(self, db: apsw.Connection, kept: Kept, heads: dict[int, int]) -> None:
        self.stream = kept.stream
        self._db = db
        self._kept = kept
        self._heads = heads

    def first(self, partition: int) -> int:
        """See ``Extents.first``."""
        return int(self._kept.firsts[partition])

    def head(self, partition: int) -> int:
        """See ``Extents.head``."""
        if partition not in self._heads:
            self._heads[partition] = load_head(self._db, self._kept, partition).next_offset
        return self._heads[partition]

    def at_time(self, partition: int, time_us: int) -> int:
        """See ``Extents.at_time``: the running latest time only grows, so bisection finds the place."""
        low, high = self.first(partition), self.head(partition)
        while low < high:
            middle = (low + high) // 2
            latest = self._db.execute(LATEST_AT, (self._kept.stream_id, partition, middle)).get
            if msgspec.convert(latest, int) >= time_us:
                high = middle
            else:
                low = middle + 1
        if low == self.first(partition):
            # A trimmed event may have brought the running time here; look at the events themselves.
            found = self._db.execute(FIRST_OCCURRED, (self._kept.stream_id, partition, low, time_us)).get
            return self.head(partition) if found is None else msgspec.convert(found, int)
        return low

    def size_through(self, partition: int, offset: int) -> int:
        """See ``Retained.size_through``."""
        if offset < self.first(partition):
            return int(self._kept.base_bytes[partition])
        return msgspec.convert(self._db.execute(SIZE_THROUGH, (self._kept.stream_id, partition, offset)).get, int)

    def first_created_since(self, partition: int, time_us: int) -> int:
        """See ``Retained.first_created_since``."""
        where = (self._kept.stream_id, partition, self.first(partition), time_us)
        found = self._db.execute(FIRST_CREATED, where).get
        return self.head(partition) if found is None else msgspec.convert(found, int)
