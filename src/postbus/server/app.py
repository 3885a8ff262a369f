"""The ASGI application: finds the route, runs the checks in their one order, and turns the outcome into a response.

Order: edge, parse 400, key 401, names and tenants 400/404, scope 403, fields 400; what a handler finds comes last (404,
409). A refused request has changed nothing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response
from starlette.routing import compile_path

from postbus import strict_json
from postbus.model import Invalid, InvalidPayload, LimitExceeded, NotFound, PostbusError, StorageError
from postbus.server.edge import Edge, read_body, read_headers
from postbus.server.errors import ErrorBody, Problem, Refusal, refused
from postbus.server.openapi import document, statuses
from postbus.server.routes import INLINE_BYTES_MAX, Call, Route
from postbus.server.table import ROUTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Receive, Send
    from starlette.types import Scope as Wire

    from postbus.server.hub import Hub

__all__ = ["App"]

logger = logging.getLogger("postbus.server")
access = logging.getLogger("postbus.access")

# A payload may be 64 deep wherever the body of a route keeps it.
DEPTH_MAX = strict_json.DEPTH_MAX + 8
EVENTS = "text/event-stream"
JSON = (b"content-type", b"application/json")
SAFE = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))
UNEXPECTED = msgspec.json.encode(
    ErrorBody(Problem("unexpected", "something went wrong here; the server's log says what"))
)
_encode = msgspec.json.Encoder().encode


class App:
    """The routes of a hub. ``undeclared`` collects statuses a route gave without declaring them; tests look at it."""

    def __init__(self, hub: Hub, edge: Edge | None = None, routes: Sequence[Route] = ROUTES) -> None:
        self.hub = hub
        hub.openapi = msgspec.json.encode(document(routes))
        self.undeclared: set[tuple[str, str, int]] = set()
        self._edge = edge or Edge()
        self._fixed: dict[str, dict[str, Route]] = {}
        self._patterns: list[tuple[Any, dict[str, Any], dict[str, Route]]] = []
        self._declared = {(route.method, route.path): statuses(route) for route in routes}
        for path in dict.fromkeys(route.path for route in routes):
            methods = {route.method: route for route in routes if route.path == path}
            if "{" in path:
                regex, _, convertors = compile_path(path)
                self._patterns.append((regex, convertors, methods))
            else:
                self._fixed[path] = methods

    async def __call__(self, wire: Wire, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if wire["type"] != "http":
            raise RuntimeError(f"this server speaks HTTP only, not {wire['type']}")
        route: Route | None = None
        call: Call | None = None
        began_s = self.hub.clock.monotonic_s()
        try:
            headers = read_headers(wire)
            self._edge.check(headers)
            route, path = self._find(wire)
            call = Call(self.hub, route, wire, receive, send)
            call.headers, call.path = headers, path
            await self._check(call)
            answer = await route.handler(call)
        except PostbusError as error:
            if isinstance(error, StorageError):
                logger.warning("%s %s: %s", wire["method"], wire["path"], error)
            status, extra, body = refused(error)
            await self._send(send, status, body, [JSON, *SAFE, *extra])
        except Exception:
            logger.exception("%s %s failed", wire["method"], route.path if route is not None else "")
            status = 500
            await self._send(send, status, UNEXPECTED, [JSON, *SAFE])
        else:
            assert route is not None  # noqa: S101 - found above
            status = await self._answer(route, answer, wire, receive, send)
        self._done(wire, route, call.caller.key_id if call is not None else None, status, began_s)

    # --- the checks ---

    def _find(self, wire: Wire) -> tuple[Route, dict[str, Any]]:
        path, method = wire["path"], wire["method"]
        methods = self._fixed.get(path)
        values: dict[str, Any] = {}
        if methods is None:
            for regex, convertors, found in self._patterns:
                match = regex.match(path)
                if match:
                    values = {name: convertors[name].convert(text) for name, text in match.groupdict().items()}
                    methods = found
                    if method in found:
                        break
        if methods is None:
            raise NotFound("there is no such route", hint="see /docs")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None or (method == "HEAD" and route.media == EVENTS):
            allowed = ", ".join(sorted(methods))
            raise Refusal(405, "method_not_allowed", f"this route takes {allowed}", headers={"allow": allowed})
        return route, values

    async def _check(self, call: Call) -> None:
        route = call.route
        if route.body is not None:
            call.raw = await read_body(call.receive, call.headers, route.body_bytes_max)
            await _parse(call.raw, route.body_bytes_max)
        if not route.public:
            call.caller = self.hub.keys.caller(call.headers.get(b"authorization"))
        named = route.names(call)
        own = call.caller.tenant
        if own is not None and named.tenant not in (None, own):
            raise NotFound("there is no such thing here", hint="a key only sees its own tenant")
        call.tenant, call.topic = named.tenant or own, named.topic
        if route.scope is not None:
            for topic in named.topics or (named.topic,):
                call.caller.check(route.scope, topic)
        if route.query is not None:
            call.query = _query(call)
        if route.body is not None:
            call.body = await _decode(call.raw, route.body)

    # --- the outcome ---

    async def _answer(self, route: Route, answer: Any, wire: Wire, receive: Receive, send: Send) -> int:
        if isinstance(answer, Response):
            await answer(wire, receive, send)
            return answer.status_code
        if answer is None:
            await self._send(send, route.status, b"", list(SAFE))
        else:
            body = answer if type(answer) is bytes else _encode(answer)
            await self._send(send, route.status, body, [JSON, *SAFE])
        return route.status

    @staticmethod
    async def _send(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        if status != 204:  # noqa: PLR2004 - no content, and so no length
            headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _done(self, wire: Wire, route: Route | None, key_id: str | None, status: int, began_s: float) -> None:
        method = wire["method"]
        if route is None:
            path = ""
        else:
            path = route.path
            if status not in self._declared[route.method, path]:
                self.undeclared.add((route.method, path, status))
            method = route.method
        self.hub.metrics.answered(method if route is not None else "", path, status)
        if access.isEnabledFor(logging.INFO):
            took_ms = round((self.hub.clock.monotonic_s() - began_s) * 1000, 3)
            facts = {"method": method, "route": path, "status": status, "took_ms": took_ms, "key": key_id}
            access.info("request", extra={"facts": facts})


async def _parse(raw: bytes, bytes_max: int) -> None:
    """Refuse what is not strict JSON; large documents are parsed beside the loop."""
    if not raw:
        raise InvalidPayload("the body is empty", position=0)
    if len(raw) <= INLINE_BYTES_MAX:
        _strict(raw, bytes_max)
    else:
        await asyncio.to_thread(_strict, raw, bytes_max)


def _strict(raw: bytes, bytes_max: int) -> None:
    try:
        strict_json.validate(raw, max_bytes=bytes_max, max_depth=DEPTH_MAX)
    except InvalidPayload as error:
        raise InvalidPayload(f"body: {error.message}", position=error.position, hint=error.hint) from None
    except LimitExceeded as error:
        raise LimitExceeded(f"body: {error.message}") from None
    if raw.lstrip()[:1] != b"{":
        raise Invalid("the body must be a JSON object")


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


async def _decode(raw: bytes, kind: Any) -> Any:
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        if len(raw) <= INLINE_BYTES_MAX:
            return decoder.decode(raw)
        return await asyncio.to_thread(decoder.decode, raw)
    except msgspec.ValidationError as error:
        raise Invalid(f"body: {error}") from None


def _query(call: Call) -> Any:
    pairs = call.request.query_params.multi_items()
    values = dict(pairs)
    if len(values) != len(pairs):
        raise Invalid("a query parameter is given twice")
    try:
        return msgspec.convert(values, call.route.query, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(f"query: {error}") from None
