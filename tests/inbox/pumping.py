"""A process that fills inboxes: ``python pumping.py DATA``. Prints ``ready``, ends when its standard input does."""

from __future__ import annotations

import asyncio
import sys

from postbus.clock import SystemClock
from postbus.inbox import Inboxes
from postbus.log import SqliteLog


async def main(data: str) -> None:
    clock = SystemClock()
    log = SqliteLog.open(data, clock=clock)
    async with Inboxes(log, clock):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
    await log.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
