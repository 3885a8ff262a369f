"""``POST /publish`` and ``/publish/batch``: the payload's bytes are stored as they came."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from postbus.envelope import draft
from postbus.model import Forbidden, Invalid, LimitExceeded, PostbusError, Trust, instant
from postbus.server.routes import INLINE_BYTES_MAX, Call, Named, Route, Scope, TopicNames, full_name, topic_in_body

if TYPE_CHECKING:
    from postbus.model import Draft, Receipt

__all__ = ["ROUTES", "outside"]

BATCH_MAX = 1_000
BATCH_BYTES_MAX = 8 << 20
DLQ = "-dlq"
DEFAULT_SOURCE = "http"
NOTHING = (b"", b"null")

_OBJECT = msgspec.Meta(extra_json_schema={"type": ["object", "null"]})
Name = Annotated[str | None, msgspec.Meta(description="Part of the topic's full name, instead of `topic`.")]


class Publish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event to be published. The topic is named by ``topic``, or by ``namespace``, ``tenant`` and ``name``."""

    payload: msgspec.Raw
    topic: Annotated[str | None, msgspec.Meta(description="The full name: namespace.tenant.name.")] = None
    namespace: Name = None
    tenant: Name = None
    name: Name = None
    key: str | None = None
    headers: dict[str, str] | None = None
    native_id: str | None = None
    variant: str = ""
    metadata: Annotated[msgspec.Raw, _OBJECT] = msgspec.field(default_factory=msgspec.Raw)
    correlation_id: str | None = None
    occurred_at: Annotated[str | None, msgspec.Meta(description="RFC 3339 with a zone.")] = None
    delivery_handle: Annotated[msgspec.Raw, _OBJECT] = msgspec.field(default_factory=msgspec.Raw)
    source: Annotated[str | None, msgspec.Meta(description="What produced it; a key may be bound to one.")] = None


class PublishBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Events to be published together: all of them, or none."""

    events: Annotated[list[Publish], msgspec.Meta(min_length=1, max_length=BATCH_MAX)]


class Published(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where an event is. ``duplicate``: the same event was there already, at this place.

    ``spooled``: it is safe on this node's disk until the remote log answers again, and this is its place in that queue.
    """

    id: str
    topic: str
    partition: int
    offset: int
    duplicate: bool
    produced_at: datetime
    spooled: bool = False


class PublishedBatch(msgspec.Struct, frozen=True):
    """Where the events are, in their order."""

    events: list[Published]


# --- whom it is about -------------------------------------------------------------------------------------------------


class _BatchNames(msgspec.Struct):
    events: list[TopicNames]


_batch_names = msgspec.json.Decoder(_BatchNames).decode


def outside(named: Named) -> Named:
    """Return what was named, or refuse it: topics of the system are not for callers from outside."""
    if named.topic is not None and named.topic.startswith("system."):
        raise Forbidden("topics of system are only for the kernel and its extensions")
    return named


def _one(call: Call) -> Named:
    return outside(topic_in_body(call))


def _many(call: Call) -> Named:
    try:
        events = _batch_names(call.raw).events
    except msgspec.ValidationError as error:
        raise Invalid(f"body: {error}") from None
    if len(events) > BATCH_MAX:
        raise LimitExceeded(f"the batch has {len(events)} events; the limit is {BATCH_MAX}")
    named = [outside(full_name(event)) for event in events]
    tenants = {one.tenant for one in named}
    if len(tenants) > 1:
        raise Invalid("the events of a batch belong to one tenant", hint="send one batch per tenant")
    return Named(tenants.pop() if tenants else None, topics=tuple({one.topic for one in named if one.topic}))


# --- the handlers -----------------------------------------------------------------------------------------------------


async def publish(call: Call) -> Published:
    """Append one event; answered when it is durable."""
    drafts = await _checked(call, [call.body])
    receipts = await _append(call, drafts)
    return _published(drafts[0][0], receipts[0])


async def publish_batch(call: Call) -> PublishedBatch:
    """Append many events in one transaction; answered when they are durable."""
    drafts = await _checked(call, call.body.events)
    receipts = await _append(call, drafts)
    return PublishedBatch([_published(topic, receipt) for (topic, _), receipt in zip(drafts, receipts, strict=True)])


