"""A bus under load, measured from inside: ``python -m tests.faults.bus_soak FOLDER SECONDS`` prints it as JSON.

Ten subscriptions, some of which fail now and then, and publishers that never rest.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
import time
from pathlib import Path

import msgspec

from postbus.bus import EventBus
from postbus.model import Event, RetryPolicy
from postbus.store import database

__all__ = ["Sample", "Soak"]

SUBSCRIPTIONS = 10
PUBLISHERS = 20
SAMPLES = 60
CACHE_KIB = 1024  # of SQLite's pages: filling the usual 32 MiB takes half a minute and would hide what else grows
RETRY = RetryPolicy(max_attempts=3, backoff_s=0.05, backoff_s_max=0.5)

OPEN_ROWS = "SELECT count(*) FROM delivery_rows WHERE status IN ('waiting', 'processing')"


class Sample(msgspec.Struct):
    """One look at the process."""

    at_s: float
    rss_kib: int
    handles: int
    tasks: int
    wal_bytes: int


class Soak(msgspec.Struct):
    """The whole run."""

    samples: list[Sample]
    published: int
    handled: int
    failed: int
    dead: int
    lag_s: float
    lag: int


class Load:
    """What is published and what comes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bus = EventBus(folder)
        self.published = 0
        self.handled = 0
        self.failed = 0
        for number in range(SUBSCRIPTIONS):
            ordering = "strict" if number == 0 else "key"
            self.bus.subscribe("load.>", self.flaky if number % 3 == 1 else self.handle, f"s{number}", retry=RETRY,
                               ordering=ordering)  # fmt: skip

    async def handle(self, _event: Event) -> None:
        self.handled += 1

    async def flaky(self, event: Event) -> None:
        if event.offset % 500 == 7 or (event.offset % 50 == 3 and event.attempt == 1):
            self.failed += 1
            raise ValueError("now and then")
        if event.key is None and event.offset % 500 == 0:
            await asyncio.sleep(0.4)  # long enough to get a row of its own
        self.handled += 1

    async def publish(self, number: int, until_s: float) -> None:
        rolls = random.Random(number)
        while time.monotonic() < until_s:
            key = None if number % 2 else f"k{rolls.randrange(50)}"
            await self.bus.publish(f"load.t{number}", "soak", {"n": self.published, "text": "x" * 100}, key=key)
            self.published += 1

    def sample(self, began_s: float) -> Sample:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("ascii").splitlines())
        wal = self.folder / "postbus.db-wal"
        return Sample(
            at_s=time.monotonic() - began_s,
            rss_kib=int(fields["VmRSS"].split()[0]),
            handles=len(list(Path("/proc/self/fd").iterdir())),
            tasks=len(asyncio.all_tasks()),
            wal_bytes=wal.stat().st_size if wal.exists() else 0,
        )

    async def lag(self) -> int:
        """Return how many events are not over yet: beyond a cursor, or behind it with a row that waits or runs."""
        log = await self.bus.open()
        lags = [await log.get_consumer_lag(self.bus.journal, f"s{number}") for number in range(SUBSCRIPTIONS)]
        rows = await log.store.read(lambda db: int(db.execute(OPEN_ROWS).get))
        return sum(part.lag for lag in lags for part in lag.partitions) + rows


async def main(folder: str, seconds: str) -> None:
    database.CACHE_KIB = CACHE_KIB
    logging.getLogger("postbus").addHandler(logging.NullHandler())  # failures are wanted here
    load = Load(Path(folder))
    duration = float(seconds)
    samples: list[Sample] = []
    async with load.bus:
        began = time.monotonic()
        publishers = [asyncio.create_task(load.publish(n, began + duration)) for n in range(PUBLISHERS)]
        while time.monotonic() < began + duration:
            await asyncio.sleep(duration / SAMPLES)
            gc.collect()
            samples.append(load.sample(began))
        await asyncio.gather(*publishers)
        stopped = time.monotonic()
        while (lag := await load.lag()) and time.monotonic() < stopped + 60 + duration:  # noqa: ASYNC110 - a lag is looked at
            await asyncio.sleep(0.05)
        took = time.monotonic() - stopped
        dead = len(await load.bus.dead_letters.find())
    soak = Soak(samples, load.published, load.handled, load.failed, dead, took, lag)
    sys.stdout.write(msgspec.json.encode(soak).decode())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
