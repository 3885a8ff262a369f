"""Handing records to Kafka's client, also when it takes no more."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from confluent_kafka import KafkaError

from postbus.clock import SystemClock
from postbus.log.kafka import Kafka, posting
from postbus.log.kafka.link import Link
from postbus.log.kafka.posting import Postman, Sending
from postbus.model import Unreachable
from tests.conformance.upstream_suite import PATIENCE_S, SHORT_S, add, everything, fact, retried
from tests.faults.line import Line
from tests.services import fresh_prefix, running_kafka

pytestmark = pytest.mark.xdist_group("kafka")


async def test_more_than_the_client_holds_is_sent_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(posting._SAFE, "queue.buffering.max.messages", 7)
    client = Kafka(running_kafka().address, fresh_prefix(), answer_s=PATIENCE_S)
    stream = await client.ensure_stream("shop.main.orders")
    receipts = await add(client, stream, *[fact(number) for number in range(500)])
    assert [receipt.offset for receipt in receipts] == list(range(500))
    assert [event.payload for event in await everything(client, stream)] == list(range(500))
    await client.close()


async def test_appends_that_wait_together_keep_the_order_they_were_made_in() -> None:
    client = Kafka(running_kafka().address, fresh_prefix(), answer_s=PATIENCE_S)
    stream = await client.ensure_stream("shop.main.orders")
    receipts = await asyncio.gather(*(add(client, stream, fact(number)) for number in range(300)))
    assert [receipt.offset for (receipt,) in receipts] == list(range(300))
    assert [event.payload for event in await everything(client, stream)] == list(range(300))
    await client.close()


async def test_what_is_made_in_one_turn_of_the_loop_is_handed_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, post = Counter[int](), Postman.post

    def counted(self: Postman, letters: list[posting.Letter]) -> None:
        groups[len(letters)] += 1
        post(self, letters)

    client = Kafka(running_kafka().address, fresh_prefix(), answer_s=PATIENCE_S)
    stream = await client.ensure_stream("shop.main.orders")
    monkeypatch.setattr(Postman, "post", counted)
    await asyncio.gather(*(add(client, stream, fact(number)) for number in range(100)))
    assert groups == {100: 1}
    await client.close()


async def test_who_closes_does_not_wait_for_a_client_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(posting._SAFE, "queue.buffering.max.messages", 7)
    server = running_kafka()
    async with Line(server.back_port, server.detour_port) as line, asyncio.timeout(PATIENCE_S):
        client = Kafka(line.address, fresh_prefix(), answer_s=SHORT_S)
        stream = await retried(lambda: client.ensure_stream("shop.main.orders"))
        await retried(lambda: add(client, stream, fact("before")))
        await line.cut()
        appends = [asyncio.create_task(add(client, stream, fact(number))) for number in range(50)]
        for append in appends:
            with pytest.raises(Unreachable):
                await append
        await client.close()


async def test_an_acknowledgement_that_comes_late_says_that_kafka_is_back() -> None:
    link, told = Link("127.0.0.1:1", SHORT_S, SystemClock(), {}), list[str]()
    link.came_up.append(lambda: told.append("up"))
    in_time, refused, late = Sending(1), Sending(1), Sending(1)
    for sending in (refused, late):
        sending.answer.set_result(False)  # whoever waited was told that Kafka is away
    refused.outcomes[0] = KafkaError(KafkaError._TIMED_OUT)
    link._told([in_time, refused])
    assert (told, in_time.ended, refused.ended) == ([], True, True)
    link._told([late])
    assert (told, late.ended) == (["up"], True)
    await link.close()
    link._told([late])
    assert told == ["up"]
