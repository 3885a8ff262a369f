"""Timers: once, at an interval, or by cron in a zone; each fire is one message, without drift."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from postbus.inbox import Inboxes, Timer
from postbus.log import SqliteLog
from postbus.model import Conflict, Invalid, NotFound
from postbus.testing import FakeClock
from tests.inbox.post import TENANT, Post, numbers


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1_000_000)


@pytest.fixture
async def clockwork(folder: Path) -> Any:
    """A post office on the first of March 2026, at noon."""
    async with Post(folder, clock=FakeClock(at("2026-03-01T12:00:00Z"))) as post:
        await post.agent()
        yield post


async def add(post: Post, name: str = "t", message: Any = "tick", **settings: Any) -> Timer:
    return await post.inboxes.timers.add(TENANT, Timer(id=name, agent="ann", message=message, **settings))


async def fires(post: Post) -> list[str]:
    """When the fires were due, in UTC."""
    items = await post.read(limit=1000)
    return [item.event.occurred_at.astimezone(UTC).strftime("%m-%dT%H:%M:%S") for item in items if item.event]


async def test_once_at_an_instant(clockwork: Post) -> None:
    made = await add(clockwork, at="2026-03-01T13:00:00+01:00", message={"do": 1})
    assert made.due_at_us == at("2026-03-01T12:00:00Z")
    await add(clockwork, "later", at="2026-03-01T12:00:10Z", message="later")
    await clockwork.advance(9)
    assert numbers(await clockwork.read()) == [{"do": 1}]
    await clockwork.advance(1)
    assert numbers(await clockwork.read()) == [{"do": 1}, "later"]
    await clockwork.advance(3600)
    assert len(await clockwork.read()) == 2
    done = await clockwork.inboxes.timers.get(TENANT, "later")
    assert (done.fired, done.due_at_us) == (1, None)


async def test_an_instant_that_is_over_fires_at_once(clockwork: Post) -> None:
    await add(clockwork, at="2020-01-01T00:00:00Z")
    await clockwork.advance(1)
    assert numbers(await clockwork.read()) == ["tick"]


async def test_an_interval_does_not_drift(clockwork: Post) -> None:
    await add(clockwork, every=60)
    for step in (60.4, 59.9, 60.7, 59.5, 60.3):  # whoever looks comes a little late each time
        await clockwork.advance(step)
    assert await fires(clockwork) == [f"03-01T12:0{minute}:00" for minute in range(1, 6)]


async def test_what_was_due_several_times_fires_once_and_keeps_its_beat(clockwork: Post) -> None:
    await add(clockwork, every=60)
    await clockwork.advance(60 * 10 + 25)
    assert await fires(clockwork) == ["03-01T12:01:00"]
    await clockwork.advance(35)
    assert await fires(clockwork) == ["03-01T12:01:00", "03-01T12:11:00"]


async def test_cron_follows_the_clock_on_the_wall_through_summer_time(clockwork: Post) -> None:
    """Amsterdam moves from UTC+1 to UTC+2 in the night to the 29th of March."""
    await add(clockwork, cron="30 8 * * *", zone="Europe/Amsterdam")
    clockwork.clock.set_wall(at("2026-03-28T00:00:00Z"))
    await clockwork.advance(1)  # the one of the second of March, late
    for _ in range(3 * 24):
        await clockwork.advance(3600)
    assert (await fires(clockwork))[1:] == ["03-28T07:30:00", "03-29T06:30:00", "03-30T06:30:00"]


async def test_cron_in_the_hour_that_is_skipped_fires_that_day(clockwork: Post) -> None:
    clockwork.clock.set_wall(at("2026-03-28T12:00:00Z"))
    await add(clockwork, cron="30 2 * * *", zone="Europe/Amsterdam")
    for _ in range(2 * 24):
        await clockwork.advance(3600)
    found = await fires(clockwork)
    assert len(found) == 2, "no day without a fire, none with two"
    assert found[0].startswith("03-29T0")
    assert found[1] == "03-30T00:30:00"


async def test_cron_in_the_hour_that_comes_twice_fires_once(clockwork: Post) -> None:
    clockwork.clock.set_wall(at("2026-10-24T12:00:00Z"))
    await add(clockwork, cron="30 2 * * *", zone="Europe/Amsterdam")
    for _ in range(2 * 24):
        await clockwork.advance(3600)
    found = await fires(clockwork)
    assert [moment[:5] for moment in found] == ["10-25", "10-26"]


async def test_until_is_the_end(clockwork: Post) -> None:
    await add(clockwork, every=60, until="2026-03-01T12:02:30Z")
    for _ in range(5):
        await clockwork.advance(60)
    assert await fires(clockwork) == ["03-01T12:01:00", "03-01T12:02:00"]
    assert (await clockwork.inboxes.timers.get(TENANT, "t")).due_at_us is None


async def test_a_paused_timer_is_silent_and_goes_on_with_its_beat(clockwork: Post) -> None:
    await add(clockwork, every=60)
    await clockwork.advance(60)
    paused = await clockwork.inboxes.timers.pause(TENANT, "t")
    assert paused.due_at_us is None
    await clockwork.advance(150)
    resumed = await clockwork.inboxes.timers.pause(TENANT, "t", resume=True)
    assert resumed.due_at_us == at("2026-03-01T12:04:00Z")
    await clockwork.advance(30)
    assert await fires(clockwork) == ["03-01T12:01:00", "03-01T12:04:00"]


async def test_a_single_fire_that_was_paused_away_comes_when_it_is_resumed(clockwork: Post) -> None:
    await add(clockwork, at="2026-03-01T12:01:00Z")
    await clockwork.inboxes.timers.pause(TENANT, "t")
    await clockwork.advance(600)
    assert await clockwork.read() == []
    await clockwork.inboxes.timers.pause(TENANT, "t", resume=True)
    await clockwork.advance(1)
    assert len(await clockwork.read()) == 1
    await clockwork.inboxes.timers.pause(TENANT, "t", resume=True)
    await clockwork.advance(60)
    assert len(await clockwork.read()) == 1


async def test_each_fire_happens_once_whoever_looks(clockwork: Post, folder: Path) -> None:
    await add(clockwork, every=60)
    other = SqliteLog.open(folder, clock=clockwork.clock)
    try:
        async with Inboxes(other, clockwork.clock):
            for _ in range(5):
                await clockwork.advance(60)
    finally:
        await other.close()
    assert await fires(clockwork) == [f"03-01T12:0{minute}:00" for minute in range(1, 6)]


async def test_a_fire_and_its_message_are_one_write(clockwork: Post) -> None:
    """Where the process dies between two writes, the fire is lost or doubled; there is only one."""
    await add(clockwork, every=60)
    await clockwork.alter("CREATE TRIGGER no_items BEFORE INSERT ON inbox_rows BEGIN SELECT RAISE(ABORT, 'no'); END")
    await clockwork.advance(60)
    assert (await clockwork.inboxes.timers.get(TENANT, "t")).fired == 0
    assert await clockwork.query("SELECT count(*) FROM events") == [(0,)]
    await clockwork.alter("DROP TRIGGER no_items")
    await clockwork.advance(1)
    assert await fires(clockwork) == ["03-01T12:01:00"]


async def test_a_timer_made_again_under_its_old_name_fires_again(clockwork: Post) -> None:
    for message in ("first", "second", "second"):
        await add(clockwork, at="2026-03-01T12:00:00Z", message=message)
        await clockwork.advance(1)
        await clockwork.inboxes.timers.remove(TENANT, "t")
    assert numbers(await clockwork.read()) == ["first", "second", "second"]


async def test_timers_are_listed_and_removed(clockwork: Post) -> None:
    await clockwork.agent("bob")
    await add(clockwork, "b", every=60)
    await clockwork.inboxes.timers.add(TENANT, Timer(id="a", agent="bob", message=1, cron="0 9 * * 1-5"))
    timers = clockwork.inboxes.timers
    assert [timer.id for timer in await timers.all(TENANT)] == ["a", "b"]
    assert [timer.id for timer in await timers.all(TENANT, "ann")] == ["b"]
    assert await timers.all("other.tenant") == []
    await timers.remove(TENANT, "b")
    for work in (timers.remove(TENANT, "b"), timers.get(TENANT, "b"), timers.pause(TENANT, "b")):
        with pytest.raises(NotFound):
            await work
    await clockwork.advance(3600)
    assert await clockwork.read() == []


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, Invalid),
        ({"every": 60, "cron": "* * * * *"}, Invalid),
        ({"every": 59.9}, Invalid),
        ({"every": float("nan")}, Invalid),
        ({"every": -60}, Invalid),
        ({"every": 1e12}, Invalid),
        ({"at": "tomorrow"}, Invalid),
        ({"at": "2026-03-01T12:00:00"}, Invalid),
        ({"at": "2027-01-01T00:00:00Z", "until": "2026-06-01T00:00:00Z"}, Invalid),
        ({"cron": "* * * *"}, Invalid),
        ({"cron": "* * * * * *"}, Invalid),
        ({"cron": "61 * * * *"}, Invalid),
        ({"cron": "0 0 30 2 *"}, Invalid),
        ({"cron": "* * * * *", "zone": "Mars/Olympus"}, Invalid),
        ({"cron": "* * * * *", "zone": "../../etc/passwd"}, Invalid),
        ({"cron": "* * * * *", "zone": ""}, Invalid),
        ({"every": 60, "until": "2026-03-01T12:00:59Z"}, Invalid),
        ({"every": 60, "until": "soon"}, Invalid),
        ({"every": 60, "message": " "}, Invalid),
        ({"every": 60, "message": None}, Invalid),
        ({"every": 60, "id": "no spaces"}, Invalid),
        ({"every": 60, "agent": "nobody"}, NotFound),
        ({"every": 60, "id": "taken"}, Conflict),
    ],
)
async def test_a_timer_that_cannot_work_is_refused(
    clockwork: Post, settings: dict[str, Any], error: type[Exception]
) -> None:
    await add(clockwork, "taken", every=60)
    facts = {"id": "t", "agent": "ann", "message": "tick"} | settings
    with pytest.raises(error):
        await clockwork.inboxes.timers.add(TENANT, Timer(**facts))
    assert [timer.id for timer in await clockwork.inboxes.timers.all(TENANT)] == ["taken"]
