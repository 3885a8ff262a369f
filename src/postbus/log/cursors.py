"""Cursors, written once for every kind of log: start policies, commits, resets and lag.

The rules are pure functions from (consumer, extents) to the consumer's next state. A kind of log only has to apply such
a function atomically (``_change``) and to say where its partitions begin and end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from postbus.model import (
    CommitResult,
    Conflict,
    Consumer,
    ConsumerLag,
    Cursor,
    Invalid,
    NotFound,
    OffsetOutOfRange,
    PartitionLag,
    ReadResult,
    Start,
    StartPolicy,
)
from postbus.topics import check_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from postbus.model import Event, Stream

__all__ = [
    "Change",
    "CursorLog",
    "Extents",
    "check_partition",
    "held_back",
    "no_consumer",
    "no_stream",
    "passed",
    "restarted",
]


INSTANT_MAX = 1 << 62


class Extents(Protocol):
    """Where a stream's partitions begin and end at one moment."""

    stream: Stream

    def first(self, partition: int) -> int:
        """Return the first retained offset."""

    def head(self, partition: int) -> int:
        """Return the next offset to be written."""

    def at_time(self, partition: int, time_us: int) -> int:
        """Return the first retained offset whose event happened at or after the instant; the head if there is none."""


class Change(NamedTuple):
    """What a rule decided: the consumer's new state (None: delete it), the caller's answer, and the audit's word."""

    consumer: Consumer | None
    answer: Any
    kind: str = ""


# --- rules ------------------------------------------------------------------------------------------------------------


def check_start(start: Start) -> Start:
    """Refuse a start policy without its argument, or with an argument it does not take."""
    try:
        start = msgspec.structs.replace(start, policy=StartPolicy(start.policy))
    except ValueError:
        known = ", ".join(StartPolicy)
        raise Invalid(f"no start policy is called {start.policy!r}", hint=f"use one of {known}") from None
    wants = {StartPolicy.AT_OFFSET: "offset", StartPolicy.AT_TIME: "time_us"}.get(start.policy)
    for name in ("offset", "time_us"):
        value = getattr(start, name)
        if name == wants and type(value) is not int:
            raise Invalid(f"start policy {start.policy} needs `{name}`, a whole number")
        if name == wants == "time_us" and not -INSTANT_MAX <= value < INSTANT_MAX:
            raise Invalid(f"the instant {value} is out of range")
        if name != wants and value is not None:
            raise Invalid(f"start policy {start.policy} takes no `{name}`")
    return start


def place(start: Start, extents: Extents, partition: int) -> int:
    """Return the offset at which a start policy begins."""
    first, head = extents.first(partition), extents.head(partition)
    if start.policy is StartPolicy.EARLIEST:
        return first
    if start.policy is StartPolicy.AT_TIME:
        assert start.time_us is not None  # noqa: S101 - check_start saw to it
        return extents.at_time(partition, start.time_us)
    if start.policy is StartPolicy.AT_OFFSET:
        assert start.offset is not None  # noqa: S101 - check_start saw to it
        if not 0 <= start.offset <= head:
            raise OffsetOutOfRange(f"offset {start.offset} is outside 0..{head} of {extents.stream.name}/{partition}")
        return max(start.offset, first)
    return head


def ensured(old: Consumer | None, extents: Extents, now_us: int, name: str, start: Start | None) -> Change:
    """Create the consumer at its start, or accept the one there is."""
    if old is not None:
        if start is not None and start != old.start:
            message = (
                f"consumer {name} of {extents.stream.name} exists with start {old.start.policy}, not {start.policy}"
            )
            raise Conflict(message, hint="use reset to move it, or another id")
        return Change(old, old)
    start = start or Start()
    count = extents.stream.settings.partitions
    cursors = tuple(Cursor(partition, place(start, extents, partition)) for partition in range(count))
    new = Consumer(name, extents.stream.name, start, extents.stream.epoch, cursors, now_us, now_us)
    return Change(new, new)


def committed(old: Consumer | None, extents: Extents, now_us: int, name: str, partition: int, through: int) -> Change:
    """Move one cursor past ``through``, never back and never beyond the end."""
    old = _existing(old, extents, name)
    cursor = old.cursors[check_partition(extents.stream, partition)]
    head = extents.head(partition)
    if type(through) is not int:
        raise Invalid("the offset to commit is a whole number")
    if through < 0 or through >= head:
        message = f"offset {through} is outside 0..{head - 1} of {extents.stream.name}/{partition}"
        raise OffsetOutOfRange(message, hint="commit the last consumed offset, below the high water mark")
    if through < cursor.next_offset:
        return Change(old, CommitResult(moved=False, committed=cursor.committed, next_offset=cursor.next_offset))
    new = Cursor(partition, through + 1, through, cursor.skipped)
    return Change(
        _with(old, new, now_us), CommitResult(moved=True, committed=through, next_offset=through + 1), "commit"
    )


def reset(
    old: Consumer | None, extents: Extents, now_us: int, name: str, start: Start, partition: int | None
) -> Change:
    """Move cursors to a start policy, in either direction."""
    new = _existing(old, extents, name)
    if partition is not None:
        check_partition(extents.stream, partition)
    for cursor in new.cursors:
        if partition is None or cursor.partition == partition:
            at = place(start, extents, cursor.partition)
            new = _with(new, Cursor(cursor.partition, at, at - 1, cursor.skipped), now_us)
    return Change(new, new, "reset")


def passed(old: Consumer, first_offsets: dict[int, int], now_us: int) -> tuple[Consumer, dict[int, int]]:
    """Clamp cursors that retention has passed; return the consumer and how many events each partition missed."""
    missed: dict[int, int] = {}
    for cursor in old.cursors:
        gap = first_offsets.get(cursor.partition, 0) - cursor.next_offset
        if gap > 0:
            missed[cursor.partition] = gap
            moved = Cursor(cursor.partition, cursor.next_offset + gap, cursor.committed, cursor.skipped + gap)
            old = _with(old, moved, now_us)
    return old, missed


