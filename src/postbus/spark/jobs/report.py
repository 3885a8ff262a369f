"""Report: what happened, how fast, how far behind, what failed, what led to what, and who used it.

Input: events of the log (or of the lake, when it is given) and what the store knows of its readers. Output: one HTML
page and the tables behind it as Parquet, both written anew. A second run on the same data gives the same numbers:
records of the pipeline's own runs are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from pyspark.sql import functions as fn

from postbus.clock import SystemClock
from postbus.model import NotFound, StorageError
from postbus.spark.extent import folder_of
from postbus.spark.frames import events_in, refresh
from postbus.spark.report.facts import collect, readers_of
from postbus.spark.report.page import page

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

    from postbus.clock import Clock
    from postbus.spark.lake import Lake
    from postbus.spark.report.facts import Facts

__all__ = ["between", "report"]


def between(events: DataFrame, since_us: int | None, until_us: int | None) -> DataFrame:
    """Return the events that were appended in a span of time."""
    if since_us is not None:
        events = events.where(fn.col("created_at") >= fn.timestamp_micros(fn.lit(since_us)))
    if until_us is not None:
        events = events.where(fn.col("created_at") < fn.timestamp_micros(fn.lit(until_us)))
    return events


def report(
    spark: SparkSession,
    data: str,
    out: str,
    *,
    lake: Lake | None = None,
    stream: str = ">",
    since_us: int | None = None,
    until_us: int | None = None,
    title: str = "Postbus report",
    progress: Callable[[str], None] = lambda _stage: None,
    clock: Clock | None = None,
) -> tuple[Facts, Path]:
    """Write ``report.html``, ``facts.json`` and ``tables/`` into the folder ``out``; return what they say.

    Raises ``NotFound`` when there are no events to report on.
    """
    from postbus.spark.jobs.replay import Selection, selected  # noqa: PLC0415 - names for one use

    progress("reading the readers")
    refresh(data)
    readers = readers_of(folder_of(data))
    if lake is None:
        source = events_in(spark, data, stream=stream)
    else:
        source = selected(lake.frame(spark), Selection(stream=stream))
    events = between(source, since_us, until_us).where(~fn.col("topic").startswith("pipeline.run."))
    progress("counting")
    if events.limit(1).count() == 0:
        raise NotFound("there are no events to report on", hint="choose other streams or another span of time")
    facts, tables = collect(spark, events, readers)
    folder = Path(out).absolute()
    for name, table in tables.items():
        progress(f"writing {name}")
        table.coalesce(1).write.mode("overwrite").parquet((folder / "tables" / name).as_uri())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "report.html"
        path.write_text(page(facts, title, (clock or SystemClock()).now_us()), encoding="utf-8")
        (folder / "facts.json").write_bytes(msgspec.json.encode(facts))
    except OSError as error:
        raise StorageError(f"the report cannot be written to {folder}: {error.strerror}") from error
    finally:
        spark.catalog.clearCache()
    return facts, path
