from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from postbus.bus import EventBus
from postbus.kernel import SystemTopics, ToolCall
from postbus.kernel.schedules import Schedules
from postbus.model import Conflict, Event, Invalid, NotFound, RetryPolicy
from postbus.testing import BusKit, FakeClock
from tests.kernel.scheduler_kit import call, scheduled, staffed


@pytest.fixture
def host(extensions: Path) -> Path:
    return staffed(extensions)


def at(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1e6)


def times(events: list[Event]) -> list[int]:
    """When events fell due, in seconds after the first."""
    found = [round(event.occurred_at.timestamp()) for event in events]
    return [one - found[0] for one in found]


# --- once -------------------------------------------------------------------------------------------------------------


async def test_once_after_a_delay(host: Path) -> None:
    async with scheduled(host) as kit:
        made = await call(kit, "schedule_once", delay_seconds=90, text="tea")
        await kit.kit.jump(89)
        assert kit.kernel.instance("chat").sent == []
        await kit.kit.jump(1)
        await kit.kit.jump(3600)
        [message] = kit.kernel.instance("chat").sent
        assert message.text == "tea"
        [fired] = await kit.events(SystemTopics.USER_NOTIFY)
        assert fired.source == "scheduler"
        assert fired.metadata["schedule"]["id"] == made["schedule_id"]
        assert (await call(kit, "schedule_list"))["schedules"] == []
        [over] = (await call(kit, "schedule_list", include_ended=True))["schedules"]
        assert (over["state"], over["fires"]) == ("done", 1)


async def test_once_at_an_instant_of_any_zone(host: Path) -> None:
    clock = FakeClock(at("2026-03-01T08:00:00+00:00"))
    async with scheduled(host, bus=BusKit(clock=clock)) as kit:
        made = await call(
            kit, "schedule_once", at_iso="2026-03-01T10:00:00+01:00", topic="tea.ready", payload={"cups": 2}
        )
        assert made["next_fire_at"] == "2026-03-01T09:00:00Z"
        await kit.kit.jump(3600)
        [fired] = await kit.events("tea.ready")
        assert fired.payload == {"cups": 2}
        assert fired.occurred_at.isoformat() == "2026-03-01T09:00:00+00:00"


async def test_a_prompt_asks_the_agent_and_background_is_silent(host: Path) -> None:
    async with scheduled(host) as kit:
        await call(kit, "schedule_once", delay_seconds=10, prompt="sum up")
        await call(kit, "schedule_once", delay_seconds=20, prompt="tidy", background=True)
        await kit.kit.jump(10)
        await kit.kit.jump(10)
        assert [task for task, _ in kit.kernel.instance("agent").asked] == ["sum up", "tidy"]
        assert [message.text for message in kit.kernel.instance("chat").sent] == ["ok"]


async def test_a_reminder_goes_to_whoever_asked_for_it_and_stays_in_the_chain(host: Path) -> None:
    async with scheduled(host) as kit:
        ctx = kit.kernel.instance("chat").ctx
        await ctx.receive("later water the plants", "me", session_id="s1", correlation_id="c1")
        await kit.settle()
        await kit.kit.jump(60)
        task, context = kit.kernel.instance("agent").asked[-1]
        assert (task, context.user_id, context.session_id, context.correlation_id) == (
            "water the plants",
            "me",
            "s1",
            "c1",
        )
        assert kit.kernel.instance("chat").sent[-1].user_id == "me"


async def test_a_tool_call_that_is_repeated_makes_one_schedule(host: Path) -> None:
    async with scheduled(host) as kit:
        scheduler = kit.kernel.instance("scheduler")
        asked = ToolCall(id="a" * 32, name="schedule_once", arguments={"delay_seconds": 60, "text": "tea"})
        first = await scheduler.call_tool(asked)
        kit.kit.clock.advance(30)
        assert await scheduler.call_tool(asked) == first
        assert len((await scheduler.list())["schedules"]) == 1


# --- again and again --------------------------------------------------------------------------------------------------


