"""Copying a log to another place, whatever either is kept on: streams and events with their offsets, times and names.

A copy can be broken off and begun again: what is there already is looked at and not written again. At the end both
sides are read once more and their chains of hashes compared. Readers, deliveries and inboxes are not part of a log.
"""

from __future__ import annotations

import asyncio
from hashlib import sha256
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

import msgspec

from postbus.clock import SystemClock
from postbus.log.address import Address, open_upstream
from postbus.log.outlet import stays_here
from postbus.log.settings import accept
from postbus.log.sqlite.mirror import MirrorLog, followed_url
from postbus.model import Conflict, CorruptLog, Draft, Event, Invalid, Stream
from postbus.store import Store
from postbus.store.records import encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from postbus.clock import Clock
    from postbus.log.upstream import Upstream

    Progress = Callable[[str, int, int], None]

__all__ = ["Copied", "Copy", "copy_log"]

PAGE = 500
FILLER = Draft(topic="postbus.trimmed", source="copy", payload_json=b"null")


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy did. ``events`` were written now, ``known`` were there; ``left_out``: streams that stay on a node."""

    streams: int
    events: int
    known: int
    left_out: tuple[str, ...]
    heads: dict[str, str]


class Copy(Protocol):
    """One side of a copy."""

    name: str
    remote: bool

    async def streams(self) -> list[Stream]:
        """Return all streams, by name."""

    async def extents(self, stream: Stream) -> list[tuple[int, int]]:
        """Return (first offset, next offset) of each partition."""

    async def fetch(self, stream: Stream, partition: int, offset: int, limit: int) -> list[Event]:
        """Return events from an offset on."""

    async def make(self, stream: Stream, firsts: Sequence[int]) -> Stream:
        """Make a stream like this one, its partitions beginning at these offsets; returns it as it is here."""

    async def write(self, stream: Stream, partition: int, events: Sequence[Event]) -> None:
        """Append events at the offsets they have."""

    async def close(self) -> None:
        """Let go of everything."""


class _Folder:
    """A data folder, taken by itself: one that follows a remote is a source, and no target."""

    remote = False

    def __init__(self, store: Store) -> None:
        self.name = str(store.folder.path)
        self._log = MirrorLog(store)

    async def streams(self) -> list[Stream]:
        return await self._log.streams()

    async def extents(self, stream: Stream) -> list[tuple[int, int]]:
        stats = await self._log.get_stream_stats(stream.name)
        return [(part.first_offset, part.high_water_mark) for part in stats.partitions]

    async def fetch(self, stream: Stream, partition: int, offset: int, limit: int) -> list[Event]:
        return await self._log.fetch(stream.name, partition, offset, limit)

    async def make(self, stream: Stream, firsts: Sequence[int]) -> Stream:
        for known in await self._log.streams():
            if known.name == stream.name and known != stream:
                raise Conflict(f"{self.name} has another stream {stream.name}", hint="copy to an empty place")
        await self._log.mirror_stream(stream, firsts)
        return stream

    async def write(self, stream: Stream, partition: int, events: Sequence[Event]) -> None:
        await self._log.apply(stream, partition, events)

    async def close(self) -> None:
        await self._log.close()


class _Remote:
    """A remote, without a copy of it. It gives offsets by itself, so they are checked as they come."""

    remote = True

    def __init__(self, name: str, upstream: Upstream, clock: Clock) -> None:
        self.name = name
        self._upstream = upstream
        self._clock = clock

    async def streams(self) -> list[Stream]:
        return await self._upstream.streams()

    async def extents(self, stream: Stream) -> list[tuple[int, int]]:
        return await self._upstream.extents(stream)

    async def fetch(self, stream: Stream, partition: int, offset: int, limit: int) -> list[Event]:
        return await self._upstream.fetch(stream, partition, offset, limit)

    async def make(self, stream: Stream, firsts: Sequence[int]) -> Stream:
        made = accept(await self._upstream.ensure_stream(stream.name, stream.settings), stream.settings)
        for partition, (first, end) in enumerate(await self._upstream.extents(made)):
            wanted = firsts[partition]
            if end < wanted:  # the offsets before the source's first event: filled, and trimmed again
                await self._fill(made, partition, end, wanted)
            if first < wanted:
                await self._upstream.trim(made, partition, wanted)
        return made

    async def _fill(self, stream: Stream, partition: int, start: int, end: int) -> None:
        for offset in range(start, end, PAGE):
            numbers = range(offset, min(offset + PAGE, end))
            await self.write(stream, partition, [_filler(stream.name, partition, number) for number in numbers])

    async def write(self, stream: Stream, partition: int, events: Sequence[Event]) -> None:
        for created_at_us, run in groupby(events, attrgetter("created_at_us")):
            group = list(run)
            ids = [self._clock.new_id() for _ in group]
            drafts = [_draft(event) for event in group]
            receipts = await self._upstream.append(stream, drafts, ids, created_at_us, partition)
            for event, receipt in zip(group, receipts, strict=True):
                if (receipt.partition, receipt.offset) != (partition, event.offset):
                    raise Conflict(
                        f"{self.name} put {event.id} at {receipt.id}",
                        hint="copy to an empty prefix, while nobody else publishes there",
                    )

    async def close(self) -> None:
        await self._upstream.close()


async def copy_log(source: Address, target: Address, progress: Progress = lambda _what, _done, _all: None) -> Copied:
    """Copy what the source has now; safe to break off and to call again.

    Raises ``Conflict`` for a target that holds something else, ``CorruptLog`` when the two sides differ at the end.
    """
    if source == target or None in (source.remote or source.folder, target.remote or target.folder):
        raise Invalid("a log is copied from one place to another", hint="name two folders or remotes")
    here = await _open(source, create=False)
    try:
        there = await _open(target, create=True)
        try:
            return await _copy(here, there, progress)
        finally:
            await there.close()
    finally:
        await here.close()


async def _open(address: Address, *, create: bool) -> Copy:
    clock = SystemClock()
    if address.remote is not None:
        upstream = await open_upstream(address.remote, clock, address.folder or "")
        return _Remote(address.public, upstream, clock)
    assert address.folder is not None  # noqa: S101 - checked by the caller
    store = await asyncio.to_thread(Store.open, address.folder, clock=clock, create=create)
    followed = await followed_url(store)
    if create and followed is not None:
        await store.close()
        raise Conflict(
            f"{address.folder} is a copy of {followed} and takes nothing else", hint="copy to the remote itself"
        )
    return _Folder(store)


async def _copy(here: Copy, there: Copy, progress: Progress) -> Copied:
    streams = await here.streams()
    left_out = tuple(stream.name for stream in streams if there.remote and stays_here(stream.name))
    streams = [stream for stream in streams if stream.name not in left_out]
    strange = {stream.name for stream in await there.streams()} - {stream.name for stream in streams}
    if strange:
        raise Conflict(
            f"{there.name} has a stream {min(strange)} that {here.name} has not", hint="copy to an empty place"
        )
    plan = [_Plan(stream, made, await here.extents(stream)) async for stream, made in _made(here, there, streams)]
    total = sum(end - first for part in plan for first, end in part.extents)
    done = known = 0
    for part in plan:
        for partition, (first, end) in enumerate(part.extents):
            head = await _resume(here, there, part, partition)
            known += head - first
            done += head - first
            progress("copying", done, total)
            async for events in _pages(here, part.source, partition, head, end):
                await there.write(part.target, partition, events)
                done += len(events)
                progress("copying", done, total)
    heads = await _verify(here, there, plan, total, progress)
    return Copied(streams=len(plan), events=done - known, known=known, left_out=left_out, heads=heads)


class _Plan(msgspec.Struct, frozen=True):
    """A stream on both sides, and what of it is copied."""

    source: Stream
    target: Stream
    extents: list[tuple[int, int]]


async def _made(here: Copy, there: Copy, streams: list[Stream]) -> AsyncIterator[tuple[Stream, Stream]]:
    for stream in streams:
        firsts = [first for first, _ in await here.extents(stream)]
        yield stream, await there.make(stream, firsts)


async def _resume(here: Copy, there: Copy, part: _Plan, partition: int) -> int:
    """Return where to go on: after what is there, if that is the source's own."""
    name = f"{part.source.name}/{partition}"
    first, end = part.extents[partition]
    begin, head = (await there.extents(part.target))[partition]
    if begin != first or head > end:
        raise Conflict(
            f"{there.name} has {begin} to {head} of {name}, {here.name} has {first} to {end}",
            hint="copy to an empty place",
        )
    if head > first:
        (ours,) = await here.fetch(part.source, partition, head - 1, 1)
        (theirs,) = await there.fetch(part.target, partition, head - 1, 1)
        if _facts(ours) != _facts(theirs):
            raise Conflict(f"{there.name} has another event at {name}/{head - 1}", hint="copy to an empty place")
    return head


