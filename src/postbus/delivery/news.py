"""Waiting for something to hand out: one look-out per partition, shared by all who wait."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from postbus.model import PostbusError

if TYPE_CHECKING:
    from postbus.clock import Clock
    from postbus.delivery.leases import Book
    from postbus.log.sqlite import SqliteLog

__all__ = ["News"]

LOOK_S = 30.0


class News:
    """Wakes those who wait for a stream; ``now`` is what to wait for, taken before looking."""

    def __init__(self, log: SqliteLog, clock: Clock, stream: str) -> None:
        self.now = asyncio.Event()
        self.waiters = 0
        self._log = log
        self._clock = clock
        self._stream = stream
        self._lookouts: dict[int, asyncio.Task[None]] = {}

    def tell(self) -> None:
        """Have everybody look again."""
        told, self.now = self.now, asyncio.Event()
        told.set()

    async def wait(self, news: asyncio.Event, books: list[Book], seconds: float) -> None:
        """Wait until something is told or one of the partitions has grown, or until the time is over."""
        self.waiters += 1
        try:
            for book in books:
                if not book.full and book.partition not in self._lookouts:
                    task = asyncio.get_running_loop().create_task(self._look_out(book))
                    self._lookouts[book.partition] = task
            await self._clock.wait(news, seconds)
        finally:
            self.waiters -= 1
            if not self.waiters:
                self.stop()

    async def _look_out(self, book: Book) -> None:
        try:
            while not await self._log.wait(self._stream, book.partition, book.reach, LOOK_S):
                pass
        except PostbusError:
            pass  # whoever looks next is told why
        if self._lookouts.get(book.partition) is asyncio.current_task():
            del self._lookouts[book.partition]
        self.tell()

    def stop(self) -> None:
        """End the look-outs."""
        for task in self._lookouts.values():
            task.cancel()
        self._lookouts.clear()
