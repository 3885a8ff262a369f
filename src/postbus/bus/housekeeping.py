"""Housekeeping: each stream's retention, and whatever else is kept for a while only.

Each duty removes in small transactions, so that nobody waits long, and can be run at any time, again and again, beside
running processes. What is still to be delivered, retried or replayed is never touched.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from postbus.bus.purge import dead_letters, purge
from postbus.log.cursors import held_back
from postbus.log.retention import retention_target
from postbus.log.sqlite.ledger import View, load_consumers, load_stream
from postbus.model import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    import apsw

    from postbus.clock import Clock
    from postbus.log.sqlite import SqliteLog

    Progress = Callable[[str, int, int], None]

__all__ = ["Duty", "keep_house"]

CHUNK = 2000

# The first event that a subscription still has to handle although its cursor has passed it.
FIRST_UNSETTLED = """
    SELECT d."offset", d.consumer FROM delivery_rows d JOIN stream_registry s USING (stream_id)
    WHERE s.name = ? AND d.partition = ? AND d.status IN ('waiting', 'processing') ORDER BY d."offset" LIMIT 1
"""
# The first event that an agent has in its inbox and has not acked.
FIRST_UNACKED = """
    SELECT i."offset", 'inbox of ' || a.agent FROM inbox_rows i JOIN agent_registry a USING (agent_no)
    JOIN stream_registry s USING (stream_id)
    WHERE s.name = ? AND i.partition = ? AND i.acked_at_us IS NULL AND i."offset" >= ?
    ORDER BY i."offset" LIMIT 1
"""
LETTERS = "SELECT id, state, created_at FROM dead_letters"
# A delivery that is not over may need the copy of its event: retention may have removed the original.
NEEDED = "SELECT dead_stream, dead_offset FROM delivery_rows WHERE status <> 'done' AND dead_stream IS NOT NULL"
PASSED = """
    "offset" < IFNULL((SELECT c.next_offset FROM cursors c WHERE c.stream_id = t.stream_id AND c.consumer = t.consumer
                       AND c.partition = t.partition), 1 << 62)
