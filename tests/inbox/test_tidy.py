"""What ends: acked items after a day, subscriptions at their end, events whose retention is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from postbus.bus.housekeeping import keep_house
from postbus.inbox import Cleanup
from postbus.model import Invalid, Retention
from tests.inbox.post import EARLIEST, TENANT, Post, numbers

DAY_S = 86_400


async def tidied(post: Post) -> None:
    await post.advance(61)


# --- acked items ------------------------------------------------------------------------------------------------------


async def test_acked_items_stay_for_a_day_and_never_come_back(post: Post) -> None:
    await post.subscribe("order.*", "orders", start=EARLIEST)
    await post.publish("order.paid", 1, 2, 3)
    await post.settle()
    await post.ack(items=["itm_1", "itm_3"])
    await post.advance(DAY_S - 120)
    await tidied(post)
    assert numbers(await post.read(include_acked=True)) == [1, 2, 3]
    await post.advance(120)
    await tidied(post)
    assert numbers(await post.read(include_acked=True)) == [2]
    await post.inboxes.reset(TENANT, "orders", EARLIEST)
    await post.publish("order.paid", 4)
    assert numbers(await post.read(include_acked=True)) == [2, 4]
    await post.subscribe(">", "another", start=EARLIEST)
    assert numbers(await post.read(include_acked=True)) == [2, 4]


async def test_unacked_items_stay_for_ever(post: Post) -> None:
    await post.subscribe("order.*", "orders")
    await post.publish("order.paid", 1)
    await post.advance(400 * DAY_S)
    await tidied(post)
    assert numbers(await post.read()) == [1]


async def test_many_items_are_removed_in_small_steps(post: Post) -> None:
    await post.subscribe("order.*", "orders")
    for _ in range(26):
        await post.publish("order.paid", *range(100))
    await post.settle()
    assert await post.ack(everything=True) == 2600
    await post.advance(2 * DAY_S)
    await tidied(post)
    assert await post.query("SELECT count(*) FROM inbox_rows") == [(0,)]
    assert await post.query("SELECT count(*) FROM inbox_seen") == [(2600,)]
    await post.inboxes.reset(TENANT, "orders", EARLIEST)
    assert await post.read(include_acked=True) == []


# --- subscriptions ----------------------------------------------------------------------------------------------------


async def names(post: Post) -> list[str]:
    await post.settle()
    return [one.id for one in await post.inboxes.agents.subscriptions(TENANT)]


async def test_a_subscription_ends_at_its_instant_and_its_items_stay(post: Post) -> None:
    from postbus.model import instant  # noqa: PLC0415 - kept beside its use

    end = instant(post.clock.now_us() + 60_000_000).isoformat()
    await post.subscribe("order.*", "short", cleanup=Cleanup(at=end))
    await post.publish("order.paid", 1)
    await post.advance(59)
    assert await names(post) == ["short"]
    await post.advance(1)
    assert await names(post) == []
    await post.publish("order.paid", 2)
    await post.advance(1)
    assert numbers(await post.read()) == [1]
    assert await post.query("SELECT * FROM cursors WHERE consumer = 'short'") == []


async def test_a_subscription_ends_some_time_after_its_last_event(post: Post) -> None:
    cleanup = Cleanup(on_terminal={"payload": {"state": "closed"}}, grace_s=100)
    await post.subscribe("issue.*", "issue", cleanup=cleanup)
    await post.publish("talk.idle", {"state": "closed"})  # none of its events
    await post.advance(200)
    assert await names(post) == ["issue"]
    await post.publish("issue.change", {"state": "closed"})
    await post.settle()
    post.clock.advance(90)
    await post.publish("issue.change", {"state": "reopened"}, {"state": "closed"})  # the first one decides
    await post.advance(9)
    assert await names(post) == ["issue"]
    await post.advance(1)
    assert await names(post) == []
    assert len(await post.read()) == 3


async def test_the_end_is_known_as_soon_as_the_last_event_is_an_item(folder: Path) -> None:
    """One write: a process that dies after it has not forgotten the end."""
    async with Post(folder) as post:
        await post.agent()
        await post.subscribe("issue.*", "issue", cleanup=Cleanup(on_terminal={"payload": {"over": True}}, grace_s=5))
        await post.publish("issue.change", {"over": True})
        await post.settle()
        rows = await post.query("SELECT json_extract(settings, '$.ends_at_us') FROM subscription_registry")
        assert rows == [(post.clock.now_us() + 5_000_000,)]
        clock = post.clock
    async with Post(folder, clock=clock) as post:
        await post.advance(6)
        assert await names(post) == []


@pytest.mark.parametrize(
    "cleanup",
    [
        Cleanup(),
        Cleanup(at="2030-01-01T00:00:00Z", on_terminal={}),
        Cleanup(at="whenever"),
        Cleanup(on_terminal={"expr": "payload."}),
        Cleanup(on_terminal={}, grace_s=-1),
        Cleanup(on_terminal={}, grace_s=float("nan")),
    ],
)
async def test_a_cleanup_that_cannot_work_is_refused(post: Post, cleanup: Cleanup) -> None:
    with pytest.raises(Invalid):
        await post.subscribe("issue.*", "issue", cleanup=cleanup)
    assert await names(post) == []


# --- retention --------------------------------------------------------------------------------------------------------


async def filled(post: Post, **settings: Any) -> str:
    stream = await post.stream("short", retention=Retention(count=2), **settings)
    await post.subscribe(stream, "all")
    await post.publish(stream, *range(10))
    await post.settle()
    return stream


async def test_an_item_that_is_not_acked_keeps_its_event(post: Post) -> None:
    stream = await filled(post)
    await post.ack(through="itm_3")
    trimmed = await post.log.trim(stream)
    assert (trimmed.removed, trimmed.held_back_by) == (3, ("inbox of ann",))
    assert numbers(await post.read()) == list(range(3, 10))
    await post.ack(items=[f"itm_{number:x}" for number in range(5, 11)])
    assert (await post.log.trim(stream)).removed == 0, "the fourth is still not acked"
    await post.ack(everything=True)
    assert (await post.log.trim(stream)).removed == 5


async def test_housekeeping_says_who_keeps_events(post: Post) -> None:
    await filled(post)
    await post.ack(through="itm_3")
    dry = (await keep_house(post.log, post.clock, dry_run=True))[0]
    assert (dry.removed, dry.held_back_by) == (3, ("inbox of ann",))
    done = (await keep_house(post.log, post.clock))[0]
    assert (done.removed, done.held_back_by) == (3, ("inbox of ann",))
    assert numbers(await post.read()) == list(range(3, 10))


async def test_a_long_backlog_is_trimmed_up_to_the_first_item_that_is_not_acked(post: Post) -> None:
    stream = await post.stream("long", retention=Retention(count=1))
    await post.subscribe(stream, "all")
    for _ in range(30):
        await post.publish(stream, *range(100))
    await post.settle()
    await post.ack(through=f"itm_{2500:x}")
    trimmed = await post.log.trim(stream)
    assert (trimmed.removed, trimmed.held_back_by) == (2500, ("inbox of ann",))


async def test_where_retention_beats_consumers_an_item_expires(post: Post) -> None:
    stream = await filled(post, retention_beats_consumers=True)
    await post.ack(items=["itm_1"])
    assert (await post.log.trim(stream)).removed == 8
    items = await post.read()
    assert [item.event is None for item in items] == [True] * 7 + [False] * 2
    states = [(await post.inboxes.items.receipts(TENANT, f"{stream}/0/{number}"))[0].state for number in (0, 1, 8)]
    assert states == ["acked", "expired", "read"]
    assert await post.ack(everything=True) == 9
