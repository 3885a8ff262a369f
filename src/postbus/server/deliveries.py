"""``/deliveries``: replies through the delivery handles of events, and those who carry them."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from postbus.bus.requeue import parse_address
from postbus.inbox.replies import Replies, ReplyRules
from postbus.model import Forbidden, Invalid, NotFound, PostbusError, instant
from postbus.server.routes import Call, Named, Route, Scope, tenant_in_body, tenant_in_query

if TYPE_CHECKING:
    from postbus.clock import Clock
    from postbus.inbox.replies import Reply
    from postbus.inbox.replies.outbox import Check
    from postbus.log import SqliteLog

__all__ = ["ROUTES", "Carriers"]

logger = logging.getLogger("postbus.server")

LOCAL = "local.default"
PAGE_MAX = 500
LOOK_S = 2.0
ID = "/v1/bus/deliveries/{delivery}"
TENANTS = "SELECT DISTINCT tenant FROM outbox_rows"
OPEN_TENANTS = "SELECT DISTINCT tenant FROM outbox_rows WHERE state = 'accepted'"


class Carriers:
    """A worker for the replies of each tenant that has any."""

    def __init__(self, log: SqliteLog, clock: Clock, check: Check) -> None:
        self._log = log
        self._clock = clock
        self._check = check
        self._rules = ReplyRules.from_environment()
        self._replies: dict[str, Replies] = {}
        self._stopping = asyncio.Event()
        self._running = False
        self._watching: asyncio.Task[None] | None = None

    async def of(self, tenant: str) -> Replies:
        """Return the replies of a tenant; while the carriers run, they are carried from now on."""
        replies = self._replies.get(tenant)
        if replies is None:
            replies = self._replies[tenant] = Replies(
                self._log, self._clock, tenant, rules=self._rules, checks=(self._check,)
            )
            if self._running:
                await replies.start()
        return replies

    async def start(self) -> None:
        """Carry what is there, and what other processes accept."""
        self._running = True
        for tenant in await self._tenants(TENANTS):
            await self.of(tenant)
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _tenants(self, query: str) -> list[str]:
        return await self._log.store.read(lambda db: [str(tenant) for (tenant,) in db.execute(query)])

    async def _watch(self) -> None:
        while not await self._clock.wait(self._stopping, LOOK_S):
            try:
                for tenant in await self._tenants(OPEN_TENANTS):
                    await self.of(tenant)
            except PostbusError as error:
                logger.warning("replies: %s", error)

    async def stop(self) -> None:
        """Finish what is being carried."""
        self._running = False
        self._stopping.set()
        if self._watching is not None:
            await self._watching
        await asyncio.gather(*(replies.stop() for replies in self._replies.values()))


# --- what travels -----------------------------------------------------------------------------------------------------

Handle = Annotated[dict[str, Any] | None, msgspec.Meta(description="The delivery handle; or give `event`.")]
OfEvent = Annotated[str | None, msgspec.Meta(description="The id of the event whose handle is meant.")]
Key = Annotated[str | None, msgspec.Meta(description="Idempotency key: the same reply under it is accepted once.")]


class SendReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reply: text for people, or any JSON."""

    payload: Any
    handle: Handle = None
    event: OfEvent = None
    key: Key = None
    namespace: str | None = None
    tenant: str | None = None


class InvokeAction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An action through a handle, like closing the issue it leads to."""

    action: str
    arguments: dict[str, Any] = {}
    handle: Handle = None
    event: OfEvent = None
    key: Key = None
    namespace: str | None = None
    tenant: str | None = None


class AskActions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose actions to show."""

    handle: Handle = None
    event: OfEvent = None
    namespace: str | None = None
    tenant: str | None = None


class ActionView(msgspec.Struct, frozen=True):
    """Something that can be done; ``schema`` is the JSON Schema of its arguments."""

    name: str
    description: str
    schema: dict[str, Any]


class ActionsView(msgspec.Struct, frozen=True):
    """What can be done through a handle; the first is what sending a reply does."""

    actions: list[ActionView]


class AttemptView(msgspec.Struct, frozen=True):
    """One try. Without an end it runs, or its process died."""

    attempt: int
    started_at: datetime
    ended_at: datetime | None
    error: str | None


class AttemptsView(msgspec.Struct, frozen=True):
    """Every try of a reply, oldest first."""

    attempts: list[AttemptView]


class DeliveryView(msgspec.Struct, frozen=True, kw_only=True):
    """A reply and what became of it. ``event`` is where it is on record, ``due_at`` its next attempt."""

    id: str
    namespace: str
    tenant: str
    state: str
    action: str
    arguments: dict[str, Any]
    handle: dict[str, Any]
    event: str
    attempts: int
    error: str | None
    result: dict[str, Any] | None
    due_at: datetime | None
    created_at: datetime
    updated_at: datetime


class DeliveriesView(msgspec.Struct, frozen=True):
    """Replies, newest first. ``next``: give it as ``after`` to see more."""

    deliveries: list[DeliveryView]
    next: str | None = None


class DeliveriesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which replies to list."""

    namespace: str | None = None
    tenant: str | None = None
    state: Annotated[str | None, msgspec.Meta(description="accepted, sent or failed")] = None
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = 100


class DeliveryQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose reply it is."""

    namespace: str | None = None
    tenant: str | None = None


# --- whom a request is about ------------------------------------------------------------------------------------------


def _replies_of(tenant: str | None, call: Call) -> Named:
    """Keys are granted replies under the name namespace.tenant.replies."""
    whose = tenant or call.caller.tenant or LOCAL
    return Named(whose, f"{whose}.replies")


