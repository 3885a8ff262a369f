"""Publishing and dispatching: what is published is durable, wakes the handlers at once, and survives stopping."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from postbus import (
    Backpressure,
    Context,
    Event,
    EventBus,
    IdempotencyConflict,
    Invalid,
    PostbusError,
    Start,
    StartPolicy,
)
from postbus.log import SqliteLog
from postbus.model import DeliveryStatus, Durability, OffsetOutOfRange
from postbus.testing import BusKit
from tests.handlers import Gate, Recorder, eventually, fails

POLL_S = 600.0
WELL_BELOW_POLL_S = 60.0


# --- publishing -------------------------------------------------------------------------------------------------------


async def test_a_receipt_says_where_the_event_is_and_how_durable(tmp_path: Path) -> None:
    bus = EventBus(tmp_path)
    receipt = await bus.publish("order.created", "shop", {"n": 1})
    assert receipt.id == "local.default.journal/0/0"
    assert (receipt.stream, receipt.partition, receipt.offset) == ("local.default.journal", 0, 0)
    assert receipt.duplicate is False
    assert receipt.durability is Durability.FULL
    await bus.stop()


async def test_what_is_acknowledged_is_on_disk_before_the_bus_is_stopped(tmp_path: Path) -> None:
    bus = EventBus(tmp_path)
    receipt = await bus.publish("a", "test", {"n": 1}, "chain", key="k", headers={"h": "1"}, metadata={"m": 1})
    other = await asyncio.to_thread(SqliteLog.open, tmp_path)
    [event] = await other.fetch(receipt.stream, 0, 0)
    await other.close()
    await bus.stop()
    assert event.payload == {"n": 1}
    assert (event.topic, event.source, event.correlation_id, event.key) == ("a", "test", "chain", "k")
    assert (event.headers, event.metadata) == ({"h": "1"}, {"m": 1})


async def test_a_receipt_names_the_relaxed_durability(tmp_path: Path) -> None:
    bus = EventBus(tmp_path, durability="relaxed")
    assert (await bus.publish("a", "test", None)).durability is Durability.RELAXED
    await bus.stop()


async def test_an_event_published_twice_under_its_own_id_is_delivered_once() -> None:
    got = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader")
        first = await kit.publish("a", {"n": 1}, native_id="mine")
        again = await kit.publish("a", {"n": 1}, native_id="mine")
        await kit.settle()
        assert (again.id, again.duplicate) == (first.id, True)
        with pytest.raises(IdempotencyConflict):
            await kit.publish("a", {"n": 2}, native_id="mine")
        await kit.settle()
    assert got.payloads == [{"n": 1}]


async def test_publish_never_calls_a_handler_and_never_waits_for_one() -> None:
    gate = Gate()
    callers: list[Any] = []

    async def who(_event: Event) -> None:
        callers.append(asyncio.current_task())

    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "hangs")
        kit.bus.subscribe("a", who, "who")
        kit.bus.subscribe("a", Recorder(fails(9)), "fails")
        await asyncio.wait_for(kit.publish("a", {}), WELL_BELOW_POLL_S)
        await kit.settle()
        assert len(gate.started) == 1
        assert callers[0] is not asyncio.current_task()
        gate.open.set()


async def test_a_crowded_store_refuses_after_half_a_second_and_appends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = EventBus(tmp_path)
    await bus.publish("a", "test", 1)
    with monkeypatch.context() as crowd:
        crowd.setattr("postbus.store.writer.QUEUE_MAX", 0)
        with pytest.raises(Backpressure):
            await bus.publish("a", "test", 2)
    assert (await bus.publish("a", "test", 3)).offset == 1
    await bus.stop()


async def test_publishing_works_before_start_and_after_stop(tmp_path: Path) -> None:
    bus = EventBus(tmp_path)
    assert (await bus.publish("a", "test", 1)).offset == 0
    await bus.stop()
    assert (await bus.publish("a", "test", 2)).offset == 1
    await bus.stop()


# --- dispatching ------------------------------------------------------------------------------------------------------


async def test_a_thousand_waiting_events_drain_without_any_time_passing() -> None:
    got = Recorder()
    kit = BusKit()
    for number in range(1000):
        await kit.publish("tick", number)
    kit.bus.subscribe("tick", got, "reader")
    before = kit.clock.monotonic_s()
    async with kit:
        await kit.settle()
        assert got.payloads == [*range(1000)]
        assert kit.clock.monotonic_s() == before


async def test_a_thousand_waiting_events_drain_well_below_the_poll_interval(tmp_path: Path) -> None:
    got = Recorder()
    bus = EventBus(tmp_path, poll_interval=POLL_S)
    await asyncio.gather(*(bus.publish("tick", "test", number) for number in range(1000)))
    bus.subscribe("tick", got, "reader")
    async with bus:
        await eventually(lambda: len(got.events) == 1000, WELL_BELOW_POLL_S)


async def test_an_idle_bus_is_woken_at_once(tmp_path: Path) -> None:
    got = Recorder()
    async with EventBus(tmp_path, poll_interval=POLL_S) as bus:
        bus.subscribe("tick", got, "reader")
        await asyncio.sleep(0.1)
        await bus.publish("tick", "test", 1)
        await eventually(lambda: got.events, WELL_BELOW_POLL_S)


async def test_an_event_published_by_a_handler_is_delivered_without_waiting() -> None:
    got = Recorder()

    async def pass_on(event: Event, ctx: Context) -> None:
        if event.payload > 0:
            await ctx.publish("count.down", event.payload - 1)

    async with BusKit() as kit:
        kit.bus.subscribe("count.down", pass_on, "passer")
        kit.bus.subscribe("count.down", got, "reader")
        before = kit.clock.monotonic_s()
        await kit.publish("count.down", 25)
        await kit.settle()
        assert got.payloads == [*range(25, -1, -1)]
        assert kit.clock.monotonic_s() == before


async def test_a_handler_gets_a_frozen_event_that_is_being_processed() -> None:
    got = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader")
        receipt = await kit.publish("a", {"n": [1]}, key="k")
        await kit.settle()
    [event] = got.events
    assert (event.id, event.status, event.attempt, event.key) == (receipt.id, "processing", 1, "k")
    assert event.status is DeliveryStatus.PROCESSING
    with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
        event.topic = "b"  # type: ignore[misc]  # that is the point
    event.payload["n"].append(2)
    assert event.payload == {"n": [1]}


async def test_every_subscriber_of_a_topic_gets_every_event_once() -> None:
    readers = [Recorder() for _ in range(5)]
    async with BusKit() as kit:
        for number, reader in enumerate(readers):
            kit.bus.subscribe("a", reader, f"reader-{number}")
        for number in range(50):
            await kit.publish("a", number)
        await kit.settle()
    assert [reader.payloads for reader in readers] == [[*range(50)]] * 5


async def test_two_buses_of_one_process_share_a_store(tmp_path: Path) -> None:
    got = Recorder()
    async with EventBus(tmp_path) as reading, EventBus(tmp_path) as writing:
        reading.subscribe("a", got, "reader")
        await writing.publish("a", "test", 1)
        await eventually(lambda: got.events)


# --- stopping ---------------------------------------------------------------------------------------------------------


async def test_stop_lets_a_running_handler_finish_and_takes_no_new_work() -> None:
    gate, later = Gate(), Recorder()
    async with BusKit(stop_grace_s=30) as kit:
        kit.bus.subscribe("a", gate, "slow", concurrency=1)
        for number in range(3):
            await kit.publish("a", number)
        await kit.settle()
        stopping = asyncio.create_task(kit.bus.stop())
        await asyncio.sleep(0.02)
        assert not stopping.done()
        gate.open.set()
        await stopping
        assert [event.payload for event in gate.finished] == [0]
        assert not gate.cancelled
        kit.bus.unsubscribe("a", "slow")
        kit.bus.subscribe("a", later, "slow", concurrency=1)
        await kit.start()
        await kit.settle()
    assert later.payloads == [1, 2]
    assert later.attempts == [1, 1]


async def test_a_handler_that_outlasts_the_grace_is_cancelled_aloud_and_its_event_delivered_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate, later = Gate(lambda event: event.payload == "hang"), Recorder()
    async with BusKit(stop_grace_s=5) as kit:
        kit.bus.subscribe("a", gate, "slow")
        await kit.publish("a", "hang")
        await kit.publish("a", "quick")
        await kit.settle()
        with caplog.at_level(logging.WARNING, "postbus"):
            await kit.stop()
        assert [event.payload for event in gate.cancelled] == ["hang"]
        assert "slow still ran on local.default.journal/0/0 after 5s of grace" in caplog.text
        assert [row[5] for row in await kit.journal()] == ["pending", "done"]
        kit.bus.unsubscribe("a", "slow")
        kit.bus.subscribe("a", later, "slow")
        await kit.start()
        await kit.settle()
        assert [row[5] for row in await kit.journal()] == ["done", "done"]
        assert await kit.dead() == []
    assert later.payloads == ["hang"]


async def test_a_lease_is_kept_while_stopping_waits_for_a_handler() -> None:
    gate, other = Gate(), Recorder()
    async with BusKit(stop_grace_s=100, lease_s=3) as kit:
        kit.bus.subscribe("a", gate, "slow")
        second = EventBus(str(kit._path), clock=kit.clock, lease_s=3)
        await kit.publish("a", 1)
        await kit.settle()
        second.subscribe("a", other, "slow")
        await second.start()
        stopping = asyncio.create_task(kit.bus.stop())
        log = await second.open()

        async def left_s() -> float:
            until_us = await log.store.read(lambda db: db.execute("SELECT min(until_us) FROM lanes").get)
            return float(until_us) / 1e6 - kit.clock.monotonic_s()

        for _ in range(20):
            kit.clock.advance(1)
            async with asyncio.timeout(60):
                while await left_s() <= 1:  # noqa: ASYNC110 - it is renewed before the next second is over
                    await asyncio.sleep(0.001)
        assert not stopping.done()
        assert other.events == []
        gate.open.set()
        await stopping
        await kit.publish("a", 2)
        async with asyncio.timeout(60):
            while not other.events:
                await asyncio.sleep(0.005)
                kit.clock.advance(0.1)
        await second.stop()
    assert [event.payload for event in gate.finished] == [1]
    assert other.payloads == [2]


async def test_a_handler_that_will_not_be_cancelled_does_not_hold_up_stop_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("postbus.delivery.runner.CANCEL_S", 0.05)
    over = asyncio.Event()

    async def stubborn(_event: Event) -> None:
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    async with BusKit(stop_grace_s=1) as kit:
        kit.bus.subscribe("a", stubborn, "stubborn")
        await kit.publish("a", 1)
        await kit.settle()
        await asyncio.wait_for(kit.stop(), WELL_BELOW_POLL_S)
        over.set()


async def test_a_handler_stops_its_bus_beside_itself_not_within() -> None:
    refused: list[str] = []
    stopping: list[asyncio.Task[None]] = []
    async with BusKit() as kit:

        async def handle(_event: Event) -> None:
            try:
                await kit.bus.stop()
            except Invalid as error:
                refused.append(error.message)
            stopping.append(asyncio.create_task(kit.bus.stop()))

        kit.bus.subscribe("shutdown", handle, "reader")
        await kit.publish("shutdown", 1)
        await eventually(lambda: stopping)
        await stopping[0]
        assert [row[5] for row in await kit.journal()] == ["done"]
    assert refused == ["a handler cannot wait for its own bus to stop"]


async def test_start_and_stop_may_be_called_again() -> None:
    got = Recorder()
    kit = BusKit()
    kit.bus.subscribe("a", got, "reader")
    async with kit:
        await kit.bus.start()
        await kit.publish("a", 1)
        await kit.settle()
        await kit.bus.stop()
        await kit.bus.stop()
        await kit.start()
        await kit.publish("a", 2)
        await kit.settle()
    await kit.bus.stop()
    assert got.payloads == [1, 2]


async def test_a_bus_that_cannot_start_lets_go_of_everything(tmp_path: Path) -> None:
    got = Recorder()
    bus = EventBus(tmp_path)
    bus.subscribe("a", got, "reader", start=Start(policy=StartPolicy.AT_OFFSET, offset=7))
    with pytest.raises(OffsetOutOfRange):
        await bus.__aenter__()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


# --- where it runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["redis://localhost", "http://x"])
async def test_a_place_the_bus_cannot_run_on_is_refused(url: str) -> None:
    with pytest.raises(Invalid, match="no log kind is called"):
        await EventBus(url).publish("a", "test", 1)


async def test_a_url_names_a_folder(tmp_path: Path) -> None:
    async with EventBus(f"sqlite://{tmp_path}/data") as bus:
        await bus.publish("a", "test", 1)
    assert (tmp_path / "data").is_dir()


async def test_a_bus_in_memory_leaves_nothing_behind() -> None:
    async with EventBus("memory:") as bus:
        await bus.publish("a", "test", 1)
        folder = Path(str(bus._folder))
        assert await asyncio.to_thread(folder.is_dir)
    assert not await asyncio.to_thread(folder.exists)


@pytest.mark.parametrize(
    "settings",
    [
        {"poll_interval": 0},
        {"poll_interval": float("nan")},
        {"batch_size": 0},
        {"batch_size": 1.5},
        {"batch_size": True},
        {"lease_s": -1},
        {"lease_s": float("inf")},
        {"stop_grace_s": -0.1},
        {"max_hops": 0},
        {"max_hops": "many"},
        {"durability": "none"},
        {"tenant": "no-dot"},
        {"tenant": "a.b.c"},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        EventBus("memory:", **settings)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"topic": "a.*"}, Invalid),
        ({"topic": ""}, Invalid),
        ({"source": ""}, Invalid),
        ({"payload": float("nan")}, Invalid),
        ({"payload": b'{"a": 1, "a": 2}'}, Invalid),
        ({"payload": object()}, PostbusError),
        ({"key": "k" * 257}, Invalid),
        ({"headers": {"postbus.hops": "1"}}, Invalid),
        ({"headers": {" PostBus.x": "1"}}, Invalid),
        ({"occurred_at": "yesterday"}, Invalid),
        ({"correlation_id": ""}, Invalid),
        ({"delivery_handle": [1]}, Invalid),
    ],
)
async def test_a_refused_publish_appends_nothing(fields: dict[str, Any], error: type[Exception]) -> None:
    async with BusKit() as kit:
        with pytest.raises(error):
            await kit.bus.publish(**{"topic": "a", "source": "test", "payload": {}, **fields})
        assert await kit.events() == []


async def test_payload_bytes_are_kept_as_they_are() -> None:
    got = Recorder()
    raw = b'{ "n" : 12345678901234567890123, "x": 1.0 }'
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader")
        await kit.publish("a", raw)
        await kit.settle()
    assert got.events[0].payload_json == raw
    assert msgspec.json.decode(raw) == got.payloads[0]
