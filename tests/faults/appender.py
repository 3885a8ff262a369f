"""An appender in a process of its own: ``python -m tests.faults.appender FOLDER COUNT SECONDS``.

Says ``ready`` once everything is imported and waits for a line. Then appends COUNT facts, or for SECONDS when COUNT is
0, and prints the offsets it was given, space-separated.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from postbus.log.sqlite import SqliteLog
from tests.faults.scene import JOURNAL, fact


async def main(folder: str, count: int, seconds: float) -> None:
    log = SqliteLog.open(folder)
    await log.ensure_stream(JOURNAL)
    offsets: list[int] = []
    deadline = time.monotonic() + seconds
    while len(offsets) < count or (count == 0 and time.monotonic() < deadline):
        (receipt,) = await log.append(JOURNAL, [fact({"process": os.getpid(), "number": len(offsets)})])
        offsets.append(receipt.offset)
    await log.close()
    print(*offsets)  # noqa: T201 - its answer


if __name__ == "__main__":
    print("ready", flush=True)  # noqa: T201 - its answer
    sys.stdin.readline()
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
