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
    monkeypatch.setattr(reading, "AHEAD_MESSAGES", 4)
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
    reader._file(reader._serial, messages[3:])
    assert not reader.has(topic, 0, 0, 1)
    assert [event.payload for event in await kafka.fetch(stream, 0, 0, 9)] == [0, 1, 2, 3, 4]
    await kafka.close()


async def test_what_comes_for_one_lane_does_not_leave_another_one_waiting() -> None:
    kafka = Kafka(running_kafka().address, fresh_prefix(), answer_s=PATIENCE_S)
    quiet, busy = [await kafka.ensure_stream(f"shop.main.{name}") for name in ("quiet", "busy")]
    waiting = asyncio.create_task(kafka.wait(quiet, 0, 0, PATIENCE_S))
    for number in range(20):
        await kafka.append(busy, [fact(number)], new_ids(1), NOW_US)
        assert await kafka.wait(busy, 0, number, PATIENCE_S)
        assert [event.payload for event in await kafka.fetch(busy, 0, number, 9)] == [number]
    assert not waiting.done()
    await kafka.append(quiet, [fact(0)], new_ids(1), NOW_US)
    assert await waiting
    await kafka.close()


async def test_lanes_that_are_read_at_once_each_get_all_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "TAKE", 50)
    monkeypatch.setattr(reading, "AHEAD_MESSAGES", 100)
    kafka = Kafka(running_kafka().address, fresh_prefix(), answer_s=PATIENCE_S)
    streams = [await kafka.ensure_stream(f"shop.main.s{number}") for number in range(4)]
    for stream in streams:
        await kafka.append(stream, [fact(number) for number in range(1_000)], new_ids(1_000), NOW_US)

    async def read(at_once: int) -> list[int]:
        stream, found = streams[at_once], list[int]()
        while len(found) < 1_000:
            found += [event.payload for event in await kafka.fetch(stream, 0, len(found), 10 * (at_once + 1))]
        return found

    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.gather(*map(read, range(4))) == [list(range(1_000))] * 4
    await kafka.close()


async def test_reading_on_leaves_room_for_others_on_the_loop() -> None:
    kafka = Kafka(running_kafka().address, fresh_prefix(), answer_s=PATIENCE_S)
    stream = await kafka.ensure_stream("shop.main.orders")
    for _ in range(20):
        await kafka.append(stream, [fact(number) for number in range(1_000)], new_ids(1_000), NOW_US)
    steps = 0

    async def other() -> None:
        nonlocal steps
        while True:
            await asyncio.sleep(0)
            steps += 1

    beside, seen, at = asyncio.create_task(other()), set[int](), 0
    while at < 20_000:
        at += len(await kafka.fetch(stream, 0, at, 1_000))
        seen.add(steps)
    assert len(seen) >= 10
    beside.cancel()
    await kafka.close()


async def test_a_reader_that_was_closed_takes_nothing_any_more() -> None:
    kafka = Kafka(running_kafka().address, fresh_prefix(), answer_s=PATIENCE_S)
    stream = await kafka.ensure_stream("shop.main.orders")
    await kafka.append(stream, [fact(number) for number in range(5)], new_ids(5), NOW_US)
    reader, topic = kafka._tail, topic_of(kafka.prefix, stream)
    reading_on = asyncio.create_task(reader.read(topic, 0, 0, 5))
    while not reader._orders.empty():  # noqa: ASYNC110 - what it waits for has no event
        await asyncio.sleep(0)
    await reader.close()  # while the thread hands over what it has
    await asyncio.sleep(0)
    assert not reader._take()
    reading_on.cancel()
    await kafka.close()
