"""A store to test on: append, trim and look, each in a short session of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pyspark.sql import DataFrame, SparkSession

from postbus.envelope import draft
from postbus.log import SqliteLog
from postbus.model import Draft, Event, StreamSettings

T = TypeVar("T")
ORDERS = "local.default.orders"


class Office:
    """A data folder that tests write to and Spark reads."""

    def __init__(self, data: Path) -> None:
        self.data = data

    def run(self, call: Callable[[SqliteLog], Coroutine[Any, Any, T]]) -> T:
        async def work() -> T:
            log = SqliteLog.open(self.data)
            try:
                return await call(log)
            finally:
                await log.close()

        return asyncio.run(work())

    def stream(self, name: str = ORDERS, partitions: int = 1, **more: Any) -> None:
        self.run(lambda log: log.ensure_stream(name, StreamSettings(partitions=partitions, **more)))

    def append(self, drafts: Sequence[Draft], stream: str = ORDERS) -> None:
        async def work(log: SqliteLog) -> None:
            await log.ensure_stream(stream)
            await log.append(stream, drafts)

        self.run(work)

    def fill(self, count: int, stream: str = ORDERS, first: int = 0) -> None:
        """Append events that use every field now and then."""
        self.append([sample(number) for number in range(first, first + count)], stream)

    def trim(self, before: int, stream: str = ORDERS, partition: int = 0) -> None:
        self.run(lambda log: log.trim(stream, before, partition))

    def events(self, stream: str = ORDERS, partition: int = 0) -> list[Event]:
        return self.run(lambda log: log.fetch(stream, partition, 0, 1_000_000))

    def read(self, spark: SparkSession, **options: Any) -> DataFrame:
        return spark.read.format("postbus").option("data", str(self.data)).options(**options).load()


def sample(number: int) -> Draft:
    return draft(
        ("order.paid", "order.sent", "user.seen")[number % 3],
        "shop",
        {"n": number, "text": "ü\u2028" * (number % 4)},
        key=f"k{number % 5}" if number % 2 else None,
        variant="v2" if number % 7 == 0 else "",
        metadata={"m": number} if number % 5 == 0 else None,
        headers={"region": "eu"} if number % 4 == 0 else None,
        correlation_id=f"c{number // 10}" if number % 3 else None,
        native_id=f"native-{number}" if number % 2 == 0 else None,
        delivery_handle={"kind": "mail"} if number % 11 == 0 else None,
        occurred_at=_moment(number),
    )


def _moment(number: int) -> str | None:
    if number % 13 == 5:
        return "1500-03-01T00:00:00Z"  # before the calendar changed
    return "2026-01-31T12:00:00.000001Z" if number % 6 == 0 else None


def ids(frame: DataFrame) -> list[str]:
    return sorted(row.id for row in frame.select("id").collect())
