"""Validate: which events of the history would a schema have refused.

Input: events of the log or the lake, and one schema. Output: a table of the refused events with what is wrong with
each, and a summary. Nothing is changed, and a second run gives the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
from pyspark.sql import functions as fn

from postbus.schemas import Document
from postbus.spark.matcher import values_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

__all__ = ["Summary", "TopIssue", "refused_by", "summary", "validate"]

REFUSED = (
    "id string, stream string, topic string, source string, occurred_at timestamp, payload string, "
    "issues array<struct<pointer:string, message:string, schema_pointer:string>>"
)
ISSUE = pa.struct([("pointer", pa.string()), ("message", pa.string()), ("schema_pointer", pa.string())])
KEPT = ("id", "stream", "topic", "source", "occurred_at", "payload")
TOP = 20


class TopIssue(msgspec.Struct, frozen=True):
    """One thing that is wrong, how many events have it, and one of them."""

    pointer: str
    message: str
    events: int
    example: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """How many events were looked at, how many would have been refused, and why, most frequent first."""

    checked: int
    refused: int
    issues: tuple[TopIssue, ...]


def refused_by(events: DataFrame, schema: bytes) -> DataFrame:
    """Return the events that a schema refuses, with their issues; raises ``InvalidSchema`` for a bad schema."""
    Document(schema)
    return events.select(*KEPT).mapInArrow(lambda batches: _refused(batches, schema), REFUSED)


def _refused(batches: Iterator[pa.RecordBatch], schema: bytes) -> Iterator[pa.RecordBatch]:
    document = Document(schema)
    kind = pa.list_(ISSUE)
    for batch in batches:
        issues = [document.issues(payload) for payload in values_of(batch.column("payload"), "payload")]
        places = [place for place, found in enumerate(issues) if found]
        if places:
            kept = batch.take(pa.array(places, pa.int32()))
            found = pa.array([[msgspec.structs.asdict(issue) for issue in issues[place]] for place in places], kind)
            yield kept.append_column(pa.field("issues", kind), found)


def summary(checked: int, refused: DataFrame) -> Summary:
    """Return the counts of a table of refused events."""
    each = refused.select("id", fn.explode("issues").alias("issue")).select("id", "issue.pointer", "issue.message")
    grouped = each.groupBy("pointer", "message").agg(fn.count_distinct("id").alias("events"), fn.min("id").alias("one"))
    rows = grouped.orderBy(fn.desc("events"), "pointer", "message").limit(TOP).collect()
    issues = tuple(TopIssue(row.pointer, row.message, row.events, row.one) for row in rows)
    return Summary(checked=checked, refused=refused.count(), issues=issues)


def validate(events: DataFrame, schema: bytes, out: str | None = None) -> Summary:
    """Check events against a schema; ``out`` is a folder for the refused ones as Parquet, written anew."""
    refused = refused_by(events, schema).cache()
    try:
        if out is not None:
            refused.write.mode("overwrite").parquet(out)
        return summary(events.count(), refused)
    finally:
        refused.unpersist()
