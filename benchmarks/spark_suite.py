"""The suite "spark": reading, matching, filling inboxes, archiving and reporting, against plain processes.

All races work on the same logs and with the same two sessions (one core, and all of them), which live as long as the
suite.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from benchmarks.harness import Contender, Measure, Missing, Options, Race
from benchmarks.spark_load import build, materialize_plainly, read_share
from postbus.model import NotFound
from postbus.spark.extent import extents, folder_of, reading
from postbus.spark.session import find_java

__all__ = ["races"]

CORES = os.cpu_count() or 1
ONE, ALL = "one plain process", f"{CORES} plain processes"


@functools.cache
def _place() -> Path:
    """Return the folder of the logs, which is gone when the suite has ended."""
    Path("build").mkdir(exist_ok=True)
    place = Path(mkdtemp(prefix="bench-spark-", dir="build")).absolute()
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


class _Session:
    """A session in a process of its own."""

    def __init__(self, cores: int) -> None:
        command = [sys.executable, "-m", "benchmarks.spark_worker", str(cores)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        atexit.register(self.close)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def ask(self, work: str, data: str) -> float:
        """Have a piece of work done on a log; return its seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{work} {data}\n")
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@functools.cache
def _session(cores: int) -> _Session:
    try:
        find_java()
    except NotFound as error:
        raise Missing(f"{error.message}; {error.hint}") from error
    return _Session(cores)


class OnSpark(Contender):
    """One kind of work in a session. ``changes``: every turn gets a copy of the log, outside of what is timed.

    Without ``warm`` the first turn counts: the session has done such work before.
    """

    def __init__(
        self,
        name: str,
        work: str,
        count: int,
        cores: int = CORES,
        *,
        prepare: str | None = None,
        changes: bool = False,
        warm: bool = True,
    ) -> None:
        self.name = name
        self._work = work
        self._count = count
        self._cores = cores
        self._prepare = prepare
        self._changes = changes
        self._warm = warm

    def open(self, folder: Path) -> None:
        """See ``Contender.open``."""
        self._session = _session(self._cores)
        self._data = build(_place(), self._count)
        self._folder = folder
        if self._prepare is not None:
            self._session.ask(self._prepare, self._data)
        if self._warm:
            self.run()

    def run(self) -> dict[str, float]:
        """See ``Contender.run``."""
        data = _copy(self._data, self._folder) if self._changes else self._data
        seconds = self._session.ask(self._work, data)
        return {"rate": self._count / seconds, "seconds": seconds}

    def close(self) -> None:
        """See ``Contender.close``; the session serves others."""


def _copy(data: str, folder: Path) -> str:
    """Return a fresh copy of a log that is surely on disk, in place of the last one."""
    copy = folder.absolute() / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(data, copy)
    os.sync()
    return str(copy)


class Plain(Contender):
    """The same work by plain processes; ``do`` gives the events of one turn to a pool of them."""

    def __init__(self, name: str, count: int, *, matching: bool, processes: int = CORES) -> None:
        self.name = name
        self._count = count
        self._matching = matching
        self._processes = processes

    def open(self, folder: Path) -> None:
        """See ``Contender.open``."""
        del folder
        self._data = build(_place(), self._count)
        with reading(folder_of(self._data)) as db:
            self._extents = extents(db)
        self._pool = multiprocessing.get_context("spawn").Pool(self._processes)
        self.run()

    def run(self) -> dict[str, float]:
        """See ``Contender.run``."""
        shares = [(self._data, extent, self._matching) for extent in self._extents]
        return _timed(self._count, lambda: sum(self._pool.starmap(read_share, shares, chunksize=1)))

    def close(self) -> None:
        """See ``Contender.close``."""
        self._pool.close()
        self._pool.join()


class PlainInboxes(Contender):
    """Inboxes filled by one plain process with the same matcher, through the same door."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self._count = count

    def open(self, folder: Path) -> None:
        """See ``Contender.open``."""
        self._data = build(_place(), self._count)
        self._folder = folder
        self._pool = multiprocessing.get_context("spawn").Pool(1)
        self._pool.apply(os.getpid)

    def run(self) -> dict[str, float]:
        """See ``Contender.run``."""
        copy = _copy(self._data, self._folder)
        return _timed(self._count, lambda: self._pool.apply(materialize_plainly, (copy,)))

    def close(self) -> None:
        """See ``Contender.close``."""
        self._pool.close()
        self._pool.join()


def _timed(count: int, work: Callable[[], int]) -> dict[str, float]:
    started = time.perf_counter()
    assert work() == count
    seconds = time.perf_counter() - started
    return {"rate": count / seconds, "seconds": seconds}


def races(options: Options) -> list[Race]:
    """Return the races of the suite."""
    count = options.pick(1_000_000, 20_000)
    return [_read(count), _match(count), _materialize(count), _jobs(count), _growth(count, options)]


def _read(count: int) -> Race:
    contenders = [
        Plain(ONE, count, matching=False, processes=1),
        Plain(ALL, count, matching=False),
        OnSpark("Spark", "read", count),
        OnSpark("Spark, 1 core", "read", count, 1),
    ]
    measures = [
        Measure("reading", "rate", "Spark", ONE, at_least=0.7),
        Measure("reading, against all cores", "rate", "Spark", ALL),
        Measure("cores", "rate", "Spark", "Spark, 1 core", at_least=1.6),
    ]
    about = f"{count:,} events of 500 B through the data source, against ADBC into Arrow in a plain process"
    return Race("read", about, contenders, measures)


def _match(count: int) -> Race:
    contenders = [
        Plain(ALL, count, matching=True),
        OnSpark("Spark", "match", count),
        OnSpark("Spark, 1 core", "match", count, 1),
    ]
    measures = [
        Measure("matching", "rate", "Spark", ALL, at_least=0.6),
        Measure("cores", "rate", "Spark", "Spark, 1 core", at_least=1.6),
    ]
    about = f"1,000 subscriptions on {count:,} events, against the same matcher in one process per core"
    return Race("match", about, contenders, measures)


def _materialize(count: int) -> Race:
    contenders = [
        PlainInboxes(ONE, count),
        OnSpark("Spark", "materialize", count, changes=True, warm=False),
        OnSpark("Spark, 1 core", "materialize", count, 1, changes=True, warm=False),
    ]
    measures = [
        Measure("filling inboxes", "rate", "Spark", ONE, at_least=0.6),
        Measure("filling inboxes on one core", "rate", "Spark, 1 core", ONE),
        Measure("cores", "rate", "Spark", "Spark, 1 core", at_least=1.6),
    ]
    about = f"1,000 subscriptions of 100 agents, {count:,} events into their inboxes, FULL"
    return Race("materialize", about, contenders, measures)


def _jobs(count: int) -> Race:
    contenders: list[Contender] = [
        OnSpark("archive", "archive", count),
        OnSpark("verify", "verify", count, prepare="prepare"),
        OnSpark("report", "report", count),
    ]
    measures = [Measure(each.name, "rate", each.name) for each in contenders]
    return Race("jobs", f"the jobs over {count:,} events", contenders, measures)


def _growth(count: int, options: Options) -> Race:
    more = options.pick(5_000_000, 40_000)
    contenders: list[Contender] = [
        OnSpark(f"{work}, {size}", work, number, warm=False)
        for work in ("read", "archive")
        for size, number in (("small", count), ("large", more))
    ]
    measures = [
        Measure(f"{work} as the log grows", "rate", f"{work}, large", f"{work}, small", at_least=1 / 1.2)
        for work in ("read", "archive")
    ]
    return Race("growth", f"{more:,} events against {count:,}", contenders, measures)
