"""Verification that every acknowledged event is still there, unaltered and in its place.

``check_heads`` is the quick look at start-up: each partition against its anchor and its last events against the chain.
``verify`` reads everything: pages, layout, seals, every event's CRC and chain link, and the identities.
"""

from __future__ import annotations

import itertools
import zlib
from functools import cache
from typing import TYPE_CHECKING, Any

import apsw
import msgspec

from postbus.model import CorruptLog
from postbus.store import records
from postbus.store.migrations import latest_version, scripts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from postbus.store.anchor import Anchored, Mark

__all__ = ["Problem", "Report", "check_heads", "sealed_tables", "verify"]

RECENT = 32

# What reading a damaged row raises: SQLite's errors, text that is no UTF-8, and values of another type than was stored.
MISREADINGS = (ArithmeticError, LookupError, TypeError, ValueError, msgspec.MsgspecError)
UNREADABLE = (apsw.Error, *MISREADINGS)
HINT = (
    "run `postbus verify` for the first bad offset; then restore a backup with `postbus restore`, "
    "or copy every intact event with `postbus salvage`"
)

# One row per partition: its name, its extent's beginning, and what its chain starts from.
PARTITIONS = """
    SELECT s.stream_id, s.name, s.epoch, p.partition, p.first_offset, p.base_bytes, p.base_chain
    FROM partitions p JOIN stream_registry s USING (stream_id)
"""

# The last events of a partition, oldest first, with what is needed to check their links.
RECENT_EVENTS = f"""
    SELECT * FROM (
        SELECT chain, crc, {records.EVENT_FIELDS} FROM events
        WHERE stream_id = ? AND partition = ? ORDER BY "offset" DESC LIMIT {RECENT}
    ) ORDER BY 4
"""  # noqa: S608 - constants only

# Every event in arrival order.
ALL_EVENTS = f"""
    SELECT seq, stream_id, latest_at_us, bytes_through, crc, chain, occurred_at_us, {records.EVENT_FIELDS}
    FROM events ORDER BY seq
"""  # noqa: S608 - constants only

# Rows that no chain covers: their facts in the order of their seal, and the seal last.
SEALED = {
    "stream_registry": "SELECT name, stream_id, settings, epoch, created_at_us, deleted, seal FROM stream_registry",
    "partitions": "SELECT stream_id, partition, slot, first_offset, base_bytes, base_chain, seal FROM partitions",
    "readers": "SELECT stream_id, consumer, start, epoch, created_at_us, seal FROM readers",
    "cursors": (
        "SELECT stream_id, consumer, partition, next_offset, committed, skipped, updated_at_us, seal FROM cursors"
    ),
    "identities": (
        'SELECT stream_id, native_id, variant, partition, "offset", created_at_us, content, seal FROM identities'
    ),
}


# Whether a projection misses a row that it should have by now.
PROJECTED = "seq < (SELECT next_seq FROM projection_place WHERE name = 'log')"
MISSING = {
    "topic": f"""
        SELECT EXISTS (SELECT topic, seq / 256 FROM events WHERE {PROJECTED}
                       EXCEPT SELECT topic, block FROM topic_blocks)
    """,  # noqa: S608 - constants only
    "correlation": f"""
        SELECT EXISTS (SELECT correlation_id, seq FROM events WHERE {PROJECTED} AND correlation_id IS NOT NULL
                       EXCEPT SELECT correlation_id, seq FROM correlation_rows)
    """,  # noqa: S608 - constants only
    "time": f"""
        SELECT EXISTS (SELECT 1 FROM events e WHERE {PROJECTED} AND NOT EXISTS (
            SELECT 1 FROM time_buckets t
            WHERE (t.minute, t.stream_id, t.partition) = ({records.MINUTE}, e.stream_id, e.partition)
            AND e.seq BETWEEN t.first_seq AND t.last_seq))
    """,  # noqa: S608 - constants only
}


