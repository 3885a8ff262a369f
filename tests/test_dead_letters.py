"""Dead letters: how they are written, found, replayed to where they came from, and put away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from postbus import Event, Invalid, NotFound, Reject, RetryPolicy, StorageError, StreamSettings
from postbus.bus.purge import PURGED, purge
from postbus.delivery import DeliveryTable, LaneKey, Row, Settlement
from postbus.delivery.dead import bury, grave
from postbus.testing import BusKit
from tests.handlers import Recorder, fails

ONCE = RetryPolicy(max_attempts=1)
DLQ = "local.default.journal-dlq"


class Moody(Recorder):
    """Fails until it is told to be good."""

    def __init__(self) -> None:
        super().__init__(self._mood)
        self.good = False

    def _mood(self, event: Event) -> None:
        if not self.good:
            raise ValueError(f"no {event.payload}")


# --- written ----------------------------------------------------------------------------------------------------------


async def test_a_dead_letter_is_the_event_with_exactly_these_headers_more() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("order.*", Recorder(fails(9, ValueError("bröken"))), "billing")
        await kit.publish("order.paid", 0, key="other")
        await kit.publish(
            "order.created",
            b'{ "n": 1 }',
            source="shop",
            key="k",
            headers={"mine": "1"},
            metadata={"m": 1},
            correlation_id="chain",
            variant="v",
            native_id="n-1",
            delivery_handle={"kind": "mail"},
            occurred_at="2020-01-01T00:00:00Z",
        )
        await kit.advance(20)
        log = await kit.bus.open()
        [_, letter] = sorted(await log.fetch(DLQ, 0, 0), key=lambda event: event.topic, reverse=True)
        [_, origin] = await kit.events()
    assert letter.headers == {
        "mine": "1",
        "postbus.dlq.origin_topic": "order.created",
        "postbus.dlq.origin_stream": "local.default.journal",
        "postbus.dlq.origin_partition": "0",
        "postbus.dlq.origin_offset": "1",
        "postbus.dlq.subscription": "billing",
        "postbus.dlq.reason": "max_attempts",
        "postbus.dlq.attempts": "3",
        "postbus.dlq.error": "ValueError: bröken",
    }
    for name in ("topic", "source", "payload_json", "key", "metadata", "correlation_id", "variant", "occurred_at"):
        assert getattr(letter, name) == getattr(origin, name)
    assert letter.delivery_handle == {"kind": "mail"}


@pytest.mark.parametrize(
    ("stream", "name"),
    [("a.b.orders", "a.b.orders-dlq"), ("a.b." + "x" * 80, "a.b." + "x" * 76 + "-dlq"), (DLQ, f"{DLQ}-dlq")],
)
def test_a_streams_dead_letters_go_beside_it(stream: str, name: str) -> None:
    assert grave(stream) == name


async def test_a_subscription_may_name_its_dead_letter_stream() -> None:
    async with BusKit() as kit:
        name = "local.default.billing-dlq"
        kit.bus.subscribe("a", Recorder(fails(9)), "billing", retry=ONCE, dead_letter_stream=name)
        kit.bus.subscribe("a", Recorder(fails(9)), "other", retry=ONCE)
        await kit.publish("a", 1)
        await kit.settle()
        letters = await kit.dead()
    assert sorted((letter.subscription, letter.id) for letter in letters) == [
        ("billing", f"{name}/0/0"),
        ("other", f"{DLQ}/0/0"),
    ]


async def test_moving_there_and_settling_the_origin_are_one_transaction() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(), "reader")
        await kit.publish("a", 1)
        await kit.settle()
        await kit.stop()
        log = await kit.bus.open()
        table = DeliveryTable(log, kit.clock, "1.2.me", 30)
        key = LaneKey("reader", kit.bus.journal, 0)
        state = await table.acquire(key, 10, lambda _: True)
        assert state is not None
        [event] = await kit.events()
        letter = bury(event, "reader", "rejected", 1, "no")
        rows: Any = [Row(offset=0, error=object())]  # type: ignore[arg-type]  # what no database can keep
        with pytest.raises(TypeError):
            await table.settle(key, state.token, Settlement(1, 1, rows, [(Row(offset=0), DLQ, letter)]))
        assert await log.fetch(DLQ, 0, 0) == []
        assert await kit.query("SELECT * FROM deliveries") == []


async def test_a_position_has_one_open_dead_letter_per_subscription() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(fails(9)), "reader", retry=ONCE)
        await kit.publish("a", 1)
        await kit.settle()
        await kit.stop()
        log = await kit.bus.open()
        table = DeliveryTable(log, kit.clock, "1.2.me", 30)
        key = LaneKey("reader", kit.bus.journal, 0)
        state = await table.acquire(key, 10, lambda _: True)
        assert state is not None
        [event] = await kit.events()
        for error in ("RuntimeError: attempt 1", "something else"):
            letter = bury(event, "reader", "rejected", 1, error)
            dead = [(Row(offset=0), DLQ, letter)]
            [receipt] = await table.settle(key, state.token, Settlement(1, 1, [], dead))
            assert (receipt.id, receipt.duplicate) == (f"{DLQ}/0/0", True)
        assert len(await log.fetch(DLQ, 0, 0)) == 1


async def test_a_dead_letter_stream_that_was_deleted_is_made_again() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(fails(9)), "reader", retry=ONCE)
        await kit.publish("a", 1)
        await kit.settle()
        log = await kit.bus.open()
        await log.delete_stream(DLQ)
        await kit.publish("a", 2)
        await kit.advance(3)
        assert [letter.payload for letter in await kit.dead()] == ["2"]
        assert [row[5] for row in await kit.journal()] == ["failed", "failed"]


async def test_dead_letters_can_be_subscribed_to_by_name() -> None:
    async with BusKit() as kit:
        seen = Recorder()
        kit.bus.subscribe(DLQ, seen, "undertaker")
        kit.bus.subscribe("a", Recorder(fails(9, Reject("no"))), "reader")
        await kit.publish("a", 1)
        await kit.settle()
    assert [event.headers["postbus.dlq.subscription"] for event in seen.events] == ["reader"]


async def test_what_anybody_publishes_to_a_dead_letter_stream_is_no_dead_letter() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(fails(9)), "reader", retry=ONCE)
        await kit.settle()
        assert (await kit.publish(DLQ, 1)).stream == DLQ
        await kit.publish("a", 1)
        await kit.settle()
        assert [letter.id for letter in await kit.dead()] == [f"{DLQ}/0/1"]


# --- found ------------------------------------------------------------------------------------------------------------


async def test_dead_letters_are_found_by_subscription_topic_reason_and_state() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a.*", Recorder(fails(9)), "one", retry=ONCE)
        kit.bus.subscribe("a.x", Recorder(fails(9, Reject("no"))), "two")
        for topic in ("a.x", "a.y", "b.x"):
            await kit.publish(topic, topic)
            await kit.settle()
        letters = kit.bus.dead_letters
        assert len(await letters.find()) == 3
        assert [letter.topic for letter in await letters.find(subscription="one")] == ["a.x", "a.y"]
        assert [letter.subscription for letter in await letters.find(reason="rejected")] == ["two"]
        assert [letter.topic for letter in await letters.find(topic="*.y")] == ["a.y"]
        assert len(await letters.find(limit=2)) == 2
        assert await letters.find(state="purged") == []
        assert len(await letters.find(state=None)) == 3
        with pytest.raises(Invalid):
            await letters.find(topic="a..b")


async def test_dead_letters_are_found_in_the_order_they_died_whatever_the_clock_says() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(fails(9)), "reader", retry=ONCE)
        for number in range(12):
            kit.clock.set_wall(kit.clock.now_us() - 3_600_000_000)
            await kit.publish("a", number)
            await kit.settle()
        assert [letter.payload for letter in await kit.dead()] == [str(number) for number in range(12)]


async def test_one_dead_letter_is_shown_by_its_id() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(fails(9)), "reader", retry=ONCE)
        receipt = await kit.publish("a", {"n": 1})
        await kit.settle()
        letter = await kit.bus.dead_letters.show(f"{DLQ}/0/0")
        assert (letter.origin_id, letter.payload, letter.state) == (receipt.id, '{"n":1}', "open")
        for wrong in (f"{DLQ}/0/1", receipt.id, "other.tenant.journal-dlq/0/0", "rubbish"):
            with pytest.raises(NotFound):
                await kit.bus.dead_letters.show(wrong)


async def test_dead_letters_are_visible_to_any_sqlite_tool() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(fails(9)), "reader", retry=ONCE)
        await kit.publish("a", 1)
        await kit.settle()
        columns = "subscription, topic, origin_stream, origin_partition, origin_offset, reason, attempts, error, state"
        [row] = await kit.query(f"SELECT {columns} FROM dead_letters")
    expected = ("reader", "a", "local.default.journal", 0, 0, "max_attempts", 1, "RuntimeError: attempt 1", "open")
    assert row == expected


# --- replayed ---------------------------------------------------------------------------------------------------------


async def test_a_replay_goes_to_the_subscription_it_came_from_with_attempts_from_0() -> None:
    bad, good = Moody(), Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", bad, "bad")
        kit.bus.subscribe("a", good, "good")
        await kit.publish("a", 1)
        await kit.advance(20)
        assert bad.attempts == [1, 2, 3]
        bad.good = True
        letters = await kit.dead()
        assert await kit.bus.dead_letters.replay(letters) == 1
        await kit.settle()
        assert await kit.bus.dead_letters.replay(letters) == 0
        assert [letter.state for letter in await kit.bus.dead_letters.find(state=None)] == ["replayed"]
        [row] = await kit.journal()
        assert (row[5], row[8]) == ("done", None)
    assert bad.attempts == [1, 2, 3, 1]
    assert good.attempts == [1]


async def test_a_replay_that_fails_again_is_a_new_dead_letter() -> None:
    bad = Moody()
    async with BusKit() as kit:
        kit.bus.subscribe("a", bad, "bad", retry=ONCE)
        await kit.publish("a", 1)
        await kit.settle()
        first = await kit.dead()
        for _ in range(2):
            assert await kit.bus.dead_letters.replay(await kit.dead()) == 1
            await kit.settle()
        assert [letter.id for letter in await kit.dead()] == [f"{DLQ}/0/2"]
        assert await kit.bus.dead_letters.replay(first) == 0
        states = [letter.state for letter in await kit.bus.dead_letters.find(state=None)]
    assert states == ["replayed", "replayed", "open"]
    assert bad.attempts == [1, 1, 1]


async def test_many_are_replayed_by_filter() -> None:
    bad = Moody()
    async with BusKit() as kit:
        kit.bus.subscribe("a.*", bad, "bad", retry=ONCE)
        kit.bus.subscribe("a.*", Recorder(fails(9)), "worse", retry=ONCE)
        for number in range(700):
            await kit.publish("a.odd" if number % 2 else "a.even", number)
        await kit.settle()
        bad.good = True
        bad.events.clear()
        chosen = await kit.bus.dead_letters.find(subscription="bad", topic="a.odd")
        assert await kit.bus.dead_letters.replay(chosen) == 350
        await kit.settle()
        assert len(await kit.dead()) == 1400 - 350
    assert sorted(bad.payloads) == [*range(1, 700, 2)]


async def test_a_rate_cap_spreads_a_replay_over_time() -> None:
    bad = Moody()
    async with BusKit() as kit:
        kit.bus.subscribe("a", bad, "bad", retry=ONCE)
        for number in range(10):
            await kit.publish("a", number)
        await kit.settle()
        bad.good = True
        bad.events.clear()
        replaying = asyncio.create_task(kit.bus.dead_letters.replay(await kit.dead(), per_second=2))
        await kit.settle()
        assert len(bad.events) == 1
        await kit.advance(2)
        assert 4 <= len(bad.events) <= 6
        await kit.advance(3)
        assert await replaying == 10
    assert sorted(bad.payloads) == [*range(10)]


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
async def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    async with BusKit() as kit:
        await kit.bus.open()
        with pytest.raises(Invalid):
            await kit.bus.dead_letters.replay([], per_second=rate)


async def test_a_replay_works_after_retention_removed_the_original() -> None:
    bad = Moody()
    async with BusKit() as kit:
        kit.bus.subscribe("a", bad, "bad", retry=ONCE)
        receipt = await kit.publish("a", {"n": 1}, key="k", headers={"mine": "1"}, variant="v", native_id="x")
        await kit.settle()
        log = await kit.bus.open()
        await kit.advance(2)
        assert (await log.trim(kit.bus.journal, before=1)).removed == 1
        bad.good = True
        assert await kit.bus.dead_letters.replay(await kit.dead()) == 1
        await kit.settle()
        assert await kit.dead() == []
    first, again = bad.events
    assert (again.id, again.payload, again.attempt) == (receipt.id, {"n": 1}, 1)
    for name in ("topic", "source", "key", "headers", "variant", "payload_json"):
        assert getattr(again, name) == getattr(first, name)


async def test_a_replay_waits_for_a_subscription_that_is_not_running() -> None:
    bad, good = Moody(), Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", bad, "bad", retry=ONCE)
        await kit.publish("a", 1)
        await kit.settle()
        await kit.stop()
        with pytest.raises(StorageError, match="not open"):
            _ = kit.bus.dead_letters
        letters = await kit.dead()
        assert await kit.bus.dead_letters.replay(letters) == 1
        kit.bus.unsubscribe("a", "bad")
        kit.bus.subscribe("a", good, "bad", retry=ONCE)
        await kit.start()
        await kit.settle()
    assert good.attempts == [1]


async def test_replayed_events_keep_the_turn_of_their_key() -> None:
    bad = Moody()
    running: list[int] = []

    async def handle(event: Event) -> None:
        running.append(event.payload)
        assert len(running) == 1, "two events of one key at once"
        await asyncio.sleep(0)
        running.remove(event.payload)
        await bad(event)

    async with BusKit() as kit:
        kit.bus.subscribe("a", handle, "bad", retry=ONCE)
        for number in range(10):
            await kit.publish("a", number, key="k")
        await kit.settle()
        bad.good = True
        bad.events.clear()
        await kit.bus.dead_letters.replay(await kit.dead())
        await asyncio.gather(*(kit.publish("a", number, key="k") for number in range(10, 20)))
        await kit.settle()
        assert await kit.dead() == []
    assert sorted(bad.payloads) == [*range(20)]


# --- put away ---------------------------------------------------------------------------------------------------------


async def test_purged_letters_are_gone_for_good() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(fails(9)), "reader", retry=ONCE)
        for number in range(4):
            await kit.publish("a", number)
        await kit.settle()
        letters = await kit.dead()
        assert await kit.bus.dead_letters.purge(letters[1:3]) == 2
        assert await kit.bus.dead_letters.purge(letters[1:3]) == 0
        assert [letter.payload for letter in await kit.dead()] == ["0", "3"]
        assert len(await kit.bus.dead_letters.find(state="purged")) == 2
        assert await kit.bus.dead_letters.replay(letters[1:3]) == 0
        assert await kit.bus.dead_letters.purge(letters[:1]) == 1
        log = await kit.bus.open()
        assert [event.payload for event in await log.fetch(DLQ, 0, 0)] == [3]
        assert [letter.payload for letter in await kit.dead()] == ["3"]


async def test_a_purge_and_its_record_are_one_transaction() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(fails(9)), "reader", retry=ONCE)
        for number in range(3):
            await kit.publish("a", number)
        await kit.settle()
        log, letters = await kit.bus.open(), await kit.dead()
        with pytest.raises(Invalid, match="source"):
            await purge(log, kit.clock, "local.default", letters, "no such source")
        assert await kit.dead() == letters
        assert len(await kit.events()) == 3
        assert await purge(log, kit.clock, "local.default", letters[:1], "test") == 1
        assert await purge(log, kit.clock, "local.default", letters[:1], "test") == 0
        [*_, record] = await kit.events()
        assert (record.topic, record.source, record.offset) == (PURGED, "test", 3)
        assert record.payload == {
            "count": 1,
            "letters": [letters[0].id],
            "subscriptions": {"reader": 1},
            "reasons": {"max_attempts": 1},
        }
        statuses = await kit.query("SELECT status FROM event_journal WHERE topic = 'a' ORDER BY id")
        assert statuses == [("done",), ("failed",), ("failed",)]


async def test_letters_of_a_deleted_subscription_stay_open_but_go_nowhere() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(fails(9)), "reader", retry=ONCE)
        await kit.publish("a", 1)
        await kit.settle()
        await kit.bus.delete_subscription("reader")
        letters = await kit.dead()
        assert [letter.subscription for letter in letters] == ["reader"]
        assert await kit.bus.dead_letters.replay(letters) == 0
        assert await kit.bus.dead_letters.purge(letters) == 1
        assert await kit.dead() == []


async def test_a_subscription_that_begins_again_leaves_letters_of_its_own() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(fails(9)), "reader", retry=ONCE)
        await kit.publish("a", 1)
        await kit.settle()
        await kit.bus.delete_subscription("reader")
        kit.bus.subscribe("a", Recorder(fails(9, ValueError("other words"))), "reader", retry=ONCE, start="earliest")
        await kit.settle()
        await kit.publish("a", 2)
        await kit.settle()
        letters = await kit.dead()
    assert [(letter.payload, letter.error) for letter in letters] == [
        ("1", "ValueError: other words"),
        ("2", "ValueError: other words"),
    ]


async def test_a_streams_dead_letters_name_their_partition() -> None:
    async with BusKit() as kit:
        name = "local.default.orders"
        await kit.bus.ensure_stream(name, StreamSettings(partitions=3))
        bad = Moody()
        kit.bus.subscribe(name, bad, "reader", retry=ONCE)
        receipts = [await kit.publish(name, number) for number in range(6)]
        await kit.settle()
        letters = await kit.dead()
        assert {letter.origin_id for letter in letters} == {receipt.id for receipt in receipts}
        assert {letter.id.rpartition("/")[0] for letter in letters} == {f"{name}-dlq/0"}
        bad.good = True
        assert await kit.bus.dead_letters.replay(letters) == 6
        await kit.settle()
        assert await kit.dead() == []
