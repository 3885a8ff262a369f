"""Start policies: where each puts a cursor, for a new consumer and for a reset alike."""

from __future__ import annotations

import contextlib
import random

import pytest

from postbus.envelope import draft as checked
from postbus.model import Event, Invalid, OffsetOutOfRange, Start
from tests.conformance.log_suite import EARLIEST, LATEST, Case, LogSuite, at_offset, at_time, fact

# The arrival order of events that happened at these times; T gives the first offset that misses nothing at or after T.
TIMES = [30, 10, 50, 20, 40]
FIRST_AT = {-(10**15): 0, 0: 0, 10: 0, 30: 0, 31: 2, 35: 2, 40: 2, 41: 2, 50: 2, 51: 5, 10**17: 5}
FIRST_AT_TRIMMED = {0: 3, 20: 3, 21: 4, 31: 4, 40: 4, 41: 5, 50: 5}


async def place(case: Case, start: Start) -> int:
    """Return where the policy puts a new consumer, having checked that a reset puts one in the same place."""
    name = f"c{len(await case.log.consumers(case.stream))}"
    consumer = await case.log.ensure_consumer(case.stream, name, start)
    moved = await case.log.reset(case.stream, name, start)
    assert moved.cursors[0].next_offset == consumer.cursors[0].next_offset
    assert await case.log.delete_consumer(case.stream, name)
    return consumer.cursors[0].next_offset


def first_missing_nothing(events: list[Event], time_us: int, high_water_mark: int) -> int:
    return next((event.offset for event in events if event.occurred_at_us >= time_us), high_water_mark)


