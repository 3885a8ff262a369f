"""The embedded store by itself: its layout, its files, its one writer, its end."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import apsw
import pytest
import pytest_asyncio

from postbus.log.sqlite import SqliteLog
from postbus.model import (
    AlreadyServed,
    Durability,
    IdempotencyConflict,
    NotFound,
    StorageError,
    StorageFailed,
    StreamSettings,
)
from postbus.store import Folder, ServeLock, Store
from postbus.store.backup import check_store
from postbus.store.database import connect
from postbus.store.migrations import latest_version, migrate, scripts
from postbus.store.vacuum import vacuum
from tests.faults.scene import JOURNAL, children, dump, every_event, fact, facts, opened, run_python, varied

SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY type, name"


@pytest_asyncio.fixture
async def log(tmp_path: Path) -> AsyncIterator[SqliteLog]:
    async with opened(tmp_path / "store") as log:
        yield log


def version(folder: Path) -> int:
    db = connect(Folder(folder), write=False)
    try:
        return int(db.pragma("user_version"))
    finally:
        db.close()


# --- migrations -------------------------------------------------------------------------------------------------------


async def test_a_new_store_has_the_layout_of_the_scripts(tmp_path: Path) -> None:
    await Store.open(tmp_path).close()
    plain = apsw.Connection(":memory:")
    for _, script in scripts():
        plain.execute(script)
    db = connect(Folder(tmp_path), write=False)
    assert list(db.execute(SCHEMA)) == list(plain.execute(SCHEMA))
    assert int(db.pragma("user_version")) == latest_version()
    db.close()


def test_scripts_are_numbered_without_gaps() -> None:
    assert [number for number, _ in scripts()] == list(range(1, latest_version() + 1))


async def test_migrating_again_changes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as log:
        await varied(log, 10)
    before = dump(tmp_path)
    db = connect(Folder(tmp_path))
    assert migrate(db) == migrate(db) == latest_version()
    db.close()
    assert dump(tmp_path) == before


def test_a_migration_that_fails_leaves_the_store_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Folder(tmp_path).create()
    db = connect(Folder(tmp_path))
    broken = [(1, "CREATE TABLE a (b); CREATE TABLE a (b)")]
    monkeypatch.setattr("postbus.store.migrations.scripts", lambda: broken)
    with pytest.raises(apsw.SQLError):
        migrate(db)
    assert list(db.execute(SCHEMA)) == []
    assert int(db.pragma("user_version")) == 0
    db.close()


async def test_a_store_of_a_newer_package_is_refused_and_left_alone(tmp_path: Path) -> None:
    await Store.open(tmp_path).close()
    db = connect(Folder(tmp_path))
    db.execute(f"PRAGMA user_version = {latest_version() + 1}")
    db.close()
    with pytest.raises(StorageError, match=f"has layout version {latest_version() + 1}, .* knows up to") as refused:
        Store.open(tmp_path)
    assert refused.value.hint is not None
    assert "upgrade" in refused.value.hint
    assert version(tmp_path) == latest_version() + 1


@pytest.mark.parametrize("attempt", range(3))
def test_eight_threads_may_open_a_new_store_at_once(tmp_path: Path, attempt: int) -> None:
    barrier = threading.Barrier(8)

    def first_open() -> str:
        barrier.wait()
        store = Store.open(tmp_path / str(attempt))
        asyncio.run(store.close())
        return store.id

    with ThreadPoolExecutor(8) as pool:
        ids = {future.result() for future in [pool.submit(first_open) for _ in range(8)]}
    assert len(ids) == 1
    assert check_store(tmp_path / str(attempt)).ok


def test_opening_waits_for_another_who_is_making_the_store(tmp_path: Path) -> None:
    """SQLite refuses to switch a locked file to WAL at once, without asking the busy handler."""
    Folder(tmp_path).create()
    other = apsw.Connection(str(Folder(tmp_path).database))
    other.execute("CREATE TABLE t (x); BEGIN IMMEDIATE")
    letting_go = threading.Timer(0.1, lambda: other.execute("COMMIT"))
    letting_go.start()
    connect(Folder(tmp_path)).close()
    letting_go.join()
    other.close()


def test_eight_processes_may_open_a_new_store_at_once(tmp_path: Path) -> None:
    processes = [run_python("tests.faults.appender", str(tmp_path / "new"), "1", "0") for _ in range(8)]
    with children(*processes):
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        outputs = [process.communicate("\n", timeout=60)[0].split() for process in processes]
    assert sorted(int(offset) for output in outputs for offset in output) == list(range(8))
    assert check_store(tmp_path / "new").ok


# --- files ------------------------------------------------------------------------------------------------------------


async def test_everything_is_private_to_its_owner(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        async with opened(tmp_path / "deep" / "store") as log:
            await log.append(JOURNAL, facts(3))
            ServeLock(log.store.folder).acquire()
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "deep" / "store").iterdir()}
    finally:
        os.umask(mask)
    assert {"postbus.db", "postbus.db-wal", "postbus.db-shm", "anchor", "reserve", "serve.lock"} == set(modes)
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE((tmp_path / "deep" / "store").stat().st_mode) == 0o700


async def test_opening_a_store_twice_does_not_drop_the_locks_of_the_first(tmp_path: Path) -> None:
    """POSIX locks belong to the process: closing any handle of the database would let another process take it away."""
    async with opened(tmp_path / "store") as log:
        await log.append(JOURNAL, facts(3))
        held = locks(tmp_path / "store")
        assert held
        async with opened(tmp_path / "store") as second:
            await second.append(JOURNAL, facts(3, 3))
        assert locks(tmp_path / "store") == held


def locks(folder: Path) -> list[str]:
    """Return this machine's locks on the database file."""
    inode = (folder / "postbus.db").stat().st_ino
    table = Path("/proc/locks")
    if not table.exists():
        pytest.skip("locks can only be seen where there is a /proc/locks")
    lines = [line.split(maxsplit=1)[1] for line in table.read_text().splitlines()]
    return [line for line in lines if f":{inode} " in line]


