"""A log on Kafka as Spark's own Kafka source reads it, where its connector is on the class path; else as ours does.

Both give the same rows. Spark's source fetches the records; tasks turn them into events with the log's own code. It
says nothing of offsets without a record (marks of transactions) and puts each partition it is given into one task, so
that a task knows its range by the first record it sees. Therefore a range of Spark's always begins with a record: the
driver looks, and leaves the marks before it to our reader.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import reduce
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import functions as fn

from postbus.clock import SystemClock
from postbus.log.address import ANSWER_S, parse_remote
from postbus.log.wire import HEADER
from postbus.model import Invalid, NotFound, StorageError
from postbus.spark.errors import with_hint
from postbus.spark.extent import remote_of
from postbus.spark.reading import Range, matching, shaped
from postbus.spark.remote import fetched, found_stream, opened_remote, table_of
from postbus.spark.schema import EVENT_SCHEMA, chosen
from postbus.spark.source import ReadOptions, planned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from postbus.log.address import Target
    from postbus.log.security import Security
    from postbus.log.upstream import Upstream
    from postbus.model import Event, Stream
    from postbus.spark.schema import Column

    Judge = Callable[[str, str, int, int, Sequence[Any]], list[Event]]

__all__ = ["KAFKA_READERS", "SETTING", "has_connector", "log_frame"]

FORMAT = "kafka"
SETTING = "spark.postbus.kafkaReader"
KAFKA_READERS = ("auto", "spark", "postbus")
SLICES_MAX = 32
"""How many tasks share a long partition at most: each slice is a part of the plan."""
LOOK = 1_000
LOGIN = "org.apache.kafka.common.security"


def log_frame(
    spark: SparkSession,
    data: str,
    *,
    kafka_reader: str | None = None,
    schema: StructType | None = None,
    **options: Any,
) -> DataFrame:
    """Return the events of a log as ``spark.read.format("postbus")`` does; the options are the same.

    A log on Kafka is read by Spark's own Kafka source if that is there. ``kafka_reader`` (else the session's setting
    ``spark.postbus.kafkaReader``) says which: ``auto``, ``spark`` or ``postbus``. Where Spark's reads, what is in the
    frame is decided now, not when it is used. Raises ``NotFound`` when ``spark`` was asked for and is not there.
    """
    asked = kafka_reader or spark.conf.get(SETTING, "auto") or "auto"
    if asked not in KAFKA_READERS:
        raise Invalid(f"the reader of Kafka is {asked!r}", hint=f"it is one of {', '.join(KAFKA_READERS)}")
    given = {
        name: each if isinstance(each, str) else msgspec.json.encode(each).decode() for name, each in options.items()
    }
    remote = remote_of(data)
    if remote is None or not remote.startswith("kafka://"):
        if kafka_reader == "spark":
            raise Invalid(f"Spark's Kafka source cannot read {data}", hint="it reads a log whose data is kafka://…")
        return _ours(spark, data, given, schema)
    if asked == "postbus" or (asked == "auto" and not has_connector(spark)):
        return _ours(spark, remote, given, schema)
    if not has_connector(spark):
        message = "Spark's Kafka source was asked for, and its connector is not on the class path"
        hint = "start Spark with --packages org.apache.spark:spark-sql-kafka-0-10_2.13:<the version of your Spark>"
        raise NotFound(message, hint=hint)
    return _native(spark, ReadOptions.of({**given, "data": remote}), schema or EVENT_SCHEMA)


def has_connector(spark: SparkSession) -> bool:
    """Say whether Spark's own Kafka source is on the class path: the server's, through Spark Connect."""
    from py4j.protocol import Py4JJavaError  # noqa: PLC0415 - comes with PySpark
    from pyspark.errors import PySparkException  # noqa: PLC0415 - as above

    reader = spark.read.format(FORMAT).option("kafka.bootstrap.servers", "127.0.0.1:1").option("subscribe", "any")
    try:
        return len(reader.load().schema) > 0  # asks nobody but Spark
    except (PySparkException, Py4JJavaError):
        return False


def _ours(spark: SparkSession, data: str, given: dict[str, str], schema: StructType | None) -> DataFrame:
    reader = spark.read.format("postbus").option("data", data).options(**given)
    return (reader if schema is None else reader.schema(schema)).load()


# --- planning, on the driver ------------------------------------------------------------------------------------------


class _Slice(msgspec.Struct, frozen=True):
    """A range of one partition, the topic that keeps it, and its first offset that has a record (or its end)."""

    topic: str
    range: Range
    begin: int


def _native(spark: SparkSession, options: ReadOptions, schema: StructType) -> DataFrame:
    columns = chosen(schema)
    frames = []
    with ThreadPoolExecutor(1) as thread:  # the caller may be inside a loop
        plan = thread.submit(_plan, options).result()
    for slices in zip_longest(*plan):  # of each partition at most one
        some = [each for each in slices if each is not None]
        marks = [Range(each.range.extent, each.range.start, each.begin) for each in some]
        if spans := {each.extent.key: each for each in marks if each.start < each.end}:
            given = {
                "startingOffset": _json({key: each.start for key, each in spans.items()}),
                "endingOffset": _json({key: each.end for key, each in spans.items()}),
                **({} if options.topic is None else {"topic": options.topic}),
            }
            frames.append(_ours(spark, options.data, given, schema))
        parts = {
            (each.topic, each.range.extent.partition): Range(each.range.extent, each.begin, each.range.end)
            for each in some
            if each.begin < each.range.end
        }
        if parts:
            frames.append(_events(_records(spark, options.data, parts), options, parts, columns, schema))
    return reduce(lambda one, other: one.union(other), frames) if frames else spark.createDataFrame([], schema)


def _plan(options: ReadOptions) -> list[list[_Slice]]:
    ranges = [each for each in planned(options) if each.start < each.end]
    return asyncio.run(_looked_at(options, ranges)) if ranges else []


async def _looked_at(options: ReadOptions, ranges: list[Range]) -> list[list[_Slice]]:
    """Return the slices of each partition, every one with where its records begin."""
    from postbus.log.kafka.names import topic_of  # noqa: PLC0415 - needs the extra

    prefix = _target(options.data).prefix
    size = max(options.per_task, -(-max(each.end - each.start for each in ranges) // SLICES_MAX))

    async with opened_remote(options.data) as upstream:

        async def look(whole: Range) -> list[_Slice]:
            stream = await found_stream(upstream, whole.extent)
            topic = topic_of(prefix, stream)
            cut = [
                Range(whole.extent, start, min(start + size, whole.end))
                for start in range(whole.start, whole.end, size)
            ]
            return [_Slice(topic, each, await _first_record(upstream, stream, each)) for each in cut]

        return list(await asyncio.gather(*(look(each) for each in ranges)))


async def _first_record(upstream: Upstream, stream: Stream, wanted: Range) -> int:
    """Return the first offset of a range at which there is a record; its end when there is none."""
    from postbus.log.kafka.records import FOREIGN, HOLE  # noqa: PLC0415 - needs the extra

    start, limit = wanted.start, 1
    while start < wanted.end:
        events = await fetched(upstream, stream, wanted.extent, start, min(limit, wanted.end - start))
        for event in events:
            if (event.topic, event.source) != (HOLE, FOREIGN):  # were it a record of that name, ours reads it as well
                return event.offset
        start, limit = events[-1].offset + 1, LOOK
    return wanted.end


def _records(spark: SparkSession, url: str, parts: dict[tuple[str, int], Range]) -> DataFrame:
    """Return the records of some ranges as Spark's source has them: what our events are made of, and nothing else."""
    from postbus.log.kafka.records import AFTER  # noqa: PLC0415 - needs the extra

    assigned: dict[str, list[int]] = {}
    starts: dict[str, dict[str, int]] = {}
    ends: dict[str, dict[str, int]] = {}
    for (topic, partition), wanted in parts.items():
        assigned.setdefault(topic, []).append(partition)
        starts.setdefault(topic, {})[str(partition)] = wanted.start
        ends.setdefault(topic, {})[str(partition)] = wanted.end
    target = _target(url)
    reader = spark.read.format(FORMAT).options(
        **_safely(target.security),
        **{
            "kafka.bootstrap.servers": target.address,
            "kafka.isolation.level": "read_uncommitted",
            "assign": _json(assigned),
            "startingOffsets": _json(starts),
            "endingOffsets": _json(ends),
            "includeHeaders": "true",
            "failOnDataLoss": "true",
        },
    )
    return reader.load().select(
        "topic",
        "partition",
        "offset",
        fn.unix_millis("timestamp").alias("at_ms"),
        fn.col("timestampType").alias("at_kind"),
        "value",
        _header(HEADER).alias("header"),
        _header(AFTER).alias("after"),
    )


