"""Dead letters: made here, kept in ``…-dlq`` streams, listed, replayed to where they came from, and put away."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from postbus.model import Draft, Invalid, NotFound, StorageError
from postbus.topics import check_pattern, matches

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import apsw

    from postbus.clock import Clock
    from postbus.log.sqlite import SqliteLog, Transaction
    from postbus.model import Event

__all__ = ["SUFFIX", "DeadEntry", "DeadLetters", "bury", "dig", "grave", "unbury"]

LEAF_CHARS_MAX = 80
HEADER_BYTES_MAX = 4096
REPLAY_MAX = 500
PREFIX = "postbus.dlq."
SUFFIX = "-dlq"

COLUMNS = (
    "id, subscription, topic, origin_stream, origin_partition, origin_offset, reason, attempts, error, payload, "
    "created_at, state"
)
LIST = f"SELECT {COLUMNS} FROM dead_letters WHERE id GLOB ? ORDER BY seq"  # noqa: S608 - constants only
SHOW = f"SELECT {COLUMNS} FROM dead_letters WHERE id = ?"  # noqa: S608 - constants only
REVIVE = """
    UPDATE delivery_rows SET status = 'waiting', attempt = 0, alone = 0, replays = replays + 1, boot = '', due_us = 0,
           due_at_us = 0, error = NULL, updated_at_us = ?
    WHERE stream_id = ? AND partition = ? AND "offset" = ? AND consumer = ? AND status = 'failed'
    AND dead_stream = ? AND dead_offset = ?
"""
PUT_AWAY = "INSERT OR IGNORE INTO dead_letters_purged VALUES (?, ?, ?)"
FORGET_ROW = """
    DELETE FROM delivery_rows
    WHERE stream_id = ? AND partition = ? AND "offset" = ? AND consumer = ? AND status = 'failed'
    AND dead_stream = ? AND dead_offset = ?
