"""``/agents``: who has an inbox, where it is woken, and what it is subscribed to. No partition shows here."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from postbus.inbox import Cleanup, Digest, Target
from postbus.model import Forbidden, Invalid, NotFound, Start, StartPolicy, instant
from postbus.server.keys import EVERYTHING
from postbus.server.routes import Call, Named, Route, Scope, named_topic, tenant_in_query, tenant_of
from postbus.topics import check_id

if TYPE_CHECKING:
    from postbus.inbox import Agent, Inboxes, InboxSubscription
    from postbus.model import Consumer, ConsumerLag

__all__ = [
    "AGENT",
    "LOCAL",
    "ROUTES",
    "AgentView",
    "Targets",
    "agent_view",
    "check_caller",
    "inbox_in_path",
    "inbox_of",
]

LOCAL = "local.default"
PAGE_MAX = 1_000
AGENT = "/v1/bus/agents/{namespace}/{tenant}/{agent}"
SUBSCRIPTION = f"{AGENT}/subscriptions/{{subscription}}"
# What makes the server's own machine do something is for whoever runs it.
OWN_MACHINE = ("command", "tmux")

Targets = Annotated[tuple[Target, ...], msgspec.Meta(min_length=1, max_length=8)]


class CreateAgent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An agent to be made; of the caller's tenant, and pulling, unless it says otherwise."""

    id: str
    namespace: str | None = None
    tenant: str | None = None
    targets: Targets | None = None


class AgentView(msgspec.Struct, frozen=True, kw_only=True):
    """An agent. ``unacked`` is how many items wait in its inbox."""

    id: str
    namespace: str
    tenant: str
    targets: tuple[Target, ...]
    unacked: int
    created_at: datetime


class AgentsView(msgspec.Struct, frozen=True):
    """Agents by tenant and id. ``next``: give it as ``after`` to see more."""

    agents: list[AgentView]
    next: str | None = None


class AgentsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which agents to list."""

    namespace: str | None = None
    tenant: str | None = None
    after: Annotated[str | None, msgspec.Meta(description="namespace.tenant/id")] = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = 100


class StartView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where reading begins. ``offset`` belongs to ``at_offset``, ``time`` to ``at_time``."""

    policy: StartPolicy
    offset: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] | None = None
    time: datetime | None = None


class CreateInboxSubscription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent asks for: everything in a ``topic``, or topics that match a ``pattern``; and a filter."""

    id: str | None = None
    topic: Annotated[str | None, msgspec.Meta(description="The full name: namespace.tenant.name.")] = None
    pattern: Annotated[str | None, msgspec.Meta(description="As in order.* or issue.>")] = None
    filter: dict[str, Any] | None = None
    start: StartView = StartView(policy=StartPolicy.LATEST)
    digest: Digest | None = None
    cleanup: Cleanup | None = None
    engine: Annotated[
        Literal["live", "spark"] | None, msgspec.Meta(description="Who fills the inbox; without it the tenant's.")
    ] = None


class PositionView(msgspec.Struct, frozen=True):
    """How many events of a topic lie before a subscription's place."""

    topic: str
    position: int


