"""``/agents/…/inbox``: items read, acked, waited for and watched; direct messages; and receipts for their senders."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from starlette.responses import StreamingResponse

from postbus.bus.requeue import parse_address
from postbus.inbox import item_json
from postbus.model import Invalid, NotFound, Trust, instant
from postbus.server.agents import AGENT, inbox_in_path
from postbus.server.frames import HELLO, KEEP_ALIVE, error_frame
from postbus.server.routes import Call, Named, Route, Scope, named_topic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from starlette.types import Receive, Send
    from starlette.types import Scope as Wire

    from postbus.inbox import DigestEntry, Item

__all__ = ["ROUTES"]

INBOX = f"{AGENT}/inbox"
LIMIT_MAX = 1_000
WAIT_MS_MAX = 60_000
OFFSET_MAX = 1 << 62
LAST_EVENT_ID = b"last-event-id"

Limit = Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)]
After = Annotated[str | None, msgspec.Meta(description="The id of an item: only what follows it.")]


class ItemView(msgspec.Struct, frozen=True, kw_only=True):
    """One event owed to the agent. ``expired``: retention removed it before it was acked, and its facts with it."""

    id: str
    sequence: int
    expired: bool
    matched_by: list[str]
    match_reason: str
    acked_at: datetime | None
    topic: str | None = None
    variant: str | None = None
    payload: Any = None
    metadata: dict[str, Any] | None = None
    headers: dict[str, str] | None = None
    source: str | None = None
    key: str | None = None
    correlation_id: str | None = None
    occurred_at: datetime | None = None
    delivery_handle: dict[str, Any] | None = None
    trust: Trust | None = None


class ItemsView(msgspec.Struct, frozen=True):
    """Items in their order."""

    items: list[ItemView]


class DigestView(msgspec.Struct, frozen=True, kw_only=True):
    """A burst on one resource: what its newest revision shows and is not acked. Its id can be acked."""

    id: str
    resource: str
    revision: int
    count: int
    item_ids: tuple[str, ...]
    summary: str
    at: datetime


class EntriesView(msgspec.Struct, frozen=True):
    """Digests, and the items that are in none."""

    digests: list[DigestView]
    items: list[ItemView]


class InboxQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which items to read."""

    after: After = None
    limit: Limit = 100
    include_acked: bool = False


class EntriesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many loose items to show at most."""

    limit: Limit = 100


class WaitQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long to wait for an item."""

    timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=WAIT_MS_MAX)] = 30_000
    after: After = None
    limit: Limit = 100


class WatchQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to begin; ``Last-Event-ID`` goes before it."""

    after: After = None


class AckInbox(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of: everything up to an item or digest, some of them, or ``all: true``."""

    through: str | None = None
    items: Annotated[list[str], msgspec.Meta(max_length=10_000)] | None = None
    all: bool | None = None


class AckedView(msgspec.Struct, frozen=True):
    """How many items became acked."""

    acked: int


class SendMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message: text that is not blank, or another JSON value."""

    message: msgspec.Raw
    sender: str | None = None


class SentView(msgspec.Struct, frozen=True):
    """The item that the message became, and the address of its event, with which its receipts are found."""

    item: str
    event: str


class ReceiptView(msgspec.Struct, frozen=True, kw_only=True):
    """How far an event has come in one inbox: accepted, delivered, read, acked, or expired."""

    agent: str
    item: str
    state: str
    accepted_at: datetime | None
    delivered_at: datetime | None
    read_at: datetime | None
    acked_at: datetime | None


class ReceiptsView(msgspec.Struct, frozen=True):
    """The inboxes an event went to, by agent."""

    receipts: list[ReceiptView]


# --- reading ----------------------------------------------------------------------------------------------------------


def _items(items: list[Item]) -> bytes:
    """Return items as JSON; the payloads' bytes are passed through untouched."""
    return b'{"items":[%s]}' % b",".join(map(item_json, items))


async def read_inbox(call: Call) -> bytes:
    """Return items in their order, those not acked unless asked otherwise."""
    query: InboxQuery = call.query
    return _items(
        await call.hub.inboxes.items.read(
            call.tenant or "",
            call.path["agent"],
            after=query.after,
            limit=query.limit,
            include_acked=query.include_acked,
        )
    )


