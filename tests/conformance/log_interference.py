"""Different calls at once on one stream: whatever their order turns out to be, what is left is a sound log."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any

from postbus.model import Conflict, NotFound, OffsetOutOfRange, Receipt
from tests.conformance.log_suite import EARLIEST, LATEST, Case, LogSuite, at_offset, batch, fact, offsets

ALLOWED = (NotFound, OffsetOutOfRange, Conflict)


async def together(calls: Sequence[Coroutine[Any, Any, object]]) -> list[object]:
    """Start the calls in one go, in this order, and return what each gave; only honest refusals may be raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, ALLOWED):
            raise result
    return list(results)


async def check_sound(case: Case, stream: str) -> tuple[object, ...]:
    """Check that all views of a stream agree, and return them."""
    stats = await case.log.get_stream_stats(stream)
    views: list[object] = [stats]
    for part in stats.partitions:
        events = await case.events(stream, part.partition)
        assert offsets(events) == list(range(part.first_offset, part.high_water_mark))
        views.append(events)
    for consumer in await case.log.consumers(stream):
        assert await case.log.get_consumer(stream, consumer.id) == consumer
        assert consumer.epoch == stats.stream.epoch
        for part, cursor in zip(stats.partitions, consumer.cursors, strict=True):
            assert part.first_offset <= cursor.next_offset <= part.high_water_mark
            result = await case.log.read(stream, consumer.id, 1000, part.partition)
            assert offsets(result.events) == list(range(cursor.next_offset, part.high_water_mark))
        views.append(consumer)
    return tuple(views)


async def check_sound_and_kept(case: Case, stream: str) -> None:
    """Check the stream as it is, as another look at the same data sees it, and that it goes on growing."""
    views = await check_sound(case, stream)
    if case.features.durable:
        await case.reopen()
        assert await check_sound(case, stream) == views
    await case.log.append(stream, batch(3))
    await check_sound(case, stream)


class InterferenceRules(LogSuite):
    async def test_a_stream_deleted_and_made_again_while_others_write(self, case: Case) -> None:
        log, stream = case.log, await case.make(partitions=2)
        await log.ensure_consumer(stream, "reader", EARLIEST)
        rng = random.Random(11)
        for turn in case.rounds(40):
            calls: list[Coroutine[Any, Any, object]] = [
                log.append(stream, [fact(turn, key="k", native_id="same"), fact(turn)]),
                log.append(stream, batch(2, key="k")),
                log.delete_stream(stream),
                log.ensure_stream(stream, (await log.ensure_stream(stream)).settings),
                log.append(stream, [fact(turn, key="k", native_id="other")]),
                log.commit(stream, "reader", 0, turn % 2),
                log.ensure_consumer(stream, f"reader-{turn % 3}", LATEST),
            ]
            rng.shuffle(calls)
            await together(calls)
            await log.ensure_stream(stream)
            await check_sound(case, stream)
        await check_sound_and_kept(case, stream)

    async def test_a_recreated_stream_forgets_identities_that_were_being_written(self, case: Case) -> None:
        log, stream = case.log, await case.make()
        for turn in case.rounds(30):
            calls = [log.append(stream, [fact(turn, native_id="n")]), log.delete_stream(stream)]
            await together(calls[:: 1 if turn % 2 else -1])
            await log.ensure_stream(stream)
            known = await case.events()
            assert [event.payload for event in known] in ([], [turn])
            receipt = await case.one(fact(turn, native_id="n"))
            assert (receipt.offset, receipt.duplicate) == (0, bool(known))

    async def test_trims_commits_and_resets_while_others_write(self, case: Case) -> None:
        case.needs("retention")
        log, stream = case.log, await case.filled(20, partitions=2)
        rng = random.Random(5)
        for consumer in ("a", "b"):
            await log.ensure_consumer(stream, consumer, EARLIEST)
        receipts: list[Receipt] = []
        for turn in case.rounds(60):
            calls: list[Coroutine[Any, Any, object]] = [
                log.append(stream, [fact(turn, key=f"k{turn % 5}") for _ in range(3)]),
                log.append(stream, [fact(turn, native_id=f"n{turn // 3}")]),
                log.trim(stream, turn, turn % 2),
                log.commit(stream, "a", turn, turn % 2),
                log.commit(stream, "b", turn + 1, turn % 2),
                log.reset(stream, "b", at_offset(turn // 2), turn % 2),
                log.trim(stream, turn // 3),
            ]
            rng.shuffle(calls)
            for result in await together(calls):
                if isinstance(result, list):
                    receipts += result
            await check_sound(case, stream)
        fresh = [receipt.id for receipt in receipts if not receipt.duplicate]
        assert len(fresh) == len(set(fresh))
        await check_sound_and_kept(case, stream)

    async def test_retention_that_beats_readers_while_they_commit(self, case: Case) -> None:
        case.needs("retention")
        log, stream = case.log, await case.filled(10, retention_beats_consumers=True)
        await log.ensure_consumer(stream, "reader", EARLIEST)
        for turn in case.rounds(40):
            await together(
                [
                    log.commit(stream, "reader", turn),
                    log.append(stream, batch(2)),
                    log.trim(stream, turn + 3),
                    log.commit(stream, "reader", turn + 1),
                    log.reset(stream, "reader", EARLIEST),
                ]
            )
            await check_sound(case, stream)
        await check_sound_and_kept(case, stream)

    async def test_a_consumer_deleted_and_made_again_while_others_commit(self, case: Case) -> None:
        log, stream = case.log, await case.filled(50)
        for turn in case.rounds(40):
            await together(
                [
                    log.ensure_consumer(stream, "reader", EARLIEST),
                    log.commit(stream, "reader", turn),
                    log.delete_consumer(stream, "reader"),
                    log.commit(stream, "reader", turn + 1),
                    log.ensure_consumer(stream, "reader", EARLIEST),
                ]
            )
            await check_sound(case, stream)
        await check_sound_and_kept(case, stream)
