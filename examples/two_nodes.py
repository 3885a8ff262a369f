"""Two processes that share one log on NATS (or Kafka), each with a folder of its own.

In one terminal, then in another:

    python examples/two_nodes.py till 'nats://127.0.0.1:4222/shop?data=./till'
    python examples/two_nodes.py shop 'nats://127.0.0.1:4222/shop?data=./shop' 5

The shop publishes orders and waits for their invoices; the till makes an invoice for every order. Either may be stopped
and started again, and so may the NATS server: what is published meanwhile arrives later, once.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from postbus import Context, Event, EventBus


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def shop(bus: EventBus, orders: int) -> None:
    """Publish orders under ids of their own, so that starting again publishes none twice; end with the last invoice."""
    open_orders = set(range(orders))
    done = asyncio.Event()

    @bus.on("invoice.made", subscriber_id="shop", start="earliest")
    async def invoiced(event: Event) -> None:
        number = event.payload["order"]
        say(f"invoice {number}")
        open_orders.discard(number)
        if not open_orders:
            done.set()

    async with bus:
        for number in range(orders):
            receipt = await bus.publish("order.placed", "shop", {"order": number}, native_id=f"order-{number}")
            say(f"order {number} {'spooled' if receipt.spooled else receipt.id}")
        await done.wait()


async def till(bus: EventBus) -> None:
    """Make an invoice for every order, until told to end."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)

    @bus.on("order.placed", subscriber_id="till", start="earliest")
    async def bill(event: Event, ctx: Context) -> None:
        number = event.payload["order"]
        await ctx.publish("invoice.made", {"order": number}, native_id=f"invoice-{number}")

    async with bus:
        say("the till is open")
        await ended.wait()


if __name__ == "__main__":
    role, *words = sys.argv[1:] or [""]
    if len(words) != {"till": 1, "shop": 2}.get(role):
        sys.exit(__doc__)
    bus = EventBus(words[0])
    asyncio.run(till(bus) if role == "till" else shop(bus, int(words[1])))
