"""Identity: (stream, native_id, variant) is appended once, for ever, and a changed fact under it is refused."""

from __future__ import annotations

import pytest

from postbus.envelope import draft as checked
from postbus.model import Conflict, Draft, IdempotencyConflict
from tests.conformance.log_suite import EARLIEST, Case, LogSuite, at_time, batch, fact, offsets

BASE: dict[str, object] = {
    "native_id": "n",
    "key": "k",
    "metadata_json": b'{"m":1}',
    "headers_json": b'{"h":"1"}',
    "delivery_handle_json": b'{"kind":"x","target":{}}',
    "occurred_at_us": 1000,
}

CHANGED: dict[str, object] = {
    "topic": "orders.changed",
    "source": "other",
    "key": "k2",
    "payload_json": b'{"a":2}',
    "metadata_json": b'{"m":2}',
    "headers_json": b'{"h":"2"}',
    "delivery_handle_json": b'{"kind":"y","target":{}}',
    "occurred_at_us": 1001,
}


def base(**changes: object) -> Draft:
    return fact({"a": 1}, **{**BASE, **changes})


class IdentityRules(LogSuite):
    async def test_the_same_fact_again_gives_the_first_offset_and_writes_nothing(self, case: Case) -> None:
        stream = await case.make()
        await case.log.append(stream, batch(2))
        first = await case.one(base())
        await case.log.append(stream, batch(2))
        before = await case.log.get_stream_stats(stream)
        case.clock.advance(3600)
        for _ in range(3):
            again = await case.one(base())
            assert (again.partition, again.offset, again.duplicate) == (first.partition, first.offset, True)
        assert (first.offset, first.duplicate) == (2, False)
        assert await case.log.get_stream_stats(stream) == before

    async def test_duplicates_burn_no_offset(self, case: Case) -> None:
        stream = await case.make()
        for number in range(5):
            await case.log.append(stream, [base(), fact(number)])
        assert offsets(await case.events()) == list(range(6))
        assert [event.payload for event in await case.events()] == [{"a": 1}, 0, 1, 2, 3, 4]

    @pytest.mark.parametrize("name", CHANGED)
    async def test_other_content_is_a_conflict(self, case: Case, name: str) -> None:
        stream = await case.make()
        await case.log.append(stream, [*batch(3), base(variant="v")])
        before = await case.log.get_stream_stats(stream)
        with pytest.raises(IdempotencyConflict) as caught:
            await case.one(base(variant="v", **{name: CHANGED[name]}))
        error = caught.value
        assert isinstance(error, Conflict)
        assert (error.stream, error.native_id, error.variant, error.offset) == (stream, "n", "v", 3)
        assert await case.log.get_stream_stats(stream) == before
        assert (await case.one(base(variant="v"))).duplicate

    @pytest.mark.parametrize("name", ["key", "metadata_json", "headers_json", "delivery_handle_json"])
    async def test_content_that_was_not_given_is_content_too(self, case: Case, name: str) -> None:
        await case.make()
        await case.one(base(**{name: None}))
        with pytest.raises(IdempotencyConflict):
            await case.one(base())

    async def test_how_it_travelled_is_not_content(self, case: Case) -> None:
        await case.make()
        first = await case.one(base(correlation_id="one"))
        again = await case.one(base(correlation_id="two"))
        assert (again.offset, again.duplicate) == (first.offset, True)

    async def test_without_an_explicit_time_a_later_repeat_is_the_same_fact(self, case: Case) -> None:
        await case.make()
        await case.one(fact(1, native_id="n"))
        case.clock.advance(10)
        assert (await case.one(fact(1, native_id="n"))).duplicate

    async def test_the_same_instant_in_another_zone_is_the_same_fact(self, case: Case) -> None:
        await case.make()

        async def one(occurred_at: str) -> tuple[int, bool]:
            draft = checked("orders.created", "suite", {"a": 1}, native_id="n", occurred_at=occurred_at)
            receipt = await case.one(draft)
            return receipt.offset, receipt.duplicate

        assert await one("2026-03-01T12:00:00Z") == (0, False)
        assert await one("2026-03-01T13:30:00+01:30") == (0, True)
        assert await one("2026-03-01T04:00:00.000000-08:00") == (0, True)
        with pytest.raises(IdempotencyConflict):
            await one("2026-03-01T12:00:01Z")

    async def test_without_a_native_id_equal_events_are_two_facts(self, case: Case) -> None:
        stream = await case.make()
        receipts = await case.log.append(stream, [fact(1), fact(1), fact(1, variant="v")])
        receipts += await case.log.append(stream, [fact(1)])
        assert [(receipt.offset, receipt.duplicate) for receipt in receipts] == [(n, False) for n in range(4)]

    async def test_identity_is_per_stream_and_per_variant(self, case: Case) -> None:
        streams = [await case.make(leaf) for leaf in ("a", "b")]
        for stream in streams:
            for index, variant in enumerate(["", "v", "V", "v "]):
                receipt = await case.one(fact([stream, variant], native_id="n", variant=variant), stream)
                assert (receipt.offset, receipt.duplicate) == (index, False)
            with pytest.raises(IdempotencyConflict):
                await case.one(fact("other", native_id="n", variant="V"), stream)

    async def test_identities_that_look_alike_are_not_the_same(self, case: Case) -> None:
        await case.make()
        pairs = [
            ("a", "b"), ("ab", ""), ("a|", "b"), ("a", "|b"), ("a/b", ""), ("a", "/b"), ("A", "b"), ("a ", "b"),
            ("é", ""), ("e\u0301", ""), ("1", ""), ("01", ""), ("x" * 1000, ""), ("x" * 999, "x"),
        ]  # fmt: skip
        for index, (native_id, variant) in enumerate(pairs):
            receipt = await case.one(fact(index, native_id=native_id, variant=variant))
            assert (receipt.offset, receipt.duplicate) == (index, False)
        for index, (native_id, variant) in enumerate(pairs):
            receipt = await case.one(fact(index, native_id=native_id, variant=variant))
            assert (receipt.offset, receipt.duplicate) == (index, True)

    async def test_duplicates_inside_one_call_are_seen(self, case: Case) -> None:
        stream = await case.make()
        drafts = [base(), fact(1), base(), fact(2), base(variant="v"), base(variant="v"), base()]
        receipts = await case.log.append(stream, drafts)
        assert offsets(receipts) == [0, 1, 0, 2, 3, 3, 0]
        assert [receipt.duplicate for receipt in receipts] == [False, False, True, False, False, True, True]
        assert len(await case.events()) == 4
        again = await case.log.append(stream, drafts)
        assert offsets(again) == [0, 4, 0, 5, 3, 3, 0]

    async def test_a_conflict_leaves_nothing_of_its_batch(self, case: Case) -> None:
        case.needs("atomic_batches")
        stream = await case.make()
        await case.one(base())
        before = await case.log.get_stream_stats(stream)
        with pytest.raises(IdempotencyConflict) as caught:
            await case.log.append(stream, [fact(1), fact(2, native_id="new"), base(source="other"), fact(3)])
        assert caught.value.offset == 0
        assert await case.log.get_stream_stats(stream) == before
        receipt = await case.one(fact("quite another", native_id="new"))
        assert (receipt.offset, receipt.duplicate) == (1, False)

    async def test_a_conflict_between_two_events_of_one_call_leaves_nothing(self, case: Case) -> None:
        case.needs("atomic_batches")
        stream = await case.make()
        with pytest.raises(IdempotencyConflict):
            await case.log.append(stream, [fact(0), base(), fact(1), base(source="other")])
        assert await case.events() == []
        assert offsets(await case.log.append(stream, [base(source="other"), fact(1)])) == [0, 1]

    async def test_duplicates_leave_lag_and_reads_alone(self, case: Case) -> None:
        stream = await case.make()
        await case.log.ensure_consumer(stream, "reader")
        await case.log.append(stream, [base(), fact(1)])
        await case.log.commit(stream, "reader", 0)
        assert await case.lag("reader") == 1
        for _ in range(3):
            await case.one(base())
        assert await case.lag("reader") == 1
        assert await case.pending("reader") == [1]
        await case.log.commit(stream, "reader", 1)
        await case.one(base())
        assert await case.lag("reader") == 0
        assert await case.pending("reader") == []

    async def test_identities_outlive_the_events(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.make()
        await case.log.append(stream, [base(), fact(1), fact(2)])
        assert (await case.log.trim(stream, 2)).removed == 2
        case.clock.advance(10 * 365 * 86400)
        again = await case.one(base())
        assert (again.offset, again.duplicate) == (0, True)
        with pytest.raises(IdempotencyConflict):
            await case.one(base(source="other"))
        assert offsets(await case.events()) == [2]

    async def test_a_stream_with_a_window_forgets_identities_after_it(self, case: Case) -> None:
        case.needs("identity_window")
        case.needs("clock")
        stream = await case.make(identity_window_s=60.0)
        await case.one(base())
        case.clock.advance(50)
        await case.log.trim(stream)
        assert (await case.one(base())).duplicate
        case.clock.advance(20)
        await case.log.trim(stream)
        receipt = await case.one(base(source="other"))
        assert (receipt.offset, receipt.duplicate) == (1, False)
        assert (await case.one(base(source="other"))).duplicate

    async def test_reading_and_replaying_does_not_forget(self, case: Case) -> None:
        stream = await case.make()
        await case.log.append(stream, [base(), fact(1)])
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        await case.log.commit(stream, "reader", 1)
        for start in (EARLIEST, at_time(0)):
            await case.log.reset(stream, "reader", start)
            assert (await case.one(base())).duplicate
        await case.log.delete_consumer(stream, "reader")
        assert (await case.one(base())).duplicate
