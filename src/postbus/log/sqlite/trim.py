"""Trimming the embedded log: the beginning of a partition moves in small transactions, so that nobody waits long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postbus.log.cursors import check_partition, held_back, no_stream, passed
from postbus.log.retention import retention_target
from postbus.log.sqlite.ledger import Kept, View, load_consumers, load_stream, save_consumer
from postbus.model import Gap, TrimResult
from postbus.store.records import seal

if TYPE_CHECKING:
    import apsw

    from postbus.log.sqlite.doors import StreamDoor
    from postbus.model import Consumer
    from postbus.store import Store

__all__ = ["MOVE_BEGINNING", "REWIND_PROJECTIONS", "Trimmer", "clamp", "remove"]

CHUNK = 2000

# What the chain and the counters were just before the new beginning.
BEFORE = 'SELECT chain, bytes_through FROM events WHERE stream_id = ? AND partition = ? AND "offset" = ?'
MOVE_BEGINNING = """
    UPDATE partitions SET first_offset = ?, base_bytes = ?, base_chain = ?, seal = ?
    WHERE stream_id = ? AND partition = ?
"""
FORGET_CORRELATIONS = """
    DELETE FROM correlation_rows WHERE (correlation_id, seq) IN (
        SELECT correlation_id, seq FROM events
        WHERE stream_id = ? AND partition = ? AND "offset" < ? AND correlation_id IS NOT NULL)
"""
# The first event below an offset that some subscription has read but not settled.
UNSETTLED = """
    SELECT "offset", consumer FROM delivery_rows
    WHERE stream_id = ? AND partition = ? AND "offset" < ? AND status IN ('waiting', 'processing')
    ORDER BY "offset" LIMIT 1
"""
# The first event of a range that some agent has not acked.
UNACKED = """
    SELECT i."offset", 'inbox of ' || a.agent FROM inbox_rows i JOIN agent_registry a USING (agent_no)
    WHERE i.stream_id = ? AND i.partition = ? AND i."offset" >= ? AND i."offset" < ? AND i.acked_at_us IS NULL
    ORDER BY i."offset" LIMIT 1
"""
REMOVE = 'DELETE FROM events WHERE stream_id = ? AND partition = ? AND "offset" < ?'
# The numbers of the last rows are given out again once they are gone, so no projection may claim to reach beyond them.
REWIND_PROJECTIONS = (
    "UPDATE projection_place SET next_seq = min(next_seq, (SELECT IFNULL(max(seq), 0) + 1 FROM events))"
)
FORGET_IDENTITIES = "DELETE FROM identities WHERE stream_id = ? AND created_at_us < ?"
PRUNE_AUDIT = "DELETE FROM consumer_commits WHERE committed_at_us < ?"
AUDIT_AGE_US = 30 * 86_400 * 1_000_000


class Trimmer:
    """Moves beginnings. Each step decides anew how far it may go, since readers move meanwhile."""

    def __init__(self, store: Store, door: StreamDoor) -> None:
        self._store = store
        self._door = door

    async def trim(self, stream: str, before: int | None, partition: int | None) -> TrimResult:
        """See ``Log.trim``."""
        removed = 0
        gaps: dict[tuple[str, int], int] = {}
        while True:
            step = await self._store.submit(self._door, lambda db: self._step(db, stream, before, partition))
            removed += step.removed
            for gap in step.gaps:
                key = (gap.consumer, gap.partition)
                gaps[key] = gaps.get(key, 0) + gap.missed
            if step.removed == 0:
                found = tuple(Gap(*key, missed) for key, missed in gaps.items())
                return TrimResult(removed, step.first_offsets, step.held_back_by, found)

    def _step(self, db: apsw.Connection, stream: str, before: int | None, partition: int | None) -> TrimResult:
        kept = load_stream(db, stream)
        if kept is None:
            raise no_stream(stream)
        settings = kept.stream.settings
        numbers = range(settings.partitions) if partition is None else [check_partition(kept.stream, partition)]
        now = self._store.clock.now_us()
        view = View(db, kept, {})
        targets = {number: retention_target(view, number, before, now) for number in numbers}
        readers = load_consumers(db, kept)
        holders: set[str] = set()
        removed = 0
        for number, target in targets.items():
            floor, names = held_back(readers, number, target)
            where, first = (kept.stream_id, number), kept.firsts[number]
            waiting = db.execute(UNSETTLED, (*where, floor)).fetchone()
            if waiting is not None:
                floor, names = waiting[0], [*names, waiting[1]]
            # Items that are acked stay for a day: looking no further than this step goes keeps it short.
            owed = db.execute(UNACKED, (*where, first, min(floor, first + CHUNK))).fetchone()
            if owed is not None:
                floor, names = owed[0], [*names, owed[1]]
            if settings.retention_beats_consumers:
                floor, names = target, []
            holders.update(names)
            removed += remove(db, kept, number, min(floor, kept.firsts[number] + CHUNK - removed))
        gaps = clamp(db, kept, readers, now)
        if settings.identity_window_s is not None:
            db.execute(FORGET_IDENTITIES, (kept.stream_id, now - int(settings.identity_window_s * 1e6)))
        db.execute(PRUNE_AUDIT, (now - AUDIT_AGE_US,))
        return TrimResult(removed, tuple(kept.firsts), tuple(sorted(holders)), tuple(gaps))


def remove(db: apsw.Connection, kept: Kept, partition: int, first: int) -> int:
    """Move one beginning to ``first`` and remove what lies before it; return how many events that was."""
    count = first - kept.firsts[partition]
    if count <= 0:
        return 0
    where = (kept.stream_id, partition)
    chain, size = db.execute(BEFORE, (*where, first - 1)).get
    db.execute(FORGET_CORRELATIONS, (*where, first))
    db.execute(REMOVE, (*where, first))
    db.execute(REWIND_PROJECTIONS)
    sealed = seal(*where, kept.slots[partition], first, size, chain)
    db.execute(MOVE_BEGINNING, (first, size, chain, sealed, *where))
    kept.firsts[partition] = first
    return count


def clamp(db: apsw.Connection, kept: Kept, readers: list[Consumer], now_us: int) -> list[Gap]:
    """Move the cursors that the beginnings have passed; return who missed how much."""
    gaps: list[Gap] = []
    for reader in readers:
        moved, missed = passed(reader, dict(enumerate(kept.firsts)), now_us)
        if missed:
            save_consumer(db, kept, reader, moved, "retention", now_us)
            gaps += [Gap(reader.id, partition, count) for partition, count in missed.items()]
    return gaps
