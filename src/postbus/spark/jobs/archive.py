"""Archive: what is new in the log becomes the next batches of the lake.

Input: the log from where the manifest ends. Output: Parquet files and a page of the manifest per batch, with ranges,
counts and the chain at both ends. Idempotent: a run that dies leaves a batch that nobody reads, and the next one begins
where the manifest ends. A second run with nothing new does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from pyspark.sql import functions as fn

from postbus.clock import SystemClock
from postbus.model import CorruptLog, OffsetOutOfRange
from postbus.spark.extent import chain_through, extents, folder_of, reading
from postbus.spark.frames import events_in, refresh
from postbus.spark.lake import PARTITIONED_BY, Batch, Lake, Segment

if TYPE_CHECKING:
    from collections.abc import Callable

    import apsw
    from pyspark.sql import DataFrame, SparkSession

    from postbus.clock import Clock

__all__ = ["Archived", "Standing", "archive", "backlog", "partitioned", "standing"]

BATCH_EVENTS = 500_000
FEW = 1_000

# How many events of a range are no records of runs.
OTHERS = """
    SELECT count(*) FROM events WHERE stream_id = ? AND partition = ? AND "offset" >= ? AND "offset" < ?
    AND topic NOT GLOB 'pipeline.run.*'
"""


class Archived(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did: batches and events added, unfinished batches of earlier runs removed, and where it ended."""

    batches: int
    events: int
    dropped: int
    ends: dict[str, int]


def partitioned(events: DataFrame) -> DataFrame:
    """Return events as the lake keeps them: with their tenant and day, in order, without what can be made again."""
    tenant = fn.substring_index("stream", ".", 2)
    day = fn.date_format("created_at", "yyyy-MM-dd")
    kept = events.drop("id").withColumn("tenant", tenant).withColumn("day", day)
    return kept.sortWithinPartitions(*PARTITIONED_BY, "partition", "offset")


def archive(
    spark: SparkSession,
    data: str,
    lake: Lake,
    *,
    stream: str = ">",
    accept_gaps: bool = False,
    batch_events: int = BATCH_EVENTS,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    clock: Clock | None = None,
) -> Archived:
    """Archive everything there is at the moment; raises ``OffsetOutOfRange`` when events were trimmed unarchived."""
    refresh(data)
    with lake.locked():
        known = lake.batches()
        dropped = lake.drop_unfinished(len(known))
        _check_store(data, lake, known)
        waiting = _waiting(data, known, stream, accept_gaps=accept_gaps)
        total = sum(end - start for start, end in waiting.values())
        done = batches = 0
        progress(0, total)
        while any(start < end for start, end in waiting.values()):
            taken = _next(waiting, batch_events)
            batch = _plan(data, len(known) + batches + 1, taken, (clock or SystemClock()).now_us())
            _write(spark, data, lake, batch)
            lake.add(batch)
            waiting = {key: (taken[key][1] if key in taken else start, end) for key, (start, end) in waiting.items()}
            done, batches = done + batch.events, batches + 1
            progress(done, total)
        return Archived(batches=batches, events=done, dropped=len(dropped), ends=_ends(lake.batches()))


def backlog(data: str, lake: Lake, *, stream: str = ">") -> int:
    """Return how many events wait to be archived; 0 when they are nothing but records of the pipeline's own runs."""
    refresh(data)
    ends = _ends(lake.batches())
    with reading(folder_of(data)) as db:
        spans = [(extent, ends.get(extent.key, extent.first)) for extent in extents(db, stream)]
        total = sum(max(0, extent.head - start) for extent, start in spans)
        if total > FEW:
            return total
        where = [(extent.stream_id, extent.partition, start, extent.head) for extent, start in spans]
        return total if any(db.execute(OTHERS, each).get for each in where) else 0


class Standing(msgspec.Struct, frozen=True):
    """One partition of the log, and up to which offset it is archived (0: not at all)."""

    key: str
    first: int
    head: int
    archived: int


def standing(data: str, lake: Lake) -> list[Standing]:
    """Return how far the archive of each partition is."""
    refresh(data)
    ends = _ends(lake.batches())
    with reading(folder_of(data)) as db:
        return [Standing(each.key, each.first, each.head, ends.get(each.key, 0)) for each in extents(db)]


def _ends(batches: list[Batch]) -> dict[str, int]:
    return {segment.key: segment.end for batch in batches for segment in batch.segments}


def _check_store(data: str, lake: Lake, known: list[Batch]) -> None:
    with reading(folder_of(data)) as db:
        store_id = _store_id(db)
    if known and known[-1].store_id != store_id:
        message = f"the lake {lake.url} holds another store than {data}"
        raise CorruptLog(message, hint="give each store a lake of its own")


def _store_id(db: apsw.Connection) -> str:
    return str(db.execute("SELECT value FROM store_facts WHERE name = 'store_id'").get)


def _waiting(data: str, known: list[Batch], stream: str, *, accept_gaps: bool) -> dict[str, tuple[int, int]]:
    """Return what is not archived yet, by partition."""
    ends = _ends(known)
    waiting = {}
    with reading(folder_of(data)) as db:
        for extent in extents(db, stream):
            start = ends.get(extent.key, extent.first)
            if start < extent.first and not accept_gaps:
                message = f"{extent.key} was trimmed to {extent.first}, and is archived only up to {start}"
                raise OffsetOutOfRange(message, hint="those events are gone; --accept-gaps archives the rest")
            if start > extent.head:
                raise CorruptLog(f"{extent.key} ends at {extent.head}, and is archived up to {start}")
            waiting[extent.key] = (max(start, extent.first), extent.head)
    return waiting


def _next(waiting: dict[str, tuple[int, int]], limit: int) -> dict[str, tuple[int, int]]:
    taken, left = {}, limit
    for key, (start, end) in waiting.items():
        count = min(end - start, left)
        if count:
            taken[key] = (start, start + count)
            left -= count
    return taken


def _plan(data: str, number: int, taken: dict[str, tuple[int, int]], now_us: int) -> Batch:
    with reading(folder_of(data)) as db:
        segments = tuple(
            Segment(
                stream=extent.stream,
                epoch=extent.epoch,
                partition=extent.partition,
                first=taken[extent.key][0],
                end=taken[extent.key][1],
                before=chain_through(db, extent, taken[extent.key][0]).hex(),
                after=chain_through(db, extent, taken[extent.key][1]).hex(),
            )
            for extent in extents(db)
            if extent.key in taken
        )
        events = sum(segment.count for segment in segments)
        return Batch(number=number, store_id=_store_id(db), created_at_us=now_us, events=events, segments=segments)


def _write(spark: SparkSession, data: str, lake: Lake, batch: Batch) -> None:
    events = events_in(spark, data, spans={segment.key: (segment.first, segment.end) for segment in batch.segments})
    writer = partitioned(events).write.mode("overwrite").partitionBy(*PARTITIONED_BY)
    writer.parquet(lake.place(batch.number))
    _check_written(lake.frame(spark, [batch]), batch)


def _check_written(written: DataFrame, batch: Batch) -> None:
    """Count what is really in the files, before a page of the manifest says so."""
    counts = written.groupBy("stream", "partition").agg(fn.count("*"), fn.min("offset"), fn.max("offset")).collect()
    found = {(row[0], row[1]): (row[2], row[3], row[4] + 1) for row in counts}
    wanted = {(each.stream, each.partition): (each.count, each.first, each.end) for each in batch.segments}
    if found != wanted:
        raise CorruptLog(f"batch {batch.number} was not written as planned: {found} instead of {wanted}")
