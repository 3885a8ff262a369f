"""The embedded log: one SQLite file, appends by group commit, caught-up readers served from memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from postbus.log.cursors import (
    Change,
    CursorLog,
    check_partition,
    check_range,
    check_start,
    no_stream,
    passed,
    restarted,
)
from postbus.log.settings import accept, check_settings
from postbus.log.sqlite.doors import AppendDoor, ConsumerDoor, StreamDoor, Transaction, TransactionDoor
from postbus.log.sqlite.ledger import Kept, Ledger, load_consumer, load_consumers, load_head, load_stream, save_consumer
from postbus.log.sqlite.projections import Projections
from postbus.log.sqlite.published import Extent, Published
from postbus.log.sqlite.rewind import rewind
from postbus.log.sqlite.trim import REWIND_PROJECTIONS, Trimmer
from postbus.model import Conflict, Event, PartitionStats, Stream, StreamSettings, StreamStats
from postbus.store import Store
from postbus.store.anchor import Mark
from postbus.store.records import EVENT_FIELDS, genesis, seal
from postbus.topics import check_stream_name

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Coroutine, Sequence

    import apsw

    from postbus.clock import Clock
    from postbus.model import Consumer, Draft, Durability, Receipt, Start, TrimResult

__all__ = ["SqliteLog"]

T = TypeVar("T")

POLL_S = 0.02

# All streams there are, and one whatever became of it.
STREAMS = "SELECT name FROM stream_registry WHERE NOT deleted ORDER BY name"
REGISTERED = "SELECT stream_id, epoch FROM stream_registry WHERE name = ?"
SAVE_STREAM = """
    INSERT OR REPLACE INTO stream_registry (name, stream_id, settings, epoch, created_at_us, deleted, seal)
    VALUES (?, ?, ?, ?, ?, ?, ?)
"""
SAVE_PARTITION = "INSERT OR REPLACE INTO partitions VALUES (?, ?, ?, ?, ?, ?, ?)"
NEXT_STREAM_ID = "SELECT IFNULL(max(stream_id), 0) + 1 FROM stream_registry"
NEXT_SLOT = "SELECT IFNULL(max(slot), -1) + 1 FROM partitions"

# The look-up by correlation of a whole stream.
FORGET_CORRELATIONS = """
    DELETE FROM correlation_rows WHERE (correlation_id, seq) IN (
        SELECT correlation_id, seq FROM events WHERE stream_id = ? AND correlation_id IS NOT NULL)
"""

# The events of an offset range.
BY_OFFSET = f"""
    SELECT {EVENT_FIELDS} FROM events WHERE stream_id = ? AND partition = ? AND "offset" >= ? AND "offset" < ?
    ORDER BY "offset"
