"""``EventBus``: what is published is durable before anybody is told, and reaches every subscription at least once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from postbus.bus.binding import bind, name_of
from postbus.bus.context import current, derivation, lower
from postbus.bus.opening import open_log
from postbus.bus.places import EVERYTHING, move, pass_frontier, place
from postbus.bus.registry import JOURNAL, Registry, whole
from postbus.bus.replies import REPLY, Replies
from postbus.bus.settings import check_numbers, parse_start, registration
from postbus.bus.subscriber import Subscriber
from postbus.clock import Clock, SystemClock
from postbus.delivery.dead import DeadLetters
from postbus.delivery.table import DeliveryTable, new_owner
from postbus.envelope import Limits, draft
from postbus.model import (
    Conflict,
    Durability,
    Invalid,
    NotFound,
    Ordering,
    Overflow,
    PostbusError,
    StorageError,
    Trust,
)
from postbus.schemas import Schemas
from postbus.topics import check_stream_name, matches

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime
    from types import TracebackType

    from postbus.bus.registry import Registered
    from postbus.log.sqlite import SqliteLog
    from postbus.model import Event, Receipt, RetryPolicy, Start, Stream, StreamSettings

__all__ = ["EventBus"]

logger = logging.getLogger("postbus.bus")

FRONTIER_S = 1.0
NOTICE_S = 0.05
ATTACH_S = 1.0
STREAM_TOKENS = 3
# An event's address may be longer than the correlation ids that publishers give themselves.
OWN, INHERITED = Limits(), Limits(correlation_id_bytes=512)


class EventBus:
    """A durable event bus on one data folder. ``async with bus:`` recovers, starts, and stops at the end.

    Publishing works as soon as the object exists; handlers run between ``start`` and ``stop``. Several processes may
    share one folder: each partition of a subscription is worked on by one of them at a time. With ``log`` the bus of a
    tenant uses a log that is open already, and leaves it open.
    """

    def __init__(
        self,
        path_or_url: str | Path = "./postbus-data",
        *,
        tenant: str = "local.default",
        durability: str = "full",
        poll_interval: float = 5.0,
        batch_size: int = 100,
        lease_s: float = 30.0,
        stop_grace_s: float = 30.0,
        max_hops: int = 32,
        clock: Clock | None = None,
        log: SqliteLog | None = None,
    ) -> None:
        check_numbers(poll_interval=poll_interval, lease_s=lease_s)
        check_numbers(whole=True, batch_size=batch_size, max_hops=max_hops)
        check_numbers(least=0, stop_grace_s=stop_grace_s)
        if durability not in {*Durability}:
            raise Invalid(f"durability is 'full' or 'relaxed', not {durability!r}")
        self.tenant = tenant
        self.journal = check_stream_name(f"{tenant}.{JOURNAL}")
        self.clock = clock or SystemClock()
        self._url = str(path_or_url)
        self._durability = durability
        self._poll_s = poll_interval
        self._batch = batch_size
        self._lease_s = lease_s
        self._grace_s = stop_grace_s
        self._max_hops = max_hops
        self._owner = new_owner(self.clock)
        self._opening, self._starting = asyncio.Lock(), asyncio.Lock()
        self._shared = log
        self._log: SqliteLog | None = None
        self._folder: str | None = None
        self._subscribers: dict[str, Subscriber] = {}
        self._attaching: dict[str, asyncio.Lock] = {}
        self._placing: dict[str, asyncio.Event] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._middleware: list[Callable[..., Awaitable[Any]]] = []
        self._running = False
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- life ---

    async def open(self) -> SqliteLog:
        """Open the log if it is not open yet, and return it. Every method does this by itself."""
        if self._log is None:
            async with self._opening:
                if self._log is None:
                    self._log = await self._open()
        return self._log

    async def _open(self) -> SqliteLog:
        if self._shared is not None:
            return await self._begin(self._shared)
        log, self._folder = await open_log(self._url, self.clock, self._durability)
        return await self._begin(log)

    async def _begin(self, log: SqliteLog) -> SqliteLog:
        log.projections.start()
        await log.ensure_stream(self.journal)
        await log.get_stream_stats(self.journal)
        self._table = DeliveryTable(log, self.clock, self._owner, self._lease_s)
        self._registry = Registry(log, self.tenant)
        self._schemas = Schemas(log)
        self._replies = Replies(log, self.journal, self.clock)
        self._dead_letters = DeadLetters(log, self.clock, self.tenant, self._refresh)
        return log

    @property
    def dead_letters(self) -> DeadLetters:
        """The dead letters of the tenant; raises ``StorageError`` while the bus is not open."""
        if self._log is None:
            raise StorageError(
                "the bus is not open", hint="use it inside `async with bus:`, or `await bus.open()` first"
            )
        return self._dead_letters

    async def __aenter__(self) -> Self:
        """Recover and start."""
        try:
            count = await self.recover()
            if count:
                logger.info("recovered %d events", count)
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        await self.stop()

    async def recover(self) -> int:
        """Free what processes that died were working on; return how many events were in flight there."""
        await self.open()
        known = {registered.id: registered.patterns for registered in await self._registry.all()}

        def match(subscription: str, stream: str) -> Callable[[str], bool]:
            patterns = known.get(subscription, ())
            everything = any(whole(pattern, stream) for pattern in patterns)
            return lambda topic: everything or any(matches(pattern, topic) for pattern in patterns)

        return await self._table.recover(self.tenant, match)

    async def start(self) -> None:
        """Dispatch to the handlers from now on. Idempotent."""
        async with self._starting:
            if self._running:
                return
            log = await self.open()
            self._running = True
            seen, streams = log.foreign_changes, await log.streams()
            await self._attach_all()
            self._spawn(self._follow_others(log, seen, streams))
            self._spawn(self._move_frontier())

    async def stop(self) -> None:
        """Take no new work, let running handlers finish (up to ``stop_grace_s``), close the log. Idempotent.

        Raises ``Invalid`` when a handler waits for the end of the bus that waits for the handler.
        """
        if any(subscriber.runs(asyncio.current_task()) for subscriber in self._subscribers.values()):
            message = "a handler cannot wait for its own bus to stop"
            raise Invalid(message, hint="stop it beside the handler, with asyncio.create_task(bus.stop())")
        async with self._starting:  # what is just being started is stopped with the rest
            running, self._running = self._running, False
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for placing in self._placing.values():
            placing.set()
        self._placing.clear()
        subscribers = list(self._subscribers.values())
        await asyncio.gather(*(subscriber.stop(self._grace_s) for subscriber in subscribers), *self._leaving.values())
        log, self._log = self._log, None
        if log is None:
            return
        await self._replies.stop()
        if running:
            with contextlib.suppress(PostbusError):
                await pass_frontier(log, self.tenant, self._all_placed)
        if self._shared is None:
            await log.close()
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    # --- publishing ---

    async def publish(
        self,
        topic: str,
        source: str,
        payload: Any,
        correlation_id: str | None = None,
        *,
        key: str | None = None,
        headers: dict[str, str] | None = None,
        native_id: str | None = None,
        variant: str = "",
        metadata: dict[str, Any] | None = None,
        occurred_at: datetime | str | None = None,
        delivery_handle: dict[str, Any] | None = None,
        trust: Trust = Trust.TRUSTED,
    ) -> Receipt:
        """Append an event and return once it is durable; handlers are woken, never called, by this.

        ``payload`` is a JSON value, or bytes of JSON that are kept as they are. Inside a handler the new event derives
        from the one being handled: it inherits the correlation unless one is given, and is untrusted if that one is.
        Nothing is appended when it raises: ``Invalid`` for a bad argument, ``SchemaMismatch``, ``IdempotencyConflict``,
        ``LoopDetected``, ``StorageFull``, ``Backpressure``.
        """
        context = current.get()
        system_headers, limits = None, OWN
        if context is not None:
            inherited, system_headers = derivation(context, self._max_hops)
            trust = lower(trust, context.event.trust)
            if correlation_id is None:
                correlation_id, limits = inherited, INHERITED
        made = draft(
            topic,
            source,
            payload,
            variant=variant,
            key=key,
            metadata=metadata,
            headers=headers,
            correlation_id=correlation_id,
            native_id=native_id,
            delivery_handle=delivery_handle,
            occurred_at=occurred_at,
            system_headers=system_headers,
            limits=limits,
            trust=trust,
        )
        log = self._log or await self.open()
        while context is None and self._placing:  # who subscribed before this call must not miss what it appends
            await next(iter(self._placing.values())).wait()
        stream = self.journal
        if topic.count(".") == STREAM_TOKENS - 1 and await log.has_stream(topic):
            stream = topic
            await self._schemas.check(stream, made.payload_json)  # a journal is never bound to a schema
        return (await log.append(stream, [made]))[0]

    async def ensure_stream(self, name: str, settings: StreamSettings | None = None) -> Stream:
        """Register a stream: events on the topic of that name are kept there instead of in the journal."""
        log = await self.open()
        made = await log.ensure_stream(name, settings)
        if self._running:
            await self._attach_all()
        return made

    async def request(self, topic: str, payload: Any, timeout: float = 30.0, *, source: str = "request") -> Event:  # noqa: ASYNC109 - JSON; the wait is part of the contract
        """Publish a request and return the event that answers it; raises ``RequestTimeout``."""
        check_numbers(timeout=timeout)
        await self.open()
        answer = f"{REPLY}.{self.clock.new_id()}"
        async with self._replies.expect(answer) as reply:
            await self.publish(topic, source, payload, delivery_handle={"kind": "bus", "topic": answer})
            return await self._replies.receive(reply, timeout)

    async def reply(self, event: Event, payload: Any, *, source: str = "reply") -> Receipt:
        """Answer a request through its delivery handle; once per request, whoever answers first."""
        handle = event.delivery_handle or {}
        topic = handle.get("topic")
        if handle.get("kind") != "bus" or not isinstance(topic, str):
            raise Invalid(f"event {event.id} asks for no reply on the bus")
        return await self.publish(topic, source, payload, event.correlation_id or event.id)

    # --- subscribing ---

    def subscribe(
        self,
        topic: str,
        handler: Callable[..., Any],
        subscriber_id: str,
        *,
        filter: dict[str, Any] | None = None,  # noqa: A002 - the word of the model
        start: Start | str | datetime | None = None,
        retry: RetryPolicy | None = None,
        ordering: Ordering | str = Ordering.KEY,
        concurrency: int = 10,
        timeout: float = 300.0,
        dead_letter_stream: str | None = None,
        overflow: Overflow | str = Overflow.WAIT,
        max_backlog: int | None = None,
    ) -> None:
        """Register a handler for a topic or pattern, and a content filter, under a durable subscriber id.

        Handlers of one id run in the order they were registered and share one place in the log. A new id receives what
        is still pending, or begins at ``start`` (``latest``, ``earliest``, an instant, or a ``Start``). With
        ``overflow="drop_oldest"`` the oldest become dead letters while more than ``max_backlog`` wait. Raises
        ``Invalid`` for a bad argument, ``Conflict`` when the id is registered here with other settings.
        """
        registered = registration(
            self.tenant,
            subscriber_id,
            topic,
            retry=retry,
            ordering=ordering,
            concurrency=concurrency,
            timeout=timeout,
            dead_letter_stream=dead_letter_stream,
            overflow=overflow,
            max_backlog=max_backlog,
            filter=filter,
        )
        bound, begin = bind(handler), parse_start(start)
        subscriber = self._subscribers.get(subscriber_id)
        if subscriber is None:
            # What is published after this line must reach it, however long attaching takes.
            heads = self._log.known_heads() if self._log is not None else {}
            subscriber = Subscriber(registered, begin, heads)
            self._subscribers[subscriber_id] = subscriber
        elif not subscriber.agrees(registered):
            raise Conflict(f"{subscriber_id} is subscribed with other settings", hint="use another subscriber_id")
        subscriber.add(topic, bound)
        if self._running:
            self._placing.setdefault(subscriber_id, asyncio.Event())
            self._spawn(self._attach_later(subscriber))

    def on(self, topic: str, *, subscriber_id: str | None = None, **settings: Any) -> Callable[..., Any]:
        """Decorate a handler; the annotation of its first parameter says what it gets: the event, or its payload."""

        def decorate(handler: Callable[..., Any]) -> Callable[..., Any]:
            self.subscribe(topic, handler, subscriber_id or name_of(handler), **settings)
            return handler

        return decorate

    def unsubscribe(self, topic: str | None, subscriber_id: str) -> None:
        """Detach the handlers of a pattern, or all (None); the subscription and its place in the log stay."""
        subscriber = self._subscribers.get(subscriber_id)
        if subscriber is None or topic not in (None, *subscriber.patterns):
            raise NotFound(f"{subscriber_id} is not subscribed to {topic} here")
        if topic is not None and subscriber.patterns != (topic,):
            subscriber.remove(topic)
            if self._running:
                self._spawn(self._attach_later(subscriber))
            return
        # Until it has stopped it keeps its handlers: what it no longer wanted would be passed over.
        del self._subscribers[subscriber_id]
        if self._running:
            task = asyncio.get_running_loop().create_task(subscriber.stop(self._grace_s))
            self._leaving[subscriber_id] = task
            task.add_done_callback(lambda _: self._leaving.pop(subscriber_id, None))

    async def delete_subscription(self, subscriber_id: str) -> bool:
        """Forget a subscription, its place and its deliveries; False when there was none. Dead letters stay."""
        log = await self.open()
        subscriber = self._subscribers.pop(subscriber_id, None)
        async with self._attaching.setdefault(subscriber_id, asyncio.Lock()):
            if subscriber is not None:
                await subscriber.stop(self._grace_s)
            await asyncio.gather(*[task for name, task in self._leaving.items() if name == subscriber_id])
            known = await self._registry.forget(subscriber_id)
            for stream in await log.streams():
                if stream.name.startswith(f"{self.tenant}."):
                    known = await log.delete_consumer(stream.name, subscriber_id) or known
        return known

    async def reset(self, subscriber_id: str, start: Start | str | datetime, stream: str | None = None) -> None:
        """Move a subscription to ``start`` in one stream, or in every stream it reads; whoever runs it goes on there.

        Everything from there on is delivered as if for the first time (what ran ``once`` stays done). What still waits
        below is passed over, unless the place lies further back than before. Raises ``NotFound``, ``Invalid``,
        ``OffsetOutOfRange``.
        """
        begin = parse_start(start)
        if begin is None:
            raise Invalid("a reset needs a start: 'earliest', 'latest', an instant, or a Start")
        await move(await self.open(), self.tenant, subscriber_id, begin, stream)
        await self._refresh()

    async def subscriptions(self) -> list[Registered]:
        """Return every durable subscription of the tenant."""
        await self.open()
        return await self._registry.all()

    def middleware(self, around: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Wrap every handler call: ``async def around(event, ctx, call_next)``; the first one added is outermost."""
        self._middleware.append(around)
        for subscriber in self._subscribers.values():
            subscriber.wrap()
        return around

    # --- dispatching ---

    async def _attach_later(self, subscriber: Subscriber) -> None:
        """Attach in the background: what goes wrong is said in the log of the process, and tried again."""
        name = subscriber.registered.id
        while self._running:
            try:
                await self._attach(subscriber)
                break
            except PostbusError as error:
                logger.error("%s cannot be attached: %s", name, error)  # noqa: TRY400 - its sentence says it all
            finally:
                self._placing.pop(name, asyncio.Event()).set()
            await self.clock.sleep(ATTACH_S)

    async def _attach(self, subscriber: Subscriber) -> None:
        """Give a subscriber its place in every stream it reads, and start it there. Idempotent."""
        name = subscriber.registered.id
        log = await self.open()
        async with self._attaching.setdefault(name, asyncio.Lock()):
            if self._subscribers.get(name) is not subscriber:
                return
            await self._registry.save(subscriber.registered)
            known = await log.get_consumer(self.journal, name)
            found = await log.streams()
            streams = [stream for stream in found if subscriber.reads(stream.name, self.journal, self.tenant)]
            for stream in streams:
                await self._dig(log, subscriber.grave(stream.name), found)
                younger = known is not None and stream.created_at_us >= known.created_at_us
                start = EVERYTHING if younger else subscriber.start
                await place(log, stream, name, start, subscriber.heads)
            subscriber.placed = True
            self._placing.pop(name, asyncio.Event()).set()
            if (leaving := self._leaving.get(name)) is not None:
                await leaving  # the same id was detached just now: its handlers finish first
            if self._running and self._subscribers.get(name) is subscriber:
                subscriber.run(self, log, self._table, self._batch, self._lease_s, self._poll_s, self._middleware)
                for stream in streams:
                    for partition in range(stream.settings.partitions):
                        subscriber.add_lane(stream.name, partition)

    async def _dig(self, log: SqliteLog, name: str, known: list[Stream]) -> None:
        """Make a dead-letter stream if it is missing, and have it read by those who asked for it."""
        grave = await log.ensure_stream(name)
        if grave.settings.partitions != 1:
            raise Conflict(f"{name} takes no dead letters: it has {grave.settings.partitions} partitions")
        if grave not in known and self._running:
            for subscriber in self._subscribers.values():
                if name in subscriber.patterns:
                    self._spawn(self._attach_later(subscriber))

    async def _move_frontier(self) -> None:
        while True:
            with contextlib.suppress(PostbusError):
                await pass_frontier(await self.open(), self.tenant, self._all_placed)
            await self.clock.sleep(FRONTIER_S)

    def _all_placed(self) -> bool:
        return all(subscriber.placed for subscriber in self._subscribers.values())

    async def _follow_others(self, log: SqliteLog, seen: int, streams: list[Stream]) -> None:
        """Look after what other processes changed: re-queued events, replayed dead letters, new streams."""
        while True:
            await asyncio.sleep(NOTICE_S)
            with contextlib.suppress(PostbusError):
                log.store.writer.notice()
                if log.foreign_changes != seen:
                    seen = log.foreign_changes
                    before, streams = streams, await log.streams()
                    if streams != before:
                        for subscriber in self._subscribers.values():
                            self._spawn(self._attach_later(subscriber))
                    await self._refresh()

    async def _attach_all(self) -> None:
        for subscriber in list(self._subscribers.values()):
            await self._attach(subscriber)

    async def _refresh(self) -> None:
        await asyncio.gather(*(subscriber.refresh() for subscriber in self._subscribers.values()))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
