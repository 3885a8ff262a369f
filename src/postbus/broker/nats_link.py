"""One connection to NATS that comes back by itself: each time a new client, and nothing survives an old one."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

import nats.errors

from postbus.clock import Clock, SystemClock
from postbus.log.jetstream.connection import RETRY_S, RETRY_S_MAX, Connection, Servers
from postbus.model import Unreachable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from nats.aio.client import Client

__all__ = ["NatsLink"]

logger = logging.getLogger("postbus.broker")

T = TypeVar("T")


class NatsLink:
    """Keeps one client connected from ``start`` to ``close``; ``call`` uses it.

    ``up`` hooks run with each new client before anybody else may use it, ``down`` hooks when it is lost.
    """

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self._servers = Servers(url)
        self.url = self._servers.url
        self.clock = clock or SystemClock()
        self.error = "not connected yet"
        self.up: list[Callable[[Client], Awaitable[None]]] = []
        self.down: list[Callable[[], None]] = []
        self.complaints: list[Callable[[Exception], None]] = []
        self._client: Client | None = None
        self._lost: asyncio.Event = asyncio.Event()
        self._connected = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def client(self) -> Client:
        """The client that is connected now; raises ``Unreachable`` when none is."""
        if self._client is None or not self._client.is_connected:
            raise Unreachable(f"NATS cannot be reached: {self.error}")
        return self._client

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._client is not None and self._client.is_connected

    async def start(self) -> None:
        """Begin to connect, and go on until ``close``; does not wait for it."""
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def ready(self, timeout_s: float) -> None:
        """Wait until there is a connection; raises ``Unreachable`` when that takes too long."""
        if not await self.clock.wait(self._connected, timeout_s):
            raise Unreachable(f"NATS cannot be reached: {self.error}")

    async def call(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        """Do something with the client; raises ``Unreachable`` as soon as the connection is lost meanwhile."""
        client, lost = self.client, self._lost
        job = asyncio.ensure_future(work(client))
        end = asyncio.ensure_future(lost.wait())
        try:
            await asyncio.wait((job, end), return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                raise Unreachable("the connection to NATS was lost meanwhile")
            if job.cancelled():  # the client cancels what waits on it when it is closed
                raise Unreachable("the connection to NATS was closed meanwhile")
            return job.result()
        except TimeoutError:  # an OSError too, but the connection is still there
            raise
        except (nats.errors.ConnectionClosedError, nats.errors.StaleConnectionError, OSError) as error:
            raise Unreachable(f"the connection to NATS was lost: {error}") from error
        finally:
            for task in (job, end):
                task.cancel()
            await asyncio.gather(job, end, return_exceptions=True)

    async def close(self) -> None:
        """Disconnect and stop connecting. Idempotent."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None

    async def _keep(self) -> None:
        delay = RETRY_S
        while True:
            connection = Connection(self._servers, self._complained)
            try:
                await connection.connect(self._ready)
                delay = RETRY_S
                self._lost = connection.lost
                self._client = connection.client
                self._connected.set()
                await connection.ended(self.clock)
                self.error = "the connection was lost"
                logger.warning("%s: the connection was lost", self.url)
            except (OSError, nats.errors.Error) as error:  # a timeout is an OSError
                self.error = str(error) or type(error).__name__
            finally:
                if self._client is not None:
                    self._client = None
                    self._connected.clear()
                    connection.lost.set()
                    for told in self.down:
                        told()
                await connection.close()
            await self.clock.sleep(delay)
            delay = min(delay * 2, RETRY_S_MAX)

    async def _ready(self, client: Client) -> None:
        for ready in self.up:
            await ready(client)

    def _complained(self, error: Exception) -> None:
        for told in self.complaints:
            told(error)
