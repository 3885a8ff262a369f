"""The line to a server, as bad lines are: it is cut, it holds answers back, it is slow."""

from __future__ import annotations

import asyncio
import contextlib

from tests.listening import Listener

__all__ = ["Line"]


class Line(Listener):
    """Passes bytes to a port and back. What the server answers can be held, delayed, and lost by a cut."""

    def __init__(self, port: int, at: int = 0) -> None:
        super().__init__(at)
        self._port = port
        self._whole = True
        self._back = asyncio.Event()
        self._back.set()
        self.delay_s = 0.0
        self.held_bytes = 0

    async def cut(self) -> None:
        """End all connections and take no new ones; answers that were held are lost."""
        self._whole = False
        await self.end()

    def mend(self) -> None:
        """Take connections again, and pass everything on."""
        self._whole, self.held_bytes = True, 0
        self._back.set()

    def hold(self) -> None:
        """Pass on what is sent, and hold what is answered."""
        self._back.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """See ``Listener.serve``."""
        if not self._whole:
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        ways = [
            asyncio.create_task(self._pass(reader, far_writer, back=False)),
            asyncio.create_task(self._pass(far_reader, writer, back=True)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            far_writer.transport.abort()

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
