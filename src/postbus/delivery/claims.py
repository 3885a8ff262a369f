"""The lanes of a pull subscription on disk: who hands its events out, how far, and the rows of what is not simply done.

A pull subscription uses the tables of all subscriptions. Its owner is marked, so that nobody takes what outside
consumers hold for handlers that died. After the end of its process every lease counts as expired.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from postbus.delivery.leases import Book, Owed
from postbus.delivery.table import DONE, FAILED, WAITING, Row, alive
from postbus.delivery.table import _bury as append_letter
from postbus.log.cursors import committed, no_consumer
from postbus.model import LeaseLost

if TYPE_CHECKING:
    from postbus.clock import Clock
    from postbus.delivery.leases import Entry, PullSettings
    from postbus.delivery.table import LaneKey
    from postbus.log.sqlite import SqliteLog, Transaction
    from postbus.model import Draft, Receipt

__all__ = ["Claims", "Letter"]

OWNER_SUFFIX = ".pull"

LANES = "SELECT partition, owner, token, boot, until_us, reach FROM lanes WHERE stream_id = ? AND consumer = ?"
TAKE = "INSERT OR REPLACE INTO lanes VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
KEEP = """
    UPDATE lanes SET until_us = ?, reach = max(reach, ?)
    WHERE stream_id = ? AND consumer = ? AND partition = ? AND owner = ? AND token = ?
"""
FREE = "UPDATE lanes SET owner = NULL WHERE stream_id = ? AND consumer = ? AND owner = ? AND token = ?"
CURSORS = "SELECT partition, next_offset FROM cursors WHERE stream_id = ? AND consumer = ? ORDER BY partition"
# What is not over, and whatever became of those that the cursor has not passed.
ROWS = """
    SELECT "offset", status, attempt, alone, replays, key, boot, due_us, due_at_us, error, dead_stream, dead_offset
    FROM delivery_rows WHERE stream_id = ?1 AND consumer = ?2 AND partition = ?3
    AND (status IN ('waiting', 'processing') OR (status IN ('done', 'failed') AND "offset" >= ?4))
"""
# Replayed or re-queued by an operator: attempts from 0.
REVIVED = """
    SELECT partition, "offset", replays, dead_stream, dead_offset FROM delivery_rows
    WHERE stream_id = ? AND consumer = ? AND status = 'waiting' AND attempt = 0
"""
SAVE = "INSERT OR REPLACE INTO delivery_rows VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
DROP = 'DELETE FROM delivery_rows WHERE stream_id = ? AND partition = ? AND "offset" = ? AND consumer = ?'
KNOWN = """
    SELECT "offset", status, attempt, alone, replays, key, boot, due_us, due_at_us, error, dead_stream, dead_offset
    FROM delivery_rows WHERE stream_id = ? AND partition = ? AND "offset" = ? AND consumer = ?