async def test_an_interval_does_not_drift(host: Path) -> None:
    async with scheduled(host) as kit:
        await call(kit, "schedule_recurring", every_seconds=10, topic="tick.tock")
        for late_s in (10.9, 10, 9.5, 9.6, 10, 10.7):  # never woken on time
            await kit.kit.jump(late_s)
        fired = await kit.events("tick.tock")
        assert times(fired) == [0, 10, 20, 30, 40, 50]
        assert fired[0].occurred_at.timestamp() == 1_750_000_010


async def test_cron_keeps_to_its_zone_when_the_clocks_change(host: Path) -> None:
    clock = FakeClock(at("2026-03-27T12:00:00+00:00"))  # the clocks of Amsterdam go forward on the 29th
    async with scheduled(host, bus=BusKit(clock=clock)) as kit:
        await call(kit, "schedule_recurring", cron="0 9 * * *", zone="Europe/Amsterdam", topic="good.morning")
        for day, hour in ((28, 8), (29, 7), (30, 7)):
            await kit.kit.jump((at(f"2026-03-{day}T{hour:02}:00:00+00:00") - clock.now_us()) / 1e6)
        fired = await kit.events("good.morning")
        assert [event.occurred_at.isoformat() for event in fired] == [
            "2026-03-28T08:00:00+00:00",
            "2026-03-29T07:00:00+00:00",
            "2026-03-30T07:00:00+00:00",
        ]


async def test_until_is_the_last_instant(host: Path) -> None:
    async with scheduled(host) as kit:
        await call(kit, "schedule_recurring", every_seconds=10, until_iso="2025-06-15T15:07:10Z", topic="tick.tock")
        for _ in range(5):
            await kit.kit.jump(10)
        assert times(await kit.events("tick.tock")) == [0, 10, 20]  # 15:06:50, 15:07:00 and 15:07:10
        [over] = (await call(kit, "schedule_list", include_ended=True))["schedules"]
        assert over["state"] == "done"
        assert "next_fire_at" not in over


async def test_what_recurs_and_was_slept_through_fires_at_most_once(host: Path) -> None:
    async with scheduled(host) as kit:
        await call(kit, "schedule_recurring", every_seconds=600, topic="tick.tock")
        await kit.kit.jump(3610)  # the machine slept: the last time was ten seconds ago
        assert times(await kit.events("tick.tock")) == [0]
        await kit.kit.jump(600 * 5 + 300)  # the last time was too long ago
        assert len(await kit.events("tick.tock")) == 1
        await kit.kit.jump(300)
        assert times(await kit.events("tick.tock")) == [0, 3600]
        [entry] = (await call(kit, "schedule_list"))["schedules"]
        assert (entry["fires"], entry["skipped"]) == (2, 2)


# --- restart ----------------------------------------------------------------------------------------------------------


async def test_after_a_restart_overdue_one_shots_fire_once_and_recurring_ones_go_on(host: Path, tmp_path: Path) -> None:
    clock = FakeClock()
    async with scheduled(host, bus=BusKit(tmp_path / "data", clock=clock)) as kit:
        await call(kit, "schedule_once", delay_seconds=60, topic="once.due")
        await call(kit, "schedule_once", delay_seconds=5000, topic="once.later")
        await call(kit, "schedule_recurring", every_seconds=100, topic="tick.tock")
        await call(kit, "schedule_recurring", cron="*/5 * * * *", topic="cron.due")
        await kit.kit.jump(30)
    clock.advance(1000)
    async with scheduled(host, bus=BusKit(tmp_path / "data", clock=clock)) as kit:
        await kit.settle()
        assert len(await kit.events("once.due")) == 1
        assert await kit.events("tick.tock") == await kit.events("cron.due") == await kit.events("once.later") == []
        await kit.kit.jump(70)  # 1100 seconds after it was made
        [tick] = await kit.events("tick.tock")
        assert tick.occurred_at.timestamp() == 1_750_001_100
        assert len(await kit.events("once.due")) == 1
        skipped = {one["topic"]: one["skipped"] for one in (await call(kit, "schedule_list"))["schedules"]}
        assert skipped["tick.tock"] == skipped["cron.due"] == 1


