"""An item that cannot be made: what was before it is there, it is tried again, then dead; never skipped, never lost."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from postbus.inbox import Digest
from postbus.inbox.pump import ATTEMPTS
from tests.inbox.post import EARLIEST, TENANT, Post, numbers

# A real refusal of the database, for one event of one or of all agents.
TRIGGER = """
    CREATE TRIGGER poison BEFORE INSERT ON inbox_rows WHEN NEW."offset" = {offset} AND {who}
    BEGIN SELECT RAISE(ABORT, 'this one cannot be put there'); END
"""
DLQ = f"{TENANT}.journal-dlq"

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What is poison is logged with its trace; here that is expected."""
    caplog.set_level(logging.CRITICAL, "postbus.inbox")


async def poison(post: Post, offset: int, who: str = "1") -> None:
    await post.alter(TRIGGER.format(offset=offset, who=who))


async def lives(post: Post) -> None:
    await post.alter("DROP TRIGGER poison")


async def given_up(post: Post) -> None:
    for _ in range(ATTEMPTS):
        await post.advance(0.6)


async def test_what_was_before_is_committed_and_the_poison_is_tried_again(post: Post) -> None:
    await post.subscribe("order.*", "orders")
    await poison(post, 3)
    await post.publish("order.paid", *range(6))
    await post.settle()
    assert numbers(await post.read()) == [0, 1, 2]
    assert await post.place("orders") == 3
    assert await post.bus.dead_letters.find() == []
    await lives(post)  # whatever was in the way has gone
    await post.advance(0.6)
    assert numbers(await post.read()) == [0, 1, 2, 3, 4, 5]
    assert await post.bus.dead_letters.find() == []


async def test_in_the_end_it_is_dead_and_the_rest_goes_on(post: Post) -> None:
    await post.subscribe("order.*", "orders")
    await poison(post, 3)
    await post.publish("order.paid", *range(6))
    await post.settle()
    await given_up(post)
    assert numbers(await post.read()) == [0, 1, 2, 4, 5]
    (letter,) = await post.bus.dead_letters.find()
    assert (letter.origin_offset, letter.subscription, letter.reason) == (3, "orders", "poison")
    assert (letter.attempts, letter.payload) == (ATTEMPTS, "3")
    assert letter.id.startswith(DLQ)
    assert await post.place("orders") >= 4
    await post.publish("order.paid", 6)
    assert numbers(await post.read()) == [0, 1, 2, 4, 5, 6]


async def test_a_replay_of_the_dead_letter_delivers_it(post: Post) -> None:
    await post.subscribe("order.*", "orders")
    await poison(post, 1)
    await post.publish("order.paid", *range(3))
    await post.settle()
    await given_up(post)
    await lives(post)
    letters = await post.bus.dead_letters.find()
    assert await post.bus.dead_letters.replay(letters) == 1
    await post.advance(6)
    assert numbers(await post.read()) == [0, 2, 1]
    assert await post.bus.dead_letters.find() == []
    assert [entry.state for entry in await post.bus.dead_letters.find(state=None)] == ["replayed"]
    assert await post.query("SELECT * FROM delivery_rows") == []


async def test_a_replay_that_is_still_poison_is_dead_again(post: Post) -> None:
    await post.subscribe("order.*", "orders")
    await poison(post, 0)
    await post.publish("order.paid", 0)
    await post.settle()
    await given_up(post)
    await post.bus.dead_letters.replay(await post.bus.dead_letters.find())
    await post.advance(6)
    states = [entry.state for entry in await post.bus.dead_letters.find(state=None)]
    assert states == ["replayed", "open"]
    await lives(post)
    await post.bus.dead_letters.replay(await post.bus.dead_letters.find())
    await post.advance(6)
    assert numbers(await post.read()) == [0]


async def test_only_the_agent_whose_item_it_is_goes_without(post: Post) -> None:
    await post.agent("bob")
    await post.subscribe("order.*", "a", "ann")
    await post.subscribe("order.*", "b", "bob")
    await poison(post, 1, "NEW.agent_no = (SELECT agent_no FROM agent_registry WHERE agent = 'bob')")
    await post.publish("order.paid", *range(3))
    await post.settle()
    await given_up(post)
    assert numbers(await post.read("ann")) == [0, 1, 2]
    assert numbers(await post.read("bob")) == [0, 2]
    assert [letter.subscription for letter in await post.bus.dead_letters.find()] == ["b"]


async def test_several_in_one_batch(post: Post) -> None:
    await post.subscribe("order.*", "orders")
    await post.alter(TRIGGER.format(offset=0, who="1").replace('NEW."offset" = 0', 'NEW."offset" % 5 = 0'))
    await post.publish("order.paid", *range(12))
    await post.settle()
    for _ in range(4):
        await given_up(post)
    assert numbers(await post.read()) == [number for number in range(12) if number % 5]
    assert [letter.origin_offset for letter in await post.bus.dead_letters.find()] == [0, 5, 10]


async def test_a_failure_in_a_digest_leaves_no_trace_of_the_item(post: Post) -> None:
    await post.subscribe("order.*", "orders", digest=Digest(by="topic"))
    await poison(post, 1)
    await post.publish("order.paid", *range(3))
    await post.settle()
    await given_up(post)
    await post.inboxes.digests.flush(TENANT, "ann")
    (entry,), _ = await post.inboxes.entries(TENANT, "ann")
    assert (entry.count, entry.item_ids) == (2, ("itm_1", "itm_2"))


async def test_a_reset_tries_it_again(post: Post) -> None:
    await post.subscribe("order.*", "orders")
    await poison(post, 1)
    await post.publish("order.paid", *range(3))
    await post.settle()
    await given_up(post)
    await post.inboxes.reset(TENANT, "orders", EARLIEST)
    await given_up(post)
    assert numbers(await post.read()) == [0, 2]
    assert [letter.origin_offset for letter in await post.bus.dead_letters.find()] == [1], "still one letter"
    await lives(post)
    await post.inboxes.reset(TENANT, "orders", EARLIEST)
    assert numbers(await post.read()) == [0, 2, 1]
    assert await post.bus.dead_letters.find() == []


async def test_purging_the_letter_or_removing_the_subscription_ends_it(post: Post) -> None:
    await post.subscribe("order.*", "orders", start=EARLIEST)
    await poison(post, 0)
    await post.publish("order.paid", 0)
    await post.settle()
    await given_up(post)
    letters = await post.bus.dead_letters.find()
    await post.inboxes.unsubscribe(TENANT, "orders")
    assert await post.query("SELECT * FROM delivery_rows") == []
    assert await post.bus.dead_letters.replay(letters) == 0, "there is nobody to deliver it to"


async def test_a_full_disk_is_no_poison(folder: Path) -> None:
    """What holds up everything is waited for; nobody's event is dead because of it."""
    async with Post(folder, run=False) as post:
        await post.agent()
        await post.subscribe("order.*", "orders")
        await post.publish("order.paid", 1)
        writer = post.log.store.writer
        writer._full, writer._full_checked_s = True, float("inf")  # as after an append that found no room
        await post.inboxes.start()
        for _ in range(ATTEMPTS + 3):
            await post.advance(0.6)
        assert await post.read() == []
        writer._full = False
        await post.advance(0.6)
        assert numbers(await post.read()) == [1]
        assert await post.bus.dead_letters.find() == []
