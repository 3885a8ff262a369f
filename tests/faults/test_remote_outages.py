"""Outages of the remote while two nodes work on it: nothing lost, nothing doubled, the order kept, nothing given up.

Four publishers on one node, a consumer on the other. The server is killed (SIGKILL) while they publish, and again while
the spool is being sent; or the line to it is cut, holds answers back, and is slow.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from postbus import EventBus
from postbus.broker import BreakerState
from postbus.bus.outlet import RemoteOutlet, outlet_of
from postbus.clock import SystemClock
from postbus.log import SqliteLog
from postbus.log.address import open_upstream
from postbus.model import Event
from tests.conformance.upstream_suite import retried
from tests.faults.campaign import FULL, dice
from tests.faults.clusters import cluster
from tests.faults.line import Line
from tests.services import KafkaServer, NatsServer, fresh_prefix, running_kafka, running_nats

CYCLES = 20 if FULL else 1  # of two outages each
PUBLISHERS = 4
QUEUED = 40
SPOOLED_S = 0.05
ANSWER_S = {"nats": 3.0, "kafka": 1.5}
# The guide: a publisher waits for answer_s at most, and up to a second more when it looks again, or is slowed.
# The slack is for a busy machine; an outage lasts until every publisher has come through, however long that is.
MORE_S = 1.0
SLACK_S = 30.0
WAIT_S = 120.0
JOURNAL = "local.default.journal"
PAGE = 1000

Kind = pytest.mark.parametrize(
    "kind",
    [
        pytest.param("nats", marks=pytest.mark.xdist_group("nats")),
        pytest.param("kafka", marks=pytest.mark.xdist_group("kafka")),
    ],
)


def server_of(kind: str) -> NatsServer | KafkaServer:
    return running_nats() if kind == "nats" else running_kafka()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.005)


class Scene:
    """Publishers that go on whatever happens, and the consumer of what they publish."""

    def __init__(self, log: SqliteLog, near: EventBus, seen: list[list[int]]) -> None:
        outlet = outlet_of(log)
        assert outlet is not None
        self.outlet: RemoteOutlet = outlet
        self.seen = seen
        self.published = [0] * PUBLISHERS
        self.spooled = [0] * PUBLISHERS
        self.longest_s = 0.0
        self._near = near
        self._ended = False
        self._tasks = [asyncio.create_task(self._publish(number)) for number in range(PUBLISHERS)]

    async def _publish(self, number: int) -> None:
        while not self._ended:
            began = time.monotonic()
            receipt = await self._near.publish(
                "orders.made", "shop", [number, self.published[number]], key=f"p{number}"
            )
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.published[number] += 1
            self.spooled[number] += receipt.spooled
            # Slower than the spool is emptied on a busy machine, so that it becomes empty.
            await asyncio.sleep(SPOOLED_S if receipt.spooled else 0.005)

    def check(self) -> None:
        """A publisher that failed fails the test."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def straight(self) -> None:
        """Wait until events of all publishers go straight to the remote."""
        before = [done - waited for done, waited in zip(self.published, self.spooled, strict=True)]

        def all_went() -> bool:
            self.check()
            now = [done - waited for done, waited in zip(self.published, self.spooled, strict=True)]
            return all(new > old for old, new in zip(before, now, strict=True))

        await until(all_went)

    async def queued(self) -> None:
        """Wait until the outage was noticed, and every publisher has put some more into the spool since then."""
        await until(lambda: self.outlet.state is BreakerState.OPEN)
        before = list(self.spooled)

        def all_wait() -> bool:
            self.check()
            return all(new >= old + QUEUED // PUBLISHERS for old, new in zip(before, self.spooled, strict=True))

        await until(all_wait)

    async def draining(self) -> None:
        """Wait until some of the spool was sent since now."""
        before = self.outlet.relay.sent
        await until(lambda: self.outlet.relay.sent > before)

    async def end(self) -> None:
        """Publish no more, and wait until everything has arrived."""
        self._ended = True
        await asyncio.gather(*self._tasks)
        assert await self.outlet.relay.drained(WAIT_S)
        await until(lambda: sum(map(len, self.seen)) >= sum(self.published))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


@asynccontextmanager
async def scene(url: str, far_url: str, ground: Path) -> AsyncIterator[Scene]:
    """Two nodes; the near one publishes. At the end both have the same, and nothing was given up."""
    answer_s = ANSWER_S[url.partition(":")[0]]
    near, far = (
        EventBus(f"{at}{'&' if '?' in at else '?'}answer_s={answer_s}&data={ground / node}")
        for at, node in ((url, "near"), (far_url, "far"))
    )
    seen: list[list[int]] = [[] for _ in range(PUBLISHERS)]

    @far.on("orders.*", subscriber_id="till", start="earliest")
    async def take(event: Event) -> None:
        number, count = event.payload
        seen[number].append(count)

    async with near, far:
        near_log, far_log = await near.open(), await far.open()
        made = Scene(near_log, near, seen)
        try:
            yield made
            await made.end()
        finally:
            made.close()
        assert seen == [list(range(count)) for count in made.published]
        assert await orders(near_log, seen) == await orders(far_log, seen) == seen
        stats = await near_log.get_stream_stats(JOURNAL), await far_log.get_stream_stats(JOURNAL)
        assert stats[0] == stats[1]
        for bus in (near, far):
            assert not await bus.dead_letters.find()
    told = f"{sum(made.published)} published, {sum(made.spooled)} spooled, longest {made.longest_s:.2f} s"
    sys.stderr.write(f"\n{told}\n")
    assert made.longest_s < answer_s + MORE_S + SLACK_S


async def orders(log: SqliteLog, seen: list[list[int]]) -> list[list[int]]:
    """Return what the log itself has of each publisher, in the log's order; it may still be on its way."""
    found: list[list[int]] = [[] for _ in seen]
    at = 0
    async with asyncio.timeout(WAIT_S):
        while sum(map(len, found)) < sum(map(len, seen)):
            page = await log.fetch(JOURNAL, 0, at, PAGE)
            for event in page:
                if event.topic == "orders.made":
                    found[event.payload[0]].append(event.payload[1])
            at += len(page)
            if not page:
                await asyncio.sleep(0.01)
    return found


@Kind
async def test_the_server_is_killed_again_and_again(kind: str, ground: Path) -> None:
    server, chance = server_of(kind), dice(f"outages of {kind}")
    url = f"{server.url}/{fresh_prefix()}"
    async with scene(url, url, ground) as on:
        for _ in range(CYCLES):
            await on.straight()
            await asyncio.sleep(chance.random() * 0.1)
            server.kill()
            await on.queued()
            await asyncio.to_thread(server.start)
            await on.draining()
            server.kill()
            await on.queued()
            await asyncio.to_thread(server.start)
        await on.straight()


@Kind
async def test_the_line_is_cut_and_slow(kind: str, ground: Path) -> None:
    server = server_of(kind)
    ports = (server.back_port, server.detour_port) if isinstance(server, KafkaServer) else (server.port, 0)
    prefix = fresh_prefix()
    async with Line(*ports) as line, scene(f"{kind}://{line.address}/{prefix}", f"{server.url}/{prefix}", ground) as on:
        for _ in range(CYCLES):
            line.delay_s = 0.0
            await on.straight()
            line.delay_s = 0.05
            await on.straight()
            line.delay_s = 0.0
            line.hold()  # the server takes events and says so, and nobody hears it
            await on.queued()
            await until(lambda: line.held_bytes > 0)
            await line.cut()
            await on.queued()
            line.mend()
            await on.draining()
            await line.cut()
            await on.queued()
            line.mend()
        await on.straight()


@pytest.mark.parametrize(
    "kind",
    [
        "nats",
        pytest.param("kafka", marks=pytest.mark.skipif(not FULL, reason="three brokers: part of make faults")),
    ],
)
async def test_one_of_three_servers_is_killed_again_and_again(kind: str, ground: Path) -> None:
    chance = dice(f"clusters of {kind}")
    with cluster(kind, ground / "servers") as servers:
        hosts = ",".join(server.address for server in servers)
        url = f"{kind}://{hosts}/{fresh_prefix()}?replicas={len(servers)}"
        upstream = await open_upstream(url, SystemClock(), str(ground))
        await retried(lambda: upstream.ensure_stream(JOURNAL))  # they have found each other
        await upstream.close()
        async with scene(url, url, ground) as on:
            for _ in range(CYCLES):
                await on.straight()
                await asyncio.sleep(chance.random() * 0.1)
                victim = chance.choice(servers)
                victim.kill()
                await on.straight()  # the others go on without it
                await asyncio.to_thread(victim.start)
            await on.straight()
