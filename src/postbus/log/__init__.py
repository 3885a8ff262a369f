"""The log: the contract and its kinds. ``open_log`` picks the kind by URL."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from postbus.clock import SystemClock
from postbus.log.address import open_upstream, parse_address
from postbus.log.contract import Log
from postbus.log.memory import MemoryLog
from postbus.log.replica import CATCH_UP_S, ReplicaLog
from postbus.log.sqlite import SqliteLog
from postbus.log.sqlite.mirror import followed_url
from postbus.store import Store

if TYPE_CHECKING:
    from postbus.clock import Clock
    from postbus.log.address import Address

__all__ = ["Log", "MemoryLog", "ReplicaLog", "SqliteLog", "open_folder", "open_log"]


async def open_log(
    url: str,
    clock: Clock | None = None,
    *,
    durability: str = "full",
    create: bool = True,
    catch_up_s: float = CATCH_UP_S,
) -> Log:
    """Open the log a URL names: ``memory:``, ``sqlite:///folder``, a folder's path, or a remote with ``?data=folder``.

    A folder that follows a remote is opened as that. ``catch_up_s``: how long to wait for its copy.
    Raises ``Invalid`` for a URL no kind understands, and what the kind raises when it cannot be opened.
    """
    address = parse_address(url)
    if address.folder is None:
        return MemoryLog(clock)
    log = await open_folder(address, clock, durability=durability, create=create, catch_up_s=catch_up_s)
    log.projections.start()
    return log


async def open_folder(
    address: Address,
    clock: Clock | None = None,
    *,
    durability: str = "full",
    create: bool = True,
    catch_up_s: float = CATCH_UP_S,
) -> SqliteLog:
    """Open the log in an address's folder, following what the address names, or what the folder has followed so far."""
    assert address.folder is not None  # noqa: S101 - the caller's part
    clock = clock or SystemClock()
    store = await asyncio.to_thread(Store.open, address.folder, clock=clock, durability=durability, create=create)
    try:
        remote = address.remote or await followed_url(store)
        if remote is None:
            return SqliteLog(store)
        upstream = await open_upstream(remote, clock, str(store.folder.path))
    except BaseException:
        with contextlib.suppress(Exception):
            await store.close()
        raise
    return await ReplicaLog.follow(
        store, upstream, name=address.public if address.remote else remote, catch_up_s=catch_up_s
    )
