"""One connection to NATS, from its beginning to its end, of which the client itself does not always tell.

The client's own reconnecting is switched off: it keeps what could not be sent and sends it later, when nobody expects
it any more. Whoever wants a connection that comes back makes a new one each time.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import nats.errors
from nats.aio.client import DEFAULT_PENDING_SIZE, Client

from postbus.log.security import OPTIONS, Security, hosts_of, security_of
from postbus.model import Invalid

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from postbus.clock import Clock

__all__ = ["RETRY_S", "RETRY_S_MAX", "Connection", "Servers"]

CONNECT_S = 2.0
RETRY_S = 0.1
RETRY_S_MAX = 2.0
PING_S = 5
LOOK_S = 1.0
CLOSE_S = 1.0


class Servers:
    """One or several servers of a cluster, and how to connect to them; ``url`` is what may be shown of it.

    Without ``security`` the URL says it: ``nats://USER:PASSWORD@HOST:PORT?tls=FILE``. Raises ``Invalid``.
    """

    def __init__(self, url: str, security: Security | None = None) -> None:
        parts = urlsplit(url)
        who, hosts = hosts_of(parts.netloc)
        self.url = f"{parts.scheme}://{hosts}"
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if parts.scheme not in {"nats", "tls"} or not hosts or options.keys() - {*OPTIONS}:
            raise Invalid(
                f"{self.url!r} is not the address of a NATS server",
                hint="write nats://host:4222, with ?tls=FILE if it needs that",
            )
        self.addresses = [f"{parts.scheme}://{host}" for host in hosts.split(",")]
        self.security = security or security_of(who, options)
        self._context = self.security.context()

    def given(self, client: Client) -> dict[str, Any]:
        """Return what a client is given to make itself known; it tells no password where TLS is missing."""

        def told(secret: str) -> Callable[[], str]:
            def tell() -> str:
                self.check(client)
                return secret

            return tell

        given: dict[str, Any] = {} if self._context is None else {"tls": self._context}
        user, password = self.security.user, self.security.password
        if user is None:
            return given
        if password is None:
            return given | {"token": told(user)}
        return given | {"user": user, "password": told(password)}

    def check(self, client: Client) -> None:
        """Raise an error of the client when TLS was asked for and the server has none."""
        if self._context is None:
            return
        if not client._server_info.get("tls_required"):  # noqa: SLF001 - told nowhere else
            raise nats.errors.Error("the server has no TLS, which the address asks for")
        writer = getattr(getattr(client, "_transport", None), "_io_writer", None)
        if isinstance(protocol := getattr(writer, "_protocol", None), asyncio.StreamReaderProtocol):
            protocol._over_ssl = True  # type: ignore[attr-defined]  # noqa: SLF001 - else asyncio warns at the end


class Connection:
    """A client of its own. ``complained`` is told of every error that the client reports."""

    def __init__(self, servers: Servers, complained: Callable[[Exception], None]) -> None:
        self._servers = servers
        self._complained = complained
        self.client = Client()
        self.lost = asyncio.Event()

    async def connect(
        self, ready: Callable[[Client], Awaitable[None]], *, pending_size: int = DEFAULT_PENDING_SIZE
    ) -> None:
        """Connect and do what ``ready`` does first, in ``CONNECT_S``. Raises errors of the client and ``OSError``."""

        async def closed() -> None:
            self.lost.set()

        async def complained(error: Exception) -> None:
            self._complained(error)
            if isinstance(error, (OSError, nats.errors.UnexpectedEOF, nats.errors.StaleConnectionError)):
                self.lost.set()

        async with asyncio.timeout(CONNECT_S):
            await self.client.connect(
                servers=list(self._servers.addresses),
                name="postbus",
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=int(CONNECT_S),
                ping_interval=PING_S,
                closed_cb=closed,
                error_cb=complained,
                pending_size=pending_size,
                **self._servers.given(self.client),
            )
            self._servers.check(self.client)
            await ready(self.client)

    async def ended(self, clock: Clock) -> None:
        """Wait until the connection is lost."""
        while self.client.is_connected and not await clock.wait(self.lost, LOOK_S):
            pass  # a client with something unsent tells nobody that it is closed

    async def close(self) -> None:
        """Disconnect; never raises, and takes ``CLOSE_S`` at most."""
        self.lost.set()
        try:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CLOSE_S):  # it waits for what it could not send
                    await self.client.close()
        finally:
            socket = getattr(getattr(self.client, "_transport", None), "_bare_io_writer", None)
            if socket is not None:
                socket.transport.abort()  # with TLS it would wait for the server to end it too
            reading = getattr(self.client, "_reading_task", None)  # it may end with an error that nobody asks for
            if isinstance(reading, asyncio.Task):
                reading.add_done_callback(lambda done: done.cancelled() or done.exception())
