"""Publishes numbers through a relay, one after the other, and prints each that is accepted; a line on stdin ends it."""

from __future__ import annotations

import asyncio
import sys

from postbus.broker import Breaker, Relay
from postbus.broker.nats_link import NatsLink
from postbus.broker.nats_remote import NatsRemote
from postbus.envelope import draft
from postbus.log import SqliteLog

STREAM = "local.default.orders"
DRAIN_S = 60.0


async def main(data: str, url: str, first: int) -> None:
    log = SqliteLog.open(data)
    link = NatsLink(url)
    relay = Relay(
        log, NatsRemote(link, stream="ORDERS"), breaker=Breaker("remote", failures_max=1, open_s=0.1, open_s_max=0.5)
    )
    await link.start()
    end = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    async with relay:
        number = first
        while not end.done():
            receipt = await relay.publish(STREAM, draft("orders.paid", "shop", number, native_id=f"order-{number}"))
            sys.stdout.write(f"{number} {'spooled' if receipt.spooled else 'sent'}\n")
            sys.stdout.flush()
            number += 1
            await asyncio.sleep(0.003)  # slower than the spool is emptied
        assert await relay.drained(DRAIN_S), "the spool did not become empty"
    await link.close()
    await log.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
