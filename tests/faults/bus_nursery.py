"""A process that forks workers and publishers to be killed: ``python -m tests.faults.bus_nursery``.

Each line on stdin, ``ROLE SEED FIRST FOLDER``, forks one; with the arguments ``ROLE FOLDER`` the process is one itself.
Everything is imported already and no thread or event loop has started, so that a life costs a fork. All write to the
shared stdout, one line and one ``write`` per happening: ``born PID``, ``open PID``, ``ack NUMBER OFFSET`` on a receipt,
``lost PID`` when a lease is, ``bye PID`` after a clean stop, ``error PID TEXT``. What handlers do goes to files in
FOLDER: see ``Diary``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from postbus.bus import Context, EventBus
from postbus.model import Event, Reject, RetryPolicy, StoreBusy
from tests.faults.scene import JOURNAL

__all__ = ["BOMB", "HASTY", "JOURNAL", "LEASE_S", "Diary", "payload_of", "store_of"]

KEYS = 6
BOMB = 25
LEASE_S = 1.5
PATIENT = RetryPolicy(max_attempts=8, backoff_s=0.02, backoff_s_max=0.2)
HASTY = RetryPolicy(max_attempts=3, backoff_s=0.02)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def store_of(folder: Path) -> Path:
    return folder / "store"


class Diary:
    """What handlers did, a file per subscription, a line per happening: ``WORD OFFSET ATTEMPT PID``.

    A line is one ``write`` in append mode, so the order of lines is the order of happenings over all processes.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{name}.diary"
        self._handle = -1

    def write(self, word: str, event: Event) -> None:
        if self._handle < 0:
            self._handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(self._handle, b"%s %d %d %d\n" % (word.encode(), event.offset, event.attempt, os.getpid()))

    def read(self) -> list[tuple[str, int, int, int]]:
        if not self._path.exists():
            return []
        lines = [line.split() for line in self._path.read_text("ascii").splitlines()]
        return [(word, int(offset), int(attempt), int(pid)) for word, offset, attempt, pid in lines]


# --- publishing -------------------------------------------------------------------------------------------------------


def payload_of(number: int) -> tuple[str, dict[str, object]]:
    """Return the topic and the payload that have this number; whoever knows the number knows what will become of it."""
    rolls = random.Random(number)
    kind = rolls.choices(("plain", "flaky", "slow", "poison"), weights=(940, 30, 5, 25))[0]
    return ("order.poison" if kind == "poison" else "order.placed"), {"n": number, "kind": kind}


async def publish(bus: EventBus, numbers: itertools.count[int], rolls: random.Random) -> None:
    while True:
        for _ in range(rolls.choice((1, 1, 2, 8))):
            number = next(numbers)
            topic, payload = payload_of(number)
            key = f"key-{number % KEYS}" if number % 10 else None
            receipt = await bus.publish(topic, "nursery", payload, key=key)
            say("ack", number, receipt.offset)
        await asyncio.sleep(rolls.uniform(0.0, 0.06))


async def publisher(folder: Path, rolls: random.Random, first: int) -> None:
    bus = EventBus(store_of(folder))
    await bus.open()
    say("open", os.getpid())
    numbers = itertools.count(first)
    await asyncio.gather(*(publish(bus, numbers, random.Random(rolls.random())) for _ in range(2)))


# --- handling ---------------------------------------------------------------------------------------------------------


def handler(folder: Path, name: str, work: Callable[[Event, Context], Awaitable[None]]) -> Callable[..., object]:
    """Wrap what a subscription does in lines of its diary."""
    diary = Diary(folder, name)

    async def handle(event: Event, ctx: Context) -> None:
        diary.write("began", event)
        await work(event, ctx)
        diary.write("done", event)

    return handle


async def pause(event: Event, _ctx: Context) -> None:
    """Take some time; some events fail at first and some take long enough to be passed by others."""
    kind = event.payload["kind"]
    await asyncio.sleep(0.3 if kind == "slow" else event.offset % 4 / 1000)
    if kind == "flaky" and event.attempt <= 2:
        raise ValueError("not yet")


async def refuse(event: Event, ctx: Context) -> None:
    if event.payload["kind"] == "poison":
        if event.payload["n"] % 2:
            raise Reject("never")
        raise ValueError("never works")
    await pause(event, ctx)


async def derive(event: Event, ctx: Context) -> None:
    await ctx.publish("derived.made", {"from": event.offset}, key=event.key, native_id=f"from-{event.offset}")


async def look(_event: Event, _ctx: Context) -> None:
    await asyncio.sleep(0)