def _safely(security: Security) -> dict[str, str]:
    """Return what Kafka's client in Java is told of TLS and the password; ours calls the same things otherwise."""
    settings = security.kafka()
    if not settings:
        return {}
    found = {"security.protocol": settings["security.protocol"]}
    if security.ca is not None:
        found |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": security.ca}
    if security.cert is not None and security.key is not None:
        found["ssl.keystore.type"] = "PEM"
        found["ssl.keystore.certificate.chain"] = Path(security.cert).read_text(encoding="ascii")
        found["ssl.keystore.key"] = Path(security.key).read_text(encoding="ascii")
    if security.user is not None and security.password is not None:
        module = "plain.PlainLoginModule" if security.mechanism == "PLAIN" else "scram.ScramLoginModule"
        user, password = (text.replace("\\", "\\\\").replace('"', '\\"') for text in (security.user, security.password))
        found["sasl.mechanism"] = security.mechanism
        found["sasl.jaas.config"] = f'{LOGIN}.{module} required username="{user}" password="{password}";'
    return {f"kafka.{name}": value for name, value in found.items()}


def _header(name: str) -> SparkColumn:
    """Return the value of the first header of a name."""
    return fn.get(fn.filter("headers", lambda each: each["key"] == fn.lit(name)), fn.lit(0))["value"]


