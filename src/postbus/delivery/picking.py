"""What a pull subscription hands out next: what is due again first, then what is new, partitions taking turns."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple

from postbus.delivery.dead import unbury
from postbus.model import NotFound, event_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from postbus.clock import Clock
    from postbus.delivery.leases import Book, PullSettings
    from postbus.delivery.table import Row
    from postbus.log.sqlite import SqliteLog
    from postbus.model import Event

__all__ = ["Pick", "Picker"]

logger = logging.getLogger("postbus.delivery")

PAGE = 256
SCAN_MAX = 8192
BYTES_MAX = 8 * 1024 * 1024
"""A batch ends once its payloads are that large."""


class Pick(NamedTuple):
    """An event that was taken from a book, and which attempt this is."""

    book: Book
    event: Event
    attempt: int


class _Batch:
    """What is being picked for one holder, and how much more there is room for."""

    def __init__(self, holder: str, limit: int) -> None:
        self.holder = holder
        self.picked: list[Pick] = []
        self.end = self.limit = limit
        self.more = False
        self._room_bytes = BYTES_MAX

    @property
    def room(self) -> int:
        """How many more may be picked now."""
        return self.end - len(self.picked) if self._room_bytes > 0 else 0

    def share(self, count: int) -> None:
        """Make room for that many more, within the limit."""
        self.end = min(len(self.picked) + count, self.limit)

    def add(self, book: Book, event: Event, attempt: int) -> None:
        """Add an event that is leased."""
        self.picked.append(Pick(book, event, attempt))
        self._room_bytes -= len(event.payload_json)


class Picker:
    """Picks events of one subscription; each is leased to its holder as soon as it is picked."""

    def __init__(
        self, settings: PullSettings, log: SqliteLog, clock: Clock, matches: Callable[[Event], bool] | None
    ) -> None:
        self._id = settings.id
        self._stream = settings.stream
        self._attempts_max = settings.retry.max_attempts
        self._log = log
        self._clock = clock
        self._matches = matches
        self._turn = 0

    def wants(self, event: Event) -> bool:
        """Say whether an event is for the subscription."""
        return self._matches is None or self._matches(event)

    def tick(self, book: Book) -> None:
        """Take back what was not acked in time."""
        book.tick(self._clock.monotonic_s(), self._attempts_max)

    async def pick(self, books: list[Book], limit: int, holder: str) -> tuple[list[Pick], bool]:
        """Pick a fair share from each partition, then from whoever has more; also say whether to look again at once."""
        self._turn += 1
        order = [books[(self._turn + index) % len(books)] for index in range(len(books))]
        batch = _Batch(holder, limit)
        for share in (limit,) if len(order) == 1 else (max(limit // len(order), 1), limit):
            for book in order:
                batch.share(share)
                if batch.room > 0:
                    async with book.lock:
                        await self._fill(book, batch)
        return batch.picked, batch.more

    async def _fill(self, book: Book, batch: _Batch) -> None:
        self.tick(book)
        ready = book.take_ready(batch.room)
        for offset, owed in ready:  # leased before anything is awaited: what settles it meanwhile must find it
            book.lease(offset, batch.holder, owed.attempt + 1)
        for offset, owed in ready:
            event = await self._again(book, offset)
            if event is not None and offset in book.leased:
                batch.add(book, event, owed.attempt + 1)
        scanned = 0
        while batch.room > 0 and not book.full and not batch.more:
            want = PAGE if self._matches is not None else min(batch.room, PAGE)
            events = await self._log.fetch(self._stream, book.partition, book.reach, want)
            if not events:
                break
            if events[0].offset > book.reach:
                book.jump(events[0].offset)
            self._take_new(book, events, batch)
            if self._matches is not None:
                scanned += len(events)
                batch.more = scanned >= SCAN_MAX
                await asyncio.sleep(0)

    def _take_new(self, book: Book, events: list[Event], batch: _Batch) -> None:
        for event in events:
            if batch.room <= 0 or book.full:
                break
            if event.offset < book.reach:
                continue  # an ack for all up to here came between
            book.reach = event.offset + 1
            if event.offset in book.done:
                continue
            row = book.rows.get(event.offset)
            if row is not None or self.wants(event):
                attempt = row.attempt + 1 if row is not None else 1
                book.lease(event.offset, batch.holder, attempt)
                batch.add(book, event, attempt)
            else:
                book.pass_over(event.offset)

    async def _again(self, book: Book, offset: int) -> Event | None:
        """Return an event that is due again, unless it is gone or was never for this subscription."""
        row = book.rows.get(offset)
        event = await self.find(book.partition, offset, row)
        if event is None:
            address = event_id(self._stream, book.partition, offset)
            logger.warning("%s: %s was removed before it was acked", self._id, address)
        elif row is None and not self.wants(event):
            event = None
        if event is None:
            book.unlease(offset)
            book.pass_over(offset)
        return event

    async def find(self, partition: int, offset: int, row: Row | None = None) -> Event | None:
        """Find an event: in its stream, or in the copy that its dead letter is when retention removed it."""
        found = await self._log.fetch(self._stream, partition, offset, 1)
        if found and found[0].offset == offset:
            return found[0]
        if row is None or row.dead_stream is None or row.dead_offset is None:
            return None
        try:
            copies = await self._log.fetch(row.dead_stream, 0, row.dead_offset, 1)
        except NotFound:
            return None
        if not copies or copies[0].offset != row.dead_offset:
            return None
        return unbury(copies[0], self._id, event_id(self._stream, partition, offset))
