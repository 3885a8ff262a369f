"""The Python client's agents, inboxes, timers, sources and deliveries against the real server."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from postbus.client import Client, Item, SyncClient
from postbus.model import Conflict, Invalid, NotFound, PostbusError, Unreachable
from tests.proxy import Proxy
from tests.server.conftest import RunningServer
from tests.sources.conftest import Web

PATIENCE_S = 60
WATCHED, CUT_S = 600, 0.2


class LosesFirst(Proxy):
    """Loses the first answer, once the server has given it."""

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.dropped == 0:
            await reader.read(65536)
            self.dropped = 1
            return
        await super()._answer(reader, writer)


@pytest_asyncio.fixture
async def bus(server: RunningServer) -> AsyncIterator[Client]:
    """The agent ``ann`` and the topic ``orders`` are there."""
    server.topic("local.default.orders")
    async with Client(server.url) as made:
        await made.create_agent("ann")
        yield made


@pytest_asyncio.fixture
async def five(bus: Client) -> list[Item]:
    """Items 0 to 4 of a subscription ``orders``."""
    await bus.subscribe_agent("ann", "orders", subscription="orders")
    await publish(bus, *range(5))
    return await arrived(bus, 5)


@pytest.fixture
def web() -> Iterator[Web]:
    made = Web()
    yield made
    made.stop()


async def publish(bus: Client, *payloads: Any) -> None:
    await bus.publish_batch([{"topic": "orders", "payload": payload} for payload in payloads])


async def arrived(bus: Client, count: int) -> list[Item]:
    """The items in ann's inbox, once there are so many."""
    found: list[Item] = []
    while len(found) < count:
        more = await bus.wait_inbox("ann", wait_s=PATIENCE_S, after=found[-1] if found else None)
        assert more, f"only {found}"
        found += more
    return found


