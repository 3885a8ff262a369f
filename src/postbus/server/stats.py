"""``/stats``: a tenant's counts, and how far each of its subscriptions is."""

from __future__ import annotations

from typing import Any

import msgspec

from postbus.bus.stats import Statuses, SubscriptionState, bus_stats, subscription_states
from postbus.model import Forbidden
from postbus.server.routes import Call, Named, Route, Scope, tenant_of
from postbus.server.topics import Topic, shown

__all__ = ["ROUTES"]

LOCAL = "local.default"


class StatsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose counts; a key knows, the operator means ``local.default`` unless he says so."""

    namespace: str | None = None
    tenant: str | None = None


class SubscriptionStates(msgspec.Struct, frozen=True):
    """Every subscription of a tenant, by id, with what runs it and how far it is."""

    subscriptions: list[SubscriptionState]


class StatsView(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's counts. What is about the whole store is only told to the operator, and null for others.

    ``rates``: events per minute over the last hour, the current minute last.
    """

    topics: list[Topic]
    statuses: Statuses
    subscriptions: list[SubscriptionState]
    dead_letters: dict[str, int]
    rates: list[int] | None
    store_bytes: int | None
    wal_bytes: int | None
    durability: str


def _in_query(call: Call) -> Named:
    found = call.request.query_params
    return Named(tenant_of(found.get("namespace"), found.get("tenant")) or call.caller.tenant or LOCAL)


def _everything(call: Call) -> str:
    """Return the tenant, if the caller's key covers all that it has."""
    tenant = call.tenant or LOCAL
    whole = (">", f"{tenant}.>", f"{tenant}.*")
    if not any(grant.scope is Scope.ADMIN and grant.pattern in whole for grant in call.caller.grants):
        raise Forbidden(
            "this key does not have the scope admin for everything", hint="ask the operator for one that has"
        )
    return tenant


async def show_stats(call: Call) -> StatsView:
    """Count everything."""
    found = await bus_stats(call.log, call.hub.clock, _everything(call))
    whole: dict[str, Any] = {"rates": None, "store_bytes": None, "wal_bytes": None}
    if call.caller.tenant is None:
        whole = {name: getattr(found, name) for name in whole}
    return StatsView(
        topics=[shown(stats) for stats in found.streams],
        statuses=found.statuses,
        subscriptions=found.subscriptions,
        dead_letters=found.dead_letters,
        durability=found.durability,
        **whole,
    )


async def show_states(call: Call) -> SubscriptionStates:
    """List all subscriptions, those of programs' handlers included."""
    return SubscriptionStates(await subscription_states(call.log, call.hub.clock, _everything(call)))


ROUTES = (
    Route(
        method="GET",
        path="/v1/bus/stats",
        handler=show_stats,
        summary="Count everything of a tenant",
        tag="stats",
        scope=Scope.ADMIN,
        names=_in_query,
        query=StatsQuery,
        response=StatsView,
    ),
    Route(
        method="GET",
        path="/v1/bus/stats/subscriptions",
        handler=show_states,
        summary="Show how far every subscription is",
        tag="stats",
        scope=Scope.ADMIN,
        names=_in_query,
        query=StatsQuery,
        response=SubscriptionStates,
    ),
)
