"""The suite "spark": reading, matching, archiving and reporting a log of a million events, against plain processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Contender, Measure, Missing, Options, Race
from benchmarks.inbox_suite import events as bench_events
from benchmarks.spark_worker import rule_list
from postbus.filters import FilterIndex, compile_filter
from postbus.log import SqliteLog
from postbus.model import Draft, NotFound, StreamSettings
from postbus.spark.extent import Extent, extents, folder_of, reading
from postbus.spark.matcher import events_of
from postbus.spark.reading import Range, read_range
from postbus.spark.schema import COLUMNS
from postbus.spark.session import find_java

__all__ = ["races"]

STREAM = "bench.default.journal"
PARTITIONS = 4
PAGE = 2_000
CORES = os.cpu_count() or 1
ONE, BARE = "one plain process", f"{CORES} plain processes"


def build(folder: Path, count: int) -> str:
    """Make the log that all contenders of a race read, once."""
    data = folder.parent / f"log-{count}"
    if not data.exists():
        asyncio.run(_fill(data, count))
    return str(data)


async def _fill(data: Path, count: int) -> None:
    log = SqliteLog.open(data, durability="relaxed")
    try:
        await log.ensure_stream(STREAM, StreamSettings(partitions=PARTITIONS))
        sample = bench_events(min(count, 50_000))
        for start in range(0, count, PAGE):
            some = [sample[number % len(sample)] for number in range(start, min(start + PAGE, count))]
            await log.append(STREAM, [_draft(event) for event in some])
    finally:
        await log.close()


def _draft(event: Any) -> Draft:
    return Draft(
        topic=event.topic, source=event.source, payload_json=event.payload_json, metadata_json=event.metadata_json
    )


class SparkWorker(Contender):
    """A session of its own that does one kind of work."""

    def __init__(self, name: str, work: str, count: int, cores: int = CORES, *, prepare: str | None = None) -> None:
        self.name = name
        self._work = work
        self._prepare = prepare
        self._count = count
        self._cores = cores

    def open(self, folder: Path) -> None:
        """See ``Contender.open``."""
        try:
            find_java()
        except NotFound as error:
            raise Missing(f"{error.message}; {error.hint}") from error
        data = build(folder, self._count)
        command = [sys.executable, "-m", "benchmarks.spark_worker", f"local[{self._cores},4]", data]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        for work in (self._prepare, self._work):
            if work is not None:
                self._ask(work)

    def _ask(self, work: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(work + "\n")
        return float(self._process.stdout.readline())

    def run(self) -> dict[str, float]:
        """See ``Contender.run``."""
        seconds = self._ask(self._work)
        return {"rate": self._count / seconds, "seconds": seconds}

    def close(self) -> None:
        """See ``Contender.close``."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


class Plain(Contender):
    """The same reading, or reading and matching, by one plain process per core."""

    def __init__(self, name: str, count: int, *, matching: bool, processes: int = CORES) -> None:
        self.name = name
        self._count = count
        self._matching = matching
        self._processes = processes

    def open(self, folder: Path) -> None:
        """See ``Contender.open``."""
        self._data = build(folder, self._count)
        with reading(folder_of(self._data)) as db:
            self._extents = extents(db)
        self._pool = multiprocessing.get_context("spawn").Pool(self._processes)
        self.run()

    def run(self) -> dict[str, float]:
        """See ``Contender.run``."""
        started = time.perf_counter()
        shares = [(self._data, extent, self._matching) for extent in self._extents]
        assert sum(self._pool.starmap(read_share, shares, chunksize=1)) == self._count
        seconds = time.perf_counter() - started
        return {"rate": self._count / seconds, "seconds": seconds}

    def close(self) -> None:
        """See ``Contender.close``."""
        self._pool.close()
        self._pool.join()


def read_share(data: str, extent: Extent, matching: bool) -> int:  # noqa: FBT001 - called by starmap
    """Read one partition, match its events if asked to, and say how many they were."""
    index: FilterIndex[str] = FilterIndex()
    for rule in rule_list() if matching else []:
        index.add(rule.id, rule.pattern, compile_filter(rule.filter))
    count = 0
    for batch in read_range(data, Range(extent, extent.first, extent.head), list(COLUMNS.values())):
        count += batch.num_rows
        if matching:
            for event in events_of(batch):
                index.match(event)
    return count


def races(options: Options) -> list[Race]:
    """Return the races of the suite."""
    count = options.pick(1_000_000, 20_000)
    more = options.pick(5_000_000, 40_000)
    read = [
        Plain(ONE, count, matching=False, processes=1),
        Plain(BARE, count, matching=False),
        SparkWorker("Spark", "read", count),
        SparkWorker("Spark, 1 core", "read", count, 1),
    ]
    match = [
        Plain(BARE, count, matching=True),
        SparkWorker("Spark", "match", count),
        SparkWorker("Spark, 1 core", "match", count, 1),
    ]
    jobs: list[Contender] = [
        SparkWorker("archive", "archive", count),
        SparkWorker("verify", "verify", count, prepare="prepare"),
        SparkWorker("report", "report", count),
    ]
    sizes = (("small", count), ("large", more))
    grown: list[Contender] = [
        SparkWorker(f"{work}, {size}", work, number) for work in ("read", "archive") for size, number in sizes
    ]
    return [
        Race(
            "read",
            f"{count:,} events of 500 B through the data source, against ADBC into Arrow in a plain process",
            read,
            [
                Measure("reading", "rate", "Spark", ONE, at_least=0.7),
                Measure("reading, against all cores", "rate", "Spark", BARE),
                Measure("cores", "rate", "Spark", "Spark, 1 core", at_least=1.6),
            ],
        ),
        Race(
            "match",
            f"1,000 subscriptions on {count:,} events, against the same matcher in one process per core",
            match,
            [
                Measure("matching", "rate", "Spark", BARE, at_least=0.6),
                Measure("cores", "rate", "Spark", "Spark, 1 core", at_least=1.6),
            ],
        ),
        Race("jobs", f"the jobs over {count:,} events", jobs, [Measure(each.name, "rate", each.name) for each in jobs]),
        Race(
            "growth",
            f"{more:,} events against {count:,}",
            grown,
            [
                Measure(f"{work} as the log grows", "rate", f"{work}, large", f"{work}, small", at_least=1 / 1.2)
                for work in ("read", "archive")
            ],
        ),
    ]