"""


class DeadEntry(msgspec.Struct, frozen=True):
    """One dead letter as an operator sees it. ``state`` is open, replayed or purged."""

    id: str
    subscription: str
    topic: str
    origin_stream: str
    origin_partition: int
    origin_offset: int
    reason: str
    attempts: int
    error: str
    payload: str
    created_at: float
    state: str

    @property
    def origin_id(self) -> str:
        """The address of the event that died."""
        return f"{self.origin_stream}/{self.origin_partition}/{self.origin_offset}"


def grave(stream: str) -> str:
    """Return the dead-letter stream of a stream; a leaf that would become too long is cut."""
    head, _, leaf = stream.rpartition(".")
    return f"{head}.{leaf[: LEAF_CHARS_MAX - len(SUFFIX)]}{SUFFIX}"


async def dig(log: SqliteLog, origin: str, graves: set[str]) -> None:
    """Make dead-letter streams again that somebody deleted, and raise ``StorageError``: what failed is to be retried.

    Nothing happens when none is missing, or when the origin itself is gone.
    """
    known = {stream.name for stream in await log.streams()}
    missing = graves - known
    if missing and origin in known:
        for stream in missing:
            await log.ensure_stream(stream)
        raise StorageError(f"{', '.join(sorted(missing))} had to be made again")


def bury(event: Event, subscription: str, reason: str, attempts: int, error: str) -> Draft:
    """Return the dead letter of an event for a subscription; whoever appends it numbers its native id per death."""
    headers: dict[str, Any] = event.headers
    facts = {
        "origin_topic": event.topic,
        "origin_stream": event.stream,
        "origin_partition": str(event.partition),
        "origin_offset": str(event.offset),
        "subscription": subscription,
        "reason": reason,
        "attempts": str(attempts),
        "error": error.encode("utf-8", "replace")[:HEADER_BYTES_MAX].decode("utf-8", "ignore"),
    }
    headers.update({PREFIX + name: value for name, value in facts.items()})
    return Draft(
        topic=event.topic,
        source=event.source,
        payload_json=event.payload_json,
        variant=event.variant,
        key=event.key,
        metadata_json=event.metadata_json,
        headers_json=msgspec.json.encode(headers),
        correlation_id=event.correlation_id,
        native_id=f"{subscription}:{event.id}",
        delivery_handle_json=event.delivery_handle_json,
        occurred_at_us=event.occurred_at_us,
        trust=event.trust,
    )


def unbury(letter: Event, subscription: str, origin: str) -> Event | None:
    """Return the event that a dead letter is a copy of, at its own address; None when it is a copy of another one.

    Its native id is not in the letter, and the letter's instants are when it died.
    """
    if letter.native_id is None or not letter.native_id.startswith(f"{subscription}:{origin}:"):
        return None
    stream, partition, offset = origin.rsplit("/", 2)
    headers = {name: value for name, value in letter.headers.items() if not name.startswith(PREFIX)}
    return msgspec.structs.replace(
        letter,
        stream=stream,
        partition=int(partition),
        offset=int(offset),
        native_id=None,
        headers_json=msgspec.json.encode(headers) if headers else None,
    )


class DeadLetters:
    """The dead letters of one tenant. ``changed`` is called after a replay, so that runners look at once."""

    def __init__(self, log: SqliteLog, clock: Clock, tenant: str, changed: Callable[[], Awaitable[None]]) -> None:
        self._log = log
        self._clock = clock
        self._tenant = tenant
        self._changed = changed

    async def find(
        self,
        *,
        subscription: str | None = None,
        topic: str | None = None,
        reason: str | None = None,
        state: str | None = "open",
        limit: int | None = None,
    ) -> list[DeadEntry]:
        """Return dead letters, oldest first; ``topic`` is a pattern, ``state`` None means all of them."""
        if topic is not None:
            check_pattern(topic)

        def look(db: apsw.Connection) -> list[DeadEntry]:
            found: list[DeadEntry] = []
            for row in db.execute(LIST, (f"{self._tenant}.*",)):
                entry = DeadEntry(*row)
                if (
                    subscription in (None, entry.subscription)
                    and reason in (None, entry.reason)
                    and state in (None, entry.state)
                    and (topic is None or matches(topic, entry.topic))
                ):
                    found.append(entry)
                    if limit is not None and len(found) >= limit:
                        break
            return found

        return await self._log.store.read(look)

    async def show(self, letter: str) -> DeadEntry:
        """Return one dead letter by its id; raises ``NotFound``."""
        row = await self._log.store.read(lambda db: db.execute(SHOW, (letter,)).fetchone())
        if row is None or not letter.startswith(f"{self._tenant}."):
            raise NotFound(f"there is no dead letter {letter}", hint="list them with `postbus dlq list --all`")
        return DeadEntry(*row)

    async def replay(self, entries: list[DeadEntry], *, per_second: float | None = None) -> int:
        """Deliver dead letters again to the subscription they came from, attempts from 0; return how many.

        ``per_second`` caps how many become due in a second. Letters that were replayed or purged meanwhile are passed
        over.
        """
        if per_second is not None and not per_second > 0:
            raise Invalid(f"per_second is above 0, not {per_second}")
        count = 0
        step = REPLAY_MAX if per_second is None else 1
        for start in range(0, len(entries), step):
            revived = await self._log.transact(partial(_revive, entries[start : start + step]))
            if revived:
                count += revived
                await self._changed()
                if per_second is not None and start + step < len(entries):
                    await self._clock.sleep(revived / per_second)
        return count

    async def purge(self, entries: list[DeadEntry], record: Callable[[int], tuple[str, Draft]] | None = None) -> int:
        """Put dead letters away for good; return how many. Their stream is trimmed up to the first one still open.

        ``record`` makes an event about it, and says in which stream; it is appended in the same transaction.
        """

        def write(tx: Transaction) -> int:
            count = 0
            for entry in entries:
                stream, offset = _place(entry)
                tx.db.execute(PUT_AWAY, (tx.stream(stream).stream_id, offset, tx.now_us))
                count += tx.db.changes()
                origin = _origin(tx, entry)
                if origin is not None:
                    tx.db.execute(FORGET_ROW, (*origin, stream, offset))
            if count and record is not None:
                stream, made = record(count)
                tx.append(stream, [made])
            return count

        count = await self._log.transact(write)
        for stream in {entry.id.rsplit("/", 2)[0] for entry in entries}:
            kept = [int(entry.id.rsplit("/", 1)[1]) for entry in await self.find(state=None) if _kept(entry, stream)]
            stats = await self._log.get_stream_stats(stream)
            before = min([stats.partitions[0].high_water_mark, *kept])
            await self._log.trim(stream, before=before)
        return count


def _kept(entry: DeadEntry, stream: str) -> bool:
    return entry.state != "purged" and entry.id.startswith(f"{stream}/")


def _origin(tx: Transaction, entry: DeadEntry) -> tuple[int, int, int, str] | None:
    try:
        stream_id = tx.stream(entry.origin_stream).stream_id
    except NotFound:
        return None
    return stream_id, entry.origin_partition, entry.origin_offset, entry.subscription


def _revive(entries: list[DeadEntry], tx: Transaction) -> int:
    count = 0
    for entry in entries:
        origin = _origin(tx, entry)
        if origin is not None:
            tx.db.execute(REVIVE, (tx.now_us, *origin, *_place(entry)))
            count += tx.db.changes()
    return count


def _place(entry: DeadEntry) -> tuple[str, int]:
    stream, _, offset = entry.id.rsplit("/", 2)
    return stream, int(offset)