"""


class Letter(NamedTuple):
    """A dead letter to be written: which event, and what goes where."""

    key: LaneKey
    row: Row
    stream: str
    draft: Draft


class Claims:
    """Reads and writes for one pull subscription; each method is one transaction."""

    def __init__(self, settings: PullSettings, log: SqliteLog, clock: Clock, owner: str) -> None:
        self._log = log
        self._clock = clock
        self._owner = owner + OWNER_SUFFIX
        self._id = settings.id
        self._stream = settings.stream
        self._lease_us = int(settings.lease_s * 1e6)
        self._token = 0

    async def take(self) -> list[Book] | None:
        """Take every partition's lane and return what is known of it; None while another live process has one."""

        def take(tx: Transaction) -> tuple[int, list[Book]] | None:
            where = (tx.stream(self._stream).stream_id, self._id)
            lanes = {partition: rest for partition, *rest in tx.db.execute(LANES, where)}
            for owner, _, boot, until_us, _ in lanes.values():
                if owner not in (None, self._owner) and self._lives(owner, boot, until_us):
                    return None
            token = 1 + max([0, *(lane[1] for lane in lanes.values())])
            cursors = list(tx.db.execute(CURSORS, where))
            if not cursors:
                raise no_consumer(self._stream, self._id)
            books = []
            for partition, cursor in cursors:
                reach = max(lanes[partition][4] if partition in lanes else 0, cursor)
                until_us = self._now_us() + self._lease_us
                tx.db.execute(TAKE, (*where, partition, self._owner, token, self._clock.boot_id(), until_us, reach))
                rows = [_row(values) for values in tx.db.execute(ROWS, (*where, partition, cursor))]
                books.append(self._load(Book(partition, cursor, reach), rows))
            return token, books

        taken = await self._log.transact(take)
        if taken is None:
            return None
        self._token, books = taken
        return books

    def _load(self, book: Book, rows: list[Row]) -> Book:
        now_s = self._clock.monotonic_s()
        for row in rows:
            if row.status in (DONE, FAILED):
                book.done.add(row.offset)
                if row.status == DONE:
                    book.rows[row.offset] = row
                continue
            book.rows[row.offset] = row
            if row.offset >= book.reach:
                continue  # it was dead before its turn came, and was revived: it waits for its turn
            waiting = row.status == WAITING
            due_s = now_s + max(self._due_in_us(row) / 1e6, 0.0) if waiting else now_s
            book.owe(row.offset, Owed(row.attempt, due_s, orphan=not waiting))
        for offset in range(book.cursor, book.reach):
            if offset not in book.done and offset not in book.owed:
                book.owe(offset, Owed(1, now_s, orphan=True))
        book.pass_over(-1)
        return book

    def _lives(self, owner: str, boot: str, until_us: int) -> bool:
        return boot == self._clock.boot_id() and until_us > self._now_us() and alive(owner)

    def _due_in_us(self, row: Row) -> int:
        if row.boot == self._clock.boot_id() or not row.boot:
            return row.due_us - self._now_us()
        return row.due_at_us - self._clock.now_us()

    def _now_us(self) -> int:
        return int(self._clock.monotonic_s() * 1e6)

    def delayed(self, row: Row, delay_s: float) -> Row:
        """Make a row wait from now."""
        delay_us = int(delay_s * 1e6)
        row.status, row.boot = WAITING, self._clock.boot_id()
        row.due_us, row.due_at_us = self._now_us() + delay_us, self._clock.now_us() + delay_us
        return row

    async def write(self, entries: list[Entry]) -> None:
        """Write what changed; raises ``LeaseLost`` when a lane is no longer ours, and nothing is written then."""

        def write(tx: Transaction) -> None:
            self._keep(tx, [(entry.partition, entry.reach) for entry in entries])
            stream_id = tx.stream(self._stream).stream_id
            for entry in entries:
                if entry.save:
                    save = [_values(stream_id, entry.partition, self._id, row, tx.now_us) for row in entry.save]
                    tx.db.executemany(SAVE, save)
                if entry.drop:
                    tx.db.executemany(DROP, [(stream_id, entry.partition, one, self._id) for one in entry.drop])
                if entry.cursor is not None:
                    tx.move(self._stream, self._id, committed, entry.partition, entry.cursor - 1)

        await self._log.transact(write)

    def _keep(self, tx: Transaction, places: list[tuple[int, int]]) -> None:
        where = (tx.stream(self._stream).stream_id, self._id)
        until_us = self._now_us() + self._lease_us
        for partition, reach in places:
            tx.db.execute(KEEP, (until_us, reach, *where, partition, self._owner, self._token))
            if tx.db.changes() != 1:
                raise LeaseLost(f"another process, or a reset, has taken over {self._id} on {self._stream}/{partition}")

    async def bury(self, letters: list[Letter]) -> list[Receipt]:
        """Append dead letters and settle their events, once per event however often it is called."""

        def write(tx: Transaction) -> list[Receipt]:
            self._keep(tx, [(letter.key.partition, 0) for letter in letters])
            stream_id = tx.stream(self._stream).stream_id
            receipts = []
            for key, row, stream, draft in letters:
                receipt = append_letter(tx, key, row, stream, draft)
                row.status, row.dead_stream, row.dead_offset = FAILED, receipt.stream, receipt.offset
                if not receipt.duplicate:
                    tx.db.execute(SAVE, _values(stream_id, key.partition, self._id, row, tx.now_us))
                receipts.append(receipt)
            return receipts

        return await self._log.transact(write, grows=True)

    async def revived(self) -> list[tuple[int, Row]]:
        """Return what an operator made due again, as (partition, row)."""

        def look(tx: Transaction) -> list[tuple[int, Row]]:
            where = (tx.stream(self._stream).stream_id, self._id)
            lanes = {lane[2] for lane in tx.db.execute(LANES, where)}
            if lanes != {self._token}:
                raise LeaseLost(f"another process, or a reset, has taken over {self._id} on {self._stream}")
            return [
                (partition, Row(offset=offset, replays=replays, dead_stream=stream, dead_offset=dead_offset))
                for partition, offset, replays, stream, dead_offset in tx.db.execute(REVIVED, where)
            ]

        return await self._log.transact(look)

    async def known(self, partition: int, offset: int) -> Row | None:
        """Return the row of an event, if it has one."""

        def look(tx: Transaction) -> Row | None:
            where = (tx.stream(self._stream).stream_id, partition, offset, self._id)
            values = tx.db.execute(KNOWN, where).get
            return None if values is None else _row(values)

        return await self._log.transact(look)

    async def release(self) -> None:
        """Give the lanes back."""

        def free(tx: Transaction) -> None:
            tx.db.execute(FREE, (tx.stream(self._stream).stream_id, self._id, self._owner, self._token))

        await self._log.transact(free)


def _row(values: tuple[Any, ...]) -> Row:
    return Row(**dict(zip(Row.__struct_fields__, values, strict=True)))


def _values(stream_id: int, partition: int, subscription: str, row: Row, now_us: int) -> tuple[Any, ...]:
    return (
        stream_id, partition, row.offset, subscription, row.status, row.attempt, row.alone, row.replays,
        row.key, row.boot, row.due_us, row.due_at_us, row.error, row.dead_stream, row.dead_offset, now_us,
    )  # fmt: skip
