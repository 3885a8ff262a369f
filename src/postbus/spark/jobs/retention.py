"""Retention: trim from the log what a verified archive holds, and nothing else.

Input: the lake and the log. Output: a shorter log. Idempotent: a second run finds nothing to remove. Readers are never
overtaken: what a subscription still needs stays, and is named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from postbus.clock import SystemClock
from postbus.log import open_log
from postbus.log.sqlite.ledger import View, load_stream
from postbus.model import CorruptLog
from postbus.spark.extent import Extent, extents, folder_of, reading
from postbus.spark.jobs.verify import verify_lake

if TYPE_CHECKING:
    from collections.abc import Callable

    import apsw
    from pyspark.sql import SparkSession

    from postbus.clock import Clock
    from postbus.spark.lake import Lake

__all__ = ["Trimmed", "trim_archived"]


class Trimmed(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed in one partition: events, the first that is left, and who held the rest back."""

    key: str
    removed: int
    first: int
    held_back_by: tuple[str, ...]


async def trim_archived(
    spark: SparkSession,
    data: str,
    lake: Lake,
    *,
    stream: str = ">",
    older_than_s: float | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    clock: Clock | None = None,
) -> list[Trimmed]:
    """Verify the lake against the log, then trim what is archived (and older than that).

    Raises ``CorruptLog`` when anything in the lake is not as it was archived; nothing is trimmed then.
    """
    report = verify_lake(spark, lake, data)
    if not report.ok:
        first = report.problems[0]
        message = f"batch {first.batch} of the lake does not hold for {first.key}: {first.what}; nothing was trimmed"
        raise CorruptLog(message, hint="`postbus pipeline verify` shows everything that is wrong")
    before_us = None if older_than_s is None else (clock or SystemClock()).now_us() - int(older_than_s * 1e6)
    with reading(folder_of(data)) as db:
        targets = [
            (extent, target)
            for extent in extents(db, stream)
            if (target := _target(db, extent, report.verified.get(extent.key, 0), before_us)) > extent.first
        ]
    done = []
    log = await open_log(data, clock, create=False)
    try:
        for number, (extent, target) in enumerate(targets):
            progress(number, len(targets))
            result = await log.trim(extent.stream, target, extent.partition)
            left = result.first_offsets[extent.partition]
            done.append(Trimmed(key=extent.key, removed=result.removed, first=left, held_back_by=result.held_back_by))
        progress(len(targets), len(targets))
    finally:
        await log.close()
    return done


def _target(db: apsw.Connection, extent: Extent, archived: int, before_us: int | None) -> int:
    if before_us is None:
        return min(archived, extent.head)
    kept = load_stream(db, extent.stream)
    assert kept is not None  # noqa: S101 - in the same snapshot
    young = View(db, kept, {}).first_created_since(extent.partition, before_us)
    return min(archived, extent.head, young)
