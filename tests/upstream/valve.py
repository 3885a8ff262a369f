"""A TCP proxy whose directions can be shut: what is held back comes later, or never."""

from __future__ import annotations

import asyncio
import contextlib

from tests.listening import Listener

__all__ = ["Pipe", "Valve"]


class Pipe:
    """One connection. ``out`` and ``back`` are open at first; ``sent`` and ``answered`` are all bytes that arrived."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.out = asyncio.Event()
        self.back = asyncio.Event()
        self.out.set()
        self.back.set()
        self.sent = b""
        self.answered = b""
        self._near = writer

    def cut(self) -> None:
        """End the connection for the client; what is held for the server stays held, and the server's end open."""
        self._near.transport.abort()


class Valve(Listener):
    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self.pipes: list[Pipe] = []
        self.moved = asyncio.Condition()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """See ``Listener.serve``."""
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        pipe = Pipe(writer)
        self.pipes.append(pipe)
        ways = [self._pass(pipe, reader, far_writer, back=False), self._pass(pipe, far_reader, writer, back=True)]
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            far_writer.transport.abort()

    async def _pass(
        self, pipe: Pipe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if back:
                    pipe.answered += data
                else:
                    pipe.sent += data
                async with self.moved:
                    self.moved.notify_all()
                await (pipe.back if back else pipe.out).wait()
                writer.write(data)
                await writer.drain()
        if back:
            writer.close()
