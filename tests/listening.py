"""A TCP server of a test that leaves no connection behind, however the test ends."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from types import TracebackType
from typing import Self

__all__ = ["Listener"]


class Listener:
    """Listens on loopback while the block lasts; ``serve`` is what is done with a connection."""

    def __init__(self, at: int = 0) -> None:
        self._at = at
        self._open = True
        self._tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self._at)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self._open = False
        for _ in range(10):  # what was being accepted comes in
            await asyncio.sleep(0)
        await self.end()

    async def end(self) -> None:
        """End all connections."""
        for task, writer in list(self._tasks.items()):
            task.cancel()
            writer.transport.abort()  # also when the task has not begun
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._run(reader, writer))
        self._tasks[task] = writer
        task.add_done_callback(self._tasks.pop)

    async def _run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._open:
                await self.serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    @abstractmethod
    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Do with a connection what this server does; it ends with this."""
