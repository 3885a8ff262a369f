"""Subscriptions as data: what is registered, on disk, in a form that Python and SQL both match."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from postbus.model import Conflict, Ordering, Overflow, RetryPolicy
from postbus.topics import matches

if TYPE_CHECKING:
    import apsw

    from postbus.log.sqlite import SqliteLog, Transaction

__all__ = ["JOURNAL", "Registered", "Registry", "globs", "whole"]

TOKENS_MAX = 16
JOURNAL = "journal"

SAVE = """
    INSERT INTO subscription_registry VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET settings = excluded.settings WHERE settings <> excluded.settings
"""
ELSEWHERE = """
    SELECT json_extract(settings, '$.target') FROM subscription_registry
    WHERE tenant = ? AND subscription = ? AND json_extract(settings, '$.target') IN ('pull', 'inbox')
"""
FORGET = (
    "DELETE FROM subscription_registry WHERE tenant = ? AND subscription = ?",
    "DELETE FROM subscription_globs WHERE tenant = ? AND subscription = ?",
)
OF_STREAMS = """
    DELETE FROM {table} WHERE consumer = ?
    AND stream_id IN (SELECT stream_id FROM stream_registry WHERE name GLOB ? || '.*')
"""


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription as it is kept."""

    id: str
    patterns: tuple[str, ...]
    retry: RetryPolicy = RetryPolicy()
    ordering: Ordering = Ordering.KEY
    concurrency: int = 10
    timeout_s: float = 300.0
    dead_letter_stream: str | None = None
    overflow: Overflow = Overflow.WAIT
    max_backlog: int | None = None
    filter: dict[str, Any] = msgspec.field(default_factory=dict)


def globs(pattern: str) -> list[tuple[str, int]]:
    """Return (GLOB, dots) pairs that together match exactly what the pattern matches.

    With the number of dots fixed, each ``*`` of a GLOB can only stand for one token; ``>`` is spelled out for every
    number of tokens a topic can have.
    """
    tokens = pattern.split(".")
    if tokens[-1] != ">":
        return [(pattern, len(tokens) - 1)]
    fixed = tokens[:-1]
    lengths = range(len(fixed) + 1, TOKENS_MAX + 1)
    return [(".".join([*fixed, *["*"] * (count - len(fixed))]), count - 1) for count in lengths]


def whole(pattern: str, stream: str) -> bool:
    """Say whether a pattern asks for everything in a stream, whatever the topics there: it matches the stream's name.

    A tenant's journal holds what belongs nowhere else, so only its exact name asks for all of it.
    """
    if pattern == stream:
        return True
    return not stream.endswith(f".{JOURNAL}") and matches(pattern, stream)


class Registry:
    """The subscriptions of one tenant."""

    def __init__(self, log: SqliteLog, tenant: str) -> None:
        self._log = log
        self._tenant = tenant

    async def save(self, registered: Registered) -> None:
        """Remember a subscription, or its new settings."""
        text = msgspec.json.encode(registered).decode()

        def write(tx: Transaction) -> None:
            where = (self._tenant, registered.id)
            target = tx.db.execute(ELSEWHERE, where).get
            if target is not None:
                raise Conflict(f"{registered.id} is a subscription of another kind ({target})", hint="use another id")
            tx.db.execute(SAVE, (*where, text, tx.now_us))
            if tx.db.changes():
                tx.db.execute(FORGET[1], where)
                rows = {pair for pattern in registered.patterns for pair in globs(pattern)}
                insert = "INSERT INTO subscription_globs VALUES (?, ?, ?, ?)"
                tx.db.executemany(insert, [(*where, *pair) for pair in sorted(rows)])

        await self._log.transact(write)

    async def all(self) -> list[Registered]:
        """Return every subscription, by id."""
        query = "SELECT settings FROM subscription_registry WHERE tenant = ? ORDER BY subscription"

        def look(db: apsw.Connection) -> list[Registered]:
            return [msgspec.json.decode(text, type=Registered) for (text,) in db.execute(query, (self._tenant,))]

        return await self._log.store.read(look)

    async def forget(self, subscription: str) -> bool:
        """Delete a subscription with its leases, rows and records; False when there was none."""

        def write(tx: Transaction) -> bool:
            tx.db.execute(FORGET[0], (self._tenant, subscription))
            known = bool(tx.db.changes())
            tx.db.execute(FORGET[1], (self._tenant, subscription))
            for table in ("lanes", "delivery_rows", "once_results"):
                tx.db.execute(OF_STREAMS.format(table=table), (subscription, self._tenant))
            return known

        return await self._log.transact(write)


def describe(registered: Registered) -> dict[str, Any]:
    """Return a subscription as plain values, for people and machines to read."""
    found: dict[str, Any] = msgspec.to_builtins(registered)
    return found
