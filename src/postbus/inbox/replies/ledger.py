"""The rows of replies and every change of their state, each inside one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from postbus.delivery.dead import bury
from postbus.model import Event, NotFound, Trust

if TYPE_CHECKING:
    from postbus.log.sqlite import Transaction
    from postbus.model import Receipt

__all__ = [
    "ATTEMPTS",
    "CONSUMER",
    "Attempt",
    "Claimed",
    "Reply",
    "accept",
    "claim",
    "fail",
    "is_due",
    "load",
    "lookup",
    "next_due",
    "page",
    "postpone",
    "reopen",
    "sent",
]

CONSUMER = "_replies"
REASON = "reply"
ERROR_CHARS_MAX = 1_000

COLUMNS = (
    'delivery, tenant, stream, partition, "offset", handle, action, arguments, state, attempts, deaths, error, result, '
    "due_at_us, created_at_us, updated_at_us"
)
ONE = f"SELECT {COLUMNS} FROM outbox_rows WHERE tenant = ? AND delivery = ?"  # noqa: S608 - constants only
PAGE = f"""
    SELECT {COLUMNS} FROM outbox_rows
    WHERE tenant = ?1 AND (?2 IS NULL OR state = ?2) AND (?3 IS NULL OR seq < ?3) ORDER BY seq DESC LIMIT ?4
"""  # noqa: S608 - constants only
SEQ = "SELECT seq FROM outbox_rows WHERE tenant = ? AND delivery = ?"
ADD = """
    INSERT INTO outbox_rows (tenant, delivery, stream, partition, "offset", handle, lane, action, arguments, state,
                             attempts, deaths, due_at_us, created_at_us, updated_at_us)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'accepted', 0, 0, ?, ?, ?)
"""
# The first reply of each lane, found by jumping from lane to lane, however many wait behind it.
HEADS = """
    WITH RECURSIVE lanes (lane) AS (
        SELECT min(lane) FROM outbox_rows WHERE tenant = ?1 AND state = 'accepted'
        UNION ALL
        SELECT (SELECT min(o.lane) FROM outbox_rows o
                WHERE o.tenant = ?1 AND o.state = 'accepted' AND o.lane > lanes.lane)
        FROM lanes WHERE lanes.lane IS NOT NULL)
    SELECT (SELECT min(o.seq) FROM outbox_rows o WHERE o.tenant = ?1 AND o.state = 'accepted' AND o.lane = lanes.lane)
    FROM lanes WHERE lanes.lane IS NOT NULL
"""
DUE = f"""
    SELECT {COLUMNS} FROM outbox_rows WHERE seq IN ({HEADS}) AND due_at_us <= ?2 ORDER BY seq LIMIT ?3
"""  # noqa: S608 - constants only
NEXT_DUE = f"SELECT min(due_at_us) FROM outbox_rows WHERE seq IN ({HEADS})"  # noqa: S608 - constants only
TAKE = "UPDATE outbox_rows SET attempts = attempts + 1, due_at_us = ?, updated_at_us = ? WHERE delivery = ?"
BEGIN = "INSERT OR REPLACE INTO outbox_attempts VALUES (?, ?, ?, NULL, NULL)"
TRIES = "SELECT count(*) FROM outbox_attempts WHERE delivery = ?"
ATTEMPTS = """
    SELECT attempt, started_at_us, ended_at_us, error FROM outbox_attempts WHERE delivery = ? ORDER BY started_at_us
"""
END = """
    UPDATE outbox_attempts SET ended_at_us = ?, error = ? WHERE delivery = ? AND attempt = ? AND ended_at_us IS NULL
"""
SENT = """
    UPDATE outbox_rows SET state = 'sent', error = NULL, result = ?, updated_at_us = ?
    WHERE delivery = ? AND attempts = ? AND state = 'accepted'
"""
LATER = """
    UPDATE outbox_rows SET error = ?, due_at_us = ?, updated_at_us = ?
    WHERE delivery = ? AND attempts = ? AND state = 'accepted'
"""
FAILED = """
    UPDATE outbox_rows SET state = 'failed', error = ?, deaths = deaths + 1, updated_at_us = ?
    WHERE delivery = ? AND attempts = ? AND state = 'accepted'
