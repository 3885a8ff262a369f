"""Backup while others write, and restore of nothing but a good one."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import pytest

from postbus.log.sqlite import SqliteLog
from postbus.model import Conflict, CorruptLog, NotFound, StorageError
from postbus.store import Folder, backup, restore
from postbus.store.backup import check_store
from postbus.store.database import connect
from tests.faults.scene import JOURNAL, children, dump, every_event, fact, facts, opened, run_python, varied


@pytest.fixture
def busy_store(tmp_path: Path) -> Path:
    asyncio.run(_filled(tmp_path / "store"))
    return tmp_path / "store"


async def _filled(folder: Path) -> None:
    async with opened(folder) as log:
        await varied(log, 30)
        await log.append(JOURNAL, [fact("x" * 2000) for _ in range(3000)])


async def test_a_backup_holds_what_the_store_holds(tmp_path: Path) -> None:
    async with opened(tmp_path / "store") as log:
        await varied(log, 20)
        seen: list[tuple[int, int]] = []
        await asyncio.to_thread(
            backup, tmp_path / "store", tmp_path / "copy", lambda done, total: seen.append((done, total))
        )
        assert seen[-1][0] == seen[-1][1] > 0
    assert dump(tmp_path / "copy") == dump(tmp_path / "store")
    assert check_store(tmp_path / "copy").ok
    async with opened(tmp_path / "copy") as copy:
        (receipt,) = await copy.append(JOURNAL, [fact("goes on")])
        assert receipt.offset == 61
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "copy").iterdir()}
    assert modes == {0o600}


@pytest.mark.xdist_group("processes")
def test_a_backup_under_constant_writing_ends_and_is_a_prefix(busy_store: Path, tmp_path: Path) -> None:
    process = run_python("tests.faults.appender", str(busy_store), "0", "60")
    with children(process):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.write("\n")
        process.stdin.flush()
        copies = [tmp_path / f"copy {number}" for number in range(3)]
        for target in copies:
            worker = threading.Thread(target=backup, args=(busy_store, target), daemon=True)
            worker.start()
            worker.join(60)
            assert not worker.is_alive(), "the backup does not end while somebody writes"
    whole = dump(busy_store)["rows"]
    lengths = []
    for target in copies:
        assert check_store(target).ok
        part = dump(target)["rows"]
        assert part == whole[: len(part)]
        lengths.append(len(part))
    assert lengths == sorted(lengths)
    assert lengths[0] < len(whole)


async def test_a_backup_does_not_start_over_when_somebody_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["postbus.store.backup"], "PAGES_A_STEP", 4)
    async with opened(tmp_path / "store") as log:
        await varied(log, 30)
    db = connect(Folder(tmp_path / "store"))
    totals: list[int] = []

    def write(_: int, total: int) -> None:
        totals.append(total)
        assert len(totals) <= total // 4 + 1, "the backup started over"
        db.execute("INSERT INTO store_facts VALUES (?, zeroblob(50000))", (f"step {len(totals)}",))

    backup(tmp_path / "store", tmp_path / "copy", write)
    db.close()
    assert len(set(totals)) == 1
    assert len(totals) > 5
    assert check_store(tmp_path / "copy").ok


async def test_a_backup_never_replaces_a_store(tmp_path: Path) -> None:
    async with opened(tmp_path / "store") as log:
        await log.append(JOURNAL, facts(3))
    async with opened(tmp_path / "other") as log:
        await log.append(JOURNAL, facts(5))
    before = dump(tmp_path / "other")
    for copy in (backup, restore):
        with pytest.raises(Conflict, match="already a store"):
            copy(tmp_path / "store", tmp_path / "other")
        with pytest.raises(NotFound, match="no store in"):
            copy(tmp_path / "nothing", tmp_path / "new")
    assert dump(tmp_path / "other") == before
    assert not (tmp_path / "new").exists()


async def test_a_backup_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path / "store") as log:
        await log.append(JOURNAL, facts(3))

    def no_room(_: Folder) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["postbus.store.backup"], "write_anchor", no_room)
    with pytest.raises(StorageError, match="could not be copied"):
        backup(tmp_path / "store", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


async def test_a_restored_store_goes_on_where_the_backup_was(tmp_path: Path) -> None:
    async with opened(tmp_path / "store") as log:
        await varied(log, 20)
    backup(tmp_path / "store", tmp_path / "copy")
    report = restore(tmp_path / "copy", tmp_path / "back")
    assert report.ok
    assert report.events == len(dump(tmp_path / "store")["by row"])
    assert dump(tmp_path / "back") == dump(tmp_path / "store")
    async with opened(tmp_path / "back") as log:
        before = await every_event(log)
        await log.append(JOURNAL, [fact("goes on")])
        assert (await every_event(log))[:-1] == before
        (again,) = await log.append(JOURNAL, [fact(3, native_id="id-3", variant="1", topic="topic.t3", key="k")])
        assert again.duplicate


async def test_a_damaged_backup_is_not_restored(tmp_path: Path) -> None:
    async with opened(tmp_path / "store") as log:
        await log.append(JOURNAL, facts(9))
    backup(tmp_path / "store", tmp_path / "copy")
    db = connect(Folder(tmp_path / "copy"))
    db.execute("UPDATE events SET payload = CAST('6' AS BLOB) WHERE \"offset\" = 5")
    db.close()
    with pytest.raises(CorruptLog, match=r"the backup in .* is damaged") as refused:
        restore(tmp_path / "copy", tmp_path / "back")
    assert (refused.value.stream, refused.value.partition, refused.value.offset) == (JOURNAL, 0, 5)
    assert "salvage" in str(refused.value.hint)
    assert not (tmp_path / "back").exists()
    (tmp_path / "copy" / "postbus.db").write_bytes(b"not a database" * 1000)
    with pytest.raises(CorruptLog):
        restore(tmp_path / "copy", tmp_path / "back")


async def test_a_backup_of_an_open_store_does_not_disturb_it(tmp_path: Path) -> None:
    log = SqliteLog.open(tmp_path / "store")
    await log.ensure_stream(JOURNAL)

    async def write() -> None:
        for number in range(200):
            await log.append(JOURNAL, [fact(number)])

    await asyncio.gather(write(), asyncio.to_thread(backup, tmp_path / "store", tmp_path / "copy"))
    assert [event.payload for event in await every_event(log)] == list(range(200))
    await log.close()
    assert check_store(tmp_path / "store").ok
    assert check_store(tmp_path / "copy").ok


async def test_a_shortened_store_is_not_backed_up_as_if_it_were_whole(tmp_path: Path) -> None:
    async with opened(tmp_path / "store") as log:
        await log.append(JOURNAL, facts(2))
    before = (tmp_path / "store" / "postbus.db").read_bytes()
    async with opened(tmp_path / "store") as log:
        await log.append(JOURNAL, facts(1))
    (tmp_path / "store" / "postbus.db").write_bytes(before)
    with pytest.raises(CorruptLog, match="shortened"):
        backup(tmp_path / "store", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
