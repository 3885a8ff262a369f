"""Nodes on a remote, and waiting for what comes over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from postbus.bus.opening import open_node
from postbus.log import ReplicaLog, SqliteLog
from postbus.log.address import parse_address

__all__ = ["STREAM", "WAIT_S", "holds", "node", "payloads", "until"]

STREAM = "local.default.orders"
WAIT_S = 60.0


@asynccontextmanager
async def node(url: str, folder: Path) -> AsyncIterator[ReplicaLog]:
    log = await open_node(parse_address(f"{url}?data={folder}"))
    assert isinstance(log, ReplicaLog)
    try:
        yield log
    finally:
        await log.close()


async def until(holds: Callable[[], Any]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(WAIT_S):
        while True:
            found = holds()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.01)


async def payloads(log: SqliteLog, stream: str = STREAM) -> list[Any]:
    return [event.payload for event in await log.fetch(stream, 0, 0, 1000)]


async def holds(log: SqliteLog, wanted: list[Any], stream: str = STREAM) -> None:
    """Wait until a node's copy has these events, and no others."""

    async def same() -> bool:
        found = [found.name for found in await log.streams()]
        return stream in found and len(await payloads(log, stream)) >= len(wanted)

    await until(same)
    assert await payloads(log, stream) == wanted
