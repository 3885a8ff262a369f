"""A state machine that does to a log whatever a caller may do and compares every answer with the model's."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from postbus.log.contract import Log
from postbus.model import Consumer, Draft, PostbusError, ReadResult, Retention, Start, StreamSettings, TrimResult
from tests.conformance.fake_clock import FakeClock
from tests.conformance.log_model import LogModel
from tests.conformance.log_suite import EARLIEST, LATEST, LogSuite, at_offset, at_time

__all__ = ["LogMachine"]

T = TypeVar("T")

# Ages never come out equal to a bound: the clock moves by whole seconds and the bound is a half.
STREAMS = {
    "plain": StreamSettings(),
    "wide": StreamSettings(partitions=3),
    "count": StreamSettings(retention=Retention(count=3)),
    "beats": StreamSettings(retention=Retention(count=3), retention_beats_consumers=True),
    "aged": StreamSettings(partitions=2, retention=Retention(age_s=10.5)),
    "young": StreamSettings(partitions=2, retention=Retention(age_s=10.5), retention_beats_consumers=True),
}

# Few names, so that a short history does many things to the same stream and the same reader.
streams = st.integers(0, 1)
consumers = st.sampled_from(["a", "b"])
partitions = st.sampled_from([0, 0, 0, 1, 1, 2])
choices = st.integers(0, 10**6)  # scaled to what the log holds at that moment

drafts = st.builds(
    Draft,
    topic=st.sampled_from(["t.a", "t.b"]),
    source=st.just("machine"),
    payload_json=st.sampled_from([b"1", b" 2 ", '"é"'.encode()]),
    variant=st.sampled_from(["", "", "v"]),
    key=st.sampled_from([None, None, "k1", "k2", "k3"]),
    headers_json=st.sampled_from([None, None, None, b'{"h":"1"}']),
    correlation_id=st.sampled_from([None, "c"]),
    native_id=st.sampled_from([None, None, None, None, "n1", "n2", "n3"]),
    occurred_at_us=st.none() | st.integers(-5, 20),
)


def outcome(call: Callable[[], T]) -> T | type[PostbusError]:
    """Return what the call gives, or the class of the error it raises."""
    try:
        return call()
    except PostbusError as error:
        return type(error)


def timeless(value: object) -> object:
    """Leave out what the model does not keep: when a consumer was made and changed, and the number of its epoch."""
    if isinstance(value, Consumer):
        return msgspec.structs.replace(value, epoch=0, created_at_us=0, updated_at_us=0)
    if isinstance(value, ReadResult):
        return (timeless(value.consumer), value.events, value.high_water_mark)
    if isinstance(value, list):
        return [timeless(item) for item in value]
    return value


class LogMachine(RuleBasedStateMachine):
    """Runs on any kind; ``kind`` says which."""

    kind: ClassVar[LogSuite]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="postbus-machine-"))
        self.clock = FakeClock()
        self.runner = asyncio.Runner()
        self.model = LogModel()
        self.namespace = f"m{uuid4().hex[:12]}"
        self.first_epochs: dict[str, int] = {}
        self.leaves: list[str] = []
        self.sent: list[Draft] = []
        self.other: Log | None = None
        self.log: Log = self.run(self.kind.open(self.folder, self.clock))

    def teardown(self) -> None:
        try:
            for stream in self.model.streams:
                self.check_events(stream)
        finally:
            for log in (self.log, self.other):
                if log is not None:
                    self.run(log.close())
            self.runner.close()
            shutil.rmtree(self.folder)

    # --- comparing ----------------------------------------------------------------------------------------------------

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def name(self, leaf: str) -> str:
        return f"{self.namespace}.default.{leaf}"

    def agree(self, call: Coroutine[Any, Any, object], expected: Callable[[], object]) -> None:
        self.model.now_us = self.clock.now_us()
        assert timeless(outcome(lambda: self.run(call))) == timeless(outcome(expected))

    def leaf(self, which: int) -> str:
        return self.leaves[which % len(self.leaves)]

    def head(self, stream: str, partition: int) -> int:
        known = self.model.streams.get(stream)
        return len(known.events[partition]) if known and partition < len(known.events) else 0

    def check_events(self, stream: str) -> None:
        for partition in range(len(self.model.streams[stream].events)):
            call = self.log.fetch(stream, partition, 0, 10_000)
            self.agree(call, partial(self.model.fetch, stream, partition, 0, 10_000))

    @invariant()
    def extents_and_readers_agree(self) -> None:
        for stream in self.model.streams:
            stats = self.run(self.log.get_stream_stats(stream))
            extents = [(part.first_offset, part.high_water_mark) for part in stats.partitions]
            assert extents == self.model.extents(stream)
            assert all(part.bytes > 0 if part.count else part.bytes == 0 for part in stats.partitions)
            self.agree(self.log.consumers(stream), partial(self.model.consumers, stream))

    # --- streams and time ---------------------------------------------------------------------------------------------

    @initialize(
        leaves=st.lists(st.sampled_from(sorted(STREAMS)), min_size=1, max_size=2, unique=True),
        batch=st.lists(drafts, max_size=8),
        reader=st.booleans(),
    )
    def make_streams(self, leaves: list[str], batch: list[Draft], reader: bool) -> None:
        self.leaves = leaves
        for which in range(len(leaves)):
            self.ensure_stream(which)
            self.append(which, batch)
            if reader:
                self.ensure_consumer(which, "a", "earliest", 0)

    @rule(which=streams)
    def ensure_stream(self, which: int) -> None:
        leaf = self.leaf(which)
        stream = self.run(self.log.ensure_stream(self.name(leaf), STREAMS[leaf]))
        times = self.model.ensure_stream(self.name(leaf), STREAMS[leaf])
        assert stream.settings == STREAMS[leaf]
        assert stream.epoch - times == self.first_epochs.setdefault(leaf, stream.epoch)

    @rule(which=streams, other=st.sampled_from(sorted(STREAMS)))
    def ensure_stream_otherwise(self, which: int, other: str) -> None:
        leaf = self.leaf(which)
        if leaf != other and self.name(leaf) in self.model.streams:
            self.agree(
                self.log.ensure_stream(self.name(leaf), STREAMS[other]),
                partial(self.model.ensure_stream, self.name(leaf), STREAMS[other]),
            )

    @rule(which=streams, sure=st.integers(0, 2))
    def delete_stream(self, which: int, sure: int) -> None:
        stream = self.name(self.leaf(which))
        if sure == 0:
            self.agree(self.log.delete_stream(stream), partial(self.model.delete_stream, stream))

    @rule(seconds=st.integers(-5, 20))
    def advance(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.kind.features.durable)
    @rule()
    def reopen(self) -> None:
        self.run(self.log.close())
        self.log = self.run(self.kind.open(self.folder, self.clock))

    @precondition(lambda self: self.kind.features.multi_process)
    @rule()
    def switch(self) -> None:
        """Go on through another log on the same data, which has to have noticed everything."""
        other = self.other or self.run(self.kind.open(self.folder, self.clock))
        self.log, self.other = other, self.log

    # --- events -------------------------------------------------------------------------------------------------------

    @rule(which=streams, batch=st.lists(drafts, max_size=5))
    def append(self, which: int, batch: list[Draft]) -> None:
        stream = self.name(self.leaf(which))
        if not self.kind.features.atomic_batches:
            batch = batch[:1]
        refused = outcome(partial(self.model.check_append, stream, batch))
        receipts = outcome(lambda: self.run(self.log.append(stream, batch)))
        if not isinstance(receipts, list):
            assert receipts == refused
            return
        self.sent += [draft for draft in batch if draft.native_id is not None]
        self.model.now_us = self.clock.now_us()
        expected = self.model.append(stream, batch, [receipt.partition for receipt in receipts])
        assert [(receipt.partition, receipt.offset, receipt.duplicate) for receipt in receipts] == expected

    @rule(which=streams, choice=choices, changed=st.booleans())
    def append_again(self, which: int, choice: int, changed: bool) -> None:
        """Repeat what was appended at some time, as it was or changed."""
        if self.sent:
            draft = self.sent[choice % len(self.sent)]
            self.append(which, [msgspec.structs.replace(draft, source="other") if changed else draft])

    @rule(which=streams, partition=partitions, choice=choices, limit=st.integers(1, 20))
    def fetch(self, which: int, partition: int, choice: int, limit: int) -> None:
        stream = self.name(self.leaf(which))
        offset = choice % (self.head(stream, partition) + 3) - 1
        self.agree(
            self.log.fetch(stream, partition, offset, limit),
            partial(self.model.fetch, stream, partition, offset, limit),
        )

    # --- readers ------------------------------------------------------------------------------------------------------

    def start(self, policy: str, stream: str, choice: int) -> Start:
        """Return a start whose argument lies in or just outside the stream; all partitions may refuse an offset."""
        if policy == "at_offset":
            return at_offset(choice % (max(self.head(stream, number) for number in range(3)) + 3) - 1)
        if policy == "at_time":
            return at_time(choice % 28 - 6 if choice % 3 else self.clock.now_us() - choice % 30 * 1_000_000)
        return EARLIEST if policy == "earliest" else LATEST

    @rule(
        which=streams,
        consumer=consumers,
        choice=choices,
        policy=st.sampled_from(["none", "earliest", "latest", "at_offset", "at_time"]),
    )
    def ensure_consumer(self, which: int, consumer: str, policy: str, choice: int) -> None:
        stream = self.name(self.leaf(which))
        start = None if policy == "none" else self.start(policy, stream, choice)
        self.agree(
            self.log.ensure_consumer(stream, consumer, start),
            partial(self.model.ensure_consumer, stream, consumer, start),
        )

    @rule(which=streams, consumer=consumers, limit=st.integers(1, 20), partition=partitions)
    def read(self, which: int, consumer: str, limit: int, partition: int) -> None:
        stream = self.name(self.leaf(which))
        self.agree(
            self.log.read(stream, consumer, limit, partition),
            partial(self.model.read, stream, consumer, limit, partition),
        )

    @rule(which=streams, consumer=consumers, choice=choices, partition=partitions)
    def commit(self, which: int, consumer: str, choice: int, partition: int) -> None:
        stream = self.name(self.leaf(which))
        through = choice % (self.head(stream, partition) + 3) - 1
        self.agree(
            self.log.commit(stream, consumer, through, partition),
            partial(self.model.commit, stream, consumer, through, partition),
        )

    @rule(
        which=streams,
        consumer=consumers,
        choice=choices,
        policy=st.sampled_from(["earliest", "latest", "at_offset", "at_time"]),
        partition=st.none() | partitions,
    )
    def reset(self, which: int, consumer: str, policy: str, choice: int, partition: int | None) -> None:
        stream = self.name(self.leaf(which))
        start = self.start(policy, stream, choice)
        self.agree(
            self.log.reset(stream, consumer, start, partition),
            partial(self.model.reset, stream, consumer, start, partition),
        )

    @rule(which=streams, choice=choices)
    def reset_to_a_time(self, which: int, choice: int) -> None:
        self.reset(which, "a", "at_time", choice, None)

    @rule(which=streams, consumer=consumers, sure=st.integers(0, 2))
    def delete_consumer(self, which: int, consumer: str, sure: int) -> None:
        stream = self.name(self.leaf(which))
        if sure == 0:
            self.agree(
                self.log.delete_consumer(stream, consumer), partial(self.model.delete_consumer, stream, consumer)
            )

    @rule(which=streams, consumer=consumers)
    def lag(self, which: int, consumer: str) -> None:
        stream = self.name(self.leaf(which))
        found = outcome(lambda: self.run(self.log.get_consumer_lag(stream, consumer)))
        if not isinstance(found, type):
            found = msgspec.structs.replace(found, epoch=found.epoch - self.first_epochs[self.leaf(which)])
        assert found == outcome(partial(self.model.lag, stream, consumer))

    # --- retention ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.kind.features.retention)
    @rule(which=streams, choice=choices, by_bounds=st.booleans(), partition=st.none() | partitions)
    def trim(self, which: int, choice: int, by_bounds: bool, partition: int | None) -> None:
        stream = self.name(self.leaf(which))
        before = None if by_bounds else choice % (self.head(stream, partition or 0) + 3) - 1
        self.model.now_us = self.clock.now_us()
        expected = outcome(partial(self.model.trim, stream, before, partition))
        result = outcome(lambda: self.run(self.log.trim(stream, before, partition)))
        if not isinstance(expected, TrimResult) or not isinstance(result, TrimResult):
            assert result == expected
            return
        assert (result.removed, result.first_offsets) == (expected.removed, expected.first_offsets)
        assert sorted(map(repr, result.gaps)) == sorted(map(repr, expected.gaps))
        # Whoever is named held it back, and somebody is named if anybody did.
        assert set(result.held_back_by) <= set(expected.held_back_by)
        assert bool(result.held_back_by) == bool(expected.held_back_by)