class InboxSubscriptionView(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription and its place in each topic it reads; ``start`` is what it was made with."""

    id: str
    agent: str
    namespace: str
    tenant: str
    pattern: str
    filter: dict[str, Any]
    start: StartView
    digest: Digest | None
    cleanup: Cleanup | None
    engine: Literal["live", "spark"]
    ends_at: datetime | None
    created_at: datetime
    positions: list[PositionView]


class InboxSubscriptionsView(msgspec.Struct, frozen=True):
    """The subscriptions of an agent, by id."""

    subscriptions: list[InboxSubscriptionView]


class ResetInboxSubscription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to move a subscription; items that an inbox was given once are never given again."""

    start: StartView


class TopicLagView(msgspec.Struct, frozen=True):
    """How far a subscription is behind in one topic."""

    topic: str
    lag: int


class InboxLagView(msgspec.Struct, frozen=True):
    """How far a subscription is behind: how many events it has not looked at."""

    subscription_id: str
    topics: list[TopicLagView]
    total_lag: int


# --- whom a request is about ------------------------------------------------------------------------------------------


def inbox_of(tenant: str, agent: str) -> str:
    """Return the name under which keys are granted an agent's inbox."""
    return f"{tenant}.inbox.{check_id(agent, 'agent')}"


def inbox_in_path(call: Call) -> Named:
    """The path has ``{namespace}``, ``{tenant}`` and ``{agent}``."""
    tenant = tenant_of(call.path["namespace"], call.path["tenant"]) or LOCAL
    return Named(tenant, inbox_of(tenant, call.path["agent"]))


class _Names(msgspec.Struct):
    id: str
    namespace: str | None = None
    tenant: str | None = None


def _new_agent(call: Call) -> Named:
    try:
        found = msgspec.json.decode(call.raw, type=_Names)
    except msgspec.ValidationError as error:
        raise Invalid(f"body: {error}") from None
    tenant = tenant_of(found.namespace, found.tenant) or call.caller.tenant or LOCAL
    return Named(tenant, inbox_of(tenant, found.id))


class _Topic(msgspec.Struct):
    topic: str | None = None


def _new_subscription(call: Call) -> Named:
    named = inbox_in_path(call)
    try:
        topic = msgspec.json.decode(call.raw, type=_Topic).topic
    except msgspec.ValidationError as error:
        raise Invalid(f"body: {error}") from None
    if topic is not None and named_topic(topic).tenant != named.tenant:
        raise Invalid("cross-tenant topic subscription not allowed")
    return named


# --- agents -----------------------------------------------------------------------------------------------------------


def _inboxes(call: Call) -> Inboxes:
    return call.hub.inboxes


def check_caller(call: Call, targets: tuple[Target, ...]) -> None:
    """Let only the operator name programs to run, and addresses inside."""
    if call.caller.tenant is not None:
        for target in targets:
            if target.kind in OWN_MACHINE or target.allow_private:
                what = f"a {target.kind} target" if target.kind in OWN_MACHINE else "allow_private"
                raise Forbidden(f"{what} is for the server's operator", hint="use a webhook or pull target")


async def agent_view(call: Call, agent: Agent) -> AgentView:
    """Return an agent as it is shown."""
    namespace, tenant = agent.tenant.split(".")
    return AgentView(
        id=agent.id,
        namespace=namespace,
        tenant=tenant,
        targets=agent.targets,
        unacked=await _inboxes(call).items.unacked(agent.tenant, agent.id),
        created_at=instant(agent.created_at_us),
    )


async def create_agent(call: Call) -> AgentView:
    """Make an agent with an empty inbox; exactly one of many concurrent callers succeeds."""
    body: CreateAgent = call.body
    targets = body.targets or (Target(kind="pull"),)
    check_caller(call, targets)
    return await agent_view(call, await _inboxes(call).create_agent(call.tenant or "", body.id, targets))


async def list_agents(call: Call) -> AgentsView:
    """List the agents whose inboxes the caller may see."""
    query: AgentsQuery = call.query
    found = [
        (f"{one.tenant}/{one.id}", one)
        for one in await _inboxes(call).agents.all(call.tenant)
        if call.caller.may(Scope.SUBSCRIBE, inbox_of(one.tenant, one.id))
    ]
    page = [pair for pair in found if query.after is None or pair[0] > query.after][: query.limit + 1]
    more = len(page) > query.limit
    shown = page[: query.limit]
    return AgentsView([await agent_view(call, one) for _, one in shown], shown[-1][0] if more else None)


async def show_agent(call: Call) -> AgentView:
    """Show an agent."""
    return await agent_view(call, await _inboxes(call).agents.get(call.tenant or "", call.path["agent"]))


async def remove_agent(call: Call) -> None:
    """Remove an agent with its inbox, subscriptions and timers."""
    await _inboxes(call).remove_agent(call.tenant or "", call.path["agent"])


# --- subscriptions ----------------------------------------------------------------------------------------------------


def _start(given: StartView) -> Start:
    if given.time is not None and given.time.tzinfo is None:
        raise Invalid("start.time needs a zone", hint="as in 2026-01-31T12:00:00Z")
    time_us = None if given.time is None else round(given.time.timestamp() * 1e6)
    return Start(policy=given.policy, offset=given.offset, time_us=time_us)


def _view(found: InboxSubscription, places: list[Consumer]) -> InboxSubscriptionView:
    namespace, tenant = found.tenant.split(".")
    start = found.start
    return InboxSubscriptionView(
        id=found.id,
        agent=found.agent,
        namespace=namespace,
        tenant=tenant,
        pattern=found.pattern,
        filter=found.filter,
        start=StartView(
            policy=start.policy,
            offset=start.offset,
            time=None if start.time_us is None else instant(start.time_us),
        ),
        digest=found.digest,
        cleanup=found.cleanup,
        engine=found.engine,
        ends_at=None if found.ends_at_us is None else instant(found.ends_at_us),
        created_at=instant(found.created_at_us),
        positions=[PositionView(one.stream, sum(cursor.next_offset for cursor in one.cursors)) for one in places],
    )


async def _with_places(call: Call, found: InboxSubscription) -> InboxSubscriptionView:
    streams = await _inboxes(call).agents.places(found.tenant, found.id)
    places = [await call.log.get_consumer(stream, found.id) for stream in streams]
    return _view(found, [place for place in places if place is not None])


def _check_topics(call: Call, body: CreateInboxSubscription) -> str:
    """Return the pattern a subscription is to have; the caller's key must cover what it can bring."""
    if (body.topic is None) == (body.pattern is None):
        raise Invalid("a subscription has either a `topic` or a `pattern`")
    if body.topic is not None:
        call.allow(body.topic)
        return body.topic
    whole = {EVERYTHING, f"{call.tenant}.>", f"{call.tenant}.*"}
    if not any(
        grant.scope in (Scope.SUBSCRIBE, Scope.ADMIN) and grant.pattern in whole for grant in call.caller.grants
    ):
        raise Forbidden(
            "a pattern may match any topic, and this key does not have the scope subscribe for all of them",
            hint="name a `topic`",
        )
    return body.pattern or ""


async def subscribe_agent(call: Call) -> InboxSubscriptionView:
    """Have matching events go to the agent's inbox, from a start that is pinned now."""
    body: CreateInboxSubscription = call.body
    tenant, agent = call.tenant or "", call.path["agent"]
    pattern = _check_topics(call, body)
    start = _start(body.start)
    have = len(await _inboxes(call).agents.subscriptions(tenant)) + await call.hub.desk.count(tenant)
    await call.hub.quotas.subscriptions(tenant, have)
    made, places = await _inboxes(call).subscribe(
        tenant,
        agent,
        pattern,
        id=body.id,
        streams=() if body.topic is None else (body.topic,),
        filter=body.filter,
        start=start,
        digest=body.digest,
        cleanup=body.cleanup,
        engine=body.engine,
    )
    return _view(made, places)


async def _subscription(call: Call) -> InboxSubscription:
    """Return the subscription that the path names, if it is this agent's."""
    name = check_id(call.path["subscription"], "id")
    await _inboxes(call).agents.get(call.tenant or "", call.path["agent"])
    found = await _inboxes(call).agents.subscription(call.tenant or "", name)
    if found.agent != call.path["agent"]:
        raise NotFound(f"{call.path['agent']} has no subscription {name}")
    return found


async def list_agent_subscriptions(call: Call) -> InboxSubscriptionsView:
    """List the subscriptions of an agent."""
    agent = await _inboxes(call).agents.get(call.tenant or "", call.path["agent"])
    found = [one for one in await _inboxes(call).agents.subscriptions(agent.tenant) if one.agent == agent.id]
    return InboxSubscriptionsView([await _with_places(call, one) for one in found])


async def unsubscribe_agent(call: Call) -> None:
    """End a subscription; its items stay."""
    found = await _subscription(call)
    await _inboxes(call).unsubscribe(found.tenant, found.id)


async def reset_agent_subscription(call: Call) -> InboxSubscriptionView:
    """Move a subscription in everything it reads."""
    body: ResetInboxSubscription = call.body
    start = _start(body.start)
    found = await _subscription(call)
    return _view(found, await _inboxes(call).reset(found.tenant, found.id, start))


def lag_view(name: str, lags: list[ConsumerLag]) -> InboxLagView:
    """Return how far a subscription is behind, by topic."""
    return InboxLagView(name, [TopicLagView(lag.stream, lag.total) for lag in lags], sum(lag.total for lag in lags))


async def show_agent_lag(call: Call) -> InboxLagView:
    """Show how far a subscription is behind."""
    found = await _subscription(call)
    return lag_view(found.id, await _inboxes(call).lag(found.tenant, found.id))


def _route(method: str, path: str, handler: Any, summary: str, **facts: Any) -> Route:
    declared: dict[str, Any] = {"names": inbox_in_path, "scope": Scope.SUBSCRIBE, "tag": "agents"} | facts
    return Route(method=method, path=path, handler=handler, summary=summary, **declared)


ROUTES = (
    _route(
        "POST",
        "/v1/bus/agents",
        create_agent,
        "Make an agent with an inbox",
        names=_new_agent,
        body=CreateAgent,
        response=AgentView,
        status=201,
        errors=(409, 507),
    ),
    _route(
        "GET",
        "/v1/bus/agents",
        list_agents,
        "List agents",
        names=tenant_in_query,
        query=AgentsQuery,
        response=AgentsView,
    ),
    _route("GET", AGENT, show_agent, "Show an agent", response=AgentView),
    _route("DELETE", AGENT, remove_agent, "Remove an agent with its inbox", status=204),
    _route(
        "POST",
        f"{AGENT}/subscriptions",
        subscribe_agent,
        "Have matching events go to an agent's inbox",
        names=_new_subscription,
        body=CreateInboxSubscription,
        response=InboxSubscriptionView,
        status=201,
        errors=(409, 429, 507),
    ),
    _route(
        "GET",
        f"{AGENT}/subscriptions",
        list_agent_subscriptions,
        "List an agent's subscriptions",
        response=InboxSubscriptionsView,
    ),
    _route("DELETE", SUBSCRIPTION, unsubscribe_agent, "End a subscription of an agent", status=204),
    _route(
        "POST",
        f"{SUBSCRIPTION}/reset",
        reset_agent_subscription,
        "Move a subscription of an agent",
        body=ResetInboxSubscription,
        response=InboxSubscriptionView,
    ),
    _route(
        "GET",
        f"{SUBSCRIPTION}/lag",
        show_agent_lag,
        "Show how far a subscription of an agent is behind",
        response=InboxLagView,
    ),
)
