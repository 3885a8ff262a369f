"""The streaming side: offsets that can be read again, limits, restarts, growth, and retention that races the reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.streaming.query import StreamingQuery

from postbus.model import Invalid, OffsetOutOfRange
from postbus.spark.errors import ours
from postbus.spark.schema import EVENT_SCHEMA, chosen
from postbus.spark.source import PostbusStreamReader, ReadOptions
from tests.spark.office import ORDERS, Office, ids

TIMEOUT_S = 120


class Follower:
    """A query from a store into Parquet, run until it has caught up."""

    def __init__(self, spark: SparkSession, office: Office, folder: Path, **options: Any) -> None:
        self.spark = spark
        self.office = office
        self.out = folder / "out"
        self.checkpoint = folder / "checkpoint"
        self.options = options

    def start(self) -> StreamingQuery:
        frame = self.spark.readStream.format("postbus").option("data", str(self.office.data)).options(**self.options)
        writer = frame.load().writeStream.format("parquet").option("checkpointLocation", str(self.checkpoint))
        return writer.trigger(availableNow=True).start(str(self.out))

    def run(self) -> list[Any]:
        query = self.start()
        assert query.awaitTermination(TIMEOUT_S)
        return query.recentProgress

    def ids(self) -> list[str]:
        return ids(self.spark.read.schema(EVENT_SCHEMA).parquet(str(self.out)))

    def newest(self, log: str) -> Path:
        return max((self.checkpoint / log).glob("[0-9]*"), key=lambda path: int(path.name))


@pytest.fixture
def follower(spark: SparkSession, office: Office, tmp_path: Path) -> Follower:
    return Follower(spark, office, tmp_path)


def everything(count: int, first: int = 0) -> list[str]:
    return sorted(f"{ORDERS}/0/{offset}" for offset in range(first, count))


def test_a_query_goes_on_where_its_checkpoint_ends(follower: Follower, office: Office) -> None:
    office.fill(40)
    follower.run()
    assert follower.ids() == everything(40)
    office.fill(25, first=40)
    follower.run()
    assert follower.ids() == everything(65)
    offsets = json.loads(follower.newest("offsets").read_text().splitlines()[-1])
    assert offsets == {f"{ORDERS}/0": 65}


def test_a_batch_whose_commit_was_lost_is_read_again_and_nothing_is_twice(follower: Follower, office: Office) -> None:
    follower.options["maxEventsPerTrigger"] = 20
    office.fill(50)
    follower.run()
    for _ in range(2):  # as if the driver died between the sink's commit and the checkpoint's
        follower.newest("commits").unlink()
        office.fill(7, first=len(office.events()))
        follower.run()
        assert follower.ids() == everything(len(office.events()))


def test_a_limit_makes_small_batches_that_share_it_between_partitions(
    spark: SparkSession, office: Office, tmp_path: Path
) -> None:
    office.stream(partitions=2)
    office.fill(90)
    follower = Follower(spark, office, tmp_path, maxEventsPerTrigger=25)
    progress = follower.run()
    sizes = [each["numInputRows"] for each in progress if each["numInputRows"]]
    assert sum(sizes) == 90
    assert max(sizes) <= 25
    assert len(set(follower.ids())) == 90
    first = json.loads(progress[0]["sources"][0]["endOffset"])
    assert all(offset > 0 for offset in first.values()), "no partition waits for the other"


def test_progress_shows_how_far_the_log_reaches(follower: Follower, office: Office) -> None:
    follower.options["maxEventsPerTrigger"] = 10
    office.fill(30)
    latest = follower.run()[0]["sources"][0]["latestOffset"]
    assert json.loads(latest) == {f"{ORDERS}/0": 30}


def test_partitions_and_streams_that_come_later_are_read_from_their_beginning(
    follower: Follower, office: Office
) -> None:
    office.fill(5)
    follower.run()
    office.fill(4, "local.default.more")
    office.stream("acme.eu.wide", partitions=3)
    office.fill(30, "acme.eu.wide")
    follower.run()
    assert len(follower.ids()) == len(set(follower.ids())) == 39


def test_latest_begins_after_what_is_there(follower: Follower, office: Office) -> None:
    office.fill(10)
    follower.options["startingOffset"] = "latest"
    follower.run()
    office.fill(3, first=10)
    follower.run()
    assert follower.ids() == everything(13, first=10)


def test_a_stream_made_again_is_read_anew(follower: Follower, office: Office) -> None:
    office.fill(5)
    follower.run()
    office.run(lambda log: log.delete_stream(ORDERS))
    office.fill(3)
    follower.run()
    assert follower.ids() == sorted(everything(5) + everything(3))


def test_retention_that_overtakes_a_query_stops_it_with_a_sentence(follower: Follower, office: Office) -> None:
    office.fill(10)
    follower.run()
    office.fill(20, first=10)
    office.trim(15)
    with pytest.raises(StreamingQueryException) as caught:
        follower.run()
    known = ours(caught.value)
    assert type(known) is OffsetOutOfRange
    assert known is not None
    assert f"retention has removed {ORDERS}/0/10 before it was read" in known.message
    assert "\tat " not in known.message
    assert follower.ids() == everything(10), "nothing of the gap was taken"


def test_a_log_shorter_than_the_checkpoint_is_refused(
    spark: SparkSession, office: Office, follower: Follower, tmp_path: Path
) -> None:
    office.fill(10)
    follower.run()
    other = Office(tmp_path / "restored")
    other.fill(4)
    shorter = Follower(spark, other, tmp_path)
    with pytest.raises(StreamingQueryException) as caught:
        shorter.run()
    known = ours(caught.value)
    assert known is not None
    assert f"{ORDERS}/0 ends at 4, and the checkpoint has read it up to 10" in known.message


def test_a_stream_takes_no_ending_offset(follower: Follower, office: Office) -> None:
    office.fill(1)
    follower.options["endingOffset"] = "1"
    with pytest.raises(Exception, match="a stream has no endingOffset") as caught:
        follower.run()
    assert type(ours(caught.value)) is Invalid


# --- the reader by itself ---------------------------------------------------------------------------------------------


def reader(office: Office, **options: str) -> PostbusStreamReader:
    return PostbusStreamReader(ReadOptions.of({"data": str(office.data), **options}), chosen(EVENT_SCHEMA))


def test_offsets_are_half_open_and_any_range_can_be_read_again(office: Office) -> None:
    office.stream(partitions=2)
    office.fill(200)
    source = reader(office, eventsPerTask="30")
    start = source.initialOffset()
    seen: list[str] = []
    ranges = []
    while (end := source.latestOffset(start, ReadMaxRows(37))) != start:
        ranges.append((start, end))
        seen += addresses(source, start, end)
        start = end
    assert len(seen) == len(set(seen)) == 200
    again = [address for begin, end in ranges for address in addresses(source, begin, end)]
    assert again == seen
    assert source.partitions(start, start) == []
    assert source.latestOffset(start, ReadAllAvailable()) == start


def addresses(source: PostbusStreamReader, start: dict[str, int], end: dict[str, int]) -> list[str]:
    tasks = source.partitions(start, end)
    return [address for task in tasks for batch in source.read(task) for address in batch.column("id").to_pylist()]


def test_a_limit_smaller_than_the_number_of_partitions_still_gets_everywhere(office: Office) -> None:
    office.stream(partitions=5)
    office.fill(60)
    source = reader(office)
    start, rounds = source.initialOffset(), 0
    while (end := source.latestOffset(start, ReadMaxRows(2))) != start:
        assert sum(end.values()) - sum(start.values()) <= 2
        start, rounds = end, rounds + 1
    assert (sum(start.values()), rounds) == (60, 30)