def _in_body(call: Call) -> Named:
    return _replies_of(tenant_in_body(call).tenant, call)


def _in_query(call: Call) -> Named:
    return _replies_of(tenant_in_query(call).tenant, call)


async def _handle(call: Call, handle: dict[str, Any] | None, event: str | None) -> Any:
    """Return the handle that is given, or that an event has; the caller must be allowed to use it."""
    if (handle is None) == (event is None):
        raise Invalid("give handle or event, one of the two")
    if event is not None:
        stream, partition, offset = parse_address(event)
        if not stream.startswith(f"{call.tenant}.") or not call.caller.may(Scope.SUBSCRIBE, stream):
            raise NotFound(f"there is no event {event[:100]} here")
        found = await call.log.fetch(stream, partition, offset, 1)
        if not found or found[0].offset != offset:
            raise NotFound(f"there is no event {event[:100]} here")
        handle = found[0].delivery_handle
    topic = (handle or {}).get("topic")
    if (handle or {}).get("kind") == "bus" and isinstance(topic, str):
        own = topic if topic.startswith(f"{call.tenant}.") else f"{call.tenant}.journal"
        if not call.caller.may(Scope.PUBLISH, own):
            raise Forbidden(f"this key does not have the scope publish for {own}")
    return handle


async def _replies(call: Call) -> Replies:
    return await call.hub.carriers.of(call.tenant or LOCAL)


def _shown(reply: Reply) -> DeliveryView:
    namespace, tenant = reply.tenant.split(".")
    return DeliveryView(
        id=reply.id,
        namespace=namespace,
        tenant=tenant,
        state=reply.state,
        action=reply.action,
        arguments=reply.arguments,
        handle=reply.handle,
        event=reply.event,
        attempts=reply.attempts,
        error=reply.error,
        result=reply.result,
        due_at=instant(reply.due_at_us) if reply.state == "accepted" else None,
        created_at=instant(reply.created_at_us),
        updated_at=instant(reply.updated_at_us),
    )


# --- the routes -------------------------------------------------------------------------------------------------------


async def send_reply(call: Call) -> DeliveryView:
    """Accept a reply; it is on disk when this answers, and carried from there."""
    body: SendReply = call.body
    handle = await _handle(call, body.handle, body.event)
    return _shown(await (await _replies(call)).send(handle, body.payload, key=body.key))


async def invoke_action(call: Call) -> DeliveryView:
    """Accept an action; it is on disk when this answers, and carried from there."""
    body: InvokeAction = call.body
    handle = await _handle(call, body.handle, body.event)
    return _shown(await (await _replies(call)).invoke(handle, body.action, body.arguments, key=body.key))


async def show_actions(call: Call) -> ActionsView:
    """Say what can be done through a handle."""
    body: AskActions = call.body
    found = await (await _replies(call)).actions(await _handle(call, body.handle, body.event))
    return ActionsView([ActionView(action.name, action.description, action.schema) for action in found])


async def list_deliveries(call: Call) -> DeliveriesView:
    """List replies."""
    query: DeliveriesQuery = call.query
    found = await (await _replies(call)).find(state=query.state, after=query.after, limit=query.limit + 1)
    page = found[: query.limit]
    return DeliveriesView([_shown(reply) for reply in page], page[-1].id if len(found) > len(page) else None)


async def show_delivery(call: Call) -> DeliveryView:
    """Show a reply."""
    return _shown(await (await _replies(call)).get(call.path["delivery"]))


async def show_attempts(call: Call) -> AttemptsView:
    """Show every try of a reply."""
    found = await (await _replies(call)).attempts(call.path["delivery"])
    return AttemptsView(
        [
            AttemptView(
                one.attempt,
                instant(one.started_at_us),
                None if one.ended_at_us is None else instant(one.ended_at_us),
                one.error,
            )
            for one in found
        ]
    )


async def retry_delivery(call: Call) -> DeliveryView:
    """Try a failed reply again, attempts from 0."""
    return _shown(await (await _replies(call)).retry(call.path["delivery"]))


def _route(method: str, path: str, handler: Any, summary: str, **more: Any) -> Route:
    settings: dict[str, Any] = {"tag": "deliveries", "scope": Scope.PUBLISH, "response": DeliveryView} | more
    return Route(method=method, path=path, handler=handler, summary=summary, **settings)


MADE: dict[str, Any] = {"names": _in_body, "status": 201, "errors": (409, 507)}
ROUTES = (
    _route("POST", "/v1/bus/deliveries/send", send_reply, "Send a reply", body=SendReply, **MADE),
    _route("POST", "/v1/bus/deliveries/invoke", invoke_action, "Do something else", body=InvokeAction, **MADE),
    _route(
        "POST",
        "/v1/bus/deliveries/actions",
        show_actions,
        "Say what can be done",
        names=_in_body,
        body=AskActions,
        response=ActionsView,
    ),
    _route(
        "GET",
        "/v1/bus/deliveries",
        list_deliveries,
        "List replies",
        names=_in_query,
        query=DeliveriesQuery,
        response=DeliveriesView,
    ),
    _route("GET", ID, show_delivery, "Show a reply", names=_in_query, query=DeliveryQuery),
    _route(
        "GET",
        f"{ID}/attempts",
        show_attempts,
        "Show the attempts of a reply",
        names=_in_query,
        query=DeliveryQuery,
        response=AttemptsView,
    ),
    _route("POST", f"{ID}/retry", retry_delivery, "Retry a reply", names=_in_query, query=DeliveryQuery, errors=(409,)),
)
