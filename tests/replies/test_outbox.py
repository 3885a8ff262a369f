from __future__ import annotations

import json

import pytest
from standardwebhooks import Webhook

from postbus.bus.housekeeping import keep_house
from postbus.bus.purge import dead_letters
from postbus.inbox.replies import Replies, ReplyRules
from postbus.log import SqliteLog
from postbus.model import Conflict, Invalid, NotFound
from postbus.testing import FakeClock
from tests.replies.conftest import TENANT, hook, journal
from tests.sources.conftest import Call, Reply, Web


async def test_a_reply_is_on_disk_before_it_is_sent_and_sent_once(replies: Replies, web: Web, log: SqliteLog) -> None:
    reply = await replies.send(hook(web), {"answer": 42})
    assert (reply.state, reply.attempts, web.calls) == ("accepted", 0, [])
    (event,) = await journal(log)
    assert (event.topic, event.id, event.payload["delivery"]) == ("delivery.accepted", reply.event, reply.id)
    assert [await replies.drain(), await replies.drain()] == [1, 0]
    done = await replies.get(reply.id)
    assert (done.state, done.attempts, done.result) == ("sent", 1, {"status": 200, "body": "thanks"})
    (call,) = web.calls
    assert (call.method, call.path, call.body) == ("POST", "/in", b'{"answer":42}')
    assert call.headers["idempotency-key"] == call.headers["webhook-id"] == reply.id
    assert "webhook-signature" not in call.headers
    assert [attempt.error for attempt in await replies.attempts(reply.id)] == [None]


