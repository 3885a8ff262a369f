"""Several processes fill the inboxes of one store: each event is one item, whoever reads it first."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from postbus.bus import EventBus
from postbus.clock import SystemClock
from postbus.inbox import Inboxes
from postbus.log import SqliteLog
from tests.inbox.post import EARLIEST, PULL, TENANT, numbers, until

PROGRAM = Path(__file__).with_name("pumping.py")
COUNT = 400


@contextmanager
def pumping(data: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(PROGRAM), str(data)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"ready\n"
            yield child
            child.stdin.close()
            assert child.wait(60) == 0
        finally:
            child.kill()


async def test_two_processes_fill_one_inbox_exactly_once_and_in_order(folder: Path) -> None:
    clock = SystemClock()
    log = SqliteLog.open(folder, clock=clock)
    inboxes = Inboxes(log, clock)
    bus = EventBus(tenant=TENANT, clock=clock, log=log)
    try:
        for agent in ("ann", "bob"):
            await inboxes.create_agent(TENANT, agent, PULL)
        await inboxes.subscribe(TENANT, "ann", "order.*", id="orders")
        await inboxes.subscribe(TENANT, "bob", ">", id="even", filter={"expr": "payload % 2 == 0"})
        with pumping(folder), pumping(folder):
            for number in range(COUNT):
                await bus.publish("order.paid", "test", number)
                if number == COUNT // 2:
                    await inboxes.reset(TENANT, "orders", EARLIEST)
                if number == COUNT // 3:
                    await inboxes.subscribe(TENANT, "bob", "order.paid", id="late", start=EARLIEST)

            async def all_there() -> bool:
                return all([await inboxes.items.unacked(TENANT, agent) >= COUNT for agent in ("ann", "bob")])

            await until(all_there, 60)
            await asyncio.sleep(0.3)  # whatever comes twice would come now
        assert numbers(await inboxes.items.read(TENANT, "ann", limit=1000)) == list(range(COUNT))
        items = await inboxes.items.read(TENANT, "bob", limit=1000)
        assert sorted(numbers(items)) == list(range(COUNT))
        assert all("late" in item.matched_by for item in items)
        assert all(("even" in item.matched_by) == (numbers([item])[0] % 2 == 0) for item in items)
        lags = [lag.total for name in ("orders", "even", "late") for lag in await inboxes.lag(TENANT, name)]
        assert set(lags) == {0}
    finally:
        await bus.stop()
        await log.close()
