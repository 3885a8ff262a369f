"""``/dlq``: dead letters, listed, shown, delivered again, and put away."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import msgspec

from postbus.bus.purge import dead_letters, purge
from postbus.bus.requeue import parse_address
from postbus.model import Invalid, instant
from postbus.server.routes import Call, Named, Route, Scope, named_topic, tenant_of

if TYPE_CHECKING:
    from postbus.bus.pull import DeadEntry, DeadLetters

__all__ = ["ROUTES"]

LOCAL = "local.default"
PAGE_MAX = 1_000
IDS_MAX = 10_000
RATE_MAX_S = 300


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter and where it came from. ``state`` is open, replayed or purged."""

    id: str
    subscription: str
    topic: str
    origin: str
    reason: str
    attempts: int
    error: str
    created_at: datetime
    state: str
    payload: msgspec.Raw


class Letters(msgspec.Struct, frozen=True):
    """Dead letters, oldest first. ``next``: give it as ``after`` to see more."""

    letters: list[Letter]
    next: str | None = None


class LettersQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which dead letters to list; ``topic`` is a pattern."""

    namespace: str | None = None
    tenant: str | None = None
    subscription: str | None = None
    topic: str | None = None
    reason: str | None = None
    state: Annotated[str, msgspec.Meta(pattern="^(open|replayed|purged|all)$")] = "open"
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = 100


class _Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    namespace: str | None = None
    tenant: str | None = None
    ids: Annotated[list[str], msgspec.Meta(min_length=1, max_length=IDS_MAX)] | None = None
    subscription: str | None = None
    topic: str | None = None
    reason: str | None = None


class ReplayLetters(_Choice, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Open dead letters to be delivered again: by ``ids``, or all that fit; ``per_second`` caps the rate."""

    per_second: Annotated[float, msgspec.Meta(gt=0)] | None = None


class Replayed(msgspec.Struct, frozen=True):
    """How many are delivered again."""

    replayed: int


