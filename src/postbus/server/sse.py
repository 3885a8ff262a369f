"""``GET /subscribe/{id}``: a topic as it grows, as server-sent events that can be resumed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from starlette.responses import Response

from postbus.bus.pull import parse_place
from postbus.model import Invalid, NotFound, PostbusError
from postbus.server.frames import HELLO, KEEP_ALIVE, Frames, error_frame, hello, parse_places
from postbus.server.readers import Connection, DurableGroup, PassingGroup
from postbus.server.routes import Call, Named, Route, Scope, named_topic, tenant_of
from postbus.topics import check_id

if TYPE_CHECKING:
    from starlette.types import Receive, Send
    from starlette.types import Scope as Wire

    from postbus.bus.pull import PullSubscription
    from postbus.log import SqliteLog
    from postbus.model import Event
    from postbus.server.readers import Group

__all__ = ["ROUTES", "Readers"]

logger = logging.getLogger("postbus.server")

KEEP_ALIVE_S = 15.0
SLOW_S = 10.0
LINGER_S = 30.0
BUFFER_BYTES = 16 * 1024
"""How much may wait for a reader beyond the piece that is being written."""
LAST_EVENT_ID = b"last-event-id"


class SubscribeQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to read. ``from`` is where to begin when neither a subscription nor ``Last-Event-ID`` says so."""

    topic: Annotated[str | None, msgspec.Meta(description="The full name; a subscription knows its own.")] = None
    namespace: str | None = None
    tenant: str | None = None
    start: Annotated[str, msgspec.Meta(description="latest, earliest, an offset, or an instant")] = msgspec.field(
        default="latest", name="from"
    )


class Readers:
    """Who reads over SSE on one hub. ``keep_alive_s`` and ``slow_s`` are there to be changed by tests."""

    def __init__(self, log: SqliteLog) -> None:
        self.frames = Frames()
        self.keep_alive_s = KEEP_ALIVE_S
        self.slow_s = SLOW_S
        self._log = log
        self._passing: dict[tuple[str, str], PassingGroup] = {}
        self._durable: dict[tuple[str, str], DurableGroup] = {}
        self._joining = asyncio.Lock()

    async def passing(
        self, topic: str, name: str, query: SubscribeQuery, places: dict[int, int] | None, connection: Connection
    ) -> Group:
        """Join those who read a topic under an id that no subscription has."""
        async with self._joining:
            for key in [key for key, group in self._passing.items() if group.empty]:
                del self._passing[key]
            group = self._passing.get((topic, name))
            if group is None:
                group = PassingGroup(self._log, topic)
                await group.start(parse_place(query.start), places)
                self._passing[topic, name] = group
            await group.join(connection, places)
            return group

    async def durable(
        self, call: Call, found: PullSubscription, places: dict[int, int] | None, connection: Connection
    ) -> Group:
        """Join those who read a subscription."""
        puller = await call.hub.desk.puller(found.tenant, found.id)
        async with self._joining:
            group = self._durable.get((found.tenant, found.id))
            for key in [key for key, one in self._durable.items() if one.puller.stopped]:
                del self._durable[key]
            if group is None or group.puller is not puller:
                group = self._durable[found.tenant, found.id] = DurableGroup(self._log, puller)
            await group.join(connection, places)
            return group


