"""A log, its sources and a host; and a real web server that answers as it is told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from postbus.log import SqliteLog
from postbus.model import Event, RetryPolicy
from postbus.sources import SourceHost, Sources
from postbus.testing import FakeClock

TENANT = "local.default"
QUICK = RetryPolicy(backoff_s=0.01, backoff_s_max=0.05)
WAIT_S = 60.0


class Call:
    """A request as it came."""

    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.body = body


Reply = tuple[int, dict[str, str], bytes]


class Server(ThreadingHTTPServer):
    request_queue_size = 128


class Web:
    """A server on loopback: ``answer`` gives the reply to each call, ``calls`` are all that came."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.answer: Callable[[Call], Reply] = lambda _: (404, {}, b"")
        web = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                size = int(self.headers.get("content-length", 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                call = Call(self.command, self.path, headers, self.rfile.read(size))
                web.calls.append(call)
                status, sent, body = web.answer(call)
                self.send_response(status)
                for name, value in sent.items():
                    self.send_header(name, value)
                if status != 304:
                    self.send_header("content-length", str(len(body)))
                self.end_headers()
                if status != 304:
                    self.wfile.write(body)

            do_GET = do_POST = do_PATCH = do_DELETE = do_PUT = handle_any  # noqa: N815 - names of the library

            def log_message(self, *_: object) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    yield server
    server.stop()


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[SqliteLog]:
    opened = SqliteLog.open(tmp_path / "data")
    yield opened
    await opened.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def fake_log(tmp_path: Path, clock: FakeClock) -> AsyncIterator[SqliteLog]:
    """A log whose time is moved by hand."""
    opened = SqliteLog.open(tmp_path / "data", clock=clock)
    yield opened
    await opened.close()


@pytest.fixture
def sources(log: SqliteLog) -> Sources:
    return Sources(log, TENANT)


@pytest.fixture
def host(log: SqliteLog) -> SourceHost:
    """A host that is not started; its patience is short."""
    return SourceHost(log, log.store.clock, retry=QUICK)


async def events(log: SqliteLog, name: str) -> list[Event]:
    return await log.fetch(f"{TENANT}.{name}", 0, 0, 10_000)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds, for a while."""
    deadline = time.monotonic() + WAIT_S
    while not await condition():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.02)