def test_a_folder_that_cannot_be_made_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot make a store in") as refused:
        Store.open(tmp_path / "file" / "store")
    assert "--data" in str(refused.value.hint)


def test_a_folder_without_a_store_is_not_found_unless_it_may_be_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no store in"):
        Store.open(tmp_path / "nothing", create=False)
    assert not (tmp_path / "nothing").exists()


# --- the lock between servers -----------------------------------------------------------------------------------------


def test_a_second_server_is_kept_off_and_told_by_whom(tmp_path: Path) -> None:
    Folder(tmp_path).create()
    first, second = ServeLock(Folder(tmp_path)), ServeLock(Folder(tmp_path))
    first.acquire()
    with pytest.raises(AlreadyServed, match=f"process {os.getpid()}") as refused:
        second.acquire()
    assert refused.value.hint is not None
    first.release()
    first.release()
    second.acquire()
    second.release()


def test_a_killed_server_leaves_the_folder_free(tmp_path: Path) -> None:
    Folder(tmp_path).create()
    with children(run_python("tests.faults.server", str(tmp_path))) as (process,):
        assert process.stdout.readline() == "served\n"
        with pytest.raises(AlreadyServed, match=f"process {process.pid} *\\)"):
            ServeLock(Folder(tmp_path)).acquire()
        process.send_signal(signal.SIGKILL)
        process.wait()
        lock = ServeLock(Folder(tmp_path))
        lock.acquire()
        lock.release()


# --- durability -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("durability", "level"), [("full", 2), ("relaxed", 1)])
async def test_durability_is_what_the_receipt_says(tmp_path: Path, durability: str, level: int) -> None:
    async with opened(tmp_path, durability=durability) as log:
        (receipt,) = await log.append(JOURNAL, [fact()])
        (identified,) = await log.append(JOURNAL, [fact(native_id="one")])
        (again,) = await log.append(JOURNAL, [fact(native_id="one")])
        assert {receipt.durability, identified.durability, again.durability} == {Durability(durability)}
        assert await log.store.write(lambda db: db.pragma("synchronous")) == level
        assert log.store._upkeep._db.pragma("synchronous") == level
        assert await log.store.read(lambda db: db.pragma("journal_mode")) == "wal"
    assert check_store(tmp_path).ok


async def test_a_relaxed_store_is_anchored_when_it_is_closed(tmp_path: Path) -> None:
    async with opened(tmp_path, durability="relaxed") as log:
        await log.append(JOURNAL, facts(3))
        assert [mark.next_offset for mark in log.store.anchor.state().marks] == []
    async with opened(tmp_path) as log:
        assert [mark.next_offset for mark in log.store.anchor.state().marks] == [3]


# --- group commit -----------------------------------------------------------------------------------------------------


async def commits(log: SqliteLog, work: Awaitable[object]) -> int:
    """Count the transactions that some work takes."""
    seen = 0
    upkeep = log.store._upkeep.committed

    def count(db: apsw.Connection, name: str, pages: int) -> int:
        nonlocal seen
        seen += 1
        return upkeep(db, name, pages)

    log.store._db.set_wal_hook(count)
    await work
    log.store._db.set_wal_hook(upkeep)
    return seen


