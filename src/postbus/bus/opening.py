"""Opening the log of a bus: a folder, or a place in memory that is removed at the end."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from postbus.log.sqlite import SqliteLog
from postbus.model import Invalid

if TYPE_CHECKING:
    from postbus.clock import Clock

__all__ = ["open_log"]


async def open_log(path_or_url: str, clock: Clock, durability: str) -> tuple[SqliteLog, str | None]:
    """Return an open log, and the folder that is to be removed with it if there is one."""
    path, folder = path_or_url, None
    if path == "memory:":
        path = folder = tempfile.mkdtemp(prefix="postbus-", dir=_memory())
    elif path.startswith("sqlite://"):
        path = unquote(path.removeprefix("sqlite://"))
    elif "://" in path:
        raise Invalid(f"the bus cannot run on {path}", hint="use memory:, sqlite:///folder or a folder's path")
    return await asyncio.to_thread(SqliteLog.open, path, clock=clock, durability=durability), folder


def _memory() -> str | None:
    """Return a folder that is kept in memory, where the system has one."""
    shared = Path("/dev/shm")  # noqa: S108 - the folder made in it is private
    return str(shared) if shared.is_dir() else None
