"""A log on a remote: tasks read it by position and give the rows that the node's copy gives, and append to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from postbus.log import SqliteLog, open_folder
from postbus.log.address import parse_address
from postbus.model import Invalid, NotFound, OffsetOutOfRange, Unreachable
from postbus.spark.errors import ours
from postbus.spark.extent import extents, folder_of, reading
from postbus.spark.jobs.archive import archive
from postbus.spark.jobs.materialize import materialize
from postbus.spark.jobs.verify import verify_lake
from postbus.spark.lake import Lake
from postbus.spark.reading import Range, read_range
from postbus.spark.schema import COLUMNS
from tests.services import fresh_prefix, running_kafka, running_nats
from tests.spark.mail import Mail
from tests.spark.office import ORDERS

T = TypeVar("T")
COPY = "local.default.copy"


class Remote(Mail):
    """A node whose log is on a remote; ``url`` names both, ``there`` the remote alone."""

    def __init__(self, there: str, data: Path) -> None:
        super().__init__(data)
        self.there = there
        self.url = f"{there}?data={data}"

    def run(self, call: Callable[[SqliteLog], Coroutine[Any, Any, T]]) -> T:
        async def work() -> T:
            log = await open_folder(parse_address(self.url), catch_up_s=60)
            try:
                return await call(log)
            finally:
                await log.close()

        return asyncio.run(work())


@pytest.fixture(params=["nats", "kafka"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    server = running_nats() if request.param == "nats" else running_kafka()
    return Remote(f"{server.url}/{fresh_prefix()}", tmp_path / "node")


@pytest.fixture
def nats(tmp_path: Path) -> Remote:
    return Remote(f"{running_nats().url}/{fresh_prefix()}", tmp_path / "node")


def there(spark: SparkSession, remote: Remote, **options: Any) -> DataFrame:
    return spark.read.format("postbus").option("data", remote.there).options(**options).load()


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, frame.collect()))


def test_the_rows_are_those_of_the_copy(spark: SparkSession, remote: Remote) -> None:
    remote.stream(partitions=2)
    remote.fill(60)
    remote.fill(3, "local.default.others")
    assert rows(there(spark, remote)) == rows(remote.read(spark))
    assert len(rows(there(spark, remote))) == 63
    some = {"stream": "orders", "topic": "order.*", "partition": 1, "eventsPerTask": 7, "startingOffset": 5}
    assert rows(there(spark, remote, **some)) == rows(remote.read(spark, **some)) != []
    few = spark.read.format("postbus").schema("offset bigint, topic string").load(remote.there)
    asked = few.where("topic = 'order.paid' AND offset > 20")
    assert rows(asked) == rows(
        remote.read(spark).select("offset", "topic").where("topic = 'order.paid' AND offset > 20")
    )


def test_a_query_follows_the_remote_and_appends_to_it_once(spark: SparkSession, nats: Remote, tmp_path: Path) -> None:
    nats.fill(30)

    def run(checkpoint: str) -> None:
        stream = spark.readStream.format("postbus").option("stream", "orders").option("maxEventsPerTrigger", 13)
        changed = stream.load(nats.there).selectExpr("topic", "'spark' AS source", "payload", "id AS native_id")
        writer = changed.writeStream.format("postbus").option("data", nats.there).option("stream", "copy")
        writer = writer.option("createStream", True).option("checkpointLocation", str(tmp_path / checkpoint))
        assert writer.trigger(availableNow=True).start().awaitTermination(120)

    run("first")
    nats.fill(10, first=30)
    run("first")
    run("second")  # everything again: the remote knows the identities
    copied = nats.events(COPY)
    assert sorted(event.native_id or "" for event in copied) == sorted(f"{ORDERS}/0/{n}" for n in range(40))
    assert [event.payload for event in nats.events()] == [
        event.payload for event in sorted(copied, key=lambda event: int((event.native_id or "").rpartition("/")[2]))
    ]


def test_what_is_not_there_is_one_sentence(spark: SparkSession, nats: Remote) -> None:
    nats.fill(20)
    for options, kind, words in (
        ({"stream": "nothing"}, Invalid, "there is no stream local.default.nothing"),
        ({"stream": "orders", "startingOffset": 21}, OffsetOutOfRange, "startingOffset is 21"),
        ({"data": "amqp://x"}, Invalid, "no log kind is called 'amqp'"),
        ({"data": "nats://127.0.0.1:1?answer_s=0.2"}, Unreachable, "NATS cannot be reached"),
    ):
        with pytest.raises(PySparkException) as caught:
            there(spark, nats, **options).count()
        found = ours(caught.value)
        assert type(found) is kind
        assert words in str(found)
    nats.trim(8)
    with pytest.raises(PySparkException, match=r"startingOffset is 0, and .*/0 holds 8 to 20"):
        there(spark, nats, stream="orders", startingOffset=0).count()
    frame = there(spark, nats).selectExpr("topic", "source", "payload", "id AS native_id")
    writer = frame.write.format("postbus").mode("append").option("data", nats.there).option("stream", "new")
    with pytest.raises(PySparkException) as refused:
        writer.save()
    assert isinstance(ours(refused.value), NotFound)


def test_a_range_that_retention_removes_meanwhile_is_refused(nats: Remote) -> None:
    nats.fill(20)
    with reading(folder_of(nats.url)) as db:
        (extent,) = extents(db)
    nats.trim(8)
    with pytest.raises(OffsetOutOfRange, match="retention has removed"):
        list(read_range(nats.there, Range(extent, 0, 20), list(COLUMNS.values())))
    nats.run(lambda log: log.delete_stream(ORDERS))
    with pytest.raises(NotFound, match="was deleted while it was read"):
        list(read_range(nats.there, Range(extent, 8, 20), list(COLUMNS.values())))


def test_jobs_on_a_node_whose_log_is_elsewhere(spark: SparkSession, nats: Remote, tmp_path: Path) -> None:
    """Another node appends; this one has an old copy, and a stream that only it has."""
    other = Remote(nats.there, tmp_path / "other")
    nats.stream(partitions=2)
    nats.agent()
    nats.subscribe("order.*", "orders", streams=(ORDERS,))
    nats.fill(10, "local.default.orders-dlq")
    other.fill(200)
    done = asyncio.run(materialize(spark, nats.url))
    assert done.events == 200
    assert len(nats.inbox()) == sum(
        event.topic.startswith("order.") for p in (0, 1) for event in other.events(partition=p)
    )
    other.fill(50, first=200)
    lake = Lake(str(tmp_path / "lake"))
    assert archive(spark, nats.url, lake).events == 260
    found = verify_lake(spark, lake, nats.url)
    assert (found.ok, found.events, found.compared) == (True, 260, 3)
