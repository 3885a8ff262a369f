"""A reset on the embedded log: the cursor, what is known of deliveries beyond it, and whoever works from the old place.

Everything from the new place on is delivered as if for the first time. What still waits below it stays when the reader
moves back, and is passed over with all the rest when it does not. Dead letters below it stay dead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from postbus.log.cursors import reset

if TYPE_CHECKING:
    from postbus.log.sqlite.doors import Transaction
    from postbus.model import Consumer, Start

__all__ = ["rewind"]

PLACES = "SELECT partition, next_offset FROM cursors WHERE stream_id = ? AND consumer = ?"
FORGET_ROWS = 'DELETE FROM delivery_rows WHERE stream_id = ? AND consumer = ? AND partition = ? AND "offset" >= ?'
SKIP_ROWS = """
    DELETE FROM delivery_rows WHERE stream_id = ? AND consumer = ? AND partition = ? AND "offset" < ?
    AND status IN ('waiting', 'processing')
"""
# Whoever has the lane is refused at the next write, and reads the new place.
FREE_LANE = """
    UPDATE lanes SET owner = NULL, reach = 0, token = token + 1 WHERE stream_id = ? AND consumer = ? AND partition = ?
"""


def rewind(tx: Transaction, stream: str, consumer: str, start: Start, partition: int | None) -> Consumer:
    """Move a consumer to a start policy and return it."""
    stream_id = tx.stream(stream).stream_id
    before = dict(tx.db.execute(PLACES, (stream_id, consumer)))
    moved: Consumer = tx.move(stream, consumer, reset, start, partition)
    for cursor in moved.cursors:
        if partition in (None, cursor.partition):
            place = (stream_id, consumer, cursor.partition, cursor.next_offset)
            tx.db.execute(FORGET_ROWS, place)
            if cursor.next_offset >= before.get(cursor.partition, 0):
                tx.db.execute(SKIP_ROWS, place)
            tx.db.execute(FREE_LANE, place[:3])
    return moved
