"""Salvage: copy every intact event of a damaged store to a new one.

Pages are read one by one, not through their trees, and each event is judged by its own CRC, so that damage costs only
what it hit. Every event keeps its address: an offset that is lost gets a placeholder on the topic ``postbus.lost``.
What the pages still hold of removed events is told from what is live by the hash chain and by the anchor.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import apsw
import msgspec

from postbus.clock import SystemClock
from postbus.model import Conflict, CorruptLog, NotFound, StorageError, StreamSettings
from postbus.store import records
from postbus.store.backup import read_anchor, write_anchor
from postbus.store.carry import carry_over
from postbus.store.database import PAGE_BYTES, connect
from postbus.store.folder import Folder
from postbus.store.migrations import migrate
from postbus.store.pages import page_images, rows
from postbus.store.refusals import refusal
from postbus.store.verify import UNREADABLE, sealed_tables

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

__all__ = ["Salvaged", "salvage"]

EVENT_COLUMNS = len(records.INSERT_COLUMNS) + 1
STREAM_COLUMNS = 7
MIN_COLUMNS = 5
LOST_TOPIC = "postbus.lost"

# How many of a sealed row's first facts are its key; a stream's is its second fact, its number.
KEYS = {"stream_registry": 2, "partitions": 2, "readers": 2, "cursors": 3, "identities": 3}
# What a row of a table without rowids is, by its number of columns and whether its third is text.
KINDS = {(6, True): "readers", (7, False): "partitions", (8, False): "cursors", (8, True): "identities"}

# What was found so far. The first row of a key wins, since the newest pages are read first.
SCRATCH = """
    CREATE TABLE found (
        stream_id INTEGER, partition INTEGER, "offset" INTEGER, chain BLOB, rank INTEGER, row BLOB,
        PRIMARY KEY (stream_id, partition, "offset", chain)) WITHOUT ROWID;
    CREATE TABLE loose (tbl TEXT, newest INTEGER, key BLOB, row BLOB, PRIMARY KEY (tbl, newest, key)) WITHOUT ROWID;
    CREATE TABLE kept (tbl TEXT, key BLOB, row BLOB, PRIMARY KEY (tbl, key)) WITHOUT ROWID;
"""
FIND = "INSERT INTO found VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
LOOSE = "INSERT INTO loose VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
KEEP = "INSERT INTO kept VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
KEEP_LOOSE = "INSERT INTO kept SELECT tbl, key, row FROM loose WHERE tbl = ? AND newest = ? ON CONFLICT DO NOTHING"
KEPT = "SELECT row FROM kept WHERE tbl = ? ORDER BY key"
CANDIDATES = """
    SELECT "offset", row, chain FROM found WHERE stream_id = ? AND partition = ? AND "offset" >= ?
    ORDER BY "offset", rank
"""
EXTENTS = 'SELECT stream_id, partition, min("offset"), max("offset") + 1 FROM events GROUP BY stream_id, partition'

KEEP_STREAM = """
    INSERT INTO stream_registry (name, stream_id, settings, epoch, created_at_us, deleted, seal) VALUES (?,?,?,?,?,?,?)
"""
KEEP_FACT = "INSERT INTO store_facts VALUES ('store_id', ?)"
# Where a partition of the new store ends.
END = """
    SELECT IFNULL((SELECT max("offset") + 1 FROM events e
                   WHERE (e.stream_id, e.partition) = (p.stream_id, p.partition)), p.first_offset)
    FROM partitions p WHERE p.stream_id = ? AND p.partition = ?
