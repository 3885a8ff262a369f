"""Following everything a tenant publishes: its journal and its streams, those that are made later included."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from postbus.model import NotFound

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from postbus.log.sqlite import SqliteLog
    from postbus.model import Event, Stream

__all__ = ["Places", "ends", "follow"]

PAGE = 500
LOOK_S = 0.02

Places = dict[tuple[str, int, int], int]
"""The next offset to be seen, by stream, epoch and partition; a stream that is missing is seen from its beginning."""


async def ends(log: SqliteLog, tenant: str) -> Places:
    """Return the end of everything there is."""
    places: Places = {}
    for stream in await _streams(log, tenant):
        with contextlib.suppress(NotFound):  # deleted in between
            stats = await log.get_stream_stats(stream.name)
            for part in stats.partitions:
                places[stream.name, stats.stream.epoch, part.partition] = part.high_water_mark
    return places


async def follow(log: SqliteLog, tenant: str, places: Places) -> AsyncIterator[list[Event]]:
    """Yield events from the places on, moving them along, for ever; whoever publishes them.

    Events of one partition come in order, each once; between partitions they come about as they were appended.
    """
    seen: object = None
    while True:
        log.store.writer.notice()
        now = (log.foreign_changes, log.known_heads())
        if now == seen:
            await asyncio.sleep(LOOK_S)
            continue
        seen = now
        page = await _news(log, tenant, places)
        if page:
            seen = None  # there may be more
            yield sorted(page, key=lambda event: event.created_at_us)


async def _news(log: SqliteLog, tenant: str, places: Places) -> list[Event]:
    page: list[Event] = []
    for stream in await _streams(log, tenant):
        for partition in range(stream.settings.partitions):
            key = (stream.name, stream.epoch, partition)
            with contextlib.suppress(NotFound):  # deleted in between
                events = await log.fetch(stream.name, partition, places.get(key, 0), PAGE)
                if events:
                    places[key] = events[-1].offset + 1
                    page += events
    return page


async def _streams(log: SqliteLog, tenant: str) -> list[Stream]:
    """Return what the tenant publishes to; dead-letter streams are filled by the bus itself."""
    streams = await log.streams()
    return [one for one in streams if one.name.startswith(f"{tenant}.") and not one.name.endswith("-dlq")]
