"""Listening: sockets, the uvicorn server on them, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from postbus.model import Invalid, PostbusError
from postbus.server.app import App
from postbus.server.protocol import HeadProtocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from postbus.server.edge import Edge
    from postbus.server.hub import Hub

__all__ = ["Serving", "is_loopback", "listen", "listen_unix"]

logger = logging.getLogger("postbus.server")

GRACE_S = 30
KEEP_ALIVE_S = 75
BACKLOG = 2048
TICK_S = 1.0


class CannotListen(PostbusError):
    """The address cannot be listened on."""

    code = "cannot_listen"


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; raises ``CannotListen``."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server(found[0][4][:2], family=found[0][0], backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise CannotListen(f"cannot listen on {host} port {port}: {why}", hint="choose another --port") from error


def listen_unix(path: str) -> socket.socket:
    """Return a listening Unix socket that only this user may use; one that a dead server left is replaced."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_dead(path)
        old = os.umask(0o177)
        try:
            made.bind(path)
        finally:
            os.umask(old)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise CannotListen(f"cannot listen on {path}: {error.strerror or error}") from error
    return made


def _remove_dead(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            return  # somebody's file; binding will say that it is in use
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                Path(path).unlink()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever runs the server."""
        yield

    async def main_loop(self) -> None:
        """Refresh the date header each second until the end begins."""
        seconds = 0
        while not await self.on_tick(seconds * 10):
            await self._hub.clock.wait(self._hub.stopping, TICK_S)
            self.should_exit = self._hub.stopping.is_set()
            seconds += 1


class Serving:
    """A running server on an open hub. ``stop`` finishes requests in flight, tells SSE readers, and returns.

    Refuses to be reachable from elsewhere while no key exists.
    """

    def __init__(
        self, hub: Hub, sockets: list[socket.socket], *, edge: Edge | None = None, grace_s: int = GRACE_S
    ) -> None:
        self.hub = hub
        self.app = App(hub, edge)
        self.sockets = sockets
        config = uvicorn.Config(
            self.app,
            http=HeadProtocol,
            ws="none",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=grace_s,
        )
        self._server = _Server(config, hub)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The TCP port that was bound."""
        return int(self.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Answer requests from now on."""
        for one in self.sockets:
            if one.family != socket.AF_UNIX and not is_loopback(one.getsockname()[0]) and not self.hub.keys.needed:
                message = "without a key this server only listens on this machine"
                raise Invalid(message, hint="make one with `postbus keys create`, or use --host 127.0.0.1")
        self._task = asyncio.get_running_loop().create_task(self._server.serve(self.sockets))
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Stop listening, tell those who wait, finish what runs. Idempotent."""
        self.hub.stopping.set()
        if self._task is not None:
            await self._task
        for connection in list(self._server.server_state.connections):  # came as the end began, or outlived the grace
            connection.transport.abort()
        for one in self.sockets:
            one.close()
