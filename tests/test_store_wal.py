"""The WAL of a store that stays open gets its whole length ahead of need, and nobody notices but the clock."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from pathlib import Path

import pytest

from postbus.log.sqlite import SqliteLog
from postbus.store import Folder, wal
from postbus.store.database import connect
from postbus.store.upkeep import LASTING_PAGES, WAL_BYTES
from tests.faults.scene import JOURNAL, every_event, fact, facts, opened
from tests.handlers import eventually


def length(folder: Path) -> int:
    return Folder(folder).wal.stat().st_size


async def write_much(log: SqliteLog) -> None:
    await log.ensure_stream(JOURNAL)
    for number in range(LASTING_PAGES):
        await log.append(JOURNAL, [fact(number)])


async def test_a_store_that_stays_open_has_a_wal_of_full_length_and_loses_nothing_by_it(tmp_path: Path) -> None:
    async with opened(tmp_path / "store") as log, opened(tmp_path / "store") as other:
        await log.ensure_stream(JOURNAL)
        written = 0
        while length(tmp_path / "store") < WAL_BYTES or written < 50:  # two write while it grows
            await asyncio.gather(*(one.append(JOURNAL, [fact(written)]) for one in (log, other)))
            written += 1
        await log.append(JOURNAL, [fact(written)])
        before = await every_event(log)
        shutil.copytree(tmp_path / "store", tmp_path / "killed")  # as a killed process leaves it
        assert length(tmp_path / "killed") >= WAL_BYTES
    async with opened(tmp_path / "killed") as log:
        assert await every_event(log) == before
        await log.append(JOURNAL, [fact(written + 1)])


async def test_the_wal_goes_on_in_place_once_it_is_long(tmp_path: Path) -> None:
    async with opened(tmp_path) as log:
        await write_much(log)
        await eventually(lambda: length(tmp_path) >= WAL_BYTES)
        before = length(tmp_path)
        for number in range(50):
            await log.append(JOURNAL, [fact(number)])
        assert length(tmp_path) == before


async def test_where_disk_space_is_short_the_wal_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wal, "PLENTY_BYTES", 1 << 62)
    async with opened(tmp_path) as log:
        await log.ensure_stream(JOURNAL)
        before = length(tmp_path)
        assert 0 < before < wal.STEP_BYTES
        with contextlib.closing(connect(Folder(tmp_path))) as db:
            wal.lengthen(db, Folder(tmp_path).wal, WAL_BYTES)
        assert length(tmp_path) == before


async def test_a_disk_that_refuses_the_length_does_not_stop_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(wal, "_step", full)
    async with opened(tmp_path) as log:
        await write_much(log)
        await eventually(lambda: log.store._upkeep._long)
        monkeypatch.undo()
        await log.append(JOURNAL, facts(3))
        assert len(await every_event(log)) == LASTING_PAGES + 3
