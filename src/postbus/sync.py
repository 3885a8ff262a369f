"""A small blocking facade for callers without an event loop: the same bus, run on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Self

from postbus.bus import EventBus

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
        self._thread.start()
        self._bus = self._call(_make(path_or_url, settings))

    def __enter__(self) -> Self:
        """Recover and start."""
        self._call(self._bus.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self.close()

    def publish(self, topic: str, source: str, payload: Any, **fields: Any) -> Receipt:
        """See ``EventBus.publish``; blocks until the event is durable."""
        receipt: Receipt = self._call(self._bus.publish(topic, source, payload, **fields))
        return receipt

    def request(self, topic: str, payload: Any, timeout: float = 30.0) -> Event:
        """See ``EventBus.request``; blocks until the answer is there."""
        answer: Event = self._call(self._bus.request(topic, payload, timeout))
        return answer

    def subscribe(self, topic: str, handler: Callable[..., Any], subscriber_id: str, **settings: Any) -> None:
        """See ``EventBus.subscribe``."""

        async def subscribe() -> None:
            self._bus.subscribe(topic, handler, subscriber_id, **settings)

        self._call(subscribe())

    def close(self) -> None:
        """Stop the bus and its thread. Idempotent."""
        if not self._loop.is_closed():
            self._call(self._bus.stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _make(path_or_url: str | Path, settings: dict[str, Any]) -> EventBus:
    return EventBus(path_or_url, **settings)
