"""Replay: events of the lake are appended to a log again: a range, a topic, what a filter matches, or all.

Input: the lake. Output: events in a stream that is not the one they came from, or in another log. Idempotent: an event
keeps its native id, or takes its old address as one, so that running again adds nothing. The order of each partition is
kept; ``postbus.replay.origin_id`` says where an event came from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql import functions as fn

from postbus.envelope import RESERVED_PREFIX, draft
from postbus.model import Draft, Event, Invalid, PostbusError, Trust, instant
from postbus.spark.extent import full_name
from postbus.spark.feed import PAGE, PAGE_SCHEMA, Fed, Page, Refused, feed
from postbus.spark.matcher import Rule, events_of, only_matching
from postbus.topics import check_pattern, check_stream_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import Column, DataFrame, SparkSession

    from postbus.spark.lake import Lake

__all__ = ["ORIGIN", "Selection", "pages", "replay", "selected"]

ORIGIN = "postbus.replay.origin_id"


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which events: streams, a partition, offsets ``first`` up to ``end``, topics, times of appending, a filter."""

    stream: str = ">"
    partition: int | None = None
    first: int | None = None
    end: int | None = None
    topic: str | None = None
    since_us: int | None = None
    until_us: int | None = None
    filter: dict[str, Any] = {}


def selected(events: DataFrame, wanted: Selection) -> DataFrame:
    """Return the events of a selection."""
    conditions: list[Column] = [_like("stream", full_name(wanted.stream))]
    if wanted.partition is not None:
        conditions.append(fn.col("partition") == wanted.partition)
    if wanted.first is not None:
        conditions.append(fn.col("offset") >= wanted.first)
    if wanted.end is not None:
        conditions.append(fn.col("offset") < wanted.end)
    if wanted.topic is not None:
        conditions.append(_like("topic", check_pattern(wanted.topic)))
    if wanted.since_us is not None:
        conditions.append(fn.col("created_at") >= fn.timestamp_micros(fn.lit(wanted.since_us)))
    if wanted.until_us is not None:
        conditions.append(fn.col("created_at") < fn.timestamp_micros(fn.lit(wanted.until_us)))
    for condition in conditions:
        events = events.where(condition)
    return only_matching(events, Rule("replay", ">", wanted.filter)) if wanted.filter else events


def _like(column: str, pattern: str) -> Column:
    """Return the condition that a dotted name matches a pattern; a name without wildcards prunes whole folders."""
    tokens = pattern.split(".")
    if not {"*", ">"} & set(tokens):
        return fn.col(column) == pattern
    words = {"*": "[^.]+", ">": ".+"}
    return fn.col(column).rlike("^" + "[.]".join(words.get(token, token) for token in tokens) + "$")


def pages(events: DataFrame) -> DataFrame:
    """Return the events as pages of drafts, in the order of their streams, partitions and offsets."""
    ordered = events.orderBy("stream", "partition", "offset")
    return ordered.mapInArrow(lambda batches: _pages(batches), PAGE_SCHEMA)  # noqa: PLW0108 - pickled with its module


def _pages(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    encode = msgspec.msgpack.Encoder().encode
    for batch in batches:
        events = list(events_of(batch))
        for start in range(0, len(events), PAGE):
            some = events[start : start + PAGE]
            drafts, places, refused = [], [], []
            for event in some:
                try:
                    drafts.append(_draft(event))
                    places.append(event.id)
                except PostbusError as error:
                    refused.append(Refused(event.id, error.message, event.payload_json.decode()))
            page = encode(Page(drafts, places, refused, len(some)))
            yield pa.RecordBatch.from_pylist([{"page": page}], schema=pa.schema([("page", pa.binary())]))


def _draft(event: Event) -> Draft:
    headers = event.headers
    system = {name: value for name, value in headers.items() if name.startswith(RESERVED_PREFIX)}
    return draft(
        event.topic,
        event.source,
        event.payload_json,
        variant=event.variant,
        key=event.key,
        metadata=event.metadata_json,
        headers={name: value for name, value in headers.items() if name not in system},
        correlation_id=event.correlation_id,
        native_id=event.native_id or event.id,
        delivery_handle=event.delivery_handle_json,
        occurred_at=instant(event.occurred_at_us),
        trust=Trust(event.trust),
        system_headers=system | {ORIGIN: event.id},
    )


async def replay(
    spark: SparkSession,
    lake: Lake,
    data: str,
    into: str,
    *,
    wanted: Selection | None = None,
    rate: float | None = None,
    refuse: Callable[[list[Refused]], None] = lambda _rows: None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Fed:
    """Append the selected events of the lake to the stream ``into`` of the log in ``data``; both are made when missing.

    Raises ``Invalid`` when a selected event came from a stream of that very name.
    """
    check_stream_name(into)
    if rate is not None and rate <= 0:
        raise Invalid("the rate is not above 0", hint="give events per second, or none for as fast as it goes")
    chosen = selected(lake.frame(spark), wanted or Selection()).cache()
    try:
        counts = {row["stream"]: row["count"] for row in chosen.groupBy("stream").count().collect()}
        if into in counts:
            message = f"events of {into} cannot be replayed into {into} itself"
            raise Invalid(message, hint="name another stream with --into; to handle events again, reset a subscription")
        total = sum(counts.values())
        progress(0, total)
        if not total:
            return Fed()
        rows = pages(chosen).toLocalIterator(prefetchPartitions=True)
        return await feed(rows, data, into, rate=rate, refuse=refuse, progress=lambda done: progress(done, total))
    finally:
        chosen.unpersist()
