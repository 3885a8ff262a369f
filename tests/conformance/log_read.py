"""Fetch and wait: looking at a partition without a consumer, and being woken when it grows."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from postbus.model import Invalid, NotFound, OffsetOutOfRange
from tests.conformance.log_suite import EARLIEST, Case, LogSuite, batch, fact, offsets


class ReadRules(LogSuite):
    async def test_fetch_gives_a_range(self, case: Case) -> None:
        stream = await case.filled(10)
        assert offsets(await case.log.fetch(stream, 0, 0)) == list(range(10))
        assert offsets(await case.log.fetch(stream, 0, 0, 3)) == [0, 1, 2]
        assert offsets(await case.log.fetch(stream, 0, 4, 3)) == [4, 5, 6]
        assert offsets(await case.log.fetch(stream, 0, 8, 3)) == [8, 9]
        assert offsets(await case.log.fetch(stream, 0, 9, 1)) == [9]
        assert await case.log.fetch(stream, 0, 10) == []
        for beyond in (10**12, 2**63, 2**70):
            assert await case.log.fetch(stream, 0, beyond) == []
        assert offsets(await case.log.fetch(stream, 0, 5, 2**70)) == [5, 6, 7, 8, 9]

    async def test_fetch_gives_a_hundred_unless_told(self, case: Case) -> None:
        stream = await case.filled(150)
        assert offsets(await case.log.fetch(stream, 0, 20)) == list(range(20, 120))

    async def test_fetch_below_the_first_retained_starts_there(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.filled(10)
        await case.log.trim(stream, 6)
        assert offsets(await case.log.fetch(stream, 0, 0, 3)) == [6, 7, 8]
        assert offsets(await case.log.fetch(stream, 0, 5, 1)) == [6]
        assert offsets(await case.log.fetch(stream, 0, 7)) == [7, 8, 9]
        await case.log.trim(stream, 10)
        assert await case.log.fetch(stream, 0, 0) == []

    async def test_fetch_changes_nothing(self, case: Case) -> None:
        stream = await case.filled(5)
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        before = (await case.log.get_stream_stats(stream), await case.log.consumers(stream))
        first = await case.log.fetch(stream, 0, 1, 3)
        assert await case.log.fetch(stream, 0, 1, 3) == first
        assert (await case.log.get_stream_stats(stream), await case.log.consumers(stream)) == before

    async def test_a_caller_that_changes_its_list_changes_nobody_elses(self, case: Case) -> None:
        stream = await case.filled(3)
        (await case.log.fetch(stream, 0, 0)).clear()
        assert len(await case.log.fetch(stream, 0, 0)) == 3

    async def test_fetch_refuses_what_makes_no_sense(self, case: Case) -> None:
        stream = await case.filled(3)
        with pytest.raises(OffsetOutOfRange):
            await case.log.fetch(stream, 0, -1)
        for limit in (0, -1):
            with pytest.raises(Invalid):
                await case.log.fetch(stream, 0, 0, limit)

    @pytest.mark.parametrize("partition", [2, -1, 10**6])
    async def test_an_unknown_partition_is_not_found(self, case: Case, partition: int) -> None:
        log, stream = case.log, await case.make(partitions=2)
        await log.ensure_consumer(stream, "reader")
        before = await log.get_consumer(stream, "reader")
        for call in (
            lambda: log.fetch(stream, partition, 0),
            lambda: log.wait(stream, partition, 0, 0.01),
            lambda: log.read(stream, "reader", partition=partition),
            lambda: log.commit(stream, "reader", 0, partition),
            lambda: log.reset(stream, "reader", EARLIEST, partition),
            lambda: log.trim(stream, 0, partition),
            lambda: log.trim(stream, None, partition),
        ):
            with pytest.raises(NotFound):
                await call()
        assert await log.get_consumer(stream, "reader") == before

    async def test_wait_returns_at_once_when_there_is_something(self, case: Case) -> None:
        stream = await case.filled(3)
        began = time.monotonic()
        assert await case.log.wait(stream, 0, 0, 30.0)
        assert await case.log.wait(stream, 0, 2, 30.0)
        assert await case.log.wait(stream, 0, 2, 0.0)
        assert time.monotonic() - began < 5.0

    async def test_wait_gives_up_when_the_time_is_over(self, case: Case) -> None:
        stream = await case.filled(3)
        began = time.monotonic()
        assert not await case.log.wait(stream, 0, 3, 0.2)
        assert 0.19 < time.monotonic() - began < 5.0
        assert not await case.log.wait(stream, 0, 3, 0.0)
        assert not await case.log.wait(stream, 0, 2**70, 0.0)

    async def test_wait_wakes_when_an_event_is_appended(self, case: Case) -> None:
        stream = await case.filled(3)
        for offset in range(3, 8):
            waiting = [asyncio.create_task(case.log.wait(stream, 0, offset, 30.0)) for _ in range(20)]
            await asyncio.sleep(0.02)
            assert not any(task.done() for task in waiting)
            began = time.monotonic()
            await case.one(fact(offset))
            assert all(await asyncio.gather(*waiting))
            assert time.monotonic() - began < 5.0
            assert offsets(await case.log.fetch(stream, 0, offset)) == [offset]

    async def test_wait_sleeps_on_until_its_offset_is_there(self, case: Case) -> None:
        stream = await case.filled(1)
        waiting = asyncio.create_task(case.log.wait(stream, 0, 4, 30.0))
        for _ in range(3):
            await case.one(fact())
            await asyncio.sleep(0.01)
            assert not waiting.done()
        await case.one(fact())
        assert await asyncio.wait_for(waiting, 60.0)

    async def test_wait_is_not_woken_by_others(self, case: Case) -> None:
        stream = await case.make(partitions=2)
        other = await case.make("other")
        key = await self.key_of_partition(case, stream, 1)
        waiting = asyncio.create_task(case.log.wait(stream, 0, (await case.part(stream)).high_water_mark, 0.3))
        await asyncio.sleep(0.02)
        await case.log.append(stream, batch(3, key=key))
        await case.log.append(other, batch(3))
        assert not await waiting

    async def key_of_partition(self, case: Case, stream: str, partition: int) -> str:
        """Find a key that the log puts into the partition."""
        for number in range(1000):
            receipt = await case.one(fact(key=f"probe{number}"), stream)
            if receipt.partition == partition:
                return f"probe{number}"
        raise AssertionError("no key reaches that partition")

    async def test_a_duplicate_wakes_nobody(self, case: Case) -> None:
        stream = await case.make()
        await case.one(fact(native_id="n"))
        waiting = asyncio.create_task(case.log.wait(stream, 0, 1, 0.2))
        await asyncio.sleep(0.02)
        assert (await case.one(fact(native_id="n"))).duplicate
        assert not await waiting

    async def test_a_cancelled_wait_disturbs_nobody(self, case: Case) -> None:
        stream = await case.make()
        waiting = [asyncio.create_task(case.log.wait(stream, 0, 0, 30.0)) for _ in range(10)]
        await asyncio.sleep(0.02)
        for task in waiting[::2]:
            task.cancel()
        await asyncio.gather(*waiting[::2], return_exceptions=True)
        await case.one(fact())
        assert await asyncio.wait_for(asyncio.gather(*waiting[1::2]), 60.0) == [True] * 5

    async def test_a_wait_on_a_recreated_stream_sees_the_new_one_or_is_told(self, case: Case) -> None:
        stream = await case.filled(3)
        waiting = asyncio.create_task(case.log.wait(stream, 0, 3, 2.0))
        await asyncio.sleep(0.02)
        await case.log.delete_stream(stream)
        await case.log.ensure_stream(stream)
        await case.log.append(stream, batch(5))
        with contextlib.suppress(NotFound):
            assert await waiting
