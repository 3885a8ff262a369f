"""Real processes that wake agents on one store: each wake is made by one, and none is lost when they are killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from postbus.clock import SystemClock
from postbus.inbox import Inboxes, Target
from postbus.log.sqlite import SqliteLog
from tests.handlers import eventually
from tests.inbox.wake_kit import TENANT, Receiver

ROOT = Path(__file__).parents[2]
KILLS = 25


class Scene:
    """A store with one agent, the server it is woken at, and processes that wake it. Nobody wakes in this process."""

    def __init__(self, folder: Path, receiver: Receiver) -> None:
        self.folder = folder
        self.receiver = receiver
        self.log = SqliteLog.open(folder, durability="relaxed")
        self.inboxes = Inboxes(self.log, SystemClock())
        self.living: list[int] = []
        self._nursery: asyncio.subprocess.Process | None = None

    async def agent(self, **settings: Any) -> None:
        target = Target(kind="webhook", url=self.receiver.url, allow_private=True, buffer_s=0.02, **settings)
        await self.inboxes.create_agent(TENANT, "alpha", (target,))

    async def send(self, count: int = 1) -> str:
        return [(await self.inboxes.send(TENANT, "alpha", f"message {n}"))[0] for n in range(count)][-1]

    async def fork(self) -> int:
        if self._nursery is None:
            command = [sys.executable, "-m", "tests.inbox.wake_process", str(self.folder)]
            pipe = asyncio.subprocess.PIPE
            self._nursery = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=ROOT)
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._nursery.stdin.write(b"go\n")
        self.living.append(int(await self._nursery.stdout.readline()))
        return self.living[-1]

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.living.remove(pid)

    async def query(self, statement: str) -> list[tuple[Any, ...]]:
        return await self.log.store.read(lambda db: list(db.execute(statement)))

    async def until(self, statement: str, expected: list[tuple[Any, ...]]) -> None:
        async with asyncio.timeout(60):
            while await self.query(statement) != expected:  # noqa: ASYNC110 - another process changes it
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for pid in list(self.living):
            self.kill(pid)
        if self._nursery is not None:
            assert self._nursery.stdin is not None
            self._nursery.stdin.close()
            await self._nursery.wait()
        await self.log.close()


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with Receiver() as receiver:
        made = Scene(tmp_path / "data", receiver)
        yield made
        await made.close()


def number(item: str) -> int:
    return int(item.removeprefix("itm_"), 16)


async def test_several_processes_wake_an_agent_once(scene: Scene) -> None:
    await scene.agent()
    received = scene.receiver.received
    for _ in range(3):
        await scene.fork()
    sent = 0
    for count in (1, 3, 1, 7, 1, 2, 1, 1, 4, 1):
        last = number(await scene.send(count))
        sent += count
        async with asyncio.timeout(60):
            while not received or number(received[-1]["last_item"]) < last:  # what comes late in a burst needs an ack
                await asyncio.sleep(0.01)
                if received:
                    await scene.inboxes.items.ack(TENANT, "alpha", through=received[-1]["last_item"])
        await scene.inboxes.items.ack(TENANT, "alpha", everything=True)
    assert len(set(scene.receiver.ids)) == len(scene.receiver.ids)
    assert sum(scene.receiver.counts) == sent
    await scene.until("SELECT DISTINCT outcome, attempts FROM activations", [("woken", 1)])


async def test_a_wake_that_may_have_arrived_is_made_again_when_nothing_shows_that_it_did(scene: Scene) -> None:
    await scene.agent(lease_s=0.5)
    scene.receiver.hold = hold = asyncio.Event()
    pid = await scene.fork()
    await scene.send(2)
    await eventually(lambda: scene.receiver.received)
    scene.kill(pid)
    scene.receiver.hold = None
    hold.set()
    await scene.fork()
    await scene.until("SELECT outcome, attempts, new_item_count FROM activations", [("woken", 2, 2)])
    assert len(scene.receiver.ids) == 2
    assert len(set(scene.receiver.ids)) == 1


async def test_a_wake_that_has_arrived_is_not_made_again(scene: Scene) -> None:
    await scene.agent()
    scene.receiver.hold = hold = asyncio.Event()
    pid = await scene.fork()
    first = await scene.send(1)
    await scene.send(1)
    await eventually(lambda: scene.receiver.received)
    scene.kill(pid)
    scene.receiver.hold = None
    hold.set()
    await scene.fork()
    await scene.until("SELECT outcome FROM activations", [("unknown",)])
    await scene.inboxes.items.ack(TENANT, "alpha", items=[first])
    await scene.until("SELECT outcome FROM activations", [("answered",)])
    last = await scene.send()
    await eventually(lambda: len(scene.receiver.received) == 2)
    assert (scene.receiver.counts[-1], scene.receiver.received[-1]["last_item"]) == (1, last)


async def test_a_wake_that_was_read_while_its_maker_died_is_not_made_again(scene: Scene) -> None:
    await scene.agent(lease_s=0.5)
    scene.receiver.hold = hold = asyncio.Event()
    pid = await scene.fork()
    await scene.send()
    await eventually(lambda: scene.receiver.received)
    scene.kill(pid)
    scene.receiver.hold = None
    hold.set()
    await scene.inboxes.items.read(TENANT, "alpha")
    await scene.fork()
    await scene.until("SELECT outcome, attempts FROM activations", [("answered", 1)])
    assert scene.receiver.counts == [1]


async def test_killed_again_and_again_every_item_is_announced_and_no_wake_is_for_nothing(scene: Scene) -> None:
    await scene.agent(lease_s=0.1)
    received = scene.receiver.received
    dice = random.Random(7)
    acked = 0
    for _ in range(KILLS):
        hold = scene.receiver.hold = asyncio.Event() if dice.random() < 0.5 else None
        pid = await scene.fork()
        before = len(received)
        for _ in range(dice.randrange(1, 6)):
            await scene.send(dice.randrange(1, 4))
            await asyncio.sleep(dice.choice((0, 0.005, 0.03)))
        if dice.random() < 0.8:  # else it hardly gets to open the store
            await eventually(lambda before=before: len(received) > before)  # type: ignore[misc]  # mypy cannot infer a default's type
            await asyncio.sleep(dice.choice((0, 0.001, 0.002, 0.005, 0.2)))
        scene.kill(pid)
        if hold is not None:
            hold.set()
        if dice.random() < 0.5 and received:
            through = max((call["last_item"] for call in received), key=number)
            acked += await scene.inboxes.items.ack(TENANT, "alpha", through=through)
    scene.receiver.hold = None
    last = number(await scene.send())
    await scene.fork()
    await eventually(lambda: number(received[-1]["last_item"]) == last)
    # Each wake announces something that none before it did, or is the same one again.
    seen: dict[str, int] = {}
    for call in received:
        end = number(call["last_item"])
        assert call["activation"] in seen or end > max(seen.values(), default=0)
        seen[call["activation"]] = end
    assert acked > 0
    await scene.until("SELECT announced, hidden FROM wake_targets", [(last, "[]")])
    interrupted = "SELECT count(*) FROM activations WHERE attempts > 1 OR outcome IN ('answered', 'replaced')"
    [(count,)] = await scene.query(interrupted)
    assert count > KILLS // 4, "hardly a wake was interrupted: this shows nothing"
