"""``GET /subscribe/{id}`` over a real socket: order, resuming, sharing, slow readers, shutdown."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.sse_reader import CuttingProxy, Message, Reader, follow, open_stream, until
from tests.server.test_subscriptions import BASE, CREATE, DLQ, PATH, TOPIC, make, publish, pull, refused, wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import httpx2

    from tests.server.conftest import RunningServer

READ = f"/v1/bus/subscribe/reader?topic={TOPIC}"
MINE = f"/v1/bus/subscribe/order-processor?topic={TOPIC}"


async def published(server: RunningServer, count: int, first: int = 0, **fields: Any) -> None:
    await asyncio.to_thread(publish, server.client, count, first=first, **fields)


def numbers(messages: list[Message]) -> list[int]:
    return [message.number for message in messages]


def total_lag(server: RunningServer) -> int:
    return int(server.client.get(f"{PATH}/lag").json()["total_lag"])


async def settled(server: RunningServer, lag: int = 0) -> None:
    await asyncio.to_thread(wait_for, lambda: total_lag(server) == lag)


# --- what is sent -----------------------------------------------------------------------------------------------------


async def test_events_come_as_they_are_published(server: RunningServer) -> None:
    server.topic(TOPIC)
    publish(server.client, 3)
    async with open_stream(server.url, f"{READ}&from=earliest") as (response, messages):
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        found = await follow(messages, 3)
        assert numbers(found) == [0, 1, 2]
        assert [message.id for message in found] == ["0:0", "0:1", "0:2"]
        shown = server.client.get(f"/v1/bus/events/{TOPIC}/0/1").json()
        assert found[1].data == shown
        await published(server, 2, 3)
        assert numbers(await follow(messages, 2)) == [3, 4]


@pytest.mark.parametrize(("start", "first"), [("earliest", 0), ("2", 2), ("1970-01-01T00:00:00Z", 0)])
async def test_where_a_reader_begins(server: RunningServer, start: str, first: int) -> None:
    server.topic(TOPIC)
    publish(server.client, 4)
    async with open_stream(server.url, f"{READ}&from={start}") as (_, messages):
        assert numbers(await follow(messages, 4 - first)) == [*range(first, 4)]


async def test_the_default_is_what_comes_next(server: RunningServer) -> None:
    server.topic(TOPIC)
    publish(server.client, 4)
    async with open_stream(server.url, READ) as (_, messages):
        assert (await anext(messages)).kind == "comment"
        await published(server, 1, 4)
        assert numbers(await follow(messages, 1)) == [4]


async def test_line_breaks_in_a_payload_stay_one_event(server: RunningServer) -> None:
    server.topic(TOPIC)
    body = b'{"topic":"%s","payload":{\n "n":\r\n 7,\r "text": "a\\nb\\r"}}' % TOPIC.encode()
    server.client.post("/v1/bus/publish", content=body, headers={"content-type": "application/json"})
    async with open_stream(server.url, f"{READ}&from=earliest") as (_, messages):
        message = (await follow(messages, 1))[0]
    assert message.data["payload"] == {"n": 7, "text": "a\nb\r"}


async def test_silence_is_filled_with_keep_alives(server: RunningServer) -> None:
    server.topic(TOPIC)
    server.hub.readers.keep_alive_s = 0.05
    async with open_stream(server.url, READ) as (_, messages), asyncio.timeout(60):
        found = [(await anext(messages)).data for _ in range(4)]
    assert found == ["postbus", "keep-alive", "keep-alive", "keep-alive"]


def test_what_cannot_be_read(server: RunningServer) -> None:
    client = make(server)
    refused(client.get("/v1/bus/subscribe/reader"), 400)
    refused(client.get("/v1/bus/subscribe/reader?topic=agents.demo.none"), 404)
    refused(client.get("/v1/bus/subscribe/reader?namespace=agents&tenant=demo"), 404)
    refused(client.get("/v1/bus/subscribe/no%20good?topic=agents.demo.orders"), 400)
    refused(client.get(f"{READ}&from=yesterday"), 400)
    refused(client.get(f"{READ}&from=99"), 400)
    refused(client.get(f"{READ}&namespace=agents&tenant=other"), 400, "cross-tenant")
    for bad in ("x", "0", "0:", "0:x", "0:1,", "0:1;1:2", "0:" + "9" * 40):
        refused(client.get(READ, headers={"last-event-id": bad}), 400, "Last-Event-ID")
    refused(client.get(f"/v1/bus/subscribe/order-processor?topic={DLQ}"), 400, "is on")
    assert client.request("HEAD", READ).status_code == 405


def test_keys(server: RunningServer) -> None:
    make(server)
    stranger = server.connect(server.key("agents.other", "subscribe"))
    elsewhere = server.connect(server.key("agents.demo", ("subscribe", "agents.demo.bills")))
    publisher = server.connect(server.key("agents.demo", "publish"))
    refused(server.connect().get(READ), 401)
    refused(stranger.get(READ), 404)
    refused(stranger.get(MINE, headers={"last-event-id": "0:0"}), 404)
    refused(elsewhere.get(READ), 403)
    refused(elsewhere.get("/v1/bus/subscribe/order-processor"), 403)
    refused(publisher.get(READ), 403)


async def test_a_reader_cut_off_before_its_first_event_misses_nothing(server: RunningServer) -> None:
    server.topic(TOPIC)
    for number in range(3):
        server.client.post("/v1/bus/publish", json={"topic": TOPIC, "payload": {"n": number}})
    async with open_stream(server.url, f"{READ}&from=latest") as (response, _):
        lines = [line async for line in _until_blank(response)]
    (place,) = [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]
    assert place == "0:2"
    server.client.post("/v1/bus/publish", json={"topic": TOPIC, "payload": {"n": 3}})
    async with open_stream(server.url, f"{READ}&from=latest", place) as (_, messages):
        assert numbers(await follow(messages, 1)) == [3]


async def _until_blank(response: httpx2.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if not line:
            return
        yield line


# --- resuming ---------------------------------------------------------------------------------------------------------


async def test_a_reader_resumes_across_partitions_and_a_restart(
    server: RunningServer, start_server: Callable[..., RunningServer]
) -> None:
    server.topic(TOPIC, partitions=3)
    events = [{"topic": TOPIC, "payload": {"n": n}, "key": f"k{n}"} for n in range(300)]
    server.client.post("/v1/bus/publish/batch", json={"events": events})
    seen: list[Message] = []
    last = None
    for stop in (7, 50, 120):
        async with open_stream(server.url, f"{READ}&from=earliest", last) as (_, messages):
            seen += await follow(messages, stop - len(seen))
            last = seen[-1].id
    assert last is not None
    assert len(last.split(",")) == 3
    server.stop()
    server = start_server(server.data)
    async with open_stream(server.url, f"{READ}&from=earliest", last) as (_, messages):
        seen += await follow(messages, 300 - len(seen))
    assert sorted(numbers(seen)) == [*range(300)]
    for partition in range(3):
        offsets = [message.address[1] for message in seen if message.address[0] == partition]
        assert offsets == [*range(len(offsets))]


@pytest.mark.parametrize("kind", ["passing", "auto_on_delivery", "manual"])
async def test_through_a_proxy_that_cuts_nothing_is_missing_or_twice(server: RunningServer, kind: str) -> None:
    path = f"{READ}&from=earliest"
    if kind == "passing":
        server.topic(TOPIC)
    else:
        make(server, ack_mode=kind)
        path = MINE
    total = 900
    proxy = CuttingProxy(server.port, 0.25)
    async with proxy as url:
        reader = Reader(url, path)
        for first in range(0, total, 30):
            await published(server, 30, first)
            await asyncio.sleep(0.05)
        found = await reader.until(total)
        await asyncio.sleep(0.3)
        await reader.stop()
    assert numbers(found) == [*range(total)]
    assert proxy.cuts >= 4
    if kind == "auto_on_delivery":
        await settled(server)
    elif kind == "manual":
        assert total_lag(server) == total


@pytest.mark.parametrize("kind", ["passing", "auto_on_delivery", "manual"])
async def test_a_reader_that_is_back_before_the_server_knows_replaces_itself(server: RunningServer, kind: str) -> None:
    path = f"{READ}&from=earliest"
    if kind == "passing":
        server.topic(TOPIC)
    else:
        make(server, ack_mode=kind)
        path = MINE
    publish(server.client, 10)
    async with open_stream(server.url, path) as (_, old):
        last = (await follow(old, 10))[2].id
        async with open_stream(server.url, path, last) as (_, messages):
            assert numbers(await follow(messages, 7)) == [*range(3, 10)]
            async with asyncio.timeout(60):
                rest = [message async for message in old if message.kind != "comment"]
            assert [message.data["code"] for message in rest] == ["replaced"]
            await published(server, 5, 10)
            assert numbers(await follow(messages, 5)) == [*range(10, 15)]


async def test_a_topic_made_again_is_read_from_its_beginning(server: RunningServer) -> None:
    server.topic(TOPIC)
    publish(server.client, 9)
    assert server.client.delete(f"/v1/bus/topics/{TOPIC}").status_code == 204
    server.topic(TOPIC)
    publish(server.client, 2, first=0)
    async with open_stream(server.url, READ, "0:8") as (_, messages):
        assert numbers(await follow(messages, 2)) == [0, 1]


async def test_a_reader_is_told_when_retention_was_faster(server: RunningServer) -> None:
    server.topic(TOPIC, retention_beats_consumers=True)
    publish(server.client, 10)
    server.call(server.hub.log.trim(TOPIC, before=6))
    async with open_stream(server.url, READ, "0:1") as (_, messages), asyncio.timeout(60):
        found = [message async for message in take(messages, 5)]
    assert (found[0].kind, found[0].data["code"], found[0].data["missed"]) == ("bus.error", "gap", 4)
    assert numbers(found[1:]) == [6, 7, 8, 9]


async def take(messages: AsyncIterator[Message], count: int) -> AsyncIterator[Message]:
    async for message in messages:
        if message.kind != "comment":
            yield message
            count -= 1
        if not count:
            return


async def test_a_topic_that_is_removed_ends_its_streams(server: RunningServer) -> None:
    server.topic(TOPIC)
    server.hub.readers.keep_alive_s = 0.1
    async with open_stream(server.url, READ) as (_, messages), asyncio.timeout(60):
        await anext(messages)
        await asyncio.to_thread(server.client.delete, f"/v1/bus/topics/{TOPIC}")
        rest = [message async for message in messages if message.kind != "comment"]
    assert [(message.kind, message.data["code"]) for message in rest] == [("bus.error", "not_found")]


# --- subscriptions ----------------------------------------------------------------------------------------------------


async def test_a_subscription_knows_its_place_whatever_from_says(server: RunningServer) -> None:
    client = make(server, 10)
    client.post(f"{PATH}/ack", json={"partition": 0, "offset": 3})
    async with open_stream(server.url, f"{MINE}&from=earliest") as (_, messages):
        assert numbers(await follow(messages, 6)) == [*range(4, 10)]


async def test_manual_acks_by_lease_and_by_offset(server: RunningServer) -> None:
    client = make(server, 6)
    async with open_stream(server.url, MINE) as (response, messages):
        found = await follow(messages, 6)
        secret = response.headers["postbus-lease"]
        names = [f"{secret}.{message.address[0]}.{message.address[1]}" for message in found]
        acked = await asyncio.to_thread(client.post, f"{PATH}/ack", json={"lease_ids": names[:2]})
        assert acked.json() == {"committed": True, "acked": 2}
        assert total_lag(server) == 4
        await asyncio.to_thread(client.post, f"{PATH}/ack", json={"partition": 0, "offset": 4})
        assert total_lag(server) == 1


async def test_unacked_events_come_again_on_the_stream_and_end_as_dead_letters(server: RunningServer) -> None:
    client = make(server, 1, ack_timeout_ms=150, max_attempts=3)
    async with open_stream(server.url, MINE) as (_, messages):
        assert numbers(await follow(messages, 3)) == [0, 0, 0]
        await settled(server)
    letters = client.get("/v1/bus/dlq?namespace=agents&tenant=demo").json()["letters"]
    assert [letter["attempts"] for letter in letters] == [3]


async def test_auto_on_delivery_is_acked_by_writing(
    server: RunningServer, start_server: Callable[..., RunningServer]
) -> None:
    make(server, 5, ack_mode="auto_on_delivery")
    async with open_stream(server.url, MINE) as (_, messages):
        last = (await follow(messages, 5))[2].id
        await settled(server)
    server.stop()
    server = start_server(server.data)
    async with open_stream(server.url, MINE, last) as (_, messages):
        again = await follow(messages, 2)
        assert numbers(again) == [3, 4]
        await published(server, 1, 5)
        assert numbers(await follow(messages, 1)) == [5]


async def test_after_a_restart_what_the_reader_has_is_not_sent_again(
    server: RunningServer, start_server: Callable[..., RunningServer]
) -> None:
    make(server, 10)
    async with open_stream(server.url, MINE) as (_, messages):
        last = (await follow(messages, 10))[5].id
    server.stop()
    server = start_server(server.data)
    async with open_stream(server.url, MINE, last) as (_, messages):
        assert numbers(await follow(messages, 4)) == [6, 7, 8, 9]
        acked = await asyncio.to_thread(server.client.post, f"{PATH}/ack", json={"partition": 0, "offset": 9})
        assert acked.status_code == 200
        assert total_lag(server) == 0


async def test_a_reader_that_acks_nothing_is_not_flooded(server: RunningServer, monkeypatch: Any) -> None:
    monkeypatch.setattr("postbus.server.readers.HELD_MAX", 10)
    client = make(server, 50)
    async with open_stream(server.url, MINE) as (_, messages):
        assert len(await follow(messages, 10)) == 10
        assert len(await asyncio.to_thread(pull, client, limit=100)) == 40
        await published(server, 5, 50)
        await asyncio.to_thread(client.post, f"{PATH}/ack", json={"partition": 0, "offset": 9})
        assert numbers(await follow(messages, 5)) == [50, 51, 52, 53, 54]


@pytest.mark.parametrize("durable", [True, False])
async def test_two_connections_on_one_id_share_the_work(server: RunningServer, durable: bool) -> None:
    path = MINE if durable else f"{READ}&from=earliest"
    if durable:
        make(server, ack_mode="auto_on_delivery")
    else:
        server.topic(TOPIC)
    readers = [Reader(server.url, path) for _ in range(2)]
    await until(lambda: all(reader.connections for reader in readers))
    for number in range(40):
        await published(server, 1, number)
    await until(lambda: sum(len(reader.messages) for reader in readers) >= 40)
    await asyncio.sleep(0.1)
    shares = [numbers(reader.messages) for reader in readers]
    for reader in readers:
        await reader.stop()
    assert sorted(shares[0] + shares[1]) == [*range(40)]
    assert all(len(share) >= 5 for share in shares), shares
    assert all(share == sorted(share) for share in shares)


async def test_two_readers_behind_a_cutting_proxy_share_without_gap_or_duplicate(server: RunningServer) -> None:
    make(server, ack_mode="auto_on_delivery")
    async with CuttingProxy(server.port, 0.3) as url:
        readers = [Reader(url, MINE) for _ in range(2)]
        for first in range(0, 300, 10):
            await published(server, 10, first)
            await asyncio.sleep(0.03)
        await until(lambda: len({one.number for reader in readers for one in reader.messages}) >= 300)
        for reader in readers:
            await reader.stop()
    assert sorted(message.number for reader in readers for message in reader.messages) == [*range(300)]


async def test_a_subscription_that_is_deleted_ends_its_streams(server: RunningServer) -> None:
    client = make(server)
    async with open_stream(server.url, MINE) as (_, messages), asyncio.timeout(60):
        await anext(messages)
        await asyncio.to_thread(client.delete, PATH)
        rest = [message async for message in messages if message.kind != "comment"]
    assert [message.data["code"] for message in rest] == ["not_found"]


# --- many, slow, ending -----------------------------------------------------------------------------------------------


async def test_many_readers_get_everything_and_each_event_is_encoded_once(server: RunningServer) -> None:
    server.topic(TOPIC)
    readers = [Reader(server.url, f"/v1/bus/subscribe/r{number}?topic={TOPIC}&from=earliest") for number in range(20)]
    await published(server, 200)
    for reader in readers:
        assert numbers(await reader.until(200)) == [*range(200)]
        await reader.stop()
    assert len(server.hub.readers.frames._bodies) == 200


def stalled(server: RunningServer, path: str) -> socket.socket:
    """Ask for a stream and read nothing of it."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(("127.0.0.1", server.port))
    made.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
    return made


