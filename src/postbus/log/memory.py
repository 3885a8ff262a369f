"""The log in memory: the whole contract, nothing on disk. Same rules, same bytes, same chain as the embedded store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from postbus.clock import Clock, SystemClock
from postbus.log.cursors import Change, CursorLog, check_partition, check_range, held_back, no_stream, passed, restarted
from postbus.log.heads import Head, Identity, choose_partition, empty_head, resolve_identities
from postbus.log.retention import retention_target
from postbus.log.settings import accept, check_settings
from postbus.log.tail import Waiters
from postbus.model import (
    Durability,
    Event,
    Gap,
    PartitionStats,
    Receipt,
    Stream,
    StreamSettings,
    StreamStats,
    TrimResult,
)
from postbus.topics import check_stream_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from postbus.model import Consumer, Draft

__all__ = ["MemoryLog"]


class _Partition:
    """The events of one partition from ``first`` on; ``base_bytes`` is the size of what was trimmed."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.first = 0
        self.base_bytes = 0
        self.events: list[Event] = []
        self.sizes: list[int] = []

    def drop_before(self, offset: int) -> int:
        count = max(offset - self.first, 0)
        if count:
            self.base_bytes = self.sizes[count - 1]
            del self.events[:count], self.sizes[:count]
            self.first += count
        return count


