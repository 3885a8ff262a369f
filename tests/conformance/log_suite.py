"""The ground of the log's conformance suite: features, hooks, and the log under test with its helpers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import msgspec
import pytest
import pytest_asyncio

from postbus.clock import Clock
from postbus.log.contract import Log
from postbus.model import Draft, Durability, Event, PartitionStats, Receipt, Start, StartPolicy, StreamSettings
from tests.conformance.fake_clock import FakeClock
from tests.faults.campaign import FULL

__all__ = ["EARLIEST", "LATEST", "Case", "LogFeatures", "LogSuite", "at_offset", "at_time", "batch", "fact"]

EARLIEST = Start(policy=StartPolicy.EARLIEST)
LATEST = Start(policy=StartPolicy.LATEST)


@dataclass(frozen=True, kw_only=True)
class LogFeatures:
    """What a kind of log promises beyond the contract; what it does not declare is skipped, never weakened."""

    durability: Durability  # what its receipts say
    durable: bool  # everything survives close and open
    atomic_batches: bool = True  # a refused append leaves nothing of its batch
    clock: bool = True  # wall time comes from the clock it was opened with
    retention: bool = True  # trim by age, bytes and count, and by offset
    identity_window: bool = True  # forgets identities older than the stream's window
    audit: bool = False  # keeps a row of every move of a cursor, and ``audit`` reads them
    threads: bool = False  # one log object serves event loops in several threads
    multi_process: bool = False  # several logs, also in other processes, share the same data
    pace: int = 1  # of that many rounds of a long test one is run, unless the campaign is a full one


def at_offset(offset: int) -> Start:
    return Start(policy=StartPolicy.AT_OFFSET, offset=offset)


def at_time(time_us: int) -> Start:
    return Start(policy=StartPolicy.AT_TIME, time_us=time_us)


def fact(payload: object = 0, **fields: Any) -> Draft:
    """Return a draft; bytes are taken as the payload's JSON as it is."""
    raw = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
    return Draft(**{"topic": "orders.created", "source": "suite", "payload_json": raw, **fields})


def batch(count: int, first: int = 0, **fields: Any) -> list[Draft]:
    """Return ``count`` drafts whose payloads are numbered from ``first``."""
    return [fact(number, **fields) for number in range(first, first + count)]


@dataclass
class Case:
    """One log under test, in a namespace of its own so that a shared server can stay as it is between tests."""

    log: Log
    clock: FakeClock
    features: LogFeatures
    open: Callable[[], Awaitable[Log]]
    url: str | None
    namespace: str = field(default_factory=lambda: f"t{uuid4().hex[:12]}")
    opened: list[Log] = field(default_factory=list)

    @property
    def stream(self) -> str:
        return self.name("orders")

    def name(self, leaf: str, tenant: str = "default") -> str:
        return f"{self.namespace}.{tenant}.{leaf}"

    def needs(self, feature: str) -> None:
        """Skip the test when the kind does not declare the feature."""
        if not getattr(self.features, feature):
            pytest.skip(f"this kind does not declare {feature}")

    def rounds(self, count: int) -> range:
        """Return the turns of a long test."""
        return range(count if FULL else max(count // self.features.pace, 1))

    async def make(self, leaf: str = "orders", **settings: Any) -> str:
        """Create a stream and return its name."""
        stream = await self.log.ensure_stream(self.name(leaf), StreamSettings(**settings))
        return stream.name

    async def filled(self, count: int, leaf: str = "orders", **settings: Any) -> str:
        """Create a stream with ``count`` events and return its name."""
        stream = await self.make(leaf, **settings)
        await self.log.append(stream, batch(count))
        return stream

    async def reopen(self) -> Log:
        """Close the log and open it again on the same data; skips when nothing would survive that."""
        self.needs("durable")
        await self.log.close()
        self.log = await self.another()
        return self.log

    async def another(self) -> Log:
        """Open one more log on the same data."""
        log = await self.open()
        self.opened.append(log)
        return log

    async def one(self, draft: Draft, stream: str | None = None) -> Receipt:
        """Append a single event."""
        (receipt,) = await self.log.append(stream or self.stream, [draft])
        return receipt

    async def events(self, stream: str | None = None, partition: int = 0) -> list[Event]:
        """Return everything a partition retains."""
        found: list[Event] = []
        offset = 0
        while page := await self.log.fetch(stream or self.stream, partition, offset, 1000):
            found += page
            offset = page[-1].offset + 1
        return found

    async def part(self, stream: str | None = None, partition: int = 0) -> PartitionStats:
        stats = await self.log.get_stream_stats(stream or self.stream)
        return stats.partitions[partition]

    async def high_water_mark(self, stream: str | None = None, partition: int = 0) -> int:
        return (await self.part(stream, partition)).high_water_mark

    async def next_offsets(self, consumer: str, stream: str | None = None) -> list[int]:
        """Return the consumer's place in each partition."""
        found = await self.log.get_consumer(stream or self.stream, consumer)
        assert found is not None
        return [cursor.next_offset for cursor in found.cursors]

    async def lag(self, consumer: str, stream: str | None = None) -> int:
        return (await self.log.get_consumer_lag(stream or self.stream, consumer)).total

    async def pending(self, consumer: str, limit: int = 100, partition: int = 0) -> list[int]:
        """Return the offsets that a read gives."""
        result = await self.log.read(self.stream, consumer, limit, partition)
        return offsets(result.events)


def offsets(events: Sequence[Event | Receipt]) -> list[int]:
    return [event.offset for event in events]


class LogSuite:
    """What a kind fills in: its features, how it is opened, and the address that other processes open it by."""

    features: ClassVar[LogFeatures]

    async def open(self, folder: Path, clock: Clock) -> Log:
        """Open the log kept in ``folder`` (or wherever the kind keeps it); a second call gives a second log on it."""
        raise NotImplementedError

    def url(self, folder: Path) -> str | None:
        """Return what ``open_log`` takes in another process, when the kind declares ``multi_process``."""
        del folder
        return None

    async def audit(self, log: Log, stream: str, consumer: str) -> list[tuple[int, int]]:
        """Return (partition, offset) of every audited move of a consumer, oldest first."""
        raise NotImplementedError

    @pytest_asyncio.fixture
    async def case(self, tmp_path: Path) -> AsyncIterator[Case]:
        clock = FakeClock()

        async def opener() -> Log:
            return await self.open(tmp_path, clock)

        case = Case(log=await opener(), clock=clock, features=self.features, open=opener, url=self.url(tmp_path))
        yield case
        for log in [case.log, *case.opened]:
            await log.close()
