"""Request and reply over the log: the answer is an event on a topic of its own, told apart by 128 random bits."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from postbus.model import Event, PostbusError, RequestTimeout

if TYPE_CHECKING:
    from postbus.log.sqlite import SqliteLog

__all__ = ["REPLY", "Replies"]

REPLY = "reply"


class Replies:
    """Follows the journal while somebody waits for an answer, and hands each answer to whoever asked."""

    def __init__(self, log: SqliteLog, journal: str) -> None:
        self._log = log
        self._journal = journal
        self._waiting: dict[str, asyncio.Future[Event]] = {}
        self._task: asyncio.Task[None] | None = None

    async def expect(self, topic: str) -> asyncio.Future[Event]:
        """Watch for an answer on a topic from now on; call before asking."""
        future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        if self._task is None or self._task.done():
            stats = await self._log.get_stream_stats(self._journal)
            start = stats.partitions[0].high_water_mark
            self._task = asyncio.get_running_loop().create_task(self._follow(start))
        self._waiting[topic] = future
        return future

    async def receive(self, topic: str, future: asyncio.Future[Event], timeout_s: float) -> Event:
        """Wait for the answer; raises ``RequestTimeout``. Later answers to this topic reach nobody."""
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise RequestTimeout(
                f"no reply within {timeout_s:g}s", hint="is a handler subscribed and running?"
            ) from None
        finally:
            self._waiting.pop(topic, None)

    async def stop(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _follow(self, offset: int) -> None:
        while self._waiting or offset >= 0:
            with contextlib.suppress(PostbusError):
                events = await self._log.fetch(self._journal, 0, offset, 200)
                for event in events:
                    offset = event.offset + 1
                    future = self._waiting.get(event.topic)
                    if future is not None and not future.done():
                        future.set_result(event)
                if not events:
                    await self._log.wait(self._journal, 0, offset, 1.0)