async def test_a_slow_reader_is_told_and_closed_and_resumes_without_loss(server: RunningServer) -> None:
    server.topic(TOPIC)
    server.hub.readers.slow_s = 0.3
    big = "x" * 20_000
    events = [{"topic": TOPIC, "payload": {"n": n, "text": big}} for n in range(300)]
    for start in range(0, 300, 50):
        server.client.post("/v1/bus/publish/batch", json={"events": events[start : start + 50]})
    made = stalled(server, f"{READ}&from=earliest")
    good = Reader(server.url, f"/v1/bus/subscribe/good?topic={TOPIC}&from=earliest")
    assert numbers(await good.until(300)) == [*range(300)]
    await good.stop()
    await until(lambda: server.hub.quotas.connections()["agents.demo"] == 0)  # it was given up on
    received = await asyncio.to_thread(read_all, made)
    text = received.decode()
    assert "event: bus.error" in text
    assert '"code":"slow"' in text
    ids = [line.removeprefix("id: ").strip() for line in text.splitlines() if line.startswith("id: ")]
    got = len(ids) - 1  # the first one is where it began
    assert got < 300
    async with open_stream(server.url, READ, ids[-1]) as (_, messages):
        rest = await follow(messages, 300 - got)
    assert numbers(rest) == [*range(got, 300)]


