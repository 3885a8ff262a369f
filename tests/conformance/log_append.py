"""Append: order, dense offsets, receipts, and events that come back byte for byte."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from postbus.model import Draft, Event, Receipt, Trust
from tests.conformance.log_suite import EARLIEST, Case, LogSuite, batch, fact, offsets

ODD_PAYLOADS = [
    b'{"a":1}',
    b' \t\n{ "b" : 1 ,\r\n "a" : [ ] } ',
    b"12345678901234567890123456789012345678901234567890",
    b"1.0000000000000000000000001e-7",
    b"-0",
    b'"\\u00e9\\ud83d\\ude00 \xc3\xa9 \xf0\x9f\x98\x80"',
    b'"\\u0000"',
    b"null",
    b"false",
    b"[]",
    b'""',
    '{"é":"ß","日本":"語","z":null}'.encode(),
    b'"' + b"x" * 300_000 + b'"',
]

ODD_FIELDS: list[dict[str, object]] = [
    {},
    {"topic": "A-1._.z"},
    {"topic": ".".join(["t" * 30] * 16)},
    {"source": "https://example.org/ü?x=1"},
    {"variant": "v2"},
    {"key": "customer é"},
    {"key": ""},
    {"metadata_json": b'{"b": 1,"a" :[2]}'},
    {"metadata_json": b"{}"},
    {"headers_json": b'{"x-Trace": "1 2", "empty":""}'},
    {"headers_json": b"{}"},
    {"correlation_id": "c/1"},
    {"native_id": "gh:1/2"},
    {"native_id": "gh:1/2", "variant": "edited"},
    {"delivery_handle_json": b'{"kind":"slack","target":{"channel" : "C1"}}'},
    {"occurred_at_us": 0},
    {"occurred_at_us": -1},
    {"occurred_at_us": 253_402_300_799_999_999},
    {"occurred_at_us": 1_700_000_000_000_001},
    {"trust": Trust.UNTRUSTED},
    {"trust": Trust.TRUSTED},
]


def assert_holds(event: Event, draft: Draft) -> None:
    """Check that the event carries every fact of the draft."""
    for name in Draft.__struct_fields__:
        if name == "occurred_at_us" and draft.occurred_at_us is None:
            continue
        assert getattr(event, name) == getattr(draft, name), name


class AppendRules(LogSuite):
    async def test_offsets_are_dense_from_zero_in_the_order_given(self, case: Case) -> None:
        stream = await case.make()
        receipts: list[Receipt] = []
        for size in (1, 3, 2, 1, 10):
            receipts += await case.log.append(stream, batch(size, first=len(receipts)))
        assert offsets(receipts) == list(range(17))
        events = await case.events()
        assert offsets(events) == list(range(17))
        assert [event.payload for event in events] == list(range(17))

    async def test_a_receipt_is_the_address_of_its_event(self, case: Case) -> None:
        stream = await case.make(partitions=3)
        receipts = await case.log.append(stream, [fact(number, key=f"k{number}") for number in range(12)])
        for number, receipt in enumerate(receipts):
            (event,) = await case.log.fetch(stream, receipt.partition, receipt.offset, 1)
            assert event.payload == number
            assert event.id == receipt.id == f"{stream}/{receipt.partition}/{receipt.offset}"
            assert receipt.created_at_us == event.created_at_us
            assert (receipt.stream, receipt.duplicate, receipt.spooled) == (stream, False, False)

    async def test_receipts_say_how_durable_the_event_is(self, case: Case) -> None:
        stream = await case.make()
        receipts = await case.log.append(stream, [fact(1, native_id="a"), fact(2)])
        receipts += await case.log.append(stream, [fact(1, native_id="a")])
        assert {receipt.durability for receipt in receipts} == {case.features.durability}

    async def test_nothing_appended_gives_nothing(self, case: Case) -> None:
        stream = await case.make()
        assert await case.log.append(stream, []) == []
        assert await case.high_water_mark() == 0

    @pytest.mark.parametrize("payload", ODD_PAYLOADS, ids=lambda raw: ascii(raw[:24]))
    async def test_payloads_come_back_byte_for_byte(self, case: Case, payload: bytes) -> None:
        await case.make()
        receipt = await case.one(fact(payload, native_id="n"))
        (event,) = await case.events()
        assert event.payload_json == payload
        assert event.payload == msgspec.json.decode(payload)
        assert (await case.one(fact(payload, native_id="n"))).offset == receipt.offset

    @pytest.mark.parametrize("fields", ODD_FIELDS, ids=lambda fields: ascii(fields)[:48])
    async def test_every_field_comes_back(self, case: Case, fields: dict[str, object]) -> None:
        stream = await case.make()
        draft = fact({"n": 1}, **fields)
        await case.log.append(stream, [draft])
        await case.log.ensure_consumer(stream, "reader")
        (event,) = await case.events()
        assert_holds(event, draft)
        assert (event.stream, event.partition, event.offset) == (stream, 0, 0)
        assert (event.status, event.attempt) == ("pending", 0)

    async def test_a_mixed_batch_keeps_every_field_with_its_event(self, case: Case) -> None:
        stream = await case.make()
        drafts = [fact(number, **{"native_id": f"n{number}", **fields}) for number, fields in enumerate(ODD_FIELDS)]
        drafts += [fact(payload) for payload in ODD_PAYLOADS]
        await case.log.append(stream, drafts)
        for event, draft in zip(await case.events(), drafts, strict=True):
            assert_holds(event, draft)

    async def test_an_event_happened_now_unless_it_says_when(self, case: Case) -> None:
        case.needs("clock")
        stream = await case.make()
        await case.log.append(stream, [fact(1), fact(2, occurred_at_us=5)])
        case.clock.advance(1.5)
        await case.log.append(stream, [fact(3)])
        start = case.clock.now_us() - 1_500_000
        events = await case.events()
        assert [event.created_at_us for event in events] == [start, start, start + 1_500_000]
        assert [event.occurred_at_us for event in events] == [start, 5, start + 1_500_000]

    async def test_offsets_do_not_follow_clocks(self, case: Case) -> None:
        await case.make()
        for number in range(4):
            await case.one(fact(number, occurred_at_us=100 - number))
            case.clock.advance(-60)
        assert [event.payload for event in await case.events()] == [0, 1, 2, 3]

    async def test_interleaved_streams_have_their_own_offsets(self, case: Case) -> None:
        streams = [await case.make(leaf) for leaf in ("a", "b", "c")]
        for number in range(12):
            for index, stream in enumerate(streams):
                if number % (index + 1) == 0:
                    await case.log.append(stream, [fact([index, number])])
        for index, stream in enumerate(streams):
            events = await case.events(stream)
            assert offsets(events) == list(range(len(events)))
            assert [event.payload for event in events] == [[index, number] for number in range(0, 12, index + 1)]
            assert {event.stream for event in events} == {stream}

    async def test_a_large_batch_keeps_its_order(self, case: Case) -> None:
        stream = await case.make()
        receipts = await case.log.append(stream, batch(5000))
        assert offsets(receipts) == list(range(5000))
        assert [event.payload for event in await case.events()] == list(range(5000))
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        seen: list[int] = []
        while events := (await case.log.read(stream, "reader", 700)).events:
            seen += [event.payload for event in events]
            await case.log.commit(stream, "reader", events[-1].offset)
        assert seen == list(range(5000))

    async def test_a_cancelled_append_is_whole_or_absent(self, case: Case) -> None:
        case.needs("atomic_batches")
        stream = await case.make()
        for number in range(20):
            task = asyncio.create_task(case.log.append(stream, batch(5, first=number * 5)))
            await asyncio.sleep(0 if number % 2 else 0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await case.log.append(stream, [fact("last")])
        events = await case.events()
        assert offsets(events) == list(range(len(events)))
        assert events[-1].payload == "last"
        numbers = [event.payload for event in events[:-1]]
        firsts = numbers[::5]
        assert numbers == [first + step for first in firsts for step in range(5)]
        assert firsts == sorted(set(firsts))
