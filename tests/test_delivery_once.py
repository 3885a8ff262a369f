"""Side effects that run at most once per event, subscription and key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from postbus import Context, Event, Invalid, Retry
from postbus.testing import BusKit
from tests.handlers import Recorder


async def test_an_effect_runs_once_over_all_attempts_and_its_result_is_kept() -> None:
    ran: list[int] = []
    results: list[Any] = []

    async def handle(event: Event, ctx: Context) -> None:
        async def effect() -> dict[str, Any]:
            ran.append(event.attempt)
            return {"charged": event.payload, "at": [1, None]}

        results.append(await ctx.once("charge", effect))
        if event.attempt < 3:
            raise ValueError("broken")

    async with BusKit() as kit:
        kit.bus.subscribe("a", handle, "reader")
        await kit.publish("a", 5)
        await kit.advance(20)
        assert await kit.dead() == []
    assert ran == [1]
    assert results == [{"charged": 5, "at": [1, None]}] * 3


async def test_keys_events_and_subscriptions_are_told_apart() -> None:
    ran: list[Any] = []

    async def handle(event: Event, ctx: Context) -> None:
        for key in ("a", "b"):
            await ctx.once(key, lambda key=key: ran.append((ctx.subscription, event.payload, key)))  # type: ignore[misc]
        if event.attempt == 1:
            raise Retry(0)

    async with BusKit() as kit:
        kit.bus.subscribe("t", handle, "one")
        kit.bus.subscribe("t", handle, "two")
        await kit.publish("t", 1)
        await kit.publish("t", 2)
        await kit.settle()
    assert sorted(ran) == [(name, number, key) for name in ("one", "two") for number in (1, 2) for key in ("a", "b")]


async def test_an_effect_that_raises_may_run_again() -> None:
    ran: list[int] = []

    async def handle(event: Event, ctx: Context) -> None:
        def effect() -> str:
            ran.append(event.attempt)
            if event.attempt == 1:
                raise ConnectionError("no line")
            return "sent"

        assert await ctx.once("send", effect) == "sent"

    async with BusKit() as kit:
        kit.bus.subscribe("a", handle, "reader")
        await kit.publish("a", 1)
        await kit.advance(20)
        assert await kit.dead() == []
    assert ran == [1, 2]


async def test_an_effect_that_was_cut_off_does_not_run_again() -> None:
    ran: list[int] = []
    results: list[Any] = []

    async def handle(event: Event, ctx: Context) -> None:
        async def effect() -> None:
            ran.append(event.attempt)
            await asyncio.Event().wait()

        results.append(await ctx.once("send", effect))

    async with BusKit() as kit:
        kit.bus.subscribe("a", handle, "reader", timeout=5)
        await kit.publish("a", 1)
        await kit.advance(20)
        assert [row[5] for row in await kit.journal()] == ["done"]
    assert ran == [1]
    assert results == [None]


async def test_an_effect_of_a_process_that_ended_does_not_run_again() -> None:
    ran: list[str] = []

    async def handle(_event: Event, ctx: Context) -> None:
        await ctx.once("quick", lambda: ran.append("quick"))

        async def effect() -> None:
            ran.append("slow")
            await asyncio.Event().wait()

        await ctx.once("slow", effect)

    async with BusKit() as kit:
        kit.bus.subscribe("a", handle, "reader")
        await kit.publish("a", 1)
        await kit.settle()
        await kit.crash()
        kit.bus.subscribe("a", handle, "reader")
        await kit.start()
        await kit.settle()
        assert [row[5] for row in await kit.journal()] == ["done"]
    assert ran == ["quick", "slow"]


async def test_a_result_that_is_no_json_is_refused_but_the_effect_has_run() -> None:
    ran: list[int] = []
    errors: list[str] = []

    async def handle(event: Event, ctx: Context) -> None:
        def effect() -> object:
            ran.append(event.attempt)
            return float("nan")

        try:
            assert await ctx.once("odd", effect) is None
        except Invalid as error:
            errors.append(error.message)
            raise

    async with BusKit() as kit:
        kit.bus.subscribe("a", handle, "reader")
        await kit.publish("a", 1)
        await kit.advance(20)
        assert [row[5] for row in await kit.journal()] == ["done"]
    assert ran == [1]
    assert "has run, but its result is no JSON value" in errors[0]


@pytest.mark.parametrize("key", ["", "x" * 201])
async def test_a_bad_key_is_refused_before_anything_runs(key: str) -> None:
    ran: list[int] = []

    async def handle(_event: Event, ctx: Context) -> None:
        with pytest.raises(Invalid, match="1 to 200"):
            await ctx.once(key, lambda: ran.append(1))

    async with BusKit() as kit:
        kit.bus.subscribe("a", handle, "reader")
        await kit.publish("a", 1)
        await kit.settle()
        assert await kit.dead() == []
    assert ran == []


async def test_a_replayed_dead_letter_does_not_repeat_its_effects() -> None:
    ran: list[int] = []
    good = False

    async def handle(_event: Event, ctx: Context) -> None:
        await ctx.once("charge", lambda: ran.append(1))
        if not good:
            raise ValueError("broken")

    seen = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", handle, "reader")
        kit.bus.subscribe("a", seen, "seen")
        await kit.publish("a", 1)
        await kit.advance(20)
        good = True
        assert await kit.bus.dead_letters.replay(await kit.dead()) == 1
        await kit.settle()
        assert [row[5] for row in await kit.journal()] == ["done"]
    assert ran == [1]
    assert len(seen.events) == 1
