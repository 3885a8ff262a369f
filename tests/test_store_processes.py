"""Several processes on one store: safe, fair, and noticed."""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from postbus.model import StreamSettings
from postbus.store.backup import check_store
from tests.faults.scene import EARLIEST, JOURNAL, children, every_event, fact, facts, opened, run_python

FAIR = 0.1


def race(folder: Path, processes: int, count: int, seconds: float) -> list[list[int]]:
    """Let processes append at the same time; return the offsets that each was given."""
    started = [run_python("tests.faults.appender", str(folder), str(count), str(seconds)) for _ in range(processes)]
    with children(*started):
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in started:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=120)[0] for process in started]
    return [[int(offset) for offset in output.split()] for output in outputs]


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.xdist_group("processes")
async def test_processes_append_at_once_without_loss_and_without_starving(tmp_path: Path, processes: int) -> None:
    async with opened(tmp_path) as log:
        await log.append(JOURNAL, [])
    offsets = await asyncio.to_thread(race, tmp_path, processes, 0, 1.5)
    acknowledged = [offset for mine in offsets for offset in mine]
    assert sorted(acknowledged) == list(range(len(acknowledged)))
    async with opened(tmp_path) as log:
        events = await every_event(log)
    assert [event.offset for event in events] == sorted(acknowledged)
    counts = Counter(event.payload["process"] for event in events)
    assert sorted(counts.values()) == sorted(map(len, offsets))
    assert min(counts.values()) / max(counts.values()) >= FAIR, counts
    assert check_store(tmp_path).ok


async def test_a_reader_notices_what_another_process_appends(tmp_path: Path) -> None:
    async with opened(tmp_path) as log:
        await log.append(JOURNAL, facts(3))
        await log.ensure_consumer(JOURNAL, "reader", EARLIEST)
        assert len((await log.read(JOURNAL, "reader")).events) == 3  # from the tail cache
        waiting = asyncio.ensure_future(log.wait(JOURNAL, 0, 3, 60.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await asyncio.to_thread(race, tmp_path, 1, 4, 0.0)
        assert await waiting
        assert [event.offset for event in await log.fetch(JOURNAL, 0, 0)] == list(range(7))
        assert (await log.get_stream_stats(JOURNAL)).partitions[0].high_water_mark == 7
        assert (await log.get_consumer_lag(JOURNAL, "reader")).total == 7
        (receipt,) = await log.append(JOURNAL, [fact("mine again")])
        assert receipt.offset == 7
        assert len((await log.read(JOURNAL, "reader")).events) == 8


async def test_two_stores_see_each_others_streams_cursors_and_trims(tmp_path: Path) -> None:
    """Two stores of one process stand for two processes: they share nothing but the files."""
    other_stream = "local.default.other"
    async with opened(tmp_path) as one, opened(tmp_path) as two:
        await one.ensure_stream(other_stream, StreamSettings(partitions=2))
        assert (await two.get_stream_stats(other_stream)).stream.settings.partitions == 2
        await one.append(JOURNAL, facts(10))
        await two.ensure_consumer(JOURNAL, "reader", EARLIEST)
        await one.commit(JOURNAL, "reader", 4)
        assert (await two.read(JOURNAL, "reader")).events[0].offset == 5
        assert (await two.commit(JOURNAL, "reader", 2)).moved is False
        await two.trim(JOURNAL, before=5)
        assert (await one.fetch(JOURNAL, 0, 0))[0].offset == 5
        assert (await one.get_stream_stats(JOURNAL)).partitions[0].first_offset == 5
        await two.delete_stream(JOURNAL)
        await two.ensure_stream(JOURNAL)
        (receipt,) = await one.append(JOURNAL, [fact("new life")])
        assert receipt.offset == 0
        assert (await one.get_consumer_lag(JOURNAL, "reader")).epoch == 1
    assert check_store(tmp_path).ok


async def test_identities_hold_across_stores_that_race(tmp_path: Path) -> None:
    async with opened(tmp_path) as one, opened(tmp_path) as two:
        for number in range(50):
            drafts = [fact(number, native_id=str(number))]
            first, second = await asyncio.gather(one.append(JOURNAL, drafts), two.append(JOURNAL, drafts))
            assert first[0].offset == second[0].offset == number
            assert [first[0].duplicate, second[0].duplicate].count(True) == 1
        assert len(await every_event(one)) == 50


@pytest.mark.xdist_group("processes")
def test_a_store_is_verified_while_others_write(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    process = run_python("tests.faults.appender", str(folder), "0", "2.0", stderr=subprocess.PIPE)
    with children(process):
        assert process.stdout is not None
        process.stdout.readline()
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        reports = []
        while process.poll() is None:
            if (folder / "anchor").exists() and (folder / "anchor").stat().st_size > 64:
                reports.append(check_store(folder))
    assert len(reports) > 1
    assert [report.problems for report in reports if not report.ok] == []
    assert [report.events for report in reports] == sorted(report.events for report in reports)
