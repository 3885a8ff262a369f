from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from postbus.log import SqliteLog
from postbus.model import Invalid
from postbus.schedule import schedule
from postbus.sources import SourceHost, Sources
from postbus.testing import FakeClock
from tests.sources.conftest import TENANT, events


def us(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1e6)


class Timer:
    def __init__(self, log: SqliteLog, clock: FakeClock) -> None:
        self.log = log
        self.clock = clock
        self.host = SourceHost(log, clock)
        self.sources = Sources(log, TENANT)

    async def add(self, **settings: Any) -> None:
        await self.sources.add("tick", "timer", settings)

    async def fired(self) -> list[str]:
        """Ask twice, and return all fire times so far."""
        await self.host.poll(TENANT, "tick")
        await self.host.poll(TENANT, "tick")
        return [f"{event.occurred_at:%d %H:%M:%S}" for event in await events(self.log, "tick")]


@pytest.fixture
def timer(fake_log: SqliteLog, clock: FakeClock) -> Timer:
    clock.set_wall(us("2026-03-01T12:00:00+00:00"))
    return Timer(fake_log, clock)


async def test_at_fires_once_with_its_payload(timer: Timer) -> None:
    await timer.add(at="2026-03-01T12:00:30Z", payload={"say": "hi"})
    assert await timer.fired() == []
    timer.clock.advance(30)
    assert await timer.fired() == ["01 12:00:30"]
    timer.clock.advance(100_000)
    assert await timer.fired() == ["01 12:00:30"]
    event = (await events(timer.log, "tick"))[0]
    assert (event.topic, event.payload, event.trust) == ("timer.fired", {"say": "hi"}, "trusted")


@pytest.mark.parametrize("at", ["2026-03-01T12:00:30Z", "2020-01-01T00:00:00Z"])
async def test_an_overdue_one_shot_fires_once(timer: Timer, at: str) -> None:
    await timer.add(at=at)
    timer.clock.advance(86_400)
    assert len(await timer.fired()) == 1


async def test_every_does_not_drift(timer: Timer) -> None:
    await timer.add(every_s=10)
    assert await timer.fired() == []
    for step in (10.4, 9.9, 10.9, 9.0):  # polled at 10.4, 20.3, 31.2, 40.2
        timer.clock.advance(step)
        await timer.fired()
    assert await timer.fired() == ["01 12:00:10", "01 12:00:20", "01 12:00:30", "01 12:00:40"]


async def test_missed_recurring_times_are_passed_over(timer: Timer) -> None:
    await timer.add(cron="*/5 * * * *")
    timer.clock.advance(3 * 3600 + 130)  # 15:02:10: nothing is due within the last minute
    assert await timer.fired() == []
    timer.clock.advance(170)  # 15:05:00
    assert await timer.fired() == ["01 15:05:00"]


async def test_a_short_gap_misses_nothing(timer: Timer) -> None:
    await timer.add(cron="* * * * *")
    timer.clock.advance(119)
    assert await timer.fired() == ["01 12:01:00"]


async def test_a_wall_clock_that_jumps_back_fires_nothing_twice(timer: Timer) -> None:
    await timer.add(every_s=60)
    timer.clock.advance(60)
    assert await timer.fired() == ["01 12:01:00"]
    timer.clock.set_wall(us("2026-03-01T11:59:00+00:00"))
    assert await timer.fired() == ["01 12:01:00"]
    timer.clock.advance(180)
    assert await timer.fired() == ["01 12:01:00", "01 12:02:00"]


async def test_a_removed_and_added_timer_begins_anew(timer: Timer) -> None:
    await timer.add(at="2026-03-01T12:00:30Z")
    timer.clock.advance(60)
    assert len(await timer.fired()) == 1
    await timer.sources.remove("tick")
    await timer.add(at="2026-03-01T12:01:30Z")
    timer.clock.advance(60)
    assert await timer.fired() == ["01 12:00:30", "01 12:01:30"]


@pytest.mark.parametrize(
    ("after", "wanted"),
    [
        ("2026-03-28T12:00:00+00:00", "2026-03-29T07:00:00+00:00"),  # summer time begins: 09:00 is 07:00 UTC
        ("2026-03-27T12:00:00+00:00", "2026-03-28T08:00:00+00:00"),
        ("2026-10-24T12:00:00+00:00", "2026-10-25T08:00:00+00:00"),  # and ends
    ],
)
def test_cron_follows_its_zone(after: str, wanted: str) -> None:
    following = schedule(None, None, "0 9 * * *", "Europe/Berlin", 0)
    found = following(us(after))
    assert found is not None
    assert datetime.fromtimestamp(found / 1e6, UTC) == datetime.fromisoformat(wanted)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"at": "tomorrow"},
        {"at": "2026-01-01T00:00:00"},
        {"every_s": 0.5},
        {"every_s": -3},
        {"every_s": 10, "cron": "* * * * *"},
        {"cron": "* * * *"},
        {"cron": "* * * * * *"},
        {"cron": "61 * * * *"},
        {"cron": "0 0 31 2 *"},
        {"cron": "* * * * *", "zone": "Mars/Base"},
        {"cron": "* * * * *", "zone": "../etc/passwd"},
    ],
)
async def test_bad_settings_are_refused(timer: Timer, settings: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        await timer.add(**settings)
    assert await timer.sources.all() == []


async def test_a_running_host_fires_at_the_time(timer: Timer) -> None:
    await timer.add(every_s=5)
    async with timer.host:
        for _ in range(400):
            timer.clock.advance(0.25)
            await asyncio.sleep(0.005)
            if len(await events(timer.log, "tick")) >= 3:
                break
    times = [f"{event.occurred_at:%H:%M:%S}" for event in await events(timer.log, "tick")]
    assert times[:3] == ["12:00:05", "12:00:10", "12:00:15"]