class StartRules(LogSuite):
    @pytest.mark.parametrize("start", [LATEST, EARLIEST, at_offset(0), at_time(0), at_time(10**17)], ids=repr)
    async def test_on_an_empty_stream_every_start_is_zero(self, case: Case, start: Start) -> None:
        stream = await case.make()
        consumer = await case.log.ensure_consumer(stream, "reader", start)
        assert consumer.cursors[0].next_offset == 0
        result = await case.log.read(stream, "reader")
        assert (result.events, result.high_water_mark) == ([], 0)
        assert await case.lag("reader") == 0
        await case.one(fact())
        assert await case.pending("reader") == [0]

    async def test_each_policy_has_its_place(self, case: Case) -> None:
        stream = await case.make()
        await case.log.append(stream, [fact(time_us, occurred_at_us=time_us) for time_us in TIMES])
        assert await place(case, LATEST) == 5
        assert await place(case, EARLIEST) == 0
        for offset in range(6):
            assert await place(case, at_offset(offset)) == offset

    @pytest.mark.parametrize("offset", [-1, 6, 10**12, 2**63, 2**70])
    async def test_an_offset_outside_the_stream_is_refused(self, case: Case, offset: int) -> None:
        stream = await case.filled(5)
        with pytest.raises(OffsetOutOfRange):
            await case.log.ensure_consumer(stream, "reader", at_offset(offset))
        assert await case.log.get_consumer(stream, "reader") is None
        before = await case.log.ensure_consumer(stream, "reader", at_offset(3))
        with pytest.raises(OffsetOutOfRange):
            await case.log.reset(stream, "reader", at_offset(offset))
        assert await case.log.get_consumer(stream, "reader") == before

    async def test_at_time_misses_nothing_whatever_the_order_of_arrival(self, case: Case) -> None:
        stream = await case.make()
        await case.log.append(stream, [fact(time_us, occurred_at_us=time_us) for time_us in TIMES])
        found = {time_us: await place(case, at_time(time_us)) for time_us in FIRST_AT}
        assert found == FIRST_AT

    async def test_at_time_follows_the_stream_as_it_grows(self, case: Case) -> None:
        stream = await case.make()
        await case.log.append(stream, [fact(time_us, occurred_at_us=time_us) for time_us in TIMES])
        assert await place(case, at_time(60)) == 5
        await case.log.append(stream, [fact(1, occurred_at_us=1), fact(70, occurred_at_us=70)])
        assert await place(case, at_time(60)) == 6
        assert await place(case, at_time(71)) == 7

    async def test_at_time_after_a_trim_looks_at_what_is_retained(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.make()
        await case.log.append(stream, [fact(time_us, occurred_at_us=time_us) for time_us in TIMES])
        await case.log.trim(stream, 3)
        found = {time_us: await place(case, at_time(time_us)) for time_us in FIRST_AT_TRIMMED}
        assert found == FIRST_AT_TRIMMED
        await case.log.trim(stream, 5)
        assert await place(case, at_time(0)) == 5

    async def test_at_time_compares_instants_and_not_strings(self, case: Case) -> None:
        stream = await case.make()
        texts = ["2026-03-01T12:00:00+05:00", "2026-03-01T09:00:00Z", "2026-03-01T05:00:00-08:00"]  # 07, 09, 13 UTC
        drafts = [checked("orders.created", "suite", number, occurred_at=text) for number, text in enumerate(texts)]
        await case.log.append(stream, drafts)
        times = [event.occurred_at_us for event in await case.events()]
        hour = 3_600_000_000
        assert [times[1] - times[0], times[2] - times[1]] == [2 * hour, 4 * hour]
        assert [await place(case, at_time(time_us)) for time_us in times] == [0, 1, 2]
        assert await place(case, at_time(times[1] + 1)) == 2
        assert await place(case, at_time(times[2] + 1)) == 3

    async def test_at_time_agrees_with_a_plain_search(self, case: Case) -> None:
        stream = await case.make()
        rng = random.Random(7)
        times = [rng.randrange(-50, 500) if number % 9 else number for number in range(600)]
        for start in range(0, 600, 150):
            part = times[start : start + 150]
            await case.log.append(stream, [fact(time_us, occurred_at_us=time_us) for time_us in part])
        events = await case.events()
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        for time_us in [*range(-60, 610, 13), max(times), max(times) + 1, min(times)]:
            consumer = await case.log.reset(stream, "reader", at_time(time_us))
            assert consumer.cursors[0].next_offset == first_missing_nothing(events, time_us, 600)

    async def test_a_late_event_from_the_past_is_not_skipped(self, case: Case) -> None:
        stream = await case.make()
        await case.log.append(stream, [fact(1, occurred_at_us=1000), fact(2, occurred_at_us=100)])
        await case.log.ensure_consumer(stream, "reader", at_time(500))
        assert await case.pending("reader") == [0, 1]

    async def test_after_a_trim_the_earliest_is_the_first_retained(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.filled(10)
        await case.log.trim(stream, 4)
        assert await place(case, EARLIEST) == 4
        assert await place(case, LATEST) == 10
        assert await place(case, at_offset(7)) == 7
        await case.log.trim(stream, 10)
        assert await place(case, EARLIEST) == 10

    async def test_an_offset_that_is_gone_starts_at_the_first_retained(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.filled(10)
        await case.log.trim(stream, 4)
        await case.log.ensure_consumer(stream, "reader", at_offset(1))
        assert await case.pending("reader") == [4, 5, 6, 7, 8, 9]
        assert await case.lag("reader") == 6

    async def test_reset_is_the_way_back_and_forth(self, case: Case) -> None:
        stream = await case.filled(10)
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        await case.log.commit(stream, "reader", 7)
        for start, expected in ((EARLIEST, 0), (at_offset(5), 5), (LATEST, 10), (at_offset(10), 10), (at_time(0), 0)):
            consumer = await case.log.reset(stream, "reader", start)
            assert consumer == await case.log.get_consumer(stream, "reader")
            assert await case.next_offsets("reader") == [expected]
            assert await case.lag("reader") == 10 - expected
            assert await case.pending("reader") == list(range(expected, 10))
        assert (await case.log.commit(stream, "reader", 2)).next_offset == 3

    async def test_a_policy_given_as_a_word_is_honoured_or_refused(self, case: Case) -> None:
        stream = await case.filled(5)
        with pytest.raises((Invalid, ValueError)):
            await case.log.ensure_consumer(stream, "reader", Start(policy="newest"))  # type: ignore[arg-type]
        assert await case.log.get_consumer(stream, "reader") is None
        with contextlib.suppress(Invalid):
            await case.log.ensure_consumer(stream, "reader", Start(policy="earliest"))  # type: ignore[arg-type]
            assert await case.pending("reader") == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("time_us", [2**62, 2**63, 2**70])
    async def test_an_instant_far_away_is_after_the_last_event_or_refused(self, case: Case, time_us: int) -> None:
        stream = await case.filled(3)
        with contextlib.suppress(Invalid):
            consumer = await case.log.ensure_consumer(stream, "future", at_time(time_us))
            assert consumer.cursors[0].next_offset == 3
        with contextlib.suppress(Invalid):
            consumer = await case.log.ensure_consumer(stream, "past", at_time(-time_us))
            assert consumer.cursors[0].next_offset == 0
