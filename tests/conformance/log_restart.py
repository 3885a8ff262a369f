"""Close and open: everything acknowledged is still there, identities and epochs included."""

from __future__ import annotations

import asyncio

import pytest

from postbus.model import IdempotencyConflict, NotFound, PostbusError, Receipt, StreamSettings
from tests.conformance.log_append import ODD_FIELDS, ODD_PAYLOADS
from tests.conformance.log_suite import EARLIEST, Case, LogSuite, at_offset, batch, fact, offsets


class RestartRules(LogSuite):
    async def test_closing_twice_is_fine(self, case: Case) -> None:
        await case.filled(1)
        await case.log.close()
        await case.log.close()

    async def test_everything_is_there_after_a_restart(self, case: Case) -> None:
        stream = await case.make(partitions=2, labels={"a": "é"})
        drafts = [fact(number, **{"native_id": f"n{number}", **fields}) for number, fields in enumerate(ODD_FIELDS)]
        await case.log.append(stream, drafts + [fact(payload) for payload in ODD_PAYLOADS])
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        await case.log.commit(stream, "reader", 3, 1)
        before = await self.picture(case, stream)
        for _ in range(2):
            await case.reopen()
            assert await self.picture(case, stream) == before

    async def picture(self, case: Case, stream: str) -> tuple[object, ...]:
        return (
            await case.log.ensure_stream(stream),
            [await case.events(stream, partition) for partition in range(2)],
            await case.log.get_stream_stats(stream),
            await case.log.consumers(stream),
            await case.log.get_consumer_lag(stream, "reader"),
            await case.log.read(stream, "reader", partition=1),
        )

    async def test_offsets_go_on_after_a_restart(self, case: Case) -> None:
        stream = await case.filled(3)
        for turn in range(3):
            await case.reopen()
            assert offsets(await case.log.append(stream, batch(2))) == [3 + 2 * turn, 4 + 2 * turn]
        assert offsets(await case.events()) == list(range(9))

    async def test_identities_hold_across_a_restart(self, case: Case) -> None:
        stream = await case.make()
        drafts = [fact(number, native_id=f"n{number}", variant="v" * (number % 2)) for number in range(10)]
        await case.log.append(stream, drafts)
        await case.reopen()
        results = await asyncio.gather(*(case.log.append(stream, drafts) for _ in range(8)))
        for receipts in results:
            assert [(receipt.offset, receipt.duplicate) for receipt in receipts] == [(n, True) for n in range(10)]
        with pytest.raises(IdempotencyConflict) as caught:
            await case.one(fact("other", native_id="n4"))
        assert caught.value.offset == 4
        assert await case.high_water_mark() == 10

    async def test_a_key_keeps_its_partition_across_a_restart(self, case: Case) -> None:
        stream = await case.make(partitions=5)
        keyed = [fact(key=f"k{number}") for number in range(40)]
        before = [receipt.partition for receipt in await case.log.append(stream, keyed)]
        await case.reopen()
        assert [receipt.partition for receipt in await case.log.append(stream, keyed)] == before

    async def test_cursors_hold_across_a_restart(self, case: Case) -> None:
        stream = await case.filled(10)
        await case.log.ensure_consumer(stream, "pinned")
        await case.log.ensure_consumer(stream, "back", at_offset(9))
        await case.log.ensure_consumer(stream, "gone", EARLIEST)
        await case.log.reset(stream, "back", at_offset(2))
        await case.log.delete_consumer(stream, "gone")
        await case.log.append(stream, batch(2))
        await case.reopen()
        assert await case.pending("pinned") == [10, 11]
        assert await case.next_offsets("back") == [2]
        assert await case.log.get_consumer(stream, "gone") is None
        assert (await case.log.ensure_consumer(stream, "back", at_offset(9))).cursors[0].next_offset == 2

    async def test_a_trim_holds_across_a_restart(self, case: Case) -> None:
        case.needs("retention")
        stream = await case.filled(10, retention_beats_consumers=True)
        await case.one(fact("x", native_id="n"))
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        await case.log.trim(stream, 11)
        before = (await case.log.get_stream_stats(stream), await case.log.consumers(stream))
        await case.reopen()
        assert (await case.log.get_stream_stats(stream), await case.log.consumers(stream)) == before
        assert (await case.part()).high_water_mark == 11
        assert (await case.one(fact("x", native_id="n"))).duplicate
        assert offsets(await case.log.append(stream, batch(1))) == [11]
        assert await case.pending("reader") == [11]

    async def test_a_deleted_stream_stays_deleted_and_its_epoch_goes_on(self, case: Case) -> None:
        stream = await case.filled(3)
        await case.log.ensure_consumer(stream, "reader")
        epoch = (await case.log.ensure_stream(stream)).epoch
        await case.log.delete_stream(stream)
        await case.reopen()
        with pytest.raises(NotFound):
            await case.log.get_stream_stats(stream)
        assert stream not in [found.name for found in await case.log.streams()]
        assert (await case.log.ensure_stream(stream, StreamSettings(partitions=2))).epoch == epoch + 1
        await case.reopen()
        lag = await case.log.get_consumer_lag(stream, "reader")
        assert (lag.epoch, lag.total, len(lag.partitions)) == (epoch + 1, 0, 2)

    async def test_closing_finishes_what_was_queued(self, case: Case) -> None:
        case.needs("durable")
        stream = await case.make()
        tasks = [asyncio.create_task(case.log.append(stream, [fact(number)])) for number in range(50)]
        await asyncio.sleep(0)
        await case.log.close()
        results: list[list[Receipt] | BaseException] = await asyncio.gather(*tasks, return_exceptions=True)
        await case.reopen()
        events = await case.events()
        assert offsets(events) == list(range(len(events)))
        place = {event.payload: event.offset for event in events}
        for number, result in enumerate(results):
            if isinstance(result, BaseException):
                assert isinstance(result, PostbusError)
            else:
                assert place[number] == result[0].offset
