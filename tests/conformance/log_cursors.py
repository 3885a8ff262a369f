"""Read, commit and lag: a cursor moves forward by commits only, and reading never moves it."""

from __future__ import annotations

import pytest

from postbus.model import Invalid, OffsetOutOfRange
from tests.conformance.log_suite import EARLIEST, Case, LogSuite, at_offset, batch, fact, offsets


class CursorRules(LogSuite):
    async def test_reading_changes_nothing(self, case: Case) -> None:
        stream = await case.filled(10)
        consumer = await case.log.ensure_consumer(stream, "reader", at_offset(2))
        case.clock.advance(5)
        first = await case.log.read(stream, "reader", 4)
        assert offsets(first.events) == [2, 3, 4, 5]
        assert (first.consumer, first.high_water_mark) == (consumer, 10)
        for _ in range(3):
            assert await case.log.read(stream, "reader", 4) == first
        assert await case.log.get_consumer(stream, "reader") == consumer
        first.events.clear()
        assert await case.pending("reader", 4) == [2, 3, 4, 5]

    async def test_a_read_gives_the_events_as_a_fetch_does(self, case: Case) -> None:
        stream = await case.make()
        await case.log.append(stream, [fact(b' { "a":1 }', key="k", native_id="n", headers_json=b'{"h":"1"}')])
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        assert (await case.log.read(stream, "reader")).events == await case.log.fetch(stream, 0, 0)

    async def test_limits_of_a_read(self, case: Case) -> None:
        stream = await case.filled(150)
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        assert await case.pending("reader", 1) == [0]
        assert await case.pending("reader", 149) == list(range(149))
        assert await case.pending("reader", 1000) == list(range(150))
        assert len((await case.log.read(stream, "reader")).events) == 100
        for limit in (0, -1):
            with pytest.raises(Invalid):
                await case.log.read(stream, "reader", limit)

    async def test_a_reader_at_the_end_reads_nothing_and_then_what_comes(self, case: Case) -> None:
        stream = await case.filled(3)
        await case.log.ensure_consumer(stream, "reader")
        result = await case.log.read(stream, "reader")
        assert (result.events, result.high_water_mark) == ([], 3)
        await case.log.append(stream, batch(2))
        result = await case.log.read(stream, "reader")
        assert (offsets(result.events), result.high_water_mark) == ([3, 4], 5)

    async def test_a_commit_names_the_last_consumed_offset(self, case: Case) -> None:
        stream = await case.filled(10)
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        result = await case.log.commit(stream, "reader", 0)
        assert (result.moved, result.committed, result.next_offset) == (True, 0, 1)
        assert await case.pending("reader", 2) == [1, 2]
        result = await case.log.commit(stream, "reader", 6)
        assert (result.moved, result.committed, result.next_offset) == (True, 6, 7)
        consumer = await case.log.get_consumer(stream, "reader")
        assert consumer is not None
        assert (consumer.cursors[0].next_offset, consumer.cursors[0].committed) == (7, 6)
        result = await case.log.commit(stream, "reader", 9)
        assert (result.moved, result.committed, result.next_offset) == (True, 9, 10)
        assert await case.pending("reader") == []

    async def test_a_commit_backwards_does_nothing_and_says_so(self, case: Case) -> None:
        stream = await case.filled(10)
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        await case.log.commit(stream, "reader", 6)
        before = await case.log.get_consumer(stream, "reader")
        case.clock.advance(5)
        for through in (6, 5, 0):
            result = await case.log.commit(stream, "reader", through)
            assert (result.moved, result.committed, result.next_offset) == (False, 6, 7)
        assert await case.log.get_consumer(stream, "reader") == before

    async def test_a_commit_below_the_start_is_backwards(self, case: Case) -> None:
        stream = await case.filled(10)
        await case.log.ensure_consumer(stream, "reader", at_offset(5))
        result = await case.log.commit(stream, "reader", 4)
        assert (result.moved, result.committed, result.next_offset) == (False, -1, 5)
        lag = await case.log.get_consumer_lag(stream, "reader")
        assert (lag.partitions[0].committed, lag.total) == (-1, 5)

    @pytest.mark.parametrize("through", [-1, -(2**70), 10, 11, 10**12, 2**63, 2**70])
    async def test_a_commit_outside_the_stream_is_refused(self, case: Case, through: int) -> None:
        stream = await case.filled(10)
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        await case.log.commit(stream, "reader", 6)
        before = await case.log.get_consumer(stream, "reader")
        with pytest.raises(OffsetOutOfRange):
            await case.log.commit(stream, "reader", through)
        assert await case.log.get_consumer(stream, "reader") == before

    async def test_on_an_empty_stream_there_is_nothing_to_commit(self, case: Case) -> None:
        stream = await case.make()
        await case.log.ensure_consumer(stream, "reader")
        for through in (-1, 0):
            with pytest.raises(OffsetOutOfRange):
                await case.log.commit(stream, "reader", through)

    async def test_forty_two_committed_of_fifty_is_a_lag_of_seven(self, case: Case) -> None:
        stream = await case.filled(50)
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        await case.log.commit(stream, "reader", 42)
        lag = await case.log.get_consumer_lag(stream, "reader")
        assert (lag.consumer, lag.stream, lag.total) == ("reader", stream, 7)
        (part,) = lag.partitions
        assert (part.partition, part.committed, part.high_water_mark, part.lag) == (0, 42, 50, 7)
        assert await case.pending("reader") == list(range(43, 50))

    async def test_never_committed_is_minus_one_whatever_the_lag(self, case: Case) -> None:
        stream = await case.filled(50)
        await case.log.ensure_consumer(stream, "new")
        await case.log.ensure_consumer(stream, "old", EARLIEST)
        new, old = [await case.log.get_consumer_lag(stream, consumer) for consumer in ("new", "old")]
        assert (new.partitions[0].committed, new.partitions[0].high_water_mark, new.total) == (-1, 50, 0)
        assert (old.partitions[0].committed, old.partitions[0].high_water_mark, old.total) == (-1, 50, 50)

    async def test_lag_follows_appends_commits_and_resets(self, case: Case) -> None:
        stream = await case.filled(4)
        await case.log.ensure_consumer(stream, "reader")
        assert await case.lag("reader") == 0
        await case.log.append(stream, batch(6))
        assert await case.lag("reader") == 6
        await case.log.commit(stream, "reader", 7)
        assert await case.lag("reader") == 2
        await case.log.reset(stream, "reader", EARLIEST)
        assert await case.lag("reader") == 10
        assert (await case.log.get_consumer_lag(stream, "reader")).epoch == (await case.log.ensure_stream(stream)).epoch

    async def test_a_consumer_says_when_it_changed(self, case: Case) -> None:
        case.needs("clock")
        stream = await case.filled(5)
        made = await case.log.ensure_consumer(stream, "reader", EARLIEST)
        case.clock.advance(1)
        await case.log.commit(stream, "reader", 2)
        consumer = await case.log.get_consumer(stream, "reader")
        assert consumer is not None
        assert (consumer.created_at_us, consumer.updated_at_us) == (made.created_at_us, case.clock.now_us())

    async def test_every_commit_that_moves_leaves_a_row_in_the_audit(self, case: Case) -> None:
        case.needs("audit")
        stream = await case.make(partitions=2)
        await case.log.append(stream, [fact(key=f"k{number}") for number in range(40)])
        for consumer in ("reader", "other"):
            await case.log.ensure_consumer(stream, consumer, EARLIEST)
        for through in (2, 5, 5, 3):
            await case.log.commit(stream, "reader", through, 1)
        with pytest.raises(OffsetOutOfRange):
            await case.log.commit(stream, "reader", 100)
        await case.log.commit(stream, "reader", 0)
        assert await self.audit(case.log, stream, "reader") == [(1, 2), (1, 5), (0, 0)]
        assert await self.audit(case.log, stream, "other") == []
