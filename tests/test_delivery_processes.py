"""Real processes on one store: they share the work, one takes over from another, and a killer is found."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from postbus import EventBus
from postbus.delivery.dead import DeadEntry
from tests.handlers import eventually

PROGRAM = Path(__file__).with_name("bus_process.py")


class Scene:
    """A store, a record of what was handled, and the processes that were started."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "data"
        self.record = folder / "record"
        self.record.touch()
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, **subscribers: dict[str, Any]) -> subprocess.Popen[bytes]:
        settings = json.dumps({"subscribers": subscribers})
        command = [sys.executable, str(PROGRAM), str(self.store), str(self.record), settings]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.processes.append(process)
        return process

    def lines(self, kind: str) -> list[list[str]]:
        return [line.split()[1:] for line in self.record.read_text().splitlines() if line.startswith(f"{kind} ")]

    async def end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        assert await asyncio.to_thread(process.wait, 60) == 0

    def handled(self) -> set[tuple[str, str]]:
        return {(name, number) for name, number, *_ in self.lines("done")}

    def ended_or_handled(self, process: subprocess.Popen[bytes], wanted: set[tuple[str, str]]) -> bool:
        return process.poll() is not None or wanted <= self.handled()

    async def until_settled(self) -> None:
        """Wait until nothing is on its way any more."""
        async with asyncio.timeout(60):
            while {"pending", "processing"} & {*(await self.read())[0]}:  # noqa: ASYNC110 - they know nothing of this loop
                await asyncio.sleep(0.05)

    async def publish(self, numbers: range) -> None:
        bus = EventBus(self.store)
        await asyncio.gather(*(bus.publish("a.b", "test", number) for number in numbers))
        await bus.stop()

    async def read(self) -> tuple[list[str], list[DeadEntry]]:
        bus = EventBus(self.store)
        log = await bus.open()
        query = "SELECT status FROM event_journal ORDER BY id"
        statuses = await log.store.read(lambda db: [str(status) for (status,) in db.execute(query)])
        letters = await bus.dead_letters.find()
        await bus.stop()
        return statuses, letters


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


async def test_a_handler_that_kills_the_process_is_dead_lettered_and_its_neighbours_are_delivered(scene: Scene) -> None:
    await scene.publish(range(12))
    neighbours = {("bad", str(number)) for number in range(12) if number != 5} | {("good", str(n)) for n in range(12)}
    restarts = -1
    process: subprocess.Popen[bytes] | None = None
    while process is None or process.poll() is not None:
        assert process is None or process.returncode == 9
        restarts += 1
        process = scene.start(bad={"killers": [5]}, good={})
        await eventually(partial(scene.ended_or_handled, process, neighbours), 60)
    await scene.until_settled()
    await scene.end(process)
    statuses, letters = await scene.read()
    assert 3 <= restarts <= 4
    [letter] = letters
    assert (letter.subscription, letter.origin_offset, letter.reason) == ("bad", 5, "crash")
    assert letter.attempts == 3
    assert statuses == ["failed" if number == 5 else "done" for number in range(12)]
    effects = Counter(tuple(line) for line in scene.lines("effect"))
    assert set(effects.values()) == {1}


async def test_two_processes_share_a_store_and_each_event_is_handled_once(scene: Scene) -> None:
    first, second = scene.start(one={}, two={}), scene.start(one={}, two={})
    await eventually(lambda: len(scene.lines("ready")) == 2, 60)
    await scene.publish(range(300))
    await eventually(lambda: len(scene.lines("done")) >= 600, 60)
    await scene.until_settled()
    await scene.end(first)
    await scene.end(second)
    handled = Counter((name, number) for name, number, *_ in scene.lines("start"))
    statuses, letters = await scene.read()
    assert set(handled.values()) == {1}
    assert len(handled) == 600
    assert statuses == ["done"] * 300
    assert letters == []


async def test_the_second_takes_over_when_the_first_is_killed(scene: Scene) -> None:
    first = scene.start(one={"takes_s": 0.005})
    await eventually(lambda: len(scene.lines("ready")) == 1, 60)
    second = scene.start(one={"takes_s": 0.005})
    await eventually(lambda: len(scene.lines("ready")) == 2, 60)
    publishing = asyncio.create_task(scene.publish(range(120)))
    await eventually(lambda: len(scene.lines("done")) > 20, 60)
    first.kill()  # and nobody waits for it: a dead process that is still in the table must not keep its leases
    await publishing
    await eventually(lambda: len(scene.handled()) == 120, 60)
    await scene.until_settled()
    await scene.end(second)
    statuses, letters = await scene.read()
    assert letters == []
    assert statuses == ["done"] * 120
    assert str(second.pid) in {pid for *_, pid in scene.lines("done")}
    assert set(Counter(tuple(line) for line in scene.lines("effect")).values()) == {1}


async def test_a_process_that_stops_hands_its_work_over_without_a_second_attempt(scene: Scene) -> None:
    first = scene.start(one={"takes_s": 0.01, "concurrency": 1})
    await eventually(lambda: len(scene.lines("ready")) == 1, 60)
    second = scene.start(one={"takes_s": 0.01, "concurrency": 1})
    await eventually(lambda: len(scene.lines("ready")) == 2, 60)
    await scene.publish(range(60))
    await eventually(lambda: len(scene.lines("done")) > 10, 60)
    await scene.end(first)
    await eventually(lambda: len(scene.lines("done")) == 60, 60)
    await scene.end(second)
    assert [line[1] for line in scene.lines("start")] == [str(number) for number in range(60)]
    assert {line[2] for line in scene.lines("start")} == {"1"}
