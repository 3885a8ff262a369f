"""References that are no bus: bare apsw (the ceiling), and the standard library's sqlite3 as a peer."""

from __future__ import annotations

import sqlite3
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import PAGE_BYTES, Contender, Options, apsw_connection, until_steady
from benchmarks.load import DRAFTS, PAYLOAD_BYTES, PAYLOADS, Stopwatch
from postbus.log.heads import Head
from postbus.store.migrations import migrate
from postbus.store.records import INSERT_COLUMNS, insert_statement

__all__ = ["BareBatches", "BareEventSingles", "BareEvents", "BareSingles", "StdlibSingles", "quantiles_us"]

TABLE = "CREATE TABLE rows (id INTEGER PRIMARY KEY, payload BLOB NOT NULL)"
INSERT = "INSERT INTO rows (payload) VALUES (?)"
INSERT_EVENT = insert_statement(1)


def quantiles_us(taken_s: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile of some times, in microseconds."""
    ordered = sorted(taken_s)
    return {"p50_us": statistics.median(ordered) * 1e6, "p99_us": ordered[int(len(ordered) * 0.99)] * 1e6}


class BareBatches(Contender):
    """Bare apsw: ``executemany`` of so many payloads per commit, one plain table."""

    def __init__(self, name: str, options: Options, per_commit: int) -> None:
        self.name = name
        self._options = options
        self._per_commit = per_commit
        self._next = 0

    def open(self, folder: Path) -> None:
        """See ``Contender.open``."""
        self._db = apsw_connection(folder / "bare.db")
        self._db.execute(TABLE)
        until_steady(folder / "bare.db-wal", self._write, self._options.warm_bytes)

    def run(self) -> dict[str, float]:
        """See ``Contender.run``."""
        watch, events = Stopwatch(), 0
        while not watch.over(self._options.round_s):
            self._batch(self._per_commit)
            events += self._per_commit
        return watch.rate(events)

    def close(self) -> None:
        """See ``Contender.close``."""
        self._db.close()

    def _write(self, size: int) -> None:
        for _ in range(size // PAYLOAD_BYTES // 1000 + 1):
            self._batch(1000)

    def _batch(self, rows: int) -> None:
        if self._next + rows > len(PAYLOADS):
            self._next = 0
        batch = [(payload,) for payload in PAYLOADS[self._next : self._next + rows]]
        self._next += rows
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(INSERT, batch)
        self._db.execute("COMMIT")


class BareEvents(BareBatches):
    """Bare apsw into the log's own table with all its columns and its index: what SQLite itself takes of an append."""

    def open(self, folder: Path) -> None:
        """See ``Contender.open``; the rows are ready-made, only their offsets are new."""
        self._db = apsw_connection(folder / "bare.db")
        migrate(self._db)
        head, now_us, width = Head(0, 0, bytes(32), 0, None), 1_700_000_000_000_000, len(INSERT_COLUMNS)
        values: list[Any] = []
        head.take(DRAFTS, now_us, 1, values, [])
        self._rows = [tuple(values[start + 3 : start + width]) for start in range(0, len(values), width)]
        until_steady(folder / "bare.db-wal", self._write, self._options.warm_bytes)

    def _batch(self, rows: int) -> None:
        first, made = self._next, self._rows
        self._next += rows
        batch = [(1, 0, offset, *made[offset % len(made)]) for offset in range(first, first + rows)]
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(INSERT_EVENT, batch)
        self._db.execute("COMMIT")


class BareSingles(BareBatches):
    """Bare apsw: one payload per commit, each timed."""

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(name, options, 1)

    def run(self) -> dict[str, float]:
        """See ``Contender.run``."""
        taken: list[float] = []
        watch = Stopwatch()
        while not watch.over(self._options.round_s):
            payload = PAYLOADS[len(taken) % len(PAYLOADS)]
            started = time.perf_counter()
            self._db.execute(INSERT, (payload,))
            taken.append(time.perf_counter() - started)
        return watch.rate(len(taken)) | quantiles_us(taken)


class BareEventSingles(BareEvents):
    """Bare apsw into the log's own table: one ready-made row per commit, each timed."""

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(name, options, 1)

    def run(self) -> dict[str, float]:
        """See ``Contender.run``."""
        taken: list[float] = []
        watch = Stopwatch()
        while not watch.over(self._options.round_s):
            row = (1, 0, self._next, *self._rows[self._next % len(self._rows)])
            self._next += 1
            started = time.perf_counter()
            self._db.execute(INSERT_EVENT, row)
            taken.append(time.perf_counter() - started)
        return watch.rate(len(taken)) | quantiles_us(taken)


class StdlibSingles(Contender):
    """The interpreter's own sqlite3, one commit per event, as most programs would write it."""

    def __init__(self, name: str, options: Options) -> None:
        self.name = name
        self._options = options

    def open(self, folder: Path) -> None:
        """See ``Contender.open``."""
        self._db = sqlite3.connect(folder / "stdlib.db")
        self._db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(TABLE)
        until_steady(folder / "stdlib.db-wal", self._write, self._options.warm_bytes)

    def run(self) -> dict[str, float]:
        """See ``Contender.run``."""
        taken: list[float] = []
        watch = Stopwatch()
        while not watch.over(self._options.round_s):
            payload = PAYLOADS[len(taken) % len(PAYLOADS)]
            started = time.perf_counter()
            self._db.execute(INSERT, (payload,))
            self._db.commit()
            taken.append(time.perf_counter() - started)
        return watch.rate(len(taken)) | quantiles_us(taken)

    def close(self) -> None:
        """See ``Contender.close``."""
        self._db.close()

    def _write(self, size: int) -> None:
        for _ in range(size // PAYLOAD_BYTES // 1000 + 1):
            self._db.executemany(INSERT, [(payload,) for payload in PAYLOADS])
            self._db.commit()
