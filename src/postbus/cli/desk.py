"""Where the commands of agents, inboxes, timers, sources and replies do their work: a data folder, or a server.

Both answer the same requests with the same JSON: those of the HTTP API. In a data folder its handlers are called
directly, as the operator, without a server between.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, unquote, urlencode

import msgspec
import typer

from postbus import strict_json
from postbus.cli import output
from postbus.cli.options import CLOCK, PATIENCE_S, opened
from postbus.log import SqliteLog
from postbus.model import Invalid, NotFound, PostbusError, Unreachable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from postbus.client.connection import Connection
    from postbus.server.hub import Hub

__all__ = ["Desk", "Fill", "at_desk", "decoded", "desk", "own"]

ROOT = "/v1/bus"
TIMEOUT_S = 30.0
PARAMETER = re.compile("{([a-z_]+)(:path)?}")


class Fill(Enum):
    """Whether a command on a data folder brings inboxes up to date: not at all, before it looks, or all the time."""

    NO = "no"
    FIRST = "first"
    ON = "on"


class Desk(Protocol):
    """Answers requests of the HTTP API."""

    async def ask(
        self, method: str, path: str, body: Any = None, query: dict[str, Any] | None = None, *, wait_s: float = 0.0
    ) -> Any:
        """Return the answer, decoded; raises the error that a refusal stands for."""


class LocalDesk:
    """The handlers of the HTTP API on a data folder."""

    def __init__(self, hub: Hub) -> None:
        from postbus.server import agents, deliveries, inbox, sources, targets, timers  # noqa: PLC0415 - slow to load

        self._hub = hub
        routes = (
            *inbox.ROUTES,
            *agents.ROUTES,
            *targets.ROUTES,
            *timers.ROUTES,
            *sources.ROUTES,
            *deliveries.ROUTES,
        )
        self._routes = [(re.compile(PARAMETER.sub(_group, route.path)), route) for route in routes]

    async def ask(
        self, method: str, path: str, body: Any = None, query: dict[str, Any] | None = None, *, wait_s: float = 0.0
    ) -> Any:
        """See ``Desk.ask``."""
        from postbus.server.routes import Call  # noqa: PLC0415 - as above

        del wait_s
        given = {name: str(value) for name, value in (query or {}).items() if value is not None}
        for pattern, route in self._routes:
            found = pattern.fullmatch(ROOT + path)
            if found is None or route.method != method:
                continue
            wire = {"type": "http", "method": method, "query_string": urlencode(given).encode(), "headers": []}
            call = Call(self._hub, route, wire, _nothing, _nothing)
            call.path = {name: unquote(value) for name, value in found.groupdict().items()}
            call.raw = msgspec.json.encode(body or {})
            named = route.names(call)
            call.tenant, call.topic = named.tenant, named.topic
            try:
                if route.query is not None:
                    call.query = msgspec.convert(given, route.query, strict=False)
                if route.body is not None:
                    call.body = msgspec.json.decode(call.raw, type=route.body)
            except msgspec.ValidationError as error:
                raise Invalid(str(error)) from None
            answer = await route.handler(call)
            if answer is None:
                return None
            return msgspec.json.decode(answer if isinstance(answer, bytes) else msgspec.json.encode(answer))
        raise NotFound(f"there is no route {method} {path}")


def _group(parameter: re.Match[str]) -> str:
    return f"(?P<{parameter[1]}>{'.+' if parameter[2] else '[^/]+'})"


async def _nothing(*_: Any) -> Any:
    raise RuntimeError("there is no connection here")


class RemoteDesk:
    """A server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def ask(
        self, method: str, path: str, body: Any = None, query: dict[str, Any] | None = None, *, wait_s: float = 0.0
    ) -> Any:
        """See ``Desk.ask``."""
        raw = await self._connection.request(
            method, ROOT + path, body, query, again=method in ("GET", "DELETE"), wait_s=wait_s
        )
        return msgspec.json.decode(raw) if raw else None


@asynccontextmanager
async def desk(
    data: str, url: str | None, api_key: str | None, *, create: bool = False, fill: Fill = Fill.NO
) -> AsyncIterator[Desk]:
    """Open the data folder, or the server if there is a URL; and close it at the end."""
    if url is not None:
        from postbus.client.connection import Connection  # noqa: PLC0415 - takes as long as a command

        connection = Connection(url, api_key, TIMEOUT_S, PATIENCE_S, CLOCK)
        try:
            yield RemoteDesk(connection)
        except Unreachable as error:
            error.hint = error.hint or f"is a server running at {url}?"
            raise
        finally:
            await connection.close()
        return
    from postbus.server.hub import Hub  # noqa: PLC0415 - takes as long as a command

    async with opened(data, create=create) as log:
        assert isinstance(log, SqliteLog)  # noqa: S101 - a data folder holds no other kind
        hub = Hub(log, CLOCK)
        try:
            if fill is Fill.ON:
                await hub.inboxes.start()
            elif fill is Fill.FIRST and not await hub.inboxes.pump.catch_up():
                output.note("there is more in the log than was looked at yet")
            yield LocalDesk(hub)
        finally:
            await hub.close()


def at_desk(
    work: Callable[[Desk], Coroutine[Any, Any, Any]],
    data: str,
    url: str | None,
    api_key: str | None,
    *,
    create: bool = False,
    fill: Fill = Fill.NO,
) -> Any:
    """Do one piece of work at a desk."""

    async def run() -> Any:
        async with desk(data, url, api_key, create=create, fill=fill) as open_desk:
            return await work(open_desk)

    return asyncio.run(run())


def own(tenant: str, *parts: str) -> str:
    """Return the path of something that a tenant has, as in ``/agents/local/default/ann``."""
    first, *rest = parts
    return "/".join(["", first, *tenant.split("."), *(quote(part, safe="") for part in rest)])


def decoded(text: str, option: str) -> Any:
    """Return the JSON value that a text is."""
    try:
        strict_json.validate(text.encode())
    except (PostbusError, UnicodeEncodeError) as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint=f"'{option}'") from error
    return msgspec.json.decode(text)
