"""Content filters on the bus's own subscriptions."""

from __future__ import annotations

from pathlib import Path

import pytest

from postbus import RetryPolicy
from postbus.model import Conflict, InvalidFilter
from postbus.testing import BusKit
from tests.handlers import Gate, Recorder, fails

BIG = {"expr": "payload.total > 100"}


async def test_only_events_that_match_reach_the_handler_and_the_cursor_passes_the_rest() -> None:
    got, every = Recorder(), Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("order.*", got, "big", filter=BIG)
        kit.bus.subscribe("order.*", every, "all")
        for total in (50, 150, "many", 99, 101):
            await kit.publish("order.paid", {"total": total})
        await kit.publish("order.paid", None)
        await kit.advance(3)
        assert [payload["total"] for payload in got.payloads] == [150, 101]
        assert len(every.events) == 6
        assert await kit.query("SELECT next_offset FROM cursors WHERE consumer = 'big'") == [(6,)]
        assert await kit.query("SELECT count(*) FROM delivery_rows") == [(0,)]
        [_, big] = await kit.bus.subscriptions()
        assert big.filter == BIG


async def test_metadata_and_payload_shortcuts_hold_too() -> None:
    got = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader", filter={"metadata": {"region": ["eu", "us"]}, "payload": {"n": 1}})
        for region, number in (("eu", 1), ("eu", 2), ("asia", 1), ("us", 1)):
            await kit.publish("a", {"n": number}, metadata={"region": region})
        await kit.advance(2)
        assert [event.offset for event in got.events] == [0, 3]


async def test_what_was_in_flight_at_a_crash_is_filtered_too(tmp_path: Path) -> None:
    gate, got = Gate(), Recorder()
    async with BusKit(tmp_path) as kit:
        kit.bus.subscribe("a", gate, "reader", filter=BIG)
        for total in (150, 50, 160, 60):
            await kit.publish("a", {"total": total})
        await kit.settle()
        await kit.crash()
        kit.bus.subscribe("a", got, "reader", filter=BIG)
        await kit.start()
        await kit.advance(5)
        assert [payload["total"] for payload in got.payloads] == [150, 160]
        assert {row[5] for row in await kit.journal()} == {"done"}


async def test_a_dropped_backlog_holds_only_what_matches() -> None:
    gate = Gate()
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader", filter=BIG, concurrency=1, overflow="drop_oldest", max_backlog=2)
        await kit.publish("a", {"total": 500})
        await kit.settle()
        for total in (50, 150, 60, 160, 70, 170, 80):
            await kit.publish("a", {"total": total})
        await kit.advance(1)
        assert [entry.payload for entry in await kit.dead()] == ['{"total":150}', '{"total":160}']


async def test_a_retry_is_not_lost_on_the_filter() -> None:
    got = Recorder(fails(1))
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader", filter=BIG, retry=RetryPolicy(jitter=0))
        await kit.publish("a", {"total": 150})
        await kit.advance(5)
        assert got.attempts == [1, 2]


async def test_a_bad_filter_is_refused_at_subscribe_and_another_one_is_a_conflict() -> None:
    async with BusKit() as kit:
        with pytest.raises(InvalidFilter, match="no part"):
            kit.bus.subscribe("a", Recorder(), "reader", filter={"body": {}})
        with pytest.raises(InvalidFilter) as refused:
            kit.bus.subscribe("a", Recorder(), "reader", filter={"expr": "payload.total >"})
        assert refused.value.line == 1
        kit.bus.subscribe("a", Recorder(), "reader", filter=BIG)
        with pytest.raises(Conflict):
            kit.bus.subscribe("b", Recorder(), "reader", filter={})
        assert [kept.id for kept in await kit.bus.subscriptions()] in ([], ["reader"])
