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

    from postbus.client.wire import Item
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
    create_agent = _blocking(Client.create_agent)
    agents = _blocking(Client.agents)
    agent = _blocking(Client.agent)
    delete_agent = _blocking(Client.delete_agent)
    set_targets = _blocking(Client.set_targets)
    targets = _blocking(Client.targets)
    revive_target = _blocking(Client.revive_target)
    subscribe_agent = _blocking(Client.subscribe_agent)
    agent_subscriptions = _blocking(Client.agent_subscriptions)
    unsubscribe_agent = _blocking(Client.unsubscribe_agent)
    reset_agent = _blocking(Client.reset_agent)
    agent_lag = _blocking(Client.agent_lag)
    read_inbox = _blocking(Client.read_inbox)
    item = _blocking(Client.item)
    inbox_entries = _blocking(Client.inbox_entries)
    flush_inbox = _blocking(Client.flush_inbox)
    wait_inbox = _blocking(Client.wait_inbox)
    ack_inbox = _blocking(Client.ack_inbox)
    send_message = _blocking(Client.send_message)
    receipts = _blocking(Client.receipts)
    create_timer = _blocking(Client.create_timer)
    timers = _blocking(Client.timers)
    timer = _blocking(Client.timer)
    delete_timer = _blocking(Client.delete_timer)
    pause_timer = _blocking(Client.pause_timer)
    resume_timer = _blocking(Client.resume_timer)
    create_source = _blocking(Client.create_source)
    sources = _blocking(Client.sources)
    source = _blocking(Client.source)
    delete_source = _blocking(Client.delete_source)
    pause_source = _blocking(Client.pause_source)
    resume_source = _blocking(Client.resume_source)
    poll_source = _blocking(Client.poll_source)
    send_reply = _blocking(Client.send_reply)
    invoke_action = _blocking(Client.invoke_action)
    actions = _blocking(Client.actions)
    deliveries = _blocking(Client.deliveries)
    delivery = _blocking(Client.delivery)
    delivery_attempts = _blocking(Client.delivery_attempts)
    retry_delivery = _blocking(Client.retry_delivery)

    def subscribe(self, subscription: str, topic: str | None = None, **where: Any) -> Iterator[Event]:
        """See ``Client.subscribe``; blocks until the next event is there."""
        return self._each(self.client.subscribe(subscription, topic, **where))

    def watch_inbox(self, agent: str, *, after: Item | str | None = None) -> Iterator[Item]:
        """See ``Client.watch_inbox``; blocks until the next item is there."""
        return self._each(self.client.watch_inbox(agent, after=after))

    def _each(self, stream: AsyncIterator[T]) -> Iterator[T]:
        try:
            while True:
                yield self.run(_next(stream))
        finally:
            if not self._loop.is_closed():
                self.run(_end(stream))

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


async def _next(stream: AsyncIterator[T]) -> T:
    return await anext(stream)


async def _end(stream: Any) -> None:
    await stream.aclose()
