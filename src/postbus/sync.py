"""A small blocking facade for callers without an event loop: the same bus, run on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Self

from postbus.bus import EventBus
from postbus.model import Invalid, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path
    from types import TracebackType

    from postbus.model import Event, Receipt

__all__ = ["Bus"]


class Bus:
    """``EventBus`` for blocking code. ``with Bus(path) as bus:`` starts it and stops it at the end.

    Handlers may be plain functions; each call runs on a thread. Methods may be called from any thread.
    """

    def __init__(self, path_or_url: str | Path = "./postbus-data", **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postbus-bus", daemon=True)
        self._closing = threading.Lock()
        self._thread.start()
        try:
            self._bus: EventBus = self._call(lambda: _make(path_or_url, settings))
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        """Recover and start."""
        try:
            self._call(self._bus.__aenter__)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self.close()

    def publish(
        self, topic: str, source: str, payload: Any, correlation_id: str | None = None, **fields: Any
    ) -> Receipt:
        """See ``EventBus.publish``; blocks until the event is durable."""
        receipt: Receipt = self._call(lambda: self._bus.publish(topic, source, payload, correlation_id, **fields))
        return receipt

    def request(self, topic: str, payload: Any, timeout: float = 30.0) -> Event:
        """See ``EventBus.request``; blocks until the answer is there."""
        answer: Event = self._call(lambda: self._bus.request(topic, payload, timeout))
        return answer

    def reply(self, event: Event, payload: Any) -> Receipt:
        """See ``EventBus.reply``; blocks until the answer is durable."""
        receipt: Receipt = self._call(lambda: self._bus.reply(event, payload))
        return receipt

    def subscribe(self, topic: str, handler: Callable[..., Any], subscriber_id: str, **settings: Any) -> None:
        """See ``EventBus.subscribe``."""

        async def subscribe() -> None:
            self._bus.subscribe(topic, handler, subscriber_id, **settings)

        self._call(subscribe)

    def unsubscribe(self, topic: str | None, subscriber_id: str) -> None:
        """See ``EventBus.unsubscribe``."""

        async def unsubscribe() -> None:
            self._bus.unsubscribe(topic, subscriber_id)

        self._call(unsubscribe)

    def close(self) -> None:
        """Stop the bus and its thread. Idempotent."""
        with self._closing:
            if not self._loop.is_closed():
                try:
                    self._call(self._bus.stop)
                finally:
                    self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        if threading.current_thread() is self._thread:
            raise Invalid(
                "the blocking bus cannot be used on its own event loop", hint="use a plain function as handler"
            )
        if self._loop.is_closed():
            raise StorageError("the bus is closed")
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result()


async def _make(path_or_url: str | Path, settings: dict[str, Any]) -> EventBus:
    return EventBus(path_or_url, **settings)
