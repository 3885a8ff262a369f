"""A reader of server-sent events, a proxy that cuts connections, and what tests ask of both."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx2
import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["CuttingProxy", "Message", "Reader", "follow", "open_stream", "until"]


class Message(NamedTuple):
    """One server-sent event; a comment has the kind ``comment``."""

    kind: str
    id: str | None
    data: Any

    @property
    def number(self) -> int:
        return int(self.data["payload"]["n"])

    @property
    def address(self) -> tuple[int, int]:
        return self.data["partition"], self.data["offset"]


async def parse(lines: AsyncIterator[str]) -> AsyncIterator[Message]:
    """Yield messages as the standard says."""
    kind, name, data = "message", None, list[str]()
    async for line in lines:
        if not line:
            if data:
                yield Message(kind, name, msgspec.json.decode("\n".join(data)))
            kind, data = "message", []
        elif line.startswith(":"):
            yield Message("comment", None, line[1:].strip())
        else:
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                kind = value
            elif field == "id":
                name = value
            elif field == "data":
                data.append(value)


@contextlib.asynccontextmanager
async def open_stream(
    url: str, path: str, last_id: str | None = None, key: str | None = None
) -> AsyncIterator[tuple[httpx2.Response, AsyncIterator[Message]]]:
    """Open a stream and yield the response and its messages."""
    headers = {} if last_id is None else {"last-event-id": last_id}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    async with (
        httpx2.AsyncClient(base_url=url, timeout=httpx2.Timeout(60)) as client,
        client.stream("GET", path, headers=headers) as response,
    ):
        yield response, parse(response.aiter_lines())


async def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - what is waited for is no event of this loop
            await asyncio.sleep(0.01)


class Reader:
    """Reads in the background and comes back with its last id whenever it is cut off, as a browser does."""

    def __init__(self, url: str, path: str) -> None:
        self.url = url
        self.path = path
        self.messages: list[Message] = []
        self.errors: list[Message] = []
        self.connections = 0
        self.last_id: str | None = None
        self._reading = self._stopping = False
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while not self._stopping:
            with contextlib.suppress(httpx2.HTTPError):
                async with open_stream(self.url, self.path, self.last_id) as (response, messages):
                    if response.status_code == 200:
                        self.connections += 1
                        self._reading = True
                        async for message in messages:
                            if message.kind == "bus.message":
                                self.messages.append(message)
                                self.last_id = message.id
                            elif message.kind == "bus.error":
                                self.errors.append(message)
            self._reading = False
            await asyncio.sleep(0.02)

    async def until(self, count: int, seconds: float = 60) -> list[Message]:
        """Wait until so many messages have come."""
        await until(lambda: len(self.messages) >= count, seconds)
        return self.messages

    async def stop(self) -> None:
        """Stop; not while it is connecting, which would leave a socket behind."""
        self._stopping = True
        await until(lambda: self._reading or self._task.done())
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def follow(messages: AsyncIterator[Message], count: int, seconds: float = 60) -> list[Message]:
    """Return the next so many events of a stream."""
    found: list[Message] = []
    async with asyncio.timeout(seconds):
        async for message in messages:
            if message.kind == "bus.message":
                found.append(message)
            if len(found) >= count:
                break
    return found


class CuttingProxy:
    """Passes bytes on, and cuts every connection after so many seconds, wherever it is."""

    def __init__(self, port: int, cut_s: float) -> None:
        self._port = port
        self._cut_s = cut_s
        self.cuts = 0
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await asyncio.sleep(0)
        while self._serving:  # each ends by itself when its time is over
            await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        writers, copies = [writer], list[asyncio.Task[None]]()
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
            writers.append(far_writer)
            copies = [asyncio.create_task(_copy(reader, far_writer)), asyncio.create_task(_copy(far_reader, writer))]
            done, _ = await asyncio.wait(copies, timeout=self._cut_s, return_when=asyncio.FIRST_COMPLETED)
            self.cuts += not done
        except OSError:
            pass  # the server is not there
        finally:
            for copy in copies:
                copy.cancel()
            await asyncio.gather(*copies, return_exceptions=True)
            for one in writers:
                one.transport.abort()
                with contextlib.suppress(OSError):
                    await one.wait_closed()
            self._serving.discard(task)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(16 * 1024):
            writer.write(data)
            await writer.drain()
