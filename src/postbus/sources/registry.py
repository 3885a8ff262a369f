"""The sources of a tenant as data: what is registered, how far each has read, how it fares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from postbus.model import Conflict, Invalid, NotFound, Source
from postbus.sources.kinds import check_kind
from postbus.topics import check_id, check_stream_name

if TYPE_CHECKING:
    from postbus.log.sqlite import SqliteLog, Transaction

__all__ = ["Sources", "load", "load_all"]

JOURNAL = "journal"
DEAD = "-dlq"
SETTINGS_BYTES_MAX = 64 * 1024

COLUMNS = (
    "source, kind, stream, tenant, settings, checkpoint, last_error, paused, failures, polls, events, duplicates, "
    "last_ok_at_us, next_due_at_us, created_at_us, revision, turn"
)
FIELDS = Source.__struct_fields__
ONE = f"SELECT {COLUMNS} FROM source_registry WHERE tenant = ? AND source = ?"  # noqa: S608 - constants only
ALL = f"""
    SELECT {COLUMNS} FROM source_registry WHERE (?1 IS NULL OR tenant = ?1) ORDER BY tenant, source
"""  # noqa: S608 - constants only
ADD = """
    INSERT OR IGNORE INTO source_registry (tenant, source, kind, stream, settings, created_at_us)
    VALUES (?, ?, ?, ?, ?, ?)
"""
# Whether it runs; a source that is resumed is due at once.
PAUSE = """
    UPDATE source_registry SET paused = ?, revision = revision + 1, turn = turn + 1, next_due_at_us = NULL, failures = 0
    WHERE tenant = ? AND source = ? AND paused <> ?
"""
REMOVE = "DELETE FROM source_registry WHERE tenant = ? AND source = ?"
FORGET_DIGESTS = "DELETE FROM source_digests WHERE tenant = ? AND source = ?"


def _source(row: tuple[Any, ...]) -> Source:
    facts = dict(zip(FIELDS, row, strict=True))
    return Source(**(facts | {"paused": bool(facts["paused"])}))


def load(db: Any, tenant: str, name: str) -> Source:
    """Return a source; raises ``NotFound``."""
    row = db.execute(ONE, (tenant, name)).fetchone()
    if row is None:
        raise NotFound(f"there is no source {name}", hint="list them with `postbus sources list`")
    return _source(row)


def load_all(db: Any, tenant: str | None) -> list[Source]:
    """Return the sources of a tenant, or all there are."""
    return [_source(row) for row in db.execute(ALL, (tenant,))]


class Sources:
    """The sources of one tenant. What changes here reaches a running host within a moment, in any process."""

    def __init__(self, log: SqliteLog, tenant: str) -> None:
        self._log = log
        self._tenant = tenant

    async def add(self, name: str, kind: str, settings: dict[str, Any] | None = None) -> Source:
        """Register a source.

        Raises ``Invalid`` for a bad argument, ``NotFound`` for a stream that is not there, ``Conflict`` for an id that
        is taken.
        """
        check_id(name, "source id")
        given = settings or {}
        checked = check_kind(kind, given)
        encoded = msgspec.json.encode(given)
        if len(encoded) > SETTINGS_BYTES_MAX:
            raise Invalid(f"the settings have {len(encoded)} bytes; the limit is {SETTINGS_BYTES_MAX}")
        own = checked.stream is None
        stream = self._own_stream(name) if checked.stream is None else self._named(checked.stream)
        if not own and not await self._log.has_stream(stream):
            raise NotFound(f"there is no stream {stream}", hint="make it first, or leave it out for one of its own")
        await self._free(name)
        if own:
            await self._log.ensure_stream(stream)

        def write(tx: Transaction) -> Source:
            tx.db.execute(ADD, (self._tenant, name, kind, stream, encoded, tx.now_us))
            if not tx.db.changes():
                raise _taken(name)
            return load(tx.db, self._tenant, name)

        return await self._log.transact(write, grows=True)

    async def _free(self, name: str) -> None:
        if any(source.id == name for source in await self.all()):
            raise _taken(name)

    def _own_stream(self, name: str) -> str:
        if "." in name:
            raise Invalid(f"source id {name!r} cannot name a stream: it has a dot", hint="give it a `stream`")
        return self._named(f"{self._tenant}.{name}")

    def _named(self, stream: str) -> str:
        check_stream_name(stream)
        if not stream.startswith(f"{self._tenant}."):
            raise Invalid(f"{stream} is not a stream of {self._tenant}")
        if stream.endswith((f".{JOURNAL}", DEAD)):
            raise Invalid(f"a source cannot write to {stream}", hint="choose another id, or name another `stream`")
        return stream

    async def get(self, name: str) -> Source:
        """Return a source; raises ``NotFound``."""
        return await self._log.store.read(lambda db: load(db, self._tenant, name))

    async def all(self) -> list[Source]:
        """Return the sources by id."""
        return await self._log.store.read(lambda db: load_all(db, self._tenant))

    async def pause(self, name: str) -> Source:
        """Stop a source where it is; what a poll that runs just now finds is not taken. Idempotent."""
        return await self._log.transact(lambda tx: self._set(tx, name, paused=True))

    async def resume(self, name: str) -> Source:
        """Let a source go on, at once. Idempotent."""
        return await self._log.transact(lambda tx: self._set(tx, name, paused=False))

    def _set(self, tx: Transaction, name: str, *, paused: bool) -> Source:
        load(tx.db, self._tenant, name)
        tx.db.execute(PAUSE, (paused, self._tenant, name, paused))
        return load(tx.db, self._tenant, name)

    async def remove(self, name: str) -> None:
        """Forget a source and how far it has read; its stream and events stay. Raises ``NotFound``."""

        def write(tx: Transaction) -> None:
            load(tx.db, self._tenant, name)
            tx.db.execute(REMOVE, (self._tenant, name))
            tx.db.execute(FORGET_DIGESTS, (self._tenant, name))

        await self._log.transact(write)


def _taken(name: str) -> Conflict:
    return Conflict(f"there is a source {name} already", hint="remove it first, or choose another id")
