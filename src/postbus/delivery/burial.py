"""Giving up on events of a pull subscription: their dead letters, written together."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from postbus.delivery.claims import Letter
from postbus.delivery.dead import bury, grave
from postbus.delivery.table import LaneKey, Row
from postbus.model import Event

if TYPE_CHECKING:
    from postbus.delivery.claims import Claims
    from postbus.delivery.leases import Book, PullSettings
    from postbus.delivery.picking import Picker
    from postbus.log.sqlite import SqliteLog
    from postbus.model import Receipt

__all__ = ["Doomed", "bury_all", "find_doomed"]

logger = logging.getLogger("postbus.delivery")


class Doomed(NamedTuple):
    """An event that is given up on, its row, and why."""

    event: Event
    row: Row
    reason: str
    error: str


async def find_doomed(settings: PullSettings, picker: Picker, book: Book) -> list[Doomed]:
    """Return what has used up its attempts in a partition; what is not there any more is let go."""
    found = []
    for offset, attempt in list(book.doomed.items()):
        row = book.rows.get(offset) or Row(offset=offset)
        row.attempt = attempt
        event = await picker.find(book.partition, offset, row)
        if event is None:
            book.bury(offset)
            continue
        error = row.error or f"not acknowledged within {round(settings.ack_timeout_s * 1000)} ms, {attempt} times"
        found.append(Doomed(event, row, "max_attempts", error))
    return found


async def bury_all(
    settings: PullSettings,
    log: SqliteLog,
    claims: Claims,
    partition: int,
    doomed: list[Doomed],
    headers: dict[str, str] | None,
) -> list[Receipt]:
    """Write the dead letters of a partition's events; the stream they go to is made when it is missing."""
    stream = settings.dead_letter_stream or grave(settings.stream)
    if not await log.has_stream(stream):
        await log.ensure_stream(stream)
    key = LaneKey(settings.id, settings.stream, partition)
    letters = []
    for event, row, reason, error in doomed:
        row.error = error
        draft = bury(event, settings.id, reason, row.attempt, error)
        if headers:
            merged = msgspec.json.encode({**msgspec.json.decode(draft.headers_json or b"{}"), **headers})
            draft = msgspec.structs.replace(draft, headers_json=merged)
        letters.append(Letter(key, row, stream, draft))
    receipts = await claims.bury(letters)
    for event, row, reason, error in doomed:
        message = "%s gave up on %s (%s, attempt %d): %s"
        logger.warning(message, settings.id, event.id, reason, row.attempt, error)
    return receipts
