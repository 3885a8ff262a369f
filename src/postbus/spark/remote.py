"""Reading and appending to a remote log from tasks, by position and without a copy of it."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pyarrow as pa

from postbus.clock import SystemClock
from postbus.log.address import open_upstream
from postbus.model import Event, NotFound, OffsetOutOfRange, StorageError
from postbus.spark.errors import with_hint
from postbus.spark.extent import Extent
from postbus.spark.schema import COLUMNS
from postbus.topics import matches

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence

    from postbus.log.upstream import Upstream
    from postbus.model import Draft, Receipt, Stream

__all__ = ["RemoteStream", "fetched", "found_stream", "opened_remote", "remote_extents", "remote_tables", "table_of"]

T = TypeVar("T")

PAGE = 10_000
EMPTY_MAX = 3
# The columns of an event that it brings itself, in the order of its fields.
FIELDS = tuple(COLUMNS)[1:]
KINDS = {name: COLUMNS[name].stored for name in FIELDS}


@asynccontextmanager
async def opened_remote(url: str) -> AsyncIterator[Upstream]:
    """Open a remote for a while, with room for what its kind keeps meanwhile."""
    with tempfile.TemporaryDirectory(prefix="postbus-") as folder:
        upstream = await open_upstream(url, SystemClock(), folder)
        try:
            yield upstream
        finally:
            await upstream.close()


class RemoteStream:
    """One stream of a remote, to be appended to."""

    def __init__(self, upstream: Upstream, stream: Stream) -> None:
        self._upstream = upstream
        self._stream = stream
        self._clock = SystemClock()

    @classmethod
    async def of(cls, upstream: Upstream, name: str, *, create: bool) -> RemoteStream:
        """Return the stream of a name; raises ``NotFound`` when there is none and none is to be made."""
        if create:
            return cls(upstream, await upstream.ensure_stream(name))
        for stream in await upstream.streams():
            if stream.name == name:
                return cls(upstream, stream)
        raise NotFound(f"there is no stream {name} on {upstream.url}", hint="the option createStream makes it")

    async def append(self, drafts: Sequence[Draft]) -> list[Receipt]:
        """See ``Upstream.append``."""
        ids = [self._clock.new_id() for _ in drafts]
        return await self._upstream.append(self._stream, drafts, ids, self._clock.now_us())


@with_hint
def remote_extents(url: str, pattern: str, partition: int | None) -> list[Extent]:
    """Return the partitions of the streams that a pattern stands for, by name and number."""

    async def look() -> list[Extent]:
        async with opened_remote(url) as upstream:
            return [
                Extent(0, stream.name, stream.epoch, number, first, head)
                for stream in await upstream.streams()
                if matches(pattern, stream.name)
                for number, (first, head) in enumerate(await upstream.extents(stream))
                if partition in {None, number}
            ]

    return asyncio.run(look())


def remote_tables(url: str, extent: Extent, start: int, end: int) -> Iterator[pa.Table]:
    """Yield the events from ``start`` up to ``end`` of a partition, in order, with the columns that they bring."""
    with _kept_open(url) as (run, upstream):
        stream = run(found_stream(upstream, extent))
        while start < end:
            events = run(fetched(upstream, stream, extent, start, min(PAGE, end - start)))
            yield table_of(events)
            start = events[-1].offset + 1


@contextmanager
def _kept_open(url: str) -> Iterator[tuple[Callable[[Coroutine[None, None, T]], T], Upstream]]:
    """Keep a remote open from one call to the next."""
    with asyncio.Runner() as runner:
        opening = opened_remote(url)
        upstream = runner.run(opening.__aenter__())
        try:
            yield with_hint(runner.run), upstream
        finally:
            runner.run(opening.__aexit__(None, None, None))


async def found_stream(upstream: Upstream, extent: Extent) -> Stream:
    """Return the stream of a partition that was planned; raises ``NotFound`` when it was deleted since."""
    for stream in await upstream.streams():
        if stream.name == extent.stream and stream.epoch == extent.epoch:
            return stream
    raise NotFound(f"the stream {extent.stream} was deleted while it was read", hint="start anew")


async def fetched(upstream: Upstream, stream: Stream, extent: Extent, start: int, limit: int) -> list[Event]:
    """Return at least one event; a copy of the remote's own that lags is asked again."""
    for _ in range(EMPTY_MAX):
        events = await upstream.fetch(stream, extent.partition, start, limit)
        if events and events[0].offset == start:
            return events
        first = (await upstream.extents(stream))[extent.partition][0]
        if first > start:
            message = (
                f"retention has removed {extent.stream}/{extent.partition}/{start} before it was read; "
                f"the first event there is now {first}"
            )
            raise OffsetOutOfRange(message, hint="start anew with startingOffset=earliest, or read the archive")
        await upstream.wait(stream, extent.partition, start, upstream.answer_s)
    raise StorageError(f"{extent.stream}/{extent.partition} lacks events from {start} on")


def table_of(events: list[Event]) -> pa.Table:
    """Return some events as a table with the columns that they bring."""
    columns = list(zip(*(msgspec.structs.astuple(event)[: len(FIELDS)] for event in events), strict=True))
    return pa.table({name: pa.array(columns[number], KINDS[name]) for number, name in enumerate(FIELDS)})
