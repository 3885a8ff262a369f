"""The events of a log as a DataFrame for jobs, wherever tasks run.

A store is a folder of one machine. On a cluster tasks therefore read the remote that the folder follows; streams that
only the folder has (dead letters, messages, the spool's) are few, are read here and sent to them.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from postbus.log import open_folder
from postbus.log.address import parse_address
from postbus.log.replica import stays_here
from postbus.spark.extent import extents, folder_of, followed, reading, remote_of
from postbus.spark.kafka import log_frame
from postbus.spark.reading import Range, read_range
from postbus.spark.schema import COLUMNS, EVENT_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from postbus.spark.extent import Extent

__all__ = ["CATCH_UP_S", "events_in", "folder_path", "is_local", "refresh", "tasks_read"]

CATCH_UP_S = 600.0


def is_local(spark: SparkSession) -> bool:
    """Say whether tasks run on this machine."""
    return str(spark.conf.get("spark.master", "")).startswith("local") and hasattr(spark, "_jsc")


def folder_path(data: str) -> str:
    """Return the folder of a log as a path that holds wherever it is used on this machine."""
    return str(folder_of(data).path.absolute())


def tasks_read(spark: SparkSession, data: str) -> str:
    """Return the log as tasks must be told it: the folder here, and elsewhere the remote that it follows, if any."""
    remote = None if is_local(spark) else followed(data)
    return folder_path(data) if remote is None else remote


def refresh(data: str) -> None:
    """Bring the copy of a remote to where the remote is now; does nothing to other logs."""
    if remote_of(data) is None and followed(data) is None:
        return

    async def catch_up() -> None:
        log = await open_folder(parse_address(data), catch_up_s=CATCH_UP_S)
        await log.close()

    with ThreadPoolExecutor(1) as thread:  # the caller may be inside a loop
        thread.submit(asyncio.run, catch_up()).result()


def events_in(
    spark: SparkSession,
    data: str,
    *,
    stream: str = ">",
    topic: str | None = None,
    spans: dict[str, tuple[int, int]] | None = None,
) -> DataFrame:
    """Return the events of streams, or of the ranges of partitions that ``spans`` names by their keys."""
    place = tasks_read(spark, data)
    with reading(folder_of(data)) as db:
        found = [each for each in extents(db, stream) if spans is None or each.key in spans]
    own = [] if remote_of(place) is None else [each for each in found if stays_here(each.stream)]
    frame = None
    if len(own) < len(found) or not found:
        options: dict[str, Any] = {"stream": stream} | ({} if topic is None else {"topic": topic})
        if spans is not None:
            named = {each.key: spans[each.key] for each in found if each not in own}
            options["startingOffset"] = {key: span[0] for key, span in named.items()}
            options["endingOffset"] = {key: span[1] for key, span in named.items()}
        frame = log_frame(spark, place, **options)
    if own:
        here = spark.createDataFrame(_read_here(data, own, spans, topic), EVENT_SCHEMA)
        return here if frame is None else frame.unionByName(here)
    assert frame is not None  # noqa: S101 - there is one or the other
    return frame


def _read_here(data: str, own: list[Extent], spans: dict[str, tuple[int, int]] | None, topic: str | None) -> pa.Table:
    columns = list(COLUMNS.values())
    schema = pa.schema([pa.field(each.name, each.kind, each.nullable) for each in columns])
    batches: list[pa.RecordBatch] = []
    for extent in own:
        start, end = (extent.first, extent.head) if spans is None else spans[extent.key]
        batches += read_range(folder_path(data), Range(extent, start, end), columns, topic=topic)
    return pa.Table.from_batches(batches, schema)
