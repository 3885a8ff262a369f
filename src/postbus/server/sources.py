"""``/sources``: what feeds the log from outside, and the door that signed webhooks knock at."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from postbus.model import Forbidden, Invalid, instant
from postbus.server.errors import Refusal
from postbus.server.routes import Call, Named, Route, Scope, tenant_in_query, tenant_of
from postbus.sources import NotReady, Sources
from postbus.topics import check_id

if TYPE_CHECKING:
    from postbus.model import Source
    from postbus.sources import Turn

__all__ = ["ROUTES"]

LOCAL = "local.default"
PATH = "/v1/bus/sources/{namespace}/{tenant}/{source}"
# What reads the server's own files, runs its programs or uses its secrets is for whoever runs it.
FOR_ANYBODY = ("feed", "timer")


class CreateSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A source to be registered; its events go to the topic namespace.tenant.id unless its settings name another."""

    id: str
    kind: Annotated[str, msgspec.Meta(description="github, webhook, feed, file, command, timer or bus.")]
    settings: dict[str, Any] = {}
    namespace: str | None = None
    tenant: str | None = None


class SourceView(msgspec.Struct, frozen=True, kw_only=True):
    """A source and how it fares. ``failures`` counts those in a row."""

    id: str
    namespace: str
    tenant: str
    kind: str
    topic: str
    state: str
    settings: dict[str, Any]
    checkpoint: Any
    events: int
    duplicates: int
    failures: int
    last_error: str | None
    last_ok_at: datetime | None
    next_due_at: datetime | None
    created_at: datetime


class SourcesView(msgspec.Struct, frozen=True):
    """The sources of a tenant, by id."""

    sources: list[SourceView]


class SourcesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose sources to list."""

    namespace: str | None = None
    tenant: str | None = None


class PolledView(msgspec.Struct, frozen=True):
    """What a look at a source, or a call of it, brought: new events, those known already, and what went wrong.

    ``more``: it knows that more is waiting.
    """

    events: list[str]
    duplicates: int
    error: str | None = None
    more: bool = False


# --- whom a request is about ------------------------------------------------------------------------------------------


class _Names(msgspec.Struct):
    id: str
    namespace: str | None = None
    tenant: str | None = None


def _new(call: Call) -> Named:
    try:
        found = msgspec.json.decode(call.raw, type=_Names)
    except msgspec.ValidationError as error:
        raise Invalid(f"body: {error}") from None
    tenant = tenant_of(found.namespace, found.tenant) or call.caller.tenant or LOCAL
    return Named(tenant, f"{tenant}.{check_id(found.id, 'source id')}")


def _known(call: Call) -> Named:
    tenant = tenant_of(call.path["namespace"], call.path["tenant"]) or LOCAL
    return Named(tenant, f"{tenant}.{check_id(call.path['source'], 'source id')}")


def _listed(call: Call) -> Named:
    return Named(tenant_in_query(call).tenant or call.caller.tenant or LOCAL)


def _sources(call: Call) -> Sources:
    return Sources(call.log, call.tenant or LOCAL)


def _shown(source: Source) -> SourceView:
    namespace, tenant = source.tenant.split(".")
    return SourceView(
        id=source.id,
        namespace=namespace,
        tenant=tenant,
        kind=source.kind,
        topic=source.stream,
        state="paused" if source.paused else "running",
        settings=source.settings,
        checkpoint=source.checkpoint,
        events=source.events,
        duplicates=source.duplicates,
        failures=source.failures,
        last_error=source.last_error,
        last_ok_at=None if source.last_ok_at_us is None else instant(source.last_ok_at_us),
        next_due_at=None if source.next_due_at_us is None else instant(source.next_due_at_us),
        created_at=instant(source.created_at_us),
    )


def _polled(call: Call, turn: Turn) -> PolledView:
    more = turn.error is None and turn.due_at_us is not None and turn.due_at_us <= call.hub.clock.now_us()
    return PolledView([receipt.id for receipt in turn.receipts], turn.duplicates, turn.error, more)


# --- the routes -------------------------------------------------------------------------------------------------------


async def create_source(call: Call) -> SourceView:
    """Register a source; exactly one of many concurrent callers succeeds."""
    body: CreateSource = call.body
    if call.caller.tenant is not None:
        if body.kind not in FOR_ANYBODY:
            raise Forbidden(
                f"a {body.kind[:40]} source is for the server's operator",
                hint=f"with this key: {' or '.join(FOR_ANYBODY)}",
            )
        if body.settings.get("allow_private"):
            raise Forbidden("allow_private is for the server's operator")
    stream = body.settings.get("stream")
    if isinstance(stream, str):
        call.allow(stream)
    tenant = call.tenant or LOCAL
    await call.hub.quotas.topics(tenant, await call.hub.topic_count(tenant))
    return _shown(await _sources(call).add(body.id, body.kind, body.settings))


async def list_sources(call: Call) -> SourcesView:
    """List the sources that the caller may see."""
    found = await _sources(call).all()
    seen = [source for source in found if call.caller.may(Scope.SUBSCRIBE, f"{source.tenant}.{source.id}")]
    return SourcesView([_shown(source) for source in seen])


async def show_source(call: Call) -> SourceView:
    """Show a source."""
    return _shown(await _sources(call).get(call.path["source"]))


async def remove_source(call: Call) -> None:
    """Forget a source; its topic and events stay."""
    await _sources(call).remove(call.path["source"])


async def pause_source(call: Call) -> SourceView:
    """Stop a source where it is."""
    return _shown(await _sources(call).pause(call.path["source"]))


async def resume_source(call: Call) -> SourceView:
    """Let a source go on."""
    return _shown(await _sources(call).resume(call.path["source"]))


async def poll_source(call: Call) -> PolledView:
    """Look at a source once, now; what goes wrong is in the answer."""
    return _polled(call, await call.hub.sources.poll(call.tenant or LOCAL, call.path["source"]))


async def take_webhook(call: Call) -> PolledView:
    """Take a signed call; its event is durable when this answers. The same call again brings nothing."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in call.headers.items()}
    try:
        turn = await call.hub.sources.receive(call.tenant or LOCAL, call.path["source"], headers, call.raw)
    except NotReady:
        message = "this source cannot check signatures now"
        raise Refusal(503, "not_ready", message, headers={"retry-after": "60"}) from None
    return _polled(call, turn)


def _route(method: str, path: str, handler: Any, summary: str, **more: Any) -> Route:
    settings: dict[str, Any] = {"tag": "sources", "scope": Scope.ADMIN, "names": _known} | more
    return Route(method=method, path=path, handler=handler, summary=summary, **settings)


ROUTES = (
    _route(
        "POST",
        "/v1/bus/sources",
        create_source,
        "Register a source",
        names=_new,
        body=CreateSource,
        response=SourceView,
        status=201,
        errors=(409, 429, 507),
    ),
    _route(
        "GET",
        "/v1/bus/sources",
        list_sources,
        "List sources",
        scope=Scope.SUBSCRIBE,
        names=_listed,
        query=SourcesQuery,
        response=SourcesView,
    ),
    _route("GET", PATH, show_source, "Show a source", scope=Scope.SUBSCRIBE, response=SourceView),
    _route("DELETE", PATH, remove_source, "Remove a source; its topic stays", status=204),
    _route("POST", f"{PATH}/pause", pause_source, "Pause a source", response=SourceView),
    _route("POST", f"{PATH}/resume", resume_source, "Resume a source", response=SourceView),
    _route("POST", f"{PATH}/poll", poll_source, "Look at a source now", response=PolledView, errors=(409, 507)),
    _route(
        "POST",
        f"{PATH}/hook",
        take_webhook,
        "Take a signed webhook",
        scope=None,
        body=dict[str, Any],
        response=PolledView,
        errors=(401, 409, 503, 507),
    ),
)
