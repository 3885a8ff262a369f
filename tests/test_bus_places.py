"""Where a subscription starts, what unsubscribe and delete leave behind, and what is refused."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from postbus import Event, EventBus, Invalid, NotFound, Start, StartPolicy, StreamSettings
from postbus.model import Conflict
from postbus.testing import BusKit
from tests.handlers import Gate, Recorder, eventually, fails

# --- where a subscription starts --------------------------------------------------------------------------------------


async def test_events_published_before_the_first_subscribe_are_delivered_while_pending(tmp_path: Path) -> None:
    bus = EventBus(tmp_path)
    await bus.publish("a", "test", 1)
    await bus.stop()
    got = Recorder()
    async with BusKit(tmp_path) as kit:
        await kit.stop()  # the first start had no handlers: what was pending then is past
    kit = BusKit(tmp_path)
    await kit.publish("a", 2)
    kit.bus.subscribe("a", got, "reader")
    async with kit:
        await kit.settle()
    assert got.payloads == [2]


async def test_a_later_subscriber_gets_what_is_pending_and_nothing_that_is_past() -> None:
    first, second = Recorder(), Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", first, "first")
        await kit.publish("a", "past")
        await kit.advance(5)
        await kit.stop()
        await kit.publish("a", "pending")
        kit.bus.subscribe("a", second, "second")
        await kit.start()
        await kit.settle()
    assert first.payloads == ["past", "pending"]
    assert second.payloads == ["pending"]


async def test_what_is_published_right_after_subscribe_is_never_missed() -> None:
    readers = [Recorder() for _ in range(30)]
    async with BusKit() as kit:
        for number, reader in enumerate(readers):
            kit.bus.subscribe("a", reader, f"reader-{number}")
            await kit.publish("a", number)
            kit.clock.advance(1.5)
        await kit.settle()
    for number, reader in enumerate(readers):
        assert {*range(number, 30)} <= {*reader.payloads}


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("latest", [4]),
        ("earliest", [0, 1, 2, 3, 4]),
        (StartPolicy.EARLIEST, [0, 1, 2, 3, 4]),
        (Start(policy=StartPolicy.AT_OFFSET, offset=2), [2, 3, 4]),
        ("2025-06-15T15:06:42Z", [2, 3, 4]),
        (datetime(2025, 6, 15, 17, 6, 41, tzinfo=UTC) - timedelta(hours=2), [1, 2, 3, 4]),
        (datetime(2035, 1, 1, tzinfo=UTC), [4]),
    ],
)
async def test_a_subscription_starts_where_it_asks_to(start: Any, expected: list[int]) -> None:
    got = Recorder()
    async with BusKit() as kit:  # at 2025-06-15T15:06:40Z
        for number in range(4):
            await kit.publish("a", number)
            kit.clock.advance(1)
        kit.bus.subscribe("a", got, "reader", start=start)
        await kit.settle()
        await kit.publish("a", 4)
        await kit.settle()
    assert got.payloads == expected


async def test_a_place_once_taken_is_kept_whatever_start_says() -> None:
    got = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader", start="earliest")
        await kit.publish("a", 1)
        await kit.settle()
        kit.bus.unsubscribe("a", "reader")
        kit.bus.subscribe("a", got, "reader", start="earliest")
        await kit.settle()
    assert got.payloads == [1]


async def test_the_subscription_is_data_that_outlives_its_process() -> None:
    got = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a.*", got, "reader", concurrency=3)
        kit.bus.subscribe("b", got, "reader", concurrency=3)
        await kit.settle()
        await kit.stop()
        [registered] = await kit.bus.subscriptions()
        await kit.publish("a.x", 1)
        assert (await kit.journal())[0][5] == "pending"
        await kit.start()
        await kit.settle()
    assert (registered.id, registered.patterns, registered.concurrency) == ("reader", ("a.*", "b"), 3)
    assert got.payloads == [1]


# --- unsubscribe and delete -------------------------------------------------------------------------------------------


async def test_unsubscribe_detaches_the_handler_and_keeps_the_place() -> None:
    got = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader")
        await kit.publish("a", 1)
        await kit.settle()
        kit.bus.unsubscribe("a", "reader")
        await kit.publish("a", 2)
        await kit.advance(30)
        assert got.payloads == [1]
        assert [row[5] for row in await kit.journal()] == ["done", "pending"]
        kit.bus.subscribe("a", got, "reader")
        await kit.settle()
    assert got.payloads == [1, 2]


async def test_unsubscribing_lets_the_running_handler_finish_and_a_new_one_waits_for_it() -> None:
    gate, later = Gate(), Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader", ordering="strict")
        await kit.publish("a", 1)
        await kit.publish("a", 2)
        await kit.settle()
        kit.bus.unsubscribe("a", "reader")
        kit.bus.subscribe("a", later, "reader", ordering="strict")
        for _ in range(10):
            await asyncio.sleep(0.005)
        assert later.events == []
        gate.open.set()
        await kit.settle()
    assert [event.payload for event in gate.finished] == [1]
    assert later.payloads == [2]


async def test_stop_waits_for_handlers_that_were_unsubscribed() -> None:
    gate = Gate()
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader")
        await kit.publish("a", 1)
        await kit.settle()
        kit.bus.unsubscribe("a", "reader")
        stopping = asyncio.create_task(kit.bus.stop())
        await asyncio.sleep(0.02)
        assert not stopping.done()
        gate.open.set()
        await stopping
        await kit.start()
        assert [row[5] for row in await kit.journal()] == ["done"]
    assert len(gate.finished) == 1


async def test_unsubscribing_one_of_two_patterns_leaves_the_other() -> None:
    got = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader")
        kit.bus.subscribe("b", got, "reader")
        await kit.settle()
        kit.bus.unsubscribe("a", "reader")
        await kit.publish("a", 1)
        await kit.publish("b", 2)
        await kit.settle()
        [registered] = await kit.bus.subscriptions()
    assert got.payloads == [2]
    assert registered.patterns == ("b",)


@pytest.mark.parametrize(("topic", "name"), [("b", "reader"), ("a", "other")])
async def test_unsubscribing_what_is_not_subscribed_is_refused(topic: str, name: str) -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(), "reader")
        with pytest.raises(NotFound):
            kit.bus.unsubscribe(topic, name)


async def test_deleting_a_subscription_forgets_its_place_and_its_deliveries() -> None:
    first, second = Recorder(fails(1)), Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", first, "reader")
        await kit.publish("a", 1)
        await kit.settle()
        assert await kit.bus.delete_subscription("reader") is True
        assert await kit.bus.delete_subscription("reader") is False
        assert await kit.bus.subscriptions() == []
        assert await kit.query("SELECT * FROM deliveries") == []
        await kit.advance(30)
        kit.bus.subscribe("a", second, "reader")
        await kit.publish("a", 2)
        await kit.settle()
    assert first.payloads == [1]
    assert second.payloads == [2]


async def test_a_deleted_subscription_may_begin_again_from_the_beginning() -> None:
    got, again = Recorder(), Recorder(fails(9))
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader")
        await kit.publish("a", 1)
        await kit.settle()
        await kit.bus.delete_subscription("reader")
        kit.bus.subscribe("a", again, "reader", start="earliest")
        await kit.advance(30)
        assert again.payloads == [1, 1, 1]
        assert len(await kit.dead()) == 1


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"subscriber_id": ""},
        {"subscriber_id": "no spaces"},
        {"subscriber_id": "x" * 121},
        {"subscriber_id": "_dispatch"},
        {"concurrency": 0},
        {"concurrency": 1.5},
        {"concurrency": "2"},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"timeout": None},
        {"ordering": "random"},
        {"retry": 3},
        {"start": "rubbish"},
        {"start": Start(policy=StartPolicy.AT_OFFSET)},
        {"start": Start(policy=StartPolicy.LATEST, offset=3)},
        {"dead_letter_stream": "no-dots"},
        {"dead_letter_stream": "other.tenant.orders-dlq"},
        {"dead_letter_stream": "local.default.orders"},
    ],
)
async def test_a_refused_subscription_changes_nothing(settings: dict[str, Any]) -> None:
    async with BusKit() as kit:
        with pytest.raises(Invalid):
            kit.bus.subscribe(**{"topic": "a", "handler": Recorder(), "subscriber_id": "reader", **settings})
        await kit.settle()
        assert await kit.bus.subscriptions() == []
        kit.bus.subscribe("a", Recorder(), "reader")


async def test_a_dead_letter_stream_has_one_partition() -> None:
    async with BusKit() as kit:
        await kit.bus.ensure_stream("local.default.many-dlq", StreamSettings(partitions=2))
        kit.bus.subscribe("a", Recorder(), "reader", dead_letter_stream="local.default.many-dlq")
        await kit.stop()
        with pytest.raises(Conflict, match="2 partitions"):
            await kit.start()
        kit.bus.unsubscribe("a", "reader")
        await kit.start()


async def test_a_subscription_that_cannot_be_attached_yet_says_so_and_tries_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    got = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader", start=Start(policy=StartPolicy.AT_OFFSET, offset=2))
        for _ in range(5):
            await asyncio.sleep(0.005)
        assert "reader cannot be attached: offset 2 is outside" in caplog.text
        for number in range(4):
            await kit.publish("a", number)
        kit.clock.advance(2)
        await kit.settle()
    assert got.payloads == [2, 3]


async def test_one_tenant_sees_nothing_of_another(tmp_path: Path) -> None:
    mine, theirs = Recorder(), Recorder()
    async with EventBus(tmp_path, tenant="acme.one") as one, EventBus(tmp_path, tenant="acme.two") as two:
        one.subscribe(">", mine, "reader")
        two.subscribe(">", theirs, "reader")
        await one.publish("a", "test", 1)
        await two.publish("a", "test", 2)
        await eventually(lambda: mine.events and theirs.events)
        assert [registered.id for registered in await one.subscriptions()] == ["reader"]
    assert (mine.payloads, theirs.payloads) == ([1], [2])


async def test_long_names_do_not_stand_in_the_way_of_derived_events() -> None:
    got = Recorder()
    tenant = f"{'n' * 80}.{'t' * 80}"
    async with BusKit(tenant=tenant) as kit:
        stream = f"{tenant}.{'s' * 80}"
        await kit.bus.ensure_stream(stream)

        async def derive(event: Event) -> None:
            await kit.bus.publish("derived", "test", event.payload)

        kit.bus.subscribe(stream, derive, "x" * 120)
        kit.bus.subscribe(stream, Recorder(fails(9)), "y" * 120)
        kit.bus.subscribe("derived", got, "reader")
        receipt = await kit.publish(stream, 1)
        await kit.advance(10)
        assert got.events[0].correlation_id == receipt.id
        assert [letter.origin_id for letter in await kit.dead()] == [receipt.id]
