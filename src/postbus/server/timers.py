"""``/timers``: messages to agents that are to come, once or again and again."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from postbus.inbox import Timer
from postbus.model import Invalid, NotFound, instant
from postbus.server.agents import LOCAL, inbox_of
from postbus.server.routes import Call, Named, Route, Scope, tenant_in_path, tenant_in_query, tenant_of
from postbus.topics import check_id

if TYPE_CHECKING:
    from postbus.inbox.messages import Timers

__all__ = ["ROUTES"]

PATH = "/v1/bus/timers/{namespace}/{tenant}/{timer}"
PAGE_MAX = 1_000


class CreateTimer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message to come: once ``at`` an instant, ``every`` so many seconds, or by ``cron`` in a ``zone``."""

    id: str
    agent: str
    message: msgspec.Raw
    namespace: str | None = None
    tenant: str | None = None
    at: str | None = None
    every: Annotated[float, msgspec.Meta(ge=60)] | None = None
    cron: Annotated[str | None, msgspec.Meta(description="Five fields: minute hour day month weekday.")] = None
    zone: Annotated[str, msgspec.Meta(description="An IANA name, for cron.")] = "UTC"
    until: str | None = None


class TimerView(msgspec.Struct, frozen=True, kw_only=True):
    """A timer. ``due_at`` is null when it is paused, or has fired for the last time."""

    id: str
    namespace: str
    tenant: str
    agent: str
    message: Any
    at: str | None
    every: float | None
    cron: str | None
    zone: str
    until: str | None
    due_at: datetime | None
    fired: int
    created_at: datetime


class TimersView(msgspec.Struct, frozen=True):
    """Timers by id. ``next``: give it as ``after`` to see more."""

    timers: list[TimerView]
    next: str | None = None


class TimersQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which timers to list."""

    namespace: str | None = None
    tenant: str | None = None
    agent: str | None = None
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = 100


class _Names(msgspec.Struct):
    agent: str
    namespace: str | None = None
    tenant: str | None = None


def _new(call: Call) -> Named:
    try:
        found = msgspec.json.decode(call.raw, type=_Names)
    except msgspec.ValidationError as error:
        raise Invalid(f"body: {error}") from None
    tenant = tenant_of(found.namespace, found.tenant) or call.caller.tenant or LOCAL
    return Named(tenant, inbox_of(tenant, found.agent))


def _listed(call: Call) -> Named:
    return Named(tenant_in_query(call).tenant or call.caller.tenant or LOCAL)


def _timers(call: Call) -> Timers:
    return call.hub.inboxes.timers


def _shown(whose: str, timer: Timer) -> TimerView:
    namespace, tenant = whose.split(".")
    return TimerView(
        id=timer.id,
        namespace=namespace,
        tenant=tenant,
        agent=timer.agent,
        message=timer.message,
        at=timer.at,
        every=timer.every,
        cron=timer.cron,
        zone=timer.zone,
        until=timer.until,
        due_at=None if timer.due_at_us is None else instant(timer.due_at_us),
        fired=timer.fired,
        created_at=instant(timer.created_at_us),
    )


async def create_timer(call: Call) -> TimerView:
    """Make a timer; exactly one of many concurrent callers succeeds."""
    body: CreateTimer = call.body
    timer = Timer(
        id=body.id,
        agent=body.agent,
        message=msgspec.json.decode(body.message),
        at=body.at,
        every=body.every,
        cron=body.cron,
        zone=body.zone,
        until=body.until,
    )
    return _shown(call.tenant or "", await _timers(call).add(call.tenant or "", timer))


async def list_timers(call: Call) -> TimersView:
    """List the timers of the agents whose inboxes the caller may send to."""
    query: TimersQuery = call.query
    tenant = call.tenant or ""
    found = [
        timer
        for timer in await _timers(call).all(tenant, query.agent)
        if (query.after is None or timer.id > query.after)
        and call.caller.may(Scope.PUBLISH, inbox_of(tenant, timer.agent))
    ]
    shown = [_shown(tenant, timer) for timer in found[: query.limit]]
    return TimersView(shown, shown[-1].id if len(found) > query.limit else None)


async def _timer(call: Call) -> Timer:
    """Return the timer that the path names, if the caller's key covers its agent's inbox."""
    found = await _timers(call).get(call.tenant or "", check_id(call.path["timer"], "timer"))
    if not call.caller.may(Scope.PUBLISH, inbox_of(call.tenant or "", found.agent)):
        raise NotFound(f"there is no timer {found.id} of {call.tenant}")
    return found


async def show_timer(call: Call) -> TimerView:
    """Show a timer."""
    return _shown(call.tenant or "", await _timer(call))


async def remove_timer(call: Call) -> None:
    """Remove a timer."""
    await _timers(call).remove(call.tenant or "", (await _timer(call)).id)


async def pause_timer(call: Call) -> TimerView:
    """Let a timer rest."""
    found = await _timer(call)
    return _shown(call.tenant or "", await _timers(call).pause(call.tenant or "", found.id))


async def resume_timer(call: Call) -> TimerView:
    """Let a timer go on with its next time."""
    found = await _timer(call)
    return _shown(call.tenant or "", await _timers(call).pause(call.tenant or "", found.id, resume=True))


def _route(method: str, path: str, handler: Any, summary: str, **facts: Any) -> Route:
    declared: dict[str, Any] = {"names": tenant_in_path, "scope": Scope.PUBLISH, "tag": "timers"} | facts
    return Route(method=method, path=path, handler=handler, summary=summary, **declared)


ROUTES = (
    _route(
        "POST",
        "/v1/bus/timers",
        create_timer,
        "Make a timer",
        names=_new,
        body=CreateTimer,
        response=TimerView,
        status=201,
        errors=(409, 507),
    ),
    _route("GET", "/v1/bus/timers", list_timers, "List timers", names=_listed, query=TimersQuery, response=TimersView),
    _route("GET", PATH, show_timer, "Show a timer", response=TimerView),
    _route("DELETE", PATH, remove_timer, "Remove a timer", status=204),
    _route("POST", f"{PATH}/pause", pause_timer, "Pause a timer", response=TimerView),
    _route("POST", f"{PATH}/resume", resume_timer, "Resume a timer", response=TimerView),
)
