"""The batch side of the data source: every event, every column, only what is asked for, and clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import SparkSession
from pyspark.sql import functions as fn

from postbus.model import Event, Invalid, NotFound, OffsetOutOfRange
from postbus.spark.errors import ours
from postbus.spark.schema import COLUMNS, EVENT_SCHEMA, columns_table
from tests.spark.office import ORDERS, Office, ids

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "spark.md"


def as_columns(event: Event) -> dict[str, Any]:
    raw = {"payload", "metadata", "headers", "delivery_handle"}
    return {name: _text(event, name) if name in raw else getattr(event, name) for name in COLUMNS}


def _text(event: Event, name: str) -> str | None:
    value: bytes | None = getattr(event, f"{name}_json")
    return None if value is None else value.decode()


@pytest.mark.parametrize("reader", ["adbc", "rows"])
def test_every_column_of_every_event_is_read_as_it_was_appended(
    spark: SparkSession, office: Office, reader: str
) -> None:
    office.stream(partitions=2)
    office.fill(250)
    office.fill(30, "local.default.other")
    frame = office.read(spark, reader=reader, eventsPerTask=40)
    assert frame.schema == EVENT_SCHEMA
    rows = {row.id: row.asDict() for row in frame.collect()}
    expected = [
        as_columns(event)
        for stream, partition in ((ORDERS, 0), (ORDERS, 1), ("local.default.other", 0))
        for event in office.events(stream, partition)
    ]
    assert len(rows) == len(expected) == 280
    for event in expected:
        row = rows[event["id"]]
        for name in ("occurred_at", "created_at"):
            event[name] = event[name].replace(tzinfo=None)
        assert row == event


def test_a_column_that_is_null_for_the_first_thousands_of_rows_keeps_its_type(
    spark: SparkSession, office: Office
) -> None:
    from postbus.envelope import draft  # noqa: PLC0415 - only here

    office.append([draft("a", "s", 1)] * 25_000)
    office.append([draft("a", "s", 1, key="late", metadata={"a": 1})])
    assert [(row.key, row.metadata) for row in office.read(spark).where("key is not null").collect()] == [
        ("late", '{"a":1}')
    ]


def test_only_the_columns_of_the_schema_are_read(spark: SparkSession, office: Office) -> None:
    office.fill(10)
    frame = spark.read.format("postbus").schema("topic string, offset long, stream string").load(str(office.data))
    assert frame.columns == ["topic", "offset", "stream"]
    assert [row.offset for row in frame.orderBy("offset").collect()] == list(range(10))


def test_streams_partitions_offsets_and_topics_are_chosen(spark: SparkSession, office: Office) -> None:
    office.stream(partitions=2)
    office.fill(60)
    office.fill(9, "acme.eu.orders")
    everything = ids(office.read(spark))
    assert ids(office.read(spark, stream="orders")) == [each for each in everything if "local.default" in each]
    assert ids(office.read(spark, stream="acme.*.>")) == [each for each in everything if "acme" in each]
    part = ids(office.read(spark, stream="orders", partition=1))
    assert part == [each for each in everything if "orders/1/" in each and "local" in each]
    assert ids(office.read(spark, stream="acme.eu.orders", startingOffset=2, endingOffset=5)) == [
        f"acme.eu.orders/0/{offset}" for offset in (2, 3, 4)
    ]
    chosen = office.read(spark, startingOffset=f'{{"{ORDERS}/0": 7}}', endingOffset=f'{{"{ORDERS}/0": 9}}')
    assert [row.id for row in chosen.where(f"stream = '{ORDERS}' and partition = 0").collect()] == [
        f"{ORDERS}/0/7",
        f"{ORDERS}/0/8",
    ]
    for pattern, wanted in (
        ("order.*", {"order.paid", "order.sent"}),
        ("*.seen", {"user.seen"}),
        ("user.>", {"user.seen"}),
    ):
        found = office.read(spark, topic=pattern).select("topic").distinct().collect()
        assert {row.topic for row in found} == wanted
    assert office.read(spark, topic="order").count() == 0


def test_filters_reach_the_log_and_change_no_result(spark: SparkSession, office: Office) -> None:
    office.stream(partitions=2)
    office.fill(120)
    frame = office.read(spark).cache()
    frame.count()
    conditions = [
        fn.col("topic") == "order.sent",
        (fn.col("offset") >= 5) & (fn.col("offset") < 11),
        fn.col("key") == "k3",
        fn.col("key") != "k3",
        fn.col("partition") == 1,
        fn.col("partition").isin(0, 7),
        fn.col("stream") == ORDERS,
        fn.col("stream") == "nobody",
        fn.col("occurred_at") < fn.lit("2026-02-01T00:00:00Z").cast("timestamp"),
        fn.col("variant").isin("", "v2") & fn.col("native_id").startswith("native-1"),
        (fn.col("topic") == "order.paid") | (fn.col("offset") == 3),
        fn.col("correlation_id").isNull(),
    ]
    for condition in conditions:
        plain = frame.where(condition)  # from memory, where nothing can be pushed down
        assert ids(office.read(spark).where(condition)) == ids(plain)
    plan = office.read(spark).where(conditions[1])._jdf.queryExecution().executedPlan().toString()
    assert "Filter " not in plan, "the log itself was asked"
    frame.unpersist()


def test_an_empty_stream_and_a_trimmed_one(spark: SparkSession, office: Office) -> None:
    office.stream()
    assert office.read(spark).count() == 0
    office.fill(30)
    office.trim(10)
    assert ids(office.read(spark)) == sorted(f"{ORDERS}/0/{offset}" for offset in range(10, 30))


def test_a_stream_made_again_shows_only_its_new_events(spark: SparkSession, office: Office) -> None:
    office.fill(5)
    office.run(lambda log: log.delete_stream(ORDERS))
    office.fill(2)
    assert office.read(spark).count() == 2
    assert office.read(spark, startingOffset=f'{{"{ORDERS}/0@1": 1}}').count() == 1


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"dta": "x"}, Invalid, "there is no option 'dta'"),
        ({"data": "memory:"}, Invalid, "belongs to one process"),
        ({"data": "ftp://x"}, Invalid, "no log kind is called 'ftp'"),
        ({"data": "/nowhere"}, NotFound, "there is no store in /nowhere"),
        ({"stream": "missing"}, Invalid, "there is no stream local.default.missing"),
        ({"stream": "a..b"}, Invalid, "empty token"),
        ({"partition": "x"}, Invalid, "the option partition is 'x'"),
        ({"stream": "orders", "partition": "4"}, Invalid, "there is no stream local.default.orders/4"),
        ({"topic": "a.>.b"}, Invalid, "has > before its end"),
        ({"startingOffset": "soon"}, Invalid, "the option startingOffset is 'soon'"),
        ({"startingOffset": "99"}, OffsetOutOfRange, "startingOffset is 99, and local.default.orders/0 holds 3 to 10"),
        ({"startingOffset": "1"}, OffsetOutOfRange, "holds 3 to 10"),
        ({"endingOffset": '{"x/0": 1}'}, Invalid, "endingOffset names x/0"),
        ({"eventsPerTask": "0"}, Invalid, "the option eventsPerTask is '0'"),
        ({"reader": "magic"}, Invalid, "the option reader is 'magic'"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(
    spark: SparkSession, office: Office, options: dict[str, str], kind: type[Exception], message: str
) -> None:
    office.fill(10)
    office.trim(3)
    with pytest.raises(AnalysisException) as caught:
        office.read(spark, **options).count()
    said = str(caught.value)
    assert "Traceback" not in said
    assert "\tat " not in said
    assert len(said.strip().splitlines()) <= 3, said
    known = ours(caught.value)
    assert type(known) is kind
    assert known is not None
    assert message in known.message


@pytest.mark.parametrize(
    ("schema", "message"), [("nothing string", "no column 'nothing'"), ("offset string", "offset is of type bigint")]
)
def test_a_wrong_schema_is_refused(spark: SparkSession, office: Office, schema: str, message: str) -> None:
    office.fill(1)
    with pytest.raises(AnalysisException, match=message):
        spark.read.format("postbus").schema(schema).load(str(office.data)).count()


def test_events_removed_between_plan_and_read_are_refused_not_skipped(spark: SparkSession, office: Office) -> None:
    office.fill(50)
    frame = office.read(spark)
    frame.rdd.getNumPartitions()  # plans it
    office.trim(20)
    with pytest.raises(PythonException) as caught:
        frame.collect()
    known = ours(caught.value)
    assert type(known) is OffsetOutOfRange
    assert known is not None
    assert f"retention has removed {ORDERS}/0/0 before it was read; the first event there is now 20" in known.message
    assert "startingOffset=earliest" in (known.hint or "")


def test_the_bus_goes_on_writing_while_spark_reads(spark: SparkSession, office: Office) -> None:
    office.fill(100)

    async def both(log: Any) -> None:
        from tests.spark.office import sample  # noqa: PLC0415 - only here

        await log.append(ORDERS, [sample(number) for number in range(1_000, 1_050)])

    frame = office.read(spark)
    frame.rdd.getNumPartitions()  # plans it
    office.run(both)
    assert frame.count() == 100
    assert office.read(spark).count() == 150


def test_spark_finds_the_source_by_itself(spark: SparkSession, office: Office) -> None:
    import pyspark_postbus  # noqa: PLC0415 - what Spark imports
    from postbus.spark.source import PostbusDataSource  # noqa: PLC0415

    assert pyspark_postbus.DefaultSource is PostbusDataSource
    office.fill(3)
    fresh = spark.newSession()  # in which nobody has registered anything
    assert fresh.read.format("postbus").load(str(office.data)).count() == 3


def test_the_guide_lists_every_column() -> None:
    assert columns_table() in GUIDE.read_text(encoding="utf-8")
