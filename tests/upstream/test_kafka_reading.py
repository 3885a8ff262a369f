"""Reading ahead on Kafka."""

from __future__ import annotations

import asyncio

import pytest

from postbus.log.kafka import Kafka, reading
from postbus.log.kafka.names import topic_of
from tests.conformance.upstream import NOW_US, PATIENCE_S, fact, new_ids
from tests.services import fresh_prefix, running_kafka

pytestmark = pytest.mark.xdist_group("kafka")


async def test_a_lane_that_read_too_far_ahead_reads_on_at_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "AHEAD_MESSAGES", 40)
    kafka = Kafka(running_kafka().address, fresh_prefix(), answer_s=PATIENCE_S)
    stream = await kafka.ensure_stream("shop.main.orders")
    await kafka.append(stream, [fact(number) for number in range(100)], new_ids(100), NOW_US)
    assert [event.payload for event in await kafka.fetch(stream, 0, 50, 1)] == [50]
    lane = next(lane for (topic, _), lane in kafka._tail._lanes.items() if topic.endswith("orders.0"))
    async with asyncio.timeout(PATIENCE_S):
        while not lane.paused:  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.01)
    assert [event.payload for event in await kafka.fetch(stream, 0, 10, 3)] == [10, 11, 12]
    await kafka.close()


async def test_what_comes_late_of_a_partition_that_was_let_go_of_is_not_taken_for_another_place() -> None:
    kafka = Kafka(running_kafka().address, fresh_prefix(), answer_s=PATIENCE_S)
    stream = await kafka.ensure_stream("shop.main.orders")
    await kafka.append(stream, [fact(number) for number in range(5)], new_ids(5), NOW_US)
    reader, topic = kafka._tail, topic_of(kafka.prefix, stream)
    messages = [message for message in await reader.read(topic, 0, 0, 5) if message is not None]
    reader.forget(topic, 0)
    reader.learn(topic, 0, 5)  # somebody asked where it ends, and reads nothing yet
    reader._took(reader._serial, messages[3:])
    assert not reader.has(topic, 0, 0, 1)
    assert [event.payload for event in await kafka.fetch(stream, 0, 0, 9)] == [0, 1, 2, 3, 4]
    await kafka.close()
