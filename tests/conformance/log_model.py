"""The log as a plain-Python model: slow, obvious, and free of everything a backend has to be clever about.

It answers with the records of ``postbus.model`` and raises its errors. The one thing it does not decide is the
partition an event goes to: that is the backend's choice, and the model is told (``placed``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from postbus.model import (
    CommitResult,
    Conflict,
    Consumer,
    ConsumerLag,
    Cursor,
    Draft,
    Event,
    Gap,
    IdempotencyConflict,
    NotFound,
    OffsetOutOfRange,
    PartitionLag,
    ReadResult,
    Start,
    StartPolicy,
    StreamSettings,
    TrimResult,
)

__all__ = ["LogModel"]

Content = tuple[object, ...]


@dataclass
class ModelConsumer:
    """A reader: its start and its cursors."""

    start: Start
    cursors: list[Cursor]


@dataclass
class ModelStream:
    """A stream: all events ever appended (trimmed ones too) and from where on they are retained."""

    settings: StreamSettings
    epoch: int
    events: list[list[Event]]
    first: list[int]
    identities: dict[tuple[str, str], tuple[Content, int, int]] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)

    def high_water_mark(self, partition: int) -> int:
        return len(self.events[partition])


def content(draft: Draft) -> Content:
    """Return what two drafts of one identity have to agree on."""
    return (
        draft.topic,
        draft.source,
        draft.key,
        draft.payload_json,
        draft.metadata_json,
        draft.headers_json,
        draft.delivery_handle_json,
        draft.occurred_at_us,
    )


class LogModel:
    """What the log contract says, spelled out."""

    def __init__(self) -> None:
        self.streams: dict[str, ModelStream] = {}
        self.epochs: dict[str, int] = {}
        self.readers: dict[str, dict[str, ModelConsumer]] = {}
        self.now_us = 0

    # --- streams ------------------------------------------------------------------------------------------------------

    def ensure_stream(self, name: str, settings: StreamSettings) -> int:
        """Get or create; return how many times the name was made before."""
        known = self.streams.get(name)
        if known is None:
            epoch = self.epochs[name] = self.epochs.get(name, -1) + 1
            count = settings.partitions
            known = ModelStream(settings, epoch, [[] for _ in range(count)], [0] * count)
            self.streams[name] = known
            for reader in self.readers.setdefault(name, {}).values():
                reader.cursors = [Cursor(number, 0) for number in range(count)]
        elif known.settings != settings:
            raise Conflict("other settings")
        return known.epoch

    def delete_stream(self, name: str) -> None:
        del self.streams[self.known(name)]

    def known(self, name: str) -> str:
        if name not in self.streams:
            raise NotFound("stream")
        return name

    def stream(self, name: str, partition: int = 0) -> ModelStream:
        found = self.streams[self.known(name)]
        if not 0 <= partition < found.settings.partitions:
            raise NotFound("partition")
        return found

    def extents(self, name: str) -> list[tuple[int, int]]:
        """Return (first retained, high water mark) of each partition."""
        found = self.stream(name)
        return [(first, len(events)) for first, events in zip(found.first, found.events, strict=True)]

    # --- events -------------------------------------------------------------------------------------------------------

    def check_append(self, name: str, drafts: Sequence[Draft]) -> None:
        """Raise what an append of these drafts has to raise."""
        known = {identity: found[0] for identity, found in self.stream(name).identities.items()}
        for draft in drafts:
            if draft.native_id is None:
                continue
            identity = (draft.native_id, draft.variant)
            if known.setdefault(identity, content(draft)) != content(draft):
                raise IdempotencyConflict("other", stream=name, native_id=identity[0], variant=identity[1], offset=-1)

    def append(self, name: str, drafts: Sequence[Draft], placed: Sequence[int]) -> list[tuple[int, int, bool]]:
        """Append the drafts where the backend says it placed them; return (partition, offset, duplicate) of each."""
        self.check_append(name, drafts)
        stream = self.stream(name)
        answer = []
        for draft, partition in zip(drafts, placed, strict=True):
            identity = None if draft.native_id is None else (draft.native_id, draft.variant)
            if identity is not None and identity in stream.identities:
                answer.append((*stream.identities[identity][1:], True))
                continue
            if draft.key is not None:
                assert stream.keys.setdefault(draft.key, partition) == partition, "a key has one partition"
            offset = stream.high_water_mark(partition)
            stream.events[partition].append(self.event(name, draft, partition, offset))
            if identity is not None:
                stream.identities[identity] = (content(draft), partition, offset)
            answer.append((partition, offset, False))
        return answer

    def event(self, name: str, draft: Draft, partition: int, offset: int) -> Event:
        return Event(
            stream=name,
            partition=partition,
            offset=offset,
            topic=draft.topic,
            source=draft.source,
            variant=draft.variant,
            key=draft.key,
            payload_json=draft.payload_json,
            metadata_json=draft.metadata_json,
            headers_json=draft.headers_json,
            correlation_id=draft.correlation_id,
            native_id=draft.native_id,
            delivery_handle_json=draft.delivery_handle_json,
            occurred_at_us=self.now_us if draft.occurred_at_us is None else draft.occurred_at_us,
            created_at_us=self.now_us,
            trust=draft.trust,
        )

    def fetch(self, name: str, partition: int, offset: int, limit: int) -> list[Event]:
        stream = self.stream(name, partition)
        if offset < 0:
            raise OffsetOutOfRange("negative")
        start = max(offset, stream.first[partition])
        return stream.events[partition][start : start + limit]

    # --- readers ------------------------------------------------------------------------------------------------------

    def reader(self, name: str, consumer: str, partition: int = 0) -> ModelConsumer:
        self.known(name)
        if consumer not in self.readers[name]:
            raise NotFound("consumer")
        self.stream(name, partition)
        return self.readers[name][consumer]

    def place(self, name: str, start: Start, partition: int) -> int:
        """Return where a start policy puts a cursor."""
        stream = self.stream(name, partition)
        first, head = stream.first[partition], stream.high_water_mark(partition)
        if start.policy is StartPolicy.EARLIEST:
            return first
        if start.policy is StartPolicy.AT_OFFSET:
            assert start.offset is not None
            if not 0 <= start.offset <= head:
                raise OffsetOutOfRange("outside the stream")
            return max(start.offset, first)
        if start.policy is StartPolicy.AT_TIME:
            assert start.time_us is not None
            retained = stream.events[partition][first:]
            return min((event.offset for event in retained if event.occurred_at_us >= start.time_us), default=head)
        return head

    def ensure_consumer(self, name: str, consumer: str, start: Start | None) -> Consumer:
        stream = self.stream(name)
        known = self.readers[name].get(consumer)
        if known is None:
            pinned = start or Start()
            places = [self.place(name, pinned, number) for number in range(stream.settings.partitions)]
            known = ModelConsumer(pinned, [Cursor(number, place) for number, place in enumerate(places)])
            self.readers[name][consumer] = known
        elif start is not None and start != known.start:
            raise Conflict("another start")
        return self.consumer(name, consumer)

    def consumer(self, name: str, consumer: str) -> Consumer:
        known = self.reader(name, consumer)
        return Consumer(consumer, name, known.start, 0, tuple(known.cursors), 0, 0)

    def consumers(self, name: str) -> list[Consumer]:
        self.known(name)
        return [self.consumer(name, consumer) for consumer in sorted(self.readers[name])]

    def read(self, name: str, consumer: str, limit: int, partition: int) -> ReadResult:
        cursor = self.reader(name, consumer, partition).cursors[partition]
        events = self.fetch(name, partition, cursor.next_offset, limit)
        return ReadResult(self.consumer(name, consumer), events, self.stream(name).high_water_mark(partition))

    def commit(self, name: str, consumer: str, through: int, partition: int) -> CommitResult:
        known = self.reader(name, consumer, partition)
        cursor = known.cursors[partition]
        if not 0 <= through < self.stream(name).high_water_mark(partition):
            raise OffsetOutOfRange("outside the stream")
        moved = through >= cursor.next_offset
        if moved:
            cursor = known.cursors[partition] = Cursor(partition, through + 1, through, cursor.skipped)
        return CommitResult(moved, cursor.committed, cursor.next_offset)

    def reset(self, name: str, consumer: str, start: Start, partition: int | None) -> Consumer:
        known = self.reader(name, consumer, partition or 0)
        numbers = range(len(known.cursors)) if partition is None else [partition]
        places = {number: self.place(name, start, number) for number in numbers}
        for number, place in places.items():
            # A reset is as if everything below the new place had been consumed.
            known.cursors[number] = Cursor(number, place, place - 1, known.cursors[number].skipped)
        return self.consumer(name, consumer)

    def delete_consumer(self, name: str, consumer: str) -> bool:
        self.known(name)
        return self.readers[name].pop(consumer, None) is not None

    def lag(self, name: str, consumer: str) -> ConsumerLag:
        rows = []
        for cursor in self.reader(name, consumer).cursors:
            head = self.stream(name).high_water_mark(cursor.partition)
            rows.append(PartitionLag(cursor.partition, cursor.committed, head, head - cursor.next_offset))
        return ConsumerLag(consumer, name, self.stream(name).epoch, tuple(rows))

    # --- retention ----------------------------------------------------------------------------------------------------

    def target(self, name: str, partition: int, before: int | None) -> int:
        """Return the first offset that has to stay."""
        stream = self.stream(name, partition)
        first, head = stream.first[partition], stream.high_water_mark(partition)
        if before is not None:
            if not 0 <= before <= head:
                raise OffsetOutOfRange("outside the stream")
            return max(before, first)
        target, bounds = first, stream.settings.retention
        if bounds.count is not None:
            target = max(target, head - bounds.count)
        if bounds.age_s is not None:
            oldest_us = self.now_us - bounds.age_s * 1_000_000
            while target < head and stream.events[partition][target].created_at_us < oldest_us:
                target += 1
        return target

    def trim(self, name: str, before: int | None, partition: int | None) -> TrimResult:
        """Trim; ``held_back_by`` names everyone whose cursor is below what was asked for."""
        stream = self.stream(name, partition or 0)
        numbers = range(stream.settings.partitions) if partition is None else [partition]
        targets = {number: self.target(name, number, before) for number in numbers}
        removed, holders, gaps = 0, set(), []
        for number, target in targets.items():
            floor = target
            for consumer, reader in self.readers[name].items():
                cursor = reader.cursors[number]
                if cursor.next_offset >= target:
                    continue
                if stream.settings.retention_beats_consumers:
                    missed = target - cursor.next_offset
                    gaps.append(Gap(consumer, number, missed))
                    reader.cursors[number] = Cursor(number, target, cursor.committed, cursor.skipped + missed)
                else:
                    holders.add(consumer)
                    floor = min(floor, cursor.next_offset)
            removed += floor - stream.first[number]
            stream.first[number] = floor
        return TrimResult(removed, tuple(stream.first), tuple(sorted(holders)), tuple(gaps))
