"""A subscription changes its engine: the pump lets go of it, or takes it up, from where it stands."""

from __future__ import annotations

import pytest

from postbus.model import Invalid, NotFound
from tests.inbox.post import TENANT, Post, numbers


async def test_the_pump_lets_go_and_takes_up_where_it_stood(post: Post) -> None:
    await post.subscribe("order.*", "orders")
    await post.publish("order.paid", 0, 1)
    assert numbers(await post.read()) == [0, 1]
    assert (await post.inboxes.hand_over(TENANT, "orders", "spark")).engine == "spark"
    await post.publish("order.paid", 2, 3)
    assert numbers(await post.read()) == [0, 1]
    assert await post.place("orders") == 2, "saved when it was let go"
    await post.inboxes.hand_over(TENANT, "orders", "live")
    assert numbers(await post.read()) == [0, 1, 2, 3]
    await post.inboxes.hand_over(TENANT, "orders", "live")  # again: nothing changes
    await post.publish("order.paid", 4)
    assert numbers(await post.read()) == [0, 1, 2, 3, 4]


async def test_what_is_served_by_others_stays_out_of_the_pumps_way(post: Post) -> None:
    await post.subscribe("order.*", "spark", engine="spark")
    await post.subscribe("order.*", "live")
    await post.publish("order.paid", 0)
    (item,) = await post.read()
    assert item.matched_by == ("live",)
    assert await post.place("spark") == 0


async def test_refusals_change_nothing(post: Post) -> None:
    await post.subscribe("order.*", "orders")
    with pytest.raises(Invalid, match="no engine is called 'steam'"):
        await post.inboxes.hand_over(TENANT, "orders", "steam")  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        await post.inboxes.hand_over(TENANT, "other", "spark")
    with pytest.raises(NotFound):
        await post.inboxes.hand_over("acme.eu", "orders", "spark")
    assert (await post.inboxes.agents.subscription(TENANT, "orders")).engine == "live"
