"""Streams: names, settings, get-or-create, listing, extent, deleting and making again."""

from __future__ import annotations

import pytest

from postbus.model import Conflict, Invalid, NotFound, Retention, StreamSettings
from tests.conformance.log_suite import EARLIEST, Case, LogSuite, at_offset, batch, fact, offsets

BAD_NAMES = [
    "", "orders", "default.orders", "a.b.c.d", "a..c", ".b.c", "a.b.", "a.b.c d", "a.b.c/d", "a.b.*", "a.>.c", "a.b.é",
    "a.b.c\n", "a.b.c\x00", f"a.b.{'x' * 81}", f"{'x' * 81}.b.c",
]  # fmt: skip

BAD_SETTINGS = [
    StreamSettings(partitions=0),
    StreamSettings(partitions=-1),
    StreamSettings(retention=Retention(count=-1)),
    StreamSettings(retention=Retention(bytes=-1)),
    StreamSettings(retention=Retention(age_s=-1.0)),
    StreamSettings(retention=Retention(age_s=float("nan"))),
    StreamSettings(retention=Retention(age_s=float("inf"))),
    StreamSettings(identity_window_s=float("inf")),
    StreamSettings(identity_window_s=-1.0),
    StreamSettings(labels={f"label-{number}": "x" for number in range(33)}),
    StreamSettings(labels={"k" * 257: "x"}),
    StreamSettings(labels={"k": "x" * 4097}),
]

OTHER_SETTINGS = [
    StreamSettings(partitions=2),
    StreamSettings(partitions=3, retention=Retention(count=10)),
    StreamSettings(partitions=3, retention=Retention(bytes=10)),
    StreamSettings(partitions=3, retention=Retention(age_s=10.0)),
    StreamSettings(partitions=3, retention_beats_consumers=True),
    StreamSettings(partitions=3, identity_window_s=60.0),
    StreamSettings(partitions=3, labels={"team": "b"}),
]


