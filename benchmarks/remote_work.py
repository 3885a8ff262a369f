"""What is done on a remote, by Postbus and by the bare client alike: publish, read, and publish to a handler."""

from __future__ import annotations

import asyncio
import atexit
import tempfile
import time
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.bare import quantiles_us
from benchmarks.harness import AsyncContender, Missing
from benchmarks.load import Stopwatch
from tools.services import KafkaServer, NatsServer, Server
from tools.services import Missing as NoService

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.harness import Options

__all__ = ["BATCH", "PUBLISHERS", "Work", "running"]

PUBLISHERS: Final = 100
BATCH: Final = 1_000
PATIENCE_S: Final = 120.0
KINDS: Final[dict[str, type[Server]]] = {"nats": NatsServer, "kafka": KafkaServer}

_running: dict[str, Server] = {}


def running(kind: str) -> Server:
    """Return the one server of a kind that all contenders share, started when first asked for. Raises ``Missing``."""
    if kind not in _running:
        Path("build").mkdir(exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f"bench-{kind}-", dir="build", ignore_cleanup_errors=True)
        server = KINDS[kind](Path(folder.name).resolve())
        try:
            server.start()
        except NoService as error:
            raise Missing(str(error)) from error
        atexit.register(folder.cleanup)
        atexit.register(server.kill)  # before its folder goes
        _running[kind] = server
    return _running[kind]


class Work(AsyncContender):
    """One who does one kind of work on a remote: ``one``, ``publishers``, ``batches``, ``reading`` or ``through``."""

    def __init__(self, name: str, options: Options, kind: str, work: str) -> None:
        super().__init__(name)
        self.options = options
        self.kind = kind
        self.work = work
        self.handled = 0
        self.published = 0
        self._seen = asyncio.Event()

    @property
    def stored(self) -> int:
        """How many events are there to be read."""
        return self.options.pick(50_000 if self.kind == "nats" else 500_000, 5_000)

    async def start(self, folder: Path) -> None:
        """See ``Contender.open``."""
        await self.connect(running(self.kind), folder)
        if self.work == "reading":
            for _ in range(0, self.stored, BATCH):
                await self.put_batch()
        elif self.work != "through":
            await self.put(0)
            await self.put_batch()

    async def turn(self) -> dict[str, float]:
        """See ``Contender.run``."""
        found: dict[str, float] = await getattr(self, f"_{self.work}")()
        await self.settle()
        return found

    async def _one(self) -> dict[str, float]:
        watch, taken = Stopwatch(), list[float]()
        while not watch.over(self.options.round_s):
            began = time.perf_counter()
            await self.put(len(taken))
            taken.append(time.perf_counter() - began)
        return watch.rate(len(taken)) | quantiles_us(taken)

    async def _publishers(self) -> dict[str, float]:
        watch = Stopwatch()
        return watch.rate(await self.put_many(lambda: watch.over(self.options.round_s)))

    async def _batches(self) -> dict[str, float]:
        watch, events = Stopwatch(), 0
        while not watch.over(self.options.round_s):
            await self.put_batch()
            events += BATCH
        return watch.rate(events)

    async def _reading(self) -> dict[str, float]:
        watch = Stopwatch()
        await self.read(self.stored)
        return watch.rate(self.stored)

    async def _through(self) -> dict[str, float]:
        watch = Stopwatch()
        sent = await self.put_many(lambda: watch.over(self.options.round_s))
        self.published += sent
        async with asyncio.timeout(PATIENCE_S):
            while self.handled < self.published:
                self._seen.clear()
                await self._seen.wait()
        assert self.handled == self.published
        return watch.rate(sent)

    def handle(self, events: int = 1) -> None:
        """Count what a consumer was given."""
        self.handled += events
        if self.handled >= self.published:
            self._seen.set()

    async def put_many(self, over: Callable[[], bool]) -> int:
        """Have 100 tasks each await one publish after the other until it is over; return how many were acknowledged."""
        done = 0

        async def publisher(number: int) -> None:
            nonlocal done
            while not over():
                await self.put(number)
                number += PUBLISHERS
                done += 1

        await asyncio.gather(*(publisher(number) for number in range(PUBLISHERS)))
        return done

    @abstractmethod
    async def connect(self, server: Server, folder: Path) -> None:
        """Make a stream of its own and whatever the work needs."""

    @abstractmethod
    async def put(self, number: int) -> Any:
        """Publish one event and wait until it is acknowledged."""

    @abstractmethod
    async def put_batch(self) -> None:
        """Publish ``BATCH`` events at once and wait until all are acknowledged."""

    @abstractmethod
    async def read(self, count: int) -> None:
        """Read that many events from the remote, from the first on."""

    async def settle(self) -> None:
        """Finish, after the clock was stopped, what would disturb the next one."""
