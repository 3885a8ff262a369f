"""Who reads a topic over SSE: connections, and groups of them that share the work of one subscription id.

A reader is a place in the log and nothing more: no event waits for it in memory. Two kinds of group exist. A *durable*
one is a subscription that was made before: its events are leased to the connection that gets them, and acked by the
consumer, or by having been written where the subscription says so. A *passing* one lives as long as its connections
and keeps its place only in what it sends (``Last-Event-ID``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Protocol

from postbus.bus.pull import starts
from postbus.model import Start

if TYPE_CHECKING:
    from postbus.bus.pull import Puller
    from postbus.log import SqliteLog
    from postbus.model import Event

__all__ = ["Connection", "DurableGroup", "Group", "PassingGroup"]

EVENTS_MAX = 256
CHUNK_BYTES = 32 * 1024
FRAME_BYTES = 512
SPANS_MAX = 1024
RECENT_MAX = 64
REPLACE_S = 5.0
HELD_MAX = 1000
"""How many events a connection may have in its hands before it has to ack some."""


class Connection:
    """One reader: what it was given, run by run, and what it says it has."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self.places: dict[int, int] = {}
        self.base: dict[int, int] = {}
        self.again: deque[tuple[int, int, int]] = deque()
        self.replaced = asyncio.Event()
        self.ended = asyncio.Event()
        self.lacks: set[tuple[int, int]] = set()
        self.missed: dict[int, int] = {}
        self._spans: dict[int, deque[tuple[int, int]]] = {}
        self._average = 1024

    def begin(self, places: dict[int, int]) -> None:
        """Set what the reader has before it gets anything."""
        self.places, self.base = dict(places), dict(places)

    @property
    def limit(self) -> int:
        """How many events make about one piece."""
        return max(1, min(EVENTS_MAX, 4 * CHUNK_BYTES // self._average))

    def fitting(self, events: list[Event]) -> list[Event]:
        """Return as many of the events as fit into one piece, at least one."""
        size = 0
        for index, event in enumerate(events):
            size += len(event.payload_json) + FRAME_BYTES
            if size > CHUNK_BYTES and index:
                events = events[:index]
                break
        self.learn(events)
        return events

    def learn(self, events: list[Event]) -> None:
        """Learn from events how large they are."""
        if events:
            self._average = FRAME_BYTES + sum(len(event.payload_json) for event in events) // len(events)

    def give(self, events: list[Event]) -> None:
        """Remember what the reader was given."""
        for event in events:
            spans = self._spans.setdefault(event.partition, deque(maxlen=SPANS_MAX))
            if spans and spans[-1][1] == event.offset - 1:
                spans[-1] = (spans[-1][0], event.offset)
            else:
                spans.append((event.offset, event.offset))

    def given(self, partition: int, after: int) -> list[tuple[int, int]]:
        """Return what the reader was given beyond an offset, as runs of (first, last)."""
        return [(max(first, after + 1), last) for first, last in self._spans.get(partition, ()) if last > after]

    def had(self, places: dict[int, int]) -> bool:
        """Say whether those places may be what this reader has."""
        return bool(places) and all(
            offset == self.base.get(partition)
            or any(first <= offset <= last for first, last in self._spans.get(partition, ()))
            for partition, offset in places.items()
        )


class Group(Protocol):
    """Connections under one id. Each event goes to one of them."""

    partitions: int
    durable: bool

    async def join(self, connection: Connection, places: dict[int, int] | None) -> None:
        """Take a connection in; ``places`` is what its reader has already."""

    async def take(self, connection: Connection, wait_s: float) -> list[Event]:
        """Return the next events for a connection, nothing when there were none for that long."""

    async def written(self, connection: Connection, events: list[Event]) -> int:
        """Take note that events were written to a connection; return how many are settled by that."""

    def leave(self, connection: Connection) -> None:
        """Let a connection go; what it was given is remembered for when its reader comes back."""


class _Members:
    """The connections of a group, those that left last included."""

    def __init__(self) -> None:
        self.present: set[Connection] = set()
        self.recent: deque[Connection] = deque(maxlen=RECENT_MAX)

    async def join(self, connection: Connection, places: dict[int, int] | None) -> Connection | None:
        """Add a connection; return the one that its reader had before, once it takes nothing any more."""
        previous = None
        if places:
            previous = next((one for one in reversed(self.recent) if one.had(places)), None)
        if previous is not None:
            previous.replaced.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPLACE_S):
                    await previous.ended.wait()
            self.present.discard(previous)
            self.recent.remove(previous)
        self.present.add(connection)
        self.recent.append(connection)
        return previous


class PassingGroup:
    """Readers of a topic without a subscription. Their place is theirs to keep."""

    durable = False

    def __init__(self, log: SqliteLog, topic: str) -> None:
        self.partitions = 0
        self._log = log
        self._topic = topic
        self._next: dict[int, int] = {}
        self._members = _Members()
        self._taking = asyncio.Lock()
        self._turn = 0

    @property
    def empty(self) -> bool:
        """Whether nobody reads."""
        return not self._members.present

    async def start(self, start: Start, places: dict[int, int] | None) -> None:
        """Set the group's place: after what its first reader has, or at a start policy."""
        if places is None:
            self._next = await starts(self._log, self._topic, start)
        else:
            heads = await starts(self._log, self._topic, Start())
            # Beyond the end only if the topic was made again: then from its beginning.
            wanted = {partition: places.get(partition, -1) + 1 for partition in heads}
            self._next = {partition: at if at <= heads[partition] else 0 for partition, at in wanted.items()}
        self.partitions = len(self._next)

    async def join(self, connection: Connection, places: dict[int, int] | None) -> None:
        """See ``Group.join``; what the reader was given before and does not have is sent again."""
        alone = self.empty
        previous = await self._members.join(connection, places)
        connection.begin({partition: following - 1 for partition, following in self._next.items()})
        if places is None or (alone and previous is None):
            return
        for partition, following in self._next.items():
            has = places.get(partition, -1)
            connection.places[partition] = connection.base[partition] = min(has, following - 1)
            runs = previous.given(partition, has) if previous is not None else self._others(connection, partition, has)
            connection.again += [(partition, first, last) for first, last in sorted(runs)]

    def _others(self, connection: Connection, partition: int, has: int) -> list[tuple[int, int]]:
        """Return what lies between a reader's place and the group's that no other connection was given."""
        runs, following = [], has + 1
        taken = sorted(
            span for one in self._members.recent if one is not connection for span in one.given(partition, has)
        )
        for first, last in [*taken, (self._next[partition], self._next[partition])]:
            if first > following:
                runs.append((following, first - 1))
            following = max(following, last + 1)
        return runs

    async def take(self, connection: Connection, wait_s: float) -> list[Event]:
        """See ``Group.take``; those who wait take turns."""
        if connection.again:
            return await take_again(self._log, self._topic, connection)
        try:
            async with asyncio.timeout(wait_s), self._taking:
                while not (events := await self._fetch(connection)):
                    await self._grown(wait_s)
                return events
        except TimeoutError:
            return []

    async def _fetch(self, connection: Connection) -> list[Event]:
        self._turn += 1
        for index in range(self.partitions):
            partition = (self._turn + index) % self.partitions
            found = await self._log.fetch(self._topic, partition, self._next[partition], connection.limit)
            if found:
                events = connection.fitting(found)
                if events[0].offset > self._next[partition]:  # retention has removed those between
                    connection.missed[partition] = events[0].offset - self._next[partition]
                self._next[partition] = events[-1].offset + 1
                connection.give(events)
                return events
        return []

    async def _grown(self, wait_s: float) -> None:
        """Wait until a partition has grown."""
        if self.partitions == 1:
            await self._log.wait(self._topic, 0, self._next[0], wait_s)
            return
        loop = asyncio.get_running_loop()
        waits = [
            loop.create_task(self._log.wait(self._topic, partition, following, wait_s))
            for partition, following in self._next.items()
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def written(self, connection: Connection, events: list[Event]) -> int:  # noqa: ARG002 - a group's method
        """Nothing is kept."""
        return 0

    def leave(self, connection: Connection) -> None:
        """See ``Group.leave``; the others go on."""
        self._members.present.discard(connection)


class DurableGroup:
    """Readers of a subscription: its leases share the work, also with those who pull."""

    durable = True

    def __init__(self, log: SqliteLog, puller: Puller) -> None:
        self.partitions = 0
        self.puller = puller
        self._log = log
        self._topic = puller.settings.stream
        self._auto = puller.settings.auto
        self._members = _Members()

    async def join(self, connection: Connection, places: dict[int, int] | None) -> None:
        """See ``Group.join``; what the reader has is not sent again while its lease runs, the rest is."""
        stats = await self._log.get_stream_stats(self._topic)
        self.partitions = len(stats.partitions)
        previous = await self._members.join(connection, places)
        if places is None:
            return
        heads = {part.partition: part.high_water_mark for part in stats.partitions}
        has = {partition: offset for partition, offset in places.items() if offset < heads.get(partition, 0)}
        connection.begin(has)
        holder = previous.holder if previous is not None else None
        lacks = previous.lacks if previous is not None else set()
        await self.puller.resume(connection.holder, holder, has, lacks, settle=self._auto)
        if self._auto:
            for partition, offset in has.items():
                end = self.puller.cursor(partition)
                runs = previous.given(partition, offset) if previous is not None else [(offset + 1, end - 1)]
                connection.again += [(partition, first, last) for first, last in sorted(runs) if first <= last]

    async def take(self, connection: Connection, wait_s: float) -> list[Event]:
        """See ``Group.take``."""
        while connection.again:
            found = await take_again(self._log, self._topic, connection)
            events = [event for event in found if self.puller.handed_before(event)]
            if events:
                return events
        handed = await self.puller.pull(
            connection.limit,
            wait_s,
            holder=connection.holder,
            hold=True,
            held_max=None if self._auto else HELD_MAX,
        )
        events = [one.event for one in handed]
        connection.learn(events)
        # Its id does not tell whether the reader has an event that comes after later ones.
        connection.lacks = {
            (one.partition, one.offset) for one in events if one.offset <= connection.places.get(one.partition, -1)
        }
        connection.give(events)
        return events

    async def written(self, connection: Connection, events: list[Event]) -> int:
        """Ack what was written, where that is enough."""
        return await self.puller.settle(connection.holder, events) if self._auto else 0

    def leave(self, connection: Connection) -> None:
        """See ``Group.leave``; what was leased to it stays so until its reader is back or the lease is over."""
        self._members.present.discard(connection)


async def take_again(log: SqliteLog, topic: str, connection: Connection) -> list[Event]:
    """Return the next events that a reader was given before it was cut off, and does not have."""
    partition, first, last = connection.again.popleft()
    found = await log.fetch(topic, partition, first, min(connection.limit, last - first + 1))
    events = connection.fitting([event for event in found if event.offset <= last])
    if events and events[-1].offset < last:
        connection.again.appendleft((partition, events[-1].offset + 1, last))
    connection.give(events)
    return events
