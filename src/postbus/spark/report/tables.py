"""The tables of the report: pure functions of DataFrames, by Spark's own aggregations.

``events`` has the columns of an event; dead letters are counted by themselves, not as events again. ``commits``
(stream, partition, consumer, through, at) says when a reader had settled everything up to an offset. Latencies are in
seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as fn

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = [
    "COMMITS",
    "PERCENTILES",
    "chains",
    "dead_letters",
    "enriched",
    "heads_over_time",
    "rates",
    "settled",
    "settled_over_time",
    "settling_times",
    "steps",
    "tenants",
    "topics",
]

COMMITS = "stream string, partition int, consumer string, through long, at timestamp"
PERCENTILES = (0.5, 0.9, 0.95, 0.99)


def enriched(events: DataFrame) -> DataFrame:
    """Return events with what the tables need: tenant, size, whether dead, and the headers that the bus wrote."""
    headers = fn.from_json("headers", "map<string,string>")
    return events.select(
        "id", "stream", "partition", "offset", "topic", "source", "occurred_at", "created_at",
        # What derives from an event without a correlation takes its address as one.
        fn.coalesce("correlation_id", "id").alias("correlation_id"),
        fn.substring_index("stream", ".", 2).alias("tenant"),
        fn.octet_length("payload").alias("bytes"),
        fn.col("stream").endswith("-dlq").alias("dead"),
        headers["postbus.causation_id"].alias("cause"),
        fn.coalesce(headers["postbus.hops"].cast("int"), fn.lit(0)).alias("hops"),
        headers["postbus.dlq.reason"].alias("reason"),
        headers["postbus.dlq.subscription"].alias("subscription"),
        headers["postbus.dlq.origin_topic"].alias("origin_topic"),
        headers["postbus.dlq.error"].alias("error"),
    )  # fmt: skip


def _bucket(column: str, width_s: int) -> Column:
    return fn.floor(fn.unix_micros(column) / fn.lit(width_s * 1_000_000)) * width_s


def _seconds(start: str, end: str) -> Column:
    return (fn.unix_micros(end) - fn.unix_micros(start)) / 1e6


def _spread(value: Column | str) -> list[Column]:
    shares = fn.array(*[fn.lit(share) for share in PERCENTILES])
    return [fn.percentile(value, shares).alias("percentiles"), fn.max(value).alias("longest")]


def rates(events: DataFrame, width_s: int) -> DataFrame:
    """Return how many events were appended per bucket of time and topic."""
    alive = events.where("not dead")
    return alive.groupBy(_bucket("created_at", width_s).alias("bucket"), "topic").agg(fn.count("*").alias("events"))


def topics(events: DataFrame) -> DataFrame:
    """Return each topic with its number of events, their size, and how late they were appended after they happened."""
    late = fn.greatest(_seconds("occurred_at", "created_at"), fn.lit(0.0))
    grouped = events.where("not dead").withColumn("late", late).groupBy("topic")
    facts = [
        fn.count("*").alias("events"),
        fn.sum("bytes").alias("bytes"),
        fn.count_distinct("source").alias("sources"),
    ]
    return grouped.agg(*facts, fn.percentile("late", fn.lit(0.95)).alias("late_p95")).orderBy(
        fn.desc("events"), "topic"
    )


def tenants(events: DataFrame) -> DataFrame:
    """Return what each tenant uses."""
    return (
        events.groupBy("tenant")
        .agg(
            fn.count_if(~fn.col("dead")).alias("events"),
            fn.sum(fn.when(fn.col("dead"), 0).otherwise(fn.col("bytes"))).alias("bytes"),
            fn.count_distinct("stream").alias("streams"),
            fn.count_if(fn.col("dead")).alias("dead"),
            fn.max("created_at").alias("latest"),
        )
        .orderBy(fn.desc("events"), "tenant")
    )


def dead_letters(events: DataFrame) -> DataFrame:
    """Return the dead letters by reason, subscription and the topic they had."""
    return (
        events.where("dead and subscription is not null")
        .groupBy("reason", "subscription", "origin_topic")
        .agg(
            fn.count("*").alias("events"),
            fn.max("created_at").alias("latest"),
            fn.max_by("error", "offset").alias("error"),
        )
        .orderBy(fn.desc("events"), "reason", "subscription", "origin_topic")
    )


def chains(events: DataFrame) -> DataFrame:
    """Return the causal chains: events of one correlation of which at least one derives from another."""
    alive = events.where("not dead")
    children = alive.where("cause is not null").groupBy("correlation_id", "cause").count()
    widest = children.groupBy("correlation_id").agg(fn.max("count").alias("fan_out"))
    whole = alive.groupBy("correlation_id").agg(
        fn.count("*").alias("events"),
        (fn.max("hops") + 1).alias("depth"),
        fn.min_by("topic", "created_at").alias("first_topic"),
        fn.min("created_at").alias("began"),
        ((fn.unix_micros(fn.max("created_at")) - fn.unix_micros(fn.min("created_at"))) / 1e6).alias("took"),
    )
    return whole.join(widest, "correlation_id", how="inner")


def steps(events: DataFrame) -> DataFrame:
    """Return how long it took from an event to one that derives from it, by both topics: what handlers need."""
    parents = events.select(
        fn.col("id").alias("cause"), fn.col("topic").alias("from_topic"), fn.col("created_at").alias("at")
    )
    derived = events.where("cause is not null and not dead").select("cause", "topic", "created_at")
    pairs = derived.join(parents, "cause", how="inner").withColumn("took", _seconds("at", "created_at"))
    grouped = pairs.groupBy("from_topic", fn.col("topic").alias("to_topic"))
    return grouped.agg(fn.count("*").alias("events"), *_spread("took")).orderBy(
        fn.desc("events"), "from_topic", "to_topic"
    )


def settled(events: DataFrame, commits: DataFrame, patterns: DataFrame) -> DataFrame:
    """Return every event a subscription has settled, with ``took``: from its append to the commit that passed it.

    ``patterns`` (consumer, tenant, topics) has a regular expression per subscription. The first commit at or after an
    event's offset is found by one sorted pass over both.
    """
    readers = commits.select("stream", "partition", "consumer").distinct()
    mine = (
        events.where("not dead")
        .select("stream", "partition", "offset", "topic", "created_at", "tenant")
        .join(readers, ["stream", "partition"], how="inner")
        .join(patterns, ["consumer", "tenant"], how="inner")
        .where("topic rlike topics")
        .select(
            "stream",
            "partition",
            "consumer",
            "offset",
            "topic",
            "created_at",
            fn.lit(None).cast("timestamp").alias("at"),
        )
    )
    marks = commits.select(
        "stream", "partition", "consumer", fn.col("through").alias("offset"),
        fn.lit(None).cast("string").alias("topic"), fn.lit(None).cast("timestamp").alias("created_at"), "at",
    )  # fmt: skip
    # From the end to the beginning, so that Spark keeps one value; at one offset the commit comes before the event.
    backwards = Window.partitionBy("stream", "partition", "consumer").orderBy(
        fn.desc("offset"), fn.col("at").desc_nulls_last()
    )
    seen = backwards.rowsBetween(Window.unboundedPreceding, 0)
    joined = mine.unionByName(marks).withColumn("done_at", fn.last("at", ignorenulls=True).over(seen))
    done = joined.where("topic is not null and done_at is not null and done_at >= created_at")
    return done.select("consumer", "stream", "topic", "created_at", _seconds("created_at", "done_at").alias("took"))


def settling_times(done: DataFrame) -> DataFrame:
    """Return the end-to-end latencies of each subscription."""
    return done.groupBy("consumer").agg(fn.count("*").alias("events"), *_spread("took")).orderBy("consumer")


def heads_over_time(events: DataFrame, width_s: int) -> DataFrame:
    """Return how far each partition reached at the end of each bucket in which it grew."""
    grouped = events.where("not dead").groupBy("stream", "partition", _bucket("created_at", width_s).alias("bucket"))
    return grouped.agg((fn.max("offset") + 1).alias("head"))


def settled_over_time(commits: DataFrame, width_s: int) -> DataFrame:
    """Return how far each reader was at the end of each bucket in which it moved."""
    grouped = commits.groupBy("consumer", "stream", "partition", _bucket("at", width_s).alias("bucket"))
    return grouped.agg((fn.max("through") + 1).alias("next_offset"))