def read_all(made: socket.socket) -> bytes:
    made.settimeout(60)
    pieces = []
    while piece := made.recv(1 << 16):
        pieces.append(piece)
    made.close()
    return b"".join(pieces)


async def test_a_server_that_ends_tells_its_readers(server: RunningServer) -> None:
    make(server)
    for path in (READ, MINE):
        async with open_stream(server.url, path) as (_, messages), asyncio.timeout(60):
            await anext(messages)
            if path == READ:
                continue
            ending = threading.Thread(target=lambda: server.call(server.serving.stop()))
            ending.start()
            rest = [message async for message in messages if message.kind != "comment"]
            await asyncio.to_thread(ending.join)
            assert [message.data["code"] for message in rest] == ["stopping"]


def test_connections_are_counted_and_given_back(server: RunningServer) -> None:
    from postbus.server.quotas import Quota, set_quota  # noqa: PLC0415 - kept beside its use

    server.call(set_quota(server.hub.log, "agents.demo", Quota(sse_connections=1)))
    make(server)
    first = stalled(server, READ)
    assert b"200 OK" in first.recv(100)
    second = stalled(server, READ)
    assert b"429" in second.recv(100)
    second.close()
    first.close()

    def freed() -> bool:
        second = stalled(server, READ)
        found = b"200 OK" in second.recv(100)
        second.close()
        return found

    assert any(freed() for _ in range(200))


def test_the_seeds_subscription_can_be_read(server: RunningServer) -> None:
    make(server, 1)
    assert CREATE["topic"] == TOPIC
    assert server.client.get(f"{BASE}/agents/demo/order-processor").status_code == 200
    with server.client.stream("GET", "/v1/bus/subscribe/order-processor?namespace=agents&tenant=demo") as response:
        lines = response.iter_lines()
        assert next(line for line in lines if line.startswith("id:")) == "id: 0:0"