"""  # noqa: S608 - constants only


class SqliteLog(CursorLog):
    """The log in a data folder. ``store`` and ``projections`` are open to the rooms above."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._ledger = Ledger()
        self._published = Published()
        self._append_door = AppendDoor(store, self._ledger, self._published)
        self._consumer_door = ConsumerDoor(store, self._ledger, self._published)
        self._stream_door = StreamDoor(store, self._ledger, self._published)
        self._transaction_doors = {
            grows: TransactionDoor(store, self._append_door, self._consumer_door, grows=grows)
            for grows in (False, True)
        }
        store.writer.add_door(self._append_door)
        self._trimmer = Trimmer(store, self._stream_door)
        self.projections = Projections(store, self._published.waiters)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        durability: Durability | str = "full",
        vfs: str | None = None,
        create: bool = True,
    ) -> SqliteLog:
        """Open the log in a folder; see ``Store.open`` for what it raises."""
        return cls(Store.open(path, clock=clock, durability=durability, vfs=vfs, create=create))

    # --- streams ---

    async def ensure_stream(self, name: str, settings: StreamSettings | None = None) -> Stream:
        """See ``Log.ensure_stream``."""
        check_stream_name(name)
        if settings is not None:
            check_settings(settings)
        self.store.writer.notice()
        known = self._published.streams.get(name)
        if known is None:
            known = await self.store.submit(self._stream_door, lambda db: self._make_stream(db, name, settings))
        return accept(known, settings)

    async def create_stream(self, name: str, settings: StreamSettings) -> Stream:
        """Make a stream that is not there yet; raises ``Conflict`` when it is, whatever its settings."""
        check_stream_name(name)
        check_settings(settings)
        made: Stream = await self.store.submit(
            self._stream_door, lambda db: self._make_stream(db, name, settings, new=True)
        )
        return made

    def _make_stream(
        self, db: apsw.Connection, name: str, settings: StreamSettings | None, *, new: bool = False
    ) -> Stream:
        kept = load_stream(db, name)
        if kept is not None:
            if new:
                raise Conflict(f"stream {name} exists already")
            return kept.stream
        row = db.execute(REGISTERED, (name,)).get
        stream_id = row[0] if row else db.execute(NEXT_STREAM_ID).get
        epoch = row[1] + 1 if row else 0
        made = Stream(name, settings or StreamSettings(), epoch, self.store.clock.now_us())
        self._write_stream(db, stream_id, made, [0] * made.settings.partitions)
        return made

    def _write_stream(self, db: apsw.Connection, stream_id: int, made: Stream, firsts: Sequence[int]) -> None:
        """Write a stream that is not there, each partition beginning at its first offset; its consumers start over."""
        name, epoch = made.name, made.epoch
        text = msgspec.json.encode(made.settings).decode()
        facts: tuple[Any, ...] = (name, stream_id, text, epoch, made.created_at_us, 0)
        db.execute(SAVE_STREAM, (*facts, seal(*facts)))
        slot = db.execute(NEXT_SLOT).get
        for partition, first in enumerate(firsts):
            chain = genesis(name, epoch, partition)
            facts = (stream_id, partition, slot + partition, first, 0, chain)
            db.execute(SAVE_PARTITION, (*facts, seal(*facts)))
            self._stream_door.marks[slot + partition] = Mark(stream_id, partition, epoch, first, chain)
        kept = load_stream(db, name)
        assert kept is not None  # noqa: S101 - just written
        for consumer in load_consumers(db, kept):
            begun, _ = passed(restarted(consumer, made), dict(enumerate(firsts)), made.created_at_us)
            save_consumer(db, kept, None, begun, "", made.created_at_us)

    async def has_stream(self, name: str) -> bool:
        """Say whether a stream of that name exists; from memory unless something changed."""
        names = self._published.names
        if names is None:
            changes = self._published.changes
            names = await self.store.read(lambda db: {str(found) for (found,) in db.execute(STREAMS)})
            if changes == self._published.changes:
                self._published.names = names
        return name in names

    def known_heads(self) -> dict[tuple[str, int], int]:
        """Return the high water marks that are in memory, by stream and partition; never ahead of the log."""
        return {key: extent[1] for key, extent in self._published.extents.items()}

    @property
    def foreign_changes(self) -> int:
        """A number that changes whenever the database was changed in another way than through this log's doors."""
        return self._published.changes

    async def streams(self) -> list[Stream]:
        """See ``Log.streams``."""

        def look(db: apsw.Connection) -> list[Stream]:
            found = [load_stream(db, name) for (name,) in list(db.execute(STREAMS))]
            return [kept.stream for kept in found if kept is not None]

        return await self.store.read(look)

    async def delete_stream(self, name: str) -> None:
        """See ``Log.delete_stream``."""
        await self.store.submit(self._stream_door, lambda db: self._delete_stream(db, name))

    @staticmethod
    def _delete_stream(db: apsw.Connection, name: str) -> None:
        kept = load_stream(db, name)
        if kept is None:
            raise no_stream(name)
        db.execute(FORGET_CORRELATIONS, (kept.stream_id,))
        for table in ("events", "identities", "cursors", "partitions", "time_buckets"):
            db.execute(f"DELETE FROM {table} WHERE stream_id = ?", (kept.stream_id,))  # noqa: S608 - from the list above
        db.execute(REWIND_PROJECTIONS)
        text = msgspec.json.encode(kept.stream.settings).decode()
        facts = (name, kept.stream_id, text, kept.stream.epoch, kept.stream.created_at_us, 1)
        db.execute(SAVE_STREAM, (*facts, seal(*facts)))

    # --- events ---

    def append(self, stream: str, drafts: Sequence[Draft]) -> Coroutine[Any, Any, list[Receipt]]:
        """See ``Log.append``."""
        writer = self.store.writer
        if drafts and not writer.crowded:
            return writer.put(self._append_door, (stream, drafts), len(drafts))
        return self._append_later(stream, drafts)

    async def _append_later(self, stream: str, drafts: Sequence[Draft]) -> list[Receipt]:
        if not drafts:
            self.store.writer.notice()
            await self._stream(stream)
            return []
        await self.store.room()
        receipts: list[Receipt] = await self.store.writer.put(self._append_door, (stream, drafts), len(drafts))
        return receipts

    async def fetch(self, stream: str, partition: int, offset: int, limit: int = 100) -> list[Event]:
        """See ``Log.fetch``."""
        self.store.writer.notice()
        first, head, *_ = await self._where(stream, partition)
        check_range(offset, limit)
        start = max(offset, first)
        end = min(head, start + limit)
        if start >= end:
            return []
        recent = self._published.tails.get((stream, partition), start, end)
        if recent is not None:
            return recent
        return await self.store.read(lambda db: _fetch(db, stream, partition, start, end))

    async def wait(
        self, stream: str, partition: int, offset: int, timeout_s: float, at_once: Callable[[], bool] | None = None
    ) -> bool:
        """See ``Log.wait``; for ``at_once`` see ``Waiters.wait``."""
        clock = self.store.clock
        deadline = clock.monotonic_s() + timeout_s
        key = (stream, partition)
        while True:
            if self._ahead(key, offset):  # committed by this process: nobody needs to be asked
                return True
            self.store.writer.notice()
            if (await self._where(stream, partition))[1] > offset:
                return True
            left = deadline - clock.monotonic_s()
            if left <= 0:
                return False
            # Commits of this process wake at once; those of others are looked for a few times a second.
            await self._published.waiters.wait(key, lambda: self._grown(key, offset), min(left, POLL_S), at_once)

    def recent(self, stream: str, partition: int, offset: int, limit: int) -> list[Event]:
        """Return events from ``offset`` on that are in memory; none when ``fetch`` has to look for them."""
        key = (stream, partition)
        if not self._ahead(key, offset):
            return []
        end = min(self._published.extents[key][1], offset + limit)
        return self._published.tails.get(key, offset, end) or []

    def _ahead(self, key: tuple[str, int], offset: int) -> bool:
        extent = self._published.extents.get(key)
        return extent is not None and extent[0] <= offset < extent[1]

    def _grown(self, key: tuple[str, int], offset: int) -> bool:
        extent = self._published.extents.get(key)
        return extent is None or extent[1] > offset

    async def transact(self, call: Callable[[Transaction], T], *, grows: bool = False) -> T:
        """Run a function of a ``Transaction`` in the next commit and return its result when durable.

        All or nothing. ``grows`` says that it takes space, so that it is refused while the disk is full.
        """
        result: T = await self.store.submit(self._transaction_doors[grows], call)
        return result

    async def reset(self, stream: str, consumer: str, start: Start, partition: int | None = None) -> Consumer:
        """See ``Log.reset``; whoever delivers to the consumer, in any process, goes on from the new place."""
        start = check_start(start)
        moved = await self.transact(lambda tx: rewind(tx, stream, consumer, start, partition))
        self._published.forget()  # lanes of this process notice as they notice what other processes change
        return moved

    async def trim(self, stream: str, before: int | None = None, partition: int | None = None) -> TrimResult:
        """See ``Log.trim``."""
        return await self._trimmer.trim(stream, before, partition)

    # --- what is known ---

    async def consumers(self, stream: str | None = None) -> list[Consumer]:
        """See ``Log.consumers``."""

        def look(db: apsw.Connection) -> list[Consumer]:
            names = [name for (name,) in list(db.execute(STREAMS)) if stream in (None, name)]
            found = [load_stream(db, name) for name in names]
            return [consumer for kept in found if kept is not None for consumer in load_consumers(db, kept)]

        return await self.store.read(look)

    async def get_stream_stats(self, stream: str) -> StreamStats:
        """See ``Log.get_stream_stats``."""
        self.store.writer.notice()
        known = await self._stream(stream)
        rows = []
        for partition in range(known.settings.partitions):
            first, head, size, chain = await self._where(stream, partition)
            rows.append(PartitionStats(partition, first, head, size, chain.hex()))
        return StreamStats(known, tuple(rows))

    async def close(self) -> None:
        """See ``Log.close``."""
        await self.projections.stop()
        await self.store.close()

    async def _change(self, stream: str, consumer: str, rule: Callable[..., Change], *args: object) -> Any:
        return await self.store.submit(self._consumer_door, (stream, consumer, rule, args))

    async def _consumer(self, stream: str, consumer: str) -> Consumer | None:
        self.store.writer.notice()
        known = self._published.consumers.get((stream, consumer))
        if known is not None:
            return known
        generation = self._published.generation

        def look(db: apsw.Connection) -> Consumer | None:
            kept = load_stream(db, stream)
            if kept is None:
                raise no_stream(stream)
            return load_consumer(db, kept, consumer)

        found = await self.store.read(look)
        if found is not None and generation == self._published.generation:
            self._published.consumers[stream, consumer] = found
        return found

    async def _stream(self, name: str) -> Stream:
        known = self._published.streams.get(name)
        if known is not None:
            return known
        generation = self._published.generation
        kept = await self.store.read(lambda db: load_stream(db, name))
        if kept is None:
            raise no_stream(name)
        if generation == self._published.generation:
            self._published.streams[name] = kept.stream
        return kept.stream

    async def _extent(self, stream: str, partition: int) -> tuple[int, int]:
        first, head, *_ = await self._where(stream, partition)
        return first, head

    async def _where(self, stream: str, partition: int) -> Extent:
        known = self._published.extents.get((stream, partition))
        if known is not None:
            return known
        check_partition(await self._stream(stream), partition)
        generation = self._published.generation

        def look(db: apsw.Connection) -> Extent:
            kept = load_stream(db, stream)
            if kept is None:
                raise no_stream(stream)
            return _extent(db, kept, check_partition(kept.stream, partition))

        found = await self.store.read(look)
        if generation == self._published.generation:
            self._published.extents[stream, partition] = found
        return found


def _extent(db: apsw.Connection, kept: Kept, partition: int) -> Extent:
    head = load_head(db, kept, partition)
    size = head.size - kept.base_bytes[partition]
    return kept.firsts[partition], head.next_offset, size, head.chain


def _fetch(db: apsw.Connection, stream: str, partition: int, start: int, end: int) -> list[Event]:
    kept = load_stream(db, stream)
    if kept is None:
        raise no_stream(stream)
    return [Event(stream, *row) for row in db.execute(BY_OFFSET, (kept.stream_id, partition, start, end))]
