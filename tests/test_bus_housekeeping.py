"""Housekeeping removes what nobody needs any more, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from postbus import Context, Event, EventBus, Reject, Retry
from postbus.bus.housekeeping import keep_house
from postbus.clock import SystemClock
from postbus.log.sqlite import SqliteLog
from postbus.model import Retention, StreamSettings

STREAM = "local.default.orders"
KEEP_NONE = StreamSettings(retention=Retention(count=0))


class LaterClock(SystemClock):
    """The same clock, some days later."""

    def __init__(self, days: float) -> None:
        self._later_us = int(days * 86_400e6)

    def now_us(self) -> int:
        return super().now_us() + self._later_us


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[EventBus]:
    made = EventBus(tmp_path / "data")
    yield made
    await made.stop()


async def removed(log: SqliteLog, days: float = 0, *, dry_run: bool = False) -> dict[str, int]:
    duties = await keep_house(log, LaterClock(days), dry_run=dry_run)
    return {duty.what: duty.removed for duty in duties if duty.removed}


async def rows(bus: EventBus, table: str) -> list[tuple[object, ...]]:
    log = await bus.open()
    return await log.store.read(lambda db: list(db.execute(f"SELECT * FROM {table}")))


async def until(bus: EventBus, query: str, count: int) -> None:
    """Wait until a query has that many rows."""
    for _ in range(1500):
        if len(await rows(bus, query)) == count:
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(query)


async def test_retention_waits_for_events_below_the_cursor_that_are_retried(bus: EventBus) -> None:
    await bus.ensure_stream(STREAM, KEEP_NONE)

    async def handle(event: Event) -> None:
        if event.offset == 2:
            raise Retry(3600)

    bus.subscribe(STREAM, handle, "shop")
    async with bus:
        for number in range(5):
            await bus.publish(STREAM, "test", number)
        await until(bus, "cursors WHERE consumer IN ('shop', '_dispatch') AND next_offset = 5", 2)
        log = await bus.open()
        what = "events beyond their stream's retention"
        assert await removed(log, dry_run=True) == {what: 2}
        assert await removed(log) == {what: 2}
        (duty, *_) = await keep_house(log, SystemClock())
        assert (duty.removed, duty.held_back_by) == (0, ("shop",))
        assert [event.offset for event in await log.fetch(STREAM, 0, 0)] == [2, 3, 4]


async def test_results_of_side_effects_stay_while_the_event_may_come_again(bus: EventBus) -> None:
    ran: list[int] = []

    async def handle(event: Event, ctx: Context) -> None:
        await ctx.once("effect", lambda: ran.append(event.payload))
        if event.payload == 1:
            raise Reject("no")

    bus.subscribe("a.b", handle, "shop")
    async with bus:
        for number in range(3):
            await bus.publish("a.b", "test", number)
        await until(bus, "cursors WHERE consumer = 'shop' AND next_offset = 3", 1)
        log = await bus.open()
        assert await removed(log, days=29) == {}
        found = await removed(log, days=31)
        assert found["results of side effects"] == 2
        assert len(await rows(bus, "once_results")) == 1
        await bus.dead_letters.replay(await bus.dead_letters.find())
        await until(bus, "delivery_rows WHERE status = 'failed' AND replays = 1", 1)
    assert sorted(ran) == [0, 1, 2]


async def test_rows_of_what_is_done_go_after_a_while(bus: EventBus) -> None:
    async def handle(event: Event) -> None:
        if event.attempt == 1:
            raise Retry(0)

    bus.subscribe("a.b", handle, "shop")
    async with bus:
        for number in range(3):
            await bus.publish("a.b", "test", number)
        await until(bus, "delivery_rows WHERE status = 'done'", 3)
        log = await bus.open()
        assert "deliveries that are done" not in await removed(log, days=29)
        assert (await removed(log, days=31))["deliveries that are done"] == 3
        assert await rows(bus, "delivery_rows") == []
        assert {row[5] for row in await rows(bus, "event_journal")} == {"done"}


async def test_a_dead_letter_outlives_its_event_and_can_still_be_replayed(bus: EventBus) -> None:
    await bus.ensure_stream(STREAM, KEEP_NONE)
    taken: list[int] = []

    async def handle(event: Event) -> None:
        if not taken and event.attempt == 1 and event.payload == 0 and not fixed:
            raise Reject("no")
        taken.append(event.payload)

    fixed: list[bool] = []
    bus.subscribe(STREAM, handle, "shop")
    async with bus:
        await bus.publish(STREAM, "test", 0)
        await until(bus, "dead_letters WHERE state = 'open'", 1)
        await until(bus, "cursors WHERE next_offset = 1 AND consumer IN ('shop', '_dispatch')", 2)
        log = await bus.open()
        assert (await removed(log, days=365))["events beyond their stream's retention"] == 1
        assert await log.fetch(STREAM, 0, 0) == []
        fixed.append(True)
        await bus.dead_letters.replay(await bus.dead_letters.find())
        await until(bus, "delivery_rows WHERE status = 'done'", 1)
        assert taken == [0]
        found = await removed(log, days=31)
        assert found.items() >= {"dead letters that were purged or replayed": 1, "deliveries that are done": 1}.items()


async def test_marks_of_purged_letters_go_with_the_letters(bus: EventBus) -> None:
    async def handle(event: Event) -> None:
        raise Reject(str(event.payload))

    bus.subscribe("a.b", handle, "shop")
    async with bus:
        for number in range(3):
            await bus.publish("a.b", "test", number)
        await until(bus, "dead_letters WHERE state = 'open'", 3)
        letters = await bus.dead_letters.find()
        await bus.dead_letters.purge(letters[1:])  # the first one is in the way
        log = await bus.open()
        assert "marks of purged dead letters" not in await removed(log, days=31)
        await bus.dead_letters.purge(letters[:1])
        assert (await removed(log, days=31))["marks of purged dead letters"] == 3
        assert await rows(bus, "dead_letters") == await rows(bus, "dead_letters_purged") == []
