"""What a route declares, what a handler gets, and how a request names the tenant and topic it is about."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from starlette.requests import Request

from postbus.model import Invalid
from postbus.server.keys import Caller, Scope
from postbus.topics import check_stream_name

if TYPE_CHECKING:
    from starlette.types import Receive, Send
    from starlette.types import Scope as Wire

    from postbus.bus import EventBus
    from postbus.log import SqliteLog
    from postbus.server.hub import Hub

__all__ = [
    "Call",
    "Named",
    "Route",
    "Scope",
    "nothing",
    "tenant_in_body",
    "tenant_in_path",
    "tenant_in_query",
    "topic_in_body",
    "topic_in_path",
]

BODY_BYTES_MAX = 2 << 20
INLINE_BYTES_MAX = 64 * 1024
TOKENS = 3
NONE = (None, None, None)


class Named(NamedTuple):
    """Whom a request is about: a tenant ``namespace.tenant`` (None: whoever calls) and perhaps its topics."""

    tenant: str | None = None
    topic: str | None = None
    topics: tuple[str, ...] = ()


class Call:
    """One request on its way through the checks, and what its handler gets.

    ``body`` and ``query`` are the declared Structs; ``raw`` are the bytes that were received. ``tenant`` is None only
    for the operator on a route that names no tenant.
    """

    def __init__(self, hub: Hub, route: Route, wire: Wire, receive: Receive, send: Send) -> None:
        self.hub = hub
        self.route = route
        self.wire = wire
        self.receive = receive
        self.send = send
        self.headers: dict[bytes, bytes] = {}
        self.path: dict[str, Any] = {}
        self.raw = b""
        self.body: Any = None
        self.query: Any = None
        self.caller: Caller = Caller()
        self.tenant: str | None = None
        self.topic: str | None = None

    @property
    def request(self) -> Request:
        """The request as Starlette shows it."""
        return Request(self.wire, self.receive, self.send)

    @property
    def log(self) -> SqliteLog:
        """The one log of the server."""
        return self.hub.log

    async def bus(self) -> EventBus:
        """Return the bus of the tenant this call is about; refuses a call of the operator that names none."""
        if self.tenant is None:
            raise Invalid("name the tenant", hint="give namespace and tenant")
        return await self.hub.bus(self.tenant)

    def allow(self, topic: str) -> None:
        """Refuse unless the caller's key has this route's scope for a topic that was only found by now."""
        if self.route.scope is not None:
            self.caller.check(self.route.scope, topic)


Handler = Callable[[Call], Awaitable[Any]]
Namer = Callable[[Call], Named]


# --- whom a request is about ------------------------------------------------------------------------------------------


class TopicNames(msgspec.Struct):
    """The two ways in which a body names a topic."""

    topic: str | None = None
    namespace: str | None = None
    tenant: str | None = None
    name: str | None = None


_names = msgspec.json.Decoder(TopicNames).decode


def nothing(_: Call) -> Named:
    """The request names nobody: it is about the caller's own tenant."""
    return Named()


def tenant_of(namespace: str | None, tenant: str | None) -> str | None:
    """Return ``namespace.tenant``, or None when neither is given; refuses half of it."""
    if namespace is None and tenant is None:
        return None
    if namespace is None or tenant is None:
        raise Invalid("namespace and tenant go together", hint="give both or neither")
    return check_stream_name(f"{namespace}.{tenant}.x")[:-2]


@lru_cache(4096)
def named_topic(name: str) -> Named:
    """Return a topic with its tenant."""
    namespace, tenant, _ = check_stream_name(name).split(".")
    return Named(f"{namespace}.{tenant}", name)


def topic_in_path(call: Call) -> Named:
    """The path has ``{topic}``, a full name."""
    return named_topic(call.path["topic"])


def tenant_in_path(call: Call) -> Named:
    """The path has ``{namespace}`` and ``{tenant}``."""
    return Named(tenant_of(call.path["namespace"], call.path["tenant"]))


def tenant_in_query(call: Call) -> Named:
    """The query may have ``namespace`` and ``tenant``."""
    found = call.request.query_params
    return Named(tenant_of(found.get("namespace"), found.get("tenant")))


def _in_body(call: Call) -> TopicNames:
    try:
        return _names(call.raw)
    except msgspec.ValidationError as error:
        raise Invalid(str(error)) from None


def tenant_in_body(call: Call) -> Named:
    """The body may have ``namespace`` and ``tenant``, and a ``topic`` that the handler judges."""
    found = _in_body(call)
    return Named(tenant_of(found.namespace, found.tenant))


def topic_in_body(call: Call) -> Named:
    """The body has ``topic`` (a full name), or ``namespace``, ``tenant`` and ``name``."""
    return full_name(_in_body(call))


def full_name(found: Any) -> Named:
    """Return the topic that a body names in one of the two ways; both at once must agree."""
    parts = (found.namespace, found.tenant, found.name)
    if parts == NONE and found.topic is not None:
        return named_topic(found.topic)
    given = [part for part in parts if part is not None]
    if found.topic is None:
        if len(given) < TOKENS:
            raise Invalid("the topic is missing", hint="give topic, or namespace, tenant and name")
        return named_topic(".".join(given))
    named = named_topic(found.topic)
    own = found.topic.split(".")
    if any(part is not None and part != token for part, token in zip(parts, own, strict=True)):
        raise Invalid("topic and namespace, tenant, name disagree", hint="give one of them")
    return named


# --- the declaration --------------------------------------------------------------------------------------------------


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One method on one path: who may call it, what it takes and gives, and which refusals it knows of its own.

    ``scope`` None makes it public. ``errors`` are statuses beyond those that every route of its shape has.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    tag: str
    scope: Scope | None = None
    any_key: bool = False
    names: Namer = nothing
    body: Any = None
    query: Any = None
    response: Any = None
    status: int = 200
    errors: tuple[int, ...] = ()
    media: str = "application/json"
    body_bytes_max: int = BODY_BYTES_MAX

    @property
    def public(self) -> bool:
        """Whether it needs no key even where keys are needed."""
        return self.scope is None and not self.any_key
