"""A small agent: it waits for post, reads it, answers through the handle that each item carries, and acks.

``python examples/agent_loop.py DATA AGENT`` runs until it is interrupted. It may be killed at any moment: what it has
not acked comes again, and the key under which it answers lets each item be answered once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

from postbus.clock import SystemClock
from postbus.inbox import Inboxes, Item
from postbus.inbox.replies import Replies
from postbus.log import SqliteLog
from postbus.model import Conflict

TENANT = "local.default"
PATIENCE_S = 60.0


def think(item: Item) -> dict[str, object]:
    """Return the answer to an item. Here an agent would ask its model; this one counts words."""
    text = str(item.event.payload if item.event is not None else "")
    return {"about": item.id, "words": len(text.split())}


async def work(inboxes: Inboxes, replies: Replies, agent: str) -> None:
    """Answer everything that waits, item by item."""
    for item in await inboxes.items.read(TENANT, agent):
        handle = item.event.delivery_handle if item.event is not None else None
        if handle is not None:
            with contextlib.suppress(Conflict):  # it was answered before, in other words, and not acked
                await replies.send(handle, think(item), key=f"{agent}:{item.id}")
        await inboxes.items.ack(TENANT, agent, items=[item.id])
        sys.stdout.write(f"done with {item.id}\n")
        sys.stdout.flush()


async def main(data: str, agent: str) -> None:
    """Fill the inbox and work on it, until told to end."""
    clock = SystemClock()
    log = SqliteLog.open(data, clock=clock)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    stopping = asyncio.ensure_future(ended.wait())
    async with Inboxes(log, clock) as inboxes, Replies(log, clock, TENANT) as replies:
        while not ended.is_set():
            waiting = asyncio.ensure_future(inboxes.wait(TENANT, agent, PATIENCE_S))
            await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done() and waiting.result():
                await work(inboxes, replies, agent)
            waiting.cancel()
    await log.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
