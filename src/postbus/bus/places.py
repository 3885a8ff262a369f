"""Where subscriptions stand: the place a new one gets, and the frontier that says what is no longer pending."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postbus.delivery.dead import SUFFIX
from postbus.log.cursors import committed, ensured
from postbus.model import NotFound, Start, StartPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from postbus.log.sqlite import SqliteLog, Transaction
    from postbus.model import Stream

__all__ = ["DISPATCH", "EVERYTHING", "move", "pass_frontier", "place"]

DISPATCH = "_dispatch"
"""The bus's own reader: how far events have been offered to everybody there is."""
EVERYTHING = Start(policy=StartPolicy.EARLIEST)


async def place(
    log: SqliteLog, stream: Stream, name: str, start: Start | None, heads: dict[tuple[str, int], int]
) -> None:
    """Give a new subscription its place: where it asked to start, or where the pending events begin.

    ``heads`` are the high water marks when it subscribed, as far as they were known: nothing from there on is past.
    """
    if await log.get_consumer(stream.name, name) is not None:
        return
    if start is not None:
        await log.ensure_consumer(stream.name, name, start)
        return
    frontier = await log.get_consumer(stream.name, DISPATCH)

    def write(tx: Transaction) -> None:
        tx.move(stream.name, name, ensured, EVERYTHING)
        for cursor in frontier.cursors if frontier is not None else ():
            following = min(cursor.next_offset, heads.get((stream.name, cursor.partition), cursor.next_offset))
            if following > 0:
                tx.move(stream.name, name, committed, cursor.partition, following - 1)

    await log.transact(write)


async def move(log: SqliteLog, tenant: str, name: str, start: Start, stream: str | None) -> None:
    """Move a subscription in one stream, or in every stream it reads."""
    names = [
        one.name for one in await log.streams() if one.name.startswith(f"{tenant}.") and stream in (None, one.name)
    ]
    found = [one for one in names if await log.get_consumer(one, name) is not None]
    if not found:
        where = stream or f"any stream of {tenant}"
        raise NotFound(f"{name} does not read {where}", hint="list what there is with `postbus subscriptions`")
    for one in found:
        await log.reset(one, name, start)


async def pass_frontier(log: SqliteLog, tenant: str, may: Callable[[], bool]) -> None:
    """Move the frontier of every stream to its end, unless somebody who subscribed has no place yet (``may``)."""
    for stream in await log.streams():
        if not stream.name.startswith(f"{tenant}.") or stream.name.endswith(SUFFIX):
            continue
        frontier = await log.ensure_consumer(stream.name, DISPATCH, EVERYTHING)
        stats = await log.get_stream_stats(stream.name)
        for cursor, part in zip(frontier.cursors, stats.partitions, strict=True):
            if not may():
                return  # asked after the mark was read: what is published from now on lies beyond it
            if part.high_water_mark > cursor.next_offset:
                await log.commit(stream.name, DISPATCH, part.high_water_mark - 1, part.partition)
