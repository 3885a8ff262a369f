"""Requests and replies, and what derived events carry along: correlation, causation, hops."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from postbus import Context, Event, EventBus, Invalid, LoopDetected, RequestTimeout, StreamSettings
from postbus.bus.context import CAUSATION, HOPS
from postbus.testing import BusKit
from tests.handlers import Gate, Recorder


async def double(event: Event, ctx: Context) -> None:
    await ctx.reply(event.payload * 2)


# --- requests ---------------------------------------------------------------------------------------------------------


async def test_a_request_returns_the_reply() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("math.double", double, "doubler")
        reply = await kit.bus.request("math.double", 21, timeout=5)
        question = (await kit.events())[0]
    assert reply.payload == 42
    assert reply.correlation_id == question.id
    assert reply.headers[CAUSATION] == question.id


async def test_a_reply_may_be_given_through_the_bus_and_keeps_the_correlation() -> None:
    async with BusKit() as kit:

        async def answer(event: Event) -> None:
            await kit.bus.reply(event, "yes", source="oracle")

        kit.bus.subscribe("ask", answer, "oracle")
        reply = await kit.bus.request("ask", None)
    assert (reply.payload, reply.source) == ("yes", "oracle")


async def test_a_request_times_out() -> None:
    async with BusKit() as kit:
        asking = asyncio.create_task(kit.bus.request("nobody.listens", 1, timeout=5))
        await kit.advance(4.9)
        assert not asking.done()
        await kit.advance(0.2)
        with pytest.raises(RequestTimeout, match="within 5s"):
            await asking


async def test_many_requests_at_once_are_never_mixed_up() -> None:
    async with BusKit() as kit:
        gate = Gate(lambda event: event.payload % 3 == 0)

        async def slow(event: Event, ctx: Context) -> None:
            await gate(event)
            await ctx.reply({"for": event.payload})

        kit.bus.subscribe("ask", slow, "answerer", concurrency=50)
        asking = [asyncio.create_task(kit.bus.request("ask", number, timeout=60)) for number in range(50)]
        await kit.settle()
        gate.open.set()
        replies = await asyncio.gather(*asking)
    assert [reply.payload for reply in replies] == [{"for": number} for number in range(50)]


async def test_a_late_reply_reaches_nobody() -> None:
    gate = Gate()
    async with BusKit() as kit:

        async def late(event: Event, ctx: Context) -> None:
            await gate(event)
            await ctx.reply("late")

        kit.bus.subscribe("ask", late, "late")
        kit.bus.subscribe("double", double, "doubler")
        asking = asyncio.create_task(kit.bus.request("ask", 1, timeout=2))
        await kit.advance(3)
        with pytest.raises(RequestTimeout):
            await asking
        next_one = asyncio.create_task(kit.bus.request("ask", 2, timeout=2))
        gate.open.set()
        assert (await next_one).payload == "late"
        assert (await kit.bus.request("double", 4)).payload == 8
        assert kit.bus._replies._waiting == {}


async def test_the_first_of_several_replies_counts() -> None:
    async with BusKit() as kit:

        async def twice(_event: Event, ctx: Context) -> None:
            await ctx.reply("first")
            await ctx.reply("second")

        kit.bus.subscribe("ask", twice, "twice")
        assert (await kit.bus.request("ask", 1)).payload == "first"


async def test_replies_to_others_are_none_of_ours() -> None:
    async with BusKit() as kit:
        await kit.bus.open()
        asking = asyncio.create_task(kit.bus.request("ask", 1, timeout=2))
        await kit.settle()
        await kit.publish("reply.00000000000000000000000000000000", "forged")
        await kit.advance(3)
        with pytest.raises(RequestTimeout):
            await asking


async def test_a_request_that_cannot_be_published_leaves_nothing_behind() -> None:
    async with BusKit() as kit:
        with pytest.raises(Invalid):
            await kit.bus.request("no.*", 1)
        with pytest.raises(Invalid):
            await kit.bus.request("ask", 1, timeout=0)
        assert kit.bus._replies._waiting == {}
        assert await kit.events() == []


async def test_an_event_that_asks_for_nothing_gets_no_reply() -> None:
    async with BusKit() as kit:
        await kit.publish("a", 1)
        [event] = await kit.events()
        with pytest.raises(Invalid, match="asks for no reply"):
            await kit.bus.reply(event, 1)


async def test_requests_of_one_process_are_answered_by_another_bus(tmp_path: Any) -> None:
    async with EventBus(tmp_path) as asking, EventBus(tmp_path) as answering:
        answering.subscribe("math.double", double, "doubler")
        replies = await asyncio.gather(*(asking.request("math.double", number, timeout=60) for number in range(10)))
    assert [reply.payload for reply in replies] == [2 * number for number in range(10)]


async def test_replies_are_found_in_whatever_partition_of_the_journal_they_are() -> None:
    kit = BusKit()
    log = await kit.bus.open()
    await log.delete_stream(kit.bus.journal)
    await log.ensure_stream(kit.bus.journal, StreamSettings(partitions=3))
    async with kit:
        kit.bus.subscribe("math.double", double, "doubler")
        replies = await asyncio.gather(*(kit.bus.request("math.double", number) for number in range(9)))
    assert [reply.payload for reply in replies] == [2 * number for number in range(9)]


async def test_stopping_does_not_wait_for_unanswered_requests() -> None:
    async with BusKit() as kit:
        asking = asyncio.create_task(kit.bus.request("nobody", 1, timeout=1000))
        await kit.settle()
        await kit.bus.stop()
        asking.cancel()


# --- what travels along -----------------------------------------------------------------------------------------------


async def test_a_derived_event_carries_correlation_causation_and_hops() -> None:
    got = Recorder()

    async def one(_event: Event, ctx: Context) -> None:
        await ctx.publish("two", {})

    async with BusKit() as kit:

        async def two(_event: Event) -> None:
            await kit.bus.publish("three", "me", {})

        kit.bus.subscribe("one", one, "first")
        kit.bus.subscribe("two", two, "second")
        kit.bus.subscribe(">", got, "all")
        await kit.publish("one", {}, correlation_id="chain")
        await kit.settle()
    first, second, third = got.events
    assert [event.correlation_id for event in got.events] == ["chain"] * 3
    assert (second.source, third.source) == ("first", "me")
    assert first.headers == {}
    assert second.headers == {CAUSATION: first.id, HOPS: "1"}
    assert third.headers == {CAUSATION: second.id, HOPS: "2"}


async def test_without_a_correlation_the_first_events_address_becomes_it() -> None:
    got = Recorder()

    async def pass_on(_event: Event, ctx: Context) -> None:
        await ctx.publish("b", {}, headers={"mine": "1"})
        await ctx.publish("b", {}, correlation_id="own")

    async with BusKit() as kit:
        kit.bus.subscribe("a", pass_on, "first")
        kit.bus.subscribe("b", got, "second")
        receipt = await kit.publish("a", {})
        await kit.settle()
        [origin] = [event for event in await kit.events() if event.topic == "a"]
    assert origin.correlation_id is None
    assert [event.correlation_id for event in got.events] == [receipt.id, "own"]
    assert got.events[0].headers["mine"] == "1"


async def test_what_is_published_outside_a_handler_derives_from_nothing() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(), "reader")
        await kit.publish("a", {}, correlation_id="chain")
        await kit.settle()
        await kit.publish("b", {})
        events = await kit.events()
    assert (events[1].correlation_id, events[1].headers) == (None, {})


async def test_a_loop_is_cut_and_its_event_dead_lettered() -> None:
    got = Recorder()

    async def ping(event: Event, ctx: Context) -> None:
        await ctx.publish("pong" if event.topic == "ping" else "ping", event.payload)

    async with BusKit(max_hops=5) as kit:
        kit.bus.subscribe("ping", ping, "pinger")
        kit.bus.subscribe("pong", ping, "ponger")
        kit.bus.subscribe("*", got, "all")
        await kit.publish("ping", 1)
        await kit.settle()
        [letter] = await kit.dead()
        statuses = [row[5] for row in await kit.journal()]
    assert len(got.events) == 6
    assert got.events[-1].headers[HOPS] == "5"
    assert (letter.reason, letter.attempts, letter.origin_offset) == ("loop", 1, 5)
    assert "max_hops=5" in letter.error
    assert statuses == [*["done"] * 5, "failed"]


async def test_a_handler_may_see_that_it_is_in_a_loop() -> None:
    refused: list[str] = []

    async def ping(_event: Event, ctx: Context) -> None:
        try:
            await ctx.publish("ping", {})
        except LoopDetected as error:
            refused.append(error.code)

    async with BusKit(max_hops=2) as kit:
        kit.bus.subscribe("ping", ping, "pinger")
        await kit.publish("ping", {})
        await kit.settle()
        assert await kit.dead() == []
        assert len(await kit.events()) == 3
    assert refused == ["loop"]


async def test_the_default_allows_32_hops() -> None:
    async def again(_event: Event, ctx: Context) -> None:
        await ctx.publish("a", {})

    async with BusKit() as kit:
        kit.bus.subscribe("a", again, "again")
        await kit.publish("a", {})
        await kit.settle()
        assert len(await kit.events()) == 33
        [letter] = await kit.dead()
    assert letter.reason == "loop"