"""


class Salvaged(msgspec.Struct):
    """What a salvage brought over."""

    events: int = 0
    lost: int = 0
    streams: int = 0
    consumers: int = 0
    notes: list[str] = []


class _Stream(NamedTuple):
    """A stream as its row says, or as its events show when the row is lost."""

    name: str
    stream_id: int
    settings: str
    epoch: int
    created_at_us: int
    deleted: int


class _Extent:
    """How the new copy of one partition grows. ``end`` is how many events were acknowledged, when that is known."""

    def __init__(self, stream: _Stream, partition: int, first: int, size: int, chain: bytes, end: int | None) -> None:
        self.stream = stream
        self.partition = partition
        self.next_offset = first
        self.size = size
        self.chain = chain
        self.old_chain: bytes | None = chain
        self.end = end
        self.latest: int | None = None
        self.created = stream.created_at_us


def salvage(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Salvaged:
    """Copy what is intact from one folder to a new one; the source is only read.

    Raises ``NotFound`` when there is no database, ``Conflict`` when the target already holds a store, ``StorageError``
    when the target cannot be written; nothing is left there then.
    """
    have, want = Folder(source), Folder(target)
    if not have.exists():
        raise NotFound(f"there is no database in {have.path}")
    if want.exists():
        raise Conflict(f"there is already a store in {want.path}", hint="name a new or empty folder")
    existed = want.path.exists()
    want.create()
    try:
        return _salvage(have, want, progress)
    except BaseException as error:
        for path in (want.anchor, *want.path.glob("postbus.db*")):
            path.unlink(missing_ok=True)
        if not existed:
            shutil.rmtree(want.path, ignore_errors=True)
        if isinstance(error, (apsw.Error, OSError)):
            raise refusal(want, error, "could not be written") from error
        raise


def _salvage(have: Folder, want: Folder, progress: Callable[[int, int], None]) -> Salvaged:
    result = Salvaged()
    workshop = Folder(want.path / "salvage.tmp")  # a folder of its own: private, and easy to take away
    workshop.create()
    scratch, new = apsw.Connection(str(workshop.database)), connect(want)
    try:
        migrate(new)
        with scratch, new:
            new.execute(KEEP_FACT, (SystemClock().new_id(),))
            scratch.execute(SCRATCH)
            _collect(have, scratch, progress)
            extents = _read_tables(have, scratch, result)
            _rebuild(new, scratch, _ends(have, extents), result)
            result.notes += carry_over(have, new)
    finally:
        scratch.close()
        new.close()
        shutil.rmtree(workshop.path, ignore_errors=True)
    write_anchor(want)
    return result


# --- finding ----------------------------------------------------------------------------------------------------------


def _collect(have: Folder, scratch: apsw.Connection, progress: Callable[[int, int], None]) -> None:
    """Find every intact event and every intact sealed row in the pages."""
    total = have.database.stat().st_size // PAGE_BYTES
    wal = have.database.with_name(have.database.name + "-wal")
    for number, (newest, image, page) in enumerate(page_images(have.database, wal, PAGE_BYTES)):
        for rowid, values in rows(image, page):
            if rowid is None:
                kind = KINDS.get((len(values), isinstance(values[2], str) if len(values) > MIN_COLUMNS else False), "")
                _collect_loose(scratch, kind, values, newest=newest)
            elif len(values) == STREAM_COLUMNS:
                _collect_loose(scratch, "stream_registry", [values[1], rowid, *values[2:7]], newest=newest)
            elif len(values) == EVENT_COLUMNS:
                facts = _facts(values)
                if facts is not None:
                    row = records.encode(facts)
                    scratch.execute(FIND, (values[1], facts[0], facts[1], values[20], number, row))
        if number % 64 == 0:
            progress(min(number, total), total)
    progress(total, total)


def _facts(values: list[Any]) -> list[Any] | None:
    """Return an event row's facts, if they are intact."""
    occurred, created, trust = values[14], values[15], values[16]
    facts = [*values[2:14], created if occurred is None else occurred, created, trust or "trusted"]
    with contextlib.suppress(OverflowError, TypeError, ValueError):
        if zlib.crc32(records.encode(facts), values[1]) == values[19] and isinstance(values[20], bytes):
            return facts
    return None


def _collect_loose(scratch: apsw.Connection, table: str, row: list[Any], *, newest: bool) -> None:
    if table and _sealed(row[:-1], row[-1]):
        scratch.execute(LOOSE, (table, newest, _key(table, row), records.encode(row)))


def _key(table: str, row: list[Any]) -> bytes:
    return records.encode(row[1 if table == "stream_registry" else 0 : KEYS[table]])


def _sealed(facts: list[Any], sealed: object) -> bool:
    try:
        return records.seal(*facts) == sealed
    except (OverflowError, TypeError, ValueError):
        return False


