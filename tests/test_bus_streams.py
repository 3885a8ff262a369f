"""Where subscriptions read: patterns, registered streams and partitions."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus import EventBus, Invalid, StreamSettings
from postbus.bus.registry import globs
from postbus.envelope import draft
from postbus.model import LimitExceeded
from postbus.testing import BusKit
from postbus.topics import matches
from tests.handlers import Gate, Recorder, eventually, fails

# --- patterns ---------------------------------------------------------------------------------------------------------

TOPICS = ["a", "a.b", "a.c", "a.b.c", "b", "b.c", "a-b", "A.b"]


@pytest.mark.parametrize("pattern", ["a", "a.b", "a.*", "a.>", "*", "*.*", "*.b.*", ">", "*.>", "*.*.*", "a.*.c"])
async def test_a_wildcard_subscription_gets_what_its_pattern_matches(pattern: str) -> None:
    got = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe(pattern, got, "reader")
        for topic in TOPICS:
            await kit.publish(topic, {})
        await kit.settle()
        statuses = await kit.query("SELECT count(*) FROM event_statuses")
    assert [event.topic for event in got.events] == [topic for topic in TOPICS if matches(pattern, topic)]
    assert statuses == [(len(got.events),)]


async def test_an_event_that_several_patterns_of_one_id_match_is_delivered_once() -> None:
    got = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a.*", got, "reader")
        kit.bus.subscribe("b.*", got, "reader")
        for topic in ("a.x", "b.x", "c.x"):
            await kit.publish(topic, {})
        await kit.settle()
    assert [event.topic for event in got.events] == ["a.x", "b.x"]


@pytest.mark.parametrize("pattern", ["", "a..b", ">.a", "a.b*", "a b", "*." * 16 + "a", "x" * 513])
async def test_a_bad_pattern_is_refused_at_subscribe(pattern: str) -> None:
    async with BusKit() as kit:
        with pytest.raises((Invalid, LimitExceeded)):
            kit.bus.subscribe(pattern, Recorder(), "reader")
        assert await kit.bus.subscriptions() == []


_token = st.sampled_from(["a", "b", "ab", "-", "_", "A", "0", "a-b"])
_topic = st.lists(_token, min_size=1, max_size=16).map(".".join)
_pattern = st.lists(st.one_of(_token, st.just("*")), min_size=1, max_size=16).flatmap(
    lambda tokens: st.sampled_from([".".join(tokens), ".".join([*tokens[:15], ">"])])
)


@given(pattern=_pattern, topic=_topic)
def test_globs_match_in_sql_what_the_pattern_matches(pattern: str, topic: str) -> None:
    db = apsw.Connection(":memory:")
    query = "SELECT ?1 GLOB ?2 AND length(?1) - length(replace(?1, '.', '')) = ?3"
    found = [db.execute(query, (topic, glob, dots)).get for glob, dots in globs(pattern)]
    assert any(found) == matches(pattern, topic)


# --- streams and partitions -------------------------------------------------------------------------------------------


async def test_a_registered_stream_takes_its_topic_and_its_subscribers_get_it() -> None:
    got, other = Recorder(), Recorder()
    async with BusKit() as kit:
        await kit.bus.ensure_stream("local.default.orders")
        kit.bus.subscribe("local.default.orders", got, "reader")
        kit.bus.subscribe("order.created", other, "other")
        receipt = await kit.publish("local.default.orders", 1)
        await kit.publish("order.created", 2)
        await kit.settle()
    assert receipt.id == "local.default.orders/0/0"
    assert got.payloads == [1]
    assert other.payloads == [2]


async def test_a_stream_registered_while_running_is_read_by_those_who_already_wait_for_it() -> None:
    got = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("local.default.orders", got, "reader", start="latest")
        first = await kit.publish("local.default.orders", 1)
        await kit.settle()
        await kit.bus.ensure_stream("local.default.orders")
        second = await kit.publish("local.default.orders", 2)
        await kit.settle()
    assert (first.stream, second.stream) == ("local.default.journal", "local.default.orders")
    assert got.payloads == [1, 2]


async def test_a_stream_registered_by_somebody_else_is_noticed(tmp_path: Path) -> None:
    got = Recorder()
    async with EventBus(tmp_path) as reading, EventBus(tmp_path) as writing:
        reading.subscribe("local.default.*", got, "reader", start="latest")
        await eventually(lambda: reading._subscribers["reader"].placed)
        await writing.ensure_stream("local.default.orders")
        await writing.publish("local.default.orders", "test", 1)
        await eventually(lambda: got.events)
    assert got.payloads == [1]


async def test_a_stream_made_while_the_subscription_was_away_is_read_from_its_beginning() -> None:
    got = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("local.default.>", got, "reader", start="latest")
        await kit.settle()
        await kit.stop()
        await kit.bus.ensure_stream("local.default.orders")
        await kit.publish("local.default.orders", 1)
        await kit.start()
        await kit.settle()
    assert got.payloads == [1]


async def test_a_subscription_to_a_stream_gets_everything_in_it_whatever_the_topics() -> None:
    whole, some, both = Recorder(), Recorder(), list[str]()
    async with BusKit() as kit:
        log = await kit.bus.open()
        await kit.bus.ensure_stream("local.default.orders")
        kit.bus.subscribe("local.default.orders", whole, "whole")
        kit.bus.subscribe("created", some, "some")
        kit.bus.subscribe("local.default.orders", lambda _: both.append("stream"), "both", ordering="strict")
        kit.bus.subscribe("created", lambda _: both.append("topic"), "both", ordering="strict")
        await log.append("local.default.orders", [draft("created", "test", 1), draft("paid", "test", 2)])
        await kit.settle()
        await kit.until(lambda: len(both) == 3)
    assert whole.payloads == [1, 2]
    assert some.payloads == []
    assert both == ["stream", "topic", "stream"]


async def test_only_the_exact_name_of_the_journal_asks_for_all_of_it() -> None:
    exact, wild, deep = Recorder(), Recorder(), Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("local.default.journal", exact, "exact")
        kit.bus.subscribe("*.*.*", wild, "wild")
        kit.bus.subscribe("*.>", deep, "deep")
        await kit.publish("a", 1)
        await kit.publish("x.y.z", 2)
        await kit.settle()
        statuses = await kit.query("SELECT consumer, count(*) FROM event_statuses GROUP BY 1 ORDER BY 1")
    assert (exact.payloads, wild.payloads, deep.payloads) == ([1, 2], [2], [2])
    assert statuses == [("deep", 1), ("exact", 2), ("wild", 1)]


async def test_partitions_keep_the_order_of_each_key_and_lose_nothing() -> None:
    got = Recorder()
    async with BusKit() as kit:
        await kit.bus.ensure_stream("local.default.orders", StreamSettings(partitions=4))
        kit.bus.subscribe("local.default.orders", got, "reader")
        receipts = [await kit.publish("local.default.orders", n, key=f"key-{n % 7}") for n in range(140)]
        await kit.settle()
    assert len({receipt.partition for receipt in receipts}) > 1
    assert sorted(got.payloads) == [*range(140)]
    for key in range(7):
        mine = [event.payload for event in got.events if event.key == f"key-{key}"]
        assert mine == sorted(mine)


async def test_dead_letter_streams_are_read_only_by_those_who_name_them() -> None:
    everything, dead = Recorder(), Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe(">", everything, "everything")
        kit.bus.subscribe("local.default.*", everything, "more")
        kit.bus.subscribe("local.default.journal-dlq", dead, "dead")
        kit.bus.subscribe("a", Recorder(fails(9)), "bad")
        await kit.publish("a", 1)
        await kit.advance(10)
    assert [event.stream for event in everything.events] == ["local.default.journal"]
    assert [event.topic for event in dead.events] == ["a"]


async def test_a_stream_that_is_deleted_and_made_again_begins_anew() -> None:
    got = Recorder(fails(1))
    async with BusKit() as kit:
        log = await kit.bus.open()
        await kit.bus.ensure_stream("local.default.orders")
        kit.bus.subscribe("local.default.orders", got, "reader")
        await kit.publish("local.default.orders", "old")
        await kit.settle()
        await log.delete_stream("local.default.orders")
        await kit.advance(20)
        await kit.bus.ensure_stream("local.default.orders")
        await kit.publish("local.default.orders", "new")
        await kit.advance(5)
        rows = await kit.query("SELECT status FROM deliveries")
        journal = await kit.journal()
    assert got.payloads == ["old", "new", "new"]
    assert rows == [("done",)]
    assert [row[5] for row in journal] == ["done"]


async def test_events_that_retention_removed_are_passed_over() -> None:
    got = Recorder()
    async with BusKit() as kit:
        log = await kit.bus.open()
        name = "local.default.short"
        await kit.bus.ensure_stream(name, StreamSettings(retention_beats_consumers=True))
        await kit.publish(name, 1)
        kit.bus.subscribe(name, got, "reader")
        await kit.settle()
        await kit.stop()
        for number in range(2, 6):
            await kit.publish(name, number)
        log = await kit.bus.open()
        await log.trim(name, before=5)
        await kit.start()
        await kit.settle()
        assert got.payloads == [1]
        await kit.publish(name, 6)
        await kit.settle()
    assert got.payloads == [1, 6]


async def test_retention_may_pass_a_subscription_that_is_running() -> None:
    gate = Gate()
    async with BusKit(batch_size=2) as kit:
        log = await kit.bus.open()
        name = "local.default.short"
        await kit.bus.ensure_stream(name, StreamSettings(retention_beats_consumers=True))
        kit.bus.subscribe(name, gate, "reader", concurrency=1)
        for number in range(30):
            await kit.publish(name, number)
        await kit.settle()
        await log.trim(name, before=30)
        gate.open.set()
        await kit.settle()
        await kit.publish(name, 30)
        await kit.settle()
        lag = await log.get_consumer_lag(name, "reader")
    assert gate.finished[-1].payload == 30
    assert lag.total == 0
