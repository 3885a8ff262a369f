"""Request and reply over the log: the answer is an event on a topic of its own, told apart by 128 random bits."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from postbus.model import Event, PostbusError, RequestTimeout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from postbus.clock import Clock
    from postbus.log.sqlite import SqliteLog

__all__ = ["REPLY", "Replies", "Reply"]

REPLY = "reply"
RETRY_S = 0.05


class Reply:
    """An answer that is waited for."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.event: Event | None = None


class Replies:
    """Follows the journal while somebody waits for an answer, and hands each answer to whoever asked."""

    def __init__(self, log: SqliteLog, journal: str, clock: Clock) -> None:
        self._log = log
        self._journal = journal
        self._clock = clock
        self._waiting: dict[str, Reply] = {}
        self._starting = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def expect(self, topic: str) -> AsyncIterator[Reply]:
        """Watch for an answer on a topic; enter before asking. Answers that come after leaving reach nobody."""
        reply = self._waiting[topic] = Reply()
        try:
            async with self._starting:
                if not self._tasks or any(task.done() for task in self._tasks):
                    await self.stop()
                    stats = await self._log.get_stream_stats(self._journal)
                    follow = [self._follow(part.partition, part.high_water_mark) for part in stats.partitions]
                    self._tasks = [asyncio.get_running_loop().create_task(one) for one in follow]
            yield reply
        finally:
            del self._waiting[topic]

    async def receive(self, reply: Reply, timeout_s: float) -> Event:
        """Wait for the answer; raises ``RequestTimeout``."""
        await self._clock.wait(reply.arrived, timeout_s)
        if reply.event is None:
            raise RequestTimeout(f"no reply within {timeout_s:g}s", hint="is a handler subscribed and running?")
        return reply.event

    async def stop(self) -> None:
        """Stop following."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, partition: int, offset: int) -> None:
        while self._waiting:
            try:
                events = await self._log.fetch(self._journal, partition, offset, 200)
                for event in events:
                    offset = event.offset + 1
                    reply = self._waiting.get(event.topic)
                    if reply is not None and reply.event is None:
                        reply.event = event
                        reply.arrived.set()
                if not events and await self._log.wait(self._journal, partition, offset, 1.0):
                    stats = await self._log.get_stream_stats(self._journal)
                    offset = max(offset, stats.partitions[partition].first_offset)
            except PostbusError:
                await asyncio.sleep(RETRY_S)