"""
REOPEN = """
    UPDATE outbox_rows SET state = 'accepted', attempts = 0, error = NULL, due_at_us = ?, updated_at_us = ?
    WHERE delivery = ? AND state = 'failed'
"""
# A dead reply is a failed delivery like any other, so that dead letters are listed, replayed and purged in one way.
BURIED = "INSERT OR REPLACE INTO delivery_rows VALUES (?, ?, ?, ?, 'failed', ?, 0, ?, NULL, '', 0, 0, ?, ?, ?, ?)"
REPLAYED = """
    SELECT o.delivery FROM delivery_rows d JOIN outbox_rows o
      ON o.stream = ?2 AND o.partition = d.partition AND o."offset" = d."offset"
    WHERE d.stream_id = ?1 AND d.consumer = ?3 AND d.status = 'waiting'
"""
PLACE = 'SELECT stream, partition, "offset" FROM outbox_rows WHERE delivery = ?'
ANY_REPLAYED = """
    SELECT EXISTS (SELECT 1 FROM delivery_rows d JOIN stream_registry s USING (stream_id)
                   WHERE s.name = ? AND d.consumer = ? AND d.status = 'waiting')
"""
SETTLED = """
    UPDATE delivery_rows SET status = 'done', updated_at_us = ?
    WHERE stream_id = ? AND partition = ? AND "offset" = ? AND consumer = ?