async def test_a_hundred_waiting_publishers_share_their_commits(log: SqliteLog) -> None:
    everyone = asyncio.gather(*(log.append(JOURNAL, [fact(number)]) for number in range(100)))
    assert await commits(log, everyone) <= 10
    assert [event.payload for event in await every_event(log)] == list(range(100))


async def test_one_publisher_commits_each_time(log: SqliteLog) -> None:
    async def one_by_one() -> None:
        for number in range(10):
            await log.append(JOURNAL, [fact(number)])

    assert await commits(log, one_by_one()) == 10


async def test_a_write_that_changes_nothing_costs_no_commit(log: SqliteLog) -> None:
    await log.append(JOURNAL, [fact(native_id="one")])
    await log.ensure_consumer(JOURNAL, "reader")
    assert await commits(log, log.append(JOURNAL, [fact(native_id="one")])) == 0
    assert await commits(log, log.ensure_consumer(JOURNAL, "reader")) == 0


async def test_one_refused_item_does_not_hurt_its_neighbours(log: SqliteLog) -> None:
    await log.append(JOURNAL, [fact(1, native_id="taken")])
    work = [
        log.append(JOURNAL, [fact(2)]),
        log.append(JOURNAL, [fact(3), fact("other", native_id="taken")]),
        log.append("local.default.unknown", [fact(4)]),
        log.commit(JOURNAL, "nobody", 0),
        log.append(JOURNAL, [fact(5, native_id="five")]),
    ]
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [list, IdempotencyConflict, NotFound, NotFound, list]
    assert [event.payload for event in await every_event(log)] == [1, 2, 5]


async def test_an_item_that_raises_undoes_only_itself(log: SqliteLog) -> None:
    def half(db: apsw.Connection) -> None:
        db.execute("INSERT INTO store_facts VALUES ('half', '1')")
        raise ZeroDivisionError

    def wrong(db: apsw.Connection) -> None:
        db.execute("INSERT INTO store_facts VALUES ('wrong', '1')")
        db.execute("INSERT INTO nowhere VALUES (1)")

    def whole(db: apsw.Connection) -> str:
        db.execute("INSERT INTO store_facts VALUES ('whole', '1')")
        return "done"

    work = [log.store.write(half), log.append(JOURNAL, [fact(1)]), log.store.write(wrong), log.store.write(whole)]
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    assert isinstance(outcomes[0], ZeroDivisionError)
    assert isinstance(outcomes[2], StorageError)
    assert isinstance(outcomes[2].__cause__, apsw.SQLError)
    assert outcomes[3] == "done"
    names = await log.store.read(lambda db: [name for (name,) in db.execute("SELECT name FROM store_facts")])
    assert set(names) & {"half", "wrong", "whole"} == {"whole"}
    assert len(await every_event(log)) == 1


async def test_a_cancelled_waiter_does_not_undo_its_write(log: SqliteLog) -> None:
    waiting = asyncio.ensure_future(log.append(JOURNAL, [fact("left alone")]))
    other = asyncio.ensure_future(log.append(JOURNAL, [fact("stays")]))
    await asyncio.sleep(0)
    waiting.cancel()
    (receipt,) = await other
    assert waiting.cancelled()
    assert receipt.offset == 1
    assert [event.payload for event in await every_event(log)] == ["left alone", "stays"]


async def test_a_cancelled_waiter_that_was_alone_is_committed_too(log: SqliteLog) -> None:
    waiting = asyncio.ensure_future(log.append(JOURNAL, [fact("alone")]))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await log.wait(JOURNAL, 0, 0, 10.0)
    assert [event.payload for event in await every_event(log)] == ["alone"]


async def test_waiters_are_told_when_the_thread_commits_for_them(log: SqliteLog) -> None:
    log.store.writer._commit_s = 1.0  # as on a slow disk
    refused = asyncio.ensure_future(log.append("local.default.unknown", [fact()]))
    receipts = await asyncio.gather(*(log.append(JOURNAL, [fact(number)]) for number in range(100)))
    assert sorted(receipt.offset for (receipt,) in receipts) == list(range(100))
    with pytest.raises(NotFound):
        await refused


async def test_a_waiter_cancelled_while_the_thread_commits_does_not_undo_its_write(log: SqliteLog) -> None:
    writer = log.store.writer
    writer._commit_s = 1.0
    with writer._lock:  # the thread cannot begin yet
        waiting = asyncio.ensure_future(log.append(JOURNAL, [fact("left")]))
        for _ in range(5):
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert await log.wait(JOURNAL, 0, 0, 10.0)
    assert [event.payload for event in await every_event(log)] == ["left"]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- the end ----------------------------------------------------------------------------------------------------------

