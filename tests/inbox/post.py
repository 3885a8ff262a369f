"""A post office for tests: a log, its inboxes and a publisher, on a clock that stands still until it is moved."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from postbus.bus import EventBus
from postbus.bus.opening import open_node
from postbus.inbox import Inboxes, InboxSubscription, Item, Target
from postbus.log.address import Address
from postbus.model import Consumer, Receipt, Start, StartPolicy, StreamSettings
from postbus.testing import FakeClock

__all__ = ["EARLIEST", "LATEST", "PULL", "TENANT", "Post", "numbers", "until"]

TENANT = "local.default"
PULL = (Target(kind="pull"),)
EARLIEST = Start(policy=StartPolicy.EARLIEST)
LATEST = Start(policy=StartPolicy.LATEST)
PATIENCE_S = 60.0
QUIET_STEPS = 4


def numbers(items: list[Item]) -> list[Any]:
    """The payloads of items, which tests make numbers."""
    return [item.event.payload for item in items if item.event is not None]


class Post:
    """``async with Post(folder) as post:`` runs the inboxes; with ``run=False`` nothing fills them by itself."""

    def __init__(self, folder: Path, *, clock: FakeClock | None = None, run: bool = True) -> None:
        self.folder = folder
        self.clock = clock or FakeClock()
        self._run = run
        self._reads = 0

    async def __aenter__(self) -> Self:
        self.log = await open_node(Address(folder=str(self.folder)), self.clock)
        self._count_reads()
        self.inboxes = Inboxes(self.log, self.clock)
        self.bus = EventBus(tenant=TENANT, clock=self.clock, log=self.log)
        await self.bus.open()
        if self._run:
            await self.inboxes.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.inboxes.stop()
        await self.bus.stop()
        await self.log.close()

    def _count_reads(self) -> None:
        read = self.log.store.read

        async def counted(call: Callable[[Any], Any]) -> Any:
            self._reads += 1
            try:
                return await read(call)
            finally:
                self._reads -= 1

        self.log.store.read = counted  # type: ignore[method-assign]  # one signature is enough here

    # --- what a test does ---

    async def agent(self, name: str = "ann", tenant: str = TENANT) -> None:
        await self.inboxes.create_agent(tenant, name, PULL)

    async def subscribe(
        self,
        pattern: str,
        name: str,
        agent: str = "ann",
        **settings: Any,
    ) -> tuple[InboxSubscription, list[Consumer]]:
        return await self.inboxes.subscribe(TENANT, agent, pattern, id=name, **settings)

    async def publish(self, topic: str, *payloads: Any, **fields: Any) -> list[Receipt]:
        return [await self.bus.publish(topic, "test", payload, **fields) for payload in payloads]

    async def stream(self, leaf: str, **settings: Any) -> str:
        name = f"{TENANT}.{leaf}"
        await self.log.ensure_stream(name, StreamSettings(**settings))
        return name

    async def read(self, agent: str = "ann", **options: Any) -> list[Item]:
        await self.settle()
        return await self.inboxes.items.read(TENANT, agent, **options)

    async def ack(self, agent: str = "ann", **form: Any) -> int:
        return await self.inboxes.items.ack(TENANT, agent, **form)

    async def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return await self.log.store.read(lambda db: list(db.execute(statement, values)))

    async def alter(self, statement: str) -> None:
        """Change the database by hand."""
        await self.log.store.write(lambda db: db.execute(statement).get, grows=False)

    async def place(self, name: str, stream: str = f"{TENANT}.journal") -> int:
        """Where a subscription stands on disk."""
        found = await self.query(
            "SELECT next_offset FROM cursors JOIN stream_registry USING (stream_id) WHERE name = ? AND consumer = ?",
            stream,
            name,
        )
        return int(found[0][0])

    # --- time ---

    async def advance(self, seconds: float) -> None:
        """Let all that time pass at once; whatever came due happens now."""
        await self.settle()
        self.clock.advance(seconds)
        await self.settle()

    async def settle(self) -> None:
        """Wait until everything that can happen without time passing has happened."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        quiet = 0
        while quiet < QUIET_STEPS:
            assert loop.time() < deadline, "the inboxes do not come to rest"
            for _ in range(10):
                await asyncio.sleep(0)
            await asyncio.sleep(0.0005)
            quiet = quiet + 1 if not self._reads and self._idle() and await self._caught_up() else 0

    def _idle(self) -> bool:
        writer = self.log.store.writer
        return not writer._queue and not writer._lock.locked() and not getattr(self.log, "behind", False)

    async def _caught_up(self) -> bool:
        """Whether every reader of the pump has read all there is, or waits for time to pass."""
        heads = self.log.known_heads()
        for key, channel in self.inboxes.pump._channels.items():
            behind = any(cohort.offset < heads.get(key, 0) for cohort in channel._cohorts)
            if channel.displaced or (behind and not channel._resting):
                return False
        return True


async def until(holds: Callable[[], Awaitable[bool]], patience_s: float = PATIENCE_S) -> None:
    """Wait in real time until something holds; for what no settling can tell."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while not await holds():
        assert loop.time() < deadline, "it never happens"
        await asyncio.sleep(0.01)
