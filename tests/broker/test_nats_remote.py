"""A JetStream stream behind the spool, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import nats
import pytest
import pytest_asyncio
from nats.js.api import DiscardPolicy, StreamConfig

from postbus.broker import Breaker, Message, Relay
from postbus.broker.nats import NatsBroker
from postbus.broker.nats_link import NatsLink
from postbus.broker.nats_remote import NatsRemote
from postbus.bus.purge import dead_letters
from postbus.clock import SystemClock
from postbus.envelope import draft
from postbus.log import SqliteLog
from postbus.model import LimitExceeded, Refused, SpoolEntry, Unreachable
from tests.broker.nats_server import NatsServer
from tests.broker.remotes import STREAM, numbered
from tests.proxy import Proxy

PATIENCE_S = 60.0


@pytest_asyncio.fixture
async def link(server: NatsServer) -> AsyncIterator[NatsLink]:
    made = NatsLink(server.url)
    await made.start()
    await made.ready(PATIENCE_S)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def remote(link: NatsLink) -> NatsRemote:
    made = NatsRemote(link, stream="ORDERS")
    await made.ensure(["orders.>"])
    await made.ensure(["other.>"])  # what is there stays as it is
    return made


@pytest_asyncio.fixture
async def log(tmp_path: Path) -> AsyncIterator[SqliteLog]:
    opened = SqliteLog.open(tmp_path / "data")
    yield opened
    await opened.close()


async def stored(server: NatsServer) -> list[int]:
    client = await nats.connect(server.url)
    stream = client.jetstream()
    count = (await stream.stream_info("ORDERS")).state.messages
    reader = await stream.subscribe("orders.>", ordered_consumer=True)
    found = [msgspec.json.decode((await reader.next_msg(timeout=PATIENCE_S)).data) for _ in range(count)]
    await client.close()
    return found


async def test_an_acknowledged_event_has_its_place_and_an_identity_is_kept_once(remote: NatsRemote) -> None:
    receipts = [await remote.send(STREAM, f"id-{number}", numbered(number)) for number in (0, 1, 1, 2)]
    assert [(one.stream, one.offset, one.duplicate) for one in receipts] == [
        (STREAM, 0, False),
        (STREAM, 1, False),
        (STREAM, 1, True),
        (STREAM, 2, False),
    ]


async def test_listeners_of_the_broker_see_what_was_sent(server: NatsServer, remote: NatsRemote) -> None:
    broker = NatsBroker(server.url)
    await broker.start(wait_s=PATIENCE_S)
    async with await broker.subscribe("orders.*") as listener:
        await remote.send(STREAM, "a", draft("orders.paid", "shop", {"é": 1}, headers={"h": "ü"}))
        async with asyncio.timeout(PATIENCE_S):
            found = await listener.get()
    assert isinstance(found, Message)
    assert (found.payload, found.headers) == ({"é": 1}, {"h": "ü"})
    await broker.close()


async def test_it_knows_what_it_has_long_after_the_window_of_duplicates(server: NatsServer, link: NatsLink) -> None:
    client = await nats.connect(server.url)
    config = StreamConfig(name="ORDERS", subjects=["orders.>"], duplicate_window=0.1)
    await client.jetstream().add_stream(config)
    remote = NatsRemote(link, stream="ORDERS")
    now_us = SystemClock().now_us()
    for number in range(1200):
        await client.jetstream().publish("orders.paid", b"1", headers={"Nats-Msg-Id": f"id-{number}"})
    entries = [
        SpoolEntry(sequence=number, stream=STREAM, draft=numbered(number), identity=name, enqueued_at_us=now_us)
        for number, name in enumerate(["id-0", "new", "id-1199"])
    ]
    assert await remote.known(entries) == {"id-0", "id-1199"}
    assert await remote.known([]) == set()
    assert await NatsRemote(link, stream="NONE").known(entries) == set()
    assert (await client.jetstream().stream_info("ORDERS")).state.consumer_count == 0
    await client.close()


def entries(*numbers: int, topic: str = "orders.paid") -> list[SpoolEntry]:
    return [
        SpoolEntry(sequence=number, stream=STREAM, draft=numbered(number, topic), identity=f"id-{number}")
        for number in numbers
    ]


async def test_many_are_taken_in_order_and_nothing_behind_a_gap(server: NatsServer, remote: NatsRemote) -> None:
    assert await remote.send_many(entries(*range(100))) == (100, None)
    large = SpoolEntry(sequence=2, stream=STREAM, draft=draft("orders.paid", "shop", "x" * 1_048_400), identity="large")
    first, last = entries(100, 101)
    count, error = await remote.send_many([first, large, last])
    assert count == 1
    assert isinstance(error, LimitExceeded)
    assert await stored(server) == list(range(101))
    assert await remote.send_many([last, *entries(*range(102, 110))]) == (9, None)
    assert await stored(server) == list(range(110))


async def test_many_beside_another_publisher_get_through(server: NatsServer, remote: NatsRemote) -> None:
    peer = await nats.connect(server.url)

    async def disturb() -> None:
        while left:
            await peer.jetstream().publish("orders.other", b"-1")

    left = entries(*range(300))
    disturbing = asyncio.create_task(disturb())
    while left:
        count, error = await remote.send_many(left[:100])
        assert (count > 0, error) == (True, None)
        left = left[count:]
    await disturbing
    await peer.close()
    found = await stored(server)
    assert [one for one in found if one >= 0] == list(range(300))
    assert -1 in found


async def test_refusals_are_told_from_outages(server: NatsServer, link: NatsLink, remote: NatsRemote) -> None:
    with pytest.raises(Refused, match=r"no JetStream stream keeps the subject elsewhere\.x"):
        await remote.send(STREAM, "a", numbered(0, "elsewhere.x"))
    with pytest.raises(LimitExceeded, match="limit of the NATS server"):
        await remote.send(STREAM, "b", draft("orders.paid", "shop", "x" * 1_048_000, headers={"h": "x" * 4000}))
    client = await nats.connect(server.url)
    await client.jetstream().add_stream(StreamConfig(name="SMALL", subjects=["small.>"], max_msg_size=100))
    await client.jetstream().add_stream(
        StreamConfig(name="FULL", subjects=["full.>"], max_msgs=1, discard=DiscardPolicy.NEW)
    )
    await client.close()
    with pytest.raises(Refused, match="message size exceeds maximum"):
        await NatsRemote(link, stream="SMALL").send(STREAM, "c", draft("small.x", "shop", "x" * 200))
    full = NatsRemote(link, stream="FULL")
    await full.send(STREAM, "d", numbered(0, "full.x"))
    with pytest.raises(Unreachable, match="maximum messages exceeded"):
        await full.send(STREAM, "e", numbered(1, "full.x"))
    server.kill()
    with pytest.raises(Unreachable):
        await remote.send(STREAM, "f", numbered(0))
    with pytest.raises(Unreachable):
        await remote.known([SpoolEntry(sequence=1, stream=STREAM, draft=numbered(1), identity="g")])


async def test_lost_acknowledgements_and_cut_connections_double_and_reorder_nothing(
    server: NatsServer, remote: NatsRemote, log: SqliteLog
) -> None:
    assert remote is not None  # made the stream
    async with Proxy(server.port, drop=0.02, cut_s=0.8, seed=7) as proxy:
        link = NatsLink(f"nats://127.0.0.1:{proxy.port}")
        breaker = Breaker("remote", failures_max=1, open_s=0.05, open_s_max=0.1)
        relay = Relay(log, NatsRemote(link, stream="ORDERS"), breaker=breaker)
        await link.start()
        async with relay:
            spooled = 0
            for number in range(400):
                spooled += (await relay.publish(STREAM, numbered(number))).spooled
                if number % 40 == 39:
                    await relay.drained(PATIENCE_S)
            assert await relay.drained(60)
        await link.close()
        assert proxy.dropped > 0
    assert 0 < spooled < 400
    assert await stored(server) == list(range(400))
    assert await dead_letters(log, SystemClock(), "local.default").find(state=None) == []


async def test_a_server_that_hangs_is_an_outage_and_what_it_did_later_is_not_done_twice(
    server: NatsServer, link: NatsLink, remote: NatsRemote, log: SqliteLog
) -> None:
    breaker = Breaker("remote", failures_max=1, open_s=0.05, open_s_max=0.1)
    async with Relay(log, remote, breaker=breaker) as relay:
        assert not (await relay.publish(STREAM, numbered(0))).spooled
        server.pause()
        assert (await relay.publish(STREAM, numbered(1))).spooled  # it lies in the server's socket
        assert (await relay.publish(STREAM, numbered(2))).spooled
        server.resume()
        assert await relay.drained(PATIENCE_S)
        assert link.connected
    assert await stored(server) == [0, 1, 2]