async def _verify(here: Copy, there: Copy, plan: list[_Plan], total: int, progress: Progress) -> dict[str, str]:
    """Read both sides and compare them; returns the last link of each partition's chain."""
    heads: dict[str, str] = {}
    done = 0
    for part in plan:
        for partition, (first, end) in enumerate(part.extents):
            name = f"{part.source.name}/{partition}"
            chain = b""
            async for events in _pages(here, part.source, partition, first, end):
                offset = events[0].offset
                copies = [
                    event
                    async for page in _pages(there, part.target, partition, offset, offset + len(events))
                    for event in page
                ]
                for ours, theirs in zip(events, copies, strict=True):
                    chain = sha256(chain + encode(_facts(ours))).digest()
                    if _facts(ours) != _facts(theirs):
                        raise CorruptLog(
                            f"{ours.id} is not the same in {here.name} and {there.name}",
                            stream=part.source.name,
                            partition=partition,
                            offset=ours.offset,
                        )
                done += len(events)
                progress("verifying", done, total)
            heads[name] = chain.hex()
    return heads


async def _pages(side: Copy, stream: Stream, partition: int, offset: int, end: int) -> AsyncIterator[list[Event]]:
    while offset < end:
        events = await side.fetch(stream, partition, offset, min(PAGE, end - offset))
        if not events or events[0].offset != offset:
            raise Conflict(f"{side.name} has no event {stream.name}/{partition}/{offset} any more")
        yield events
        offset += len(events)


def _facts(event: Event) -> tuple[object, ...]:
    """Return what is the same in every copy, in the order of the log's own chain."""
    return tuple(getattr(event, name) for name in Event.__struct_fields__[1:16])


def _draft(event: Event) -> Draft:
    """Return an event as it was before it had an address."""
    names = Draft.__struct_fields__
    facts = {name: getattr(event, name) for name in names}
    if event.occurred_at_us == event.created_at_us:
        facts["occurred_at_us"] = None
    return Draft(**facts)


def _filler(stream: str, partition: int, offset: int) -> Event:
    facts = {name: getattr(FILLER, name) for name in Draft.__struct_fields__}
    return Event(stream, partition, offset, **(facts | {"occurred_at_us": 0, "created_at_us": 0}))