class EventStream(Response):
    """One connection at work: reads, writes, and tells the reader why when it ends."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, group: Group, connection: Connection) -> None:
        headers = {
            "cache-control": "no-store",
            "connection": "close",
            "x-accel-buffering": "no",
        }
        if group.durable:
            headers["postbus-lease"] = connection.holder
        super().__init__(status_code=200, headers=headers)
        del self.headers["content-length"]
        self._call = call
        self._hub = call.hub
        self._readers = call.hub.readers
        self._group = group
        self._connection = connection

    async def __call__(self, _: Wire, receive: Receive, send: Send) -> None:
        """Write until the reader goes, is too slow, comes back elsewhere, or the server ends."""
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[Any]] = []
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            running = loop.create_task(self._run(send))
            gone = loop.create_task(_gone(receive))
            replaced = loop.create_task(self._connection.replaced.wait())
            tasks = [running, gone, replaced, loop.create_task(self._hub.stopping.wait())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            why = ("stopping", "the server is stopping; come back with Last-Event-ID")
            if running.done():
                why = running.result()
            elif replaced.done():
                why = ("replaced", "the reader has come back on another connection")
            await _cancel([running])
            self._connection.ended.set()
            if not gone.done():
                await self._say_goodbye(send, *why)
        finally:
            for task in tasks:
                task.cancel()
            self._connection.ended.set()
            self._group.leave(self._connection)
            self._hub.quotas.disconnect(self._call.tenant or "")

    async def _run(self, send: Send) -> tuple[str, str]:
        """Write events as they come; return why it ended."""
        cycle = _cycle(send)
        if cycle is not None:
            cycle.transport.set_write_buffer_limits(high=BUFFER_BYTES)
        await _write(send, HELLO if self._group.durable else hello(self._connection.places))
        delivered = self._hub.metrics.delivered.labels(self._call.tenant)
        acked = self._hub.metrics.acked.labels(self._call.tenant)
        group, connection, slow_s = self._group, self._connection, self._readers.slow_s
        try:
            while True:
                events = await group.take(connection, self._readers.keep_alive_s)
                piece = self._piece(events)
                async with asyncio.timeout(slow_s):
                    await _write(send, piece)
                if events:
                    delivered.inc(len(events))
                    acked.inc(await group.written(connection, events))
        except TimeoutError:
            return "slow", f"the reader took nothing for {slow_s:g} s; come back with Last-Event-ID"
        except PostbusError as error:
            return error.code, error.message
        except Exception:
            logger.exception("an SSE connection failed")
            return "unexpected", "something went wrong here; the server's log says what"

    def _piece(self, events: list[Event]) -> bytes:
        connection = self._connection
        if not events:
            return KEEP_ALIVE
        piece = self._readers.frames.chunk(events, connection.places, self._group.partitions)
        for partition, missed in connection.missed.items():
            message = f"retention removed {missed} events of partition {partition} before they were read"
            piece = error_frame("gap", message, partition=partition, missed=missed) + piece
        connection.missed.clear()
        return piece

    @staticmethod
    async def _say_goodbye(send: Send, code: str, message: str) -> None:
        """Tell the reader, and end; one that does not even read that is cut off after a while.

        What waits for a slow reader is in the transport's buffer already, so that a few more bytes do no harm.
        """
        cycle = _cycle(send)
        if cycle is not None:
            cycle.flow.resume_writing()
            asyncio.get_running_loop().call_later(LINGER_S, cycle.transport.abort)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await _write(send, error_frame(code, message))
                await send({"type": "http.response.body", "body": b"", "more_body": False})


def _cycle(send: Send) -> Any:
    """Return uvicorn's side of the connection, the only way to its buffer; None under another server."""
    cycle = getattr(send, "__self__", None)
    return cycle if hasattr(cycle, "transport") and hasattr(cycle, "flow") else None


async def _write(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _whom(call: Call) -> Named:
    query = call.request.query_params
    topic = query.get("topic")
    tenant = tenant_of(query.get("namespace"), query.get("tenant"))
    if topic is None:
        return Named(tenant or call.caller.tenant)
    named = named_topic(topic)
    if tenant not in (None, named.tenant):
        raise Invalid("cross-tenant topic subscription not allowed")
    return named


async def subscribe(call: Call) -> Response:
    """Read a topic, or a subscription, from where its reader is."""
    query: SubscribeQuery = call.query
    name = check_id(call.path["id"], "id")
    if call.tenant is None:
        raise Invalid("the topic is missing", hint="give topic, or namespace and tenant of the subscription")
    places = _last_event_id(call)
    parse_place(query.start)
    found = await _subscription(call, name, query.topic)
    if found is None and (query.topic is None or not await call.log.has_stream(query.topic)):
        what = f"subscription {name}" if query.topic is None else f"topic {query.topic}"
        raise NotFound(f"there is no {what}")
    await call.hub.quotas.connect(call.tenant)
    connection = Connection(call.hub.clock.new_id())
    try:
        if found is not None:
            group = await call.hub.readers.durable(call, found, places, connection)
        else:
            group = await call.hub.readers.passing(query.topic or "", name, query, places, connection)
    except BaseException:
        call.hub.quotas.disconnect(call.tenant)
        raise
    return EventStream(call, group, connection)


async def _subscription(call: Call, name: str, topic: str | None) -> PullSubscription | None:
    """Return the subscription of that id, if there is one; it must be on the topic that was asked for."""
    try:
        found = await call.hub.desk.get(call.tenant or "", name)
    except NotFound:
        return None
    call.allow(found.topic)
    if topic not in (None, found.topic):
        raise Invalid(f"subscription {name} is on {found.topic}, not {topic}")
    return found


def _last_event_id(call: Call) -> dict[int, int] | None:
    text = call.headers.get(LAST_EVENT_ID, b"").decode("latin-1")
    if not text.strip():
        return None
    places = parse_places(text)
    if places is None:
        raise Invalid("Last-Event-ID is not one that this server gave", hint="send the id of the last event as it was")
    return places


ROUTES = (
    Route(
        method="GET",
        path="/v1/bus/subscribe/{id}",
        handler=subscribe,
        summary="Read events as they come (SSE)",
        tag="subscriptions",
        scope=Scope.SUBSCRIBE,
        names=_whom,
        query=SubscribeQuery,
        errors=(409, 429),
        media="text/event-stream",
    ),
)
