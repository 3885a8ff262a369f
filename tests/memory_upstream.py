"""A remote log in the memory of this process: what several nodes of a test follow, with outages at will."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from postbus.clock import Clock
from postbus.log.address import REMOTES
from postbus.log.cursors import no_stream
from postbus.log.heads import Identity, choose_partition, resolve_identities
from postbus.model import Draft, Durability, Event, Receipt, Stream, StreamSettings, Unreachable

__all__ = ["MemoryServer", "MemoryUpstream", "serve"]


@dataclass
class Partition:
    first: int = 0
    events: list[Event] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    @property
    def head(self) -> int:
        return self.first + len(self.events)


@dataclass
class Life:
    stream: Stream
    partitions: list[Partition]
    identities: dict[tuple[str, str], Identity] = field(default_factory=dict)
    turn: int = 0


class MemoryServer:
    """The far side. ``down`` refuses every call; ``lose_ack`` does the next append and then does not answer."""

    def __init__(self) -> None:
        self.lives: dict[str, Life] = {}
        self.epochs: dict[str, int] = {}
        self.down = False
        self.lose_ack = False
        self.before_append: Callable[[], Awaitable[None]] | None = None
        self._grown: dict[asyncio.AbstractEventLoop, asyncio.Condition] = {}
        self.clients: list[MemoryUpstream] = []
        self.calls: list[str] = []

    @property
    def grown(self) -> asyncio.Condition:
        """What those wait for who use the server on this event loop."""
        return self._grown.setdefault(asyncio.get_running_loop(), asyncio.Condition())

    def stop(self) -> None:
        self.down = True

    async def restart(self) -> None:
        self.down = False
        async with self.grown:
            self.grown.notify_all()
        for client in self.clients:
            for told in client.watchers:
                told()


class MemoryUpstream:
    """One node's way to the server. See ``Upstream``."""

    def __init__(self, server: MemoryServer, clock: Callable[[], int], url: str = "test://memory/postbus") -> None:
        self.server = server
        self.url = url
        self.answer_s = 5.0
        self.watchers: list[Callable[[], None]] = []
        self._now_us = clock
        server.clients.append(self)

    async def _reach(self, call: str) -> None:
        self.server.calls.append(call)
        await asyncio.sleep(0)
        if self.server.down:
            raise Unreachable("the remote is down")

    def _life(self, stream: Stream) -> Life:
        life = self.server.lives.get(stream.name)
        if life is None or life.stream.epoch != stream.epoch:
            raise no_stream(stream.name)
        return life

    async def ensure_stream(self, name: str, settings: StreamSettings | None = None) -> Stream:
        await self._reach("ensure_stream")
        life = self.server.lives.get(name)
        if life is None:
            epoch = self.server.epochs[name] = self.server.epochs.get(name, -1) + 1
            stream = Stream(name, settings or StreamSettings(), epoch, self._now_us())
            life = Life(stream, [Partition() for _ in range(stream.settings.partitions)])
            self.server.lives[name] = life
        return life.stream

    async def streams(self) -> list[Stream]:
        await self._reach("streams")
        return [self.server.lives[name].stream for name in sorted(self.server.lives)]

    async def delete_stream(self, name: str) -> None:
        await self._reach("delete_stream")
        if self.server.lives.pop(name, None) is None:
            raise no_stream(name)
        async with self.server.grown:
            self.server.grown.notify_all()

    async def append(
        self,
        stream: Stream,
        drafts: Sequence[Draft],
        ids: Sequence[str],
        now_us: int,
        partition: int | None = None,
    ) -> list[Receipt]:
        if self.server.before_append is not None:
            await self.server.before_append()
        await self._reach("append")
        life = self._life(stream)
        verdicts, digests = resolve_identities(
            stream.name, drafts, lambda native_id, variant: life.identities.get((native_id, variant))
        )
        receipts: list[Receipt] = []
        for number, (draft, verdict) in enumerate(zip(drafts, verdicts, strict=True)):
            if verdict is not None:
                first = verdict if isinstance(verdict, Identity) else receipts[verdict]
                place = (first.partition, first.offset)
                receipts.append(Receipt(stream.name, *place, True, Durability.RELAXED, first.created_at_us))
                continue
            index = choose_partition(draft, len(life.partitions), life.turn) if partition is None else partition
            life.turn += 1
            kept = life.partitions[index]
            offset = kept.head
            kept.events.append(_event(stream.name, index, offset, draft, now_us))
            kept.ids.append(ids[number])
            if draft.native_id is not None:
                found = Identity(index, offset, now_us, digests[number])
                life.identities[draft.native_id, draft.variant] = found
            receipts.append(Receipt(stream.name, index, offset, False, Durability.RELAXED, now_us))
        async with self.server.grown:
            self.server.grown.notify_all()
        if self.server.lose_ack:
            self.server.lose_ack = False
            raise Unreachable("the answer was lost")
        return receipts

    async def find(self, stream: Stream, ids: Sequence[str], since: Sequence[int]) -> dict[str, tuple[int, int]]:
        await self._reach("find")
        found: dict[str, tuple[int, int]] = {}
        for index, partition in enumerate(self._life(stream).partitions):
            for place, name in enumerate(partition.ids):
                if name in ids and partition.first + place >= since[index]:
                    found[name] = (index, partition.first + place)
        return found

    async def fetch(self, stream: Stream, partition: int, offset: int, limit: int) -> list[Event]:
        await self._reach("fetch")
        kept = self._life(stream).partitions[partition]
        start = max(offset - kept.first, 0)
        return kept.events[start : start + limit]

    async def extents(self, stream: Stream) -> list[tuple[int, int]]:
        await self._reach("extents")
        return [(partition.first, partition.head) for partition in self._life(stream).partitions]

    async def wait(self, stream: Stream, partition: int, offset: int, timeout_s: float) -> bool:
        await self._reach("wait")

        def changed() -> bool:
            if self.server.down:
                raise Unreachable("the remote went down")
            return self._life(stream).partitions[partition].head > offset

        try:
            async with asyncio.timeout(timeout_s), self.server.grown:
                await self.server.grown.wait_for(changed)
        except TimeoutError:
            return False
        return True

    async def trim(self, stream: Stream, partition: int, before: int) -> None:
        await self._reach("trim")
        kept = self._life(stream).partitions[partition]
        gone = max(before - kept.first, 0)
        del kept.events[:gone], kept.ids[:gone]
        kept.first += gone

    def watch(self, came_up: Callable[[], None]) -> None:
        self.watchers.append(came_up)

    async def close(self) -> None:
        if self in self.server.clients:
            self.server.clients.remove(self)


def _event(stream: str, partition: int, offset: int, draft: Draft, now_us: int) -> Event:
    return Event(
        stream,
        partition,
        offset,
        draft.topic,
        draft.source,
        draft.variant,
        draft.key,
        draft.payload_json,
        draft.metadata_json,
        draft.headers_json,
        draft.correlation_id,
        draft.native_id,
        draft.delivery_handle_json,
        now_us if draft.occurred_at_us is None else draft.occurred_at_us,
        now_us,
        draft.trust,
    )


# --- by URL -----------------------------------------------------------------------------------------------------------

SERVERS: dict[str, MemoryServer] = {}


async def _open(url: str, clock: Clock, folder: str) -> MemoryUpstream:
    del folder
    return MemoryUpstream(SERVERS[urlsplit(url).netloc], clock.now_us, url)


REMOTES["test"] = _open


def serve() -> tuple[MemoryServer, str]:
    """Start a server; return it with the address that ``open_log`` takes, to which ``?data=folder`` is added."""
    server = MemoryServer()
    name = f"memory-{len(SERVERS)}"
    SERVERS[name] = server
    return server, f"test://{name}/postbus"
