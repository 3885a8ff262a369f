"""Kafka as the remote half of a log, on a real broker."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, Producer
from confluent_kafka.admin import AdminClient

from postbus.log.kafka import Kafka
from postbus.log.kafka.names import identities_topic, topic_of
from postbus.log.kafka.posting import Record, Sending
from postbus.log.kafka.records import HOLE, REPEAT, Looked, record_of
from postbus.log.upstream import Upstream
from postbus.model import Draft, Durability, IdempotencyConflict, Invalid, NotFound, Refused, Stream, StreamSettings
from tests.conformance.upstream import NOW_US, PATIENCE_S, UpstreamConformance, add, everything, fact, new_ids, numbers
from tests.conformance.upstream_suite import Server, until_up
from tests.services import KafkaServer, fresh_prefix, running_kafka

pytestmark = pytest.mark.xdist_group("kafka")


class TestKafka(UpstreamConformance):
    atomic_max = 1
    shared_identities = True
    fences = True
    foreign_source = "kafka"
    payload_refused = "limit on Kafka"

    @pytest.fixture
    def server(self) -> KafkaServer:
        return running_kafka()

    @pytest.fixture
    def prefix(self) -> str:
        return fresh_prefix()

    async def opened(self, address: str, prefix: str, answer_s: float = PATIENCE_S) -> Upstream:
        return Kafka(address, prefix, answer_s=answer_s)

    async def write(self, upstream: Upstream, stream: Stream, body: bytes) -> None:
        assert isinstance(upstream, Kafka)
        writer = Producer({"bootstrap.servers": upstream.url.removeprefix("kafka://")})
        writer.produce(topic_of(upstream.prefix, stream), body, partition=0)
        assert await asyncio.to_thread(writer.flush, PATIENCE_S) == 0

    def too_large(self) -> Draft:
        return msgspec.structs.replace(fact("x"), payload_json=b'"%s"' % (b"x" * (9 << 20)))

    async def test_racing_clients_append_an_identity_once(
        self, upstream: Upstream, peer: Upstream, stream: Stream
    ) -> None:
        drafts = [fact(number, native_id=f"n{number}") for number in range(20)]
        singles = [add(client, stream, one) for one in drafts for client in (upstream, peer) for _ in range(2)]
        batches = [add(client, stream, *drafts[start:]) for client in (upstream, peer) for start in (0, 5)]
        receipts = list(itertools.chain(*await asyncio.gather(*singles, *batches)))
        assert sum(not one.duplicate for one in receipts) == 20
        events = await everything(upstream, stream)
        assert await everything(peer, stream) == events
        firsts = {event.payload: event.offset for event in events if event.topic != REPEAT}
        assert sorted(firsts) == list(range(20))
        assert len(firsts) == sum(event.topic != REPEAT for event in events)
        assert {one.offset for one in receipts} == set(firsts.values())

    async def test_everything_survives_a_crash_of_the_server(
        self, server: Server, upstream: Upstream, stream: Stream
    ) -> None:
        """A trim that Kafka has not written down yet is undone by a crash; nothing else is."""
        drafts = [fact(number, native_id=f"n{number}") for number in range(20)]
        await add(upstream, stream, *drafts, fact("plain"))
        await upstream.trim(stream, 0, 3)
        before = await everything(upstream, stream)
        server.kill()
        server.start()
        await until_up(upstream)
        assert (await everything(upstream, stream))[-18:] == before
        assert (await upstream.extents(stream))[0] in {(0, 21), (3, 21)}
        assert isinstance(upstream, Kafka)
        fresh = await self.opened(server.address, upstream.prefix)
        for client in (upstream, fresh):
            assert all(one.duplicate for one in await add(client, stream, *drafts))
        assert (await add(fresh, stream, fact("more")))[0].offset == 21
        assert await fresh.streams() == [stream]
        await fresh.close()


@pytest.fixture
async def clients() -> AsyncIterator[tuple[Kafka, Kafka, Stream]]:
    server, prefix = running_kafka(), fresh_prefix()
    one, two = (Kafka(server.address, prefix, answer_s=PATIENCE_S) for _ in range(2))
    yield one, two, await one.ensure_stream("shop.main.orders")
    await one.close()
    await two.close()


def overtaken(slow: Kafka, fast: Callable[[], Awaitable[object]]) -> None:
    """Let somebody else append between the look and the append of a client, once."""
    send = slow._link.send

    async def late(records: Sequence[Record], ids: Sequence[str] = ()) -> Sending:
        slow._link.send = send  # type: ignore[method-assign]
        await fast()
        return await send(records, ids)

    slow._link.send = late  # type: ignore[method-assign]


async def test_every_reader_says_the_same_of_several_repeats(clients: tuple[Kafka, Kafka, Stream]) -> None:
    one, two, stream = clients
    topic = topic_of(one.prefix, stream)
    same = [record_of(topic, 0, fact(1, native_id="n"), made, NOW_US, Looked(0, 0)) for made in new_ids(3)]
    await one._link.send(same)
    events = await everything(one, stream)
    assert [event.metadata for event in events[1:]] == [{"repeats": 0, "native_id": "n", "variant": ""}] * 2
    assert [await two.fetch(stream, 0, offset, 1) for offset in (2, 1, 0)] == [[events[n]] for n in (2, 1, 0)]


async def test_who_comes_second_for_an_identity_gets_the_firsts_receipt(clients: tuple[Kafka, Kafka, Stream]) -> None:
    slow, fast, stream = clients
    same = [fact(number, native_id=f"n{number}") for number in range(3)]
    await add(fast, stream, fact("before"))
    overtaken(slow, lambda: add(fast, stream, fact("plain"), same[1]))
    receipts = await add(slow, stream, *same)
    assert [(one.offset, one.duplicate) for one in receipts] == [(3, False), (2, True), (5, False)]
    events = await everything(fast, stream)
    assert [event.topic for event in events] == [*["orders.paid"] * 4, REPEAT, "orders.paid"]
    assert events[4].metadata == {"repeats": 2, "native_id": "n1", "variant": ""}
    assert events[4].native_id is None
    assert await everything(slow, stream) == events
    assert [await slow.fetch(stream, 0, offset, 1) for offset in range(6)] == [[event] for event in events]
    for client in (slow, fast):
        again = await add(client, stream, *same)
        assert [(one.offset, one.duplicate) for one in again] == [(3, True), (2, True), (5, True)]


async def test_who_comes_second_with_other_content_is_refused(clients: tuple[Kafka, Kafka, Stream]) -> None:
    slow, fast, stream = clients
    overtaken(slow, lambda: add(fast, stream, fact("first", native_id="n")))
    with pytest.raises(IdempotencyConflict) as caught:
        await add(slow, stream, fact("second", native_id="n"))
    assert caught.value.offset == 0
    assert [event.topic for event in await everything(fast, stream)] == ["orders.paid", REPEAT]


async def test_marks_of_transactions_and_compressed_batches_leave_no_hole(clients: tuple[Kafka, Kafka, Stream]) -> None:
    client, peer, stream = clients
    topic = topic_of(client.prefix, stream)
    address = {"bootstrap.servers": client.url.removeprefix("kafka://")}

    def foreign() -> None:
        for codec in ("gzip", "snappy", "lz4", "zstd"):
            writer = Producer({**address, "compression.type": codec, "linger.ms": 50})
            for number in range(50):
                writer.produce(topic, b'{"number": %d}' % number, partition=0)
            assert writer.flush(PATIENCE_S) == 0
        writer = Producer({**address, "transactional.id": topic})
        writer.init_transactions(PATIENCE_S)
        writer.begin_transaction()
        writer.produce(topic, b'"in a transaction"', partition=0)
        writer.produce(topic, None, partition=0)
        writer.commit_transaction(PATIENCE_S)

    await asyncio.to_thread(foreign)
    assert await client.wait(stream, 0, 202, PATIENCE_S)  # the mark is written a moment after the answer
    assert await client.extents(stream) == [(0, 203)]
    events = await everything(client, stream)
    assert numbers(events)[:200] == [{"number": number} for number in range(50)] * 4
    assert [(event.topic, event.payload) for event in events[200:]] == [
        (stream.name, "in a transaction"),
        (stream.name, ""),
        (HOLE, None),
    ]
    assert (await add(client, stream, fact("ours", native_id="a")))[0].offset == 203
    assert (await add(peer, stream, fact("ours", native_id="a")))[0].duplicate
    assert [event.topic for event in (await everything(peer, stream))[201:]] == [stream.name, HOLE, "orders.paid"]


async def test_a_group_shows_a_readers_place_to_kafkas_tools(clients: tuple[Kafka, Kafka, Stream]) -> None:
    client, _, stream = clients
    await add(client, stream, *(fact(number) for number in range(5)))
    group = f"{client.prefix}-reader"
    await client.mirror(group, stream, {0: 3})
    await client.mirror(group, stream, {0: 2})
    admin = AdminClient({"bootstrap.servers": client.url.removeprefix("kafka://")})
    asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group]
    (place,) = (await asyncio.wrap_future(asked)).topic_partitions
    assert (place.topic, place.partition, place.offset) == (topic_of(client.prefix, stream), 0, 2)
    with pytest.raises(NotFound):
        await client.mirror(group, msgspec.structs.replace(stream, epoch=7), {0: 1})
    member = Consumer({"bootstrap.servers": client.url.removeprefix("kafka://"), "group.id": group})
    member.subscribe([topic_of(client.prefix, stream)])
    async with asyncio.timeout(PATIENCE_S):
        while not member.assignment():
            await asyncio.to_thread(member.poll, 0.1)
    with pytest.raises(Refused, match="does not keep the offsets"):
        await client.mirror(group, stream, {0: 1})
    await asyncio.to_thread(member.close)
    await client.mirror(group, stream, {0: 1})


async def test_the_index_of_identities_is_kept_on_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, prefix = running_kafka(), fresh_prefix()
    first = Kafka(server.address, prefix, answer_s=PATIENCE_S, data=str(tmp_path / "node"))
    stream = await first.ensure_stream("shop.main.orders", StreamSettings(partitions=2))
    drafts = [fact(number, native_id=f"n{number}") for number in range(10)]
    receipts = await add(first, stream, *drafts)
    await first.close()
    second = Kafka(server.address, prefix, answer_s=PATIENCE_S, data=str(tmp_path / "node"))
    monkeypatch.setattr(second._scout, "read", None)  # nothing has to be read again
    again = await add(second, stream, *drafts)
    assert [(one.partition, one.offset) for one in again] == [(one.partition, one.offset) for one in receipts]
    assert all(one.duplicate for one in again)
    await second.close()


async def test_receipts_say_whether_kafka_fsyncs(caplog: pytest.LogCaptureFixture) -> None:
    server, prefix = running_kafka(), fresh_prefix()
    said = []
    for synced in (True, False):
        client = Kafka(server.address, f"{prefix}-{synced}", answer_s=PATIENCE_S, synced=synced)
        for name in ("shop.main.a", "shop.main.b"):
            stream = await client.ensure_stream(name)
            said += [one.durability for one in await add(client, stream, fact(1), fact(2, native_id="a"))]
        await client.close()
    assert said == [Durability.FULL] * 4 + [Durability.RELAXED] * 4
    assert [record.levelname for record in caplog.records if "fsync" in record.message] == ["WARNING"]


async def test_a_window_of_identities_ends(clients: tuple[Kafka, Kafka, Stream]) -> None:
    client, peer, _ = clients
    stream = await client.ensure_stream("shop.main.short", StreamSettings(identity_window_s=60.0))
    places = []
    for one, later_s in ((client, 0), (peer, 59), (client, 61), (peer, 62), (client, 120)):
        (receipt,) = await add(one, stream, fact("x", native_id="n"), now_us=NOW_US + later_s * 1_000_000)
        places.append((receipt.offset, receipt.duplicate))
    assert places == [(0, False), (0, True), (1, False), (1, True), (1, True)]


@pytest.mark.parametrize(
    "streams", [("a_b.c.d", "a.b_c.d"), ("x" * 80 + ".y." + "z" * 80, "x" * 80 + ".y." + "z" * 79)]
)
def test_topics_differ_in_what_kafka_tells_apart(streams: tuple[str, str]) -> None:
    made = [
        identities_topic(topic_of("p" * 32, Stream(name, StreamSettings(), epoch, 0)))
        for name in (*streams, "a-b.c.d", "a.b-c.d")
        for epoch in (0, 1)
    ]
    assert len({name.replace(".", "_") for name in made}) == len(made)
    assert max(map(len, made)) <= 249


async def test_an_identity_in_doubt_is_settled_before_find_answers(clients: tuple[Kafka, Kafka, Stream]) -> None:
    """An append is given up while it waits for its turn: it must not come later, after ``find`` has said no."""
    client, peer, stream = clients
    ids = new_ids(2)
    turn = client._identities.lock(topic_of(client.prefix, stream))
    await add(client, stream, fact("before", native_id="before"))
    async with turn:
        waiting = asyncio.create_task(client.append(stream, [fact("x", native_id="n")], ids[:1], NOW_US))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        finding = asyncio.create_task(client.find(stream, ids, [0]))
        await asyncio.sleep(0)
    assert await finding == {}
    assert (await add(peer, stream, fact("y")))[0].offset == 1


async def test_settings_of_the_connection_only(clients: tuple[Kafka, Kafka, Stream]) -> None:
    with pytest.raises(Invalid, match=r"acks is not a setting of the connection"):
        Kafka(running_kafka().address, config={"acks": "0"})
    client, _, stream = clients
    other = Kafka(running_kafka().address, client.prefix, answer_s=PATIENCE_S, config={"client.id": "me"})
    assert await other.streams() == [stream]
    await other.close()


async def test_a_broken_producer_is_replaced(clients: tuple[Kafka, Kafka, Stream]) -> None:
    client, _, stream = clients
    await add(client, stream, fact(0))
    broken = client._link._current()
    broken._complaint(KafkaError(KafkaError._FATAL, "out of order", fatal=True))
    assert (await add(client, stream, fact(1)))[0].offset == 1
    assert client._link._current() is not broken
