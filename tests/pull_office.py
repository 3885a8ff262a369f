"""A desk of pull subscriptions on a clock that stands still, and what tests of it share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from postbus.bus.pull import Handed, PullDesk, Puller
from postbus.envelope import draft
from postbus.log import SqliteLog
from postbus.model import StreamSettings
from postbus.testing import FakeClock

__all__ = ["DLQ", "SUB", "TENANT", "TOPIC", "Office", "leases", "numbers", "office", "turns", "until"]

TENANT = "agents.demo"
TOPIC = "agents.demo.orders"
DLQ = "agents.demo.orders-dlq"
SUB = "order-processor"
TURNS = 50


class Office:
    """A log and a desk on a clock that stands still, to be restarted at will."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = FakeClock()

    async def open(self) -> None:
        self.log = SqliteLog.open(self.folder, clock=self.clock)
        self.desk = PullDesk(self.log, self.clock)

    async def close(self) -> None:
        await self.desk.stop()
        await self.log.close()

    async def crash(self) -> None:
        """End as a killed process does: nothing is given back."""
        for _, puller in self.desk._pullers.values():
            puller._books = None
        dead = "UPDATE lanes SET owner = '1.0.x.gone.pull' WHERE owner IS NOT NULL"
        await self.log.store.write(lambda db: db.execute(dead))
        await self.close()

    async def restart(self) -> None:
        await self.close()
        await self.open()

    async def make(self, count: int = 0, *, partitions: int = 1, **settings: Any) -> Puller:
        await self.log.ensure_stream(TOPIC, StreamSettings(partitions=partitions))
        await self.log.ensure_stream(DLQ)
        await self.publish(count)
        await self.desk.create(TENANT, SUB, TOPIC, **{"start": "earliest", "dead_letter_topic": DLQ, **settings})
        return await self.puller()

    async def puller(self) -> Puller:
        return await self.desk.puller(TENANT, SUB)

    async def publish(self, count: int, first: int = 0, **fields: Any) -> None:
        if count:
            await self.log.append(TOPIC, [draft(TOPIC, "test", {"n": first + n}, **fields) for n in range(count)])

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await turns()

    async def lag(self) -> list[tuple[int, int, int]]:
        found = await self.desk.lag(TENANT, SUB)
        return [(part.committed, part.high_water_mark, part.lag) for part in found.partitions]

    async def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return await self.log.store.read(lambda db: list(db.execute(statement, values)))


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    made = Office(tmp_path / "data")
    await made.open()
    yield made
    await made.close()


async def turns(count: int = TURNS) -> None:
    """Let everything that can run do so; readers of the table work on threads."""
    for _ in range(count):
        await asyncio.sleep(0)
    await asyncio.sleep(0.01 if count < TURNS else 0.05)  # a settlement waits some milliseconds for more
    for _ in range(count):
        await asyncio.sleep(0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - a threshold, not an event
            await asyncio.sleep(0.005)


def numbers(handed: Sequence[Handed]) -> list[int]:
    return [one.event.payload["n"] for one in handed]


def leases(handed: Sequence[Handed]) -> list[str]:
    return [one.lease_id for one in handed if one.lease_id is not None]
