"""Where events of sources enter the log: appended in the transaction that moves the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from postbus.model import Conflict, IdempotencyConflict, Invalid, Source
from postbus.sources.contract import bad
from postbus.sources.registry import load

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from postbus.log.sqlite import SqliteLog, Transaction
    from postbus.model import Draft, Receipt
    from postbus.sources.contract import Polled, Received

    Check = Callable[[str, bytes], Awaitable[None]]
    """Refuses a payload that a stream does not take, with ``Invalid``."""

__all__ = ["Check", "Ingress", "Overtaken", "Turn"]

ERROR_CHARS_MAX = 1_000
QUIET_US = 60_000_000

# A turn that brought something or nothing; ?2 is what went wrong behind it.
KEEP = """
    UPDATE source_registry SET checkpoint = ?1, last_error = ?2,
           failures = CASE WHEN ?2 IS NULL THEN 0 ELSE failures + 1 END,
           polls = polls + 1, events = events + ?3, duplicates = duplicates + ?4,
           last_ok_at_us = CASE WHEN ?2 IS NULL THEN ?5 ELSE last_ok_at_us END, next_due_at_us = ?6, turn = turn + 1
    WHERE tenant = ?7 AND source = ?8
"""
FAIL = """
    UPDATE source_registry SET last_error = ?, failures = failures + 1, polls = polls + 1, next_due_at_us = ?
    WHERE tenant = ? AND source = ?
"""
TAKE = """
    UPDATE source_registry SET last_error = NULL, failures = 0, polls = polls + 1, events = events + ?,
           duplicates = duplicates + ?, last_ok_at_us = ?
    WHERE tenant = ? AND source = ?
"""
REMEMBER = "INSERT OR IGNORE INTO source_digests VALUES (?, ?, ?, ?)"


class Overtaken(Conflict):
    """Somebody else moved the source's checkpoint meanwhile; nothing was kept."""

    code = "overtaken"


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one look at a source: receipts of what is new, what was known already, what went wrong."""

    receipts: list[Receipt] = []
    duplicates: int = 0
    error: str | None = None
    due_at_us: int | None = None
    by_wall: bool = False

    def wait_s(self, now_us: int) -> float:
        """How long until it is due."""
        return 0.0 if self.due_at_us is None else max((self.due_at_us - now_us) / 1e6, 0.0)


class Ingress:
    """Appends for sources. ``checks`` judge each payload; what they refuse becomes an event about that."""

    def __init__(self, log: SqliteLog, checks: tuple[Check, ...] = ()) -> None:
        self._log = log
        self._checks = checks

    async def keep(self, source: Source, polled: Polled, due_at_us: int) -> Turn:
        """Append what a poll brought and move the checkpoint, or neither; raises ``Overtaken``."""
        by_wall = polled.due_at_us is not None
        if self._idle(source, polled, due_at_us):
            return Turn(due_at_us=due_at_us, by_wall=by_wall)
        drafts = await self._checked(source, polled.drafts)
        checkpoint = msgspec.json.encode(polled.checkpoint)
        problem = None if polled.problem is None else polled.problem[:ERROR_CHARS_MAX]

        def write(tx: Transaction) -> Turn:
            now = load(tx.db, source.tenant, source.id)
            if now.turn != source.turn:
                raise Overtaken(f"the source {source.id} was moved by somebody else")
            receipts, duplicates = _append(tx, source.stream, drafts)
            facts = (checkpoint, problem, len(receipts), duplicates, tx.now_us, due_at_us)
            tx.db.execute(KEEP, (*facts, source.tenant, source.id))
            return Turn(receipts=receipts, duplicates=duplicates, error=problem, due_at_us=due_at_us, by_wall=by_wall)

        return await self._log.transact(write, grows=bool(drafts))

    def _idle(self, source: Source, polled: Polled, due_at_us: int) -> bool:
        """Say whether a turn is not worth a write: nothing came, nothing moved, and one was written just now."""
        if polled.drafts or polled.problem is not None or source.last_error is not None or source.last_ok_at_us is None:
            return False
        now_us = self._log.store.clock.now_us()
        fresh = 0 <= now_us - source.last_ok_at_us < QUIET_US and due_at_us - now_us <= QUIET_US
        return fresh and polled.checkpoint == source.checkpoint

    async def fail(self, source: Source, error: str, due_at_us: int | None) -> Turn:
        """Record that a poll brought nothing but an error."""
        text = error[:ERROR_CHARS_MAX]
        values = (text, due_at_us, source.tenant, source.id)
        await self._log.transact(lambda tx: tx.run(FAIL, values))
        return Turn(error=text, due_at_us=due_at_us)

    async def take(self, source: Source, received: Received) -> Turn:
        """Append what came in by itself; the same call again appends nothing."""
        drafts = await self._checked(source, received.drafts)

        def write(tx: Transaction) -> Turn:
            load(tx.db, source.tenant, source.id)
            fresh = True
            if received.digest is not None:
                tx.db.execute(REMEMBER, (source.tenant, source.id, received.digest, tx.now_us))
                fresh = bool(tx.db.changes())
            receipts, duplicates = _append(tx, source.stream, drafts) if fresh else ([], len(drafts))
            facts = (len(receipts), duplicates, tx.now_us)
            tx.db.execute(TAKE, (*facts, source.tenant, source.id))
            return Turn(receipts=receipts, duplicates=duplicates)

        return await self._log.transact(write, grows=True)

    async def _checked(self, source: Source, drafts: list[Draft]) -> list[Draft]:
        """Return the drafts as they may be appended; names are made unlike those of others in a shared stream."""
        if source.stream == f"{source.tenant}.{source.id}":
            await self._log.ensure_stream(source.stream)
        else:
            drafts = [msgspec.structs.replace(draft, native_id=f"{source.id}:{draft.native_id}") for draft in drafts]
        return [await self._judged(source, draft) for draft in drafts] if self._checks else drafts

    async def _judged(self, source: Source, draft: Draft) -> Draft:
        try:
            for check in self._checks:
                await check(source.stream, draft.payload_json)
        except Invalid as error:
            return bad(source, draft.native_id or "", error.message, draft.payload_json.decode())
        return draft


def _append(tx: Transaction, stream: str, drafts: list[Draft]) -> tuple[list[Receipt], int]:
    """Append what is new; of two facts under one identity the first one stays."""
    try:
        receipts = tx.append(stream, drafts)
    except IdempotencyConflict:  # found before anything was written
        receipts = []
        for draft in drafts:
            receipts += _one(tx, stream, draft)
    new = [receipt for receipt in receipts if not receipt.duplicate]
    return new, len(drafts) - len(new)


def _one(tx: Transaction, stream: str, draft: Any) -> list[Receipt]:
    try:
        return tx.append(stream, [draft])
    except IdempotencyConflict:
        return []
