"""The client for code without an event loop: the same calls, on a loop that runs on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from postbus.client.client import Client
from postbus.model import StorageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from types import TracebackType

    from postbus.model import Event

__all__ = ["SyncClient"]

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncClient, P], T]:
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(method(self.client, *args, **kwargs))

    call.__doc__ = method.__doc__
    return call


class SyncClient:
    """``Client`` for blocking code, from any thread. ``with SyncClient(url) as client:`` closes it at the end."""

    def __init__(self, url: str = "http://127.0.0.1:7766", **settings: Any) -> None:
        self.client = Client(url, **settings)
        self._closing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postbus-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        """Nothing is connected before the first call."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    create_topic = _blocking(Client.create_topic)
    topics = _blocking(Client.topics)
    topic = _blocking(Client.topic)
    delete_topic = _blocking(Client.delete_topic)
    publish = _blocking(Client.publish)
    publish_batch = _blocking(Client.publish_batch)
    create_subscription = _blocking(Client.create_subscription)
    subscriptions = _blocking(Client.subscriptions)
    subscription = _blocking(Client.subscription)
    delete_subscription = _blocking(Client.delete_subscription)
    reset = _blocking(Client.reset)
    lag = _blocking(Client.lag)
    pull = _blocking(Client.pull)
    ack = _blocking(Client.ack)
    ack_through = _blocking(Client.ack_through)
    nack = _blocking(Client.nack)
    extend = _blocking(Client.extend)
    deadletter = _blocking(Client.deadletter)
    dead_letters = _blocking(Client.dead_letters)
    dead_letter = _blocking(Client.dead_letter)
    replay = _blocking(Client.replay)
    purge = _blocking(Client.purge)
    register_schema = _blocking(Client.register_schema)
    schemas = _blocking(Client.schemas)
    schema = _blocking(Client.schema)
    delete_schema = _blocking(Client.delete_schema)
    bind_schema = _blocking(Client.bind_schema)
    binding = _blocking(Client.binding)
    unbind_schema = _blocking(Client.unbind_schema)
    event = _blocking(Client.event)
    trace = _blocking(Client.trace)

    def subscribe(self, subscription: str, topic: str | None = None, **where: Any) -> Iterator[Event]:
        """See ``Client.subscribe``; blocks until the next event is there."""
        events = self.client.subscribe(subscription, topic, **where)
        try:
            while True:
                yield self.run(_next(events))
        finally:
            if not self._loop.is_closed():
                self.run(_end(events))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a call of ``client``."""
        if self._loop.is_closed():
            work.close()
            raise StorageError("the client is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Close the connections and end the thread. Idempotent."""
        with self._closing:
            if not self._loop.is_closed():
                try:
                    self.run(self.client.close())
                finally:
                    self._loop.call_soon_threadsafe(self._loop.stop)
                    self._thread.join()
                    self._loop.close()


async def _next(events: AsyncIterator[Event]) -> Event:
    return await anext(events)


async def _end(events: Any) -> None:
    await events.aclose()
