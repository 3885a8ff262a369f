"""The public test kit: the real engine on a clock that the test moves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from postbus import Context, Event, RetryPolicy
from postbus.testing import START_US, BusKit, FakeClock
from tests.handlers import Gate, Recorder, fails


async def test_the_clock_stands_still_until_it_is_moved() -> None:
    clock = FakeClock()
    sleeping = asyncio.create_task(clock.sleep(10))
    await asyncio.sleep(0.02)
    assert clock.now_us() == START_US
    assert clock.next_in_s() == 10
    clock.advance(9.5)
    await asyncio.sleep(0)
    assert not sleeping.done()
    clock.advance(0.5)
    await sleeping
    assert clock.next_in_s() is None
    assert clock.now_us() == START_US + 10_000_000


async def test_a_wait_ends_with_its_event_or_with_its_time() -> None:
    clock, event = FakeClock(), asyncio.Event()
    waiting = asyncio.create_task(clock.wait(event, 5))
    await asyncio.sleep(0.01)
    clock.advance(5)
    assert await waiting is False
    waiting = asyncio.create_task(clock.wait(event, 5))
    await asyncio.sleep(0.01)
    event.set()
    assert await waiting is True
    assert await clock.wait(event, 5) is True
    await asyncio.wait_for(clock.sleep(0), 60)


async def test_the_wall_may_jump_without_anybody_waking() -> None:
    clock = FakeClock()
    before = clock.monotonic_s()
    sleeping = asyncio.create_task(clock.sleep(1))
    await asyncio.sleep(0)
    clock.set_wall(START_US - 1)
    await asyncio.sleep(0.01)
    assert (clock.now_us(), clock.monotonic_s()) == (START_US - 1, before)
    assert not sleeping.done()
    sleeping.cancel()


async def test_publish_advance_retry_and_dead_letter_without_sleeping() -> None:
    got = Recorder(fails(9))
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader", retry=RetryPolicy(jitter=0))
        receipt = await kit.publish("a", {"n": 1})
        await kit.settle()
        assert got.attempts == [1]
        await kit.advance(0.9)
        assert got.attempts == [1]
        await kit.advance(10)
        assert got.attempts == [1, 2, 3]
        [letter] = await kit.dead()
        [row] = await kit.journal()
        [event] = await kit.events()
    assert letter.origin_id == event.id == receipt.id
    assert row[5] == "failed"
    assert event.source == "test"


async def test_advance_stops_at_everything_that_comes_due_on_the_way() -> None:
    times: list[float] = []
    async with BusKit() as kit:

        async def fail(_event: Event) -> None:
            times.append(kit.clock.monotonic_s())
            raise ValueError

        kit.bus.subscribe("a", fail, "reader", retry=RetryPolicy(max_attempts=4, jitter=0))
        await kit.publish("a", 1)
        await kit.settle()
        began = kit.clock.monotonic_s()
        await kit.advance(20)
        assert kit.clock.monotonic_s() == pytest.approx(began + 20)
    assert [round(moment - began) for moment in times] == [0, 1, 3, 7]


async def test_a_jump_lets_everything_come_due_at_once() -> None:
    got = Recorder(fails(9))
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader")
        await kit.publish("a", 1)
        await kit.jump(3600)
        assert got.attempts == [1, 2]


async def test_until_moves_time_as_far_as_needed() -> None:
    got = Recorder(fails(2))
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader")
        await kit.publish("a", 1)
        await kit.until(lambda: len(got.events) == 3)
        with pytest.raises(TimeoutError):
            await kit.until(lambda: len(got.events) == 4, steps=3)


async def test_a_bus_that_never_rests_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postbus.testing.SETTLE_S_MAX", 0.3)

    async def again(_event: Event, ctx: Context) -> None:
        await ctx.publish("a", 1)

    async with BusKit(max_hops=1_000_000) as kit:
        kit.bus.subscribe("a", again, "again")
        await kit.publish("a", 1)
        with pytest.raises(TimeoutError, match="does not come to rest"):
            await kit.settle()


async def test_a_hung_handler_does_not_keep_the_kit_from_resting() -> None:
    gate = Gate()
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader")
        await kit.publish("a", 1)
        await asyncio.wait_for(kit.settle(), 60)
        assert len(gate.started) == 1


async def test_a_crash_leaves_what_a_killed_process_leaves() -> None:
    gate, got = Gate(), Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader")
        await kit.publish("a", 1)
        await kit.settle()
        await kit.crash()
        assert len(gate.cancelled) == 1
        assert [row[5] for row in await kit.journal()] == ["processing"]
        kit.bus.subscribe("a", got, "reader")
        await kit.start()
        await kit.settle()
        assert [row[5] for row in await kit.journal()] == ["done"]
    assert got.attempts == [2]


async def test_a_kit_may_live_on_a_path_and_leaves_it_there(tmp_path: Path) -> None:
    async with BusKit(tmp_path) as kit:
        await kit.publish("a", 1)
    async with BusKit(tmp_path) as kit:
        assert [event.payload for event in await kit.events()] == [1]
        assert await kit.query("SELECT count(*) FROM event_journal WHERE topic = ?", "a") == [(1,)]


async def test_a_kit_in_memory_leaves_nothing() -> None:
    async with BusKit() as kit:
        folder = Path(str(kit._path))
        assert await asyncio.to_thread(folder.is_dir)
    assert not await asyncio.to_thread(folder.exists)