CLOSED: dict[str, Callable[[SqliteLog], Awaitable[object]]] = {
    "append": lambda log: log.append(JOURNAL, [fact()]),
    "append nothing": lambda log: log.append(JOURNAL, []),
    "fetch": lambda log: log.fetch(JOURNAL, 0, 0),
    "wait": lambda log: log.wait(JOURNAL, 0, 100, 5.0),
    "read": lambda log: log.read(JOURNAL, "reader"),
    "commit": lambda log: log.commit(JOURNAL, "reader", 0),
    "ensure_stream": lambda log: log.ensure_stream(JOURNAL),
    "ensure_consumer": lambda log: log.ensure_consumer(JOURNAL, "other"),
    "streams": lambda log: log.streams(),
    "consumers": lambda log: log.consumers(),
    "stats": lambda log: log.get_stream_stats(JOURNAL),
    "lag": lambda log: log.get_consumer_lag(JOURNAL, "reader"),
    "trim": lambda log: log.trim(JOURNAL),
    "delete": lambda log: log.delete_stream(JOURNAL),
    "topic": lambda log: log.projections.by_topic(">"),
}


@pytest.mark.parametrize("call", CLOSED.values(), ids=CLOSED.keys())
async def test_a_closed_store_refuses_with_a_sentence(
    log: SqliteLog, call: Callable[[SqliteLog], Awaitable[object]]
) -> None:
    await log.append(JOURNAL, facts(3))
    await log.ensure_consumer(JOURNAL, "reader")
    await log.close()
    await log.close()
    with pytest.raises(StorageError, match="the store is closed"):
        await call(log)


async def test_close_finishes_what_is_queued(tmp_path: Path) -> None:
    log = SqliteLog.open(tmp_path)
    await log.ensure_stream(JOURNAL)
    # Large enough for the writer thread; the loop commits small ones by itself while it waits for the end.
    waiting = [asyncio.ensure_future(log.append(JOURNAL, facts(400, 400 * number))) for number in range(10)]
    await asyncio.sleep(0)
    await log.close()
    receipts = await asyncio.wait_for(asyncio.gather(*waiting), 60)
    async with opened(tmp_path) as again:
        held = [event.payload for event in await every_event(again)]
    assert held == list(range(4000))
    assert [receipt.offset for batch in receipts for receipt in batch] == list(range(4000))


async def test_close_leaves_one_file_of_data_and_an_anchor(tmp_path: Path) -> None:
    async with opened(tmp_path) as log:
        await log.append(JOURNAL, facts(10))
    assert files(tmp_path) == {"postbus.db", "anchor", "reserve"}


async def test_a_store_that_cannot_start_leaves_no_thread_behind(tmp_path: Path) -> None:
    async with opened(tmp_path) as log:
        await log.append(JOURNAL, facts(10))
    (tmp_path / "anchor").unlink()
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(StorageError):
            Store.open(tmp_path)
    assert threading.active_count() == before


# --- the anchor on a failing disk -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "fails"), [(5, True), (28, False)], ids=["EIO", "ENOSPC"])
async def test_an_anchor_that_cannot_be_written(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch, number: int, fails: bool
) -> None:
    await log.append(JOURNAL, facts(2))

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("postbus.store.anchor.os.pwrite", refuse)
        await log.append(JOURNAL, [fact(2)])  # it is in the log: acknowledged all the same
        assert log.store.writer.failed is fails
        assert [event.payload for event in await every_event(log)] == [0, 1, 2]
        if fails:
            with pytest.raises(StorageFailed, match="read-only until it is reopened"):
                await log.append(JOURNAL, [fact(3)])
    await log.close()
    assert check_store(log.store.folder.path).ok


async def test_an_anchor_that_cannot_be_synced_ends_writing(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr("postbus.store.anchor.os.fsync", refuse)
    monkeypatch.setattr("postbus.store.upkeep.TICK_S", 0.001)
    await log.append(JOURNAL, facts(2))
    for _ in range(2000):
        if log.store.writer.failed:
            break
        await asyncio.sleep(0.005)
    with pytest.raises(StorageFailed):
        await log.append(JOURNAL, [fact(2)])
    assert len(await every_event(log)) == 2


# --- giving space back ------------------------------------------------------------------------------------------------


async def test_vacuum_makes_a_trimmed_store_smaller_and_changes_nothing_else(tmp_path: Path) -> None:
    async with opened(tmp_path) as log:
        await varied(log, 20)
        await log.append(JOURNAL, [fact("x" * 5000) for _ in range(500)])
        await log.commit(JOURNAL, "reader", 500)
        await log.trim(JOURNAL, before=500)
        await log.ensure_stream("local.default.more", StreamSettings(partitions=2))
    held = dump(tmp_path)
    before, after = vacuum(tmp_path)
    assert after < before // 2
    assert dump(tmp_path) == held
    assert check_store(tmp_path).ok