class PurgeLetters(_Choice, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Open dead letters to be put away for good: by ``ids``, or all that fit. ``confirm`` must be true."""

    confirm: bool = False


class Purged(msgspec.Struct, frozen=True):
    """How many were put away."""

    purged: int


class PurgeQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``confirm`` must be true."""

    confirm: bool = False


# --- whom a request is about ------------------------------------------------------------------------------------------


class _Names(msgspec.Struct):
    namespace: str | None = None
    tenant: str | None = None


def _own(call: Call, found: _Names) -> Named:
    return Named(tenant_of(found.namespace, found.tenant) or call.caller.tenant or LOCAL)


def _in_query(call: Call) -> Named:
    values = call.request.query_params
    return _own(call, _Names(values.get("namespace"), values.get("tenant")))


def _in_body(call: Call) -> Named:
    try:
        return _own(call, msgspec.json.decode(call.raw, type=_Names))
    except msgspec.ValidationError as error:
        raise Invalid(f"body: {error}") from None


def _by_id(call: Call) -> Named:
    stream, _, offset = parse_address(call.path["id"])
    if offset > 1 << 62:
        raise Invalid("no offset is that large")
    return Named(named_topic(stream).tenant)


# --- handlers ---------------------------------------------------------------------------------------------------------


def _letters(call: Call) -> DeadLetters:
    return dead_letters(call.log, call.hub.clock, call.tenant or "")


def _shown(entry: DeadEntry) -> Letter:
    return Letter(
        id=entry.id,
        subscription=entry.subscription,
        topic=entry.topic,
        origin=entry.origin_id,
        reason=entry.reason,
        attempts=entry.attempts,
        error=entry.error,
        created_at=instant(round(entry.created_at * 1e6)),
        state=entry.state,
        payload=msgspec.Raw(entry.payload.encode()),
    )


async def list_letters(call: Call) -> Letters:
    """List the dead letters that the caller may see."""
    query: LettersQuery = call.query
    after = None if query.after is None else parse_address(query.after)
    found = await _letters(call).find(
        subscription=query.subscription,
        topic=query.topic,
        reason=query.reason,
        state=None if query.state == "all" else query.state,
    )
    seen = [one for one in found if call.caller.may(Scope.SUBSCRIBE, one.origin_stream)]
    seen.sort(key=lambda one: parse_address(one.id))
    rest = [one for one in seen if after is None or parse_address(one.id) > after]
    page = rest[: query.limit]
    return Letters([_shown(one) for one in page], page[-1].id if len(rest) > len(page) else None)


async def show_letter(call: Call) -> Letter:
    """Show one dead letter."""
    found = await _letters(call).show(call.path["id"])
    call.allow(found.origin_stream)
    return _shown(found)


async def _chosen(call: Call, body: _Choice) -> list[DeadEntry]:
    """Return the open letters that were asked for; by id they must be there."""
    letters = _letters(call)
    if body.ids is not None:
        if body.subscription is not None or body.topic is not None or body.reason is not None:
            raise Invalid("give ids, or subscription, topic and reason", hint="one of the two")
        found = [await letters.show(one) for one in dict.fromkeys(body.ids)]
        for entry in found:
            call.allow(entry.origin_stream)
        return [entry for entry in found if entry.state == "open"]
    found = await letters.find(subscription=body.subscription, topic=body.topic, reason=body.reason)
    scope = call.route.scope
    return [one for one in found if scope is None or call.caller.may(scope, one.origin_stream)]


async def replay_letters(call: Call) -> Replayed:
    """Deliver dead letters again to the subscriptions they came from, attempts from 0."""
    body: ReplayLetters = call.body
    chosen = await _chosen(call, body)
    if body.per_second is not None and len(chosen) / body.per_second > RATE_MAX_S:
        raise Invalid(f"that would take more than {RATE_MAX_S} s", hint="choose fewer letters, or a higher rate")
    if not chosen:
        return Replayed(0)
    tenant, hub = call.tenant or "", call.hub
    bus = await call.bus()
    count = await bus.dead_letters.replay(chosen, per_second=body.per_second)
    await hub.desk.refresh(tenant)
    return Replayed(count)


async def purge_letters(call: Call) -> Purged:
    """Put dead letters away for good, on record."""
    body: PurgeLetters = call.body
    _confirmed(body.confirm)
    return await _purge(call, await _chosen(call, body))


async def purge_letter(call: Call) -> None:
    """Put one dead letter away for good, on record."""
    found = await _letters(call).show(call.path["id"])
    call.allow(found.origin_stream)
    _confirmed(call.query.confirm)
    await _purge(call, [found])


def _confirmed(confirm: bool) -> None:  # noqa: FBT001 - a field of the request
    if not confirm:
        raise Invalid("dead letters that are put away are gone for good", hint="say confirm: true")


async def _purge(call: Call, chosen: list[DeadEntry]) -> Purged:
    if not chosen:
        return Purged(0)
    source = call.caller.source or "http"
    return Purged(await purge(call.log, call.hub.clock, call.tenant or "", chosen, source))


ROUTES = (
    Route(
        method="GET",
        path="/v1/bus/dlq",
        handler=list_letters,
        summary="List dead letters",
        tag="dlq",
        scope=Scope.SUBSCRIBE,
        names=_in_query,
        query=LettersQuery,
        response=Letters,
    ),
    Route(
        method="POST",
        path="/v1/bus/dlq/replay",
        handler=replay_letters,
        summary="Deliver dead letters again",
        tag="dlq",
        scope=Scope.ACK,
        names=_in_body,
        body=ReplayLetters,
        response=Replayed,
    ),
    Route(
        method="POST",
        path="/v1/bus/dlq/purge",
        handler=purge_letters,
        summary="Put dead letters away for good",
        tag="dlq",
        scope=Scope.ADMIN,
        names=_in_body,
        body=PurgeLetters,
        response=Purged,
        errors=(507,),
    ),
    Route(
        method="GET",
        path="/v1/bus/dlq/{id:path}",
        handler=show_letter,
        summary="Show a dead letter",
        tag="dlq",
        scope=Scope.SUBSCRIBE,
        names=_by_id,
        response=Letter,
    ),
    Route(
        method="DELETE",
        path="/v1/bus/dlq/{id:path}",
        handler=purge_letter,
        summary="Put one dead letter away for good",
        tag="dlq",
        scope=Scope.ADMIN,
        names=_by_id,
        query=PurgeQuery,
        status=204,
        errors=(507,),
    ),
)
