"""A node that publishes while its remote is away, and sends everything when it is back: ``URL COUNT`` prints numbers.

It waits for a line on its standard input after it has spooled everything, so that whoever started it can bring the
remote back.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path

import msgspec

from postbus.bus.opening import open_node
from postbus.bus.outlet import outlet_of
from postbus.envelope import draft
from postbus.log.address import parse_address

__all__ = ["STREAM", "Spooled"]

STREAM = "local.default.orders"
AT_ONCE = 100
WAIT_S = 1800.0


class Spooled(msgspec.Struct):
    """What it took; memory is in KiB, taken at every tenth of the way."""

    spool_s: float
    drain_s: float
    spooling_kib: list[int]
    draining_kib: list[int]


def rss_kib() -> int:
    words = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(words[1]) * 4


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def main(url: str, count: int) -> None:
    logging.disable(logging.CRITICAL)
    log = await open_node(parse_address(url))
    await log.ensure_stream(STREAM)
    outlet = outlet_of(log)
    assert outlet is not None
    say("ready")
    await asyncio.to_thread(sys.stdin.readline)
    began, spooling, step = time.monotonic(), list[int](), max(count // 10, AT_ONCE)
    for start in range(0, count, AT_ONCE):
        drafts = [draft("orders.made", "shop", {"n": n, "text": "x" * 100}) for n in range(start, start + AT_ONCE)]
        receipts = await log.append(STREAM, drafts)
        assert all(one.spooled for one in receipts)
        if (start + AT_ONCE) % step == 0:
            spooling.append(rss_kib())
    spool_s = time.monotonic() - began
    say("spooled")
    await asyncio.to_thread(sys.stdin.readline)
    began, draining, before = time.monotonic(), list[int](), outlet.relay.sent
    async with asyncio.timeout(WAIT_S):
        for mark in range(step, count + 1, step):
            while outlet.relay.sent - before < mark:  # noqa: ASYNC110 - what it waits for has no event
                await asyncio.sleep(0.005)
            draining.append(rss_kib())
        assert await outlet.relay.drained(WAIT_S)
    say(msgspec.json.encode(Spooled(spool_s, time.monotonic() - began, spooling, draining)).decode())
    await log.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
