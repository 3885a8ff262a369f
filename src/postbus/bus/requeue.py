"""An operator's re-queue: failed events are delivered again to the subscriptions they failed for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from postbus.model import Conflict, Invalid, NotFound, event_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.log.sqlite import SqliteLog, Transaction

__all__ = ["Requeued", "parse_address", "requeue"]

BY_NUMBER = """
    SELECT e.seq, e.stream_id, s.name, e.partition, e."offset" FROM events e JOIN stream_registry s USING (stream_id)
    WHERE e.seq = ? AND s.name NOT GLOB '*-dlq'
"""
BY_ADDRESS = """
    SELECT e.seq, e.stream_id, s.name, e.partition, e."offset" FROM events e JOIN stream_registry s USING (stream_id)
    WHERE s.name = ? AND e.partition = ? AND e."offset" = ? AND s.name NOT GLOB '*-dlq'
"""
FAILED = """
    SELECT consumer FROM delivery_rows WHERE stream_id = ? AND partition = ? AND "offset" = ? AND status = 'failed'
    ORDER BY consumer
"""
# As a replayed dead letter: attempts from 0, due at once, with nothing remembered of a crash.
AGAIN = """
    UPDATE delivery_rows SET status = 'waiting', attempt = 0, alone = 0, replays = replays + 1, boot = '', due_us = 0,
           due_at_us = 0, error = NULL, updated_at_us = ?
    WHERE stream_id = ? AND partition = ? AND "offset" = ? AND status = 'failed'
"""
STATUS = "SELECT status FROM event_journal WHERE id = ?"


class Requeued(msgspec.Struct, frozen=True):
    """An event that is delivered again, and to whom."""

    id: str
    journal_id: int
    subscriptions: tuple[str, ...]


def parse_address(text: str) -> tuple[str, int, int]:
    """Return stream, partition and offset of an event's address; raises ``Invalid``."""
    stream, *numbers = text.rsplit("/", 2)
    if len(numbers) == 2 and all(number.isascii() and number.isdigit() for number in numbers):  # noqa: PLR2004 - partition and offset
        return stream, int(numbers[0]), int(numbers[1])
    raise Invalid(f"{text!r} is no event's address", hint="an address is <stream>/<partition>/<offset>")


async def requeue(log: SqliteLog, events: Sequence[int | str]) -> list[Requeued]:
    """Deliver failed events again, attempts from 0; each is a number of ``event_journal`` or an address.

    All or none: raises ``NotFound`` for an event that is not there and ``Conflict`` for one that has not failed.
    """
    wanted = [event if isinstance(event, int) else parse_address(event) for event in events]

    def write(tx: Transaction) -> list[Requeued]:
        chosen = [_failed(tx, event) for event in wanted]
        for where, _ in chosen:
            tx.db.execute(AGAIN, (tx.now_us, *where))
        return [requeued for _, requeued in chosen]

    return await log.transact(write)


def _failed(tx: Transaction, event: int | tuple[str, int, int]) -> tuple[tuple[int, int, int], Requeued]:
    """Return where a failed event is and to whom it will go again."""
    row = tx.db.execute(BY_NUMBER, (event,)).get if isinstance(event, int) else tx.db.execute(BY_ADDRESS, event).get
    if row is None:
        name = f"number {event} in the journal" if isinstance(event, int) else event_id(*event)
        raise NotFound(f"there is no event {name}", hint="see `postbus events --status failed`")
    seq, stream_id, stream, partition, offset = row
    where = (stream_id, partition, offset)
    failed = tuple(str(consumer) for (consumer,) in tx.db.execute(FAILED, where))
    if not failed:
        status = tx.db.execute(STATUS, (seq,)).get
        message = f"event {event_id(stream, partition, offset)} has not failed: it is {status}"
        raise Conflict(message, hint="only failed events can be re-queued; see `postbus events --status failed`")
    return where, Requeued(event_id(stream, partition, offset), seq, failed)