class _Stream:
    """One stream; also the extents its consumers' rules look at."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.partitions = [_Partition(empty_head(stream, number)) for number in range(stream.settings.partitions)]
        self.identities: dict[tuple[str, str], Identity] = {}
        self.turn = 0

    def first(self, partition: int) -> int:
        return self.partitions[partition].first

    def head(self, partition: int) -> int:
        return self.partitions[partition].head.next_offset

    def at_time(self, partition: int, time_us: int) -> int:
        found = (event.offset for event in self.partitions[partition].events if event.occurred_at_us >= time_us)
        return next(found, self.head(partition))

    # What retention asks (see ``retention.py``).

    def size_through(self, partition: int, offset: int) -> int:
        kept = self.partitions[partition]
        return kept.base_bytes if offset < kept.first else kept.sizes[offset - kept.first]

    def first_created_since(self, partition: int, time_us: int) -> int:
        found = (event.offset for event in self.partitions[partition].events if event.created_at_us >= time_us)
        return next(found, self.head(partition))


class MemoryLog(CursorLog):
    """A log that lives as long as the object. Every method runs to its end without giving way, so each is atomic."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._streams: dict[str, _Stream] = {}
        self._epochs: dict[str, int] = {}
        self._consumers: dict[tuple[str, str], Consumer] = {}
        self._waiters = Waiters()

    async def ensure_stream(self, name: str, settings: StreamSettings | None = None) -> Stream:
        """See ``Log.ensure_stream``."""
        check_stream_name(name)
        if settings is not None:
            check_settings(settings)
        known = self._streams.get(name)
        if known is not None:
            return accept(known.stream, settings)
        epoch = self._epochs[name] = self._epochs.get(name, -1) + 1
        made = _Stream(Stream(name, settings or StreamSettings(), epoch, self._clock.now_us()))
        self._streams[name] = made
        for key, consumer in list(self._consumers.items()):
            if key[0] == name:
                self._consumers[key] = restarted(consumer, made.stream)
        return made.stream

    async def streams(self) -> list[Stream]:
        """See ``Log.streams``."""
        return [self._streams[name].stream for name in sorted(self._streams)]

    async def delete_stream(self, name: str) -> None:
        """See ``Log.delete_stream``."""
        self._known(name)
        del self._streams[name]
        self._waiters.wake_all()

    async def append(self, stream: str, drafts: Sequence[Draft]) -> list[Receipt]:
        """See ``Log.append``."""
        state = self._known(stream)
        verdicts, digests = resolve_identities(
            stream, drafts, lambda native, variant: state.identities.get((native, variant))
        )
        now = self._clock.now_us()
        receipts: list[Receipt] = []
        for index, (draft, verdict) in enumerate(zip(drafts, verdicts, strict=True)):
            if verdict is None:
                receipts.append(self._put(state, draft, digests.get(index), now))
            elif isinstance(verdict, Identity):
                receipts.append(
                    _receipt(stream, verdict.partition, verdict.offset, verdict.created_at_us, duplicate=True)
                )
            else:
                first = receipts[verdict]
                receipts.append(_receipt(stream, first.partition, first.offset, first.created_at_us, duplicate=True))
        for partition in {receipt.partition for receipt in receipts if not receipt.duplicate}:
            self._waiters.wake((stream, partition))
        return receipts

    def _put(self, state: _Stream, draft: Draft, digest: bytes | None, now_us: int) -> Receipt:
        number = choose_partition(draft, len(state.partitions), state.turn)
        state.turn += draft.key is None
        kept = state.partitions[number]
        offset = kept.head.next_offset
        made: list[tuple[Any, ...]] = []
        kept.head.take([draft], now_us, 0, [], made)
        kept.events.append(Event(state.stream.name, *made[0]))
        kept.sizes.append(kept.head.size)
        if draft.native_id is not None and digest is not None:
            state.identities[draft.native_id, draft.variant] = Identity(number, offset, now_us, digest)
        return _receipt(state.stream.name, number, offset, now_us, duplicate=False)

    async def fetch(self, stream: str, partition: int, offset: int, limit: int = 100) -> list[Event]:
        """See ``Log.fetch``."""
        state = self._known(stream)
        check_partition(state.stream, partition)
        check_range(offset, limit)
        kept = state.partitions[partition]
        start = max(offset - kept.first, 0)
        return kept.events[start : start + limit]

    async def wait(self, stream: str, partition: int, offset: int, timeout_s: float) -> bool:
        """See ``Log.wait``."""
        deadline = time.monotonic() + timeout_s
        while True:
            _, head = await self._extent(stream, partition)
            left = deadline - time.monotonic()
            if head > offset or left <= 0:
                return head > offset
            await self._waiters.wait((stream, partition), lambda: False, left)

    async def consumers(self, stream: str | None = None) -> list[Consumer]:
        """See ``Log.consumers``."""
        known = sorted(key for key in self._consumers if key[0] in self._streams)
        return [self._consumers[key] for key in known if stream in (None, key[0])]

    async def get_stream_stats(self, stream: str) -> StreamStats:
        """See ``Log.get_stream_stats``."""
        state = self._known(stream)
        rows = [
            PartitionStats(
                number, kept.first, kept.head.next_offset, kept.head.size - kept.base_bytes, kept.head.chain.hex()
            )
            for number, kept in enumerate(state.partitions)
        ]
        return StreamStats(state.stream, tuple(rows))

    async def trim(self, stream: str, before: int | None = None, partition: int | None = None) -> TrimResult:
        """See ``Log.trim``."""
        state = self._known(stream)
        settings = state.stream.settings
        numbers = range(settings.partitions) if partition is None else [check_partition(state.stream, partition)]
        now = self._clock.now_us()
        targets = {number: retention_target(state, number, before, now) for number in numbers}
        readers = await self.consumers(stream)
        holders: set[str] = set()
        removed = 0
        for number, target in targets.items():
            floor, names = held_back(readers, number, target)
            if settings.retention_beats_consumers:
                floor, names = target, []
            holders.update(names)
            removed += state.partitions[number].drop_before(floor)
        gaps = self._clamp(state, readers, now)
        self._forget_identities(state, now)
        firsts = tuple(kept.first for kept in state.partitions)
        return TrimResult(removed, firsts, tuple(sorted(holders)), tuple(gaps))

    def _clamp(self, state: _Stream, readers: list[Consumer], now_us: int) -> list[Gap]:
        gaps: list[Gap] = []
        firsts = {number: kept.first for number, kept in enumerate(state.partitions)}
        for reader in readers:
            moved, missed = passed(reader, firsts, now_us)
            self._consumers[reader.stream, reader.id] = moved
            gaps += [Gap(reader.id, number, count) for number, count in missed.items()]
        return gaps

    @staticmethod
    def _forget_identities(state: _Stream, now_us: int) -> None:
        window = state.stream.settings.identity_window_s
        if window is not None:
            cutoff = now_us - int(window * 1e6)
            state.identities = {name: who for name, who in state.identities.items() if who.created_at_us >= cutoff}

    async def close(self) -> None:
        """See ``Log.close``; what was in memory stays readable."""

    async def _change(self, stream: str, consumer: str, rule: Callable[..., Change], *args: object) -> Any:
        state = self._known(stream)
        key = (stream, consumer)
        change = rule(self._consumers.get(key), state, self._clock.now_us(), consumer, *args)
        if change.consumer is None:
            self._consumers.pop(key, None)
        else:
            self._consumers[key] = change.consumer
        return change.answer

    async def _consumer(self, stream: str, consumer: str) -> Consumer | None:
        self._known(stream)
        return self._consumers.get((stream, consumer))

    async def _stream(self, name: str) -> Stream:
        return self._known(name).stream

    async def _extent(self, stream: str, partition: int) -> tuple[int, int]:
        state = self._known(stream)
        check_partition(state.stream, partition)
        return state.first(partition), state.head(partition)

    def _known(self, name: str) -> _Stream:
        try:
            return self._streams[name]
        except KeyError:
            raise no_stream(name) from None


def _receipt(stream: str, partition: int, offset: int, created_at_us: int, *, duplicate: bool) -> Receipt:
    return Receipt(stream, partition, offset, duplicate, Durability.RELAXED, created_at_us)
