"""A process for tests: hosts the sources of a data folder until it is killed."""

from __future__ import annotations

import asyncio
import sys

from postbus.clock import SystemClock
from postbus.log import SqliteLog
from postbus.sources import SourceHost


async def main(folder: str) -> None:
    log = SqliteLog.open(folder)
    async with SourceHost(log, SystemClock()):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
