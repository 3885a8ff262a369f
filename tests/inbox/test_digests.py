"""Bursts on one resource become one entry with revisions; an ack of an old revision leaves what came later."""

from __future__ import annotations

from typing import Any

import pytest

from postbus.inbox import Digest, DigestEntry
from postbus.model import Invalid, NotFound
from tests.inbox.post import TENANT, Post, numbers

DAY_S = 86_400


@pytest.fixture
async def burst(post: Post) -> Post:
    await post.subscribe("issue.*", "issues", digest=Digest(by="metadata.resource"))
    return post


async def comment(post: Post, *payloads: Any, on: str = "issue-7") -> None:
    await post.publish("issue.comment", *payloads, metadata={"resource": on})
    await post.settle()


async def digests(post: Post) -> list[DigestEntry]:
    await post.settle()
    return (await post.inboxes.entries(TENANT, "ann"))[0]


async def test_a_burst_shows_as_one_entry_when_its_window_is_over(burst: Post) -> None:
    await comment(burst, 1, 2)
    await burst.advance(29)
    assert await digests(burst) == []
    await comment(burst, 3)
    await burst.advance(1)  # thirty seconds after the first
    (entry,) = await digests(burst)
    assert (entry.resource, entry.revision, entry.count) == ("issue-7", 1, 3)
    assert entry.item_ids == ("itm_1", "itm_2", "itm_3")
    assert entry.summary == "3 on issue-7: 3 x issue.comment"


async def test_items_of_a_burst_can_be_read_at_once(burst: Post) -> None:
    await comment(burst, 1, 2)
    assert numbers(await burst.read()) == [1, 2]
    assert await digests(burst) == []


async def test_enough_items_show_without_waiting_for_the_window(burst: Post) -> None:
    await comment(burst, *range(19))
    await burst.advance(2)
    assert await digests(burst) == []
    await comment(burst, 19)
    await burst.advance(1)
    (entry,) = await digests(burst)
    assert (entry.revision, entry.count) == (1, 20)


async def test_a_digest_can_be_shown_at_once(burst: Post) -> None:
    await comment(burst, 1)
    await burst.inboxes.digests.flush(TENANT, "ann")
    (entry,) = await digests(burst)
    assert (entry.revision, entry.count) == (1, 1)
    await burst.inboxes.digests.flush(TENANT, "ann")
    assert (await digests(burst))[0].revision == 1, "nothing new, no revision"
    with pytest.raises(NotFound):
        await burst.inboxes.digests.flush(TENANT, "nobody")


async def test_a_digest_does_not_grow_for_more_than_a_day(burst: Post) -> None:
    for _ in range(24):
        await comment(burst, 0)
        await burst.advance(DAY_S / 24)
    await comment(burst, 1)
    await burst.inboxes.digests.flush(TENANT, "ann")
    entries = await digests(burst)
    assert [(entry.count, entry.revision) for entry in entries] == [(24, 24), (1, 1)]


async def test_what_waits_when_a_digest_is_a_day_old_shows_and_closes_it(post: Post) -> None:
    await post.subscribe("issue.*", "issues", digest=Digest(by="metadata.resource", window_s=DAY_S))
    await comment(post, 1)
    await post.inboxes.digests.flush(TENANT, "ann")
    post.clock.advance(1)
    await comment(post, 2)
    await post.advance(DAY_S - 1)  # a day after the first, a second before the window of the second is over
    assert [(entry.count, entry.revision) for entry in await digests(post)] == [(2, 2)]
    await comment(post, 3)
    await post.inboxes.digests.flush(TENANT, "ann")
    assert [(entry.count, entry.revision) for entry in await digests(post)] == [(2, 2), (1, 1)]


async def test_acking_an_old_revision_leaves_only_what_came_later(burst: Post) -> None:
    await comment(burst, 1, 2)
    await burst.advance(30)
    (first,) = await digests(burst)
    await comment(burst, 3)
    await burst.advance(30)
    (second,) = await digests(burst)
    assert (second.revision, second.count) == (2, 3)
    await comment(burst, 4)
    assert await burst.ack(items=[first.id]) == 2
    (left,) = await digests(burst)
    assert (left.id, left.count, left.item_ids) == (second.id, 1, ("itm_3",))
    assert numbers(await burst.read()) == [3, 4]
    assert await burst.ack(items=[first.id]) == 0
    assert await burst.ack(items=[second.id]) == 1
    assert numbers(await burst.read()) == [4]


