"""After a crash: what was in flight is tried one at a time, and only what ends the process is blamed for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from postbus import Event, RetryPolicy, StorageFull, StreamSettings
from postbus.delivery import DeliveryTable, LaneKey, Settlement
from postbus.delivery.gate import PATIENCE_S, Gate
from postbus.delivery.table import started_at
from postbus.testing import BusKit, FakeClock
from tests.handlers import Gate as GateHandler
from tests.handlers import Recorder, fails


async def test_recover_returns_how_many_events_were_in_flight() -> None:
    gate, got = GateHandler(), Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader")
        for number in range(7):
            await kit.publish("a", number)
        await kit.publish("unrelated", 1)
        await kit.settle()
        await kit.crash()
        assert await kit.bus.recover() == 7
        assert await kit.bus.recover() == 0
        kit.bus.subscribe("a", got, "reader")
        await kit.start()
        await kit.settle()
        assert [row[5] for row in await kit.journal()][:7] == ["done"] * 7
    assert got.payloads == [*range(7)]


async def test_a_clean_stop_leaves_nothing_to_recover() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(), "reader")
        await kit.publish("a", 1)
        await kit.settle()
        await kit.stop()
        assert await kit.bus.recover() == 0


async def test_what_was_done_and_recorded_before_a_crash_is_not_done_again() -> None:
    gate, got = GateHandler(lambda event: event.payload >= 5), Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader")
        for number in range(8):
            await kit.publish("a", number)
        await kit.advance(1)
        await kit.crash()
        kit.bus.subscribe("a", got, "reader")
        await kit.start()
        await kit.settle()
    assert got.payloads == [5, 6, 7]


async def test_what_is_dead_stays_dead_when_an_earlier_event_is_still_running_at_the_crash() -> None:
    gate = GateHandler(lambda event: event.payload == 0)

    async def handle(event: Event) -> None:
        if event.payload == 1:
            raise ValueError("broken")
        await gate(event)

    got = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", handle, "reader", retry=RetryPolicy(max_attempts=1))
        await kit.publish("a", 0)
        await kit.publish("a", 1)
        await kit.settle()
        assert len(await kit.dead()) == 1
        await kit.crash()
        kit.bus.subscribe("a", got, "reader", retry=RetryPolicy(max_attempts=1))
        await kit.start()
        await kit.advance(5)
        assert len(await kit.dead()) == 1
        assert [row[5] for row in await kit.journal()] == ["done", "failed"]
    assert got.payloads == [0]


async def test_after_a_crash_events_are_tried_one_at_a_time_each_attempt_on_disk_first() -> None:
    gate, seen = GateHandler(), list[Any]()
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader")
        for number in range(5):
            await kit.publish("a", number)
        await kit.settle()
        assert gate.most == 5
        await kit.crash()
        again = GateHandler()

        async def handle(event: Event) -> None:
            rows = await kit.query('SELECT "offset", status, attempt FROM deliveries ORDER BY 1')
            seen.append((event.attempt, [row for row in rows if row[1] == "processing"]))
            await again(event)

        kit.bus.subscribe("a", handle, "reader")
        await kit.start()
        await kit.publish("a", 5)
        await kit.settle()
        assert len(again.started) == 1
        again.open.set()
        await kit.settle()
        assert again.most == 1
        assert [event.payload for event in again.finished] == [*range(6)]
    assert seen[:5] == [(1, [(number, "processing", 1)]) for number in range(5)]


async def crash_on(kit: BusKit, killer: int, names: list[str], restarts: int, attempts: int = 3) -> Recorder:
    """Start the bus again and again; each time the killer is reached the process ends."""
    got = Recorder()
    for _ in range(restarts):
        dies = asyncio.Event()

        async def handle(event: Event, dies: asyncio.Event = dies) -> None:
            if event.payload == killer:
                dies.set()
                await asyncio.Event().wait()
            await got(event)

        for name in names:
            handler = handle if name == names[0] else got
            kit.bus.subscribe("a", handler, name, retry=RetryPolicy(max_attempts=attempts))
        await kit.start()
        waiting = [asyncio.create_task(dies.wait()), asyncio.create_task(kit.advance(3))]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        if not dies.is_set():
            break
        await kit.crash()
    return got


@pytest.mark.parametrize("attempts", [1, 3])
async def test_only_the_event_that_ends_the_process_is_dead_lettered(attempts: int) -> None:
    async with BusKit() as kit:
        await kit.stop()
        for number in range(20):
            await kit.publish("a", number)
        got = await crash_on(kit, 7, ["reader"], 10, attempts)
        [letter] = await kit.dead()
        journal = [row[5] for row in await kit.journal()]
    assert (letter.origin_offset, letter.reason, letter.attempts) == (7, "crash", max(attempts, 2))
    assert {*got.payloads} == {*range(20)} - {7}
    assert journal == ["failed" if number == 7 else "done" for number in range(20)]


async def test_neighbours_in_other_subscriptions_are_not_blamed() -> None:
    async with BusKit() as kit:
        await kit.stop()
        for number in range(3):
            await kit.publish("a", number)
        got = await crash_on(kit, 1, ["killer", "one", "two"], 12)
        [letter] = await kit.dead()
    assert (letter.subscription, letter.origin_offset, letter.reason) == ("killer", 1, "crash")
    assert {*got.payloads} == {0, 1, 2}


async def test_a_single_event_in_flight_is_blamed_at_once() -> None:
    async with BusKit() as kit:
        await kit.stop()
        await kit.publish("a", 0)
        await crash_on(kit, 0, ["reader"], 3)
        assert await kit.dead() == []
        got = await crash_on(kit, 0, ["reader"], 1)
        [letter] = await kit.dead()
    assert got.events == []
    assert (letter.reason, letter.attempts) == ("crash", 3)
    assert letter.error == "the process ended 3 times while handling it"


async def test_failures_before_a_crash_count() -> None:
    gate, got = GateHandler(lambda event: event.attempt == 2), Recorder()

    async def handle(event: Event) -> None:
        await gate(event)
        raise ValueError("broken")

    async with BusKit() as kit:
        kit.bus.subscribe("a", handle, "reader", retry=RetryPolicy(jitter=0))
        await kit.publish("a", 0)
        await kit.advance(1.5)
        assert [event.attempt for event in gate.started] == [1, 2]
        await kit.crash()
        kit.bus.subscribe("a", got, "reader", retry=RetryPolicy(jitter=0))
        await kit.start()
        await kit.settle()
    assert got.attempts == [3]


async def test_an_event_that_fails_when_tried_alone_is_retried_like_any_other() -> None:
    gate, got = GateHandler(), Recorder(fails(1))
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader")
        for number in range(4):
            await kit.publish("a", number, key="k" if number % 2 else None)
        await kit.settle()
        await kit.crash()
        kit.bus.subscribe("a", got, "reader")
        await kit.start()
        await kit.advance(20)
        assert await kit.dead() == []
    odd = [event.payload for event in got.events if event.payload % 2]
    assert odd == [1, 1, 3, 3]
    assert sorted(got.payloads) == [0, 0, 1, 1, 2, 2, 3, 3]


async def test_one_that_hangs_when_tried_alone_does_not_hold_up_other_subscriptions() -> None:
    first, stuck, other = GateHandler(), GateHandler(), Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", first, "one")
        kit.bus.subscribe("a", first, "two")
        await kit.publish("a", 0)
        await kit.settle()
        await kit.crash()
        kit.bus.subscribe("a", stuck, "one")
        kit.bus.subscribe("a", other, "two")
        await kit.start()
        await kit.advance(PATIENCE_S * 3)
        assert len(stuck.started) == 1
        assert other.payloads == [0]
        stuck.open.set()
        await kit.settle()


async def test_of_two_that_run_alone_after_all_the_one_that_began_last_is_blamed() -> None:
    stuck = {"one": GateHandler(), "two": GateHandler()}
    began: list[str] = []
    blamed = {"one": 0, "two": 0}

    def subscribe(kit: BusKit, name: str) -> None:
        async def handle(event: Event) -> None:
            began.append(name)
            await stuck[name](event)

        kit.bus.subscribe("a", handle, name)

    async with BusKit() as kit:
        for name in stuck:
            subscribe(kit, name)
        await kit.publish("a", 0)
        await kit.settle()
        for _ in range(3):
            await kit.crash()
            began.clear()
            for name in stuck:
                subscribe(kit, name)
            await kit.start()
            await kit.advance(PATIENCE_S * 3)
            assert sorted(began) == ["one", "two"]  # which of them is the first is open
            attempts = {name: handler.started[-1].attempt for name, handler in stuck.items()}
            assert attempts == {name: 1 + times for name, times in blamed.items()}
            blamed[began[-1]] += 1
        for handler in stuck.values():
            handler.open.set()
        await kit.settle()
        assert await kit.dead() == []


async def test_a_full_disk_does_not_stop_events_that_are_to_be_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, got, refused = GateHandler(), Recorder(), list[int]()
    settle = DeliveryTable.settle

    async def full(table: DeliveryTable, key: LaneKey, token: int, settlement: Settlement) -> Any:
        if len(refused) < 3:
            refused.append(1)
            raise StorageFull("the disk is full")
        return await settle(table, key, token, settlement)

    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader")
        for number in range(3):
            await kit.publish("a", number)
        await kit.settle()
        await kit.crash()
        monkeypatch.setattr(DeliveryTable, "settle", full)
        kit.bus.subscribe("a", got, "reader")
        await kit.start()
        await kit.advance(5)
        assert [row[5] for row in await kit.journal()] == ["done"] * 3
    assert len(refused) == 3
    assert got.payloads == [0, 1, 2]
    assert got.attempts == [1, 1, 1]


async def test_retention_waits_for_what_waits_for_a_retry() -> None:
    got = Recorder(fails(1))
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader", retry=RetryPolicy(backoff_s=100, jitter=0))
        await kit.publish("a", 1)
        await kit.settle()
        await kit.stop()
        log = await kit.bus.open()
        trimmed = await log.trim(kit.bus.journal, before=1)
        assert (trimmed.removed, trimmed.held_back_by) == (0, ("reader",))
        await kit.start()
        await kit.advance(101)
    assert got.attempts == [1, 2]


async def test_an_event_that_retention_removed_while_it_waited_is_said_to_have_failed() -> None:
    got = Recorder(fails(1))
    async with BusKit() as kit:
        name = "local.default.short"
        await kit.bus.ensure_stream(name, StreamSettings(retention_beats_consumers=True))
        kit.bus.subscribe(name, got, "reader", retry=RetryPolicy(backoff_s=100))
        await kit.publish(name, 1)
        await kit.publish(name, 2)
        await kit.settle()
        await kit.stop()
        log = await kit.bus.open()
        await log.trim(name, before=2)
        await kit.start()
        await kit.advance(5)
        rows = await kit.query('SELECT "offset", status, error FROM deliveries')
    assert rows == [(n, "failed", "retention removed it before it was delivered") for n in (0, 1)]


# --- parts ------------------------------------------------------------------------------------------------------------


def test_a_gate_lets_one_in_at_a_time_and_loses_patience() -> None:
    clock, woken = FakeClock(), list[str]()
    gate = Gate(clock)
    assert gate.enter("a", lambda: woken.append("a"))
    assert not gate.enter("b", lambda: woken.append("b"))
    gate.leave("c")
    assert woken == []
    gate.leave("a")
    assert woken == ["b"]
    assert gate.enter("b", lambda: None)
    assert not gate.enter("a", lambda: None)
    clock.advance(PATIENCE_S)
    assert gate.enter("a", lambda: None)


def test_a_process_is_known_by_its_pid_and_when_it_started() -> None:
    import os  # noqa: PLC0415 - only here
    import subprocess  # noqa: PLC0415 - only here

    assert started_at(os.getpid()).isdigit()
    assert started_at(2**22 + 5) == ""
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert started_at(child.pid) == "-"  # it has ended, but nobody has waited for it
    child.wait()
    assert started_at(child.pid) == ""
