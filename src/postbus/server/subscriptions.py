"""``/subscriptions``: durable readers of a topic, made, shown, moved and removed; and how far they are behind."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from postbus.bus.pull import AckMode, PullSubscription, check_own
from postbus.model import Invalid, StartPolicy, instant
from postbus.server.routes import Call, Named, Route, Scope, named_topic, tenant_in_path, tenant_in_query, tenant_of

if TYPE_CHECKING:
    from postbus.model import Cursor, Start

__all__ = ["ROUTES", "subscription"]

PAGE_MAX = 1_000
PATH = "/v1/bus/subscriptions/{namespace}/{tenant}/{id}"
PLACE = "latest, earliest, an offset, or an instant in RFC 3339"

Place = Annotated[str | int, msgspec.Meta(description=PLACE)]
Partition = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class CreateSubscription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A subscription to be made. Without ``namespace`` and ``tenant`` it belongs to its topic's tenant."""

    id: str
    topic: Annotated[str, msgspec.Meta(description="The full name: namespace.tenant.name.")]
    namespace: str | None = None
    tenant: str | None = None
    starting_offset: Place = "latest"
    ack_mode: AckMode = AckMode.MANUAL
    dead_letter_topic: Annotated[str | None, msgspec.Meta(description="A topic whose name ends in -dlq.")] = None
    ack_timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=86_400_000)] = 30_000
    max_attempts: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 3
    filter: dict[str, Any] | None = None
    labels: dict[str, str] | None = None


class PlaceView(msgspec.Struct, frozen=True):
    """Where a subscription stands in one partition; ``committed`` is the last consumed offset, -1 before the first."""

    partition: int
    next_offset: int
    committed: int


