"""``/events/{id}`` and ``/trace/{correlation_id}``: one event, and the story it belongs to."""

from __future__ import annotations

import contextlib
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from postbus.bus.requeue import parse_address
from postbus.bus.trace import trace
from postbus.model import DeliveryStatus, Invalid, LimitExceeded, NotFound, Trust
from postbus.server.routes import Call, Named, Route, Scope, named_topic, tenant_of

if TYPE_CHECKING:
    from postbus.bus.trace import Step

__all__ = ["ROUTES", "EventView"]

LOCAL = "local.default"
CHARS_MAX = 600


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """An event as it is shown; the payload's bytes are those that were published."""

    id: str
    stream: str
    partition: int
    offset: int
    topic: str
    source: str
    variant: str
    key: str | None
    payload: Any
    metadata: dict[str, Any]
    headers: dict[str, str]
    correlation_id: str | None
    native_id: str | None
    delivery_handle: dict[str, Any] | None
    occurred_at: datetime
    created_at: datetime
    trust: Trust


class TracedDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an event for one subscription."""

    subscription: str
    status: DeliveryStatus
    attempts: int
    replays: int
    error: str | None
    took_us: int | None
    dead_letter: str | None


class TracedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a trace; ``caused_by`` is the event whose handling published it."""

    event: EventView
    journal_id: int
    status: DeliveryStatus
    after_us: int
    caused_by: str | None
    deliveries: list[TracedDelivery]


class TraceView(msgspec.Struct, frozen=True, kw_only=True):
    """The events of one correlation, causes before what they caused."""

    correlation_id: str
    events: list[TracedEvent]
    left_out: int
    took_us: int


class TraceQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose trace; a key knows, the operator means ``local.default`` unless he says so."""

    namespace: str | None = None
    tenant: str | None = None


def _by_address(call: Call) -> Named:
    return named_topic(parse_address(_short(call.path["id"]))[0])


def _short(text: str) -> str:
    if len(text) > CHARS_MAX:
        raise LimitExceeded(f"it has {len(text)} characters; the limit is {CHARS_MAX}")
    return text


def _by_correlation(call: Call) -> Named:
    name = _short(call.path["correlation_id"])
    found = call.request.query_params
    named = Named(tenant_of(found.get("namespace"), found.get("tenant")) or call.caller.tenant or LOCAL)
    with contextlib.suppress(Invalid):
        if not parse_address(name)[0].startswith(f"{named.tenant}."):
            raise NotFound(f"no event has the correlation {name}")
    return named


async def show_event(call: Call) -> bytes:
    """Show one event."""
    stream, partition, offset = parse_address(call.path["id"])
    found = await call.log.fetch(stream, partition, offset, 1)
    if not found or found[0].offset != offset:
        raise NotFound(f"there is no event {call.path['id']}")
    return found[0].to_json()


async def show_trace(call: Call) -> dict[str, Any]:
    """Show the events of a correlation that the caller may see."""
    await call.log.projections.catch_up()
    found = await trace(call.log, call.path["correlation_id"], call.tenant or LOCAL)
    steps = [step for step in found.steps() if call.caller.may(Scope.SUBSCRIBE, step.event.stream)]
    if not steps:
        raise NotFound(f"no event has the correlation {found.correlation_id}")
    return {
        "correlation_id": found.correlation_id,
        "events": [_traced(step) for step in steps],
        "left_out": found.left_out,
        "took_us": found.took_us,
    }


def _traced(step: Step) -> dict[str, Any]:
    return {
        "event": msgspec.Raw(step.event.to_json()),
        "journal_id": step.journal_id,
        "status": step.status,
        "after_us": step.after_us,
        "caused_by": step.caused_by,
        "deliveries": step.deliveries,
    }


ROUTES = (
    Route(
        method="GET",
        path="/v1/bus/events/{id:path}",
        handler=show_event,
        summary="Show an event by its address",
        tag="events",
        scope=Scope.SUBSCRIBE,
        names=_by_address,
        response=EventView,
    ),
    Route(
        method="GET",
        path="/v1/bus/trace/{correlation_id:path}",
        handler=show_trace,
        summary="Show the events of a correlation",
        tag="events",
        scope=Scope.SUBSCRIBE,
        names=_by_correlation,
        query=TraceQuery,
        response=TraceView,
    ),
)
