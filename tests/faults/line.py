"""The line to a server, as bad lines are: it is cut, it holds answers back, it is slow."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

__all__ = ["Line"]


class Line:
    """Passes bytes to a port and back. What the server answers can be held, delayed, and lost by a cut."""

    def __init__(self, port: int, at: int = 0) -> None:
        self._port = port
        self._at = at
        self._whole = True
        self._back = asyncio.Event()
        self._back.set()
        self._tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.delay_s = 0.0
        self.held_bytes = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self._at)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self._whole = False
        for _ in range(10):  # what was being accepted comes in
            await asyncio.sleep(0)
        await self._end()

    async def cut(self) -> None:
        """End all connections and take no new ones; answers that were held are lost."""
        self._whole = False
        await self._end()

    def mend(self) -> None:
        """Take connections again, and pass everything on."""
        self._whole, self.held_bytes = True, 0
        self._back.set()

    def hold(self) -> None:
        """Pass on what is sent, and hold what is answered."""
        self._back.clear()

    async def _end(self) -> None:
        for task, writer in list(self._tasks.items()):
            task.cancel()
            writer.transport.abort()  # also when the task has not begun
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks[task] = writer
        task.add_done_callback(self._tasks.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        ways: list[asyncio.Task[None]] = []
        try:
            if not self._whole:
                return
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
            ends.append(far_writer)
            ways = [
                asyncio.create_task(self._pass(reader, far_writer, back=False)),
                asyncio.create_task(self._pass(far_reader, writer, back=True)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in ends:
                end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if back:
                    if not self._back.is_set():
                        self.held_bytes += len(data)
                        await self._back.wait()
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()
