"""The disk queue in front of a remote: first in, first out, bounded, and nothing leaves it but by an acknowledgement.

An event that the remote keeps refusing becomes a dead letter like any other: in the stream ``…spool-dlq``, with a
failed delivery of the consumer ``_spool`` at the offset that is its sequence. Triggers of the store put it back on a
replay and remove it on a purge, so that nothing else has to know of the spool.
"""

from __future__ import annotations

import base64
import fcntl
import os
from typing import TYPE_CHECKING, Any

import msgspec

from postbus.delivery.dead import bury, grave
from postbus.model import Backpressure, Draft, Event, Invalid, SpoolEntry, Trust
from postbus.topics import check_stream_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    import apsw

    from postbus.log.sqlite import SqliteLog, Transaction

__all__ = ["CONSUMER", "Broken", "DrainLock", "Spool", "SpoolStatus"]

CONSUMER = "_spool"
ROWS_MAX = 100_000
BYTES_MAX = 256 * 1024 * 1024
SLOW_FROM = 0.5
SLOW_S_MAX = 0.5

ADD = """
    INSERT INTO spool_rows (stream, identity, tried, draft, bytes, attempts, dead, enqueued_at_us)
    VALUES (?, ?, ?, ?, ?, 0, 0, ?)
"""
TOTALS = "SELECT rows, bytes FROM spool_totals"
HEAD = """
    SELECT sequence, stream, identity, tried, draft, attempts, enqueued_at_us FROM spool_rows WHERE NOT dead
    ORDER BY sequence LIMIT ?
"""
DRAFT = 4  # the column of it
OLDEST = "SELECT enqueued_at_us FROM spool_rows WHERE NOT dead ORDER BY sequence LIMIT 1"
DEAD = "SELECT count(*) FROM spool_rows WHERE dead"
REMOVE = "DELETE FROM spool_rows WHERE sequence = ? AND NOT dead"
REFUSED = "UPDATE spool_rows SET attempts = attempts + 1, error = ? WHERE sequence = ? AND NOT dead"
DIE = "UPDATE spool_rows SET dead = 1, attempts = ?, error = ? WHERE sequence = ? AND NOT dead"
DEATHS = 'SELECT replays FROM delivery_rows WHERE stream_id = ? AND partition = 0 AND "offset" = ? AND consumer = ?'
BURIED = "INSERT OR REPLACE INTO delivery_rows VALUES (?, 0, ?, ?, 'failed', ?, 0, ?, NULL, '', 0, 0, ?, ?, ?, ?)"


NOTHING = msgspec.Raw()


class _Kept(msgspec.Struct):
    """A draft as the spool keeps it: JSON, with the event's own JSON in it byte for byte."""

    topic: str
    source: str
    payload: msgspec.Raw
    variant: str = ""
    key: str | None = None
    metadata: msgspec.Raw = NOTHING
    headers: msgspec.Raw = NOTHING
    correlation_id: str | None = None
    native_id: str | None = None
    delivery_handle: msgspec.Raw = NOTHING
    occurred_at_us: int | None = None
    trust: str = Trust.TRUSTED.value
    since: tuple[int, ...] = ()


class Broken(msgspec.Struct, frozen=True):
    """What lies in the spool and cannot be read as an event."""

    sequence: int
    raw: bytes
    error: str
    enqueued_at_us: int


class SpoolStatus(msgspec.Struct, frozen=True):
    """How full the spool is: ``fullness`` from 0 to 1, by rows or bytes, whichever is nearer to its cap."""

    rows: int
    bytes: int
    rows_max: int
    bytes_max: int
    dead: int
    oldest_at_us: int | None

    @property
    def fullness(self) -> float:
        """The larger of the two shares that are used."""
        return max(self.rows / self.rows_max, self.bytes / self.bytes_max)


