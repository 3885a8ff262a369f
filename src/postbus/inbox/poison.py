"""Events that could not be put into an inbox: they become dead letters, and come back when those are replayed."""

from __future__ import annotations

import logging
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from postbus.delivery.dead import bury, grave
from postbus.inbox.cohort import match_one
from postbus.inbox.door import deliver
from postbus.model import IdempotencyConflict, PostbusError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from postbus.inbox.cohort import Member
    from postbus.inbox.door import Delivered
    from postbus.log.sqlite import SqliteLog, Transaction
    from postbus.model import Event

__all__ = ["bury_all", "poisonous", "prepare_grave", "revive"]

logger = logging.getLogger("postbus.inbox")

REPLAYS = """
    SELECT IFNULL(max(replays), 0) FROM delivery_rows
    WHERE stream_id = ? AND partition = ? AND "offset" = ? AND consumer = ?
"""
FAILED = """
    INSERT OR REPLACE INTO delivery_rows (stream_id, partition, "offset", consumer, status, attempt, alone, replays,
        key, boot, due_us, due_at_us, error, dead_stream, dead_offset, updated_at_us)
    VALUES (?, ?, ?, ?, 'failed', ?, 0, ?, ?, '', 0, 0, ?, ?, ?, ?)
"""
WAITING = """
    SELECT d."offset", d.consumer FROM delivery_rows d JOIN stream_registry s USING (stream_id)
    WHERE s.name = ? AND d.partition = ? AND d.status = 'waiting' ORDER BY d."offset"
"""
SETTLED = 'DELETE FROM delivery_rows WHERE stream_id = ? AND partition = ? AND "offset" = ? AND consumer = ?'
ERROR = "it could not be put into the inbox"


def poisonous(error: Exception) -> bool:
    """Say whether an error is about what was to be written, and not about the store or a stream that is gone."""
    if isinstance(error, StorageError):
        return type(error) is StorageError and error.__cause__ is not None  # a constraint, or another SQL error
    return not isinstance(error, PostbusError)


async def prepare_grave(log: SqliteLog, stream: str) -> str:
    """Make sure that dead letters of a stream have a place; return its name."""
    name = grave(stream)
    await log.ensure_stream(name)
    return name


def bury_all(tx: Transaction, event: Event, subscriptions: Iterable[str], dead_stream: str, attempts: int) -> None:
    """Append a dead letter of an event for each subscription, unless its last one is still open."""
    stream_id = tx.stream(event.stream).stream_id
    for name in subscriptions:
        where = (stream_id, event.partition, event.offset, name)
        replays = int(tx.db.execute(REPLAYS, where).get)
        draft = bury(event, name, "poison", attempts, ERROR)
        for death in count(replays):
            numbered = msgspec.structs.replace(draft, native_id=f"{draft.native_id}:{death}")
            try:
                receipt = tx.append(dead_stream, [numbered])[0]
            except IdempotencyConflict:
                continue
            break
        row = (*where, attempts, replays, event.key, ERROR, dead_stream, receipt.offset, tx.now_us)
        tx.db.execute(FAILED, row)


async def revive(
    log: SqliteLog, stream: str, partition: int, epoch: int, members: Mapping[str, Member]
) -> list[Delivered]:
    """Deliver to members what an operator has replayed; what still cannot be delivered is dead again."""
    delivered: list[Delivered] = []
    for offset, name in await log.store.read(lambda db: list(db.execute(WAITING, (stream, partition)))):
        events = await log.fetch(stream, partition, offset, 1) if name in members else []
        if not events or events[0].offset != offset:
            continue
        event = events[0]

        def write(tx: Transaction, event: Event = event, member: Member = members[name]) -> Delivered:
            where = (tx.stream(stream).stream_id, partition, event.offset, member.subscription.id)
            tx.db.execute(SETTLED, where)
            return deliver(tx, stream, partition, match_one(member, event), [], epoch=epoch)

        try:
            delivered.append(await log.transact(write, grows=True))
        except Exception as error:
            if not poisonous(error):
                raise
            logger.exception("%s could not be delivered again", event.id)
            dead_stream = await prepare_grave(log, stream)
            await log.transact(partial(_bury_again, event, name, dead_stream))
    return delivered


def _bury_again(event: Event, name: str, dead_stream: str, tx: Transaction) -> None:
    bury_all(tx, event, [name], dead_stream, 1)
