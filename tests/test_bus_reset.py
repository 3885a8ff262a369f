"""Moving a subscription: while it runs, while it is stopped, back and forth, from this process and from another."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from postbus import Context, Event, EventBus, Invalid, NotFound, RetryPolicy, Start, StartPolicy, StreamSettings
from postbus.log.sqlite import SqliteLog
from postbus.model import OffsetOutOfRange
from postbus.testing import BusKit
from tests.handlers import Gate, Recorder, eventually, fails

EXACT = RetryPolicy(jitter=0.0)
SLOW = RetryPolicy(max_attempts=3, backoff_s=10.0, backoff_s_max=10.0, jitter=0.0)
NEVER = RetryPolicy(max_attempts=1)
PROCESS = Path(__file__).with_name("bus_process.py")


def at(offset: int) -> Start:
    return Start(policy=StartPolicy.AT_OFFSET, offset=offset)


async def cursor(kit: BusKit, name: str = "reader") -> int:
    found = await kit.query("SELECT next_offset FROM cursors WHERE consumer = ?", name)
    return int(found[0][0])


async def rows(kit: BusKit) -> list[tuple[Any, ...]]:
    return await kit.query('SELECT "offset", status FROM delivery_rows ORDER BY "offset"')


async def statuses(kit: BusKit) -> list[str]:
    return [row[5] for row in await kit.journal()]


# --- while it runs ----------------------------------------------------------------------------------------------------


async def test_a_reset_back_while_running_delivers_again_from_there_at_once() -> None:
    got = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader")
        for number in range(10):
            await kit.publish("a", number)
        await kit.settle()
        assert await cursor(kit) == 10
        await kit.bus.reset("reader", at(4))
        await kit.settle()
        assert got.payloads == [*range(10), *range(4, 10)]
        await kit.publish("a", 10)
        await kit.advance(30)
        assert got.payloads == [*range(10), *range(4, 10), 10]
        assert await cursor(kit) == 11


async def test_a_reset_through_the_log_reaches_the_running_lane_by_itself() -> None:
    got = Recorder()
    bus = EventBus("memory:")
    bus.subscribe("a", got, "reader")
    async with bus:
        for number in range(3):
            await bus.publish("a", "test", number)
        await eventually(lambda: len(got.events) == 3)
        log = await bus.open()
        await log.reset(bus.journal, "reader", at(0))
        await eventually(lambda: len(got.events) == 6)
        assert (await log.get_consumer_lag(bus.journal, "reader")).partitions[0].lag <= 3
    assert got.payloads == [0, 1, 2, 0, 1, 2]


async def test_what_runs_during_a_reset_cannot_undo_it() -> None:
    gate = Gate(lambda event: event.payload == 4)
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader")
        for number in range(6):
            await kit.publish("a", number)
        await kit.advance(2)
        await kit.bus.reset("reader", at(2))
        await kit.settle()
        gate.open.set()  # the run from before the reset ends now: nobody waits for its word any more
        await kit.advance(2)
        assert [event.payload for event in gate.started] == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
        assert await cursor(kit) == 6
        assert await rows(kit) == [] or {status for _, status in await rows(kit)} == {"done"}
        assert await statuses(kit) == ["done"] * 6


async def test_a_reset_to_the_end_while_running_passes_over_what_waits() -> None:
    got = Recorder(fails(9))
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader", retry=SLOW)
        for number in range(5):
            await kit.publish("a", number)
        await kit.settle()
        assert {status for _, status in await rows(kit)} == {"waiting"}
        await kit.bus.reset("reader", "latest")
        await kit.publish("a", "new")
        await kit.advance(40)
        assert got.payloads == [*range(5), "new", "new", "new"]
        assert [entry.origin_offset for entry in await kit.dead()] == [5]


async def test_a_reset_back_keeps_what_waits_below() -> None:
    got = Recorder(lambda event: fails(1)(event) if event.payload == 1 else None)
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader", retry=EXACT)
        for number in range(4):
            await kit.publish("a", number)
        await kit.settle()
        await kit.bus.reset("reader", at(3))
        await kit.advance(10)
        assert got.payloads == [0, 1, 2, 3, 3, 1]
        assert got.attempts == [1, 1, 1, 1, 1, 2]


async def test_the_effects_of_once_stay_done_over_a_reset() -> None:
    effects: list[int] = []

    async def handle(event: Event, ctx: Context) -> None:
        await ctx.once("effect", lambda: effects.append(event.payload))

    async with BusKit() as kit:
        kit.bus.subscribe("a", handle, "reader")
        for number in range(3):
            await kit.publish("a", number)
        await kit.settle()
        await kit.bus.reset("reader", "earliest")
        await kit.settle()
        assert kit.bus._subscribers["reader"].counts["handled"] == 6
    assert effects == [0, 1, 2]


# --- while it is stopped ----------------------------------------------------------------------------------------------


async def test_a_reset_while_stopped_forgets_failed_and_waiting_events_beyond_it(tmp_path: Path) -> None:
    first = Recorder(lambda event: fails(9)(event) if event.payload in (1, 4) else None)
    async with BusKit(tmp_path) as kit:
        kit.bus.subscribe("a", first, "reader", retry=NEVER)
        for number in range(6):
            await kit.publish("a", number)
        await kit.settle()
        assert await rows(kit) == [(1, "failed"), (4, "failed")]
        await kit.stop()
        log = await asyncio.to_thread(SqliteLog.open, tmp_path)
        await log.reset("local.default.journal", "reader", at(3))
        await log.close()
        kit.bus = EventBus(tmp_path, clock=kit.clock)
        assert await rows(kit) == [(1, "failed")]
        assert await statuses(kit) == ["done", "failed", "done", "pending", "pending", "pending"]
        again = Recorder()
        kit.bus.subscribe("a", again, "reader", retry=NEVER)
        await kit.start()
        await kit.settle()
        assert again.payloads == [3, 4, 5]
        assert again.attempts == [1, 1, 1]
        assert await statuses(kit) == ["done", "failed", "done", "done", "done", "done"]
        assert [entry.origin_offset for entry in await kit.dead()] == [1]


async def test_moving_back_keeps_what_waits_below_and_moving_forward_does_not(tmp_path: Path) -> None:
    async with BusKit(tmp_path) as kit:
        kit.bus.subscribe("a", Recorder(fails(9)), "reader", retry=SLOW)
        for number in range(6):
            await kit.publish("a", number)
        await kit.settle()
        await kit.stop()
        await kit.bus.reset("reader", at(2))
        assert await rows(kit) == [(0, "waiting"), (1, "waiting")]
        await kit.bus.reset("reader", at(5))
        assert await rows(kit) == []
        again = Recorder()
        kit.bus.unsubscribe("a", "reader")
        kit.bus.subscribe("a", again, "reader", retry=SLOW)
        await kit.start()
        await kit.advance(40)
    assert again.payloads == [5]


async def test_after_a_crash_a_reset_leaves_nothing_that_could_pass_events_over(tmp_path: Path) -> None:
    gate = Gate()
    async with BusKit(tmp_path) as kit:
        kit.bus.subscribe("a", gate, "reader")
        for number in range(8):
            await kit.publish("a", number)
        await kit.settle()
        await kit.crash()
        await kit.bus.reset("reader", at(3))
        assert await kit.query("SELECT owner, reach FROM lanes") == [(None, 0)]
        got = Recorder()
        kit.bus.subscribe("a", got, "reader")
        assert await kit.bus.recover() == 0
        await kit.start()
        await kit.settle()
        assert got.payloads == [3, 4, 5, 6, 7]
        assert await statuses(kit) == ["done"] * 8


async def test_an_event_that_dies_again_after_a_reset_gets_a_letter_of_its_own() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(fails(9)), "reader", retry=NEVER)
        await kit.publish("a", 0)
        await kit.settle()
        await kit.bus.reset("reader", "earliest")
        await kit.settle()
        letters = await kit.bus.dead_letters.find(state=None)
        assert [letter.state for letter in letters] == ["replayed", "open"]
        assert await statuses(kit) == ["failed"]


async def test_only_the_partition_that_is_named_moves(tmp_path: Path) -> None:
    got = Recorder()
    async with BusKit(tmp_path) as kit:
        name = "local.default.orders"
        await kit.bus.ensure_stream(name, StreamSettings(partitions=2))
        kit.bus.subscribe(name, got, "reader")
        for number in range(8):
            await kit.publish(name, number, key=f"k{number}")
        await kit.settle()
        log = await kit.bus.open()
        moved = await log.reset(name, "reader", at(0), partition=1)
        assert moved.cursors[1].next_offset == 0
        there = {event.payload for event in got.events if event.partition == 1}
        await eventually(lambda: len(got.events) >= 8 + len(there))
        await kit.advance(5)
        assert sorted(event.payload for event in got.events[8:]) == sorted(there)


# --- what is refused --------------------------------------------------------------------------------------------------


async def test_a_bad_reset_is_refused_and_changes_nothing() -> None:
    got = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader")
        await kit.publish("a", 0)
        await kit.settle()
        with pytest.raises(OffsetOutOfRange, match="outside"):
            await kit.bus.reset("reader", at(2))
        with pytest.raises(NotFound, match="does not read"):
            await kit.bus.reset("nobody", "earliest")
        with pytest.raises(NotFound, match="does not read"):
            await kit.bus.reset("reader", "earliest", stream="local.default.other")
        with pytest.raises(Invalid, match="instant"):
            await kit.bus.reset("reader", "yesterday")
        with pytest.raises(Invalid, match="needs a start"):
            await kit.bus.reset("reader", None)  # type: ignore[arg-type]
        await kit.advance(60)
        assert got.payloads == [0]
        assert await cursor(kit) == 1


# --- from another process ---------------------------------------------------------------------------------------------


async def test_a_reset_from_the_command_line_reaches_a_bus_that_runs_in_another_process(tmp_path: Path) -> None:
    record = tmp_path / "record"
    folder = tmp_path / "data"
    settings = json.dumps({"subscribers": {"reader": {}}})
    command = [sys.executable, str(PROCESS), str(folder), str(record), settings]
    bus = EventBus(folder)
    for number in range(3):
        await bus.publish("a.x", "test", number)
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220 - a short start
        try:
            await eventually(lambda: _done(record) == ["0", "1", "2"], within_s=30)
            reset = [
                sys.executable,
                "-m",
                "postbus",
                "consumers",
                "journal",
                "--reset",
                "reader",
                "--start",
                "earliest",
            ]
            ran = await asyncio.to_thread(
                subprocess.run, [*reset, "--data", str(folder)], capture_output=True, text=True, check=False
            )
            assert ran.returncode == 0, ran.stderr
            await eventually(lambda: _done(record) == ["0", "1", "2", "0", "1", "2"], within_s=30)
            await bus.publish("a.x", "test", 3)
            await eventually(lambda: _done(record)[-1] == "3", within_s=30)
        finally:
            process.communicate(timeout=60)
            await bus.stop()


def _done(record: Path) -> list[str]:
    lines = record.read_text().splitlines() if record.exists() else []
    return [line.split()[2] for line in lines if line.startswith("done")]


async def test_two_buses_on_one_store_go_on_from_the_new_place_and_handle_each_event_once(tmp_path: Path) -> None:
    got = Recorder()
    buses = [EventBus(tmp_path) for _ in range(2)]
    for bus in buses:
        bus.subscribe("a", got, "reader")
    async with buses[0], buses[1]:
        for number in range(50):
            await buses[0].publish("a", "test", number)
        await eventually(lambda: len(got.events) == 50)
        await buses[1].reset("reader", at(10))
        await eventually(lambda: len(got.events) == 90)
        await buses[0].publish("a", "test", 50)
        await eventually(lambda: len(got.events) == 91)
    assert got.payloads == [*range(50), *range(10, 51)]
