"""Our filters inside Spark: the one matcher of ``postbus.filters``, on Arrow batches.

Rules travel to the tasks as data and are compiled there. No filter is ever put into Spark's own words.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from postbus.filters import FilterIndex, compile_filter
from postbus.model import Event
from postbus.spark.schema import COLUMNS
from postbus.topics import check_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import DataFrame

__all__ = ["Rule", "events_of", "matched", "only_matching", "undisturbed", "values_of"]

NEEDED = tuple(COLUMNS)[1:]


class Rule(msgspec.Struct, frozen=True):
    """Whose rule it is, the topics it looks at, and the filter as it was given."""

    id: str
    pattern: str
    filter: dict[str, Any] = {}

    def check(self) -> None:
        """Raise what is wrong with it, before any task would."""
        check_pattern(self.pattern)
        compile_filter(self.filter)


def matched(events: DataFrame, rules: list[Rule], keep: Sequence[str] | None = None) -> DataFrame:
    """Return the events that match any rule, with ``matched_by``: the ids of those rules, in their order.

    ``events`` needs the columns of an event. All its columns are passed on, or those named by ``keep``: a payload that
    nobody wants need not travel on. Raises ``InvalidFilter``.
    """
    for rule in rules:
        rule.check()
    from pyspark.sql.types import ArrayType, StringType, StructField, StructType  # noqa: PLC0415 - names for one use

    kept = list(events.columns if keep is None else keep)
    schema = StructType([*(events.schema[name] for name in kept), StructField("matched_by", ArrayType(StringType()))])
    raw = msgspec.json.encode(rules)
    return events.mapInArrow(lambda batches: _match(batches, raw, kept), schema)


def only_matching(events: DataFrame, rule: Rule) -> DataFrame:
    """Return the events that match one rule, with the columns they had."""
    return matched(events, [rule]).drop("matched_by")


def events_of(batch: pa.RecordBatch) -> Iterator[Event]:
    """Yield the rows of a batch as events."""
    columns = [values_of(batch.column(name), name) for name in NEEDED]
    return (Event(*facts) for facts in zip(*columns, strict=True))


def values_of(column: pa.Array, name: str) -> list[Any]:
    """Return a column's values as the log has them: JSON as bytes, instants as microseconds."""
    if name in {"payload", "metadata", "headers", "delivery_handle"}:
        column = column.cast(pa.binary())
    elif name in {"occurred_at", "created_at"}:
        column = column.cast(pa.int64())
    return column.to_pylist()  # type: ignore[no-any-return]


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the collector of cycles away from many small objects that have none; it goes through all of them."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _match(batches: Iterator[pa.RecordBatch], raw: bytes, columns: list[str]) -> Iterator[pa.RecordBatch]:
    index: FilterIndex[str] = FilterIndex()
    for rule in msgspec.json.decode(raw, type=list[Rule]):
        index.add(rule.id, rule.pattern, compile_filter(rule.filter))
    kind = pa.list_(pa.string())
    for batch in batches:
        with undisturbed():
            names = [index.match(event) for event in events_of(batch)]
        places = [place for place, found in enumerate(names) if found]
        if places:
            kept = batch.select(columns).take(pa.array(places, pa.int32()))
            yield kept.append_column(pa.field("matched_by", kind), pa.array([names[place] for place in places], kind))