def _target(url: str) -> Target:
    return parse_remote(url)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


# --- records to events, in tasks --------------------------------------------------------------------------------------


def _events(
    records: DataFrame,
    options: ReadOptions,
    parts: dict[tuple[str, int], Range],
    columns: list[Column],
    schema: StructType,
) -> DataFrame:
    url, topic = options.data, options.topic
    return records.mapInArrow(lambda batches: _rows(batches, url, parts, columns, topic), schema)


class _Record:
    """A record with what the log asks of a client's message."""

    __slots__ = ("_body", "_headers", "_time")

    def __init__(self, body: bytes | None, headers: list[tuple[str, bytes | None]], time: tuple[int, int]) -> None:
        self._body = body
        self._headers = headers
        self._time = time

    def value(self) -> bytes | None:
        """Return the body."""
        return self._body

    def headers(self) -> list[tuple[str, bytes | None]]:
        """Return the headers that count."""
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        """Return which kind of time it has (0: none), and the time in milliseconds."""
        return self._time


def _rows(
    batches: Iterator[pa.RecordBatch],
    url: str,
    parts: dict[tuple[str, int], Range],
    columns: list[Column],
    topic: str | None,
) -> Iterator[pa.RecordBatch]:
    """Yield one task's events: those of one range, which begins with its first record."""
    place: tuple[str, int] | None = None
    with _judging(url) as judge:

        def made(entries: list[Any], first: int) -> Iterator[pa.RecordBatch]:
            assert place is not None  # noqa: S101 - there was a record
            extent = parts[place].extent
            table = table_of(judge(extent.stream, *place, first, entries))
            if topic is not None:
                table = table.filter(matching(table.column("topic"), topic))
            yield from shaped(table, extent, columns).to_batches()

        following = 0
        for batch in batches:
            if place is None and batch.num_rows:
                place = batch.column("topic")[0].as_py(), batch.column("partition")[0].as_py()
                following = parts[place].start
                _check(batch, place, parts[place])
            entries = _entries(batch, following)
            if entries:
                yield from made(entries, following)
            following += len(entries)
        if place is not None and following < parts[place].end:
            yield from made([None] * (parts[place].end - following), following)


@with_hint
def _check(batch: pa.RecordBatch, place: tuple[str, int], wanted: Range) -> None:
    """Raise ``StorageError`` unless a range begins where it was planned to."""
    begin = batch.column("offset")[0].as_py()
    if begin != wanted.start:
        message = f"Spark's Kafka source begins {place[0]}/{place[1]} at {begin} instead of {wanted.start}"
        raise StorageError(message, hint=f"read it with {SETTING}=postbus")


def _entries(batch: pa.RecordBatch, following: int) -> list[Any]:
    """Return what is at each offset from ``following`` to the end of the batch; None where there is no record."""
    from postbus.log.kafka.records import AFTER  # noqa: PLC0415 - needs the extra

    entries: list[Any] = []
    names = ("offset", "at_kind", "at_ms", "value", "header", "after")
    columns = [batch.column(name).to_pylist() for name in names]
    for offset, at_kind, at_ms, body, header, after in zip(*columns, strict=True):
        gap = offset - following - len(entries)
        if gap:
            entries += [None] * gap
        # Java counts the kinds of time from -1, our client from 0.
        entries.append(_Record(body, [(HEADER, header), (AFTER, after)], (at_kind + 1, at_ms)))
    return entries


@contextmanager
def _judging(url: str) -> Iterator[Judge]:
    """Give the log's own way from records to events; it asks Kafka only when it has to look back for a repeat."""
    from postbus.log.kafka.link import Link  # noqa: PLC0415 - needs the extra
    from postbus.log.kafka.reading import Reader  # noqa: PLC0415 - as above
    from postbus.log.kafka.repeats import Repeats  # noqa: PLC0415 - as above

    target = _target(url)
    with asyncio.Runner() as runner:

        async def opened() -> tuple[Link, Reader]:
            link = Link(target.address, target.number("answer_s", ANSWER_S), SystemClock(), target.security.kafka())
            return link, Reader(link, 5)

        link, scout = runner.run(opened())
        repeats = Repeats(scout)

        def judge(stream: str, topic: str, partition: int, first: int, entries: Sequence[Any]) -> list[Event]:
            return runner.run(repeats.events(stream, topic, partition, first, entries))

        try:
            yield with_hint(judge)
        finally:
            runner.run(scout.close())
            runner.run(link.close())
