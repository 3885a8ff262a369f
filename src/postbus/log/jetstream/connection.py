"""One connection to NATS, from its beginning to its end, of which the client itself does not always tell.

The client's own reconnecting is switched off: it keeps what could not be sent and sends it later, when nobody expects
it any more. Whoever wants a connection that comes back makes a new one each time.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import nats.errors
from nats.aio.client import DEFAULT_PENDING_SIZE, Client

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from postbus.clock import Clock

__all__ = ["RETRY_S", "RETRY_S_MAX", "Connection", "without_passwords"]

CONNECT_S = 2.0
RETRY_S = 0.1
RETRY_S_MAX = 2.0
PING_S = 5
LOOK_S = 1.0
CLOSE_S = 1.0


def without_passwords(url: str) -> str:
    """Return the address of one or several servers as a log may show it."""
    scheme, _, hosts = url.partition("://")
    return f"{scheme}://{','.join(host.rpartition('@')[2] for host in hosts.split(','))}"


class Connection:
    """A client of its own. ``complained`` is told of every error that the client reports."""

    def __init__(self, url: str, complained: Callable[[Exception], None]) -> None:
        scheme, _, hosts = url.partition("://")
        self._servers = [f"{scheme}://{host}" for host in hosts.split(",")]
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
                servers=list(self._servers),
                name="postbus",
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=int(CONNECT_S),
                ping_interval=PING_S,
                closed_cb=closed,
                error_cb=complained,
                pending_size=pending_size,
            )
            await ready(self.client)

    async def ended(self, clock: Clock) -> None:
        """Wait until the connection is lost."""
        while self.client.is_connected and not await clock.wait(self.lost, LOOK_S):
            pass  # a client with something unsent tells nobody that it is closed

    async def close(self) -> None:
        """Disconnect; never raises, and takes ``CLOSE_S`` at most."""
        self.lost.set()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_S):  # it waits for what it could not send
                await self.client.close()
        reading = getattr(self.client, "_reading_task", None)  # it may end with an error that nobody asks for
        if isinstance(reading, asyncio.Task):
            reading.add_done_callback(lambda done: done.cancelled() or done.exception())
