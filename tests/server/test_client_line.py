"""The Python client on a bad line: lost answers, cut streams, servers that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from postbus.client import Client
from postbus.model import Event, Invalid, NotFound, QuotaExceeded, Unreachable
from tests.faults.campaign import FULL
from tests.proxy import Proxy
from tests.server.conftest import RunningServer

PUBLISHES = 2000 if FULL else 400
STREAMED, STREAM_S, CUT_S = (5000, 20, 1.0) if FULL else (1000, 1.5, 0.3)


@pytest_asyncio.fixture
async def bus(server: RunningServer) -> AsyncIterator[Client]:
    async with Client(server.url) as made:
        yield made


# --- a bad line -------------------------------------------------------------------------------------------------------


async def test_nothing_is_lost_or_doubled_when_a_third_of_the_answers_is_lost(server: RunningServer) -> None:
    server.topic("local.default.orders")
    async with Proxy(server.port, drop=0.3) as proxy, Client(proxy.url, timeout_s=5) as bus:

        async def publish(worker: int) -> list[int]:
            numbers = range(worker, PUBLISHES, 8)
            return [(await bus.publish("orders", number)).offset for number in numbers]

        offsets = [offset for found in await asyncio.gather(*map(publish, range(8))) for offset in found]
        assert proxy.dropped > PUBLISHES / 10
    events = server.call(server.hub.log.fetch("local.default.orders", 0, 0, 10 * PUBLISHES))
    assert Counter(event.payload for event in events) == Counter(range(PUBLISHES))
    assert sorted(offsets) == [*range(PUBLISHES)]


async def test_batches_are_not_doubled_either(server: RunningServer) -> None:
    server.topic("local.default.orders")
    async with Proxy(server.port, drop=0.5, seed=3) as proxy, Client(proxy.url, timeout_s=5) as bus:
        for start in range(0, 100, 10):
            receipts = await bus.publish_batch(
                [{"topic": "orders", "payload": number} for number in range(start, start + 10)]
            )
            assert [receipt.offset for receipt in receipts] == [*range(start, start + 10)]
        assert proxy.dropped > 0
    assert (await _events(server, "local.default.orders")) == [*range(100)]


async def _events(server: RunningServer, stream: str) -> list[Any]:
    events = await asyncio.to_thread(lambda: server.call(server.hub.log.fetch(stream, 0, 0, 100_000)))
    return [event.payload for event in events]


async def test_what_must_not_be_sent_twice_is_not_and_that_is_said(server: RunningServer) -> None:
    async with Proxy(server.port, drop=1.0) as proxy, Client(proxy.url, patience_s=1) as bus:
        with pytest.raises(Unreachable, match="not known whether it was done"):
            await bus.create_topic("orders")
        assert proxy.connections == 1
    async with Client(server.url) as bus:
        assert (await bus.topic("orders"))["topic"] == "local.default.orders"


async def test_a_delete_whose_answer_was_lost_is_done(server: RunningServer) -> None:
    server.topic("local.default.orders")

    class Once(Proxy):
        @property
        def _drop(self) -> float:
            return 1.0 if self.connections == 1 else 0.0

        @_drop.setter
        def _drop(self, _: float) -> None:
            pass

    async with Once(server.port) as proxy, Client(proxy.url) as bus:
        await bus.delete_topic("orders")
        assert proxy.connections == 2


async def test_a_server_that_comes_up_late_is_waited_for_and_one_that_never_does_is_not(
    server: RunningServer,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    async with Client(f"http://127.0.0.1:{port}", patience_s=0.3) as bus:
        with pytest.raises(Unreachable, match="cannot be reached"):
            await bus.topics()
    async with Client(f"http://127.0.0.1:{port}", patience_s=30) as bus:
        asking = asyncio.create_task(bus.topics())
        await asyncio.sleep(0.2)
        assert not asking.done()
        async with Proxy(server.port, at=port):
            assert isinstance(await asking, list)


async def test_a_full_server_is_asked_again_when_it_says_so() -> None:
    answers = [
        (429, {"retry-after": "1"}, b'{"error":{"code":"quota_exceeded","message":"too fast"}}'),
        (503, {}, b'{"error":{"code":"backpressure","message":"full"}}'),
        (502, {}, b"<html></html>"),
        (200, {}, b'{"topic":"a.b.c","partition":0,"offset":5,"duplicate":false,"produced_at":"2026-01-01T00:00:00Z"}'),
    ]
    async with _scripted(answers) as (url, asked), Client(url) as bus:
        receipt = await bus.publish("a.b.c", 1)
    assert receipt.offset == 5
    assert len(asked) == 4
    assert len({body for _, body in asked}) == 1  # under the same identity each time


async def test_a_server_that_asks_for_too_long_a_pause_is_not_waited_for() -> None:
    answers = [(429, {"retry-after": "60"}, b'{"error":{"code":"quota_exceeded","message":"too fast"}}')]
    async with _scripted(answers) as (url, asked), Client(url, patience_s=5) as bus:
        with pytest.raises(QuotaExceeded) as refused:
            await bus.publish("a.b.c", 1)
    assert refused.value.retry_after_s == 60
    assert len(asked) == 1


@contextlib.asynccontextmanager
async def _scripted(
    answers: list[tuple[int, dict[str, str], bytes]],
) -> AsyncIterator[tuple[str, list[tuple[str, bytes]]]]:
    """Run a server that gives these answers, one to each request, and keeps what it was asked."""
    asked: list[tuple[str, bytes]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0)
                asked.append((head.splitlines()[0], await reader.readexactly(length)))
                status, headers, body = answers[len(asked) - 1]
                lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}"]
                lines += [f"{name}: {value}" for name, value in headers.items()]
                writer.write("\r\n".join([*lines, "", ""]).encode() + body)
                await writer.drain()
        writer.close()

    serving: list[asyncio.Task[None]] = []
    server = await asyncio.start_server(lambda *ends: serving.append(asyncio.create_task(serve(*ends))), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()
        await asyncio.gather(*serving)


# --- streams ----------------------------------------------------------------------------------------------------------


async def _read(events: AsyncIterator[Event], count: int) -> list[Event]:
    got: list[Event] = []
    async with asyncio.timeout(60):
        async for event in events:
            got.append(event)
            if len(got) >= count:
                break
    await events.aclose()  # type: ignore[attr-defined]  # it is a generator
    return got


async def _publish(server: RunningServer, count: int, *, pause_s: float = 0.0) -> None:
    async with Client(server.url) as bus:
        for start in range(0, count, 10):
            await bus.publish_batch(
                [{"topic": "orders", "payload": n, "key": f"k{n % 7}"} for n in range(start, start + 10)]
            )
            await asyncio.sleep(pause_s)


async def test_a_stream_that_is_cut_again_and_again_has_no_gap_and_no_duplicate(server: RunningServer) -> None:
    server.topic("local.default.orders")
    async with Proxy(server.port, cut_s=CUT_S) as proxy, Client(proxy.url) as bus:
        publishing = asyncio.create_task(_publish(server, STREAMED, pause_s=10 * STREAM_S / STREAMED))
        got = await _read(bus.subscribe("tail", "orders", start="earliest"), STREAMED)
        await publishing
        assert proxy.connections >= 3
    assert [event.payload for event in got] == [*range(STREAMED)]


async def test_a_durable_stream_over_partitions_that_is_cut_hands_out_each_event_once(server: RunningServer) -> None:
    server.topic("local.default.orders", partitions=3)
    async with Proxy(server.port, cut_s=CUT_S) as proxy, Client(proxy.url) as bus:
        await bus.create_subscription("worker", "orders", starting_offset="earliest", ack_mode="auto_on_delivery")
        publishing = asyncio.create_task(_publish(server, STREAMED, pause_s=10 * STREAM_S / STREAMED))
        got = await _read(bus.subscribe("worker"), STREAMED)
        await publishing
        assert proxy.connections >= 3
    assert Counter(event.payload for event in got) == Counter(range(STREAMED))
    for partition in range(3):
        offsets = [event.offset for event in got if event.partition == partition]
        assert offsets == sorted(offsets)


async def test_what_a_stream_hands_out_is_acked_by_its_reader(bus: Client, server: RunningServer) -> None:
    server.topic("local.default.orders")
    await bus.create_subscription("worker", "orders", starting_offset="earliest")
    await _publish(server, 20)
    first = await _read(bus.subscribe("worker", "orders"), 12)
    assert [event.offset for event in first] == [*range(12)]
    await bus.ack_through("worker", 0, 11)
    assert (await bus.lag("worker"))["total_lag"] == 8


async def test_a_stream_outlives_its_server(start_server: Callable[..., RunningServer]) -> None:
    server = start_server()
    server.topic("local.default.orders")
    await _publish(server, 50)
    async with Proxy(server.port) as proxy, Client(proxy.url) as bus:
        events = bus.subscribe("tail", "orders", start="earliest")
        got = [await anext(events) for _ in range(30)]
        await asyncio.to_thread(server.stop)
        again = await asyncio.to_thread(start_server, server.data)
        proxy.to(again.port)
        await _publish(again, 50)
        got += await _read(events, 70)
    assert [event.payload for event in got] == [*range(50), *range(50)]


async def test_a_stream_that_cannot_be_is_refused(bus: Client) -> None:
    for name, topic in (("tail", "nothing"), ("nobody", None)):
        with pytest.raises(NotFound):
            await anext(bus.subscribe(name, topic))
    await bus.create_topic("orders")
    with pytest.raises(Invalid):
        await anext(bus.subscribe("tail", "orders", start="whenever"))
    with pytest.raises(Invalid, match="Last-Event-ID"):
        await anext(bus.subscribe("tail", "orders", last_id="rubbish"))