def restarted(old: Consumer, stream: Stream) -> Consumer:
    """Return the consumer of a stream that was deleted and made again: at its beginning, as if it had never read."""
    cursors = tuple(Cursor(partition, 0) for partition in range(stream.settings.partitions))
    return msgspec.structs.replace(old, epoch=stream.epoch, cursors=cursors)


def held_back(consumers: list[Consumer], partition: int, target: int) -> tuple[int, list[str]]:
    """Return how far a trim to ``target`` may go, and which consumers hold it back."""
    holders = [c.id for c in consumers if c.cursors[partition].next_offset < target]
    floor = min([target, *(c.cursors[partition].next_offset for c in consumers)])
    return floor, holders


def _existing(old: Consumer | None, extents: Extents, name: str) -> Consumer:
    if old is None:
        raise no_consumer(extents.stream.name, name)
    return old


def _with(consumer: Consumer, cursor: Cursor, now_us: int) -> Consumer:
    cursors = (*consumer.cursors[: cursor.partition], cursor, *consumer.cursors[cursor.partition + 1 :])
    return msgspec.structs.replace(consumer, cursors=cursors, updated_at_us=now_us)


def check_partition(stream: Stream, partition: int) -> int:
    """Refuse a partition the stream does not have."""
    if type(partition) is not int or not 0 <= partition < stream.settings.partitions:
        raise NotFound(f"stream {stream.name} has partitions 0..{stream.settings.partitions - 1}, not {partition}")
    return partition


def check_range(offset: int, limit: int) -> None:
    """Refuse a range that cannot be read."""
    if offset < 0:
        raise OffsetOutOfRange(f"offset {offset} is negative")
    if limit < 1:
        raise Invalid(f"the limit is at least 1, not {limit}")


def no_stream(name: str) -> NotFound:
    """Return the refusal for an unknown stream."""
    return NotFound(f"there is no stream {name}", hint="make it first, or list what there is with `postbus streams`")


def no_consumer(stream: str, name: str) -> NotFound:
    """Return the refusal for an unknown consumer."""
    return NotFound(f"stream {stream} has no consumer {name}", hint="list what there is with `postbus consumers`")


# --- the consumer half of the contract --------------------------------------------------------------------------------


class CursorLog(ABC):
    """The consumer half of ``Log``, on top of what a kind of log provides."""

    @abstractmethod
    async def _change(self, stream: str, consumer: str, rule: Callable[..., Change], *args: object) -> Any:
        """Apply ``rule(old, extents, now_us, consumer, *args)`` atomically and durably; return its answer."""

    @abstractmethod
    async def _consumer(self, stream: str, consumer: str) -> Consumer | None:
        """Return the consumer as last committed; raises ``NotFound`` for an unknown stream."""

    @abstractmethod
    async def _stream(self, name: str) -> Stream:
        """Return the stream; raises ``NotFound``."""

    @abstractmethod
    async def _extent(self, stream: str, partition: int) -> tuple[int, int]:
        """Return (first retained offset, high water mark); raises ``NotFound``."""

    @abstractmethod
    async def fetch(self, stream: str, partition: int, offset: int, limit: int = 100) -> list[Event]:
        """See ``Log.fetch``."""

    async def ensure_consumer(self, stream: str, consumer: str, start: Start | None = None) -> Consumer:
        """See ``Log.ensure_consumer``."""
        check_id(consumer, "consumer")
        if start is not None:
            start = check_start(start)
        made: Consumer = await self._change(stream, consumer, ensured, start)
        return made

    async def get_consumer(self, stream: str, consumer: str) -> Consumer | None:
        """See ``Log.get_consumer``."""
        try:
            return await self._consumer(stream, consumer)
        except NotFound:
            return None

    async def read(self, stream: str, consumer: str, limit: int = 100, partition: int = 0) -> ReadResult:
        """See ``Log.read``."""
        found = await self._consumer(stream, consumer)
        if found is None:
            raise no_consumer(stream, consumer)
        if not 0 <= partition < len(found.cursors):
            check_partition(await self._stream(stream), partition)
        events = await self.fetch(stream, partition, found.cursors[partition].next_offset, limit)
        _, head = await self._extent(stream, partition)
        return ReadResult(found, events, head)

    async def commit(self, stream: str, consumer: str, through: int, partition: int = 0) -> CommitResult:
        """See ``Log.commit``."""
        done: CommitResult = await self._change(stream, consumer, committed, partition, through)
        return done

    async def reset(self, stream: str, consumer: str, start: Start, partition: int | None = None) -> Consumer:
        """See ``Log.reset``."""
        done: Consumer = await self._change(stream, consumer, reset, check_start(start), partition)
        return done

    async def delete_consumer(self, stream: str, consumer: str) -> bool:
        """See ``Log.delete_consumer``."""
        gone: bool = await self._change(stream, consumer, lambda old, *_: Change(None, old is not None))
        return gone

    async def get_consumer_lag(self, stream: str, consumer: str) -> ConsumerLag:
        """See ``Log.get_consumer_lag``."""
        found = await self._consumer(stream, consumer)
        if found is None:
            raise no_consumer(stream, consumer)
        rows = []
        for cursor in found.cursors:
            _, head = await self._extent(stream, cursor.partition)
            behind = max(head - cursor.next_offset, 0)
            rows.append(PartitionLag(cursor.partition, cursor.committed, head, behind))
        epoch = (await self._stream(stream)).epoch
        return ConsumerLag(consumer, stream, epoch, tuple(rows))