class SubscriptionView(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription and its place in each partition."""

    id: str
    topic: str
    namespace: str
    tenant: str
    starting_offset: str | int
    ack_mode: AckMode
    dead_letter_topic: str | None
    ack_timeout_ms: int
    max_attempts: int
    filter: dict[str, Any]
    labels: dict[str, str]
    created_at: datetime
    partitions: list[PlaceView]


class Subscriptions(msgspec.Struct, frozen=True):
    """Subscriptions by tenant and id. ``next``: give it as ``after`` to see more."""

    subscriptions: list[SubscriptionView]
    next: str | None = None


class SubscriptionsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which subscriptions to list."""

    namespace: str | None = None
    tenant: str | None = None
    topic: str | None = None
    after: Annotated[str | None, msgspec.Meta(description="namespace.tenant/id")] = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = 100


class PartitionLagView(msgspec.Struct, frozen=True):
    """How far a subscription is behind in one partition."""

    partition: int
    committed: int
    high_water_mark: int
    lag: int


class LagView(msgspec.Struct, frozen=True):
    """How far a subscription is behind."""

    subscription_id: str
    topic: str
    partitions: list[PartitionLagView]
    total_lag: int


class ResetSubscription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to move a subscription, in one partition or in all."""

    to: Place
    partition: Partition | None = None


class _Names(msgspec.Struct):
    topic: str
    namespace: str | None = None
    tenant: str | None = None
    dead_letter_topic: str | None = None


def _new(call: Call) -> Named:
    try:
        found = msgspec.json.decode(call.raw, type=_Names)
    except msgspec.ValidationError as error:
        raise Invalid(f"body: {error}") from None
    named = named_topic(found.topic)
    tenant = tenant_of(found.namespace, found.tenant) or named.tenant
    check_own(tenant or "", found.topic, found.dead_letter_topic)
    return Named(tenant, found.topic)


async def subscription(call: Call) -> PullSubscription:
    """Return the subscription that the path names, if the caller's key covers its topic."""
    found = await call.hub.desk.get(call.tenant or "", call.path["id"])
    call.allow(found.topic)
    return found


def _starting_offset(start: Start) -> str | int:
    if start.policy is StartPolicy.AT_OFFSET:
        return start.offset or 0
    if start.policy is StartPolicy.AT_TIME:
        return instant(start.time_us or 0).isoformat().replace("+00:00", "Z")
    return start.policy.value


def _shown(found: PullSubscription, cursors: tuple[Cursor, ...]) -> SubscriptionView:
    namespace, tenant = found.tenant.split(".")
    return SubscriptionView(
        id=found.id,
        topic=found.topic,
        namespace=namespace,
        tenant=tenant,
        starting_offset=_starting_offset(found.start),
        ack_mode=found.ack_mode,
        dead_letter_topic=found.dead_letter_stream,
        ack_timeout_ms=found.ack_timeout_ms,
        max_attempts=found.retry.max_attempts,
        filter=found.filter,
        labels=found.labels,
        created_at=instant(found.created_at_us),
        partitions=[PlaceView(cursor.partition, cursor.next_offset, cursor.committed) for cursor in cursors],
    )


async def _with_places(call: Call, found: PullSubscription) -> SubscriptionView:
    consumer = await call.log.get_consumer(found.topic, found.id)
    return _shown(found, consumer.cursors if consumer is not None else ())


async def create_subscription(call: Call) -> SubscriptionView:
    """Make a subscription; exactly one of many concurrent callers succeeds."""
    body: CreateSubscription = call.body
    tenant = call.tenant or ""
    await call.hub.quotas.subscriptions(tenant, await call.hub.desk.count(tenant))
    made = await call.hub.desk.create(
        tenant,
        body.id,
        body.topic,
        start=body.starting_offset,
        ack_mode=body.ack_mode,
        dead_letter_topic=body.dead_letter_topic,
        ack_timeout_ms=body.ack_timeout_ms,
        max_attempts=body.max_attempts,
        filter=body.filter,
        labels=body.labels,
    )
    return await _with_places(call, made)


async def list_subscriptions(call: Call) -> Subscriptions:
    """List the subscriptions that the caller may see."""
    query: SubscriptionsQuery = call.query
    found = [
        one
        for one in await call.hub.desk.list(call.tenant)
        if query.topic in (None, one.topic)
        and (query.after is None or f"{one.tenant}/{one.id}" > query.after)
        and call.caller.may(Scope.SUBSCRIBE, one.topic)
    ]
    found.sort(key=lambda one: f"{one.tenant}/{one.id}")
    page = found[: query.limit]
    shown = [await _with_places(call, one) for one in page]
    return Subscriptions(shown, f"{page[-1].tenant}/{page[-1].id}" if len(found) > len(page) else None)


async def show_subscription(call: Call) -> SubscriptionView:
    """Show one subscription."""
    return await _with_places(call, await subscription(call))


async def delete_subscription(call: Call) -> None:
    """Forget a subscription and its place; dead letters stay."""
    found = await subscription(call)
    await call.hub.desk.delete(found.tenant, found.id)


async def show_lag(call: Call) -> LagView:
    """Show how far a subscription is behind."""
    found = await subscription(call)
    lag = await call.hub.desk.lag(found.tenant, found.id)
    parts = [PartitionLagView(one.partition, one.committed, one.high_water_mark, one.lag) for one in lag.partitions]
    return LagView(found.id, found.topic, parts, lag.total)


async def reset_subscription(call: Call) -> SubscriptionView:
    """Move a subscription, back or forth; leases on what was handed out are lost."""
    found, body = await subscription(call), call.body
    consumer = await call.hub.desk.reset(found.tenant, found.id, body.to, body.partition)
    return _shown(found, consumer.cursors)


ROUTES = (
    Route(
        method="POST",
        path="/v1/bus/subscriptions",
        handler=create_subscription,
        summary="Make a subscription",
        tag="subscriptions",
        scope=Scope.SUBSCRIBE,
        names=_new,
        body=CreateSubscription,
        response=SubscriptionView,
        status=201,
        errors=(409, 429),
    ),
    Route(
        method="GET",
        path="/v1/bus/subscriptions",
        handler=list_subscriptions,
        summary="List subscriptions",
        tag="subscriptions",
        scope=Scope.SUBSCRIBE,
        names=tenant_in_query,
        query=SubscriptionsQuery,
        response=Subscriptions,
    ),
    Route(
        method="GET",
        path=PATH,
        handler=show_subscription,
        summary="Show a subscription",
        tag="subscriptions",
        scope=Scope.SUBSCRIBE,
        names=tenant_in_path,
        response=SubscriptionView,
    ),
    Route(
        method="DELETE",
        path=PATH,
        handler=delete_subscription,
        summary="Forget a subscription",
        tag="subscriptions",
        scope=Scope.SUBSCRIBE,
        names=tenant_in_path,
        status=204,
    ),
    Route(
        method="GET",
        path=f"{PATH}/lag",
        handler=show_lag,
        summary="Show how far a subscription is behind",
        tag="subscriptions",
        scope=Scope.SUBSCRIBE,
        names=tenant_in_path,
        response=LagView,
    ),
    Route(
        method="POST",
        path=f"{PATH}/reset",
        handler=reset_subscription,
        summary="Move a subscription",
        tag="subscriptions",
        scope=Scope.SUBSCRIBE,
        names=tenant_in_path,
        body=ResetSubscription,
        response=SubscriptionView,
    ),
)
