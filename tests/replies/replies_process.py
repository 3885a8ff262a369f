"""A process for tests: carries the replies of a data folder until it is killed."""

from __future__ import annotations

import asyncio
import sys

from postbus.clock import SystemClock
from postbus.inbox.replies import Replies, ReplyRules
from postbus.log import SqliteLog
from postbus.model import RetryPolicy


async def main(folder: str, lease_s: float) -> None:
    log = SqliteLog.open(folder)
    retry = RetryPolicy(max_attempts=1000, backoff_s=0.01, backoff_s_max=0.05)
    rules = ReplyRules(allow_private=True)
    async with Replies(log, SystemClock(), "local.default", rules=rules, retry=retry, lease_s=lease_s):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