"""


class Reply(msgspec.Struct, frozen=True):
    """A reply and what became of it: accepted, then sent or failed. ``event`` is where it is on record."""

    id: str
    tenant: str
    event: str
    handle: dict[str, Any]
    action: str
    arguments: dict[str, Any]
    state: str
    attempts: int
    deaths: int
    error: str | None
    result: dict[str, Any] | None
    due_at_us: int
    created_at_us: int
    updated_at_us: int


class Attempt(msgspec.Struct, frozen=True):
    """One try. Without an end it runs, or its process died."""

    attempt: int
    started_at_us: int
    ended_at_us: int | None
    error: str | None


class Claimed(msgspec.Struct, frozen=True):
    """A reply that this process now tries; ``tries`` counts all of its life."""

    reply: Reply
    tries: int


def _reply(row: tuple[Any, ...]) -> Reply:
    (
        name,
        tenant,
        stream,
        partition,
        offset,
        handle,
        action,
        arguments,
        state,
        attempts,
        deaths,
        error,
        result,
        *rest,
    ) = row
    return Reply(
        name,
        tenant,
        f"{stream}/{partition}/{offset}",
        msgspec.json.decode(handle),
        action,
        msgspec.json.decode(arguments),
        state,
        attempts,
        deaths,
        error,
        None if result is None else msgspec.json.decode(result),
        *rest,
    )


def lookup(db: Any, tenant: str, delivery: str) -> Reply | None:
    """Return a reply, if there is one."""
    row = db.execute(ONE, (tenant, delivery)).fetchone()
    return None if row is None else _reply(row)


def load(db: Any, tenant: str, delivery: str) -> Reply:
    """Return a reply; raises ``NotFound``."""
    found = lookup(db, tenant, delivery)
    if found is None:
        raise NotFound(f"there is no delivery {delivery[:60]}", hint="list them with `postbus deliveries list`")
    return found


def page(db: Any, tenant: str, state: str | None, after: str | None, limit: int) -> list[Reply]:
    """Return replies, newest first."""
    seq = None
    if after is not None:
        seq = db.execute(SEQ, (tenant, after)).get
        if seq is None:
            raise NotFound(f"there is no delivery {after[:60]}")
    return [_reply(row) for row in db.execute(PAGE, (tenant, state, seq, limit))]


def next_due(db: Any, tenant: str) -> int | None:
    """Return when the next reply is due."""
    found: int | None = db.execute(NEXT_DUE, (tenant,)).get
    return found


def is_due(db: Any, tenant: str, journal: str, now_us: int) -> bool:
    """Say whether anything is to be tried now, or was replayed from its dead letter."""
    row = db.execute(NEXT_DUE, (tenant,)).get
    if row is not None and row <= now_us:
        return True
    return bool(db.execute(ANY_REPLAYED, (journal, CONSUMER)).get)


def accept(
    tx: Transaction,
    tenant: str,
    delivery: str,
    receipt: Receipt,
    handle: dict[str, Any],
    lane: bytes,
    action: str,
    arguments: dict[str, Any],
) -> None:
    """Keep a reply that is on record as an event."""
    place = (receipt.stream, receipt.partition, receipt.offset)
    texts = (msgspec.json.encode(handle), lane, action, msgspec.json.encode(arguments))
    tx.db.execute(ADD, (tenant, delivery, *place, *texts, tx.now_us, tx.now_us, tx.now_us))


def claim(tx: Transaction, tenant: str, journal: str, now_us: int, lease_us: int, limit: int) -> list[Claimed]:
    """Take up what is due and write down that it is tried; nobody else tries it before the lease is over."""
    revive = (tx.stream(journal).stream_id, journal, CONSUMER)
    for (delivery,) in list(tx.db.execute(REPLAYED, revive)):
        reopen(tx, delivery)
    claimed = []
    for row in list(tx.db.execute(DUE, (tenant, now_us, limit))):
        reply = _reply(row)
        reply = msgspec.structs.replace(reply, attempts=reply.attempts + 1)
        tx.db.execute(TAKE, (now_us + lease_us, tx.now_us, reply.id))
        tx.db.execute(BEGIN, (reply.id, reply.attempts, now_us))
        claimed.append(Claimed(reply, tx.db.execute(TRIES, (reply.id,)).get))
    return claimed


def sent(tx: Transaction, delivery: str, attempt: int, result: dict[str, Any]) -> None:
    """Settle a reply that arrived; a try whose lease was taken over settles nothing."""
    tx.db.execute(END, (tx.now_us, None, delivery, attempt))
    tx.db.execute(SENT, (msgspec.json.encode(result), tx.now_us, delivery, attempt))


def postpone(tx: Transaction, reply: Reply, error: str, due_us: int) -> None:
    """Keep a reply for later."""
    text = error[:ERROR_CHARS_MAX]
    tx.db.execute(END, (tx.now_us, text, reply.id, reply.attempts))
    tx.db.execute(LATER, (text, due_us, tx.now_us, reply.id, reply.attempts))


def fail(tx: Transaction, reply: Reply, error: str, dead: str) -> None:
    """Give a reply up: its event becomes a dead letter in the same transaction."""
    text = error[:ERROR_CHARS_MAX]
    tx.db.execute(END, (tx.now_us, text, reply.id, reply.attempts))
    tx.db.execute(FAILED, (text, tx.now_us, reply.id, reply.attempts))
    if not tx.db.changes():
        return
    stream, partition, offset = reply.event.rsplit("/", 2)
    payload = {"delivery": reply.id, "handle": reply.handle, "action": reply.action, "arguments": reply.arguments}
    event = Event(
        stream,
        int(partition),
        int(offset),
        "delivery.accepted",
        "replies",
        "",
        None,
        msgspec.json.encode(payload),
        None,
        None,
        None,
        None,
        None,
        reply.created_at_us,
        reply.created_at_us,
        Trust.UNTRUSTED.value,
    )
    letter = bury(event, CONSUMER, REASON, reply.attempts, text)
    numbered = msgspec.structs.replace(letter, native_id=f"{letter.native_id}:{reply.deaths + 1}")
    receipt = tx.append(dead, [numbered])[0]
    place = (tx.stream(stream).stream_id, int(partition), int(offset), CONSUMER)
    tx.db.execute(BURIED, (*place, reply.attempts, reply.deaths, text, dead, receipt.offset, tx.now_us))


def reopen(tx: Transaction, delivery: str) -> None:
    """Let a failed reply be tried again, attempts from 0; its dead letter then reads replayed."""
    tx.db.execute(REOPEN, (tx.now_us, tx.now_us, delivery))
    for stream, partition, offset in list(tx.db.execute(PLACE, (delivery,))):
        tx.db.execute(SETTLED, (tx.now_us, tx.stream(stream).stream_id, partition, offset, CONSUMER))
