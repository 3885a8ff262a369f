"""Starting and stopping in quick succession leaves no lane behind that somebody seems to hold."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from postbus import EventBus
from postbus.log.sqlite import SqliteLog
from tests.handlers import Recorder


async def owners(folder: Path) -> list[tuple[str, str]]:
    log = await asyncio.to_thread(SqliteLog.open, folder)
    try:
        query = "SELECT consumer, owner FROM lanes WHERE owner IS NOT NULL"
        return await log.store.read(lambda db: list(db.execute(query)))
    finally:
        await log.close()


@pytest.mark.parametrize("seed", range(4))
async def test_stop_right_after_start_gives_every_lane_back(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for turn in range(12):
        bus = EventBus(tmp_path)
        for number in range(3):
            bus.subscribe("a", Recorder(), f"early-{number}")
        if chance.random() < 0.5:
            await bus.publish("a", "test", turn)
        starting = asyncio.create_task(bus.start())
        for number in range(3):
            await asyncio.sleep(chance.choice([0, 0, 0.0005, 0.002]))
            bus.subscribe("a", Recorder(), f"late-{number}")
        await starting
        await asyncio.sleep(chance.choice([0, 0, 0.0005, 0.002, 0.01]))
        if chance.random() < 0.3:
            bus.unsubscribe("a", "late-1")
        await bus.stop()
        assert await owners(tmp_path) == [], turn


@pytest.mark.parametrize("seed", range(4))
async def test_stop_while_start_is_under_way_gives_every_lane_back(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for turn in range(12):
        bus = EventBus(tmp_path)
        for number in range(4):
            bus.subscribe("a", Recorder(), f"reader-{number}")
        if chance.random() < 0.5:
            await bus.open()
        starting = asyncio.create_task(bus.start())
        await asyncio.sleep(chance.choice([0, 0, 0.0005, 0.001, 0.002, 0.004]))
        await bus.stop()
        await starting
        assert asyncio.all_tasks() == {asyncio.current_task()}, "something goes on after stop"
        assert await owners(tmp_path) == [], turn


async def test_a_bus_can_be_started_again_at_once(tmp_path: Path) -> None:
    got = Recorder()
    bus = EventBus(tmp_path)
    bus.subscribe("a", got, "reader")
    for number in range(15):
        await bus.start()
        await bus.publish("a", "test", number)
        await bus.stop()
    await bus.start()
    async with asyncio.timeout(60):
        while len(got.events) < 15:  # noqa: ASYNC110 - what is waited for knows nothing of this loop
            await asyncio.sleep(0.005)
    await bus.stop()
    assert sorted(got.payloads) == [*range(15)]
