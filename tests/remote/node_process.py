"""A node as its own process: copies from a remote until it is killed, and says how far it is."""

from __future__ import annotations

import asyncio
import sys

from postbus.log import open_log


async def main(url: str, stream: str) -> None:
    log = await open_log(url, catch_up_s=0.001)
    for _ in range(1_000_000):
        sys.stdout.write(f"{(await log.get_stream_stats(stream)).count}\n")
        sys.stdout.flush()
        await asyncio.sleep(0.001)


asyncio.run(main(*sys.argv[1:]))
