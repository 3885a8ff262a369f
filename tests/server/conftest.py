"""A real server on a real loopback socket: uvicorn, uvloop and httptools on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest
import uvloop

from postbus.server.edge import Edge
from postbus.server.hub import Hub
from postbus.server.keys import Grant, Scope, create_key
from postbus.server.serving import Serving, listen

T = TypeVar("T")


class RunningServer:
    """The server, and clients for it. ``call`` runs a coroutine on the server's loop, where hub and log live."""

    def __init__(self, data: Path, edge: Edge | None = None, *, place: str | None = None) -> None:
        self.data = data
        self._place = place or data
        self._edge = edge
        self.errors: list[Any] = []
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-server")
        self._thread.start()
        self._clients: list[httpx2.Client] = []
        try:
            self.call(self._start())
        except BaseException:
            self._end()
            raise
        self.url = f"http://127.0.0.1:{self.serving.port}"
        self.client = self.connect()

    async def _start(self) -> None:
        self.hub = await Hub.open(self._place)
        self.serving = Serving(self.hub, [listen("127.0.0.1", 0)], edge=self._edge, grace_s=5)
        await self.serving.start()

    @property
    def port(self) -> int:
        return self.serving.port

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def at_work(self, name: str) -> int:
        """Return how many tasks of the server run the coroutine of that name."""

        async def count() -> int:
            return sum(getattr(task.get_coro(), "__qualname__", "") == name for task in asyncio.all_tasks())

        return self.call(count())

    def connect(self, key: str | None = None) -> httpx2.Client:
        """Return a client that sends this key; closed with the server."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        client = httpx2.Client(base_url=self.url, headers=headers, timeout=120)
        self._clients.append(client)
        return client

    def key(self, tenant: str | None, *grants: str | tuple[str, str], **facts: Any) -> str:
        """Make a key and return its text; a grant is a scope, or a scope and a pattern."""
        made = [Grant(Scope(one)) if isinstance(one, str) else Grant(Scope(one[0]), one[1]) for one in grants]
        return self.call(create_key(self.hub.log, self.hub.clock, tenant=tenant, grants=made, **facts))[1]

    def topic(self, name: str, **settings: Any) -> None:
        """Register a topic as an operator, whatever keys there are."""
        from postbus.model import StreamSettings  # noqa: PLC0415 - kept beside its use

        self.call(self.hub.log.create_stream(name, StreamSettings(**settings)))

    def stop(self) -> None:
        """End as SIGTERM would; no route may have given a status it does not declare, and nothing failed unseen."""
        for client in self._clients:
            client.close()
        self.call(self.serving.stop())
        self.call(self.hub.close())
        self._end()
        assert self.serving.app.undeclared == set()
        assert self.errors == []

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Start servers that are stopped at the end; on the same folder unless told otherwise."""
    running: list[RunningServer] = []

    def start(data: Path | None = None, edge: Edge | None = None) -> RunningServer:
        running.append(RunningServer(data or tmp_path / "data", edge))
        return running[-1]

    yield start
    for server in running:
        if server._thread.is_alive():
            server.stop()


@pytest.fixture
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server()


@pytest.fixture
def client(server: RunningServer) -> httpx2.Client:
    """A client of the local operator: no key, any tenant."""
    return server.client