def _read_tables(have: Folder, scratch: apsw.Connection, result: Salvaged) -> list[tuple[int, int, int, int]]:
    """Keep what SQLite can still read of the sealed tables, and the loose rows of those it cannot read whole.

    Returns where SQLite thinks that each partition begins and ends.
    """
    old: apsw.Connection | None = None
    try:
        old = connect(have, write=False)
    except StorageError as error:
        result.notes.append(f"the database cannot be opened, its rows are taken from its pages: {error}")
    extents: list[tuple[int, int, int, int]] = []
    current = old is not None and _current(have, old)
    for table, query in sealed_tables().items():
        whole = current
        if not current:  # SQLite does not see the end of the WAL: what the newest pages say is newer
            scratch.execute(KEEP_LOOSE, (table, True))
        try:
            for row in old.execute(query) if old is not None else ():
                if _sealed(list(row[:-1]), row[-1]):
                    scratch.execute(KEEP, (table, _key(table, list(row)), records.encode(row)))
                else:
                    whole = False
                    result.notes.append(f"a row of {table} is altered and was left out")
        except UNREADABLE as error:
            whole = False
            result.notes.append(f"{table} could not be read to its end: {error}")
        if not whole:
            scratch.execute(KEEP_LOOSE, (table, True))
            scratch.execute(KEEP_LOOSE, (table, False))
    if old is not None:
        with contextlib.suppress(*UNREADABLE):
            extents = [(int(row[0]), int(row[1]), int(row[2]), int(row[3])) for row in old.execute(EXTENTS)]
        with contextlib.suppress(apsw.Error):
            old.close()
    return extents


def _current(have: Folder, old: apsw.Connection) -> bool:
    """Say whether SQLite sees all changes that the anchor remembers."""
    try:
        changes = old.execute("SELECT value FROM store_facts WHERE name = 'changes'").get
        return int(changes or 0) >= read_anchor(have).changes
    except (CorruptLog, *UNREADABLE):
        return False


