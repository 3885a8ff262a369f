"""A process for tests: a bus with one or more subscribers that write down what they handle, and may end the process.

``python bus_process.py FOLDER RECORD SETTINGS`` where SETTINGS is JSON: ``subscribers`` maps ids to settings. It runs
until its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from postbus import Context, Event, EventBus, RetryPolicy


def note(path: str, line: str) -> None:
    with Path(path).open("a") as record:
        record.write(f"{line}\n")
        record.flush()


async def main(folder: str, record: str, settings: dict[str, Any]) -> None:
    bus = EventBus(folder, lease_s=settings.get("lease_s", 30.0))

    def subscribe(name: str, options: dict[str, Any]) -> None:
        async def handle(event: Event, ctx: Context) -> None:
            note(record, f"start {name} {event.payload} {event.attempt} {os.getpid()}")
            if event.payload in options.get("killers", []):
                os._exit(9)
            await asyncio.sleep(options.get("takes_s", 0))
            await ctx.once("effect", lambda: note(record, f"effect {name} {event.payload}"))
            note(record, f"done {name} {event.payload} {event.attempt} {os.getpid()}")

        retry = RetryPolicy(max_attempts=options.get("max_attempts", 3), backoff_s=0.01)
        bus.subscribe("a.*", handle, name, retry=retry, concurrency=options.get("concurrency", 10))

    for name, options in settings["subscribers"].items():
        subscribe(name, options)
    async with bus:
        note(record, f"ready {os.getpid()}")
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