async def test_an_old_revision_is_an_anchor_too(burst: Post) -> None:
    await burst.subscribe("talk.*", "talk")
    await burst.publish("talk.idle", "before")
    await comment(burst, 1)
    await burst.advance(30)
    (first,) = await digests(burst)
    await comment(burst, 2)
    await burst.advance(30)
    assert await burst.ack(through=first.id) == 2
    assert numbers(await burst.read()) == [2]


async def test_acking_through_a_digest_leaves_what_no_digest_has_shown(burst: Post) -> None:
    await comment(burst, 1, on="issue-7")
    await burst.advance(29)
    await comment(burst, 2, on="issue-8")
    await comment(burst, 3, on="issue-7")
    await burst.advance(1)
    (shown,) = await digests(burst)
    assert (shown.resource, shown.count) == ("issue-7", 2)
    assert await burst.ack(through=shown.id) == 2
    assert numbers(await burst.read()) == [2]
    await burst.advance(30)
    assert [(entry.resource, entry.count) for entry in await digests(burst)] == [("issue-8", 1)]


@pytest.mark.parametrize("name", ["dig_1_2", "dig_2_1", "dig_1", "dig_1_1_1", "dig_-1_1", "dig_1_x", "dig_" + "f" * 99])
async def test_a_revision_that_never_was_is_unknown(burst: Post, name: str) -> None:
    await comment(burst, 1)
    await burst.advance(30)
    for form in ({"items": [name]}, {"through": name}):
        with pytest.raises(NotFound):
            await burst.ack(**form)
    assert numbers(await burst.read()) == [1]


async def test_after_everything_is_acked_a_digest_goes_on_with_the_next_revision(burst: Post) -> None:
    await comment(burst, 1)
    await burst.advance(30)
    assert await burst.ack(everything=True) == 1
    assert await digests(burst) == []
    await comment(burst, 2)
    await burst.advance(30)
    (entry,) = await digests(burst)
    assert (entry.revision, entry.count, entry.item_ids) == (2, 1, ("itm_2",))


async def test_resources_have_digests_of_their_own_and_what_has_none_stays_loose(burst: Post) -> None:
    await comment(burst, 1, on="issue-7")
    await comment(burst, 2, on="issue-8")
    await burst.publish("issue.comment", 3)
    await burst.publish("issue.comment", 4, metadata={"resource": True})
    await burst.advance(30)
    entries, loose = await burst.inboxes.entries(TENANT, "ann")
    assert [entry.resource for entry in entries] == ["issue-7", "issue-8"]
    assert numbers(loose) == [3, 4]


async def test_loose_items_are_found_behind_any_number_of_digested_ones(burst: Post) -> None:
    await comment(burst, *range(150))
    await burst.subscribe("talk.*", "talk")
    await burst.publish("talk.idle", "hello")
    await burst.settle()
    _, loose = await burst.inboxes.entries(TENANT, "ann")
    assert numbers(loose) == ["hello"]


@pytest.mark.parametrize(
    ("by", "resource"), [("key", "k"), ("source", "test"), ("topic", "issue.comment"), ("payload.a.b", "7")]
)
async def test_what_names_the_resource(post: Post, by: str, resource: str) -> None:
    await post.subscribe("issue.*", "issues", digest=Digest(by=by))
    await post.publish("issue.comment", {"a": {"b": 7}}, key="k")
    await post.advance(30)
    assert [entry.resource for entry in await digests(post)] == [resource]


@pytest.mark.parametrize(
    "digest",
    [
        Digest(by=""),
        Digest(by="nowhere.x"),
        Digest(window_s=-1),
        Digest(window_s=86_401),
        Digest(items=0),
        Digest(items=1001),
    ],
)
async def test_a_digest_that_cannot_work_is_refused(post: Post, digest: Digest) -> None:
    with pytest.raises(Invalid):
        await post.subscribe("issue.*", "issues", digest=digest)


async def test_digests_whose_items_are_gone_are_forgotten(burst: Post) -> None:
    await comment(burst, 1)
    await burst.advance(30)
    await burst.ack(everything=True)
    await burst.advance(2 * DAY_S)
    await burst.advance(61)
    assert await burst.query("SELECT * FROM inbox_digests") == []
    assert await burst.query("SELECT * FROM inbox_revisions") == []
