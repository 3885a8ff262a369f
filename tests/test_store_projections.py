"""Look-ups by topic, correlation and time: complete at any moment, whether or not anything was projected yet."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from postbus.log import open_log
from postbus.log.sqlite import SqliteLog
from postbus.log.sqlite import projections as room
from postbus.model import Event, StorageError, StreamSettings
from postbus.store.backup import check_store
from postbus.topics import matches
from tests.faults.scene import AGAIN, JOURNAL, WIDE, build, dump, every_event, fact, facts, opened

MINUTE_US = 60_000_000
PATTERNS = ("topic.*", "topic.t1", "orders.>", ">", "nothing.*")


@pytest_asyncio.fixture
async def log(tmp_path: Path) -> AsyncIterator[SqliteLog]:
    async with opened(tmp_path / "store") as log:
        await log.ensure_stream(WIDE, StreamSettings(partitions=3))
        yield log


async def arrived(log: SqliteLog) -> list[Event]:
    """Return every event in the order of arrival, without any look-up."""
    by_id = {}
    for stream in await log.streams():
        for partition in range(stream.settings.partitions):
            by_id.update({event.id: event for event in await every_event(log, stream.name, partition)})
    query = "SELECT id FROM stream_events ORDER BY seq"
    order = await log.store.read(lambda db: [name for (name,) in db.execute(query)])
    assert set(order) == set(by_id)
    return [by_id[name] for name in order]


async def check(log: SqliteLog) -> None:
    """Compare every look-up with a plain search."""
    events = await arrived(log)
    for pattern in PATTERNS:
        expected = [event for event in events if matches(pattern, event.topic)]
        assert await log.projections.by_topic(pattern, 10**6) == expected
        assert await log.projections.by_topic(pattern, 3) == expected[:3]
    for name in ("c0", "c1", "nobody"):
        assert await log.projections.by_correlation(name) == [e for e in events if e.correlation_id == name]
    for since, until in ((-100, -1), (-3, 2), (0, 1), (5, 9), (-(10**6), 10**12), (7, 7)):
        low, high = since * MINUTE_US, until * MINUTE_US + 1
        expected = [event for event in events if low <= event.occurred_at_us < high]
        assert await log.projections.between(low, high, 10**6) == expected
        assert await log.projections.between(low, high, 2) == expected[:2]


async def fill(log: SqliteLog, count: int, dice: random.Random) -> None:
    for _ in range(count // 50 + 1):
        drafts = [
            fact(
                number,
                topic=dice.choice(("topic.t1", "topic.t2", "orders.created")),
                correlation_id=dice.choice((None, "c0", "c1", "c2")),
                occurred_at_us=dice.choice((None, dice.randrange(-20 * MINUTE_US, 20 * MINUTE_US))),
                key=str(number),
            )
            for number in range(50)
        ]
        await log.append(dice.choice((JOURNAL, WIDE)), drafts)


async def project(log: SqliteLog) -> bool:
    chunk = await log.store.read(room._look)
    return chunk is not None and await log.store.write(chunk.save)


async def test_look_ups_are_complete_before_between_and_after(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    reach = "SELECT max(seq) FROM (SELECT seq FROM events WHERE seq >= ? ORDER BY seq LIMIT 333)"
    monkeypatch.setattr(room, "REACH", reach)
    dice = random.Random(5)
    await fill(log, 1000, dice)
    await check(log)
    for _ in range(3):  # projected a part, and a part of the rest
        assert await project(log)
        await check(log)
    await log.projections.catch_up()
    await check(log)
    assert not await project(log)
    await fill(log, 100, dice)
    await check(log)


async def test_look_ups_are_complete_at_any_moment_while_others_write(tmp_path: Path) -> None:
    log = await open_log(str(tmp_path))  # follows the log by itself
    assert isinstance(log, SqliteLog)
    await log.ensure_stream(JOURNAL)
    acknowledged = 0
    stop = False

    async def publish() -> None:
        nonlocal acknowledged
        while not stop:
            await log.append(JOURNAL, facts(7, acknowledged, topic="topic.t1", correlation_id="c0"))
            acknowledged += 7
            await asyncio.sleep(0)

    publisher = asyncio.ensure_future(publish())
    for _ in range(25):
        await asyncio.sleep(0.005)
        for look in (
            log.projections.by_topic("topic.t1", 10**9),
            log.projections.by_correlation("c0"),
            log.projections.between(0, 1 << 60, 10**9),
        ):
            before = acknowledged
            found = [event.payload for event in await look]
            assert found == list(range(len(found)))
            assert len(found) >= before
    stop = True
    await publisher
    await log.close()
    assert check_store(tmp_path).ok


async def test_the_log_is_followed_without_being_asked(tmp_path: Path) -> None:
    log = await open_log(str(tmp_path))
    assert isinstance(log, SqliteLog)
    await log.ensure_stream(JOURNAL)
    await log.append(JOURNAL, facts(10))
    for _ in range(2000):
        if not await log.store.read(room._behind):
            break
        await asyncio.sleep(0.005)
    assert not await log.store.read(room._behind)
    await log.close()


@pytest.mark.parametrize("projected", [True, False])
async def test_look_ups_after_trims_and_deletions(log: SqliteLog, projected: bool) -> None:
    """The numbers of removed rows are given out again; nothing may think that those are projected already."""
    dice = random.Random(6)
    for life in range(4):
        await log.ensure_stream(AGAIN)
        await log.append(AGAIN, facts(20, topic="topic.t1", correlation_id="c1", occurred_at_us=life * MINUTE_US))
        await fill(log, 100, dice)
        await log.append(AGAIN, facts(5, topic=f"topic.last{life}", correlation_id="c0"))
        if projected:
            await log.projections.catch_up()
        await check(log)
        await log.delete_stream(AGAIN)
        await check(log)
        head = (await log.get_stream_stats(JOURNAL)).partitions[0].high_water_mark
        await log.trim(JOURNAL, before=head if life % 2 else head // 2)
        await log.trim(WIDE)
        await check(log)
    await log.append(JOURNAL, facts(3, topic="topic.new", correlation_id="c1"))
    await check(log)
    await log.projections.catch_up()
    await check(log)
    assert check_store(log.store.folder.path).ok


@pytest.mark.parametrize("how", ["trim", "delete"])
async def test_row_numbers_that_are_given_out_again_are_projected_again(log: SqliteLog, how: str) -> None:
    for life in range(3):
        await log.append(JOURNAL, facts(300, topic=f"topic.life{life}", correlation_id=f"c{life}"))
        await log.projections.catch_up()
        assert len(await log.projections.by_topic(f"topic.life{life}", 1000)) == 300
        assert len(await log.projections.by_correlation(f"c{life}")) == 300
        if how == "trim":
            await log.trim(JOURNAL, before=300 * (life + 1))
        else:
            await log.delete_stream(JOURNAL)
            await log.ensure_stream(JOURNAL)
        await log.append(JOURNAL, facts(5, topic=f"topic.few{life}", correlation_id=f"few{life}"))
        for _ in range(2):
            assert len(await log.projections.by_topic(f"topic.few{life}")) == 5
            assert len(await log.projections.by_topic(">", 1000)) == 5
            assert len(await log.projections.by_correlation(f"few{life}")) == 5
            assert await log.projections.by_correlation(f"c{life}") == []
            assert len(await log.projections.between(0, 1 << 60, 1000)) == 5
            await log.projections.catch_up()
        if how == "trim":
            await log.trim(JOURNAL, before=300 * (life + 1) + 5)
            await log.delete_stream(JOURNAL)
            await log.ensure_stream(JOURNAL)
            await log.append(JOURNAL, facts(300 * (life + 1)))
            await log.trim(JOURNAL, before=300 * (life + 1))
        else:
            await log.delete_stream(JOURNAL)
            await log.ensure_stream(JOURNAL)


async def test_look_ups_after_a_rebuild(log: SqliteLog) -> None:
    await fill(log, 500, random.Random(7))
    await log.projections.catch_up()
    before = dump(log.store.folder.path)
    rows: list[int] = []
    await log.projections.rebuild(rows.append)
    assert sum(rows) >= 500
    after = dump(log.store.folder.path)
    for name in ("topics", "correlations", "buckets", "projected"):
        assert after[name] == before[name]
    await check(log)


@pytest.mark.parametrize("change", ["trim", "delete", "delete and write again", "project"])
async def test_what_changed_while_it_was_summed_up_is_looked_at_again(log: SqliteLog, change: str) -> None:
    await fill(log, 200, random.Random(9))
    await log.append(WIDE, facts(40, key="one"))
    chunk = await log.store.read(room._look)
    assert chunk is not None
    if change == "trim":
        await log.trim(JOURNAL, before=5)
    elif change == "project":
        await log.projections.catch_up()
    else:
        await log.delete_stream(WIDE)
        await log.ensure_stream(WIDE, StreamSettings(partitions=3))
        if change == "delete and write again":
            await log.append(WIDE, facts(400, topic="topic.t2", key="two"))
    assert not await log.store.write(chunk.save)
    await log.projections.catch_up()
    await check(log)
    assert check_store(log.store.folder.path).ok


async def test_a_rebuild_mends_look_ups_that_verification_complains_of(log: SqliteLog) -> None:
    await fill(log, 200, random.Random(8))
    await log.projections.catch_up()
    await log.store.write(lambda db: db.execute("DELETE FROM topic_blocks").get)
    assert [problem.what[:19] for problem in check_store(log.store.folder.path).problems] == ["the look-up by topi"]
    await log.projections.rebuild()
    assert check_store(log.store.folder.path).ok
    await check(log)


async def test_look_ups_after_a_kill(tmp_path: Path) -> None:
    await asyncio.to_thread(build, tmp_path / "store", checkpointed=False, rows=30)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    for folder, follow in ((tmp_path / "store", False), (tmp_path / "copy", True)):
        async with opened(folder) as log:
            assert await log.store.read(room._behind)
            if follow:
                await log.projections.catch_up()
            await check(log)
            assert len(await log.projections.by_correlation("unprojected")) == 3


async def test_counts_per_minute(log: SqliteLog) -> None:
    moments = (-1, 0, 59_999_999, MINUTE_US, MINUTE_US + 5, -MINUTE_US, -MINUTE_US - 1)
    await log.append(JOURNAL, [fact(moment, occurred_at_us=moment) for moment in moments])
    await log.projections.catch_up()
    rates = await log.projections.rates(-3 * MINUTE_US, 3 * MINUTE_US)
    assert rates == [(-2, 1), (-1, 2), (0, 2), (1, 2)]


async def test_a_closed_store_has_no_look_ups(log: SqliteLog) -> None:
    log.projections.start()
    await log.close()
    with pytest.raises(StorageError, match="closed"):
        await log.projections.by_correlation("c0")
    await log.projections.stop()