def _ends(have: Folder, extents: list[tuple[int, int, int, int]]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return what is known of how far partitions go, as (epoch, end); SQLite's word counts for any epoch."""
    ends: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for stream_id, partition, _, end in extents:
        ends.setdefault((stream_id, partition), []).append((-1, end))
    with contextlib.suppress(CorruptLog):
        for mark in read_anchor(have).marks:
            ends.setdefault((mark.stream_id, mark.partition), []).append((mark.epoch, mark.next_offset))
    return ends


def _kept(scratch: apsw.Connection, table: str) -> Iterator[list[Any]]:
    for (row,) in scratch.execute(KEPT, (table,)):
        yield msgspec.msgpack.decode(row)


# --- building anew ----------------------------------------------------------------------------------------------------


def _rebuild(
    new: apsw.Connection,
    scratch: apsw.Connection,
    ends: dict[tuple[int, int], list[tuple[int, int]]],
    result: Salvaged,
) -> None:
    beginnings = {(row[0], row[1]): row for row in _kept(scratch, "partitions")}
    streams = {row[1]: _Stream(*row[:6]) for row in _kept(scratch, "stream_registry")}
    streams |= _nameless(scratch, set(streams), ends, result)
    slot = 0
    for stream_id, stream in sorted(streams.items()):
        new.execute(KEEP_STREAM, (*stream, records.seal(*stream)))
        if stream.deleted:
            continue
        result.streams += 1
        for partition in range(msgspec.json.decode(stream.settings).get("partitions", 1)):
            extent = _begin(scratch, stream, partition, beginnings.get((stream_id, partition)))
            known = [end for epoch, end in ends.get((stream_id, partition), ()) if epoch in (-1, stream.epoch)]
            extent.end = max(known, default=None)
            facts = (stream_id, partition, slot, extent.next_offset, extent.size, extent.chain)
            new.execute("INSERT INTO partitions VALUES (?,?,?,?,?,?,?)", (*facts, records.seal(*facts)))
            slot += 1
            _copy_partition(new, scratch, extent, result)
    _copy_tables(new, scratch, set(streams), result)


def _nameless(
    scratch: apsw.Connection, known: set[int], ends: dict[tuple[int, int], list[tuple[int, int]]], result: Salvaged
) -> dict[int, _Stream]:
    """Make up the streams whose row is lost but whose events are there."""
    made: dict[int, _Stream] = {}
    query = "SELECT stream_id, max(partition) + 1, row FROM found GROUP BY stream_id"
    for stream_id, partitions, row in scratch.execute(query):
        if stream_id not in known:
            name = f"salvaged.streams.stream-{stream_id}"
            result.notes.append(f"the name of stream {stream_id} is lost, its events are in {name}")
            settings = msgspec.json.encode(StreamSettings(partitions=partitions)).decode()
            epoch = max([0, *(epoch for epoch, _ in ends.get((stream_id, 0), ()))])
            made[stream_id] = _Stream(name, stream_id, settings, epoch, msgspec.msgpack.decode(row)[13], 0)
    return made


def _begin(scratch: apsw.Connection, stream: _Stream, partition: int, row: list[Any] | None) -> _Extent:
    if row is not None:
        return _Extent(stream, partition, row[3], row[4], row[5], None)
    query = 'SELECT min("offset") FROM found WHERE stream_id = ? AND partition = ?'
    first = scratch.execute(query, (stream.stream_id, partition)).get or 0
    return _Extent(stream, partition, first, 0, records.genesis(stream.name, stream.epoch, partition), None)


def _copy_partition(new: apsw.Connection, scratch: apsw.Connection, extent: _Extent, result: Salvaged) -> None:
    where = (extent.stream.stream_id, extent.partition, extent.next_offset)
    for offset, candidates in itertools.groupby(scratch.execute(CANDIDATES, where), key=lambda row: row[0]):
        chosen = _choose(extent, offset, [(msgspec.msgpack.decode(row), chain) for _, row, chain in candidates])
        if chosen is not None:
            facts, chain = chosen
            extent.created = facts[13]
            _lose(new, extent, offset, result)
            _put(new, extent, facts)
            extent.old_chain = chain
            result.events += 1
            if facts[10] is not None:
                _keep_identity(new, extent, facts)
    if extent.end is not None:
        _lose(new, extent, extent.end, result)


def _choose(extent: _Extent, offset: int, candidates: list[tuple[list[Any], bytes]]) -> tuple[list[Any], bytes] | None:
    """Pick the row that follows from the one before; without that one, the newest that can belong to this stream."""
    if extent.old_chain is not None and offset == extent.next_offset:
        for facts, chain in candidates:
            if records.link(extent.old_chain, records.encode(facts)) == chain:
                return facts, chain
    if extent.end is not None and offset >= extent.end:
        return None  # never acknowledged, or from a longer life of the stream
    for facts, chain in candidates:
        if extent.stream.epoch == 0 or facts[13] >= extent.stream.created_at_us:
            return facts, chain
    return None


def _lose(new: apsw.Connection, extent: _Extent, end: int, result: Salvaged) -> None:
    """Put placeholders up to an offset."""
    for offset in range(extent.next_offset, end):
        blank = [extent.partition, offset, LOST_TOPIC, "postbus", "", None, b'{"lost":true}', *[None] * 5]
        _put(new, extent, [*blank, extent.created, extent.created, "trusted"])
        extent.old_chain = None
        result.lost += 1


def _put(new: apsw.Connection, extent: _Extent, facts: list[Any]) -> None:
    encoded = records.encode(facts)
    extent.chain = records.link(extent.chain, encoded)
    extent.size += len(encoded)
    extent.next_offset = facts[1] + 1
    occurred, created, trust = facts[12:]
    extent.latest = occurred if extent.latest is None else max(extent.latest, occurred)
    row = (
        extent.stream.stream_id, *facts[:12], None if occurred == created else occurred, created,
        None if trust == "trusted" else trust, None if extent.latest == occurred else extent.latest, extent.size,
        zlib.crc32(encoded, extent.stream.stream_id), extent.chain,
    )  # fmt: skip
    new.execute(records.insert_statement(1), row)


def _keep_identity(new: apsw.Connection, extent: _Extent, facts: list[Any]) -> None:
    occurred = None if facts[12] == facts[13] else facts[12]
    content = records.content_digest((facts[2], facts[3], facts[5], facts[6], facts[7], facts[8], facts[11], occurred))
    row = (extent.stream.stream_id, facts[10], facts[4], extent.partition, facts[1], facts[13], content)
    new.execute("INSERT OR IGNORE INTO identities VALUES (?,?,?,?,?,?,?,?)", (*row, records.seal(*row)))


def _copy_tables(new: apsw.Connection, scratch: apsw.Connection, streams: set[int], result: Salvaged) -> None:
    for row in _kept(scratch, "identities"):
        if row[0] in streams:
            new.execute("INSERT OR REPLACE INTO identities VALUES (?,?,?,?,?,?,?,?)", row)
    for row in _kept(scratch, "readers"):
        if row[0] in streams:
            new.execute("INSERT OR IGNORE INTO readers VALUES (?,?,?,?,?,?)", row)
            result.consumers += 1
    for row in _within(new, _kept(scratch, "cursors")):
        new.execute("INSERT OR IGNORE INTO cursors VALUES (?,?,?,?,?,?,?,?)", row)


def _within(new: apsw.Connection, cursors: Iterator[list[Any]]) -> Iterator[list[Any]]:
    """Yield the cursors, none of them beyond the end of what was brought over."""
    for row in cursors:
        head = new.execute(END, (row[0], row[2])).get
        if head is None:
            continue
        if row[3] > head:
            facts = [*row[:3], head, head - 1, row[5], row[6]]
            row = [*facts, records.seal(*facts)]  # noqa: PLW2901 - the clamped row takes its place
        yield row