# Everything that has a definition.
LAYOUT = "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY type, name"


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong; for an event, where."""

    what: str
    stream: str | None = None
    partition: int | None = None
    offset: int | None = None


class Report(msgspec.Struct):
    """What a verification saw."""

    events: int = 0
    partitions: int = 0
    problems: list[Problem] = []

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


# --- at start-up ------------------------------------------------------------------------------------------------------


def check_heads(db: apsw.Connection, anchored: Anchored) -> None:
    """Raise ``CorruptLog`` for another layout, for altered rows beside the log, and for a log that ends otherwise.

    The anchor must have been read before ``db`` began reading.
    """
    small = [table for table in SEALED if table != "identities"]
    try:
        looks = itertools.chain(_layout_problems(db), _seal_problems(db, small), head_problems(db, anchored))
        problem = next(looks, None)
    except MISREADINGS as error:
        problem = Problem(f"its end cannot be read: {error}")
    if problem is not None:
        place = f"{problem.stream} partition {problem.partition}: " if problem.stream else ""
        raise CorruptLog(
            f"the log was altered or shortened: {place}{problem.what}",
            stream=problem.stream,
            partition=problem.partition,
            offset=problem.offset,
            hint=HINT,
        )


def head_problems(db: apsw.Connection, anchored: Anchored) -> Iterator[Problem]:
    """Compare the store with its anchor, each partition with its mark, and recompute the last links."""
    facts = dict(db.execute("SELECT name, value FROM store_facts"))
    if anchored.store_id != facts.get("store_id"):
        yield Problem("the anchor file belongs to another store")
        return
    changes = int(facts.get("changes", 0))
    if changes < anchored.changes:
        yield Problem(f"{anchored.changes} changes to readers and streams were acknowledged and {changes} are there")
    for mark in anchored.marks:
        yield from _mark_problems(db, mark)
    for stream_id, name, _, partition, first, _, base in list(db.execute(PARTITIONS)):
        before: bytes | None = None
        for chain, crc, *facts in db.execute(RECENT_EVENTS, (stream_id, partition)):
            encoded = records.encode(facts)
            if before is None and facts[1] == first:
                before = base
            broken = before is not None and records.link(before, encoded) != chain
            if broken or zlib.crc32(encoded, stream_id) != crc:
                yield Problem("an event is altered", name, partition, facts[1])
                break
            before = chain


def _mark_problems(db: apsw.Connection, mark: Mark) -> Iterator[Problem]:
    row = db.execute("SELECT name, epoch, deleted FROM stream_registry WHERE stream_id = ?", (mark.stream_id,)).get
    if row is None or row[1] < mark.epoch:
        yield Problem(f"stream {row[0] if row else mark.stream_id} was there before and is gone")
        return
    name, epoch, deleted = row
    if deleted or epoch > mark.epoch or mark.next_offset == 0:
        return
    where = (mark.stream_id, mark.partition)
    kept = db.execute(
        "SELECT first_offset, base_chain FROM partitions WHERE stream_id = ? AND partition = ?", where
    ).get
    if kept is None:
        yield Problem("the partition was there before and is gone", name, mark.partition)
        return
    first, base = kept
    last = mark.next_offset - 1
    if last >= first:
        found = db.execute(
            'SELECT chain FROM events WHERE stream_id = ? AND partition = ? AND "offset" = ?', (*where, last)
        ).get
    else:
        found = base if last == first - 1 else mark.chain
    if found is None:
        end = db.execute('SELECT max("offset") FROM events WHERE stream_id = ? AND partition = ?', where).get
        have = first if end is None else end + 1
        yield Problem(
            f"it ends at offset {have} but {mark.next_offset} events were acknowledged", name, mark.partition, have
        )
    elif found != mark.chain:
        yield Problem("its chain is not the one that was acknowledged", name, mark.partition, last)


# --- everything -------------------------------------------------------------------------------------------------------


def verify(
    db: apsw.Connection,
    anchored: Anchored | None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Report:
    """Check the whole store in one snapshot. ``anchored`` must have been read before ``db`` began reading.

    Never raises for damage: what cannot be read is a problem too. ``progress`` gets (events done, events in all).
    """
    report = Report()
    steps = (
        _check_pages,
        lambda db, report: report.problems.extend(_layout_problems(db)),
        lambda db, report: report.problems.extend(_seal_problems(db, SEALED)),
        lambda db, report: _check_events(db, report, progress),
        _check_projections,
    )
    for step in steps:
        try:
            step(db, report)
        except UNREADABLE as error:
            report.problems.append(Problem(f"the database cannot be read: {error}"))
    try:
        seen = {(problem.stream, problem.partition) for problem in report.problems if problem.stream}
        if anchored is not None:
            report.problems += [p for p in head_problems(db, anchored) if (p.stream, p.partition) not in seen]
    except UNREADABLE as error:
        report.problems.append(Problem(f"the ends of the partitions cannot be read: {error}"))
    return report


def _check_pages(db: apsw.Connection, report: Report) -> None:
    for (line,) in db.execute("PRAGMA integrity_check(10)"):
        if line != "ok":
            report.problems.append(Problem(f"SQLite's own check says: {line}"))


def _layout_problems(db: apsw.Connection) -> Iterator[Problem]:
    version = int(db.pragma("user_version"))
    if version != latest_version():
        yield Problem(f"layout version {version}, expected {latest_version()}")
    have = list(db.execute(LAYOUT))
    for entry in _layout():
        if entry not in have:
            yield Problem(f"the {entry[0]} {entry[1]} is not as it was made")


@cache
def _layout() -> list[Any]:
    """Return the layout that the scripts make."""
    fresh = apsw.Connection(":memory:")
    for _, script in scripts():
        fresh.execute(script)
    return list(fresh.execute(LAYOUT))


def sealed_tables() -> dict[str, str]:
    """Return the query of every sealed table: its facts in order, then its seal."""
    return dict(SEALED)


def _seal_problems(db: apsw.Connection, tables: Iterable[str]) -> Iterator[Problem]:
    for table in tables:
        try:
            for *facts, sealed in db.execute(SEALED[table]):
                if not _holds(facts, sealed):
                    yield Problem(f"a row of {table} is altered: {_shown(facts)}")
        except (apsw.CorruptError, *MISREADINGS) as error:
            yield Problem(f"a row of {table} cannot be read: {error}")


def _holds(facts: list[Any], sealed: object) -> bool:
    try:
        return records.seal(*facts) == sealed
    except (OverflowError, TypeError, ValueError):
        return False


def _shown(facts: list[Any]) -> str:
    return ", ".join(str(fact) for fact in facts if not isinstance(fact, bytes))[:120]


def _check_projections(db: apsw.Connection, report: Report) -> None:
    for name, query in MISSING.items():
        if db.execute(query).get:
            message = f"the look-up by {name} misses events; it holds nothing of its own and can be rebuilt"
            report.problems.append(Problem(message))


class _Place:
    """Where the walk through one partition stands."""

    def __init__(self, stream_id: int, name: str, partition: int, first: int, size: int, chain: bytes) -> None:
        self.stream_id = stream_id
        self.name = name
        self.partition = partition
        self.next_offset = first
        self.size = size
        self.chain = chain
        self.latest: int | None = None
        self.bad = False


def _check_events(db: apsw.Connection, report: Report, progress: Callable[[int, int], None]) -> None:
    places = {
        (stream_id, partition): _Place(stream_id, name, partition, first, size, chain)
        for stream_id, name, _, partition, first, size, chain in db.execute(PARTITIONS)
    }
    report.partitions = len(places)
    total = int(db.execute("SELECT count(*) FROM partitions").get) and int(
        db.execute("SELECT ifnull(max(seq) - min(seq) + 1, 0) FROM events").get
    )
    last_seq = 0
    try:
        for seq, stream_id, latest, size, crc, chain, occurred, *facts in db.execute(ALL_EVENTS):
            last_seq = seq
            report.events += 1
            if report.events % 1000 == 0:
                progress(report.events, total)
            place = places.get((stream_id, facts[0]))
            if place is None:
                report.problems.append(Problem(f"row {seq} belongs to no partition"))
            elif not place.bad:
                what = _event_problem(place, facts, latest, size, crc, chain) or _identity_problem(
                    db, stream_id, occurred, facts
                )
                if what:
                    place.bad = True
                    report.problems.append(Problem(what, place.name, place.partition, place.next_offset))
                place.next_offset += 1
                place.chain, place.size = chain, size
    except UNREADABLE as error:
        report.problems.append(_unreadable_row(db, places, last_seq, error))
    progress(report.events, max(total, report.events))


def _event_problem(  # noqa: PLR0911 - one sentence per thing that can be wrong with a row
    place: _Place, facts: list[Any], latest: int | None, size: int, crc: int, chain: bytes
) -> str | None:
    if facts[1] != place.next_offset:
        return f"offset {place.next_offset} is missing; the next one there is {facts[1]}"
    try:
        encoded = records.encode(facts)
    except (OverflowError, TypeError, ValueError) as error:
        return f"the event cannot be encoded: {error}"
    if zlib.crc32(encoded, place.stream_id) != crc:
        return "the event is altered"
    if records.link(place.chain, encoded) != chain:
        return "the event does not follow from the one before it"
    if size != place.size + len(encoded):
        return "the running size is altered"
    own = facts[12]
    so_far = own if latest is None else latest
    if so_far < own or (so_far > own and facts[1] == 0):
        return "the running time is altered"
    if place.latest is not None and so_far != max(place.latest, own):
        return "the running time is altered"
    place.latest = so_far
    return None


def _identity_problem(db: apsw.Connection, stream_id: int, occurred: int | None, facts: list[Any]) -> str | None:
    _, offset, topic, source, variant, key, payload, metadata, headers, _, native_id, handle, *_ = facts
    if native_id is None:
        return None
    row = db.execute(
        'SELECT "offset", content FROM identities WHERE stream_id = ? AND native_id = ? AND variant = ?',
        (stream_id, native_id, variant),
    ).get
    if row is None:
        settings = db.execute("SELECT settings FROM stream_registry WHERE stream_id = ?", (stream_id,)).get
        windowed = msgspec.json.decode(settings).get("identity_window_s") is not None
        return None if windowed else "its identity is gone"
    if row[0] != offset:
        return None  # the window let the identity go and a later event took it over
    content = (topic, source, key, payload, metadata, headers, handle)
    digests = {records.content_digest((*content, moment)) for moment in (occurred, facts[12])}
    return None if row[1] in digests else "its identity is altered"


def _unreadable_row(db: apsw.Connection, places: dict[Any, _Place], last_seq: int, error: Exception) -> Problem:
    try:  # the index is another tree and may still know which event that is
        query = (
            'SELECT stream_id, partition, "offset" FROM events INDEXED BY events_position '
            "WHERE seq > ? ORDER BY seq LIMIT 1"
        )
        row = db.execute(query, (last_seq,)).get
    except apsw.Error:
        row = None
    if row is None or (row[0], row[1]) not in places:
        return Problem(f"events after row {last_seq} cannot be read: {error}")
    return Problem(f"the event cannot be read: {error}", places[row[0], row[1]].name, row[1], row[2])
