"""``/events`` and ``/topics/{topic}/events``: events found by what they are, or read by where they are."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from postbus.bus.search import EventQuery, find_news, find_page
from postbus.envelope import parse_instant
from postbus.model import DeliveryStatus, Invalid, instant
from postbus.server.events import EventView
from postbus.server.routes import Call, Named, Route, Scope, tenant_of, topic_in_path

if TYPE_CHECKING:
    from postbus.bus.search import Found, FoundPage
    from postbus.model import Event

__all__ = ["ROUTES"]

LOCAL = "local.default"
PAGE_MAX = 1_000
WAIT_MS_MAX = 30_000
LOOK_S = 0.05
READ_AT_ONCE = 32
READ_BYTES_MAX = 4 * 1024 * 1024

Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class FindEvents(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to look for; every part that is given must hold. ``topic`` is a pattern.

    ``after`` gives the first events after that number instead of the latest ones, and waits up to ``wait_ms`` for one.
    """

    namespace: str | None = None
    tenant: str | None = None
    topic: str | None = None
    correlation_id: str | None = None
    since: Annotated[str | None, msgspec.Meta(description="happened at or after this instant, RFC 3339")] = None
    until: Annotated[str | None, msgspec.Meta(description="happened before this instant, RFC 3339")] = None
    status: DeliveryStatus | UnsetType = UNSET  # and not None, which the text "null" would stand for
    before: Number | UnsetType = UNSET
    after: Number | UnsetType = UNSET
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=WAIT_MS_MAX)] = 0
    limit: Annotated[int, msgspec.Meta(ge=0, le=PAGE_MAX)] = 100


class FoundEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event with its number, and what became of it: the worst over its subscriptions."""

    event: EventView
    journal_id: int
    status: DeliveryStatus
    error: str | None
    processed_at: datetime | None


class FoundEvents(msgspec.Struct, frozen=True):
    """Events as they were appended. ``older``: give it as ``before`` for more; ``end``: as ``after`` for what comes."""

    events: list[FoundEvent]
    older: int | None
    end: int


class ReadEvents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to read; an offset that is not kept any more means the first one that is."""

    partition: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    offset: Number = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = 100


class EventsRead(msgspec.Struct, frozen=True):
    """The events there, in order; perhaps fewer than were asked for."""

    events: list[EventView]


def _in_query(call: Call) -> Named:
    found = call.request.query_params
    return Named(tenant_of(found.get("namespace"), found.get("tenant")) or call.caller.tenant or LOCAL)


async def find_events(call: Call) -> dict[str, Any]:
    """Find the latest events that fit, or wait for new ones."""
    asked: FindEvents = call.query
    if asked.after is not UNSET and (asked.before is not UNSET or asked.status is not UNSET or asked.limit == 0):
        raise Invalid("what comes has no status yet", hint="after goes with a limit, and without before and status")
    query = EventQuery(
        tenant=call.tenant or LOCAL,
        topic=asked.topic,
        correlation_id=asked.correlation_id,
        since_us=None if asked.since is None else parse_instant(asked.since),
        until_us=None if asked.until is None else parse_instant(asked.until),
        status=None if asked.status is UNSET else asked.status,
        before=None if asked.before is UNSET else asked.before,
        limit=asked.limit,
    )
    if asked.after is UNSET:
        await call.log.projections.catch_up()
        page = await find_page(call.log, query, lambda stream: call.caller.may(Scope.SUBSCRIBE, stream))
    else:
        page = await _news(call, query, asked.after, asked.wait_ms / 1000)
    return {"events": [_shown(found) for found in page.events], "older": page.older, "end": page.end}


async def _news(call: Call, query: EventQuery, after: int, wait_s: float) -> FoundPage:
    """Return what comes after a number, or nothing when the time is over or the server ends."""
    hub, log = call.hub, call.log
    until_s = hub.clock.monotonic_s() + wait_s
    while True:
        log.store.writer.notice()
        seen = (log.foreign_changes, log.known_heads())
        page = await find_news(log, query, after, lambda stream: call.caller.may(Scope.SUBSCRIBE, stream))
        if page.events or (page.end == after and hub.clock.monotonic_s() >= until_s):
            return page
        if page.end != after:
            after = page.end
            continue
        while seen == (log.foreign_changes, log.known_heads()):
            left_s = until_s - hub.clock.monotonic_s()
            if left_s <= 0 or await hub.clock.wait(hub.stopping, min(LOOK_S, left_s)):
                return page
            log.store.writer.notice()


def _shown(found: Found) -> dict[str, Any]:
    return {
        "event": msgspec.Raw(found.event.to_json()),
        "journal_id": found.journal_id,
        "status": found.status,
        "error": found.error,
        "processed_at": None if found.processed_at_us is None else instant(found.processed_at_us),
    }


async def read_events(call: Call) -> bytes:
    """Read the events of one partition from an offset on; nothing changes."""
    asked: ReadEvents = call.query
    events: list[Event] = []
    offset, size = asked.offset, 0
    while len(events) < asked.limit and size < READ_BYTES_MAX:
        at_once = min(READ_AT_ONCE, asked.limit - len(events))
        page = await call.log.fetch(call.topic or "", asked.partition, offset, at_once)
        if not page:
            break
        events += page
        offset = page[-1].offset + 1
        size += sum(len(event.payload_json) for event in page)
    return b'{"events":[' + b",".join(event.to_json() for event in events) + b"]}"


ROUTES = (
    Route(
        method="GET",
        path="/v1/bus/events",
        handler=find_events,
        summary="Find events, or wait for new ones",
        tag="events",
        scope=Scope.SUBSCRIBE,
        names=_in_query,
        query=FindEvents,
        response=FoundEvents,
    ),
    Route(
        method="GET",
        path="/v1/bus/topics/{topic}/events",
        handler=read_events,
        summary="Read the events of a topic",
        tag="events",
        scope=Scope.SUBSCRIBE,
        names=topic_in_path,
        query=ReadEvents,
        response=EventsRead,
    ),
)
