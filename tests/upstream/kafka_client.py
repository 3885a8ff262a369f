"""A process that asks a Kafka for its streams, again and again, until it is told to stop: ``ADDRESS``."""

from __future__ import annotations

import asyncio
import sys

from postbus.log.kafka import Kafka
from postbus.model import Unreachable


async def main(address: str) -> None:
    client = Kafka(address, answer_s=0.5)
    stop = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    while not stop.done():
        try:
            await client.streams()
        except Unreachable as error:
            sys.stdout.write(f"{error}\n")
            sys.stdout.flush()
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
