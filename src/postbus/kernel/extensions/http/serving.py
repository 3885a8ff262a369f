"""Listening: the socket and the uvicorn server on it, which leaves signals to the host."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from typing import TYPE_CHECKING, Any

import uvicorn

from postbus.kernel import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Serving", "is_loopback", "listen"]

GRACE_S = 5
BACKLOG = 128


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises ``Invalid``."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server(found[0][4][:2], family=found[0][0], backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Invalid(f"cannot listen on {host} port {port}: {why}", hint="choose another port in its config") from None


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the host."""
        yield


class Serving:
    """A running server on one socket."""

    def __init__(self, app: Any, made: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            ws="none",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = _Server(config)
        self._socket = made
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self._socket.getsockname()[1])

    async def start(self) -> None:
        """Answer requests from now on."""
        self._task = asyncio.get_running_loop().create_task(self._server.serve([self._socket]))
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Finish what runs and close the socket. Idempotent."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()
