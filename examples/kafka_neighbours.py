"""Postbus on Kafka beside programs that know nothing of it: they read our events, and we handle theirs.

    python examples/kafka_neighbours.py 127.0.0.1:9092 ./node

Needs a Kafka (`make services` starts one) and `pip install 'postbus[kafka]'`.
"""

from __future__ import annotations

import asyncio
import sys

from confluent_kafka import Consumer, Producer, TopicPartition

from postbus import Event, EventBus

TOPIC = "shop.local.default.journal.0"  # prefix, stream, epoch
PATIENCE_S = 60.0


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def read(address: str, offset: int) -> bytes:
    """Read one message as any Kafka program does: the payload is its value."""
    consumer = Consumer({"bootstrap.servers": address, "group.id": "neighbour", "enable.auto.commit": False})
    consumer.assign([TopicPartition(TOPIC, 0, offset)])
    try:
        message = consumer.poll(PATIENCE_S)
        return (message.value() or b"") if message is not None else b""
    finally:
        consumer.close()


def write(address: str, body: bytes) -> None:
    """Write one message as any Kafka program does."""
    producer = Producer({"bootstrap.servers": address})
    producer.produce(TOPIC, body, partition=0)
    producer.flush(PATIENCE_S)


async def main(address: str, folder: str) -> None:
    """Publish an event that a neighbour reads, and handle one that a neighbour writes."""
    bus = EventBus(f"kafka://{address}/shop?data={folder}")
    came = asyncio.Event()

    @bus.on(">", subscriber_id="all", start="latest")
    async def handle(event: Event) -> None:
        say(f"handled {event.id} {event.topic} from {event.source}: {event.payload_json.decode()}")
        if event.source == "kafka":
            came.set()

    async with bus:
        receipt = await bus.publish("order.placed", "shop", {"order": 17}, key="customer-9")
        say(f"published {receipt.id}")
        say(f"a neighbour read {(await asyncio.to_thread(read, address, receipt.offset)).decode()}")
        await asyncio.to_thread(write, address, b'{"from": "a neighbour"}')
        async with asyncio.timeout(PATIENCE_S):
            await came.wait()


if __name__ == "__main__":
    if len(sys.argv) != 3:  # noqa: PLR2004 - the two words above
        sys.exit(__doc__)
    asyncio.run(main(*sys.argv[1:]))
