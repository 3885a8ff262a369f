"""Putting dead letters away for good, on record."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from postbus.delivery.dead import DeadLetters
from postbus.envelope import draft

if TYPE_CHECKING:
    from postbus.clock import Clock
    from postbus.delivery.dead import DeadEntry
    from postbus.log.sqlite import SqliteLog
    from postbus.model import Draft

__all__ = ["PURGED", "dead_letters", "purge"]

PURGED = "audit.dlq.purged"
NAMED_MAX = 100


def dead_letters(log: SqliteLog, clock: Clock, tenant: str) -> DeadLetters:
    """Return the dead letters of a tenant for somebody who runs no handlers; running processes notice by themselves."""
    return DeadLetters(log, clock, tenant, _nothing)


async def purge(log: SqliteLog, clock: Clock, tenant: str, entries: list[DeadEntry], source: str) -> int:
    """Put dead letters away, with an event on ``audit.dlq.purged`` that says which; return how many.

    Both are one transaction. A ``source`` that no event may have is refused before anything is changed.
    """
    stream = PURGED if await log.has_stream(PURGED) else f"{tenant}.journal"
    await log.ensure_stream(stream)

    def record(count: int) -> tuple[str, Draft]:
        payload = {
            "count": count,
            "letters": [entry.id for entry in entries[:NAMED_MAX]],
            "subscriptions": dict(Counter(entry.subscription for entry in entries)),
            "reasons": dict(Counter(entry.reason for entry in entries)),
        }
        return stream, draft(PURGED, source, payload)

    return await dead_letters(log, clock, tenant).purge(entries, record)


async def _nothing() -> None:
    """Nobody in this process waits for a replay."""
