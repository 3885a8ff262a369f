"""``/agents/…/targets``: where an agent is woken, how each target stands, and what it has cost and saved."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from postbus.inbox.wakes.records import State
from postbus.model import instant
from postbus.server.agents import AGENT, AgentView, Targets, agent_view, check_caller, inbox_in_path
from postbus.server.routes import Call, Route, Scope

__all__ = ["ROUTES"]

TARGETS = f"{AGENT}/targets"


class SetTargets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an agent is woken from now on."""

    targets: Targets


class TargetView(msgspec.Struct, frozen=True, kw_only=True):
    """How a target stands. ``until``: when its lease, or its wait for another try, ends; ``why``: what went wrong.

    ``items`` were announced, or acked before they had to be; ``avoided`` are wakes not made, by reason.
    """

    id: str
    kind: str
    state: State
    why: str | None
    until: datetime | None
    new_items: int
    failures_in_a_row: int
    events: int
    items: int
    wakes: int
    failures: int
    avoided: dict[str, int]


class TargetsView(msgspec.Struct, frozen=True):
    """The targets of an agent."""

    targets: list[TargetView]


class RevivedView(msgspec.Struct, frozen=True):
    """Whether the target was offline."""

    revived: bool


async def set_targets(call: Call) -> AgentView:
    """Replace an agent's targets."""
    body: SetTargets = call.body
    check_caller(call, body.targets)
    return await agent_view(call, await call.hub.inboxes.retarget(call.tenant or "", call.path["agent"], body.targets))


async def show_targets(call: Call) -> TargetsView:
    """Show how an agent's targets stand."""
    tenant, agent = call.tenant or "", call.path["agent"]
    waker = call.hub.inboxes.waker
    states = await waker.state(tenant, agent)
    counters = await waker.counters(tenant, agent)
    shown = []
    for one in states:
        counted = counters.get(one.target)
        shown.append(
            TargetView(
                id=one.target,
                kind=one.kind,
                state=one.state,
                why=one.why,
                until=None if one.until_at_us is None else instant(one.until_at_us),
                new_items=one.new_items,
                failures_in_a_row=one.failures,
                events=counted.events if counted else 0,
                items=counted.items if counted else 0,
                wakes=counted.wakes if counted else 0,
                failures=counted.failures if counted else 0,
                avoided=counted.avoided if counted else {},
            )
        )
    return TargetsView(shown)


async def revive_target(call: Call) -> RevivedView:
    """Put a target that is offline back to work."""
    return RevivedView(await call.hub.inboxes.waker.revive(call.tenant or "", call.path["agent"], call.path["target"]))


def _route(method: str, path: str, handler: Any, summary: str, **facts: Any) -> Route:
    declared: dict[str, Any] = {"names": inbox_in_path, "scope": Scope.SUBSCRIBE, "tag": "agents"} | facts
    return Route(method=method, path=path, handler=handler, summary=summary, **declared)


ROUTES = (
    _route("PUT", TARGETS, set_targets, "Set where an agent is woken", body=SetTargets, response=AgentView),
    _route("GET", TARGETS, show_targets, "Show how an agent's targets stand", response=TargetsView),
    _route(
        "POST",
        f"{TARGETS}/{{target}}/revive",
        revive_target,
        "Put an offline target back to work",
        response=RevivedView,
    ),
)