async def show_item(call: Call) -> bytes:
    """Return one item."""
    return item_json(await call.hub.inboxes.items.get(call.tenant or "", call.path["agent"], call.path["item"]))


def _digest(entry: DigestEntry) -> bytes:
    shown = DigestView(
        id=entry.id,
        resource=entry.resource,
        revision=entry.revision,
        count=entry.count,
        item_ids=entry.item_ids,
        summary=entry.summary,
        at=instant(entry.at_us),
    )
    return msgspec.json.encode(shown)


async def _entries(call: Call, limit: int) -> bytes:
    digests, items = await call.hub.inboxes.entries(call.tenant or "", call.path["agent"], limit)
    return b'{"digests":[%s],"items":[%s]}' % (b",".join(map(_digest, digests)), b",".join(map(item_json, items)))


async def read_entries(call: Call) -> bytes:
    """Return the digests, and the items in none, that are not acked."""
    query: EntriesQuery = call.query
    return await _entries(call, query.limit)


async def flush_digests(call: Call) -> bytes:
    """Show what waits in digests now, and return the entries."""
    await call.hub.inboxes.flush(call.tenant or "", call.path["agent"])
    return await _entries(call, 100)


async def ack_inbox(call: Call) -> AckedView:
    """Ack items; again changes nothing."""
    body: AckInbox = call.body
    if body.all is False:
        raise Invalid("`all` can only be true", hint="an ack has exactly one of `through`, `items` and `all`")
    acked = await call.hub.inboxes.items.ack(
        call.tenant or "", call.path["agent"], through=body.through, items=body.items, everything=bool(body.all)
    )
    call.hub.metrics.acked.labels(call.tenant).inc(acked)
    return AckedView(acked)


async def send_message(call: Call) -> SentView:
    """Put a message into the inbox."""
    body: SendMessage = call.body
    bound = call.caller.source
    if bound is not None and body.sender not in (None, bound):
        raise Invalid(f"this key sends as {bound}", hint="leave sender out")
    await call.hub.quotas.publish(call.tenant or "", 1, len(call.raw))
    item, receipt = await call.hub.inboxes.messages.send(
        call.tenant or "",
        call.path["agent"],
        msgspec.json.decode(body.message),
        sender=bound or body.sender or "http",
        trust=Trust.TRUSTED if call.caller.trusted else Trust.UNTRUSTED,
    )
    return SentView(item, receipt.id)


# --- receipts ---------------------------------------------------------------------------------------------------------


def _event_in_path(call: Call) -> Named:
    stream, partition, offset = parse_address(call.path["id"])
    if max(partition, offset) > OFFSET_MAX:
        raise Invalid("no offset is that large")
    return named_topic(stream)


def _moment(at_us: int | None) -> datetime | None:
    return None if at_us is None else instant(at_us)


async def show_receipts(call: Call) -> ReceiptsView:
    """Say how far an event has come in each inbox it went to."""
    stream, partition, offset = parse_address(call.path["id"])
    found = await call.hub.inboxes.items.receipts(call.tenant or "", f"{stream}/{partition}/{offset}")
    if not found and not await call.log.has_stream(stream):
        raise NotFound(f"there is no topic {stream}")
    return ReceiptsView(
        [
            ReceiptView(
                agent=one.agent,
                item=one.item,
                state=one.state,
                accepted_at=_moment(one.accepted_at_us),
                delivered_at=_moment(one.delivered_at_us),
                read_at=_moment(one.read_at_us),
                acked_at=_moment(one.acked_at_us),
            )
            for one in found
        ]
    )


# --- waiting and watching ---------------------------------------------------------------------------------------------


