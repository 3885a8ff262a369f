"""Many callers at once: tasks, threads, logs and processes on the same data see one log."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from postbus.model import Conflict, IdempotencyConflict, Receipt, StreamSettings
from tests.conformance.log_suite import EARLIEST, LATEST, Case, LogSuite, at_offset, batch, fact, offsets

PUBLISHER = Path(__file__).with_name("log_publisher.py")
WORKERS = 8
T = TypeVar("T")


async def outcomes(calls: Iterable[Awaitable[T]]) -> tuple[list[T], list[BaseException]]:
    """Run the calls together and return what succeeded and what failed."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    return (
        [result for result in results if not isinstance(result, BaseException)],
        [result for result in results if isinstance(result, BaseException)],
    )


async def in_threads(work: Callable[[int], Coroutine[Any, Any, T]]) -> list[T | BaseException]:
    """Run the work in threads that each have an event loop of their own, started together."""
    barrier = threading.Barrier(WORKERS)

    def run(number: int) -> T:
        barrier.wait(60)
        return asyncio.run(work(number))

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(WORKERS) as pool:
        runs = [loop.run_in_executor(pool, run, number) for number in range(WORKERS)]
        return await asyncio.gather(*runs, return_exceptions=True)


class ConcurrencyRules(LogSuite):
    async def test_a_hundred_callers_make_one_stream(self, case: Case) -> None:
        settings = StreamSettings(partitions=2, labels={"a": "b"})
        streams, errors = await outcomes(case.log.ensure_stream(case.stream, settings) for _ in range(100))
        assert errors == []
        assert streams == [streams[0]] * 100
        listed = [stream for stream in await case.log.streams() if stream.name == case.stream]
        assert listed == streams[:1]

    async def test_a_hundred_callers_with_different_settings_make_one_stream(self, case: Case) -> None:
        wanted = [StreamSettings(partitions=1 + number % 4) for number in range(100)]
        streams, errors = await outcomes(case.log.ensure_stream(case.stream, settings) for settings in wanted)
        assert (len(streams), len(errors)) == (25, 75)
        assert streams == [streams[0]] * 25
        assert {type(error) for error in errors} == {Conflict}

    async def test_a_hundred_callers_make_one_consumer(self, case: Case) -> None:
        stream = await case.filled(5)
        appends = asyncio.gather(*(case.log.append(stream, batch(1)) for _ in range(50)))
        consumers, errors = await outcomes(case.log.ensure_consumer(stream, "reader", LATEST) for _ in range(100))
        await appends
        assert errors == []
        assert consumers == [consumers[0]] * 100
        assert await case.log.consumers(stream) == consumers[:1]

    async def test_a_hundred_callers_with_different_starts_make_one_consumer(self, case: Case) -> None:
        stream = await case.filled(5)
        starts = [LATEST, EARLIEST, at_offset(1), at_offset(2)] * 25
        consumers, errors = await outcomes(case.log.ensure_consumer(stream, "reader", start) for start in starts)
        assert (len(consumers), len(errors)) == (25, 75)
        assert consumers == [consumers[0]] * 25
        assert {type(error) for error in errors} == {Conflict}

    async def test_concurrent_appends_are_dense_and_keep_each_callers_order(self, case: Case) -> None:
        streams = [await case.make(leaf) for leaf in ("a", "b")]

        async def publish(worker: int) -> list[Receipt]:
            receipts = []
            for number in range(25):
                receipts += await case.log.append(
                    streams[(worker + number) % 2], [fact([worker, number, part]) for part in range(1 + number % 3)]
                )
            return receipts

        receipts = [receipt for mine in await asyncio.gather(*map(publish, range(WORKERS))) for receipt in mine]
        for stream in streams:
            events = await case.events(stream)
            assert offsets(events) == list(range(len(events)))
            assert sorted(receipt.offset for receipt in receipts if receipt.stream == stream) == offsets(events)
            for worker in range(WORKERS):
                mine = [event.payload for event in events if event.payload[0] == worker]
                assert mine == sorted(mine)

    async def test_batches_are_not_torn_apart(self, case: Case) -> None:
        stream = await case.make()
        await asyncio.gather(*(case.log.append(stream, [fact([n, p]) for p in range(7)]) for n in range(30)))
        events = await case.events()
        for start in range(0, 210, 7):
            part = [event.payload for event in events[start : start + 7]]
            assert part == [[part[0][0], position] for position in range(7)]

    async def test_the_same_facts_from_eight_tasks_are_written_once(self, case: Case) -> None:
        await case.make(partitions=2)
        results = await asyncio.gather(*(self.publish_all(case) for _ in range(WORKERS)))
        await self.check_written_once(case, results)

    async def test_the_same_facts_from_eight_threads_are_written_once(self, case: Case) -> None:
        case.needs("threads")
        await case.make(partitions=2)
        results = await in_threads(lambda _: self.publish_all(case))
        await self.check_written_once(case, [result for result in results if isinstance(result, list)])

    async def publish_all(self, case: Case) -> list[Receipt]:
        receipts = []
        for number in range(25):
            pair = [fact(number, native_id=f"n{number}"), fact(number, native_id=f"n{number}", variant="v")]
            receipts += await case.log.append(case.stream, pair)
        return receipts

    async def check_written_once(self, case: Case, results: list[list[Receipt]]) -> None:
        assert [len(mine) for mine in results] == [50] * WORKERS
        for same in zip(*results, strict=True):
            assert Counter(receipt.duplicate for receipt in same) == {False: 1, True: WORKERS - 1}
            assert len({receipt.id for receipt in same}) == 1
        stats = await case.log.get_stream_stats(case.stream)
        assert stats.count == 50
        for part in stats.partitions:
            assert offsets(await case.events(partition=part.partition)) == list(range(part.high_water_mark))

    async def test_of_eight_conflicting_tasks_one_wins(self, case: Case) -> None:
        stream = await case.make()
        for number in range(10):
            calls = [case.log.append(stream, [fact([number, n], native_id=f"n{number}")]) for n in range(WORKERS)]
            won, lost = await outcomes(calls)
            self.check_one_winner(won, lost, number)
        assert offsets(await case.events()) == list(range(10))

    async def test_of_eight_conflicting_threads_one_wins(self, case: Case) -> None:
        case.needs("threads")
        stream = await case.make()
        for number in range(5):
            results = await in_threads(
                lambda worker, number=number: case.log.append(  # type: ignore[misc]
                    stream, [fact([number, worker], native_id=f"n{number}")]
                )
            )
            won = [result for result in results if isinstance(result, list)]
            self.check_one_winner(won, [result for result in results if isinstance(result, BaseException)], number)
        assert offsets(await case.events()) == list(range(5))

    def check_one_winner(self, won: list[list[Receipt]], lost: list[BaseException], offset: int) -> None:
        assert (len(won), len(lost)) == (1, WORKERS - 1)
        assert {type(error) for error in lost} == {IdempotencyConflict}
        assert {error.offset for error in lost if isinstance(error, IdempotencyConflict)} == {offset}
        assert [(receipt.offset, receipt.duplicate) for receipt in won[0]] == [(offset, False)]

    async def test_a_conflict_fails_its_own_caller_only(self, case: Case) -> None:
        stream = await case.make()
        await case.one(fact("first", native_id="n"))
        calls = [
            case.log.append(stream, [fact(number)] if number % 3 else [fact(number), fact("other", native_id="n")])
            for number in range(60)
        ]
        good, bad = await outcomes(calls)
        assert (len(good), len(bad)) == (40, 20)
        assert {type(error) for error in bad} == {IdempotencyConflict}
        events = await case.events()
        assert offsets(events) == list(range(len(events)))
        if case.features.atomic_batches:
            assert sorted(event.payload for event in events[1:]) == [n for n in range(60) if n % 3]

    async def test_threads_share_one_log(self, case: Case) -> None:
        case.needs("threads")
        stream = await case.make()

        async def work(worker: int) -> int:
            await case.log.ensure_consumer(stream, f"reader-{worker}", EARLIEST)
            for number in range(20):
                await case.log.append(stream, [fact([worker, number])])
            assert await case.log.wait(stream, 0, 20 * WORKERS - 1, 30.0)
            result = await case.log.read(stream, f"reader-{worker}", 1000)
            await case.log.commit(stream, f"reader-{worker}", result.events[-1].offset)
            return await case.lag(f"reader-{worker}")

        assert await in_threads(work) == [0] * WORKERS
        events = await case.events()
        assert offsets(events) == list(range(20 * WORKERS))
        for worker in range(WORKERS):
            assert [event.payload[1] for event in events if event.payload[0] == worker] == list(range(20))

    async def test_concurrent_commits_end_at_the_highest(self, case: Case) -> None:
        stream = await case.filled(100)
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        results = await asyncio.gather(
            *(case.log.commit(stream, "reader", (number * 37) % 100) for number in range(100))
        )
        assert await case.next_offsets("reader") == [100]
        assert any(result.moved for result in results)
        assert all(result.next_offset > (number * 37) % 100 for number, result in enumerate(results))

    async def test_readers_see_a_growing_prefix(self, case: Case) -> None:
        stream = await case.make()
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        appends = asyncio.gather(*(case.log.append(stream, batch(3, first=3 * n)) for n in range(60)))
        seen: list[int] = []
        while len(seen) < 180:
            assert await case.log.wait(stream, 0, len(seen), 30.0)
            result = await case.log.read(stream, "reader", 50)
            seen += offsets(result.events)
            assert result.high_water_mark >= len(seen)
            await case.log.commit(stream, "reader", seen[-1])
        await appends
        assert seen == list(range(180))

    async def test_two_logs_on_the_same_data_are_one(self, case: Case) -> None:
        case.needs("multi_process")
        other = await case.another()
        stream = await case.make()
        assert (await other.ensure_stream(stream)) == (await case.log.ensure_stream(stream))
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        for number in range(10):
            log = other if number % 2 else case.log
            (receipt,) = await log.append(stream, [fact(number, native_id=f"n{number}")])
            assert (receipt.offset, receipt.duplicate) == (number, False)
            (again,) = await (case.log if number % 2 else other).append(stream, [fact(number, native_id=f"n{number}")])
            assert (again.offset, again.duplicate) == (number, True)
        assert await other.fetch(stream, 0, 0) == await case.events()
        await other.commit(stream, "reader", 6)
        assert await case.next_offsets("reader") == [7]
        assert await case.lag("reader") == 3
        waiting = asyncio.create_task(case.log.wait(stream, 0, 10, 30.0))
        await asyncio.sleep(0.05)
        await other.append(stream, batch(1))
        assert await asyncio.wait_for(waiting, 60.0)
        assert await case.pending("reader") == [7, 8, 9, 10]

    async def test_two_logs_agree_after_trims_and_deletes(self, case: Case) -> None:
        case.needs("multi_process")
        case.needs("retention")
        other = await case.another()
        stream = await case.filled(10)
        assert len(await other.fetch(stream, 0, 0)) == 10
        await case.log.trim(stream, 4)
        assert offsets(await other.fetch(stream, 0, 0, 2)) == [4, 5]
        await other.ensure_consumer(stream, "reader", EARLIEST)
        await case.log.delete_stream(stream)
        epoch = (await case.log.ensure_stream(stream)).epoch
        await case.log.append(stream, batch(3, first=100))
        assert [event.payload for event in await other.fetch(stream, 0, 0)] == [100, 101, 102]
        assert (await other.get_consumer_lag(stream, "reader")).epoch == epoch
        assert offsets((await other.read(stream, "reader")).events) == [0, 1, 2]
        assert offsets(await other.append(stream, batch(1))) == [3]

    async def test_processes_share_one_log(self, case: Case) -> None:
        case.needs("multi_process")
        assert case.url is not None
        stream = await case.make()
        waiting = asyncio.create_task(case.log.wait(stream, 0, 89, 60.0))
        runs = [
            await asyncio.create_subprocess_exec(
                sys.executable, str(PUBLISHER), case.url, stream, str(first), "50", stdout=asyncio.subprocess.PIPE
            )
            for first in (0, 20, 40)
        ]
        mine = [await case.one(fact(number, native_id=str(number))) for number in range(30, 60)]
        printed = [(await run.communicate())[0] for run in runs]
        assert [run.returncode for run in runs] == [0, 0, 0]
        receipts = [tuple(row) for text in printed for row in json.loads(text)]
        receipts += [(n, r.partition, r.offset, r.duplicate) for n, r in enumerate(mine, start=30)]
        assert await waiting
        events = await case.events()
        assert offsets(events) == list(range(90))
        place = {event.payload: event.offset for event in events}
        assert {(number, offset) for number, _, offset, _ in receipts} == set(place.items())
        assert Counter(number for number, _, _, duplicate in receipts if not duplicate) == dict.fromkeys(range(90), 1)

    @pytest.mark.parametrize("count", [200])
    async def test_many_streams_at_once(self, case: Case, count: int) -> None:
        names = [case.name(f"s{number}") for number in range(count)]
        await asyncio.gather(*map(case.log.ensure_stream, names))
        for turn in range(3):
            receipts = await asyncio.gather(*(case.log.append(name, [fact([name, turn])]) for name in names))
            assert {receipt.offset for (receipt,) in receipts} == {turn}
        for name in names[::20]:
            assert [event.payload for event in await case.events(name)] == [[name, turn] for turn in range(3)]
