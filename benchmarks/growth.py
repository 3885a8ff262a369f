"""Does the log stay as fast when it is large? The same work on a small store and on a large one, both just reopened."""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import AsyncContender
from benchmarks.load import Stopwatch, full_draft
from benchmarks.ours import Loop, fill, publish, settle
from postbus.log import Log, open_log
from postbus.model import Start, StartPolicy
from postbus.store.folder import Folder

__all__ = ["Grown", "Stored"]

STREAMS = [f"bench.default.orders-{number}" for number in range(20)]
CONSUMER = "reader"
REOPENINGS = 5
ASKED = 500


def bytes_of(folder: Path) -> int:
    """Return the size of a closed store: every file but the reserve, whose size is fixed."""
    reserve = Folder(folder).reserve.name
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name != reserve)


def forget_pages(folder: Path) -> None:
    """Ask the system to drop a closed store from its page cache, so that what follows reads the disk."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


class Grown(AsyncContender):
    """A store with so many events in 20 streams. Every turn begins at that size and reopens it cold."""

    def __init__(self, name: str, events: int, appended: int, *, copied: bool, loop: Loop = None) -> None:
        super().__init__(name, loop)
        self._events = events
        self._appended = appended
        self._copied = copied

    async def start(self, folder: Path) -> None:
        """See ``Contender.open``."""
        self._folder = folder / "store"
        log = await open_log(str(self._folder))
        try:
            for stream in STREAMS:
                await log.ensure_stream(stream)
                await log.ensure_consumer(stream, CONSUMER, Start(policy=StartPolicy.EARLIEST))
            await fill(log, STREAMS, self._events)
            await settle(log)
        finally:
            await log.close()
        self._bytes = bytes_of(self._folder) / self._events

    async def turn(self) -> dict[str, float]:
        """See ``Contender.run``."""
        folder = self._folder
        if self._copied:  # what a turn appends would change the size of a small store
            folder = folder.with_name("turn")
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(self._folder, folder)
        numbers: dict[str, float] = {"bytes_event": self._bytes}
        numbers |= await self._first_looks(folder)
        log = await open_log(str(folder))
        try:
            watch = Stopwatch()
            events = await publish(log, STREAMS, lambda done: done >= self._appended)
            numbers |= watch.rate(events)
            await settle(log)
            numbers["lag_us"] = await _time_us(log.get_consumer_lag, CONSUMER)
            numbers["head_us"] = await _time_us(log.get_stream_stats)
        finally:
            await log.close()
        return numbers

    async def _first_looks(self, folder: Path) -> dict[str, float]:
        """Time opening, and the first lag and the first head after it, from a cold cache."""
        taken: dict[str, list[float]] = {"open_ms": [], "first_lag_us": [], "first_head_us": []}
        for number in range(REOPENINGS):
            forget_pages(folder)
            started = time.perf_counter()
            log = await open_log(str(folder))
            opened = time.perf_counter()
            await log.get_consumer_lag(STREAMS[number], CONSUMER)
            lagged = time.perf_counter()
            await log.get_stream_stats(STREAMS[-number - 1])
            taken["first_head_us"].append((time.perf_counter() - lagged) * 1e6)
            taken["first_lag_us"].append((lagged - opened) * 1e6)
            taken["open_ms"].append((opened - started) * 1e3)
            await log.close()
        return {metric: statistics.median(values) for metric, values in taken.items()}

    async def stop(self) -> None:
        """See ``Contender.close``; every log was closed where it was opened."""


async def _time_us(ask: Callable[..., Awaitable[Any]], *args: str) -> float:
    for stream in STREAMS:  # the first time each is asked is a look at the database, measured above
        await ask(stream, *args)
    taken = []
    for number in range(ASKED):
        started = time.perf_counter()
        await ask(STREAMS[number % len(STREAMS)], *args)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e6


class Stored(AsyncContender):
    """How many bytes an event takes when it also has a key, a correlation and an identity."""

    def __init__(self, name: str, events: int) -> None:
        super().__init__(name)
        self._events = events

    async def start(self, folder: Path) -> None:
        """See ``Contender.open``."""
        store = folder / "store"
        log: Log = await open_log(str(store))
        try:
            await log.ensure_stream(STREAMS[0])
            for start in range(0, self._events, 1_000):
                await log.append(STREAMS[0], [full_draft(number) for number in range(start, start + 1_000)])
            await settle(log)
        finally:
            await log.close()
        self._bytes = await asyncio.to_thread(bytes_of, store) / self._events

    async def turn(self) -> dict[str, float]:
        """See ``Contender.run``."""
        return {"bytes_event": self._bytes}

    async def stop(self) -> None:
        """See ``Contender.close``."""
