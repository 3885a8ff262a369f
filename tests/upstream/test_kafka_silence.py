"""What the client library trips over, and what looks like an outage and is none."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka.admin import AdminClient

from postbus.log.kafka import Kafka
from postbus.log.kafka.extents import offsets
from postbus.log.kafka.link import END
from postbus.log.kafka.names import topic_of
from postbus.model import Unreachable
from tests.conformance.upstream_suite import PATIENCE_S, SHORT_S, add, fact, retried
from tests.faults.line import Line
from tests.services import fresh_prefix, running_kafka
from tests.upstream.brokerless import Brokerless


async def test_a_cluster_without_a_living_broker_is_an_outage() -> None:
    """The client library has ended the process over that."""
    pipe = asyncio.subprocess.PIPE
    async with Brokerless() as server, asyncio.timeout(PATIENCE_S):
        words = (sys.executable, "-m", "tests.upstream.kafka_client", server.address)
        child = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe)
        assert child.stdout is not None
        for _ in range(4):
            assert b"does not answer" in await child.stdout.readline()
        assert server.hangs
        _, errors = await child.communicate(b"\n")
        assert (child.returncode, errors) == (0, b"")


async def test_a_topic_that_nobody_leads_is_not_gone() -> None:
    async with Brokerless() as server, asyncio.timeout(PATIENCE_S):
        client = Kafka(server.address, answer_s=SHORT_S)
        with pytest.raises(Unreachable):
            await offsets(client._link, "postbus.shop.main.orders.0", [0], END)
        await client.close()


@pytest.mark.xdist_group("kafka")
async def test_a_partition_that_one_lets_go_of_is_read_on_by_another() -> None:
    client = Kafka(running_kafka().address, fresh_prefix(), answer_s=PATIENCE_S)
    stream = await client.ensure_stream("shop.main.orders")
    topic = topic_of(client.prefix, stream)
    for reader in (client._tail, client._scout):
        (first,) = await add(client, stream, fact("there"))
        readers = [asyncio.create_task(reader.read(topic, 0, first.offset, first.offset + 2)) for _ in range(2)]
        await reader.read(topic, 0, first.offset, first.offset + 1)  # both wait for the event that comes next
        reader.forget(topic, 0)
        await add(client, stream, fact("next"))
        assert [len(found) for found in await asyncio.gather(*readers)] == [2, 2]
        assert (await reader.read(topic, 0, first.offset + 1, first.offset + 2))[0] is not None
        reader.forget(topic, 0)
    assert client._link._up.is_set()
    await client.close()


@pytest.mark.xdist_group("kafka")
async def test_a_group_is_shown_again_after_an_outage() -> None:
    server, prefix = running_kafka(), fresh_prefix()
    async with Line(server.back_port, server.detour_port) as line, asyncio.timeout(PATIENCE_S):
        client = Kafka(line.address, prefix, answer_s=SHORT_S)
        stream = await retried(lambda: client.ensure_stream("shop.main.orders"))
        for offset in range(3):
            await retried(lambda: add(client, stream, fact("x")))
            await retried(partial(client.mirror, prefix, stream, {0: offset}))
            line.hold()
            with pytest.raises(Unreachable):
                await client.mirror(prefix, stream, {0: 0})
            await line.cut()
            with pytest.raises(Unreachable):
                await client.mirror(prefix, stream, {0: 0})
            line.mend()
        await retried(lambda: client.mirror(prefix, stream, {0: 2}))
        await client.close()
    admin = AdminClient({"bootstrap.servers": server.address})
    asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(prefix)])[prefix]
    (place,) = (await asyncio.wrap_future(asked)).topic_partitions
    assert place.offset == 2
