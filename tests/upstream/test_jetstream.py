"""JetStream as the remote half of a log, on a real server."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client

from postbus.log.jetstream import JetStream
from postbus.log.upstream import Upstream
from postbus.model import (
    Draft,
    Durability,
    IdempotencyConflict,
    Invalid,
    Refused,
    StorageFull,
    Stream,
    StreamSettings,
    Unreachable,
)
from tests.conformance.upstream import (
    NOW_US,
    PATIENCE_S,
    UpstreamConformance,
    add,
    everything,
    fact,
    new_ids,
    numbers,
    retried,
)
from tests.services import NatsServer, fresh_prefix, running_nats
from tests.upstream.valve import Pipe, Valve

pytestmark = pytest.mark.xdist_group("nats")

SHORT_S = 1.0


class TestJetStream(UpstreamConformance):
    atomic_max = 1000
    shared_identities = True
    fences = True
    foreign_source = "nats"
    payload_refused = "max_payload"

    @pytest.fixture
    def server(self) -> NatsServer:
        return running_nats()

    @pytest.fixture
    def prefix(self) -> str:
        return fresh_prefix()

    async def opened(self, address: str, prefix: str, answer_s: float = PATIENCE_S) -> Upstream:
        return JetStream(f"nats://{address}", prefix, answer_s=answer_s, synced=True)

    async def write(self, upstream: Upstream, stream: Stream, body: bytes) -> None:
        assert isinstance(upstream, JetStream)
        client = await nats.connect(upstream.url)
        await client.jetstream().publish(f"{upstream.prefix}.add.{stream.name}.{stream.epoch}.0", body)
        await client.close()

    def too_large(self) -> Draft:
        return fact("x" * 1_048_574)


@pytest.fixture
def server() -> NatsServer:
    return running_nats()


@pytest_asyncio.fixture
async def upstream(server: NatsServer) -> AsyncIterator[JetStream]:
    made = JetStream(server.url, fresh_prefix(), answer_s=PATIENCE_S, synced=True)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def stream(upstream: JetStream) -> Stream:
    return await upstream.ensure_stream("shop.main.orders")


@pytest_asyncio.fixture
async def bare(server: NatsServer) -> AsyncIterator[Client]:
    client = await nats.connect(server.url)
    yield client
    await client.close()


async def api(bare: Client, operation: str, body: object) -> Any:
    answer = await bare.request(f"$JS.API.{operation}", msgspec.json.encode(body), timeout=PATIENCE_S)
    found = msgspec.json.decode(answer.data)
    assert "error" not in found, found
    return found


def partition_name(upstream: JetStream, stream: Stream, partition: int = 0) -> str:
    return f"{upstream.prefix}={stream.name.replace('.', '=')}={stream.epoch}={partition}"


# --- what is on its way -----------------------------------------------------------------------------------------------


async def until(valve: Valve, pipe: Pipe, text: bytes, *, back: bool) -> None:
    async with asyncio.timeout(PATIENCE_S), valve.moved:
        await valve.moved.wait_for(lambda: text in (pipe.answered if back else pipe.sent))


@pytest.mark.parametrize("count", [1, 3, 50])
async def test_an_event_that_was_stored_and_not_acknowledged_is_found(
    server: NatsServer, upstream: JetStream, stream: Stream, count: int
) -> None:
    async with Valve(server.port) as valve:
        far = JetStream(f"nats://{valve.address}", upstream.prefix, answer_s=PATIENCE_S, synced=True)
        await add(far, stream, fact("before"))
        valve.pipes[0].back.clear()
        ids = new_ids(count)
        sending = asyncio.create_task(far.append(stream, [fact(n) for n in range(count)], ids, NOW_US))
        assert await upstream.wait(stream, 0, count, PATIENCE_S)
        valve.pipes[0].cut()
        with pytest.raises(Unreachable):
            await sending
        async with asyncio.timeout(PATIENCE_S):
            found = await retried(lambda: far.find(stream, ids, [1]))
        assert found == {one: (0, number + 1) for number, one in enumerate(ids)}
        await far.close()


@pytest.mark.parametrize("count", [1, 3, 50])
async def test_an_event_that_find_did_not_see_is_refused_when_it_comes(
    server: NatsServer, upstream: JetStream, stream: Stream, count: int
) -> None:
    async with Valve(server.port) as valve:
        far = JetStream(f"nats://{valve.address}", upstream.prefix, answer_s=SHORT_S, synced=True)
        async with asyncio.timeout(PATIENCE_S):
            await retried(lambda: add(far, stream, fact("before", native_id="before")))
        pipe = valve.pipes[-1]
        pipe.out.clear()
        ids = new_ids(count)
        with pytest.raises(Unreachable):
            await far.append(stream, [fact(n) for n in range(count)], ids, NOW_US)
        await far.close()
        assert await upstream.find(stream, ids, [0]) == {}
        pipe.out.set()  # now it reaches the server after all
        await until(valve, pipe, b"NATS/1.0 503", back=True)
        assert await upstream.extents(stream) == [(0, 1)]
        assert (await add(upstream, stream, fact("after")))[0].offset == 1


async def test_identities_hold_while_others_trim_and_find(
    server: NatsServer, upstream: JetStream, stream: Stream
) -> None:
    peer = JetStream(server.url, upstream.prefix, answer_s=PATIENCE_S, synced=True)
    receipts: dict[str, set[int]] = {}

    async def publish(client: JetStream, size: int) -> None:
        for start in range(0, 30, size):
            drafts = [fact(n, native_id=f"n{n}") for n in range(start, start + size)]
            for one, sent in zip(await add(client, stream, *drafts), drafts, strict=True):
                receipts.setdefault(sent.native_id or "", set()).add(one.offset)

    async def disturb() -> None:
        for number in range(12):
            _, end = (await peer.extents(stream))[0]
            await peer.trim(stream, 0, end)
            if number % 3 == 0:
                await peer.find(stream, ["never"], [0])

    sizes = itertools.chain.from_iterable(itertools.repeat((1, 3, 15), 3))
    publishers = [publish(client, size) for size, client in zip(sizes, itertools.cycle([upstream, peer]), strict=False)]
    await asyncio.gather(disturb(), *publishers)
    assert {name: len(offsets) for name, offsets in receipts.items()} == {f"n{n}": 1 for n in range(30)}
    assert (await upstream.extents(stream))[0][1] == 30
    await peer.close()


# --- waiting ----------------------------------------------------------------------------------------------------------


async def test_waiting_asks_once_and_is_told(server: NatsServer, upstream: JetStream, stream: Stream) -> None:
    other = await upstream.ensure_stream("shop.main.other")
    async with Valve(server.port) as valve:
        far = JetStream(f"nats://{valve.address}", upstream.prefix, answer_s=PATIENCE_S, synced=True)
        await far.extents(stream)
        (pipe,) = valve.pipes
        asked = pipe.sent.count(b"PUB ")
        waiting = asyncio.create_task(far.wait(stream, 0, 0, PATIENCE_S))
        async with asyncio.timeout(PATIENCE_S), valve.moved:
            await valve.moved.wait_for(lambda: pipe.sent.count(b"PUB ") > asked)
        await add(upstream, other, *(fact(n) for n in range(20)))
        assert not waiting.done()
        await add(upstream, stream, fact(0))
        assert await waiting
        assert pipe.sent.count(b"PUB ") == asked + 1
        await far.close()


async def test_waiting_ends_when_the_connection_does(server: NatsServer, upstream: JetStream, stream: Stream) -> None:
    async with Valve(server.port) as valve:
        far = JetStream(f"nats://{valve.address}", upstream.prefix, answer_s=PATIENCE_S, synced=True)
        await far.extents(stream)
        asked = valve.pipes[0].sent.count(b"PUB ")
        waiting = asyncio.create_task(far.wait(stream, 0, 0, PATIENCE_S))
        async with asyncio.timeout(PATIENCE_S), valve.moved:
            await valve.moved.wait_for(lambda: valve.pipes[0].sent.count(b"PUB ") > asked)
        valve.pipes[0].cut()
        with pytest.raises(Unreachable):
            await waiting
        await far.close()


# --- what the server and others do ------------------------------------------------------------------------------------


async def test_a_full_stream_says_so_and_goes_on_when_there_is_room(
    upstream: JetStream, stream: Stream, bare: Client
) -> None:
    name = partition_name(upstream, stream)
    config = (await api(bare, f"STREAM.INFO.{name}", {}))["config"]
    await api(bare, f"STREAM.UPDATE.{name}", config | {"max_msgs": 2})
    await add(upstream, stream, fact(0), fact(1))
    for drafts in ([fact(2)], [fact(2), fact(3)]):
        with pytest.raises(StorageFull, match="maximum messages exceeded"):
            await add(upstream, stream, *drafts)
    await api(bare, f"STREAM.UPDATE.{name}", config | {"max_msg_size": 500})
    with pytest.raises(Refused, match="message size exceeds"):
        await add(upstream, stream, fact("x" * 1000))
    assert (await add(upstream, stream, fact(2)))[0].offset == 2


async def test_a_batch_that_ends_half_taken_has_an_unknown_outcome(
    upstream: JetStream, stream: Stream, bare: Client
) -> None:
    name = partition_name(upstream, stream)
    config = (await api(bare, f"STREAM.INFO.{name}", {}))["config"]
    await api(bare, f"STREAM.UPDATE.{name}", config | {"max_msgs": 2})
    ids = new_ids(3)
    with pytest.raises(Unreachable, match="a part of the events was not taken"):
        await upstream.append(stream, [fact(n) for n in range(3)], ids, NOW_US)
    assert await upstream.find(stream, ids, [0]) == {ids[0]: (0, 0), ids[1]: (0, 1)}
    await api(bare, f"STREAM.UPDATE.{name}", config | {"max_msgs": 1002})
    with pytest.raises(Unreachable, match="a part of the events was not taken"):  # the first of two batches was
        await add(upstream, stream, *(fact(n) for n in range(1500)))
    assert await upstream.extents(stream) == [(0, 1002)]


async def test_a_partition_that_somebody_deleted_is_said(upstream: JetStream, stream: Stream, bare: Client) -> None:
    await add(upstream, stream, fact(0))
    await api(bare, f"STREAM.DELETE.{partition_name(upstream, stream)}", {})
    for call in (add(upstream, stream, fact(1)), upstream.fetch(stream, 0, 0, 1), upstream.extents(stream)):
        with pytest.raises(Refused, match="has gone"):
            await call


async def test_nobody_can_take_an_event_out_of_the_middle(upstream: JetStream, stream: Stream, bare: Client) -> None:
    await add(upstream, stream, *(fact(n) for n in range(3)))
    name = partition_name(upstream, stream)
    answer = await bare.request(f"$JS.API.STREAM.MSG.DELETE.{name}", b'{"seq":2}', timeout=PATIENCE_S)
    assert "error" in msgspec.json.decode(answer.data)
    assert numbers(await everything(upstream, stream)) == [0, 1, 2]


async def test_headers_nobody_understands_are_no_obstacle(upstream: JetStream, stream: Stream, bare: Client) -> None:
    subject = f"{upstream.prefix}.add.{stream.name}.0.0"
    await add(upstream, stream, fact(0))
    for value in ("[1]", "~5", "~99", '[2,"a"]', "rubbish", "\u00e9"):
        await bare.jetstream().publish(subject, b"1", headers={"postbus": value, "x": "y"})
    await add(upstream, stream, fact(2))
    events = await everything(upstream, stream)
    assert numbers(events) == [0, 1, 1, 1, 1, 1, 1, 2]
    assert {event.source for event in events[1:7]} == {"nats"}


async def test_many_batches_at_once_wait_for_each_other(server: NatsServer, upstream: JetStream) -> None:
    stream = await upstream.ensure_stream("shop.main.orders")
    peers = [JetStream(server.url, upstream.prefix, answer_s=PATIENCE_S, synced=True) for _ in range(5)]
    sent = [add(peer, stream, *(fact([n, m]) for m in range(12))) for n in range(15) for peer in peers]
    receipts = await asyncio.gather(*sent)
    for batch in receipts:
        assert [one.offset for one in batch] == list(range(batch[0].offset, batch[0].offset + 12))
    assert await upstream.extents(stream) == [(0, 15 * 5 * 12)]
    for peer in peers:
        await peer.close()


async def test_pipelined_events_of_a_server_that_does_not_sync(server: NatsServer, upstream: JetStream) -> None:
    quick = JetStream(server.url, upstream.prefix, answer_s=PATIENCE_S)
    stream = await quick.ensure_stream("shop.main.orders")
    drafts = [fact(n, native_id=f"n{n}" if n % 2 else None) for n in range(300)]
    receipts = await add(quick, stream, *drafts)
    assert [one.offset for one in receipts] == list(range(300))
    assert {one.durability for one in receipts} == {Durability.RELAXED}
    again = await add(quick, stream, *drafts[1::2], fact("new"))
    assert [one.offset for one in again] == [*range(1, 300, 2), 300]
    with pytest.raises(IdempotencyConflict):
        await add(quick, stream, fact("x"), fact("other", native_id="n1"))
    assert await quick.extents(stream) == [(0, 301)]
    await quick.close()


# --- streams ----------------------------------------------------------------------------------------------------------


def record(stream: Stream, state: str) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(stream), "state": state})


async def test_a_stream_that_was_left_half_made_is_made(upstream: JetStream, bare: Client) -> None:
    assert await upstream.streams() == []
    half = Stream("shop.main.half", StreamSettings(partitions=2), 3, 7)
    await bare.jetstream().publish(f"{upstream.prefix}.registry.{half.name}", record(half, "making"))
    assert await upstream.streams() == []
    assert await upstream.ensure_stream(half.name) == half
    assert await upstream.streams() == [half]
    await add(upstream, half, fact(1, native_id="a", key="k"))


async def test_what_an_interrupted_deletion_left_does_not_come_back(
    upstream: JetStream, stream: Stream, bare: Client
) -> None:
    await add(upstream, stream, fact("old"))
    await bare.jetstream().publish(f"{upstream.prefix}.registry.{stream.name}", record(stream, "deleted"))
    assert await upstream.streams() == []
    again = await upstream.ensure_stream(stream.name)
    assert again.epoch == 1
    assert await everything(upstream, again) == []
    info = await bare.request(f"$JS.API.STREAM.INFO.{partition_name(upstream, stream)}", b"", timeout=PATIENCE_S)
    assert b"stream not found" in info.data


async def test_a_registry_that_others_write_to(upstream: JetStream, stream: Stream, bare: Client) -> None:
    await bare.jetstream().publish(f"{upstream.prefix}.registry.shop.main.junk", b"junk")
    assert await upstream.streams() == [stream]
    with pytest.raises(Refused, match="cannot be read"):
        await upstream.ensure_stream("shop.main.junk")


async def test_bad_names_and_settings_are_refused(server: NatsServer, upstream: JetStream) -> None:
    for prefix in ("", "a.b", "a*", "x" * 33):
        with pytest.raises(Invalid, match="prefix"):
            JetStream(server.url, prefix)
    with pytest.raises(Invalid, match="not the address"):
        JetStream("http://localhost:4222")
    with pytest.raises(Invalid):
        await upstream.ensure_stream("no stream")
    with pytest.raises(Invalid, match="at least 1 partition"):
        await upstream.ensure_stream("shop.main.none", StreamSettings(partitions=0))
    assert await upstream.streams() == []
    three = JetStream(server.url, fresh_prefix(), replicas=3, answer_s=PATIENCE_S)
    with pytest.raises(Refused, match="replicas"):
        await three.ensure_stream("shop.main.orders")
    await three.close()


# --- the connection ---------------------------------------------------------------------------------------------------


async def test_what_is_not_known_to_be_synced_is_said_once(
    server: NatsServer, upstream: JetStream, stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    (full,) = await add(upstream, stream, fact(0))
    assert full.durability is Durability.FULL
    assert not [line for line in caplog.records if line.name == "postbus.log"]
    unknown = JetStream(server.url, upstream.prefix, answer_s=PATIENCE_S)
    with caplog.at_level(logging.WARNING, "postbus"):
        for number in range(2):
            (receipt,) = await add(unknown, stream, fact(number))
            assert receipt.durability is Durability.RELAXED
    assert [
        line.message.partition(": ")[2].partition(" ")[0] for line in caplog.records if line.name == "postbus.log"
    ] == ["NATS"]
    await unknown.close()


async def test_one_of_several_servers_is_enough_and_no_password_is_shown(server: NatsServer, stream: Stream) -> None:
    several = JetStream(f"nats://user:secret@127.0.0.1:1,{server.address}", fresh_prefix(), answer_s=PATIENCE_S)
    assert several.url == f"nats://127.0.0.1:1,{server.address}"
    async with asyncio.timeout(PATIENCE_S):
        made = await retried(lambda: several.ensure_stream(stream.name))
    assert made.epoch == 0
    await several.close()
    nobody = JetStream("nats://user:secret@127.0.0.1:1", answer_s=PATIENCE_S)
    with pytest.raises(Unreachable) as caught:
        await nobody.streams()
    assert "secret" not in str(caught.value)
    await nobody.close()
