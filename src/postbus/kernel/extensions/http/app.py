"""The routes of the channel."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from postbus.kernel import Conflict, Forbidden, Invalid, NotFound, PostbusError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.requests import Request

    from postbus.kernel import ApprovalPrompt, Receipt

    from .outbox import Outbox, Row

    Endpoint = Callable[[Request], Awaitable[Response]]

__all__ = ["Desk", "Listener", "make_app"]

BODY_BYTES_MAX = 256 * 1024
LIMIT_MAX = 1_000
WAIT_MS_MAX = 60_000
KEEP_ALIVE_S = 15.0
DELTAS_MAX = 1_000
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::[0-9]{1,5})?")
STATUSES = ((NotFound, 404), (Conflict, 409), (Forbidden, 403), (Invalid, 400))
Body = TypeVar("Body", bound=msgspec.Struct)
Name = Annotated[str, Meta(min_length=1, max_length=120)]


class Said(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user says. ``message_id``: the caller's own name for it, so that sending it twice is harmless."""

    text: Annotated[str, Meta(min_length=1)]
    user_id: Name = "user"
    session_id: Name | None = None
    message_id: Name | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a human says to a question. ``user_id`` names the human."""

    approved: bool
    user_id: Name
    reason: Annotated[str, Meta(max_length=1000)] | None = None


class Listener:
    """Somebody who sees an answer grow; pieces it does not take are dropped, the message itself never is."""

    def __init__(self, session_id: str | None) -> None:
        self.session_id = session_id
        self.pieces: list[str] = []
        self.news = asyncio.Event()

    def add(self, text: str) -> None:
        """Hand over a piece."""
        if len(self.pieces) < DELTAS_MAX:
            self.pieces.append(text)
        self.news.set()


class Desk(Protocol):
    """What the routes need of the channel."""

    outbox: Outbox
    listeners: set[Listener]
    stopping: asyncio.Event
    hosts: frozenset[str]
    token: str | None

    async def take(self, said: Said) -> Receipt:
        """Take in what a user says."""

    async def decide(self, request_id: str, decision: Decision) -> None:
        """Take in what a human decides."""

    def questions(self) -> list[ApprovalPrompt]:
        """Return the questions that wait for a human."""


def make_app(desk: Desk) -> Starlette:
    """Return the application."""
    routes = [
        Route("/health", _guarded(desk, _health), methods=["GET"]),
        Route("/messages", _guarded(desk, _say), methods=["POST"]),
        Route("/messages", _guarded(desk, _read), methods=["GET"]),
        Route("/stream", _guarded(desk, _stream), methods=["GET"]),
        Route("/approvals", _guarded(desk, _questions), methods=["GET"]),
        Route("/approvals/{request_id}", _guarded(desk, _decide), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})


# --- who may ask ------------------------------------------------------------------------------------------------------


def _guarded(desk: Desk, endpoint: Callable[[Desk, Request], Awaitable[Response]]) -> Endpoint:
    @wraps(endpoint)
    async def guarded(request: Request) -> Response:
        refusal = _refusal(desk, request)
        if refusal is not None:
            return refusal
        try:
            return await endpoint(desk, request)
        except PostbusError as error:
            status = next((status for kind, status in STATUSES if isinstance(error, kind)), 503)
            return _problem(status, error.code, error.message, error.hint)

    return guarded


def _refusal(desk: Desk, request: Request) -> Response | None:
    host = request.headers.get("host", "")
    if not _goes_by(host, desk.hosts):
        hint = "use an address or localhost, or name it under hosts in the config"
        return _problem(403, "forbidden_host", "this channel does not go by that name", hint)
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return _problem(403, "forbidden_origin", "requests from pages of another origin are refused")
    if desk.token is not None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), desk.token.encode()):
            return _problem(401, "unauthenticated", "this channel needs its token", "send authorization: Bearer …")
    return None


def _goes_by(host: str, hosts: frozenset[str]) -> bool:
    found = HOST.fullmatch(host)
    if found is None:
        return False
    name = found[1].lower()
    if name == "localhost" or name in hosts:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


# --- the routes -------------------------------------------------------------------------------------------------------


async def _health(desk: Desk, request: Request) -> Response:  # noqa: ARG001 - the shape of a route
    return _json({"status": "ok", "last": desk.outbox.last})


async def _say(desk: Desk, request: Request) -> Response:
    receipt = await desk.take(await _body(request, Said))
    return _json({"id": receipt.id, "duplicate": receipt.duplicate}, 202)


async def _read(desk: Desk, request: Request) -> Response:
    known = {"session_id", "after", "limit", "wait_ms"}
    _check_names(request, known)
    session = request.query_params.get("session_id")
    after, limit = _number(request, "after", 0, None), _number(request, "limit", 100, LIMIT_MAX)
    wait_s = _number(request, "wait_ms", 0, WAIT_MS_MAX) / 1000
    deadline = asyncio.get_running_loop().time() + wait_s
    while True:
        news = desk.outbox.news()
        rows = desk.outbox.after(after, session, limit)
        left = deadline - asyncio.get_running_loop().time()
        if rows or left <= 0 or desk.stopping.is_set():
            break
        await _first_of(left, news, desk.stopping)
    return _json({"messages": rows, "next": rows[-1].sequence if rows else after})


async def _questions(desk: Desk, request: Request) -> Response:  # noqa: ARG001 - the shape of a route
    return _json({"approvals": desk.questions()})


async def _decide(desk: Desk, request: Request) -> Response:
    await desk.decide(request.path_params["request_id"], await _body(request, Decision))
    return _json({"status": "taken"})


async def _stream(desk: Desk, request: Request) -> Response:
    _check_names(request, {"session_id", "after"})
    session = request.query_params.get("session_id")
    last = request.headers.get("last-event-id")
    after = int(last) if last is not None and last.isdecimal() else _number(request, "after", desk.outbox.last, None)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_events(desk, session, after), media_type="text/event-stream", headers=headers)


async def _events(desk: Desk, session: str | None, after: int) -> AsyncIterator[bytes]:
    listener = Listener(session)
    desk.listeners.add(listener)
    try:
        yield b": connected\n\n"
        while not desk.stopping.is_set():
            news, rows = desk.outbox.news(), desk.outbox.after(after, session, LIMIT_MAX)
            pieces, listener.pieces = listener.pieces, []
            listener.news.clear()
            for piece in pieces:
                yield b"event: delta\ndata: " + msgspec.json.encode({"text": piece}) + b"\n\n"
            for row in rows:
                after = row.sequence
                yield _event(row)
            if not rows and not pieces and not await _first_of(KEEP_ALIVE_S, news, listener.news, desk.stopping):
                yield b": still here\n\n"
    finally:
        desk.listeners.discard(listener)


def _event(row: Row) -> bytes:
    return b"id: %d\nevent: message\ndata: %s\n\n" % (row.sequence, msgspec.json.encode(row))


async def _first_of(seconds: float, *events: asyncio.Event) -> bool:
    """Wait for one of several events; False when none came in time."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return bool(done)


# --- in and out -------------------------------------------------------------------------------------------------------


async def _body(request: Request, kind: type[Body]) -> Body:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Invalid("the body is JSON, with content-type: application/json")
    raw = b""
    async for block in request.stream():
        raw += block
        if len(raw) > BODY_BYTES_MAX:
            raise Invalid(f"the body has at most {BODY_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Invalid(f"the body is wrong: {error}") from None


def _check_names(request: Request, known: set[str]) -> None:
    for name in request.query_params:
        if name not in known:
            raise Invalid(f"there is no parameter {name}", hint=f"there are {', '.join(sorted(known))}")


def _number(request: Request, name: str, default: int, most: int | None) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 15 or (most is not None and int(text) > most):  # noqa: PLR2004 - more digits than any sequence has
        raise Invalid(f"{name} is a whole number" + ("" if most is None else f" up to {most}"))
    return int(text)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _problem(status: int, code: str, message: str, hint: str | None = None) -> Response:
    error = {"code": code, "message": message} | ({} if hint is None else {"hint": hint})
    return _json({"error": error}, status)


async def _no_route(request: Request, error: Exception) -> Response:  # noqa: ARG001 - the shape of a handler
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for these only
    return _problem(error.status_code, "no_route", error.detail)