async def until(look: Callable[[], Awaitable[Any]], wanted: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = await look()
            if wanted(found):
                return found
            await asyncio.sleep(0.02)


def payloads(items: list[Item]) -> list[Any]:
    return [item.payload for item in items]


# --- agents -----------------------------------------------------------------------------------------------------------


async def test_agents_are_made_shown_listed_and_removed(bus: Client, server: RunningServer) -> None:
    with pytest.raises(Conflict):
        await bus.create_agent("ann")
    shown = await bus.agent("ann")
    assert (shown["targets"], shown["unacked"]) == ([{"kind": "pull"}], 0)
    for number in range(110):  # more than one page
        await bus.create_agent(f"bot-{number:03}")
    assert [agent["id"] for agent in await bus.agents()] == ["ann", *(f"bot-{number:03}" for number in range(110))]
    async with Client(server.url, tenant="acme.prod") as other:
        assert await other.agents() == []
        with pytest.raises(NotFound):
            await other.agent("ann")
    await bus.delete_agent("ann")
    with pytest.raises(NotFound):
        await bus.delete_agent("ann")


async def test_a_target_that_is_gone_is_revived(bus: Client, web: Web) -> None:
    web.answer = lambda _: (410, {}, b"")
    hook = {"kind": "webhook", "id": "hook", "url": web.url, "buffer_s": 0, "allow_private": True}
    assert (await bus.set_targets("ann", [hook]))["targets"][0]["id"] == "hook"
    assert await bus.revive_target("ann", "hook") is False
    await bus.send_message("ann", "wake up")
    (shown,) = await until(lambda: bus.targets("ann"), lambda found: found[0]["state"] == "offline")
    assert "410" in shown["why"]
    assert await bus.revive_target("ann", "hook") is True
    with pytest.raises(NotFound):
        await bus.revive_target("ann")
    with pytest.raises(Invalid):
        await bus.set_targets("ann", [])


async def test_subscriptions_of_an_agent_are_made_listed_reset_and_ended(bus: Client) -> None:
    await publish(bus, *range(4))
    made = await bus.subscribe_agent(
        "ann",
        "orders",
        subscription="some",
        start=1,
        filter={"expr": "payload > 1"},
        cleanup={"at": "2100-01-01T00:00:00Z"},
    )
    assert (made["id"], made["pattern"], made["start"]) == (
        "some",
        "local.default.orders",
        {"policy": "at_offset", "offset": 1},
    )
    assert payloads(await arrived(bus, 2)) == [2, 3]
    by_time = await bus.subscribe_agent("ann", pattern="a.*", start=datetime(2026, 1, 1, tzinfo=UTC))
    assert by_time["start"] == {"policy": "at_time", "time": "2026-01-01T00:00:00Z"}
    assert {one["id"] for one in await bus.agent_subscriptions("ann")} == {"some", by_time["id"]}
    lag = await until(lambda: bus.agent_lag("ann", "some"), lambda found: found["total_lag"] == 0)
    assert lag["subscription_id"] == "some"
    assert (await bus.reset_agent("ann", "some", "earliest"))["positions"] == [
        {"topic": "local.default.orders", "position": 0}
    ]
    await until(lambda: bus.agent_lag("ann", "some"), lambda found: found["total_lag"] == 0)
    assert payloads(await bus.read_inbox("ann")) == [2, 3], "what was given once is not given again"
    await bus.unsubscribe_agent("ann", "some")
    assert [one["id"] for one in await bus.agent_subscriptions("ann")] == [by_time["id"]]
    with pytest.raises(NotFound):
        await bus.agent_lag("ann", "some")


@pytest.mark.parametrize(
    "what",
    [{}, {"topic": "orders", "pattern": "a"}, {"pattern": "a", "start": "whenever"}, {"pattern": "a", "start": -1}],
)
async def test_a_subscription_that_cannot_be_is_refused(bus: Client, what: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        await bus.subscribe_agent("ann", **what)
    assert await bus.agent_subscriptions("ann") == []


# --- inboxes ----------------------------------------------------------------------------------------------------------


async def test_an_item_holds_what_was_published(bus: Client) -> None:
    await bus.subscribe_agent("ann", "orders", subscription="orders")
    raw = b'{"n":  1.50, "big": 123456789012345678901234567890}'
    handle = {"kind": "bus", "topic": "answers"}
    await bus.publish(
        "orders", raw, source="shop", key="k", headers={"h": "1"}, metadata={"m": 1}, delivery_handle=handle
    )
    (item,) = await arrived(bus, 1)
    assert item.payload_json == raw
    assert item.payload == {"n": 1.5, "big": 123456789012345678901234567890}
    assert (item.id, item.sequence, item.topic, item.source, item.key) == (
        "itm_1",
        1,
        "local.default.orders",
        "shop",
        "k",
    )
    assert (item.headers, item.metadata, item.delivery_handle) == ({"h": "1"}, {"m": 1}, handle)
    assert (item.matched_by, item.expired, item.acked_at, item.trust) == (("orders",), False, None, "trusted")
    assert await bus.item("ann", item.id) == item
    with pytest.raises(NotFound):
        await bus.item("ann", "itm_2")


async def test_an_item_whose_event_is_gone_is_expired(bus: Client, server: RunningServer) -> None:
    await bus.create_topic("short", retention_beats_consumers=True)
    await bus.subscribe_agent("ann", "short")
    await bus.publish("short", 1)
    await arrived(bus, 1)
    await asyncio.to_thread(lambda: server.call(server.hub.log.trim("local.default.short", 1, 0)))
    (item,) = await bus.read_inbox("ann")
    assert (item.expired, item.payload_json, item.payload, item.topic) == (True, None, None, None)


async def test_an_inbox_is_read_by_pages_and_acked_in_three_forms(bus: Client, five: list[Item]) -> None:
    assert payloads(await bus.read_inbox("ann", after=five[1], limit=2)) == [2, 3]
    assert await bus.ack_inbox("ann", items=[five[1], five[1].id]) == 1
    assert await bus.ack_inbox("ann", through=five[2]) == 2
    assert await bus.ack_inbox("ann", through=five[2].id) == 0
    assert payloads(await bus.read_inbox("ann")) == [3, 4]
    acked = await bus.read_inbox("ann", include_acked=True)
    assert [item.acked_at is None for item in acked] == [False, False, False, True, True]
    assert await bus.ack_inbox("ann", everything=True) == 2
    assert await bus.read_inbox("ann") == []


@pytest.mark.usefixtures("five")
async def test_an_ack_has_exactly_one_form(bus: Client) -> None:
    for form in ({}, {"through": "itm_1", "everything": True}, {"through": "itm_1", "items": ["itm_1"]}):
        with pytest.raises(Invalid, match="exactly one"):
            await bus.ack_inbox("ann", **form)
    with pytest.raises(NotFound):
        await bus.ack_inbox("ann", items=["itm_1", "itm_63"])
    assert payloads(await bus.read_inbox("ann")) == [0, 1, 2, 3, 4]


async def test_waiting_ends_with_an_item_or_with_its_time(bus: Client) -> None:
    assert await bus.wait_inbox("ann", wait_s=0) == []
    waiting = asyncio.create_task(bus.wait_inbox("ann", wait_s=PATIENCE_S))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await bus.send_message("ann", {"do": "it"}, sender="bob")
    (item,) = await waiting
    assert (item.payload, item.source) == ({"do": "it"}, "bob")
    assert await bus.wait_inbox("ann", wait_s=0, after=item) == []
    with pytest.raises(Invalid):
        await bus.wait_inbox("ann", wait_s=-1)


async def test_digests_are_flushed_and_acked(bus: Client) -> None:
    await bus.subscribe_agent("ann", "orders", digest={"by": "payload.on"})
    await publish(bus, {"on": "x", "n": 1}, {"on": "x", "n": 2}, {"n": 3})
    await arrived(bus, 3)
    digests, loose = await bus.inbox_entries("ann")
    assert (digests, payloads(loose)) == ([], [{"n": 3}])
    ((digest,), loose) = await bus.flush_inbox("ann")
    assert (digest["count"], digest["item_ids"], payloads(loose)) == (2, ["itm_1", "itm_2"], [{"n": 3}])
    assert await bus.ack_inbox("ann", items=[digest["id"]]) == 2
    assert await bus.inbox_entries("ann") == ([], loose)


async def test_a_message_and_its_receipts(bus: Client) -> None:
    sent = await bus.send_message("ann", "look at this")
    (receipt,) = await bus.receipts(sent["event"])
    assert (receipt["agent"], receipt["item"], receipt["state"]) == ("ann", sent["item"], "accepted")
    assert [item.id for item in await bus.read_inbox("ann")] == [sent["item"]]
    await bus.ack_inbox("ann", items=[sent["item"]])
    assert [one["state"] for one in await bus.receipts(sent["event"])] == ["acked"]
    with pytest.raises(Invalid):
        await bus.send_message("ann", " ")
    with pytest.raises(Invalid):
        await bus.send_message("ann", float("nan"))
    with pytest.raises(NotFound):
        await bus.send_message("nobody", "hello")
    with pytest.raises(Invalid):
        await bus.receipts("rubbish")


# --- a bad line -------------------------------------------------------------------------------------------------------


async def test_an_ack_whose_answer_was_lost_is_sent_again_and_a_message_is_not(
    bus: Client, server: RunningServer
) -> None:
    for number in range(3):
        await bus.send_message("ann", number)
    async with LosesFirst(server.port) as proxy, Client(proxy.url) as far:
        assert await far.ack_inbox("ann", through="itm_2") == 0, "the first one did it"
        assert proxy.connections == 2
    assert payloads(await bus.read_inbox("ann")) == [2]
    async with LosesFirst(server.port) as proxy, Client(proxy.url) as far:
        with pytest.raises(Unreachable, match="not known whether it was done"):
            await far.send_message("ann", 3)
        assert proxy.connections == 1
    assert payloads(await bus.read_inbox("ann")) == [2, 3]
    async with LosesFirst(server.port) as proxy, Client(proxy.url) as far:
        with pytest.raises(Unreachable, match="not known whether it was done"):
            await far.ack_inbox("ann", everything=True)
        assert proxy.connections == 1
    assert await bus.read_inbox("ann") == []


async def test_a_reply_whose_answer_was_lost_is_carried_once(bus: Client, server: RunningServer) -> None:
    await bus.create_topic("answers")
    async with LosesFirst(server.port) as proxy, Client(proxy.url) as far:
        made = await far.send_reply({"kind": "bus", "topic": "answers"}, "yes")
        assert proxy.connections == 2
    assert [one["id"] for one in await bus.deliveries()] == [made["id"]]


async def test_a_watch_that_is_cut_again_and_again_has_no_gap_and_no_duplicate(
    bus: Client, server: RunningServer
) -> None:
    await bus.subscribe_agent("ann", "orders")

    async def fill() -> None:
        for start in range(0, WATCHED, 20):
            await publish(bus, *range(start, start + 20))
            await asyncio.sleep(0.04)

    async with Proxy(server.port, cut_s=CUT_S) as proxy, Client(proxy.url) as far:
        filling = asyncio.create_task(fill())
        got: list[Item] = []
        items = far.watch_inbox("ann")
        async with asyncio.timeout(60):
            while len(got) < WATCHED:
                got.append(await anext(items))
                if len(got) % 50 == 0:  # what it resumes after may be acked by then
                    await bus.ack_inbox("ann", through=got[-1])
        await filling
        await items.aclose()  # type: ignore[attr-defined]  # it is a generator
        assert proxy.connections >= 3
    assert payloads(got) == [*range(WATCHED)]


async def test_a_watch_outlives_its_server(start_server: Callable[..., RunningServer]) -> None:
    server = start_server()
    async with Proxy(server.port) as proxy, Client(proxy.url) as bus:
        await bus.create_agent("ann")
        for number in range(3):
            await bus.send_message("ann", number)
        items = bus.watch_inbox("ann")
        got = [await anext(items) for _ in range(2)]
        await asyncio.to_thread(server.stop)
        again = await asyncio.to_thread(start_server, server.data)
        proxy.to(again.port)
        async with Client(again.url) as near:
            await near.send_message("ann", 3)
        async with asyncio.timeout(PATIENCE_S):
            got += [await anext(items) for _ in range(2)]
        await items.aclose()  # type: ignore[attr-defined]  # it is a generator
    assert payloads(got) == [0, 1, 2, 3]


async def test_a_watch_begins_after_an_item_and_ends_with_the_agent(bus: Client, five: list[Item]) -> None:
    items = bus.watch_inbox("ann", after=five[2])
    assert payloads([await anext(items), await anext(items)]) == [3, 4]

    async def ends() -> None:
        with pytest.raises(NotFound):
            await anext(items)

    ending = asyncio.create_task(ends())
    await asyncio.sleep(0.1)
    await bus.delete_agent("ann")
    await asyncio.wait_for(ending, PATIENCE_S)


@pytest.mark.parametrize(("agent", "after"), [("nobody", None), ("ann", "itm_63"), ("ann", "é\n"), ("ann", "")])
async def test_a_watch_that_cannot_be_is_refused(bus: Client, agent: str, after: str | None) -> None:
    with pytest.raises(NotFound):
        await anext(bus.watch_inbox(agent, after=after))


# --- timers, sources and replies --------------------------------------------------------------------------------------


async def test_timers_send_and_are_listed_paused_resumed_and_removed(bus: Client) -> None:
    past = datetime(2020, 1, 1, tzinfo=UTC)
    assert (await bus.create_timer("now", "ann", {"do": "it"}, at=past))["due_at"] == "2020-01-01T00:00:00Z"
    assert payloads(await arrived(bus, 1)) == [{"do": "it"}]
    assert (await bus.timer("now"))["fired"] == 1
    await bus.create_timer("daily", "ann", 1, cron="0 9 * * 1-5", zone="Europe/Amsterdam", until="2100-01-01T00:00:00Z")
    assert (await bus.create_timer("tick", "ann", "stand up", every_s=3600))["every"] == 3600
    with pytest.raises(Conflict):
        await bus.create_timer("tick", "ann", "stand up", every_s=3600)
    assert [timer["id"] for timer in await bus.timers(agent="ann")] == ["daily", "now", "tick"]
    assert await bus.timers(tenant="acme.prod") == []
    assert (await bus.pause_timer("tick"))["due_at"] is None
    assert (await bus.resume_timer("tick"))["due_at"] is not None
    await bus.delete_timer("tick")
    with pytest.raises(NotFound):
        await bus.timer("tick")
    with pytest.raises(Invalid):
        await bus.create_timer("never", "ann", 1)
    with pytest.raises(NotFound):
        await bus.create_timer("lost", "nobody", 1, every_s=60)


async def test_sources_run_and_are_paused_polled_and_removed(bus: Client, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    made = await bus.create_source("jobs", "file", {"path": str(path), "interval_s": 0.05})
    assert (made["state"], made["topic"]) == ("running", "local.default.jobs")
    with pytest.raises(Conflict):
        await bus.create_source("jobs", "file", {"path": str(path)})
    path.write_text("1\n")
    await until(lambda: bus.source("jobs"), lambda found: found["events"] == 1)
    assert (await bus.pause_source("jobs"))["state"] == "paused"
    path.write_text("1\n2\n")
    polled = await bus.poll_source("jobs")
    assert (polled["events"], polled["error"]) == (["local.default.jobs/0/1"], None)
    assert (await bus.event(polled["events"][0])).payload == 2
    assert (await bus.resume_source("jobs"))["state"] == "running"
    assert [(one["id"], one["events"]) for one in await bus.sources()] == [("jobs", 2)]
    await bus.delete_source("jobs")
    with pytest.raises(NotFound):
        await bus.source("jobs")
    with pytest.raises(Invalid):
        await bus.create_source("odd", "carrier-pigeon")


async def test_replies_go_back_where_an_item_came_from(bus: Client) -> None:
    await bus.create_topic("local.default.answers")
    await bus.subscribe_agent("ann", "orders")
    receipt = await bus.publish("orders", "what?", delivery_handle={"kind": "bus", "topic": "answers"})
    (item,) = await arrived(bus, 1)
    assert [action["name"] for action in await bus.actions(item)] == ["publish"]
    made = await bus.send_reply(item, {"say": "this"}, key=item.id)
    assert (await bus.send_reply(item, {"say": "this"}, key=item.id))["id"] == made["id"]
    with pytest.raises(Conflict):
        await bus.send_reply(item, {"say": "that"}, key=item.id)
    await bus.invoke_action(receipt.id, "publish", {"payload": 2})
    done = await until(lambda: bus.deliveries(state="sent"), lambda found: len(found) == 2)
    assert done[1]["id"] == made["id"], "newest first"
    assert (await bus.event(done[1]["result"]["event"])).payload == {"say": "this"}
    await bus.send_message("ann", "no way back")
    with pytest.raises(Invalid, match="no delivery handle"):
        await bus.send_reply((await arrived(bus, 2))[1], "hello?")
    with pytest.raises(NotFound):
        await bus.send_reply("local.default.orders/0/99", "hello?")
    with pytest.raises(Conflict):
        await bus.retry_delivery(made["id"])
    with pytest.raises(NotFound):
        await bus.delivery("nothing")


async def test_a_reply_that_failed_is_tried_again(
    start_server: Callable[..., RunningServer], web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTBUS_REPLY_ALLOW_PRIVATE", "1")
    web.answer = lambda _: (410, {}, b"")
    async with Client(start_server().url) as bus:
        made = await bus.send_reply({"kind": "webhook", "url": web.url}, "yes")
        failed = await until(lambda: bus.delivery(made["id"]), lambda found: found["state"] == "failed")
        assert "410" in failed["error"]
        web.answer = lambda _: (200, {}, b"ok")
        assert (await bus.retry_delivery(made["id"]))["state"] == "accepted"
        await until(lambda: bus.delivery(made["id"]), lambda found: found["state"] == "sent")
        tries = await bus.delivery_attempts(made["id"])
        assert ["410" in (one["error"] or "") for one in tries] == [True, False]


# --- names, and the other client --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("five")
@pytest.mark.parametrize("name", ["..", ".", "", "../..", "ann/subscriptions/orders", "no spaces", "\ud800"])
async def test_a_name_that_leads_elsewhere_is_refused_and_removes_nothing(bus: Client, name: str) -> None:
    await bus.create_timer("tick", "ann", 1, every_s=3600)
    for call in (
        bus.unsubscribe_agent("ann", name),
        bus.delete_agent(name),
        bus.delete_timer(name),
        bus.delete_source(name),
        bus.delete_subscription(name),
        bus.ack_inbox(name, everything=True),
    ):
        with pytest.raises(PostbusError):
            await call
    with pytest.raises(PostbusError):
        await anext(bus.watch_inbox(name))
    assert (await bus.agent("ann"))["unacked"] == 5
    assert [one["id"] for one in await bus.agent_subscriptions("ann")] == ["orders"]
    assert len(await bus.timers()) == 1


async def test_what_is_not_json_is_refused(bus: Client) -> None:
    with pytest.raises(Invalid, match="JSON"):
        await bus.create_source("odd", "file", {"path": object()})
    with pytest.raises(Invalid):
        await anext(bus.subscribe("tail", "orders", last_id="é\n"))


def test_the_blocking_client_runs_the_loop_of_an_agent(server: RunningServer) -> None:
    server.topic("local.default.orders")
    with SyncClient(server.url) as bus:
        bus.create_agent("ann")
        bus.subscribe_agent("ann", "orders")
        bus.publish("orders", {"n": 1})
        (item,) = bus.wait_inbox("ann", wait_s=PATIENCE_S)
        assert item.payload == {"n": 1}
        assert bus.ack_inbox("ann", items=[item]) == 1
        items = bus.watch_inbox("ann")
        bus.send_message("ann", "hello")
        assert next(items).payload == "hello"
        items.close()  # type: ignore[attr-defined]  # it is a generator
        with pytest.raises(NotFound):
            next(bus.watch_inbox("nobody"))


def test_the_blocking_client_has_every_call() -> None:
    calls = [name for name, _ in inspect.getmembers(Client, inspect.isfunction) if not name.startswith("_")]
    assert len(calls) > 60
    assert [name for name in calls if not callable(getattr(SyncClient, name, None))] == []
