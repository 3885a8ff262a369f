"""A listener: a bounded queue that drops what does not fit, counts it, and says so in its place."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Self

from postbus.broker.contract import Message, Missed
from postbus.model import Invalid, Unreachable
from postbus.topics import check_pattern

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["SLOTS", "Listener"]

SLOTS = 256


class Listener:
    """What one subscriber of a broker has not read yet. Iterate over it, or ``get``; ``close`` ends it."""

    def __init__(self, pattern: str, slots: int, ended: Callable[[Listener], Awaitable[None]]) -> None:
        if slots < 1:
            raise Invalid(f"slots is at least 1, not {slots}")
        self.pattern = check_pattern(pattern)
        self.dropped = 0
        self._slots = slots
        self._ended = ended
        self._queue: deque[Message | Missed] = deque()
        self._held = 0
        self._news = asyncio.Event()
        self._closed = False

    def offer(self, message: Message) -> None:
        """Queue a message, or drop it when all slots are taken; called by the broker."""
        if self._closed:
            return
        if self._held < self._slots:
            self._queue.append(message)
            self._held += 1
            self._news.set()
        else:
            self.dropped += 1
            self.tell(1)

    def tell(self, missed: int | None) -> None:
        """Say in this place that so many were missed; None: it is not known how many."""
        if self._closed:
            return
        last = self._queue[-1] if self._queue else None
        if isinstance(last, Missed):
            unknown = missed is None or last.count is None
            self._queue[-1] = Missed(None if unknown else (last.count or 0) + (missed or 0))
        else:
            self._queue.append(Missed(missed))
        self._news.set()

    async def get(self) -> Message | Missed:
        """Return the next message, or ``Missed``; raises ``Unreachable`` once it is closed and read to its end."""
        while not self._queue:
            if self._closed:
                raise Unreachable(f"the listener on {self.pattern} is closed")
            self._news.clear()
            await self._news.wait()
        found = self._queue.popleft()
        if isinstance(found, Message):
            self._held -= 1
        return found

    async def close(self) -> None:
        """Stop listening; what is queued can still be read. Idempotent."""
        if not self._closed:
            self.end()
            await self._ended(self)

    def end(self) -> None:
        """Take nothing more; called by a broker that is closed."""
        self._closed = True
        self._news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message | Missed:
        try:
            return await self.get()
        except Unreachable:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
