"""``overflow="drop_oldest"``: a subscription that falls too far behind gives up on the oldest, on record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from postbus import Event, Invalid, NotFound, RetryPolicy, StreamSettings
from postbus.model import Conflict
from postbus.testing import BusKit
from tests.handlers import Gate, Recorder, fails

EXACT = RetryPolicy(jitter=0.0)


async def dropped(kit: BusKit) -> list[int]:
    return [entry.origin_offset for entry in await kit.bus.dead_letters.find(reason="overflow")]


def counts(kit: BusKit, name: str = "reader") -> dict[str, int]:
    return kit.bus._subscribers[name].counts


async def test_the_oldest_events_nobody_started_become_dead_letters() -> None:
    gate = Gate()
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader", concurrency=2, overflow="drop_oldest", max_backlog=10)
        for number in range(40):
            await kit.publish("a", number)
            if number < 2:
                await kit.settle()
        await kit.advance(1)
        assert [event.payload for event in gate.started] == [0, 1]
        assert await dropped(kit) == [*range(2, 30)]
        assert counts(kit)["dropped"] == 28
        [entry, *_] = await kit.dead()
        assert (entry.reason, entry.attempts, entry.subscription) == ("overflow", 0, "reader")
        assert entry.error == "dropped: more than 10 events waited"
        gate.open.set()
        await kit.advance(2)
        assert sorted(event.payload for event in gate.finished) == [0, 1, *range(30, 40)]
        states = [row[5] for row in await kit.journal()]
        assert states == ["done"] * 2 + ["failed"] * 28 + ["done"] * 10


async def test_while_no_more_wait_than_may_wait_nothing_is_dropped() -> None:
    gate = Gate()
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader", concurrency=1, overflow="drop_oldest", max_backlog=10)
        for number in range(11):  # one runs, ten wait
            await kit.publish("a", number)
        await kit.advance(5)
        assert await dropped(kit) == []
        gate.open.set()
        await kit.advance(2)
        assert [event.payload for event in gate.finished] == [*range(11)]


async def test_by_default_nothing_is_ever_dropped() -> None:
    gate = Gate()
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader", concurrency=2)
        for number in range(500):
            await kit.publish("a", number)
        await kit.advance(5)
        gate.open.set()
        await kit.advance(5)
        assert len(gate.finished) == 500
        assert await kit.dead() == []


async def test_only_events_that_it_asked_for_are_dead_lettered() -> None:
    gate = Gate()
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader", concurrency=1, overflow="drop_oldest", max_backlog=4)
        for number in range(40):
            await kit.publish("a" if number % 4 == 0 else "b", number)
            if number == 0:
                await kit.settle()
        await kit.advance(1)
        assert await dropped(kit) == [*range(4, 36, 4)]
        gate.open.set()
        await kit.advance(2)
        assert [event.payload for event in gate.finished] == [0, 36]


async def test_a_backlog_from_a_long_stop_is_shed_in_batches_and_can_be_replayed(tmp_path: Path) -> None:
    got = Recorder()
    async with BusKit(tmp_path) as kit:
        kit.bus.subscribe("a", got, "reader", overflow="drop_oldest", max_backlog=50)
        await kit.publish("a", "first")
        await kit.settle()
        await kit.stop()
        for number in range(2000):
            await kit.publish("a", number)
        await kit.start()
        await kit.advance(5)
        kept = len(got.events) - 1
        assert 50 <= kept <= 60  # those that wait, and those that could be started at once
        assert got.payloads == ["first", *range(2000 - kept, 2000)]
        letters = await kit.dead()
        assert [entry.origin_offset for entry in letters] == [*range(1, 2001 - kept)]
        assert await kit.query("SELECT count(*) FROM cursors WHERE consumer = 'reader' AND next_offset = 2001") == [
            (1,)
        ]
        assert await kit.bus.dead_letters.replay(letters[:20]) == 20
        await kit.advance(2)
        assert got.payloads[-20:] == [*range(20)]


async def test_one_hung_key_makes_its_own_subscription_shed_instead_of_piling_up() -> None:
    gate = Gate(lambda event: event.key == "stuck")
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader", concurrency=2, overflow="drop_oldest", max_backlog=10)
        for number in range(100):
            await kit.publish("a", number, key="stuck")
            await kit.settle()
        await kit.advance(5)
        waiting = await kit.query("SELECT count(*) FROM delivery_rows WHERE status IN ('waiting', 'processing')")
        assert waiting[0][0] <= 12
        gone = await dropped(kit)
        gate.open.set()
        await kit.advance(5)
        delivered = [event.payload for event in gate.finished]
        assert delivered == sorted(delivered)
        assert sorted([*gone, *delivered]) == [*range(100)]
        assert delivered[-10:] == [*range(90, 100)]


async def test_what_failed_and_waits_for_its_retry_is_not_dropped() -> None:
    got = Recorder(lambda event: fails(2)(event) if event.payload == 0 else None)
    gate = Gate()

    async def handle(event: Event) -> None:
        await got(event)
        if event.payload != 0:
            await gate(event)

    async with BusKit() as kit:
        kit.bus.subscribe("a", handle, "reader", concurrency=2, retry=EXACT, overflow="drop_oldest", max_backlog=5)
        await kit.publish("a", 0)
        await kit.settle()
        for number in range(1, 40):
            await kit.publish("a", number)
        await kit.advance(1)
        gone = await dropped(kit)
        assert gone
        assert 0 not in gone
        gate.open.set()
        await kit.advance(10)
        assert got.attempts[got.payloads.index(0)] == 1
        assert [event.attempt for event in got.events if event.payload == 0] == [1, 2, 3]


async def test_each_event_is_either_handled_or_a_dead_letter_over_a_crash(tmp_path: Path) -> None:
    gate = Gate()
    async with BusKit(tmp_path) as kit:
        kit.bus.subscribe("a", gate, "reader", concurrency=3, overflow="drop_oldest", max_backlog=20)
        for number in range(200):
            await kit.publish("a", number)
        await kit.settle()
        await kit.crash()
        got = Recorder()
        kit.bus.subscribe("a", got, "reader", concurrency=3, overflow="drop_oldest", max_backlog=20)
        await kit.start()
        await kit.advance(10)
        gone = await dropped(kit)
        assert len(gone) == len(set(gone))
        assert sorted([*gone, *got.payloads]) == [*range(200)]


async def test_each_partition_has_a_backlog_of_its_own() -> None:
    gate = Gate()
    async with BusKit() as kit:
        name = "local.default.orders"
        await kit.bus.ensure_stream(name, StreamSettings(partitions=2))
        kit.bus.subscribe(name, gate, "reader", concurrency=4, overflow="drop_oldest", max_backlog=5)
        for number in range(60):
            await kit.publish(name, number)
        await kit.advance(1)
        entries: list[Any] = await kit.bus.dead_letters.find(reason="overflow")
        assert {entry.origin_partition for entry in entries} == {0, 1}
        gate.open.set()
        await kit.advance(3)
        assert len(gate.finished) + len(entries) == 60


async def test_bad_settings_are_refused() -> None:
    async with BusKit() as kit:

        def subscribe(**settings: Any) -> None:
            kit.bus.subscribe("a", Recorder(), "reader", **settings)

        with pytest.raises(Invalid, match="needs max_backlog"):
            subscribe(overflow="drop_oldest")
        with pytest.raises(Invalid, match="goes with overflow"):
            subscribe(max_backlog=5)
        with pytest.raises(Invalid, match="'wait' or 'drop_oldest'"):
            subscribe(overflow="drop_newest", max_backlog=5)
        for bad in (0, -1, 1.5, True, "10"):
            with pytest.raises(Invalid, match="max_backlog"):
                subscribe(overflow="drop_oldest", max_backlog=bad)
        with pytest.raises(NotFound):
            kit.bus.unsubscribe("a", "reader")
        subscribe(overflow="drop_oldest", max_backlog=5)
        with pytest.raises(Conflict):
            kit.bus.subscribe("b", Recorder(), "reader", overflow="drop_oldest", max_backlog=6)
        [kept] = await _registered(kit)
        assert (kept.overflow, kept.max_backlog) == ("drop_oldest", 5)


async def _registered(kit: BusKit) -> list[Any]:
    await kit.settle()
    return await kit.bus.subscriptions()
