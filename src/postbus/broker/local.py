"""The broker inside one process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from postbus.broker.contract import Message, message
from postbus.broker.listener import SLOTS, Listener
from postbus.clock import Clock, SystemClock
from postbus.model import NoResponder, RequestTimeout, Unreachable
from postbus.topics import PatternTrie

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LocalBroker"]


class LocalBroker:
    """See ``Broker``. Needs nothing outside; its listeners are those of its process."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._listeners: PatternTrie[Listener] = PatternTrie()
        self._open: set[Listener] = set()
        self._closed = False

    async def publish(
        self, topic: str, payload: Any, *, headers: Mapping[str, str] | None = None, reply: str | None = None
    ) -> None:
        """See ``Broker.publish``."""
        self._fan_out(message(topic, payload, headers, reply))

    def _fan_out(self, made: Message) -> int:
        if self._closed:
            raise Unreachable("the broker is closed")
        listeners = self._listeners.match(made.topic)
        for listener in listeners:
            listener.offer(made)
        return len(listeners)

    async def subscribe(self, pattern: str, *, slots: int = SLOTS) -> Listener:
        """See ``Broker.subscribe``."""
        listener = Listener(pattern, slots, self._forget)
        if self._closed:
            raise Unreachable("the broker is closed")
        self._listeners.add(listener.pattern, listener)
        self._open.add(listener)
        return listener

    async def _forget(self, listener: Listener) -> None:
        self._listeners.remove(listener.pattern, listener)
        self._open.discard(listener)

    async def request(
        self, topic: str, payload: Any, *, timeout_s: float = 5.0, headers: Mapping[str, str] | None = None
    ) -> Message:
        """See ``Broker.request``."""
        made = message(topic, payload, headers, f"_INBOX.{self._clock.new_id()}")
        async with await self.subscribe(made.reply or "", slots=1) as answers:
            if not self._fan_out(made):
                raise NoResponder(f"nobody listens on {topic}")
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await answers.get()
            except TimeoutError:
                raise RequestTimeout(f"no answer on {topic} within {timeout_s:g} s") from None
        assert isinstance(answer, Message)  # noqa: S101 - the first thing in a queue is never a gap
        return answer

    async def close(self) -> None:
        """See ``Broker.close``."""
        self._closed = True
        for listener in list(self._open):
            listener.end()
            await self._forget(listener)
