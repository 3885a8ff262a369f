"""A Spark session in a process of its own, which does one piece of work per line of its input and answers its seconds.

``python -m benchmarks.spark_worker MASTER DATA``. Several stand ready beside each other: a process can have only
one session.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.inbox_suite import rules
from postbus.spark.jobs.archive import archive
from postbus.spark.jobs.report import report
from postbus.spark.jobs.verify import verify_lake
from postbus.spark.lake import Lake
from postbus.spark.matcher import Rule, matched
from postbus.spark.session import Settings, opened_session

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

__all__ = ["RULES", "rule_list"]

RULES = 1_000


def rule_list() -> list[Rule]:
    """Return the subscriptions that are matched: of the kinds people write."""
    return [Rule(str(number), pattern, spec) for number, (pattern, spec) in enumerate(rules(RULES))]


def works(spark: SparkSession, data: str) -> dict[str, Callable[[], None]]:
    """Return what this worker can do."""
    numbers = itertools.count()
    first = Lake(f"{data}-lake-first")

    def events() -> DataFrame:
        return spark.read.format("postbus").option("data", data).load()

    def archive_anew() -> None:
        folder = f"{data}-lake-{next(numbers)}"
        archive(spark, data, Lake(folder))
        shutil.rmtree(folder)

    def verify() -> None:
        assert verify_lake(spark, first, data).ok

    def prepare() -> None:
        archive(spark, data, first)

    return {
        "read": lambda: events().write.format("noop").mode("overwrite").save(),
        "match": lambda: matched(events(), rule_list()).write.format("noop").mode("overwrite").save(),
        "archive": archive_anew,
        "prepare": prepare,
        "verify": verify,
        "report": lambda: (report(spark, data, f"{data}-report"), None)[1],
    }


def main(master: str, data: str) -> None:
    """Answer until the input ends."""
    with opened_session(Settings(master=master, memory="2g", shuffle_partitions=4)) as spark:
        known = works(spark, str(Path(data).absolute()))
        print("ready", flush=True)
        for line in sys.stdin:
            started = time.perf_counter()
            known[line.strip()]()
            print(msgspec.json.encode(time.perf_counter() - started).decode(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