class StreamRules(LogSuite):
    async def test_a_stream_is_made_with_what_it_was_asked_for(self, case: Case) -> None:
        settings = StreamSettings(
            partitions=3,
            retention=Retention(age_s=3600.5, bytes=1 << 40, count=10**9),
            retention_beats_consumers=True,
            identity_window_s=86400.0,
            labels={"team": "ops", "é": "ß"},
        )
        stream = await case.log.ensure_stream(case.stream, settings)
        assert (stream.name, stream.settings) == (case.stream, settings)
        if case.features.clock:
            assert stream.created_at_us == case.clock.now_us()
        assert await case.log.ensure_stream(case.stream, settings) == stream

    async def test_no_settings_means_the_defaults_or_whatever_is_there(self, case: Case) -> None:
        plain = await case.log.ensure_stream(case.name("plain"))
        assert plain.settings == StreamSettings()
        assert await case.log.ensure_stream(case.name("plain"), StreamSettings()) == plain
        wide = await case.log.ensure_stream(case.name("wide"), StreamSettings(partitions=4))
        assert await case.log.ensure_stream(case.name("wide")) == wide

    @pytest.mark.parametrize("other", OTHER_SETTINGS, ids=repr)
    async def test_the_same_name_with_other_settings_is_a_conflict(self, case: Case, other: StreamSettings) -> None:
        stream = await case.log.ensure_stream(case.stream, StreamSettings(partitions=3, labels={}))
        with pytest.raises(Conflict):
            await case.log.ensure_stream(case.stream, other)
        assert await case.log.ensure_stream(case.stream) == stream

    @pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
    async def test_a_bad_name_is_refused(self, case: Case, name: str) -> None:
        with pytest.raises(Invalid):
            await case.log.ensure_stream(name)
        assert name not in [stream.name for stream in await case.log.streams()]

    async def test_names_may_be_as_long_as_the_limit_and_differ_by_case(self, case: Case) -> None:
        names = [case.name("x" * 80), case.name("Orders_-9"), case.name("orders_-9")]
        for name in names:
            await case.log.ensure_stream(name)
            await case.log.append(name, batch(1))
        assert [await case.high_water_mark(name) for name in names] == [1, 1, 1]

    @pytest.mark.parametrize("settings", BAD_SETTINGS, ids=lambda settings: repr(settings)[:60])
    async def test_bad_settings_are_refused(self, case: Case, settings: StreamSettings) -> None:
        with pytest.raises(Invalid):
            await case.log.ensure_stream(case.stream, settings)
        with pytest.raises(NotFound):
            await case.log.get_stream_stats(case.stream)

    async def test_streams_are_listed_by_name(self, case: Case) -> None:
        names = [case.name(leaf, tenant) for tenant in ("b", "a") for leaf in ("z", "a-", "a", "B")]
        made = [await case.log.ensure_stream(name) for name in names]
        listed = [stream for stream in await case.log.streams() if stream.name.startswith(f"{case.namespace}.")]
        assert listed == sorted(made, key=lambda stream: stream.name)

    async def test_an_empty_stream_has_an_extent_of_nothing(self, case: Case) -> None:
        stream = await case.make(partitions=2)
        stats = await case.log.get_stream_stats(stream)
        assert stats.stream == await case.log.ensure_stream(stream)
        assert [part.partition for part in stats.partitions] == [0, 1]
        assert (stats.count, stats.bytes) == (0, 0)
        assert [(part.first_offset, part.high_water_mark) for part in stats.partitions] == [(0, 0), (0, 0)]
        assert await case.log.fetch(stream, 1, 0) == []

    async def test_stats_follow_appends_and_not_duplicates(self, case: Case) -> None:
        await case.make()
        sizes = [0]
        for number in range(5):
            await case.one(fact("x" * 100, native_id=f"n{number}"))
            part = await case.part()
            assert (part.first_offset, part.high_water_mark, part.count) == (0, number + 1, number + 1)
            assert part.bytes >= sizes[-1] + 100
            sizes.append(part.bytes)
        before = await case.log.get_stream_stats(case.stream)
        await case.one(fact("x" * 100, native_id="n3"))
        assert await case.log.get_stream_stats(case.stream) == before

    async def test_an_unknown_stream_is_not_found(self, case: Case) -> None:
        log, name = case.log, case.name("nowhere")
        await case.make("elsewhere")
        for call in (
            lambda: log.delete_stream(name),
            lambda: log.append(name, batch(1)),
            lambda: log.append(name, []),
            lambda: log.fetch(name, 0, 0),
            lambda: log.wait(name, 0, 0, 0.01),
            lambda: log.ensure_consumer(name, "reader"),
            lambda: log.read(name, "reader"),
            lambda: log.commit(name, "reader", 0),
            lambda: log.reset(name, "reader", EARLIEST),
            lambda: log.get_stream_stats(name),
            lambda: log.get_consumer_lag(name, "reader"),
            lambda: log.trim(name),
            lambda: log.trim(name, 0),
            lambda: log.delete_consumer(name, "reader"),
        ):
            with pytest.raises(NotFound):
                await call()
        assert await log.get_consumer(name, "reader") is None
        assert name not in [stream.name for stream in await log.streams()]

    async def test_a_deleted_stream_is_not_found(self, case: Case) -> None:
        stream = await case.filled(3)
        other = await case.filled(2, "other")
        await case.log.delete_stream(stream)
        with pytest.raises(NotFound):
            await case.log.fetch(stream, 0, 0)
        with pytest.raises(NotFound):
            await case.log.append(stream, batch(1))
        with pytest.raises(NotFound):
            await case.log.get_stream_stats(stream)
        with pytest.raises(NotFound):
            await case.log.ensure_consumer(stream, "reader")
        with pytest.raises(NotFound):
            await case.log.delete_stream(stream)
        assert stream not in [found.name for found in await case.log.streams()]
        assert await case.high_water_mark(other) == 2

    async def test_a_recreated_stream_has_the_next_epoch_and_starts_from_nothing(self, case: Case) -> None:
        stream = await case.make()
        await case.log.append(stream, [fact(1, native_id="a"), fact(2)])
        epoch = (await case.log.ensure_stream(stream)).epoch
        for round_number in (1, 2):
            await case.log.delete_stream(stream)
            assert (await case.log.ensure_stream(stream)).epoch == epoch + round_number
            assert await case.events() == []
            assert (await case.log.get_stream_stats(stream)).bytes == 0
        receipts = await case.log.append(stream, [fact("other", native_id="a"), fact(3)])
        assert [(receipt.offset, receipt.duplicate) for receipt in receipts] == [(0, False), (1, False)]
        assert [event.payload for event in await case.events()] == ["other", 3]

    async def test_a_recreated_stream_may_have_other_settings(self, case: Case) -> None:
        stream = await case.filled(3)
        await case.log.ensure_consumer(stream, "reader", EARLIEST)
        await case.log.delete_stream(stream)
        await case.log.ensure_stream(stream, StreamSettings(partitions=3))
        lag = await case.log.get_consumer_lag(stream, "reader")
        assert [(part.partition, part.lag) for part in lag.partitions] == [(0, 0), (1, 0), (2, 0)]
        await case.log.append(stream, [fact(number, key=f"k{number}") for number in range(30)])
        assert await case.lag("reader") == 30
        for partition in range(3):
            result = await case.log.read(stream, "reader", partition=partition)
            assert len(result.events) == result.high_water_mark

    async def test_consumers_of_a_recreated_stream_stay_at_its_beginning(self, case: Case) -> None:
        stream = await case.filled(10)
        await case.log.ensure_consumer(stream, "done", EARLIEST)
        await case.log.ensure_consumer(stream, "late", at_offset(7))
        await case.log.commit(stream, "done", 9)
        epoch = (await case.log.get_consumer_lag(stream, "done")).epoch
        await case.log.delete_stream(stream)
        await case.log.ensure_stream(stream)
        for consumer in ("done", "late"):
            lag = await case.log.get_consumer_lag(stream, consumer)
            assert (lag.total, lag.epoch) == (0, epoch + 1)
            (part,) = lag.partitions
            assert (part.committed, part.high_water_mark, part.lag) == (-1, 0, 0)
        receipts = await case.log.append(stream, batch(3))
        assert offsets(receipts) == [0, 1, 2]
        assert await case.lag("done") == 3
        assert await case.pending("late") == [0, 1, 2]
        assert (await case.log.commit(stream, "done", 0)).moved
        assert (await case.log.ensure_consumer(stream, "late", at_offset(7))).cursors[0].next_offset == 0
