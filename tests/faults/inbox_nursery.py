"""A process that forks pumps, publishers and agents to be killed: ``python -m tests.faults.inbox_nursery``.

As ``bus_nursery``, with other roles: a ``worker`` fills the inboxes, a ``publisher`` publishes, sends messages and sets
timers that are due, an ``agent`` reads and acks.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import signal
from pathlib import Path

from postbus.bus import EventBus
from postbus.clock import SystemClock
from postbus.inbox import Digest, Inboxes, Target, Timer
from postbus.log import SqliteLog
from postbus.model import instant
from tests.faults import bus_nursery
from tests.faults.bus_nursery import Complaints, say, store_of
from tests.faults.scene import EARLIEST

__all__ = ["AGENTS", "TENANT", "populate"]

TENANT = "local.default"
CLOCK = SystemClock()
PULL = (Target(kind="pull"),)

# Agent -> its subscriptions: (pattern, filter, digest). The judge knows which numbers each one matches.
AGENTS: dict[str, tuple[tuple[str, dict[str, object], Digest | None], ...]] = {
    "everything": ((">", {"expr": "has(payload.n)"}, None),),
    "thirds": (("order.*", {"expr": "payload.n % 3 == 0"}, None),),
    "twice": (("order.*", {}, None), ("order.placed", {"payload": {"even": True}}, None)),
    "apart": (("order.placed", {}, None), ("order.poison", {}, None)),
    "bursts": (("order.*", {}, Digest(by="key", window_s=1, items=5)),),
}


async def populate(folder: Path) -> None:
    """Make the agents and their subscriptions."""
    log = SqliteLog.open(store_of(folder), clock=CLOCK)
    inboxes = Inboxes(log, CLOCK)
    for agent, subscriptions in AGENTS.items():
        await inboxes.create_agent(TENANT, agent, PULL)
        for number, (pattern, chosen, digest) in enumerate(subscriptions):
            await inboxes.subscribe(
                TENANT, agent, pattern, id=f"{agent}-{number}", filter=chosen, start=EARLIEST, digest=digest
            )
    await inboxes.create_agent(TENANT, "addressee", PULL)
    await inboxes.messages.stream(TENANT)
    await log.close()


async def worker(folder: Path, _rolls: random.Random, _first: int) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: say("error", os.getpid(), context))
    logging.getLogger("postbus").addHandler(Complaints())
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    log = SqliteLog.open(store_of(folder), clock=CLOCK)
    async with Inboxes(log, CLOCK):
        say("open", os.getpid())
        await ended.wait()
    await log.close()
    say("bye", os.getpid())


async def publisher(folder: Path, rolls: random.Random, first: int) -> None:
    log = SqliteLog.open(store_of(folder), clock=CLOCK)
    inboxes = Inboxes(log, CLOCK)
    bus = EventBus(tenant=TENANT, clock=CLOCK, log=log)
    await bus.open()
    say("open", os.getpid())
    for number in itertools.count(first):
        payload = {"n": number, "even": number % 2 == 0}
        topic = rolls.choice(("order.placed", "order.placed", "order.poison", "talk.idle"))
        receipt = await bus.publish(topic, "nursery", payload, key=f"key-{number % 4}")
        say("ack", number, receipt.offset)
        if rolls.random() < 0.1:
            await inboxes.send(TENANT, "addressee", number)
        if rolls.random() < 0.1:
            now = instant(CLOCK.now_us()).isoformat()
            await inboxes.timers.add(
                TENANT, Timer(id=f"t{number}", agent="addressee", message=f"tick {number}", at=now)
            )
        await asyncio.sleep(rolls.choice((0.0, 0.0, 0.01, 0.05)))


async def agent(folder: Path, rolls: random.Random, _first: int) -> None:
    """Read and ack as agents do; resets come in between."""
    log = SqliteLog.open(store_of(folder), clock=CLOCK)
    inboxes = Inboxes(log, CLOCK)
    say("open", os.getpid())
    while True:
        name = rolls.choice(list(AGENTS))
        items = await inboxes.items.read(TENANT, name, limit=rolls.choice((1, 5, 50)))
        if items:
            assert [item.sequence for item in items] == sorted({item.sequence for item in items})
            if rolls.random() < 0.5:
                await inboxes.items.ack(TENANT, name, through=items[-1].id)
            else:
                await inboxes.items.ack(TENANT, name, items=[item.id for item in items[::2]])
        if rolls.random() < 0.03:
            await inboxes.reset(TENANT, f"{name}-0", EARLIEST)
        await asyncio.sleep(rolls.choice((0.0, 0.02, 0.1)))


if __name__ == "__main__":
    bus_nursery.ROLES.update(worker=worker, publisher=publisher, agent=agent)
    bus_nursery.main()
