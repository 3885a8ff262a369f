"""A program with a bus, for the command line to work beside: ``python office.py DATA``.

It prints ``ready``, then a line for everything its handlers do, until it is interrupted. Events on ``bad.…`` fail until
there is a file ``fixed`` in its folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path

from postbus import Context, Event, EventBus, RetryPolicy


def fixed() -> bool:
    return Path("fixed").exists()


def tell(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


def office(data: str | Path) -> EventBus:
    """A bus with a subscriber that follows, one that derives, and one that fails."""
    bus = EventBus(data)
    retry = RetryPolicy(max_attempts=2, backoff_s=0.01, jitter=0)

    @bus.on(">", subscriber_id="witness")
    async def witness(event: Event) -> None:
        tell("saw", event.topic, event.id)

    @bus.on("job.*", subscriber_id="worker", retry=retry)
    async def worker(event: Event, ctx: Context) -> None:
        await ctx.publish(f"bad.{event.topic.split('.')[1]}", event.payload)

    @bus.on("bad.*", subscriber_id="fragile", retry=retry)
    async def fragile(event: Event) -> None:
        if not fixed():
            raise ValueError(f"cannot take\x1b[31m {event.payload!r}")
        tell("took", event.topic, event.id)

    return bus


async def main() -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with office(sys.argv[1]):
        tell("ready")
        await ended.wait()


if __name__ == "__main__":
    logging.disable()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
