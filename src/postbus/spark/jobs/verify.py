"""Verify: recompute the hash chain of every archived event and compare it with the manifest and with the log.

Input: the lake, and the log if there is one. Output: a report; nothing is changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from postbus.model import NotFound
from postbus.spark.extent import chain_through, extents, folder_of, reading
from postbus.spark.matcher import values_of
from postbus.store.records import encode, link

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

    from postbus.spark.lake import Batch, Lake, Segment

__all__ = ["LakeProblem", "LakeReport", "archived", "chained", "verify_lake"]

# The facts of an event in the order in which its chain covers them.
FACTS = (
    "partition", "offset", "topic", "source", "variant", "key", "payload", "metadata", "headers", "correlation_id",
    "native_id", "delivery_handle", "occurred_at", "created_at", "trust",
)  # fmt: skip
RESULT = "batch int, stream string, partition int, events long, first long, next long, chain string, problem string"


class LakeProblem(msgspec.Struct, frozen=True):
    """One thing that is not as it was archived."""

    batch: int
    key: str
    what: str


class LakeReport(msgspec.Struct, kw_only=True):
    """What was looked at and what is wrong. ``verified`` says up to which offset each partition is whole."""

    batches: int
    events: int
    compared: int
    problems: list[LakeProblem]
    verified: dict[str, int]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def chained(events: DataFrame, segments: dict[str, str]) -> DataFrame:
    """Return one row per batch and partition: how many events there are, and the chain after the last of them.

    ``segments`` gives the chain before the first one, by ``batch/stream/partition``.
    """
    by = ("batch", "stream", "partition")
    ordered = events.select("batch", "stream", *FACTS).repartition(*by).sortWithinPartitions(*by, "offset")
    return ordered.mapInArrow(lambda batches: _walk(batches, segments), RESULT)


def _walk(batches: Iterator[pa.RecordBatch], segments: dict[str, str]) -> Iterator[pa.RecordBatch]:
    places: dict[tuple[int, str, int], list[Any]] = {}
    for page in batches:
        columns = [page.column("batch").to_pylist(), page.column("stream").to_pylist()]
        columns += [values_of(page.column(name), name) for name in FACTS]
        for batch, stream, *facts in zip(*columns, strict=True):
            key = (batch, stream, facts[0])
            place = places.get(key)
            if place is None:
                before = bytes.fromhex(segments.get(f"{batch}/{stream}/{facts[0]}", ""))
                place = places[key] = [0, facts[1], facts[1], before, None]
            if place[2] != facts[1] and place[4] is None:
                place[4] = f"offset {place[2]} is missing or twice; the next one there is {facts[1]}"
            place[0] += 1
            place[2] = facts[1] + 1
            place[3] = link(place[3], encode(facts))
    rows = [
        (*key, count, first, following, chain.hex(), problem)
        for key, (count, first, following, chain, problem) in places.items()
    ]
    schema = _result()
    arrays = [pa.array([row[number] for row in rows], kind) for number, kind in enumerate(schema.types)]
    yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _result() -> pa.Schema:
    kinds = {"int": pa.int32(), "long": pa.int64(), "string": pa.string()}
    return pa.schema([(name, kinds[kind]) for name, kind in (field.split() for field in RESULT.split(", "))])


def archived(lake: Lake) -> list[Batch]:
    """Return the batches of a lake. Raises ``NotFound`` when it has none."""
    batches = lake.batches()
    if not batches:
        raise NotFound(f"there is no archive in {lake.url}", hint="`postbus pipeline archive` makes one")
    return batches


def verify_lake(spark: SparkSession, lake: Lake, data: str | None = None) -> LakeReport:
    """Check every event of the lake, and against the log in ``data`` as far as that still has them."""
    batches = archived(lake)
    before = {f"{b.number}/{s.stream}/{s.partition}": s.before for b in batches for s in b.segments}
    found = {(r.batch, r.stream, r.partition): r for r in chained(lake.frame(spark, batches), before).collect()}
    report = LakeReport(batches=len(batches), events=0, compared=0, problems=[], verified={})
    logged = {} if data is None else _heads_in_log(data, batches)
    broken: set[str] = set()
    last: dict[str, Segment] = {}
    for batch in batches:
        for segment in batch.segments:
            key = segment.key
            what = _wrong(segment, found.get((batch.number, segment.stream, segment.partition)), last.get(key))
            if what is None and (batch.number, key) in logged:
                report.compared += 1
                if logged[batch.number, key] != segment.after:
                    what = f"the log has another chain at offset {segment.end}"
            if what is not None:
                broken.add(key)
                report.problems.append(LakeProblem(batch.number, key, what))
            elif key not in broken:
                report.verified[key] = segment.end
            last[key] = segment
            report.events += segment.count
    return report


def _wrong(segment: Segment, found: Any, last: Segment | None) -> str | None:
    if found is None:
        return "its events are gone"
    if found.problem is not None:
        return str(found.problem)
    if (found.events, found.first, found.next) != (segment.count, segment.first, segment.end):
        return f"it has {found.events} events from {found.first}, and the manifest {segment.count} from {segment.first}"
    if found.chain != segment.after:
        return "an event is altered: the chain does not come out"
    if last is not None and last.end == segment.first and last.after != segment.before:
        return "it does not follow from the batch before"
    return None


def _heads_in_log(data: str, batches: list[Batch]) -> dict[tuple[int, str], str]:
    """Return the log's own chain at the end of each segment that it still reaches."""
    heads = {}
    with reading(folder_of(data)) as db:
        known = {extent.key: extent for extent in extents(db)}
        for batch in batches:
            for segment in batch.segments:
                extent = known.get(segment.key)
                if extent is not None and extent.first <= segment.end <= extent.head:
                    heads[batch.number, segment.key] = chain_through(db, extent, segment.end).hex()
    return heads