async def _checked(call: Call, events: list[Publish]) -> list[tuple[str, Draft]]:
    """Return the events as drafts with their topics; large requests are checked beside the loop."""
    if len(call.raw) <= INLINE_BYTES_MAX:
        drafts = _drafts(call, events)
    else:
        drafts = await asyncio.to_thread(_drafts, call, events)
    for index, (topic, made) in enumerate(drafts):
        try:
            for check in call.hub.payload_checks:
                await check(topic, made.payload_json)
        except PostbusError as error:
            raise _numbered(error, events, index) from None
    return drafts


def _drafts(call: Call, events: list[Publish]) -> list[tuple[str, Draft]]:
    drafts = []
    for index, event in enumerate(events):
        topic = full_name(event).topic or ""
        try:
            drafts.append((topic, _draft(call, event, topic)))
        except PostbusError as error:
            raise _numbered(error, events, index) from None
    return drafts


def _numbered(error: PostbusError, events: list[Publish], index: int) -> PostbusError:
    """Have a refusal say which event of several it is about."""
    if len(events) > 1:
        error.message = f"events[{index}]: {error.message}"
    return error


def _draft(call: Call, body: Publish, topic: str) -> Draft:
    if topic.endswith(DLQ):
        raise Invalid("a dead-letter topic only takes dead letters")
    bound = call.caller.source
    if bound is not None and body.source not in (None, bound):
        raise Invalid(f"this key publishes as {bound}", hint="leave source out")
    metadata, handle = bytes(body.metadata), bytes(body.delivery_handle)
    return draft(
        topic,
        bound or body.source or DEFAULT_SOURCE,
        bytes(body.payload),
        variant=body.variant,
        key=body.key,
        metadata=None if metadata in NOTHING else metadata,
        headers=body.headers,
        correlation_id=body.correlation_id,
        native_id=body.native_id,
        delivery_handle=None if handle in NOTHING else handle,
        occurred_at=body.occurred_at,
        trust=Trust.TRUSTED if call.caller.trusted else Trust.UNTRUSTED,
        checked=True,
    )


async def _append(call: Call, drafts: list[tuple[str, Draft]]) -> list[Receipt]:
    hub, tenant = call.hub, call.tenant or ""
    if not hub.runs(tenant):
        await hub.bus(tenant)
    await hub.quotas.publish(tenant, len(drafts), len(call.raw))
    began = hub.clock.monotonic_s()
    first = drafts[0][0]
    if all(topic == first for topic, _ in drafts):
        receipts = await hub.log.append(first, [made for _, made in drafts])
    else:
        receipts = await hub.log.transact(lambda tx: _append_each(tx, drafts), grows=True)
    hub.metrics.appended(tenant, receipts, hub.clock.monotonic_s() - began)
    return receipts


def _append_each(transaction: Any, drafts: list[tuple[str, Draft]]) -> list[Receipt]:
    return [transaction.append(topic, [made])[0] for topic, made in drafts]


def _published(topic: str, receipt: Receipt) -> Published:
    place = (topic, receipt.partition, receipt.offset)
    name = f"spool/{receipt.offset}" if receipt.spooled else receipt.id
    return Published(name, *place, receipt.duplicate, instant(receipt.created_at_us), receipt.spooled)


ROUTES = (
    Route(
        method="POST",
        path="/v1/bus/publish",
        handler=publish,
        summary="Publish an event to a registered topic",
        tag="publish",
        scope=Scope.PUBLISH,
        names=_one,
        body=Publish,
        response=Published,
        errors=(409, 429, 507),
    ),
    Route(
        method="POST",
        path="/v1/bus/publish/batch",
        handler=publish_batch,
        summary="Publish many events of one tenant, all or none",
        tag="publish",
        scope=Scope.PUBLISH,
        names=_many,
        body=PublishBatch,
        response=PublishedBatch,
        errors=(409, 429, 507),
        body_bytes_max=BATCH_BYTES_MAX,
    ),
)
