"""``…/pull``, ``/ack``, ``/nack``, ``/extend`` and ``/deadletter``: events in a consumer's hands, and back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from postbus.model import Invalid
from postbus.server.events import EventView
from postbus.server.routes import Call, Route, Scope, tenant_in_path
from postbus.server.subscriptions import PATH, Partition, subscription

if TYPE_CHECKING:
    from postbus.bus.pull import Handed, Puller

__all__ = ["ROUTES"]

LIMIT_MAX = 1_000
WAIT_MS_MAX = 60_000
DELAY_MS_MAX = 86_400_000

LeaseIds = Annotated[list[str], msgspec.Meta(min_length=1, max_length=10_000)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Pull(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many events to hand out at most, and how long to wait for the first one."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)] = 100
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=WAIT_MS_MAX)] = 0


class PulledEvent(EventView, frozen=True, kw_only=True):
    """An event in the consumer's hands; ``lease_id`` is null when handing out was acking."""

    lease_id: str | None
    attempt: int


class Pulled(msgspec.Struct, frozen=True):
    """A batch, by offset within each partition."""

    events: list[PulledEvent]


class Ack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Either ``partition`` and ``offset``, the last one consumed there, or the ids of leases."""

    partition: Partition | None = None
    offset: Offset | None = None
    lease_ids: LeaseIds | None = None


class Acked(msgspec.Struct, frozen=True, omit_defaults=True):
    """That it is on disk, and for leases how many events it settled."""

    committed: bool
    acked: int | None = None


class Nack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Events to be handed out again, after a delay (by the retry policy when none is given)."""

    lease_ids: LeaseIds
    delay_ms: Annotated[int, msgspec.Meta(ge=0, le=DELAY_MS_MAX)] | None = None
    reason: Annotated[str, msgspec.Meta(max_length=2000)] | None = None


class Nacked(msgspec.Struct, frozen=True):
    """How many events were given back."""

    nacked: int


class Extend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Leases that are to run anew from now, for the ack timeout or for ``by_ms``."""

    lease_ids: LeaseIds
    by_ms: Annotated[int, msgspec.Meta(ge=1, le=DELAY_MS_MAX)] | None = None


class Extended(msgspec.Struct, frozen=True):
    """How many leases run anew."""

    extended: int


class DeadLetterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event to give up on. ``key`` and ``payload`` are ignored: the server reads the original."""

    partition: Partition
    offset: Offset
    reason: Annotated[str, msgspec.Meta(min_length=1)]
    headers: dict[str, str] | None = None
    key: str | None = None
    payload: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class DeadLettered(msgspec.Struct, frozen=True):
    """Where the dead letter is."""

    dlq_topic: str
    partition: int
    offset: int


async def _puller(call: Call) -> Puller:
    found = await subscription(call)
    return await call.hub.desk.puller(found.tenant, found.id)


async def pull(call: Call) -> bytes:
    """Hand out events; a consumer that goes away while it waits takes nothing along."""
    body: Pull = call.body
    puller = await _puller(call)
    handed = await puller.pull(body.limit)
    if not handed and body.wait_ms:
        handed = await _long_poll(call, puller, body)
    if handed:
        call.hub.metrics.delivered.labels(call.tenant).inc(len(handed))
    return b'{"events":[' + b",".join(map(_encoded, handed)) + b"]}"


async def _long_poll(call: Call, puller: Puller, body: Pull) -> list[Handed]:
    loop = asyncio.get_running_loop()
    pulling = loop.create_task(puller.pull(body.limit, body.wait_ms / 1000))
    ends = [loop.create_task(call.hub.stopping.wait()), loop.create_task(_gone(call))]
    try:
        await asyncio.wait([pulling, *ends], return_when=asyncio.FIRST_COMPLETED)
        handed = pulling.result() if pulling.done() else []
        if ends[1].done():
            puller.give_back([one.lease_id for one in handed if one.lease_id is not None])
        return handed
    finally:
        for task in (pulling, *ends):
            task.cancel()


async def _gone(call: Call) -> None:
    """Return when the consumer has closed its connection."""
    while (await call.receive())["type"] != "http.disconnect":
        pass


def _encoded(handed: Handed) -> bytes:
    lease = b"null" if handed.lease_id is None else b'"%s"' % handed.lease_id.encode()
    return b'%s,"lease_id":%s,"attempt":%d}' % (handed.event.to_json()[:-1], lease, handed.attempt)


async def ack(call: Call) -> Acked:
    """Settle events: all of a partition up to an offset, or single ones by their leases."""
    body: Ack = call.body
    single = body.lease_ids is not None
    if single == (body.partition is not None) or (body.partition is None) != (body.offset is None):
        raise Invalid("give partition and offset, or lease_ids", hint="one of the two")
    puller = await _puller(call)
    before = puller.acked
    if body.lease_ids is not None:
        count = await puller.ack(body.lease_ids)
        call.hub.metrics.acked.labels(call.tenant).inc(count)
        return Acked(committed=True, acked=count)
    await puller.commit(body.partition or 0, body.offset or 0)
    call.hub.metrics.acked.labels(call.tenant).inc(puller.acked - before)
    return Acked(committed=True)


async def nack(call: Call) -> Nacked:
    """Give events back to be handed out again; after the last attempt they become dead letters."""
    body: Nack = call.body
    delay_s = None if body.delay_ms is None else body.delay_ms / 1000
    return Nacked(await (await _puller(call)).nack(body.lease_ids, delay_s, body.reason))


async def extend(call: Call) -> Extended:
    """Let leases run anew."""
    body: Extend = call.body
    by_s = None if body.by_ms is None else body.by_ms / 1000
    return Extended(await (await _puller(call)).extend(body.lease_ids, by_s))


async def deadletter(call: Call) -> DeadLettered:
    """Give up on an event: it goes to the dead-letter topic, once."""
    body: DeadLetterRequest = call.body
    found = await subscription(call)
    receipt = await call.hub.desk.deadletter(
        found.tenant, found.id, body.partition, body.offset, body.reason, body.headers
    )
    return DeadLettered(receipt.stream, receipt.partition, receipt.offset)


def _route(path: str, handler: Any, summary: str, scope: Scope, body: Any, response: Any, *errors: int) -> Route:
    return Route(
        method="POST",
        path=f"{PATH}/{path}",
        handler=handler,
        summary=summary,
        tag="subscriptions",
        scope=scope,
        names=tenant_in_path,
        body=body,
        response=response,
        errors=errors,
    )


ROUTES = (
    _route("pull", pull, "Hand out events under leases", Scope.SUBSCRIBE, Pull, Pulled),
    _route("ack", ack, "Settle events", Scope.ACK, Ack, Acked, 409),
    _route("nack", nack, "Give events back", Scope.ACK, Nack, Nacked, 409),
    _route("extend", extend, "Keep leases for longer", Scope.ACK, Extend, Extended, 409),
    _route("deadletter", deadletter, "Give up on an event", Scope.ACK, DeadLetterRequest, DeadLettered, 409, 507),
)
