"""``Hub``: what all routes share. One store, a bus per tenant on it, keys, quotas and metrics."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from postbus.bus import EventBus
from postbus.bus.housekeeping import keep_house
from postbus.bus.opening import open_node
from postbus.bus.pull import PullDesk
from postbus.clock import Clock, SystemClock
from postbus.inbox import Inboxes
from postbus.log.address import parse_address
from postbus.model import NotFound, PostbusError, StorageError
from postbus.schemas import Schemas
from postbus.server.deliveries import Carriers
from postbus.server.keys import KeyRing
from postbus.server.metrics import Metrics
from postbus.server.quotas import Quotas
from postbus.server.sse import Readers
from postbus.sources import SourceHost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from postbus.log import SqliteLog

__all__ = ["Hub"]

logger = logging.getLogger("postbus.server")

HOUSE_S = 300.0
TOPICS = "SELECT count(*) FROM stream_registry WHERE name GLOB ? || '.*' AND NOT deleted"


class Hub:
    """What the routes work on. Make one with ``Hub.open``; ``close`` ends everything in it.

    ``stopping`` is set when the server begins to end: whoever holds a connection open must finish then.
    """

    def __init__(self, log: SqliteLog, clock: Clock) -> None:
        self.log = log
        self.clock = clock
        self.keys = KeyRing(log, clock)
        self.quotas = Quotas(log, clock)
        self.metrics = Metrics()
        self.openapi = b"{}"
        self.stopping = asyncio.Event()
        self.schemas = Schemas(log)
        self.payload_checks: list[Callable[[str, bytes], Awaitable[None]]] = [self.schemas.check]
        self.desk = PullDesk(log, clock)
        self.readers = Readers(log)
        self.inboxes = Inboxes(log, clock)
        self.sources = SourceHost(log, clock, checks=(self.check_payload,))
        self.carriers = Carriers(log, clock, self.check_payload)
        self.closers: list[Callable[[], Awaitable[None]]] = [
            self.desk.stop,
            self.sources.stop,
            self.inboxes.stop,
            self.carriers.stop,
        ]
        self.troubles: dict[str, Callable[[], str | None]] = {}  # what else has to be well, by name
        self._buses: dict[str, EventBus] = {}
        self._opening = asyncio.Lock()
        self._closed = False
        self.house: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, data: str | os.PathLike[str], *, clock: Clock | None = None, durability: str = "full") -> Hub:
        """Open the log in a folder, or of a remote with a folder; see ``open_node`` for what it raises."""
        clock = clock or SystemClock()
        log = await open_node(parse_address(os.fspath(data)), clock, durability=durability)
        log.projections.start()
        hub = cls(log, clock)
        await hub.inboxes.start()
        await hub.carriers.start()
        await hub.sources.start(wait=True)
        hub.house = asyncio.get_running_loop().create_task(hub.keep_house())
        return hub

    async def keep_house(self) -> None:
        """Apply retention and forget old records from time to time, until the server ends."""
        while not await self.clock.wait(self.stopping, HOUSE_S):
            try:
                duties = await keep_house(self.log, self.clock, source="server")
            except PostbusError as error:
                logger.warning("housekeeping: %s", error)
                continue
            removed = {duty.what: duty.removed for duty in duties if duty.removed}
            if removed:
                logger.info("housekeeping", extra={"facts": {"removed": removed}})

    async def bus(self, tenant: str) -> EventBus:
        """Return the running bus of a tenant ``namespace.tenant``, made at its first use.

        Raises ``NotFound`` for a tenant that has no topic at all, so that asking about nobody makes nothing.
        """
        bus = self._buses.get(tenant)
        if bus is None:
            async with self._opening:
                if self._closed:
                    raise StorageError("the server has ended")
                bus = self._buses.get(tenant)
                if bus is None:
                    if not await self.topic_count(tenant):
                        raise NotFound(f"there is no topic of {tenant}", hint="register one with POST /v1/bus/topics")
                    bus = EventBus(tenant=tenant, clock=self.clock, log=self.log)
                    await bus.recover()
                    await bus.start()
                    self._buses[tenant] = bus
        return bus

    def runs(self, tenant: str) -> bool:
        """Say whether the tenant's bus runs already."""
        return tenant in self._buses

    async def topic_count(self, tenant: str) -> int:
        """Return how many topics a tenant has."""
        count: int = await self.log.store.read(lambda db: db.execute(TOPICS, (tenant,)).get)
        return count

    async def check_payload(self, stream: str, payload: bytes) -> None:
        """Refuse a payload that does not fit what is registered for its stream."""
        for check in self.payload_checks:
            await check(stream, payload)

    async def close(self) -> None:
        """Stop the buses and close the store. Idempotent."""
        self.stopping.set()
        async with self._opening:
            if self._closed:
                return
            self._closed = True
        if self.house is not None:
            await self.house
        for close in self.closers:
            await close()
        await asyncio.gather(*(bus.stop() for bus in self._buses.values()))
        self.keys.close()
        await self.log.close()