@pytest.mark.parametrize("every", [None, 60.0])
async def test_a_crash_between_fire_and_record_fires_once(
    host: Path, monkeypatch: pytest.MonkeyPatch, every: float | None
) -> None:
    async with scheduled(host) as kit:
        if every is None:
            await call(kit, "schedule_once", delay_seconds=60, topic="tick.tock")
        else:
            await call(kit, "schedule_recurring", every_seconds=every, topic="tick.tock")
        reached = asyncio.Event()

        async def die(*_: Any, **__: Any) -> None:
            reached.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patched:
            patched.setattr(Schedules, "_move", die)
            await kit.kit.jump(60)
            await asyncio.wait_for(reached.wait(), 60)
        await kit.crash()
        await kit.settle()
        assert len(await kit.events("tick.tock")) == 1
        await kit.kit.jump(30)
        assert len(await kit.events("tick.tock")) == 1
        await kit.kit.jump(30)
        assert len(await kit.events("tick.tock")) == (1 if every is None else 2)


async def test_a_schedule_that_is_changed_after_its_fire_was_published_does_not_fire_again(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scheduled(host) as kit:
        made = await call(kit, "schedule_once", delay_seconds=60, topic="once.due", payload={"n": 1})
        reached = asyncio.Event()

        async def die(*_: Any, **__: Any) -> None:
            reached.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patched:
            patched.setattr(Schedules, "_move", die)
            await kit.kit.jump(60)
            await asyncio.wait_for(reached.wait(), 60)
        await kit.kernel.schedules.update(made["schedule_id"], payload={"n": 2})
        await kit.crash()
        await kit.settle()
        assert await kit.payloads("once.due") == [{"n": 1}]
        assert (await kit.kernel.schedules.get(made["schedule_id"])).state == "done"


async def test_two_hosts_fire_once(tmp_path: Path) -> None:
    clock = FakeClock()
    async with BusKit(tmp_path / "data", clock=clock) as kit:
        other = EventBus(tmp_path / "data", clock=clock)
        both = [Schedules(kit.bus), Schedules(other)]
        await both[0].create("once.due", {}, made_by="test", delay_s=60)
        await both[1].create("tick.tock", {}, made_by="test", every_s=10)
        loops = [asyncio.create_task(one.run()) for one in both]
        await kit.settle()
        for _ in range(6):
            await kit.jump(10)
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await other.stop()
        topics = [event.topic for event in await kit.events()]
        assert sorted(topics) == ["once.due", *["tick.tock"] * 6]
        fires = {entry.topic: entry.fires for entry in await both[0].entries(ended=True)}
        assert fires == {"once.due": 1, "tick.tock": 6}


# --- changing ---------------------------------------------------------------------------------------------------------


async def test_pause_and_go_on(host: Path) -> None:
    async with scheduled(host) as kit:
        once = await call(kit, "schedule_once", delay_seconds=60, topic="once.due")
        tick = await call(kit, "schedule_recurring", every_seconds=60, topic="tick.tock")
        for made in (once, tick):
            paused = await call(kit, "schedule_update", schedule_id=made["schedule_id"], paused=True)
            assert paused["state"] == "paused"
        await kit.kit.jump(90)
        assert await kit.events("once.due") == await kit.events("tick.tock") == []
        for made in (once, tick):
            await call(kit, "schedule_update", schedule_id=made["schedule_id"], paused=False)
        await kit.settle()
        assert len(await kit.events("once.due")) == 1
        assert await kit.events("tick.tock") == []
        await kit.kit.jump(30)
        [event] = await kit.events("tick.tock")
        assert event.occurred_at.timestamp() == 1_750_000_120


async def test_update_changes_when_and_what(host: Path) -> None:
    async with scheduled(host) as kit:
        made = await call(kit, "schedule_once", delay_seconds=60, text="tea")
        name = made["schedule_id"]
        await call(kit, "schedule_update", schedule_id=name, delay_seconds=120, text="coffee")
        await kit.kit.jump(60)
        assert kit.kernel.instance("chat").sent == []
        await kit.kit.jump(60)
        assert [message.text for message in kit.kernel.instance("chat").sent] == ["coffee"]
        with pytest.raises(Conflict, match="is done"):
            await call(kit, "schedule_update", schedule_id=name, text="water")
        tick = await call(kit, "schedule_recurring", every_seconds=100, topic="tick.tock")
        changed = await call(kit, "schedule_update", schedule_id=tick["schedule_id"], until_iso="2025-06-15T16:00:00Z")
        assert (changed["every_seconds"], changed["next_fire_at"]) == (100, tick["next_fire_at"])
        with pytest.raises(Invalid, match="never comes"):
            await call(kit, "schedule_update", schedule_id=tick["schedule_id"], until_iso="2020-01-01T00:00:00Z")
        with pytest.raises(NotFound, match="no schedule"):
            await call(kit, "schedule_update", schedule_id="nobody", paused=True)


async def test_cancel_ends_it(host: Path) -> None:
    async with scheduled(host) as kit:
        made = await call(kit, "schedule_recurring", every_seconds=10, topic="tick.tock")
        await kit.kit.jump(10)
        gone = await call(kit, "schedule_cancel", schedule_id=made["schedule_id"])
        assert (gone["state"], gone["purged"]) == ("cancelled", 0)
        assert (await call(kit, "schedule_cancel", schedule_id=made["schedule_id"]))["purged"] == 0
        await kit.kit.jump(100)
        assert len(await kit.events("tick.tock")) == 1
        with pytest.raises(NotFound):
            await call(kit, "schedule_cancel", schedule_id="nobody")


async def test_cancel_purges_queued_fires(host: Path) -> None:
    async with scheduled(host) as kit:
        handled, gate = [], asyncio.Event()

        async def slow(event: Event) -> None:
            handled.append(event.occurred_at.timestamp())
            await gate.wait()

        kit.kit.bus.subscribe("tick.tock", slow, "slow", ordering="strict", timeout=3600)
        made = await call(kit, "schedule_recurring", every_seconds=10, topic="tick.tock")
        other = await call(kit, "schedule_once", delay_seconds=30, topic="tick.tock")
        for _ in range(3):
            await kit.kit.jump(10)
        assert len(await kit.events("tick.tock")) == 4
        assert len(handled) == 1
        gone = await call(kit, "schedule_cancel", schedule_id=made["schedule_id"])
        assert gone["purged"] == 3
        gate.set()
        await kit.settle()
        assert len(handled) == 2  # what was running, and the other schedule's
        statuses = {row[5] for row in await kit.kit.journal() if row[2] == "tick.tock"}
        assert statuses == {"done"}
        assert (await call(kit, "schedule_cancel", schedule_id=other["schedule_id"]))["purged"] == 0


async def test_cancel_purges_a_fire_that_waits_for_its_retry_even_after_a_restart(host: Path, tmp_path: Path) -> None:
    clock, handled = FakeClock(), []

    async def failing(event: Event) -> None:
        handled.append(event.attempt)
        raise ConnectionError("away")

    patience = RetryPolicy(max_attempts=9, backoff_s=100, jitter=0)
    async with scheduled(host, bus=BusKit(tmp_path / "data", clock=clock)) as kit:
        kit.kit.bus.subscribe("once.due", failing, "failing", retry=patience)
        made = await call(kit, "schedule_once", delay_seconds=10, topic="once.due")
        await kit.kit.jump(10)
        assert handled == [1]
        assert (await call(kit, "schedule_cancel", schedule_id=made["schedule_id"]))["purged"] == 1
    async with scheduled(host, bus=BusKit(tmp_path / "data", clock=clock)) as kit:
        kit.kit.bus.subscribe("once.due", failing, "failing", retry=patience)
        await kit.kit.jump(1000)
        assert handled == [1]
        assert await kit.kit.dead() == []
