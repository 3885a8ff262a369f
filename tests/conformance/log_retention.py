"""Trim and retention: the oldest goes first, readers hold it back unless the stream says otherwise, gaps are told."""

from __future__ import annotations

import pytest

from postbus.model import Gap, OffsetOutOfRange, Retention, TrimResult
from tests.conformance.log_suite import EARLIEST, LATEST, Case, LogSuite, at_offset, batch, fact, offsets


class RetentionRules(LogSuite):
    async def test_trim_removes_what_lies_below(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.filled(10)
        size = (await case.part()).bytes
        assert await case.log.trim(stream, 4) == TrimResult(removed=4, first_offsets=(4,))
        part = await case.part()
        assert (part.first_offset, part.high_water_mark, part.count) == (4, 10, 6)
        assert 0 < part.bytes < size
        assert offsets(await case.events()) == [4, 5, 6, 7, 8, 9]
        assert [event.payload for event in await case.events()] == [4, 5, 6, 7, 8, 9]

    async def test_trim_never_goes_back(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.filled(10)
        await case.log.trim(stream, 4)
        for before in (4, 2, 0):
            assert await case.log.trim(stream, before) == TrimResult(removed=0, first_offsets=(4,))

    async def test_trimming_everything_reuses_no_offset(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.filled(5)
        assert await case.log.trim(stream, 5) == TrimResult(removed=5, first_offsets=(5,))
        part = await case.part()
        assert (part.first_offset, part.high_water_mark, part.count, part.bytes) == (5, 5, 0, 0)
        assert await case.events() == []
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        assert offsets(await case.log.append(stream, batch(2))) == [5, 6]
        assert await case.pending("reader") == [5, 6]

    @pytest.mark.parametrize("before", [6, 10**12, 2**63, 2**70, -1])
    async def test_trim_outside_the_stream_is_refused(self, case: Case, before: int) -> None:
        case.needs("retention")
        stream = await case.filled(5)
        with pytest.raises(OffsetOutOfRange):
            await case.log.trim(stream, before)
        with pytest.raises(OffsetOutOfRange):
            await case.log.trim(stream, before, 0)
        assert (await case.part()).first_offset == 0

    async def test_a_stream_without_bounds_keeps_everything(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.filled(20)
        case.clock.advance(10 * 365 * 86400)
        assert await case.log.trim(stream) == TrimResult(removed=0, first_offsets=(0,))

    async def test_an_empty_stream_has_nothing_to_trim(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.make(retention=Retention(count=1, bytes=1, age_s=1.0), retention_beats_consumers=True)
        assert await case.log.trim(stream) == TrimResult(removed=0, first_offsets=(0,))
        assert await case.log.trim(stream, 0) == TrimResult(removed=0, first_offsets=(0,))

    async def test_retention_by_count_keeps_the_newest(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.filled(10, retention=Retention(count=4))
        assert await case.log.trim(stream) == TrimResult(removed=6, first_offsets=(6,))
        assert await case.log.trim(stream) == TrimResult(removed=0, first_offsets=(6,))
        await case.log.append(stream, batch(1))
        assert await case.log.trim(stream) == TrimResult(removed=1, first_offsets=(7,))

    async def test_retention_by_bytes_keeps_the_newest_that_fit(self, case: Case) -> None:
        case.needs("retention")
        probe = await case.make("probe1")
        for _ in range(2):
            await case.log.append(probe, [fact("x" * 1000)])
        one = (await case.part(probe)).bytes // 2
        limit = 5 * one + one // 2
        stream = await case.make("probe2", retention=Retention(bytes=limit))
        for _ in range(9):
            await case.log.append(stream, [fact("x" * 1000)])
        assert await case.log.trim(stream) == TrimResult(removed=4, first_offsets=(4,))
        assert (await case.part(stream)).bytes <= limit
        assert (await case.log.trim(stream)).removed == 0

    async def test_retention_by_age_removes_the_old(self, case: Case) -> None:
        case.needs("retention")
        case.needs("clock")
        stream = await case.make(retention=Retention(age_s=60.0))
        for number in range(6):
            await case.one(fact(number))
            case.clock.advance(20)
        # the ages are now 120, 100, 80, 60, 40, 20 seconds
        case.clock.advance(-5)
        assert await case.log.trim(stream) == TrimResult(removed=3, first_offsets=(3,))
        assert (await case.log.trim(stream)).removed == 0
        case.clock.advance(3600)
        assert await case.log.trim(stream) == TrimResult(removed=3, first_offsets=(6,))

    async def test_each_bound_counts(self, case: Case) -> None:
        case.needs("retention")
        case.needs("clock")
        stream = await case.make(retention=Retention(age_s=60.0, count=5, bytes=10**9))
        await case.log.append(stream, batch(8))
        assert (await case.log.trim(stream)).first_offsets == (3,)
        case.clock.advance(100)
        await case.log.append(stream, batch(2))
        assert (await case.log.trim(stream)).first_offsets == (8,)

    async def test_retention_applies_in_every_partition(self, case: Case) -> None:
        case.needs("retention")
        case.needs("clock")
        stream = await case.make(partitions=3, retention=Retention(age_s=60.0))
        await case.log.append(stream, [fact(key=f"k{number}") for number in range(30)])
        marks = tuple(part.high_water_mark for part in (await case.log.get_stream_stats(stream)).partitions)
        case.clock.advance(100)
        await case.log.append(stream, [fact(key=f"k{number}") for number in range(30)])
        assert await case.log.trim(stream) == TrimResult(removed=30, first_offsets=marks)

    @pytest.mark.parametrize("by", ["count", "age", "before"])
    async def test_a_reader_holds_back_what_it_has_not_read(self, case: Case, by: str) -> None:
        case.needs("retention")
        case.needs("clock")
        bounds = {"count": Retention(count=2), "age": Retention(age_s=60.0), "before": Retention()}[by]
        stream = await case.filled(10, retention=bounds)
        before = 8 if by == "before" else None
        await case.log.ensure_consumer(stream, "slow", at_offset(3))
        await case.log.ensure_consumer(stream, "done", LATEST)
        case.clock.advance(100)
        if by == "age":
            await case.log.append(stream, batch(2))
        result = await case.log.trim(stream, before)
        assert (result.removed, result.first_offsets, result.gaps) == (3, (3,), ())
        assert result.held_back_by == ("slow",)
        assert await case.pending("slow", 3) == [3, 4, 5]
        await case.log.commit(stream, "slow", 5)
        assert (await case.log.trim(stream, before)).first_offsets == (6,)
        await case.log.commit(stream, "slow", 9)
        result = await case.log.trim(stream, before)
        assert result.first_offsets == (10 if by == "age" else 8,)
        assert result.held_back_by == ()

    async def test_a_reader_above_the_bound_holds_nothing_back(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.filled(10, retention=Retention(count=4))
        before = await case.log.ensure_consumer(stream, "reader", at_offset(6))
        assert await case.log.trim(stream) == TrimResult(removed=6, first_offsets=(6,))
        assert await case.log.get_consumer(stream, "reader") == before

    async def test_a_deleted_reader_holds_nothing_back(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.filled(10)
        await case.log.ensure_consumer(stream, "slow", EARLIEST)
        assert (await case.log.trim(stream, 5)).removed == 0
        await case.log.delete_consumer(stream, "slow")
        assert await case.log.trim(stream, 5) == TrimResult(removed=5, first_offsets=(5,))

    async def test_a_reader_of_another_stream_holds_nothing_back(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.filled(10)
        other = await case.filled(10, "other")
        await case.log.ensure_consumer(other, "slow", EARLIEST)
        assert (await case.log.trim(stream, 5)).removed == 5
        assert offsets(await case.events(other)) == list(range(10))

    async def test_a_reset_holds_back_from_its_new_place(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.filled(10)
        await case.log.ensure_consumer(stream, "reader", LATEST)
        await case.log.reset(stream, "reader", at_offset(2))
        assert (await case.log.trim(stream, 5)).first_offsets == (2,)

    async def test_readers_hold_back_their_own_partition(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.make(partitions=3)
        await case.log.append(stream, [fact(key=f"k{number}") for number in range(40)])
        await case.log.ensure_consumer(stream, "reader", LATEST)
        await case.log.reset(stream, "reader", at_offset(1), partition=1)
        result = await case.log.trim(stream, 3)
        assert (result.removed, result.first_offsets, result.held_back_by) == (7, (3, 1, 3), ("reader",))

    @pytest.mark.parametrize("by", ["count", "age", "before"])
    async def test_a_stream_may_say_that_retention_beats_readers(self, case: Case, by: str) -> None:
        case.needs("retention")
        case.needs("clock")
        bounds = {"count": Retention(count=2), "age": Retention(age_s=60.0), "before": Retention()}[by]
        stream = await case.make(retention=bounds, retention_beats_consumers=True)
        await case.log.append(stream, batch(8))
        case.clock.advance(100)
        await case.log.append(stream, batch(2))
        for consumer, offset in (("a", 0), ("b", 5), ("c", 8), ("d", 10)):
            await case.log.ensure_consumer(stream, consumer, at_offset(offset))
        await case.log.commit(stream, "b", 5)
        result = await case.log.trim(stream, 8 if by == "before" else None)
        assert (result.removed, result.first_offsets, result.held_back_by) == (8, (8,), ())
        assert sorted(result.gaps, key=lambda gap: gap.consumer) == [Gap("a", 0, 8), Gap("b", 0, 2)]
        consumers = await case.log.consumers(stream)
        assert [found.cursors[0].next_offset for found in consumers] == [8, 8, 8, 10]
        assert [found.cursors[0].skipped for found in consumers] == [8, 2, 0, 0]
        assert await case.pending("a") == [8, 9]
        assert [await case.lag(consumer) for consumer in "abcd"] == [2, 2, 2, 0]
        assert (await case.log.trim(stream, 8 if by == "before" else None)).gaps == ()

    async def test_gaps_add_up(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.filled(10, retention_beats_consumers=True)
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        assert (await case.log.trim(stream, 3)).gaps == (Gap("reader", 0, 3),)
        await case.log.commit(stream, "reader", 4)
        assert (await case.log.trim(stream, 9)).gaps == (Gap("reader", 0, 4),)
        (reader,) = await case.log.consumers(stream)
        assert (reader.cursors[0].next_offset, reader.cursors[0].skipped) == (9, 7)
        assert reader.cursors[0].committed == 4

    async def test_a_passed_reader_goes_on_from_what_is_left(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.filled(10, retention_beats_consumers=True)
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        await case.log.trim(stream, 6)
        result = await case.log.commit(stream, "reader", 2)
        assert (result.moved, result.next_offset) == (False, 6)
        result = await case.log.commit(stream, "reader", 6)
        assert (result.moved, result.committed, result.next_offset) == (True, 6, 7)
        assert await case.pending("reader") == [7, 8, 9]

    async def test_trimming_leaves_other_streams_alone(self, case: Case) -> None:
        case.needs("retention")
        streams = [await case.filled(6, leaf) for leaf in ("a", "b")]
        await case.log.trim(streams[0], 6)
        assert [await case.part(stream) for stream in streams][1].count == 6

    async def test_a_great_many_events_are_trimmed_in_one_call(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.make(partitions=2, retention_beats_consumers=True)
        await case.log.append(stream, [fact(number, key=f"k{number % 50}") for number in range(9000)])
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        before = min(part.high_water_mark for part in (await case.log.get_stream_stats(stream)).partitions) - 10
        result = await case.log.trim(stream, before)
        assert (result.removed, result.first_offsets) == (2 * before, (before, before))
        assert sorted(result.gaps, key=repr) == [Gap("reader", 0, before), Gap("reader", 1, before)]
        (reader,) = await case.log.consumers(stream)
        assert [(cursor.next_offset, cursor.skipped) for cursor in reader.cursors] == [(before, before)] * 2