class Spool:
    """The queue of one data folder. Several processes may add; whoever has the ``DrainLock`` takes away."""

    def __init__(
        self,
        log: SqliteLog,
        *,
        tenant: str = "local.default",
        rows_max: int = ROWS_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        if rows_max < 1 or bytes_max < 1:
            raise Invalid("the spool holds at least one row and one byte")
        self.stream = check_stream_name(f"{tenant}.spool")
        self.rows_max = rows_max
        self.bytes_max = bytes_max
        self._log = log
        self._grave = grave(self.stream)
        self._fullness = 0.0

    async def open(self) -> None:
        """Make the streams that its dead letters need."""
        await self._log.ensure_stream(self.stream)
        await self._log.ensure_stream(self._grave)

    async def status(self) -> SpoolStatus:
        """Say how full it is."""

        def look(db: apsw.Connection) -> SpoolStatus:
            rows, size = db.execute(TOTALS).get
            dead, oldest = db.execute(DEAD).get, db.execute(OLDEST).get
            return SpoolStatus(rows, size, self.rows_max, self.bytes_max, dead, oldest)

        found = await self._log.store.read(look)
        self._fullness = found.fullness
        return found

    @property
    def delay_s(self) -> float:
        """How long a publisher waits before it adds: nothing up to half full, then more and more, at most 0.5 s."""
        over = (min(self._fullness, 1.0) - SLOW_FROM) / (1 - SLOW_FROM)
        return max(0.0, over) * SLOW_S_MAX

    async def put(self, stream: str, identity: str, draft: Draft, *, tried: bool = False) -> int:
        """Add an event and return its sequence once it is on disk; raises ``Backpressure`` when there is no room.

        ``tried`` says that it was sent and no answer came, so that the remote may have it.
        """
        return (await self.put_all(stream, [(identity, draft)], tried=tried))[0]

    async def put_all(
        self, stream: str, events: Sequence[tuple[str, Draft]], *, tried: bool = False, since: Sequence[int] = ()
    ) -> list[int]:
        """Add events in order, all or none; see ``add``."""
        check_stream_name(stream)
        return await self._log.transact(lambda tx: self.add(tx, stream, events, tried=tried, since=since), grows=True)

    def add(
        self,
        tx: Transaction,
        stream: str,
        events: Sequence[tuple[str, Draft]],
        *,
        tried: bool = False,
        since: Sequence[int] = (),
    ) -> list[int]:
        """Add events under their identities inside a transaction and return their sequences.

        ``since``: where the remote's partitions ended before any of them was sent. Raises ``Backpressure``.
        """
        raws = [_encode(draft, since) for _, draft in events]
        rows, size = tx.db.execute(TOTALS).get
        more = sum(map(len, raws))
        if rows + len(raws) > self.rows_max or size + more > self.bytes_max:
            self._fullness = 1.0
            raise Backpressure(
                f"the spool is full: {rows:,} of {self.rows_max:,} events, {size:,} of {self.bytes_max:,} bytes",
                hint="the remote cannot be reached; publish again later, or give the spool more room",
            )
        sequences: list[int] = []
        for (identity, _), raw in zip(events, raws, strict=True):
            tx.db.execute(ADD, (stream, identity, tried, raw, len(raw), tx.now_us))
            sequences.append(tx.db.last_insert_rowid())
        self._fullness = max((rows + len(raws)) / self.rows_max, (size + more) / self.bytes_max)
        return sequences

    async def head(self, limit: int, bytes_max: int) -> tuple[list[SpoolEntry | Broken], bool]:
        """Return the oldest entries, in order and not many more bytes than that, and whether these were all."""

        def look(db: apsw.Connection) -> tuple[list[tuple[Any, ...]], bool]:
            rows: list[tuple[Any, ...]] = []
            size = 0
            for row in db.execute(HEAD, (limit,)):
                rows.append(row)
                size += len(row[DRAFT])
                if size > bytes_max:
                    return rows, False
            return rows, len(rows) < limit

        rows, whole = await self._log.store.read(look)
        return [_decode(*row) for row in rows], whole

    async def remove(self, sequences: Sequence[int]) -> None:
        """Take away what the remote has acknowledged."""

        def write(tx: Transaction) -> float:
            tx.db.executemany(REMOVE, [(sequence,) for sequence in sequences])
            rows, size = tx.db.execute(TOTALS).get
            return float(max(rows / self.rows_max, size / self.bytes_max))

        if sequences:
            self._fullness = await self._log.transact(write)

    async def refused(self, entry: SpoolEntry, error: str) -> None:
        """Count a refusal of this event."""
        await self._log.transact(lambda tx: tx.run(REFUSED, (error, entry.sequence)))

    async def bury(self, entry: SpoolEntry | Broken, reason: str, error: str) -> None:
        """Give an event up: it becomes a dead letter and leaves the queue, in one transaction."""
        attempts = entry.attempts + 1 if isinstance(entry, SpoolEntry) else 0
        letter = bury(_event(self.stream, entry), CONSUMER, reason, attempts, error)

        def write(tx: Transaction) -> None:
            if not tx.run(DIE, (attempts, error, entry.sequence)):
                return  # somebody else was quicker
            stream_id = tx.stream(self.stream).stream_id
            before = tx.db.execute(DEATHS, (stream_id, entry.sequence, CONSUMER)).get
            deaths = before or 0
            numbered = msgspec.structs.replace(letter, native_id=f"{letter.native_id}:{deaths + 1}")
            receipt = tx.append(self._grave, [numbered])[0]
            row = (stream_id, entry.sequence, CONSUMER, attempts, deaths, error, self._grave, receipt.offset, tx.now_us)
            tx.db.execute(BURIED, row)

        await self._log.transact(write)
        await self.status()


class DrainLock:
    """Lets one process at a time empty the spool of a folder; ends with the process that has it."""

    def __init__(self, log: SqliteLog) -> None:
        self._path = log.store.folder.path / "spool.lock"
        self._handle = -1

    def acquire(self) -> bool:
        """Take the lock, or say that another process has it. Taking it twice is harmless."""
        if self._handle < 0:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(handle)
                return False
            self._handle = handle
        return True

    def release(self) -> None:
        """Let go of the lock. Idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _encode(draft: Draft, since: Sequence[int]) -> bytes:
    raw = {
        "payload": draft.payload_json,
        "metadata": draft.metadata_json,
        "headers": draft.headers_json,
        "delivery_handle": draft.delivery_handle_json,
    }
    plain = {name: getattr(draft, name) for name in _Kept.__struct_fields__ if name not in (*raw, "since")}
    facts = plain | {name: None if value is None else msgspec.Raw(value) for name, value in raw.items()}
    if since:
        facts["since"] = since
    return msgspec.json.encode({name: value for name, value in facts.items() if value is not None})


def _decode(
    sequence: int, stream: str, identity: str, tried: int, raw: Any, attempts: int, enqueued_at_us: int
) -> SpoolEntry | Broken:
    data = raw if isinstance(raw, bytes) else str(raw).encode()
    try:
        kept = msgspec.json.decode(data, type=_Kept)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Broken(sequence, data, f"cannot be read: {error}", enqueued_at_us)

    def plain(value: msgspec.Raw) -> bytes | None:
        return bytes(value) or None

    draft = Draft(
        topic=kept.topic,
        source=kept.source,
        payload_json=bytes(kept.payload),
        variant=kept.variant,
        key=kept.key,
        metadata_json=plain(kept.metadata),
        headers_json=plain(kept.headers),
        correlation_id=kept.correlation_id,
        native_id=kept.native_id,
        delivery_handle_json=plain(kept.delivery_handle),
        occurred_at_us=kept.occurred_at_us,
        trust=kept.trust,
    )
    return SpoolEntry(
        sequence=sequence,
        stream=stream,
        draft=draft,
        identity=identity,
        tried=bool(tried),
        attempts=attempts,
        enqueued_at_us=enqueued_at_us,
        since=kept.since,
    )


def _event(stream: str, entry: SpoolEntry | Broken) -> Event:
    """Return what a dead letter is made of: the event at its place in the spool."""
    if isinstance(entry, Broken):
        payload = msgspec.json.encode({"base64": base64.b64encode(entry.raw).decode("ascii")})
        draft = Draft(topic="spool.undecodable", source="spool", payload_json=payload, trust=Trust.UNTRUSTED.value)
    else:
        draft = entry.draft
    at_us = entry.enqueued_at_us
    return Event(
        stream,
        0,
        entry.sequence,
        draft.topic,
        draft.source,
        draft.variant,
        draft.key,
        draft.payload_json,
        draft.metadata_json,
        draft.headers_json,
        draft.correlation_id,
        draft.native_id,
        draft.delivery_handle_json,
        draft.occurred_at_us or at_us,
        at_us,
        draft.trust,
    )