"""


class _Prune(msgspec.Struct, frozen=True):
    """Rows of a table that need not be kept: the table, its key, and when a row may go (? is the instant)."""

    what: str
    table: str
    key: str
    may_go: str


PRUNES = (
    _Prune(
        "deliveries that are done",
        "delivery_rows",
        'stream_id, partition, "offset", consumer',
        f"status = 'done' AND updated_at_us < ? AND {PASSED}",
    ),
    _Prune(
        "failed deliveries without event or dead letter",
        "delivery_rows",
        'stream_id, partition, "offset", consumer',
        """status = 'failed' AND updated_at_us < ? AND NOT EXISTS (SELECT 1 FROM events e
           WHERE e.stream_id = t.stream_id AND e.partition = t.partition AND e."offset" = t."offset")
           AND NOT EXISTS (SELECT 1 FROM events e JOIN stream_registry s USING (stream_id)
           WHERE s.name = t.dead_stream AND e.partition = 0 AND e."offset" = t.dead_offset)""",
    ),
    _Prune(
        "results of side effects",
        "once_results",
        'stream_id, partition, "offset", consumer, key',
        f"""at_us < ? AND {PASSED} AND NOT EXISTS (SELECT 1 FROM delivery_rows d WHERE d.stream_id = t.stream_id
            AND d.partition = t.partition AND d."offset" = t."offset" AND d.consumer = t.consumer
            AND d.status <> 'done')""",  # noqa: S608 - constants only
    ),
    _Prune("records of commits", "consumer_commits", "commit_id", "committed_at_us < ?"),
    _Prune(
        "marks of purged dead letters",
        "dead_letters_purged",
        'stream_id, "offset"',
        """at_us < ? AND NOT EXISTS (SELECT 1 FROM events e
           WHERE e.stream_id = t.stream_id AND e."offset" = t."offset")""",
    ),
    _Prune(
        "replies that were sent or whose dead letter is gone",
        "outbox_rows",
        "seq",
        """updated_at_us < ? AND (state = 'sent' OR state = 'failed' AND NOT EXISTS (
           SELECT 1 FROM delivery_rows d JOIN stream_registry s USING (stream_id)
           WHERE s.name = t.stream AND d.partition = t.partition AND d."offset" = t."offset"
           AND d.consumer = '_replies'))""",
    ),
    _Prune(
        "attempts of removed replies",
        "outbox_attempts",
        "delivery, attempt, started_at_us",
        "started_at_us < ? AND NOT EXISTS (SELECT 1 FROM outbox_rows o WHERE o.delivery = t.delivery)",
    ),
    _Prune(
        "look-ups by topic of removed events",
        "topic_blocks",
        "topic, block",
        "? IS NOT NULL AND block < (SELECT min(seq) / 256 FROM events)",
    ),
)


class Duty(msgspec.Struct, frozen=True):
    """What one duty removed, or would remove; ``held_back_by`` names the readers that keep events from going."""

    what: str
    removed: int
    held_back_by: tuple[str, ...] = ()


async def keep_house(
    log: SqliteLog,
    clock: Clock,
    *,
    older_than_s: float = 30 * 86_400,
    failed_older_than_s: float | None = None,
    dry_run: bool = False,
    source: str = "housekeeping",
    progress: Progress = lambda _what, _done, _total: None,
) -> list[Duty]:
    """Do every duty once over the whole store, or with ``dry_run`` only count.

    ``older_than_s`` is for records beside the log: finished deliveries, results of side effects, commits, dead letters
    that were replayed. Open dead letters stay, unless ``failed_older_than_s`` says from which age on they are put away.
    """
    cut_us = clock.now_us() - int(older_than_s * 1e6)
    duties = [await _retention(log, clock.now_us(), dry_run=dry_run, progress=progress)]
    if failed_older_than_s is not None:
        failed_cut_us = clock.now_us() - int(failed_older_than_s * 1e6)
        duties.append(await _give_up(log, clock, failed_cut_us, source, dry_run=dry_run, progress=progress))
    duties.append(await _resolved_letters(log, cut_us, dry_run=dry_run, progress=progress))
    return duties + [await _prune(log, prune, cut_us, dry_run=dry_run, progress=progress) for prune in PRUNES]


# --- events -----------------------------------------------------------------------------------------------------------


async def _retention(log: SqliteLog, now_us: int, *, dry_run: bool, progress: Progress) -> Duty:
    what = "events beyond their stream's retention"
    streams = await log.streams()
    removed, holders = 0, set[str]()
    for number, stream in enumerate(streams):
        progress(what, number, len(streams))
        plan = await log.store.read(lambda db, name=stream.name: _plan(db, name, now_us))  # type: ignore[misc]  # mypy cannot infer a default's type
        for partition, (first, floor, names) in enumerate(plan):
            holders.update(names)
            if dry_run:
                removed += floor - first
            elif floor > first or stream.settings.identity_window_s is not None:
                removed += (await log.trim(stream.name, before=floor, partition=partition)).removed
    return Duty(what, removed, tuple(sorted(holders)))


def _plan(db: apsw.Connection, name: str, now_us: int) -> list[tuple[int, int, list[str]]]:
    """Return for each partition the first offset now, the first one to keep, and who wants more to be kept."""
    kept = load_stream(db, name)
    if kept is None:
        return []
    readers = load_consumers(db, kept)
    view = View(db, kept, {})
    plan = []
    for partition, first in enumerate(kept.firsts):
        floor, names = retention_target(view, partition, None, now_us), list[str]()
        if not kept.stream.settings.retention_beats_consumers:
            floor, names = held_back(readers, partition, floor)
            unsettled = db.execute(FIRST_UNSETTLED, (name, partition)).fetchone()
            if unsettled is not None and unsettled[0] < floor:
                floor = unsettled[0]
                names.append(unsettled[1])
            owed = db.execute(FIRST_UNACKED, (name, partition, first)).fetchone()
            if owed is not None and owed[0] < floor:
                floor = owed[0]
                names.append(owed[1])
        plan.append((first, max(floor, first), names))
    return plan


# --- dead letters -----------------------------------------------------------------------------------------------------


async def _give_up(
    log: SqliteLog, clock: Clock, cut_us: int, source: str, *, dry_run: bool, progress: Progress
) -> Duty:
    what = "open dead letters"
    tenants = sorted({stream.name.rpartition(".")[0] for stream in await log.streams()})
    removed = 0
    for number, tenant in enumerate(tenants):
        progress(what, number, len(tenants))
        found = await dead_letters(log, clock, tenant).find()
        old = [entry for entry in found if entry.created_at * 1e6 < cut_us]
        removed += len(old) if dry_run else await purge(log, clock, tenant, old, source)
    return Duty(what, removed)


async def _resolved_letters(log: SqliteLog, cut_us: int, *, dry_run: bool, progress: Progress) -> Duty:
    """Remove purged letters, and replayed ones that are old, from the beginnings of dead-letter streams."""
    what = "dead letters that were purged or replayed"
    plan = await log.store.read(lambda db: _resolved(db, cut_us))
    removed = 0
    for number, (stream, partition, first, keep) in enumerate(plan):
        progress(what, number, len(plan))
        try:
            removed += keep - first if dry_run else (await log.trim(stream, before=keep, partition=partition)).removed
        except NotFound:
            continue  # deleted meanwhile
    return Duty(what, removed)


def _resolved(db: apsw.Connection, cut_us: int) -> list[tuple[str, int, int, int]]:
    """Return (stream, partition, first offset, first offset to keep) for each beginning that may move."""
    letters = []
    needed = {f"{stream}/0/{offset}" for stream, offset in db.execute(NEEDED)}
    for letter, state, created_at in db.execute(LETTERS):
        stream, partition, offset = letter.rsplit("/", 2)
        old = state == "replayed" and created_at * 1e6 < cut_us and letter not in needed
        resolved = state == "purged" or old
        letters.append((stream, int(partition), int(offset), resolved))
    plan = []
    for (stream, partition), group in groupby(sorted(letters), key=lambda letter: letter[:2]):
        places = list(group)
        first = places[0][2]
        keep = next((offset for _, _, offset, resolved in places if not resolved), places[-1][2] + 1)
        if keep > first:
            plan.append((stream, partition, first, keep))
    return plan


# --- rows -------------------------------------------------------------------------------------------------------------


async def _prune(log: SqliteLog, prune: _Prune, cut_us: int, *, dry_run: bool, progress: Progress) -> Duty:
    counting = f"SELECT count(*) FROM {prune.table} t WHERE {prune.may_go}"  # noqa: S608 - constants only
    total = await log.store.read(lambda db: int(db.execute(counting, (cut_us,)).get))
    if dry_run:
        return Duty(prune.what, total)
    removing = f"""
        DELETE FROM {prune.table} WHERE ({prune.key}) IN
        (SELECT {prune.key} FROM {prune.table} t WHERE {prune.may_go} LIMIT {CHUNK})
    """  # noqa: S608 - constants only

    def remove(db: apsw.Connection) -> int:
        db.execute(removing, (cut_us,))
        return db.changes()

    removed = 0
    while removed < total:
        progress(prune.what, removed, total)
        step = await log.store.write(remove, grows=False)
        if step == 0:
            break
        removed += step
    return Duty(prune.what, removed)
