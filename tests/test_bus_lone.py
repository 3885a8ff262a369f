"""Events that come one by one are handed over by the commit itself; nothing else about them is different."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from postbus import Event, EventBus
from postbus.delivery.lane import Lane
from postbus.store.writer import ALONE_S
from tests.handlers import Recorder, eventually


async def apart(bus: EventBus, *numbers: int) -> None:
    """Publish so slowly that each event is alone."""
    for number in numbers:
        await asyncio.sleep(2 * ALONE_S)
        await bus.publish("a.b", "test", number)


async def test_who_waits_gets_a_lone_event_without_being_woken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[bool] = []
    arrived, got = Lane._arrived, Recorder()

    def noted(lane: Lane) -> bool:
        at_once.append(arrived(lane))
        return at_once[-1]

    monkeypatch.setattr(Lane, "_arrived", noted)
    async with EventBus(tmp_path) as bus:
        bus.subscribe("a.*", got, "reader")
        await apart(bus, *range(20))
        await eventually(lambda: len(got.events) == 20)
    assert got.payloads == [*range(20)]
    assert True in at_once, "they are taken up by the commit"


@pytest.mark.parametrize("ordering", ["key", "strict"])
async def test_one_by_one_and_many_at_once_keep_their_order(tmp_path: Path, ordering: str) -> None:
    rolls, got, slow = random.Random(1), Recorder(), Recorder()

    async def slowly(event: Event) -> None:
        await asyncio.sleep(rolls.choice([0, 0, 0.001, 0.005]))
        await slow(event)

    published = 0
    async with EventBus(tmp_path, batch_size=4) as bus:
        bus.subscribe("a.*", got, "quick", ordering="strict")
        bus.subscribe("a.b", slowly, "slow", ordering=ordering, concurrency=3)
        for _ in range(40):
            count = rolls.choice([1, 1, 2, 9])
            numbers = range(published, published + count)
            if count == 1:
                await apart(bus, *numbers)
            else:
                await asyncio.gather(*(bus.publish("a.b", "test", number, key="k") for number in numbers))
            published += count
        await eventually(lambda: len(got.events) == len(slow.events) == published)
        assert got.payloads == [*range(published)]
        assert sorted(slow.payloads) == [*range(published)]
        await eventually(lambda: all(count["running"] == 0 for count in (s.counts for s in bus._subscribers.values())))
    if ordering == "strict":
        assert slow.payloads == [*range(published)]


async def test_what_cannot_be_judged_by_the_commit_is_left_to_the_feeding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    got = Recorder()
    async with EventBus(tmp_path) as bus:
        bus.subscribe("a.*", got, "reader")
        await apart(bus, 0)
        await eventually(lambda: got.payloads == [0])
        (subscriber,) = bus._subscribers.values()
        (lane,) = subscriber._runner._lanes.values()  # type: ignore[union-attr]
        wants, refusals = lane._staff.wants, [1, 2]

        def judge(event: Event) -> bool:
            if refusals:
                refusals.pop()
                raise RuntimeError("it cannot be judged now")
            return wants(event)

        monkeypatch.setattr(lane, "_staff", lane._staff._replace(wants=judge))
        await apart(bus, 1, 2)
        await eventually(lambda: len(got.events) == 3)
    assert got.payloads == [0, 1, 2]
    assert "it goes on" in caplog.text
