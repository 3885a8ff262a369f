"""A TCP proxy for tests that loses things: answers that the server has given, or whole connections."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Self

from tests.listening import Listener

__all__ = ["Proxy"]


class Proxy(Listener):
    """Passes bytes on to a port.

    ``drop``: the share of answers that are lost with their connection, once the server has done its work; half of them
    in the middle. ``cut_s``: every connection ends that long after it began.
    """

    def __init__(self, port: int, *, drop: float = 0.0, cut_s: float | None = None, seed: int = 1, at: int = 0) -> None:
        super().__init__(at)
        self._port = port
        self._drop = drop
        self._cut_s = cut_s
        self._chance = random.Random(seed)
        self.connections = self.dropped = 0

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.url = f"http://{self.address}"
        return self

    def to(self, port: int) -> None:
        """Pass new connections on to another port."""
        self._port = port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """See ``Listener.serve``."""
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        ways = [
            asyncio.create_task(self._pass(reader, far_writer)),
            asyncio.create_task(self._answer(far_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, timeout=self._cut_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            far_writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if self._chance.random() < self._drop:
                    self.dropped += 1
                    if self.dropped % 2:
                        writer.write(data[: len(data) // 2])
                        await writer.drain()
                    return
                writer.write(data)
                await writer.drain()