async def test_webhooks_are_signed_when_there_is_a_secret(
    replies: Replies, web: Web, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    import time  # noqa: PLC0415 - the library asks the real clock

    clock.set_wall(time.time_ns() // 1000)
    monkeypatch.setenv("POSTBUS_REPLY_SECRET", "whsec_c2VjcmV0IHNlY3JldA==")
    await replies.send(hook(web), {"a": [1, 2]})
    await replies.drain()
    assert Webhook("whsec_c2VjcmV0IHNlY3JldA==").verify(web.calls[0].body, web.calls[0].headers) == {"a": [1, 2]}


async def test_a_far_side_that_is_down_is_tried_later_and_later_then_given_up(
    replies: Replies, web: Web, clock: FakeClock, log: SqliteLog
) -> None:
    web.answer = lambda _: (500, {}, b"down")
    reply = await replies.send(hook(web), "hello")
    assert await replies.drain() == 1
    waiting = await replies.get(reply.id)
    assert (waiting.state, waiting.attempts) == ("accepted", 1)
    assert "500" in str(waiting.error)
    clock.advance(9.9)
    assert await replies.drain() == 0
    clock.advance(0.2)
    assert await replies.drain() == 1
    clock.advance(19.9)
    assert await replies.drain() == 0
    clock.advance(0.2)
    assert await replies.drain() == 1
    dead = await replies.get(reply.id)
    assert (dead.state, dead.attempts) == ("failed", 3)
    (letter,) = await dead_letters(log, clock, TENANT).find()
    assert (letter.reason, letter.attempts, letter.origin_id) == ("reply", 3, reply.event)
    assert json.loads(letter.payload)["arguments"] == {"payload": "hello"}
    assert "500" in letter.error
    assert [attempt.attempt for attempt in await replies.attempts(reply.id)] == [1, 2, 3]
    clock.advance(100_000)
    assert await replies.drain() == 0


async def test_a_dead_reply_is_replayed_like_any_dead_letter(
    replies: Replies, web: Web, clock: FakeClock, log: SqliteLog
) -> None:
    web.answer = lambda _: (410, {}, b"gone")
    reply = await replies.send(hook(web), 1)
    await replies.drain()
    letters = dead_letters(log, clock, TENANT)
    (first,) = await letters.find()
    assert await letters.replay([first]) == 1
    await replies.drain()  # it dies again
    (second,) = await letters.find()
    assert second.id != first.id
    assert (await letters.show(first.id)).state == "replayed"
    web.answer = lambda _: (200, {}, b"")
    assert await letters.replay([second]) == 1
    await replies.drain()
    assert (await replies.get(reply.id)).state == "sent"
    assert await letters.find() == []


async def test_a_failed_reply_can_be_tried_again_by_hand(replies: Replies, web: Web) -> None:
    web.answer = lambda _: (404, {}, b"")
    reply = await replies.send(hook(web), 1)
    with pytest.raises(Conflict):
        await replies.retry(reply.id)
    await replies.drain()
    web.answer = lambda _: (200, {}, b"")
    assert (await replies.retry(reply.id)).state == "accepted"
    await replies.drain()
    assert (await replies.get(reply.id)).state == "sent"


@pytest.mark.parametrize("status", [400, 404, 410, 422, 301])
async def test_a_refusal_is_final_at_once(replies: Replies, web: Web, status: int) -> None:
    web.answer = lambda _: (status, {"location": "http://127.0.0.1/elsewhere"}, b"")
    reply = await replies.send(hook(web), 1)
    await replies.drain()
    assert (await replies.get(reply.id)).state == "failed"
    assert len(web.calls) == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_a_wish_to_wait_is_kept(replies: Replies, web: Web, clock: FakeClock, status: int) -> None:
    web.answer = lambda _: (status, {"retry-after": "500"}, b"")
    reply = await replies.send(hook(web), 1)
    await replies.drain()
    clock.advance(499)
    assert await replies.drain() == 0
    web.answer = lambda _: (200, {}, b"")
    clock.advance(2)
    await replies.drain()
    assert (await replies.get(reply.id)).state == "sent"


async def test_replies_through_one_handle_keep_their_order_and_hold_up_no_other(
    replies: Replies, web: Web, clock: FakeClock
) -> None:
    def answer(call: Call) -> Reply:
        return (500, {}, b"") if call.path == "/in" and len(web.calls) < 3 else (200, {}, b"")

    web.answer = answer
    for number in range(3):
        await replies.send(hook(web), number)
    await replies.send({"kind": "webhook", "url": f"{web.url}/other"}, "other")
    await replies.drain()
    clock.advance(11)
    await replies.drain()
    clock.advance(21)
    await replies.drain()
    bodies = [call.body for call in web.calls if call.path == "/in"]
    assert bodies[-3:] == [b"0", b"1", b"2"]
    assert set(bodies[:-3]) <= {b"0"}
    assert [call.body for call in web.calls if call.path == "/other"] == [b'"other"']


async def test_the_same_key_is_accepted_once(replies: Replies, web: Web, log: SqliteLog) -> None:
    first = await replies.send(hook(web), "a", key="my-key")
    again = await replies.send(hook(web), "a", key="my-key")
    assert first.id == again.id
    assert len(await journal(log)) == 1
    with pytest.raises(Conflict):
        await replies.send(hook(web), "b", key="my-key")
    with pytest.raises(Invalid):
        await replies.send(hook(web), "b", key="")


async def test_replies_are_listed_newest_first_in_pages(replies: Replies, web: Web) -> None:
    made = [await replies.send(hook(web), number) for number in range(5)]
    await replies.drain()
    await replies.send({"kind": "bus", "topic": "x.y"}, 1)
    page = await replies.find(limit=3)
    assert [reply.id for reply in page][1:] == [made[4].id, made[3].id]
    rest = await replies.find(after=page[-1].id)
    assert [reply.id for reply in rest] == [made[2].id, made[1].id, made[0].id]
    assert len(await replies.find(state="sent")) == 6
    assert await replies.find(state="failed") == []
    for bad in ({"state": "odd"}, {"limit": 0}, {"limit": 5000}):
        with pytest.raises(Invalid):
            await replies.find(**bad)
    with pytest.raises(NotFound):
        await replies.find(after="nothing")
    with pytest.raises(NotFound):
        await replies.get("nothing")


async def test_another_tenant_sees_nothing_of_it(replies: Replies, web: Web, log: SqliteLog, clock: FakeClock) -> None:
    reply = await replies.send(hook(web), 1)
    other = Replies(log, clock, "other.tenant", rules=ReplyRules(allow_private=True))
    with pytest.raises(NotFound):
        await other.get(reply.id)
    assert await other.find() == []
    assert await other.drain() == 0


async def test_an_operator_sees_the_replies_in_a_view(replies: Replies, web: Web, log: SqliteLog) -> None:
    reply = await replies.send(hook(web), 1)
    query = "SELECT delivery, kind, action, state, event FROM reply_deliveries"
    rows = await log.store.read(lambda db: db.execute(query).fetchall())
    assert rows == [(reply.id, "webhook", "post", "accepted", reply.event)]


async def test_old_replies_are_forgotten_and_open_or_dead_ones_kept(
    replies: Replies, web: Web, log: SqliteLog, clock: FakeClock
) -> None:
    web.answer = lambda call: (404, {}, b"") if call.path == "/dead" else (200, {}, b"")
    await replies.send(hook(web), 1)
    dead = await replies.send({"kind": "webhook", "url": f"{web.url}/dead"}, 2)
    await replies.drain()
    clock.advance(31 * 86_400)
    waiting = await replies.send(hook(web), 3)
    duties = {duty.what: duty.removed for duty in await keep_house(log, clock)}
    assert duties["replies that were sent or whose dead letter is gone"] == 1
    assert duties["attempts of removed replies"] == 1
    assert [reply.id for reply in await replies.find()] == [waiting.id, dead.id]
    letters = dead_letters(log, clock, TENANT)
    await letters.purge(await letters.find())
    await keep_house(log, clock)
    assert [reply.id for reply in await replies.find()] == [waiting.id]
