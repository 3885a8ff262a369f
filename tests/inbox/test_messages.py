"""Direct messages: straight into an inbox, durable, never blank."""

from __future__ import annotations

from typing import Any

import pytest

from postbus.model import Invalid, NotFound
from tests.inbox.post import TENANT, Post, numbers


@pytest.mark.parametrize("message", ["hello", {"task": [1, 2]}, [], 0, False, {}])
async def test_a_message_is_an_item_at_once(post: Post, message: Any) -> None:
    item, receipt = await post.inboxes.send(TENANT, "ann", message, sender="bob")
    (found,) = await post.read()
    assert found.event is not None
    assert (found.id, found.event.id, found.event.payload) == (item, receipt.id, message)
    assert (found.event.topic, found.event.source, found.match_reason) == ("inbox.message", "bob", "direct message")
    assert found.matched_by == ()
    assert await post.ack(items=[item]) == 1


@pytest.mark.parametrize("message", ["", "   ", "\n\t", None])
async def test_a_blank_message_is_refused(post: Post, message: Any) -> None:
    with pytest.raises(Invalid, match="not blank"):
        await post.inboxes.send(TENANT, "ann", message)
    assert await post.read() == []


async def test_a_message_to_nobody_is_refused_and_leaves_nothing(post: Post) -> None:
    before = await post.query("SELECT name FROM stream_registry")
    with pytest.raises(NotFound):
        await post.inboxes.send(TENANT, "nobody", "hello")
    assert await post.query("SELECT name FROM stream_registry") == before
    assert await post.query("SELECT count(*) FROM events") == [(0,)]


async def test_a_message_that_is_no_json_or_too_large_is_refused(post: Post) -> None:
    for message in ({1, 2}, float("nan"), "x" * (2 << 20)):
        with pytest.raises(Invalid):
            await post.inboxes.send(TENANT, "ann", message)
    assert await post.read() == []


async def test_messages_and_events_have_one_order(post: Post) -> None:
    await post.subscribe("order.*", "orders")
    await post.inboxes.send(TENANT, "ann", 1)
    await post.publish("order.paid", 2)
    await post.settle()
    await post.inboxes.send(TENANT, "ann", 3)
    assert numbers(await post.read()) == [1, 2, 3]


async def test_a_stream_of_the_users_called_messages_is_left_alone(post: Post) -> None:
    stream = await post.stream("messages", partitions=3)
    await post.inboxes.send(TENANT, "ann", "hello")
    assert numbers(await post.read()) == ["hello"]
    assert sum(part.high_water_mark for part in (await post.log.get_stream_stats(stream)).partitions) == 0
