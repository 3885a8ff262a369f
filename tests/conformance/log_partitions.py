"""Partitions: a key has one place, keyless events spread, and every partition is a dense log of its own."""

from __future__ import annotations

import asyncio

from tests.conformance.log_suite import EARLIEST, LATEST, Case, LogSuite, at_offset, at_time, batch, fact, offsets

KEYS = [f"key-{number}" for number in range(40)]


class PartitionRules(LogSuite):
    async def test_a_key_has_one_partition_and_its_events_stay_in_order(self, case: Case) -> None:
        stream = await case.make(partitions=4)
        placed: dict[str, set[int]] = {key: set() for key in KEYS}
        for turn in range(5):
            receipts = await case.log.append(stream, [fact([key, turn], key=key) for key in KEYS])
            for key, receipt in zip(KEYS, receipts, strict=True):
                placed[key].add(receipt.partition)
        assert {len(partitions) for partitions in placed.values()} == {1}
        assert set.union(*placed.values()) == {0, 1, 2, 3}
        for partition in range(4):
            events = await case.events(stream, partition)
            assert offsets(events) == list(range(len(events)))
            for key in KEYS:
                turns = [event.payload[1] for event in events if event.key == key]
                assert turns == (list(range(5)) if placed[key] == {partition} else [])

    async def test_a_key_has_the_same_partition_alone_and_in_a_batch(self, case: Case) -> None:
        stream = await case.make(partitions=7)
        together = await case.log.append(stream, [fact(key=key) for key in KEYS])
        for key, receipt in zip(KEYS, together, strict=True):
            assert (await case.one(fact(key=key))).partition == receipt.partition

    async def test_keyless_events_reach_every_partition(self, case: Case) -> None:
        stream = await case.make(partitions=4)
        for number in range(64):
            await case.log.append(stream, batch(1 + number % 3))
        stats = await case.log.get_stream_stats(stream)
        assert all(part.count > 0 for part in stats.partitions)
        assert stats.count == sum(1 + number % 3 for number in range(64))

    async def test_every_partition_is_dense(self, case: Case) -> None:
        stream = await case.make(partitions=3)
        drafts = [fact(number, key=None if number % 2 else KEYS[number % 9]) for number in range(90)]
        receipts = []
        for start in range(0, 90, 9):
            receipts += await case.log.append(stream, drafts[start : start + 9])
        seen = []
        for partition in range(3):
            mine = [receipt.offset for receipt in receipts if receipt.partition == partition]
            events = await case.events(stream, partition)
            assert mine == offsets(events) == list(range(len(events)))
            assert {event.partition for event in events} <= {partition}
            seen += [event.payload for event in events]
        assert sorted(seen) == list(range(90))

    async def test_a_batch_keeps_its_order_inside_each_partition(self, case: Case) -> None:
        stream = await case.make(partitions=3)
        await case.log.append(stream, [fact(number, key=KEYS[number % 10]) for number in range(300)])
        for partition in range(3):
            numbers = [event.payload for event in await case.events(stream, partition)]
            assert numbers == sorted(numbers)

    async def test_a_keyless_duplicate_is_found_in_whatever_partition_it_went_to(self, case: Case) -> None:
        stream = await case.make(partitions=4)
        first = [await case.one(fact(number, native_id=f"n{number}")) for number in range(12)]
        for number, receipt in enumerate(first):
            again = await case.one(fact(number, native_id=f"n{number}"))
            assert again.duplicate
            assert again.id == receipt.id
        assert (await case.log.get_stream_stats(stream)).count == 12

    async def test_cursors_are_per_partition(self, case: Case) -> None:
        stream = await case.make(partitions=3)
        await case.log.append(stream, [fact(number, key=key) for number, key in enumerate(KEYS)])
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        marks = [part.high_water_mark for part in (await case.log.get_stream_stats(stream)).partitions]
        result = await case.log.commit(stream, "reader", 1, partition=1)
        assert (result.moved, result.committed, result.next_offset) == (True, 1, 2)
        assert await case.next_offsets("reader") == [0, 2, 0]
        lag = await case.log.get_consumer_lag(stream, "reader")
        assert [part.lag for part in lag.partitions] == [marks[0], marks[1] - 2, marks[2]]
        assert [part.committed for part in lag.partitions] == [-1, 1, -1]
        assert [part.high_water_mark for part in lag.partitions] == marks
        assert lag.total == len(KEYS) - 2
        read = await case.log.read(stream, "reader", 2, partition=1)
        assert offsets(read.events) == [2, 3]
        assert read.high_water_mark == marks[1]

    async def test_start_policies_hold_in_every_partition(self, case: Case) -> None:
        stream = await case.make(partitions=3)
        drafts = [fact(number, key=key, occurred_at_us=number) for number, key in enumerate(KEYS)]
        await case.log.append(stream, drafts)
        marks = [part.high_water_mark for part in (await case.log.get_stream_stats(stream)).partitions]
        assert min(marks) > 1
        await case.log.ensure_consumer(stream, "latest", LATEST)
        assert await case.next_offsets("latest") == marks
        await case.log.ensure_consumer(stream, "earliest", EARLIEST)
        assert await case.next_offsets("earliest") == [0, 0, 0]
        await case.log.ensure_consumer(stream, "offset", at_offset(1))
        assert await case.next_offsets("offset") == [1, 1, 1]
        await case.log.ensure_consumer(stream, "time", at_time(20))
        for partition, place in enumerate(await case.next_offsets("time")):
            times = [event.occurred_at_us for event in await case.events(stream, partition)]
            assert place == sum(time_us < 20 for time_us in times)

    async def test_one_partition_is_reset_by_itself(self, case: Case) -> None:
        stream = await case.make(partitions=3)
        await case.log.append(stream, [fact(number, key=key) for number, key in enumerate(KEYS)])
        marks = [part.high_water_mark for part in (await case.log.get_stream_stats(stream)).partitions]
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        consumer = await case.log.reset(stream, "reader", LATEST, partition=2)
        assert [cursor.next_offset for cursor in consumer.cursors] == [0, 0, marks[2]]
        await case.log.reset(stream, "reader", at_offset(1), partition=0)
        assert await case.next_offsets("reader") == [1, 0, marks[2]]
        await case.log.reset(stream, "reader", at_time(case.clock.now_us() + 1), partition=1)
        assert await case.next_offsets("reader") == [1, marks[1], marks[2]]
        await case.log.reset(stream, "reader", EARLIEST)
        assert await case.next_offsets("reader") == [0, 0, 0]

    async def test_one_partition_is_trimmed_by_itself(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.make(partitions=3)
        await case.log.append(stream, [fact(number, key=key) for number, key in enumerate(KEYS)])
        result = await case.log.trim(stream, 2, partition=1)
        assert (result.removed, result.first_offsets) == (2, (0, 2, 0))
        result = await case.log.trim(stream, 1)
        assert (result.removed, result.first_offsets) == (2, (1, 2, 1))
        assert [(await case.events(stream, number))[0].offset for number in range(3)] == [1, 2, 1]

    async def test_waiting_on_a_partition_wakes_for_its_events(self, case: Case) -> None:
        stream = await case.make(partitions=4)
        first = await case.one(fact(key="k"))
        waiting = asyncio.create_task(case.log.wait(stream, first.partition, first.offset + 1, 30.0))
        await asyncio.sleep(0.02)
        await case.one(fact(key="k"))
        assert await asyncio.wait_for(waiting, 60.0)
