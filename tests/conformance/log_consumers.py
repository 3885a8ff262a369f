"""Consumers: ids, get-or-create, listing, deleting."""

from __future__ import annotations

import pytest

from postbus.model import Conflict, Invalid, NotFound, Start, StartPolicy
from tests.conformance.log_suite import EARLIEST, LATEST, Case, LogSuite, at_offset, at_time, batch, fact

BAD_IDS = ["", " ", "a b", "a/b", "a:b", "é", "a*", "a\n", "a\x00", "x" * 121]
GOOD_IDS = ["a", "A.b_c-9", ".", "-", "x" * 120]
BAD_STARTS = [
    Start(policy=StartPolicy.AT_OFFSET),
    Start(policy=StartPolicy.AT_TIME),
    Start(policy=StartPolicy.AT_OFFSET, time_us=5),
    Start(policy=StartPolicy.AT_TIME, offset=5),
]


class ConsumerRules(LogSuite):
    async def test_a_consumer_starts_at_the_end_unless_told(self, case: Case) -> None:
        stream = await case.filled(5)
        consumer = await case.log.ensure_consumer(stream, "reader")
        assert (consumer.id, consumer.stream, consumer.start.policy) == ("reader", stream, StartPolicy.LATEST)
        (cursor,) = consumer.cursors
        assert (cursor.partition, cursor.next_offset, cursor.committed, cursor.skipped) == (0, 5, -1, 0)
        assert consumer.epoch == (await case.log.ensure_stream(stream)).epoch
        if case.features.clock:
            assert consumer.created_at_us == case.clock.now_us()
        assert await case.log.get_consumer(stream, "reader") == consumer

    async def test_latest_is_pinned_when_the_consumer_is_made(self, case: Case) -> None:
        stream = await case.filled(5)
        await case.log.ensure_consumer(stream, "reader", LATEST)
        await case.log.append(stream, batch(3))
        again = await case.log.ensure_consumer(stream, "reader", LATEST)
        assert again.cursors[0].next_offset == 5
        assert await case.pending("reader") == [5, 6, 7]

    async def test_ensuring_again_gives_the_consumer_where_it_is(self, case: Case) -> None:
        stream = await case.filled(5)
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        await case.log.commit(stream, "reader", 2)
        case.clock.advance(5)
        for start in (EARLIEST, None):
            again = await case.log.ensure_consumer(stream, "reader", start)
            assert again == await case.log.get_consumer(stream, "reader")
            assert (again.cursors[0].next_offset, again.cursors[0].committed) == (3, 2)
            assert again.start == EARLIEST

    async def test_the_same_id_with_another_start_is_a_conflict(self, case: Case) -> None:
        stream = await case.filled(5)
        starts = [LATEST, EARLIEST, at_offset(3), at_offset(4), at_time(10), at_time(11)]
        for index, mine in enumerate(starts):
            consumer = await case.log.ensure_consumer(stream, f"reader-{index}", mine)
            for other in starts:
                if other == mine:
                    assert await case.log.ensure_consumer(stream, f"reader-{index}", other) == consumer
                    continue
                with pytest.raises(Conflict):
                    await case.log.ensure_consumer(stream, f"reader-{index}", other)
            assert await case.log.get_consumer(stream, f"reader-{index}") == consumer

    async def test_no_start_is_the_same_as_latest(self, case: Case) -> None:
        stream = await case.filled(1)
        consumer = await case.log.ensure_consumer(stream, "reader")
        assert await case.log.ensure_consumer(stream, "reader", LATEST) == consumer
        with pytest.raises(Conflict):
            await case.log.ensure_consumer(stream, "reader", EARLIEST)

    async def test_a_reset_does_not_make_the_start_another_one(self, case: Case) -> None:
        stream = await case.filled(5)
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        await case.log.reset(stream, "reader", at_offset(3))
        again = await case.log.ensure_consumer(stream, "reader", EARLIEST)
        assert again.cursors[0].next_offset == 3

    @pytest.mark.parametrize("consumer", BAD_IDS, ids=lambda text: ascii(text)[:12])
    async def test_a_bad_id_is_refused(self, case: Case, consumer: str) -> None:
        stream = await case.make()
        with pytest.raises(Invalid):
            await case.log.ensure_consumer(stream, consumer)
        assert await case.log.consumers(stream) == []

    async def test_good_ids_are_taken_and_differ_by_case(self, case: Case) -> None:
        stream = await case.filled(3)
        ids = [*GOOD_IDS, "Reader", "reader"]
        for place, consumer in enumerate(ids):
            await case.log.ensure_consumer(stream, consumer, EARLIEST)
            if place % 2:
                await case.log.commit(stream, consumer, 1)
        for place, consumer in enumerate(ids):
            assert await case.next_offsets(consumer) == [2 if place % 2 else 0]

    @pytest.mark.parametrize("start", BAD_STARTS, ids=repr)
    async def test_a_start_without_its_argument_is_refused(self, case: Case, start: Start) -> None:
        stream = await case.filled(3)
        with pytest.raises(Invalid):
            await case.log.ensure_consumer(stream, "reader", start)
        assert await case.log.get_consumer(stream, "reader") is None
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        before = await case.log.get_consumer(stream, "reader")
        with pytest.raises(Invalid):
            await case.log.reset(stream, "reader", start)
        assert await case.log.get_consumer(stream, "reader") == before

    async def test_an_unknown_consumer_is_not_found(self, case: Case) -> None:
        log, stream = case.log, await case.filled(3)
        other = await case.make("other")
        await log.ensure_consumer(other, "reader")
        assert await log.get_consumer(stream, "reader") is None
        for call in (
            lambda: log.read(stream, "reader"),
            lambda: log.commit(stream, "reader", 0),
            lambda: log.reset(stream, "reader", EARLIEST),
            lambda: log.get_consumer_lag(stream, "reader"),
        ):
            with pytest.raises(NotFound):
                await call()
        assert await log.delete_consumer(stream, "reader") is False
        assert await log.get_consumer(stream, "reader") is None

    async def test_consumers_are_listed_by_stream_and_id(self, case: Case) -> None:
        for leaf in ("b", "a"):
            stream = await case.make(leaf)
            for consumer in ("z", "a-", "a", "B"):
                await case.log.ensure_consumer(stream, consumer)
        listed = await case.log.consumers(case.name("a"))
        assert [consumer.id for consumer in listed] == ["B", "a", "a-", "z"]
        assert listed == [await case.log.get_consumer(case.name("a"), consumer.id) for consumer in listed]
        mine = [found for found in await case.log.consumers() if found.stream.startswith(f"{case.namespace}.")]
        pairs = [(consumer.stream, consumer.id) for consumer in mine]
        assert pairs == [(case.name(leaf), consumer) for leaf in "ab" for consumer in ("B", "a", "a-", "z")]

    async def test_a_consumer_belongs_to_one_stream(self, case: Case) -> None:
        streams = [await case.filled(5, leaf) for leaf in ("a", "b")]
        for stream in streams:
            await case.log.ensure_consumer(stream, "reader", EARLIEST)
        await case.log.commit(streams[0], "reader", 3)
        assert await case.next_offsets("reader", streams[0]) == [4]
        assert await case.next_offsets("reader", streams[1]) == [0]
        assert await case.log.delete_consumer(streams[0], "reader")
        assert await case.next_offsets("reader", streams[1]) == [0]

    async def test_a_deleted_consumer_is_forgotten(self, case: Case) -> None:
        stream = await case.filled(5)
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        await case.log.commit(stream, "reader", 3)
        assert await case.log.delete_consumer(stream, "reader") is True
        assert await case.log.delete_consumer(stream, "reader") is False
        assert await case.log.get_consumer(stream, "reader") is None
        assert await case.log.consumers(stream) == []
        with pytest.raises(NotFound):
            await case.log.read(stream, "reader")
        again = await case.log.ensure_consumer(stream, "reader", at_offset(1))
        assert (again.cursors[0].next_offset, again.cursors[0].committed) == (1, -1)

    async def test_consumers_do_not_see_each_other(self, case: Case) -> None:
        stream = await case.filled(6)
        for consumer in ("a", "b", "c"):
            await case.log.ensure_consumer(stream, consumer, EARLIEST)
        others = [await case.log.get_consumer(stream, consumer) for consumer in ("a", "c")]
        await case.log.commit(stream, "b", 4)
        await case.log.reset(stream, "b", LATEST)
        await case.one(fact())
        assert [await case.log.get_consumer(stream, consumer) for consumer in ("a", "c")] == others
        assert await case.pending("a") == list(range(7))
        assert await case.pending("b") == [6]
