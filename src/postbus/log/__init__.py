"""The log: the contract and its kinds. ``open_log`` picks the kind by URL."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import unquote

from postbus.log.contract import Log
from postbus.log.memory import MemoryLog
from postbus.log.sqlite import SqliteLog
from postbus.model import Invalid

if TYPE_CHECKING:
    from postbus.clock import Clock

__all__ = ["Log", "MemoryLog", "SqliteLog", "open_log"]


async def open_log(url: str, clock: Clock | None = None, *, durability: str = "full", create: bool = True) -> Log:
    """Open the log a URL names: ``memory:``, ``sqlite:///folder``, or just a folder's path.

    Raises ``Invalid`` for a URL no kind understands, and what the kind raises when it cannot be opened.
    """
    if url == "memory:":
        return MemoryLog(clock)
    scheme, separator, rest = url.partition("://")
    if separator and scheme != "sqlite":
        raise Invalid(f"no log kind is called {scheme!r}", hint="use memory:, sqlite:///folder or a folder's path")
    path = unquote(rest) if separator else url
    log = await asyncio.to_thread(SqliteLog.open, path, clock=clock, durability=durability, create=create)
    log.projections.start()
    return log
