"""What only a broker on NATS has: outages, and peers that are not Postbus."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client

from postbus.broker import Listener, Message, Missed
from postbus.broker.nats import NatsBroker
from postbus.model import Invalid, InvalidPayload, LimitExceeded, Unreachable
from tests.broker.nats_server import NatsServer

PATIENCE_S = 60.0


@pytest_asyncio.fixture
async def broker(server: NatsServer) -> AsyncIterator[NatsBroker]:
    made = NatsBroker(server.url)
    await made.start(wait_s=PATIENCE_S)
    yield made
    await made.close()


async def got(listener: Listener) -> Message | Missed:
    async with asyncio.timeout(PATIENCE_S):
        return await listener.get()


@contextlib.asynccontextmanager
async def peer_of(server: NatsServer) -> AsyncIterator[Client]:
    peer = await nats.connect(server.url)
    try:
        yield peer
    finally:
        await peer.close()


def state(broker: NatsBroker) -> str:
    return broker.breaker.state.value


async def back(broker: NatsBroker) -> None:
    await broker.link.ready(PATIENCE_S)


async def test_listeners_heal_after_the_server_died_and_are_told_to_read_again(
    server: NatsServer, broker: NatsBroker
) -> None:
    old = await broker.subscribe("a.*")
    for number in range(3):
        await broker.publish("a.b", number)
        assert await got(old) == Message("a.b", str(number).encode())
        server.kill()
        assert await got(old) == Missed(None)
        during = await broker.subscribe("a.>")  # made while nobody is there
        with pytest.raises(Unreachable):
            await broker.publish("a.b", "lost")
        server.start()
        await back(broker)
        await broker.publish("a.b", "new")
        assert await got(old) == await got(during) == Message("a.b", b'"new"')
        await during.close()


async def test_the_breaker_opens_at_the_first_failure_and_closes_after_the_outage(
    server: NatsServer, broker: NatsBroker
) -> None:
    server.kill()
    async with asyncio.timeout(PATIENCE_S):
        while broker.link.connected:  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.01)
    with pytest.raises(Unreachable, match="NATS cannot be reached"):
        await broker.publish("a", 1)
    assert state(broker) == "open"
    with pytest.raises(Unreachable, match="nats is away"):
        await broker.request("a", 1)
    server.start()
    await back(broker)
    await broker.publish("a", 1)
    assert state(broker) == "half_open"
    await broker.publish("a", 1)
    assert state(broker) == "closed"


async def test_a_request_ends_when_the_connection_is_lost(server: NatsServer, broker: NatsBroker) -> None:
    async with await broker.subscribe("a") as listener:
        asked = asyncio.create_task(broker.request("a", 1, timeout_s=600))
        await got(listener)
        server.kill()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(Unreachable, match=r"NATS was (lost|closed)"):
                await asked


async def test_it_comes_back_when_the_server_dies_with_something_unsent(
    server: NatsServer, broker: NatsBroker, caplog: pytest.LogCaptureFixture
) -> None:
    listener = await broker.subscribe("a")
    client = broker.link.client
    server.pause()
    sending = []
    async with asyncio.timeout(PATIENCE_S):
        while not client.pending_data_size:  # until the connection takes no more
            sending.append(asyncio.create_task(broker.publish("b", "x" * 900_000)))
            await asyncio.sleep(0.01)
    server.kill()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*sending, return_exceptions=True)
        assert await got(listener) == Missed(None)
        server.start()
        await back(broker)
    await broker.publish("a", 1)
    assert await got(listener) == Message("a", b"1")
    del client
    gc.collect()
    assert "Traceback" not in caplog.text


async def test_no_password_is_written_down(server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    broker = NatsBroker(server.url.replace("://", "://kate:s3cret@"))
    await broker.start(wait_s=PATIENCE_S)
    listener = await broker.subscribe("a")
    server.kill()
    assert await got(listener) == Missed(None)
    with pytest.raises(Unreachable) as refused:
        await broker.publish("a", 1)
    await broker.close()
    assert "the connection was lost" in caplog.text
    assert "s3cret" not in caplog.text + str(refused.value)
    with pytest.raises(Invalid) as wrong:
        NatsBroker("http://kate:s3cret@127.0.0.1:4222")
    assert "s3cret" not in str(wrong.value)


async def test_it_starts_without_a_server_and_connects_when_there_is_one(server: NatsServer) -> None:
    server.kill()
    broker = NatsBroker(server.url)
    with pytest.raises(Unreachable, match="NATS cannot be reached"):
        await broker.start(wait_s=0.3)
    listener = await broker.subscribe("a")
    server.start()
    await back(broker)
    await broker.publish("a", 1)
    assert await got(listener) == Message("a", b"1")
    await broker.close()


async def test_who_listens_hears_what_anybody_says_from_then_on(server: NatsServer, broker: NatsBroker) -> None:
    async with peer_of(server) as peer:
        for number in range(100):
            listener = await broker.subscribe(f"a.{number}")
            await peer.publish(f"a.{number}", b"1")
            assert await got(listener) == Message(f"a.{number}", b"1")


async def test_peers_that_are_not_postbus(server: NatsServer, broker: NatsBroker) -> None:
    async with peer_of(server) as peer:
        listener = await broker.subscribe(">")
        await peer.publish("a.b", b"not JSON", headers={"Postbus": "{not ours"})
        await peer.publish("a.b", b"1", headers={"Other": "x", "Postbus": '{"headers": {"k": 1}}'})
        found = await got(listener)
        assert isinstance(found, Message)
        assert (found.payload_json, found.headers) == (b"not JSON", {})
        with pytest.raises(InvalidPayload):
            _ = found.payload
        assert await got(listener) == Message("a.b", b"1")


async def test_what_the_server_would_not_take_is_refused_and_the_connection_stays(broker: NatsBroker) -> None:
    listener = await broker.subscribe("a")
    headers = {f"h{number}": "x" * 4096 for number in range(20)}
    with pytest.raises(LimitExceeded, match="limit of the NATS server"):
        await broker.publish("a", "x" * 1_000_000, headers=headers)
    await broker.publish("a", 2)
    assert await got(listener) == Message("a", b"2")
    assert state(broker) == "closed"


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(Invalid, match="not the address of a NATS server"):
        NatsBroker("http://127.0.0.1:4222")