def act(folder: Path) -> Callable[[Event, Context], Awaitable[None]]:
    effects = Diary(folder, "effect")

    async def once(event: Event, ctx: Context) -> None:
        async def effect() -> str:
            await asyncio.sleep(0.001)
            effects.write("effect", event)
            await asyncio.sleep(0.001)
            return "happened"

        await ctx.once("effect", effect)

    return once


def subscribe_all(bus: EventBus, folder: Path) -> None:
    def add(pattern: str, name: str, work: Callable[[Event, Context], Awaitable[None]], ordering: str = "key") -> None:
        bus.subscribe(pattern, handler(folder, name, work), name, retry=PATIENT, ordering=ordering)

    add("order.>", "keyed", pause)
    add("order.placed", "strict", pause, "strict")
    add("order.>", "faulty", refuse)
    add("order.placed", "deriver", derive)
    add("derived.*", "sink", look)
    add("order.placed", "effects", act(folder))


async def worker(folder: Path, _rolls: random.Random, _first: int) -> None:
    bus = EventBus(store_of(folder), lease_s=LEASE_S)
    subscribe_all(bus, folder)
    await run(bus)


# --- a handler that kills ---------------------------------------------------------------------------------------------


async def explode(event: Event, _ctx: Context) -> None:
    await asyncio.sleep(event.offset % 3 / 1000)
    if event.payload["n"] == BOMB:
        os.kill(os.getpid(), signal.SIGKILL)


async def dawdle(_event: Event, _ctx: Context) -> None:
    await asyncio.sleep(0.05)


async def bombed(folder: Path, _rolls: random.Random, _first: int) -> None:
    """Two orderings of the subscription that dies, and one beside them that is slow and has done nothing wrong."""
    bus = EventBus(store_of(folder))
    for name, ordering in (("loose", "key"), ("strict", "strict")):
        bus.subscribe(f"{name}.load", handler(folder, name, explode), name, retry=HASTY, ordering=ordering)
    bus.subscribe("*.load", handler(folder, "bystander", dawdle), "bystander", retry=HASTY)
    await run(bus)


async def hang(event: Event, _ctx: Context) -> None:
    await asyncio.sleep(1000.0 if event.payload["n"] == BOMB else 0.001)


async def hung(folder: Path, _rolls: random.Random, _first: int) -> None:
    """A subscription that hangs on one event, and another that dies of the same one when it gets that far."""
    bus = EventBus(store_of(folder), stop_grace_s=0.1)
    bus.subscribe("*.load", handler(folder, "hangs", hang), "hangs", retry=HASTY)
    bus.subscribe("bomb.load", handler(folder, "dies", explode), "dies", retry=HASTY)
    await run(bus)


# --- life and death ---------------------------------------------------------------------------------------------------


class Complaints(logging.Handler):
    """What the bus logs as an error is one; leases that were lost are counted."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            say("error", os.getpid(), self.format(record).replace("\n", " "))
        elif record.msg.startswith("lost the lease"):
            say("lost", os.getpid())


async def run(bus: EventBus) -> None:
    """Run the bus until SIGTERM, and report tasks of it that fell over."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: say("error", os.getpid(), context))
    logging.getLogger("postbus").addHandler(Complaints())
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    async with bus:
        say("open", os.getpid())
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await ended.wait()
            for fallen in fallen_tasks(bus):
                say("error", os.getpid(), repr(fallen))
    say("bye", os.getpid())


def fallen_tasks(bus: EventBus) -> list[BaseException]:
    """Return the errors of the bus's own tasks: each of them should live as long as the bus does."""
    tasks = list(bus._tasks)
    for subscriber in bus._subscribers.values():
        if subscriber._runner is not None:
            tasks += subscriber._runner.tasks()
    errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    return [error for error in errors if error is not None]


ROLES = {"worker": worker, "publisher": publisher, "bombed": bombed, "hung": hung}


def live(role: str, seed: int, first: int, folder: Path) -> NoReturn:
    status = 0
    say("born", os.getpid())
    try:
        asyncio.run(ROLES[role](folder, random.Random(seed), first))
    except StoreBusy:
        say("busy", os.getpid())
    except BaseException as error:  # noqa: BLE001 - reported to whoever counts
        say("error", os.getpid(), type(error).__name__, str(error).replace("\n", " "))
        status = 1
    os._exit(status)


def main() -> None:
    if sys.argv[1:]:
        live(sys.argv[1], 0, 0, Path(sys.argv[2]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: the dead are not asked how they died
    for line in sys.stdin:
        role, seed, first, folder = line.strip().split(maxsplit=3)
        if os.fork() == 0:
            live(role, int(seed), int(first), Path(folder))


if __name__ == "__main__":
    main()
