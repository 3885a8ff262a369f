"""A process that forks publishers to be killed: ``python -m tests.faults.nursery``.

Each line on stdin, ``SEED FIRST FOLDER``, forks a publisher that numbers its identified facts from FIRST. Everything is
imported already, so that a life costs a fork. Publishers write one line per happening to the shared stdout, each in one
``write``: ``born PID``, ``open PID``, ``ack KIND NUMBER STREAM PARTITION OFFSET``, ``moved CONSUMER THROUGH``,
``error PID TEXT``.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys

from postbus.log.sqlite import SqliteLog
from postbus.model import Draft, Retention, StreamSettings
from tests.faults.scene import EARLIEST

__all__ = ["CONSUMER", "SHORT", "SINGLE", "WIDE", "draft"]

SINGLE, WIDE, SHORT = "local.default.single", "local.default.wide", "local.default.short"
CONSUMER = "reader"


def draft(kind: str, number: int) -> Draft:
    """Return the one draft that has this number; whoever knows the number knows every byte."""
    dice = random.Random(f"{kind} {number}")
    payload = b'{"n":%d,"text":"%s"}' % (number, b"x" * dice.choice((0, 10, 500, 500, 9000)))
    return Draft(
        topic=f"{kind}.t{number % 3}",
        source="nursery",
        payload_json=payload,
        key=f"key-{dice.randrange(9)}" if kind != "plain" else None,
        native_id=f"id-{number}" if kind == "identified" else None,
        correlation_id=f"c{number % 10}",
        occurred_at_us=1_700_000_000_000_000 + dice.randrange(10**9),
    )


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def publish(log: SqliteLog, kind: str, numbers: itertools.count[int], dice: random.Random) -> None:
    while True:
        stream = WIDE if kind == "identified" else dice.choice((SINGLE, WIDE, SHORT))
        mine = [next(numbers) for _ in range(dice.choice((1, 1, 1, 4, 30)))]
        receipts = await log.append(stream, [draft(kind, number) for number in mine])
        for number, receipt in zip(mine, receipts, strict=True):
            say("ack", kind, number, stream, receipt.partition, receipt.offset)


async def follow(log: SqliteLog) -> None:
    """Read and commit; what is committed is reported as moved."""
    await log.ensure_consumer(SINGLE, CONSUMER, EARLIEST)
    while True:
        found = await log.read(SINGLE, CONSUMER, 50)
        if found.events:
            moved = await log.commit(SINGLE, CONSUMER, found.events[-1].offset)
            say("moved", CONSUMER, moved.committed)
        await log.wait(SINGLE, 0, found.high_water_mark, 0.01)


async def tidy(log: SqliteLog) -> None:
    while True:
        await asyncio.sleep(0.01)
        await log.trim(SHORT)


async def live(folder: str, seed: int, first: int) -> None:
    dice = random.Random(seed)
    log = SqliteLog.open(folder)
    await log.ensure_stream(SINGLE)
    await log.ensure_stream(WIDE, StreamSettings(partitions=3))
    await log.ensure_stream(SHORT, StreamSettings(retention=Retention(count=50)))
    log.projections.start()
    say("open", os.getpid())
    plain = itertools.count(seed * 1_000_000)
    tasks = [publish(log, "plain", plain, random.Random(dice.random())) for _ in range(3)]
    tasks += [publish(log, "identified", itertools.count(first), dice), follow(log), tidy(log)]
    await asyncio.gather(*tasks)


def fork(folder: str, seed: int, first: int) -> None:
    if os.fork():
        return
    status = 0
    say("born", os.getpid())
    try:
        asyncio.run(live(folder, seed, first))
    except BaseException as error:  # noqa: BLE001 - reported to whoever counts
        say("error", os.getpid(), type(error).__name__, str(error).replace("\n", " "))
        status = 1
    os._exit(status)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: the dead are not asked how they died
    for line in sys.stdin:
        seed, first, folder = line.split(maxsplit=2)
        fork(folder.strip(), int(seed), int(first))


if __name__ == "__main__":
    main()
