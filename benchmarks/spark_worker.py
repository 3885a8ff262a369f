"""A Spark session in a process of its own, which does one piece of work per line of its input and answers its seconds.

``python -m benchmarks.spark_worker CORES``; a line is the work and the log it is done on. Several stand ready beside
each other: a process can have only one session.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING

import msgspec
from pyspark.sql.types import StructType

from benchmarks.spark_load import rule_list
from postbus.spark.jobs.archive import archive
from postbus.spark.jobs.materialize import materialize
from postbus.spark.jobs.report import report
from postbus.spark.jobs.verify import verify_lake
from postbus.spark.lake import Lake
from postbus.spark.matcher import NEEDED, matched
from postbus.spark.schema import EVENT_SCHEMA
from postbus.spark.session import Settings, opened_session

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

__all__ = ["works"]

FEW = 100


def works(spark: SparkSession) -> dict[str, Callable[[str], object]]:
    """Return what this worker can do to a log."""
    numbers = itertools.count()

    def events(data: str) -> DataFrame:
        return spark.read.format("postbus").option("data", data).load()

    def match(data: str) -> DataFrame:
        needed = StructType([EVENT_SCHEMA[name] for name in NEEDED])
        return matched(
            spark.read.format("postbus").option("data", data).schema(needed).load(),
            rule_list(),
            keep=("stream", "partition", "offset"),
        )

    def discard(frame: DataFrame) -> None:
        frame.write.format("noop").mode("overwrite").save()

    def archive_anew(data: str) -> None:
        folder = f"{data}-lake-{next(numbers)}"
        archive(spark, data, Lake(folder))
        shutil.rmtree(folder)

    def verify(data: str) -> None:
        assert verify_lake(spark, Lake(f"{data}-lake-first"), data).ok

    return {
        "read": lambda data: discard(events(data)),
        "match": lambda data: discard(match(data)),
        "materialize": lambda data: asyncio.run(materialize(spark, data)),
        "archive": archive_anew,
        "prepare": lambda data: archive(spark, data, Lake(f"{data}-lake-first")),
        "verify": verify,
        "report": lambda data: report(spark, data, f"{data}-report"),
    }


def wake(spark: SparkSession, data: str) -> None:
    """Have Spark start its Python processes again, which end when they were idle while others took their turns."""
    few = spark.read.format("postbus").option("data", data).option("endingOffset", FEW).load()
    matched(few, rule_list()[:1]).write.format("noop").mode("overwrite").save()


def main(cores: str) -> None:
    """Answer until the input ends."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])  # what is started from here has no more
    master = f"local[{cores},4]"
    with opened_session(Settings(master=master, memory="2g", shuffle_partitions=4)) as spark:
        known = works(spark)
        print("ready", flush=True)
        for line in sys.stdin:
            work, _, data = line.strip().partition(" ")
            wake(spark, data)
            started = time.perf_counter()
            known[work](data)
            print(msgspec.json.encode(time.perf_counter() - started).decode(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