async def _unless_stopping(call: Call, work: Coroutine[Any, Any, Any]) -> Any:
    """Return what comes of some work, or None when the server begins to stop first."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(work), loop.create_task(call.hub.stopping.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def wait_inbox(call: Call) -> bytes:
    """Return items as soon as there are any; none when the time is over first."""
    query: WaitQuery = call.query
    inboxes, agent = call.hub.inboxes, (call.tenant or "", call.path["agent"])
    waiting = inboxes.wait(*agent, query.timeout_ms / 1000, after=query.after)
    if not await _unless_stopping(call, waiting):
        return _items([])
    return _items(await inboxes.items.read(*agent, after=query.after, limit=query.limit))


class Watch(StreamingResponse):
    """One connection that watches an inbox."""

    def __init__(self, call: Call, after: str | None) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(self._frames(after), media_type="text/event-stream", headers=headers)
        self._call = call

    async def __call__(self, scope: Wire, receive: Receive, send: Send) -> None:
        """Write until the reader goes, the agent is removed, or the server ends."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.hub.quotas.disconnect(self._call.tenant or "")

    async def _frames(self, after: str | None) -> AsyncIterator[bytes]:
        call, hub = self._call, self._call.hub
        agent = call.path["agent"]
        delivered = hub.metrics.delivered.labels(call.tenant)
        yield HELLO
        stream = hub.inboxes.watch(call.tenant or "", agent, after=after, heartbeat_s=hub.readers.keep_alive_s)
        try:
            while True:
                found = await _unless_stopping(call, _following(stream))
                if found is None:
                    yield error_frame("stopping", "the server is stopping; come back with Last-Event-ID")
                    return
                if found == "gone":
                    yield error_frame("not_found", f"the agent {agent} was removed")
                    return
                yield _frame(found) if found else KEEP_ALIVE
                delivered.inc(len(found))
        finally:
            await stream.aclose()


async def _following(stream: AsyncIterator[list[Item]]) -> list[Item] | Literal["gone"]:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return "gone"


def _frame(items: list[Item]) -> bytes:
    data = _items(items).replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
    return b"event: inbox.items\nid: %s\ndata: %s\n\n" % (items[-1].id.encode(), data)


async def watch_inbox(call: Call) -> Watch:
    """Write the items there are, then new ones as they come, as server-sent events."""
    query: WatchQuery = call.query
    after = call.headers.get(LAST_EVENT_ID, b"").decode("latin-1").strip() or query.after
    await call.hub.inboxes.items.read(call.tenant or "", call.path["agent"], after=after, limit=1, mark=False)
    await call.hub.quotas.connect(call.tenant or "")
    return Watch(call, after)


def _route(method: str, path: str, handler: Any, summary: str, **facts: Any) -> Route:
    declared: dict[str, Any] = {"names": inbox_in_path, "scope": Scope.SUBSCRIBE, "tag": "inbox"} | facts
    return Route(method=method, path=path, handler=handler, summary=summary, **declared)


ROUTES = (
    _route("GET", INBOX, read_inbox, "Read an inbox", query=InboxQuery, response=ItemsView),
    _route("POST", f"{INBOX}/ack", ack_inbox, "Ack items", scope=Scope.ACK, body=AckInbox, response=AckedView),
    _route(
        "GET",
        f"{INBOX}/wait",
        wait_inbox,
        "Wait for items",
        query=WaitQuery,
        response=ItemsView,
    ),
    _route(
        "GET",
        f"{INBOX}/watch",
        watch_inbox,
        "Watch an inbox (SSE)",
        query=WatchQuery,
        errors=(429,),
        media="text/event-stream",
    ),
    _route(
        "GET",
        f"{INBOX}/entries",
        read_entries,
        "Read digests and loose items",
        query=EntriesQuery,
        response=EntriesView,
    ),
    _route("POST", f"{INBOX}/flush", flush_digests, "Show what waits in digests now", response=EntriesView),
    _route(
        "POST",
        f"{INBOX}/messages",
        send_message,
        "Send a message to an agent",
        scope=Scope.PUBLISH,
        body=SendMessage,
        response=SentView,
        status=201,
        errors=(429, 507),
    ),
    _route("GET", f"{INBOX}/items/{{item}}", show_item, "Show one item", response=ItemView),
    _route(
        "GET",
        "/v1/bus/receipts/{id:path}",
        show_receipts,
        "Show how far an event has come in each inbox",
        scope=Scope.PUBLISH,
        names=_event_in_path,
        response=ReceiptsView,
    ),
)
