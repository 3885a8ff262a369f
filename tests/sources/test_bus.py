from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from postbus.envelope import draft
from postbus.log import SqliteLog
from postbus.model import Invalid, StreamSettings
from postbus.server.hub import Hub
from postbus.server.keys import Grant, Scope, create_key
from postbus.server.serving import Serving, listen
from postbus.sources import SourceHost, Sources
from tests.sources.conftest import TENANT, events, until

ORDERS = "far.away.orders"


class Far:
    """Another Postbus: a real server on a real socket."""

    def __init__(self, hub: Hub, serving: Serving) -> None:
        self.hub = hub
        self.serving = serving
        self.url = f"http://127.0.0.1:{serving.port}"

    async def publish(self, *payloads: Any, **facts: Any) -> None:
        await self.hub.log.append(ORDERS, [draft(ORDERS, "shop", payload, **facts) for payload in payloads])


@pytest.fixture
async def far(tmp_path: Path) -> AsyncIterator[Far]:
    hub = await Hub.open(tmp_path / "far")
    serving = Serving(hub, [listen("127.0.0.1", 0)], grace_s=2)
    await serving.start()
    await hub.log.create_stream(ORDERS, StreamSettings(partitions=2))
    yield Far(hub, serving)
    await serving.stop()
    await hub.close()


@pytest.fixture
async def add(sources: Sources, far: Far) -> Any:
    async def register(name: str = "orders", **settings: Any) -> None:
        given = {"url": far.url, "remote_topic": ORDERS, "allow_private": True, "interval_s": 0.05}
        await sources.add(name, "bus", given | settings)

    return register


async def test_events_come_over_with_their_bytes_once(host: SourceHost, log: SqliteLog, far: Far, add: Any) -> None:
    facts = {"key": "k", "variant": "v", "metadata": {"m": 1}, "headers": {"h": "x"}, "correlation_id": "c"}
    await far.publish(b'{"a":   1.0}', occurred_at="2026-01-01T00:00:00Z", **facts)
    await add()
    for _ in range(3):
        assert (await host.poll(TENANT, "orders")).error is None
    (event,) = await events(log, "orders")
    assert (event.payload_json, event.topic, event.key, event.variant) == (b'{"a":   1.0}', ORDERS, "k", "v")
    assert (event.metadata, event.correlation_id, event.trust) == ({"m": 1}, "c", "untrusted")
    assert event.occurred_at.isoformat() == "2026-01-01T00:00:00+00:00"
    assert event.headers["h"] == "x"
    assert event.headers["origin_source"] == "shop"
    assert event.native_id == event.headers["origin_id"]
    assert str(event.native_id).startswith(f"{ORDERS}/")


async def test_all_partitions_are_read_in_order_in_batches(
    host: SourceHost, log: SqliteLog, far: Far, add: Any
) -> None:
    for number in range(500):
        await far.publish(number, key=f"k{number % 7}")
    await add()
    for _ in range(10):
        await host.poll(TENANT, "orders")
    found = await events(log, "orders")
    assert sorted(event.payload for event in found) == list(range(500))
    for key in {event.key for event in found}:
        own = [event.payload for event in found if event.key == key]
        assert own == sorted(own)


async def test_it_follows_and_survives_the_other_side_going_away(
    host: SourceHost, log: SqliteLog, far: Far, add: Any, sources: Sources
) -> None:
    await add()
    async with host:
        await far.publish(1)

        async def one() -> bool:
            return len(await events(log, "orders")) == 1

        await until(one)
        await far.serving.stop()

        async def failing() -> bool:
            return (await sources.get("orders")).failures > 0

        await until(failing)
    assert "cannot be reached" in str((await sources.get("orders")).last_error)


async def test_it_may_begin_with_what_comes(host: SourceHost, log: SqliteLog, far: Far, add: Any) -> None:
    await far.publish("old")
    await add(start="latest")
    await host.poll(TENANT, "orders")
    await far.publish("new")
    await host.poll(TENANT, "orders")
    assert [event.payload for event in await events(log, "orders")] == ["new"]


async def test_a_topic_that_was_made_again_is_read_from_its_beginning(
    host: SourceHost, log: SqliteLog, far: Far, add: Any
) -> None:
    await far.publish(1)
    await add()
    await host.poll(TENANT, "orders")
    await far.hub.log.delete_stream(ORDERS)
    await far.hub.log.create_stream(ORDERS, StreamSettings())
    await far.publish(2)
    await host.poll(TENANT, "orders")
    assert [event.payload for event in await events(log, "orders")] == [1, 2]


async def test_its_key_comes_from_the_environment(
    host: SourceHost, log: SqliteLog, far: Far, add: Any, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    grants = [Grant(Scope.SUBSCRIBE)]
    key = (await create_key(far.hub.log, far.hub.clock, tenant="far.away", grants=grants))[1]
    await far.publish(1)
    await add("bare")
    await add(key_env="FAR_KEY")
    assert "401" in str((await host.poll(TENANT, "bare")).error)
    assert "FAR_KEY is not set" in str((await host.poll(TENANT, "orders")).error)
    monkeypatch.setenv("FAR_KEY", key)
    assert (await host.poll(TENANT, "orders")).error is None
    assert len(await events(log, "orders")) == 1
    assert key not in str(await sources.all())


async def test_two_buses_that_follow_each_other_do_not_go_round(far: Far, tmp_path: Path) -> None:
    near = await Hub.open(tmp_path / "near")
    serving = Serving(near, [listen("127.0.0.1", 0)], grace_s=2)
    await serving.start()
    await near.log.create_stream(f"{TENANT}.mirror", StreamSettings())
    there = {"remote_topic": ORDERS, "stream": f"{TENANT}.mirror"}
    back = {"remote_topic": f"{TENANT}.mirror", "stream": ORDERS}
    common = {"allow_private": True, "interval_s": 0.05}
    await Sources(near.log, TENANT).add("there", "bus", {"url": far.url} | there | common)
    url = f"http://127.0.0.1:{serving.port}"
    await Sources(far.hub.log, "far.away").add("back", "bus", {"url": url} | back | common)
    await far.publish("round")

    async def came_back() -> bool:
        stats = await far.hub.log.get_stream_stats(ORDERS)
        return stats.count >= 2

    await until(came_back)
    await asyncio.sleep(1.0)
    assert (await far.hub.log.get_stream_stats(ORDERS)).count == 2
    assert (await near.log.get_stream_stats(f"{TENANT}.mirror")).count == 1
    await Sources(far.hub.log, "far.away").remove("back")  # else it may come in while the server goes
    await asyncio.sleep(0.5)
    await serving.stop()
    await near.close()


@pytest.mark.parametrize(
    "settings",
    [{"remote_topic": "orders"}, {"url": "no"}, {"key_env": "a b"}, {"key": "pb_x"}, {"allow_private": False}],
)
async def test_bad_settings_are_refused(add: Any, sources: Sources, settings: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        await add(**settings)
    assert await sources.all() == []
