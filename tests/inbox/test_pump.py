"""Events become items: exactly once per agent and event, in order, with the place that was read in one transaction."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from postbus.inbox import Inboxes
from postbus.inbox.pump import BATCH
from postbus.model import Conflict, Invalid, InvalidFilter, NotFound, OffsetOutOfRange, Start, StartPolicy
from tests.inbox.post import EARLIEST, LATEST, TENANT, Post, numbers, until

JOURNAL = f"{TENANT}.journal"


async def test_matching_events_become_items_in_order_and_others_do_not(post: Post) -> None:
    await post.subscribe("order.*", "orders")
    for number in range(10):
        await post.publish("order.paid" if number % 2 else "talk.idle", number)
    items = await post.read()
    assert numbers(items) == [1, 3, 5, 7, 9]
    assert [item.sequence for item in items] == [1, 2, 3, 4, 5]


async def test_an_item_carries_the_facts_of_its_event_and_why_it_is_there(post: Post) -> None:
    await post.subscribe("issue.*", "issues", filter={"metadata": {"repo": "a/b"}, "expr": "payload.n > 1"})
    handle = {"kind": "github", "target": "a/b#7"}
    (receipt,) = await post.publish(
        "issue.opened", {"n": 2}, metadata={"repo": "a/b"}, key="k", correlation_id="c", delivery_handle=handle
    )
    (item,) = await post.read()
    assert item.event is not None
    assert (item.event.id, item.event.topic, item.event.payload, item.event.key) == (
        receipt.id,
        "issue.opened",
        {"n": 2},
        "k",
    )
    assert item.event.delivery_handle == handle
    assert (item.event.correlation_id, item.event.trust, item.event.source) == ("c", "trusted", "test")
    assert item.matched_by == ("issues",)
    assert item.match_reason == "topic issue.opened matches issue.* and its metadata filter, expr"


async def test_an_event_that_two_subscriptions_match_is_one_item(post: Post) -> None:
    await post.subscribe("order.*", "by-topic")
    await post.subscribe(">", "by-payload", filter={"payload": {"n": 1}})
    await post.publish("order.paid", {"n": 1}, {"n": 2})
    first, second = await post.read()
    assert first.matched_by == ("by-topic", "by-payload")
    assert second.matched_by == ("by-topic",)


async def test_a_later_subscription_that_matches_an_old_item_is_named_on_it(post: Post) -> None:
    await post.subscribe("order.*", "first")
    await post.publish("order.paid", 1)
    await post.settle()
    await post.subscribe("order.paid", "second", start=EARLIEST)
    (item,) = await post.read()
    assert item.matched_by == ("first", "second")


async def test_a_reset_gives_nothing_twice(post: Post) -> None:
    await post.subscribe("order.*", "orders", start=EARLIEST)
    await post.publish("order.paid", 1, 2, 3)
    before = await post.read()
    await post.ack(items=[before[1].id])
    moved = await post.inboxes.reset(TENANT, "orders", EARLIEST)
    assert [consumer.cursors[0].next_offset for consumer in moved] == [0]
    await post.publish("order.paid", 4)
    assert numbers(await post.read()) == [1, 3, 4]
    assert numbers(await post.read(include_acked=True)) == [1, 2, 3, 4]


async def test_a_reset_brings_what_was_before_the_start(post: Post) -> None:
    await post.publish("order.paid", 1, 2)
    await post.subscribe("order.*", "orders")
    await post.publish("order.paid", 3)
    assert numbers(await post.read()) == [3]
    await post.inboxes.reset(TENANT, "orders", EARLIEST)
    assert numbers(await post.read()) == [3, 1, 2]


async def test_a_reset_to_the_end_passes_over_what_waits(folder: Path) -> None:
    async with Post(folder, run=False) as post:
        await post.agent()
        await post.subscribe("order.*", "orders")
        await post.publish("order.paid", 1, 2)
        await post.inboxes.reset(TENANT, "orders", LATEST)
        await post.inboxes.start()
        await post.publish("order.paid", 3)
        assert numbers(await post.read()) == [3]


async def test_each_agent_has_its_own_items(post: Post) -> None:
    await post.agent("bob")
    await post.subscribe("order.*", "a", "ann")
    await post.subscribe("order.*", "b", "bob", filter={"expr": "payload >= 2"})
    await post.publish("order.paid", 1, 2, 3)
    ann, bob = await post.read("ann"), await post.read("bob")
    assert (numbers(ann), numbers(bob)) == ([1, 2, 3], [2, 3])
    assert [item.sequence for item in bob] == [1, 2]
    assert await post.ack("bob", everything=True) == 2
    assert numbers(await post.read("ann")) == [1, 2, 3]


async def test_tenants_do_not_see_each_other(post: Post) -> None:
    await post.agent("ann", "acme.prod")
    await post.inboxes.subscribe("acme.prod", "ann", ">", id="orders", start=EARLIEST)
    await post.subscribe(">", "orders", start=EARLIEST)
    await post.publish("order.paid", 1)
    assert numbers(await post.read()) == [1]
    assert await post.inboxes.items.read("acme.prod", "ann") == []


# --- where a subscription begins --------------------------------------------------------------------------------------


async def times(post: Post) -> int:
    """Publish 0, 1, 2 a minute apart; return when 1 was."""
    for number in range(3):
        await post.publish("order.paid", number)
        if number == 1:
            moment = post.clock.now_us()
        post.clock.advance(60)
    return moment


@pytest.mark.parametrize(
    ("policy", "pinned", "owed"),
    [("earliest", 0, [0, 1, 2, 3]), ("latest", 3, [3]), ("at_offset", 2, [2, 3]), ("at_time", 1, [1, 2, 3])],
)
async def test_the_start_is_pinned_and_returned(post: Post, policy: str, pinned: int, owed: list[int]) -> None:
    moment = await times(post)
    start = Start(
        policy=StartPolicy(policy),
        offset=2 if policy == "at_offset" else None,
        time_us=moment if policy == "at_time" else None,
    )
    made, places = await post.subscribe("order.*", "orders", streams=(JOURNAL,), start=start)
    assert made.start == start
    assert [(one.stream, one.cursors[0].next_offset) for one in places] == [(JOURNAL, pinned)]
    await post.publish("order.paid", 3)
    assert numbers(await post.read()) == owed


async def test_the_start_stays_pinned_while_nothing_runs(folder: Path) -> None:
    async with Post(folder, run=False) as post:
        await post.agent()
        await post.publish("order.paid", 1)
        await post.subscribe("order.*", "orders")
        await post.publish("order.paid", 2)
        assert await post.read() == []
        await post.inboxes.start()
        assert numbers(await post.read()) == [2]


async def test_a_stream_that_is_made_later_is_read_from_its_beginning(post: Post) -> None:
    await post.subscribe(f"{TENANT}.*", "all")
    await post.stream("late")
    await post.publish(f"{TENANT}.late", 1, 2)
    await post.advance(1)
    assert numbers(await post.read()) == [1, 2]
    lags = await post.inboxes.lag(TENANT, "all")
    assert [(lag.stream, lag.total) for lag in lags if lag.stream.endswith("late")] == [(f"{TENANT}.late", 0)]


async def test_a_stream_that_is_deleted_and_made_again_is_read_from_its_beginning(post: Post) -> None:
    stream = await post.stream("short")
    await post.subscribe(stream, "all", filter={"expr": "payload > 10"}, start=EARLIEST)
    await post.publish(stream, 1, 2, 3, 40)
    assert numbers(await post.read()) == [40]
    await post.log.delete_stream(stream)
    assert await post.read() == []
    await post.stream("short")
    await post.publish(stream, 50, 5)
    await post.advance(1)
    await post.advance(6)
    assert numbers(await post.read()) == [50]


async def test_all_partitions_are_read_and_each_key_stays_in_order(post: Post) -> None:
    stream = await post.stream("wide", partitions=4)
    await post.subscribe(stream, "all")
    for number in range(40):
        await post.publish(stream, number, key=f"k{number % 5}")
    found = numbers(await post.read())
    assert sorted(found) == list(range(40))
    for key in range(5):
        mine = [number for number in found if number % 5 == key]
        assert mine == sorted(mine)


async def test_dead_letters_and_direct_messages_are_only_for_those_who_ask_by_name(post: Post) -> None:
    await post.agent("bob")
    await post.subscribe(">", "everything", "bob")
    await post.stream("journal-dlq")
    await post.publish(f"{TENANT}.journal-dlq", "letter")
    await post.inboxes.send(TENANT, "ann", "for ann alone")
    await post.advance(6)
    assert await post.read("bob") == []
    assert numbers(await post.read("ann")) == ["for ann alone"]


# --- one transaction --------------------------------------------------------------------------------------------------


async def test_items_and_the_place_move_together(post: Post) -> None:
    """Whatever snapshot of the database is taken: items are there exactly up to the place that is saved."""
    await post.subscribe("order.*", "orders", start=EARLIEST)
    done = asyncio.Event()
    seen = set()

    async def look() -> None:
        query = (
            """SELECT (SELECT count(*) FROM inbox_rows), (SELECT next_offset FROM cursors WHERE consumer = 'orders')"""
        )
        while not done.is_set():
            count, place = (await post.query(query))[0]
            assert count == place
            seen.add(count)

    looking = asyncio.ensure_future(look())
    for start in range(0, 300, 10):
        await asyncio.gather(*(post.publish("order.paid", number) for number in range(start, start + 10)))
    await until(lambda: has(post, 300))
    done.set()
    await looking
    assert len(seen) > 2
    assert sorted(numbers(await post.read(limit=1000))) == list(range(300))


async def has(post: Post, count: int) -> bool:
    return await post.inboxes.items.unacked(TENANT, "ann") == count


async def test_acking_never_moves_a_place_and_a_place_waits_for_no_ack(post: Post) -> None:
    await post.subscribe("order.*", "orders", start=EARLIEST)
    await post.publish("order.paid", 1, 2)
    await post.settle()
    before = await post.place("orders")
    assert before == 2
    assert await post.ack(everything=True) == 2
    assert await post.place("orders") == before
    await post.publish("order.paid", 3)
    await post.settle()
    assert await post.place("orders") == 3


async def test_a_long_quiet_stretch_is_saved_in_the_end(post: Post) -> None:
    """Events that nobody matches cost no write each; the place follows."""
    await post.subscribe("order.*", "orders", start=EARLIEST)
    await post.publish("talk.idle", *range(50))
    await post.settle()
    assert await post.place("orders") == 0
    await post.advance(2)
    await until(lambda: stands(post, 50))
    assert (await post.inboxes.lag(TENANT, "orders"))[0].total == 0


async def stands(post: Post, offset: int) -> bool:
    return await post.place("orders") == offset


async def test_stopping_saves_every_place(folder: Path) -> None:
    async with Post(folder) as post:
        await post.agent()
        await post.subscribe("order.*", "orders", start=EARLIEST)
        await post.publish("talk.idle", *range(7))
        await post.settle()
        await post.inboxes.stop()
        assert await post.place("orders") == 7


async def test_subscriptions_that_were_saved_at_different_places_keep_one_order(folder: Path) -> None:
    """Places are saved now and then only; after a crash those of one agent may differ although all was read."""
    async with Post(folder, run=False) as post:
        await post.agent()
        await post.subscribe("order.*", "orders")
        await post.subscribe("talk.*", "talk")
        for number in range(60):
            await post.publish("order.paid" if number % 2 else "talk.idle", number)
        await post.log.commit(JOURNAL, "orders", 19)
        await post.inboxes.start()
        assert numbers(await post.read()) == [*range(0, 20, 2), *range(20, 60)]
        await post.inboxes.stop()
        assert [await post.place(name) for name in ("orders", "talk")] == [60, 60]


async def test_a_reset_of_one_subscription_keeps_the_order_of_all(folder: Path) -> None:
    async with Post(folder) as post:
        await post.agent()
        await post.subscribe("order.*", "orders")
        await post.subscribe("talk.*", "talk")
        for number in range(20):
            await post.publish("order.paid" if number % 2 else "talk.idle", number)
        await post.settle()
        async with post.inboxes.pump._refreshing:  # nobody looks until all of this has happened
            await post.inboxes.agents.reset(TENANT, "orders", EARLIEST)
            for number in range(20, 40):
                await post.publish("order.paid" if number % 2 else "talk.idle", number)
        await post.inboxes.pump.refresh()
        assert numbers(await post.read()) == list(range(40))


# --- fairness ---------------------------------------------------------------------------------------------------------


async def test_a_long_history_does_not_delay_who_has_caught_up(post: Post) -> None:
    await post.agent("slow")
    await post.subscribe("order.*", "fresh")
    history = 20 * BATCH
    from postbus.envelope import draft  # noqa: PLC0415 - kept beside its use

    drafts = [draft("order.paid", "test", number) for number in range(history)]
    for start in range(0, history, 2000):
        await post.log.append(JOURNAL, drafts[start : start + 2000])
    await post.settle()
    await post.ack(everything=True)
    await post.subscribe("order.*", "behind", "slow", start=EARLIEST)
    await post.publish("order.paid", "news")
    assert await post.inboxes.wait(TENANT, "ann", 60)
    behind = await post.inboxes.items.unacked(TENANT, "slow")
    assert behind < history, "whoever had caught up waited for the whole history of another"
    assert numbers(await post.read()) == ["news"]
    await post.settle()
    assert await post.inboxes.items.unacked(TENANT, "slow") == history + 1


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "settings", "error"),
    [
        ("a..b", {}, Invalid),
        ("a.>.b", {}, Invalid),
        ("a", {"filter": {"expr": "payload."}}, InvalidFilter),
        ("a", {"filter": {"nonsense": 1}}, Invalid),
        ("a", {"id": "no spaces"}, Invalid),
        ("a", {"streams": ("other.tenant.journal",)}, Invalid),
        ("a", {"streams": (f"{TENANT}.missing",)}, NotFound),
        ("a", {"agent": "nobody"}, NotFound),
        ("a", {"id": "taken"}, Conflict),
        (">", {"start": Start(policy=StartPolicy.AT_OFFSET)}, Invalid),
        ("a", {"streams": (JOURNAL,), "start": Start(policy=StartPolicy.AT_OFFSET, offset=99)}, OffsetOutOfRange),
    ],
)
async def test_a_subscription_that_could_not_work_is_refused_and_changes_nothing(
    post: Post, pattern: str, settings: dict[str, Any], error: type[Exception]
) -> None:
    await post.subscribe("order.*", "taken")
    before = await post.query("SELECT * FROM subscription_registry"), await post.query("SELECT * FROM cursors")
    with pytest.raises(error):
        await post.subscribe(pattern, settings.pop("id", "new"), settings.pop("agent", "ann"), **settings)
    assert before == (
        await post.query("SELECT * FROM subscription_registry"),
        await post.query("SELECT * FROM cursors"),
    )


async def test_a_subscription_that_cannot_be_served_holds_up_no_other(folder: Path) -> None:
    """As one whose filter a newer version no longer takes."""
    async with Post(folder) as post:
        await post.agent()
        await post.subscribe("order.*", "broken", filter={"payload": {"a": 1}})
        await post.subscribe("order.*", "orders")
        await post.alter(
            "UPDATE subscription_registry SET settings = json_set(settings, '$.filter', json('{\"nonsense\": 1}'))"
            " WHERE subscription = 'broken'"
        )
    async with Post(folder) as post:
        await post.publish("order.paid", 1)
        assert numbers(await post.read()) == [1]
        await post.subscribe("talk.*", "talk")
        await post.publish("talk.idle", 2)
        assert numbers(await post.read()) == [1, 2]


async def test_unsubscribing_keeps_the_items_and_frees_the_log(post: Post) -> None:
    await post.subscribe("order.*", "orders")
    await post.publish("order.paid", 1)
    await post.settle()
    await post.inboxes.unsubscribe(TENANT, "orders")
    await post.publish("order.paid", 2)
    assert numbers(await post.read()) == [1]
    assert await post.query("SELECT * FROM cursors WHERE consumer = 'orders'") == []
    with pytest.raises(NotFound):
        await post.inboxes.unsubscribe(TENANT, "orders")


async def test_a_removed_agent_leaves_nothing_and_its_name_is_free(post: Post) -> None:
    await post.subscribe("order.*", "orders")
    await post.publish("order.paid", 1)
    await post.settle()
    await post.inboxes.remove_agent(TENANT, "ann")
    for table in ("inbox_rows", "subscription_registry", "timer_rows"):
        assert await post.query(f"SELECT * FROM {table}") == []
    assert await post.query("SELECT * FROM cursors WHERE consumer = 'orders'") == []
    with pytest.raises(NotFound):
        await post.inboxes.items.read(TENANT, "ann")
    with pytest.raises(NotFound):
        await post.inboxes.remove_agent(TENANT, "ann")
    await post.agent()
    await post.subscribe("order.*", "orders")
    await post.publish("order.paid", 2)
    assert numbers(await post.read()) == [2]


async def test_an_agent_is_made_once(post: Post) -> None:
    with pytest.raises(Conflict):
        await post.agent()
    outcomes = await asyncio.gather(*(post.agent("bob") for _ in range(20)), return_exceptions=True)
    assert [one for one in outcomes if one is None] == [None]
    assert all(isinstance(one, Conflict) for one in outcomes if one is not None)


async def test_reading_works_without_running(folder: Path) -> None:
    async with Post(folder) as post:
        await post.agent()
        await post.subscribe("order.*", "orders")
        await post.publish("order.paid", 1)
        await post.settle()
    async with Post(folder, run=False) as post:
        assert numbers(await post.read()) == [1]
        assert await post.ack(everything=True) == 1


async def test_two_pumps_on_one_store_make_each_item_once(post: Post) -> None:
    other = Inboxes(post.log, post.clock)
    await post.subscribe("order.*", "orders")
    async with other:
        await post.publish("order.paid", *range(100))
        await post.settle()
    assert numbers(await post.read(limit=1000)) == list(range(100))
