"""Appending from Spark: once per native id however often Spark runs a task, and nothing at all for a bad row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.types import StringType, StructField, StructType

from postbus.envelope import draft
from postbus.model import IdempotencyConflict, Invalid
from postbus.spark.errors import ours
from postbus.spark.sink import PostbusWriter, WriteOptions
from tests.spark.office import Office

COPY = "local.default.copy"


def rows(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(count).select(
        fn.lit("order.paid").alias("topic"),
        fn.lit("spark").alias("source"),
        fn.format_string('{"n": %d}', "id").alias("payload"),
        fn.format_string("n-%d", "id").alias("native_id"),
        fn.format_string("k%d", fn.col("id") % 3).alias("key"),
        fn.lit('{"region":"eu"}').alias("headers"),
        fn.timestamp_micros(fn.col("id") + 1_000_000).alias("occurred_at"),
    )


def write(frame: DataFrame, office: Office, **options: Any) -> None:
    given: dict[str, Any] = {"data": str(office.data), "stream": "copy", "createStream": True} | options
    frame.write.format("postbus").options(**given).mode("append").save()


def test_rows_become_events_once_however_often_they_are_written(spark: SparkSession, office: Office) -> None:
    office.stream()
    for _ in range(2):
        write(rows(spark, 2_500).repartition(3), office)
    events = office.events(COPY)
    assert sorted(event.payload["n"] for event in events) == list(range(2_500))
    one = next(event for event in events if event.native_id == "n-7")
    facts = (one.topic, one.source, one.key, one.headers, one.occurred_at_us)
    assert facts == ("order.paid", "spark", "k1", {"region": "eu"}, 1_000_007)
    assert one.payload_json == b'{"n": 7}', "byte for byte"


def test_what_is_read_can_be_written(spark: SparkSession, office: Office) -> None:
    office.fill(60)
    frame = office.read(spark, stream="orders").where("native_id is not null")
    write(frame, office)
    copied = {event.native_id: event.payload_json for event in office.events(COPY)}
    assert copied == {event.native_id: event.payload_json for event in office.events() if event.native_id}


def test_a_stream_is_written_exactly_once_when_a_commit_is_lost(
    spark: SparkSession, office: Office, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    office.fill(80)

    def run() -> None:
        source = spark.readStream.format("postbus").option("maxEventsPerTrigger", 30).option("stream", "orders")
        frame = source.load(str(office.data)).withColumn("native_id", fn.col("id"))
        writer = frame.writeStream.format("postbus").option("data", str(office.data)).option("stream", "copy")
        query = writer.option("createStream", True).option("checkpointLocation", str(checkpoint))
        assert query.trigger(availableNow=True).start().awaitTermination(120)

    run()
    max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name)).unlink()
    office.fill(5, first=80)
    run()
    assert sorted(event.payload["n"] for event in office.events(COPY)) == list(range(85))


ROW = {"topic": "a", "source": "s", "payload": "1", "native_id": "taken", "headers": None, "trust": None}


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"topic": "a..b"}, Invalid, "is refused: topic 'a..b' has an empty token"),
        ({"payload": "{"}, Invalid, "is refused: payload:"),
        ({"headers": '{"postbus.x": "1"}'}, Invalid, "reserved prefix"),
        ({"headers": "[]"}, Invalid, "headers:"),
        ({"trust": "maybe"}, Invalid, "trust must be"),
        ({"native_id": None}, Invalid, "a row has no native_id"),
        ({"payload": "2"}, IdempotencyConflict, "taken"),
    ],
)
def test_a_bad_row_is_refused_and_nothing_of_its_page_is_appended(
    office: Office, change: dict[str, str | None], kind: type[Exception], message: str
) -> None:
    office.append([draft("a", "s", 1, native_id="taken")], COPY)
    schema = StructType([StructField(name, StringType()) for name in ROW])
    task = PostbusWriter(WriteOptions(data=str(office.data), stream=COPY, create=False), schema)
    arrow = pa.schema([(name, pa.string()) for name in ROW])
    batch = pa.RecordBatch.from_pylist([ROW | {"native_id": "good"}, ROW | change], schema=arrow)
    with pytest.raises(kind, match=re.escape(message)):
        task.write(iter([batch]))
    assert len(office.events(COPY)) == 1


@pytest.mark.parametrize(
    ("change", "options", "kind", "message"),
    [
        ({"surprise": "1"}, {}, Invalid, "events have no column 'surprise'"),
        ({}, {"stream": "a.b"}, Invalid, "exactly 3 tokens"),
        ({}, {"createStream": "perhaps"}, Invalid, "createStream"),
        ({}, {"colour": "red"}, Invalid, "there is no option 'colour'"),
        ({"topic": "'a..b'"}, {}, Invalid, "is refused: topic 'a..b' has an empty token"),
    ],
)
def test_refusals_come_out_of_spark_in_one_sentence(
    spark: SparkSession,
    office: Office,
    change: dict[str, str],
    options: dict[str, Any],
    kind: type[Exception],
    message: str,
) -> None:
    office.stream()
    with pytest.raises(PySparkException) as caught:
        write(
            rows(spark, 3).coalesce(1).withColumns({name: fn.expr(text) for name, text in change.items()}),
            office,
            **options,
        )
    known = ours(caught.value)
    assert type(known) is kind, str(caught.value)
    assert known is not None
    assert message in known.message
    has_copy = office.run(lambda log: log.has_stream(COPY))
    assert not has_copy or office.events(COPY) == []


def test_missing_columns_and_overwriting_are_refused(spark: SparkSession, office: Office) -> None:
    office.stream()
    with pytest.raises(PySparkException, match="the rows to append have no column 'native_id'"):
        write(rows(spark, 1).drop("native_id"), office)
    with pytest.raises(PySparkException, match="a log is only ever appended to"):
        rows(spark, 1).write.format("postbus").options(data=str(office.data), stream="copy").mode("overwrite").save()
