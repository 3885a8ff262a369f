"""Opening the log of a bus: a folder, a remote with the folder of its copy, or a place in memory."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from postbus.bus.outlet import RemoteOutlet
from postbus.log import ReplicaLog, open_folder
from postbus.log.address import Address, parse_address
from postbus.log.replica import CATCH_UP_S

if TYPE_CHECKING:
    from postbus.clock import Clock
    from postbus.log import SqliteLog

__all__ = ["open_log", "open_node"]


async def open_log(path_or_url: str, clock: Clock, durability: str) -> tuple[SqliteLog, str | None]:
    """Return an open log, and the folder that is to be removed with it if there is one."""
    address, folder = parse_address(path_or_url), None
    if address.folder is None:
        folder = tempfile.mkdtemp(prefix="postbus-", dir=_memory())
        address = Address(folder=folder)
    try:
        return await open_node(address, clock, durability=durability), folder
    except BaseException:
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        raise


async def open_node(
    address: Address,
    clock: Clock | None = None,
    *,
    durability: str = "full",
    create: bool = True,
    catch_up_s: float = CATCH_UP_S,
) -> SqliteLog:
    """Open the log in a folder; what goes to a remote it follows goes through the spool while that is away."""
    log = await open_folder(address, clock, durability=durability, create=create, catch_up_s=catch_up_s)
    if isinstance(log, ReplicaLog):
        try:
            await RemoteOutlet(log).start()
        except BaseException:
            await log.close()
            raise
    return log


def _memory() -> str | None:
    """Return a folder that is kept in memory, where the system has one."""
    shared = Path("/dev/shm")  # noqa: S108 - the folder made in it is private
    return str(shared) if shared.is_dir() else None
