"""Reading and acking: a stable order, three forms of ack, receipts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from postbus.inbox.items import item_json
from postbus.model import Invalid, NotFound
from tests.inbox.post import EARLIEST, TENANT, Post, numbers


@pytest.fixture
async def five(post: Post) -> Post:
    """Items 0 to 4; the clock has not moved between them."""
    await post.subscribe("order.*", "orders")
    await post.publish("order.paid", *range(5))
    await post.settle()
    return post


async def ids(post: Post) -> list[str]:
    return [item.id for item in await post.read(include_acked=True)]


# --- reading ----------------------------------------------------------------------------------------------------------


async def test_reading_again_gives_the_same(five: Post) -> None:
    first, again = await five.read(), await five.read()
    assert numbers(first) == numbers(again) == [0, 1, 2, 3, 4]
    assert [item.id for item in first] == [item.id for item in again]


async def test_pages_follow_each_other_without_gap_or_repetition(five: Post) -> None:
    found: list[int] = []
    after = None
    while page := await five.read(after=after, limit=2):
        found += numbers(page)
        after = page[-1].id
    assert found == [0, 1, 2, 3, 4]


async def test_after_an_item_that_is_acked_or_gone(five: Post) -> None:
    names = await ids(five)
    await five.ack(items=[names[2]])
    assert numbers(await five.read(after=names[2])) == [3, 4]
    await five.advance(2 * 86_400)
    await five.advance(61)
    assert numbers(await five.read(include_acked=True)) == [0, 1, 3, 4]
    assert numbers(await five.read(after=names[2])) == [3, 4]
    assert numbers(await five.read(after=names[2], include_acked=True)) == [3, 4]


@pytest.mark.parametrize("after", ["itm_6", "itm_0", "itm_ffffffffffffff", "nonsense", "", "itm_", "itm_1g", "dig_1_1"])
async def test_after_an_item_that_never_was(five: Post, after: str) -> None:
    with pytest.raises(NotFound):
        await five.read(after=after)


async def test_an_item_of_another_inbox_is_unknown(five: Post) -> None:
    await five.agent("bob")
    with pytest.raises(NotFound):
        await five.read("bob", after=(await ids(five))[0])


@pytest.mark.parametrize("limit", [0, -1, 1001])
async def test_a_limit_out_of_range_is_refused(five: Post, limit: int) -> None:
    with pytest.raises(Invalid, match="limit is 1 to 1000"):
        await five.read(limit=limit)


async def test_no_partition_and_no_offset_shows_in_an_item(five: Post) -> None:
    (item, *_) = await five.read()
    text = item_json(item).decode()
    assert "partition" not in text
    assert "offset" not in text
    assert item.event is not None
    assert item.event.id not in text


# --- acking -----------------------------------------------------------------------------------------------------------


async def test_ack_through_an_item(five: Post) -> None:
    names = await ids(five)
    assert await five.ack(through=names[2]) == 3
    assert numbers(await five.read()) == [3, 4]
    assert await five.ack(through=names[2]) == 0
    assert await five.ack(through=names[0]) == 0
    assert await five.ack(through=names[4]) == 2
    assert await five.read() == []


async def test_ack_some_items(five: Post) -> None:
    names = await ids(five)
    assert await five.ack(items=[names[1], names[3], names[1]]) == 2
    assert numbers(await five.read()) == [0, 2, 4]
    assert await five.ack(items=[names[1], names[2]]) == 1
    assert await five.ack(items=[]) == 0
    assert numbers(await five.read()) == [0, 4]


async def test_ack_all(five: Post) -> None:
    assert await five.ack(everything=True) == 5
    assert await five.ack(everything=True) == 0
    await five.publish("order.paid", 5)
    assert numbers(await five.read()) == [5]


async def test_ack_through_does_not_touch_what_came_later_at_the_same_instant(five: Post) -> None:
    stamps = await five.query("SELECT DISTINCT created_at_us FROM inbox_rows")
    assert len(stamps) == 1, "the clock stands still"
    last = (await five.read())[-1]
    await five.publish("order.paid", 5)  # between the read and the ack
    await five.settle()
    assert len(await five.query("SELECT DISTINCT created_at_us FROM inbox_rows")) == 1
    assert await five.ack(through=last.id) == 5
    assert numbers(await five.read()) == [5]


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"through": "itm_1", "items": ["itm_1"]},
        {"through": "itm_1", "everything": True},
        {"items": [], "everything": True},
        {"everything": False},
    ],
)
async def test_an_ack_has_exactly_one_form(five: Post, form: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match="exactly one"):
        await five.ack(**form)
    assert numbers(await five.read()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "form",
    [
        {"through": "itm_6"},
        {"through": "soon"},
        {"items": ["itm_1", "itm_77"]},
        {"items": ["itm_1", "dig_1_1"]},
        {"through": "dig_zz"},
    ],
)
async def test_an_unknown_item_is_refused_and_nothing_is_acked(five: Post, form: dict[str, Any]) -> None:
    with pytest.raises(NotFound):
        await five.ack(**form)
    assert numbers(await five.read()) == [0, 1, 2, 3, 4]


async def test_too_many_items_at_once_are_refused(five: Post) -> None:
    with pytest.raises(Invalid, match="at most 10000"):
        await five.ack(items=["itm_1"] * 10_001)


async def test_an_unknown_agent_is_refused(post: Post) -> None:
    for work in (post.read("nobody"), post.ack("nobody", everything=True), post.inboxes.wait(TENANT, "nobody", 1)):
        with pytest.raises(NotFound):
            await work


async def test_concurrent_acks_count_each_item_once(five: Post) -> None:
    names = await ids(five)
    counts = await asyncio.gather(
        *(five.ack(through=names[number % 5]) for number in range(20)), *(five.ack(items=names) for _ in range(5))
    )
    assert sum(counts) == 5


async def test_acks_survive_a_restart(folder: Path) -> None:
    async with Post(folder) as post:
        await post.agent()
        await post.subscribe("order.*", "orders")
        await post.publish("order.paid", 1, 2, 3)
        await post.settle()
        await post.ack(items=["itm_2"])
    async with Post(folder) as post:
        await post.inboxes.reset(TENANT, "orders", EARLIEST)
        assert numbers(await post.read()) == [1, 3]
        assert await post.ack(everything=True) == 2


async def test_the_count_of_what_is_not_acked(five: Post) -> None:
    assert await five.inboxes.items.unacked(TENANT, "ann") == 5
    await five.ack(items=["itm_2", "itm_5"])
    assert await five.inboxes.items.unacked(TENANT, "ann") == 3


# --- receipts ---------------------------------------------------------------------------------------------------------


async def state(post: Post, event: str) -> list[tuple[str, str]]:
    return [(one.agent, one.state) for one in await post.inboxes.items.receipts(TENANT, event)]


async def test_receipts_follow_an_item_on_its_way(post: Post) -> None:
    await post.subscribe("order.*", "orders")
    (event,) = [receipt.id for receipt in await post.publish("order.paid", 1)]
    await post.settle()
    assert await state(post, event) == [("ann", "accepted")]
    moment = post.clock.now_us()
    post.clock.advance(5)
    await post.read()
    assert await state(post, event) == [("ann", "read")]
    post.clock.advance(5)
    await post.ack(everything=True)
    (receipt,) = await post.inboxes.items.receipts(TENANT, event)
    assert (receipt.state, receipt.item) == ("acked", "itm_1")
    assert (receipt.accepted_at_us, receipt.delivered_at_us, receipt.read_at_us, receipt.acked_at_us) == (
        moment,
        moment + 5_000_000,
        moment + 5_000_000,
        moment + 10_000_000,
    )


async def test_an_item_that_was_announced_is_delivered(post: Post) -> None:
    await post.subscribe("order.*", "orders")
    (receipt,) = await post.publish("order.paid", 1)
    await post.settle()
    await post.alter("UPDATE inbox_rows SET delivered_at_us = 1")
    assert await state(post, receipt.id) == [("ann", "delivered")]


async def test_receipts_outlive_the_item(five: Post) -> None:
    (event,) = [receipt.id for receipt in await five.publish("order.paid", 9)]
    await five.settle()
    await five.ack(everything=True)
    await five.advance(2 * 86_400)
    await five.advance(61)
    assert await five.read(include_acked=True) == []
    assert await state(five, event) == [("ann", "acked")]


async def test_receipts_name_every_inbox_and_no_other_tenants(post: Post) -> None:
    await post.agent("bob")
    await post.subscribe("order.*", "a", "ann")
    await post.subscribe("order.*", "b", "bob")
    (receipt,) = await post.publish("order.paid", 1)
    await post.settle()
    await post.ack("bob", everything=True)
    assert await state(post, receipt.id) == [("ann", "accepted"), ("bob", "acked")]
    assert await post.inboxes.items.receipts("other.tenant", receipt.id) == []
    assert await state(post, f"{TENANT}.journal/0/99") == []


@pytest.mark.parametrize("address", ["x", "a/b/c", f"{TENANT}.journal/0", "", "s/0/" + "9" * 60])
async def test_receipts_of_what_is_no_address_are_refused(post: Post, address: str) -> None:
    with pytest.raises(Invalid):
        await post.inboxes.items.receipts(TENANT, address)


async def test_one_item_by_its_id(five: Post) -> None:
    item = await five.inboxes.items.get(TENANT, "ann", "itm_3")
    assert numbers([item]) == [2]
    for name in ("itm_99", "what"):
        with pytest.raises(NotFound):
            await five.inboxes.items.get(TENANT, "ann", name)
