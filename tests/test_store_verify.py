"""Verification: every class of damage is named, nothing good is refused, and start-up does not go on silently."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from postbus.model import CorruptLog, Retention, StreamSettings
from postbus.store import Folder, Report, Store
from postbus.store.anchor import Anchor, Mark
from postbus.store.backup import check_store, read_anchor, write_anchor
from postbus.store.database import connect
from tests.faults.scene import EARLIEST, JOURNAL, WIDE, dump, every_event, fact, facts, opened, varied

OTHER = "local.default.other"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "model"
    asyncio.run(_make(folder))
    return folder


async def _make(folder: Path) -> None:
    async with opened(folder) as log:
        await varied(log, 60)


@pytest.fixture
def store(model: Path, tmp_path: Path) -> Path:
    """A copy of a good store to do harm to."""
    shutil.copytree(model, tmp_path / "store", ignore=shutil.ignore_patterns("reserve"))
    return tmp_path / "store"


def harm(folder: Path, *statements: str) -> None:
    """Change a store behind its back; the seals, the chain and the anchor stay as they are."""
    db = connect(Folder(folder))
    db.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 0)
    for statement in statements:
        db.execute(statement)
    db.close()


def sentences(folder: Path) -> str:
    report = check_store(folder)
    assert not report.ok
    return "\n".join(f"{p.stream}/{p.partition}/{p.offset}: {p.what}" for p in report.problems)


# --- good stores of all shapes ----------------------------------------------------------------------------------------


def good(folder: Path) -> Report:
    report = check_store(folder)
    assert report.problems == []
    return report


async def test_an_empty_store_is_good(tmp_path: Path) -> None:
    await Store.open(tmp_path).close()
    assert good(tmp_path).events == 0


async def test_a_varied_store_is_good(store: Path) -> None:
    report = good(store)
    assert report.events == len(dump(store)["by row"])
    assert report.partitions == 5
    async with opened(store):
        assert good(store).events == report.events


async def test_progress_ends_at_the_end(store: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = check_store(store, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == report.events
    assert seen[-1][0] <= seen[-1][1]


@pytest.mark.parametrize("kept", [1, 0])
async def test_a_trimmed_stream_is_good(tmp_path: Path, kept: int) -> None:
    async with opened(tmp_path) as log:
        await log.append(JOURNAL, facts(20, occurred_at_us=5))
        await log.trim(JOURNAL, before=20 - kept)
        good(tmp_path)
        await log.append(JOURNAL, facts(3))
    good(tmp_path)
    async with opened(tmp_path) as log:
        assert [event.offset for event in await every_event(log)] == list(range(20 - kept, 23))


async def test_streams_that_were_deleted_and_made_again_are_good(tmp_path: Path) -> None:
    async with opened(tmp_path) as log:
        for life in range(4):
            await log.ensure_stream(OTHER, StreamSettings(partitions=life + 1))
            await log.append(OTHER, facts(10 - 2 * life, native_id=None, key=f"k{life}"))
            good(tmp_path)
            await log.delete_stream(OTHER)
            good(tmp_path)
        await log.ensure_stream("local.default.third")  # takes over slots of the anchor
        await log.append("local.default.third", facts(2))
    good(tmp_path)
    await Store.open(tmp_path).close()


async def test_many_partitions_are_good(tmp_path: Path) -> None:
    async with opened(tmp_path) as log:
        await log.ensure_stream(OTHER, StreamSettings(partitions=200))
        await log.append(OTHER, [fact(number, key=f"k{number}") for number in range(500)])
    assert good(tmp_path).partitions == 201


async def test_times_out_of_order_and_forgotten_identities_are_good(tmp_path: Path) -> None:
    async with opened(tmp_path) as log:
        await log.ensure_stream(OTHER, StreamSettings(identity_window_s=0.0, retention=Retention(count=5)))
        for moment in (50, -7, 10**15, 49, 51, 0):
            await log.append(OTHER, [fact(moment, occurred_at_us=moment, native_id="same")])
            await log.trim(OTHER)
            good(tmp_path)
        await log.append(JOURNAL, [fact(moment, occurred_at_us=moment) for moment in (9, 3, -(10**15), 9, 12)])
        await log.trim(JOURNAL, before=1)
        await log.projections.catch_up()
    good(tmp_path)


# --- damage -----------------------------------------------------------------------------------------------------------

AT = f"WHERE stream_id = (SELECT stream_id FROM stream_registry WHERE name = '{JOURNAL}') AND \"offset\" = "
DAMAGE: dict[str, tuple[str, str]] = {
    "payload": (f"UPDATE events SET payload = CAST('[]' AS BLOB) {AT} 77", f"{JOURNAL}/0/77: the event is altered"),
    "topic": (f"UPDATE events SET topic = topic || 'x' {AT} 80", f"{JOURNAL}/0/80: the event is altered"),
    "time": (f"UPDATE events SET created_at_us = created_at_us + 1 {AT} 80", f"{JOURNAL}/0/80: the event is altered"),
    "trust": (f"UPDATE events SET trust = 'untrusted' {AT} 80", f"{JOURNAL}/0/80: the event is altered"),
    "text that is no text": (
        f"UPDATE events SET topic = CAST(x'61ff62' AS TEXT) {AT} 90",
        f"{JOURNAL}/0/90: the event cannot be read",
    ),
    "key of another type": (f"UPDATE events SET key = x'00' {AT} 90", f"{JOURNAL}/0/90: the event is altered"),
    "chain": (f"UPDATE events SET chain = zeroblob(32) {AT} 90", f"{JOURNAL}/0/90: the event does not follow"),
    "chain of another type": (f"UPDATE events SET chain = 'x' {AT} 90", f"{JOURNAL}/0/90: the event does not follow"),
    "crc": (f"UPDATE events SET crc = crc + 1 {AT} 90", f"{JOURNAL}/0/90: the event is altered"),
    "running size": (f"UPDATE events SET bytes_through = 1 {AT} 90", f"{JOURNAL}/0/90: the running size is altered"),
    "running time": (f"UPDATE events SET latest_at_us = 1 {AT} 90", f"{JOURNAL}/0/90: the running time is altered"),
    "missing row": (f"DELETE FROM events {AT} 99", f"{JOURNAL}/0/99: offset 99 is missing; the next one there is 100"),
    "missing beginning": (f"DELETE FROM events {AT} 20", f"{JOURNAL}/0/20: offset 20 is missing"),
    "cut off": (
        f'DELETE FROM events {AT} (SELECT max("offset") FROM events) AND "offset" > 150',
        f"{JOURNAL}/0/180: it ends at offset 180 but 181 events were acknowledged",
    ),
    "cursor": ("UPDATE cursors SET next_offset = 1", "a row of cursors is altered"),
    "reader": ("UPDATE readers SET epoch = 7", "a row of readers is altered"),
    "stream": ("UPDATE stream_registry SET settings = replace(settings, '3', '2')", "a row of stream_registry is"),
    "stream gone": (f"DELETE FROM stream_registry WHERE name = '{WIDE}'", "was there before and is gone"),
    "partition": ("UPDATE partitions SET first_offset = first_offset + 1", "a row of partitions is altered"),
    "partition gone": ("DELETE FROM partitions", "belongs to no partition"),
    "identity": ('UPDATE identities SET "offset" = "offset" + 1', "a row of identities is altered"),
    "identity gone": ("DELETE FROM identities WHERE native_id = 'id-30'", f"{JOURNAL}/0/91: its identity is gone"),
    "index gone": ("DROP INDEX events_position", "the index events_position is not as it was made"),
    "table gone": ("DROP TABLE consumer_commits", "the table consumer_commits is not as it was made"),
    "layout": ("ALTER TABLE cursors RENAME COLUMN skipped TO jumped", "the table cursors is not as it was made"),
    "version": ("PRAGMA user_version = 77", "layout version 77, expected"),
    "changes undone": ("UPDATE store_facts SET value = '1' WHERE name = 'changes'", "changes to readers and streams"),
    "look-up by topic": ("DELETE FROM topic_blocks WHERE topic = 'topic.t1'", "the look-up by topic misses events"),
    "look-up by correlation": ("DELETE FROM correlation_rows", "the look-up by correlation misses events"),
    "look-up by time": ("UPDATE time_buckets SET last_seq = first_seq", "the look-up by time misses events"),
    "another store": ("UPDATE store_facts SET value = 'x' WHERE name = 'store_id'", "belongs to another store"),
}  # fmt: skip


@pytest.mark.parametrize(("statement", "sentence"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named(store: Path, statement: str, sentence: str) -> None:
    harm(store, statement)
    assert sentence in sentences(store)


def test_swapped_rows_are_named(store: Path) -> None:
    seq = f"(SELECT seq FROM events {AT} 70)"
    harm(
        store,
        f"CREATE TEMP TABLE spot AS SELECT {seq} AS a, (SELECT seq FROM events {AT} 73) AS b",
        "UPDATE events SET seq = -1 WHERE seq = (SELECT a FROM spot)",
        "UPDATE events SET seq = (SELECT a FROM spot) WHERE seq = (SELECT b FROM spot)",
        "UPDATE events SET seq = (SELECT b FROM spot) WHERE seq = -1",
    )
    assert f"{JOURNAL}/0/70: offset 70 is missing; the next one there is 73" in sentences(store)


def test_swapped_payloads_are_named(store: Path) -> None:
    swap = "SELECT payload FROM events e WHERE e.stream_id = events.stream_id AND e.partition = events.partition"
    harm(store, f'UPDATE events SET payload = ({swap} AND e."offset" = 141 - events."offset") {AT} 70 OR "offset" = 71')
    assert f"{JOURNAL}/0/70: the event is altered" in sentences(store)


def test_only_the_first_bad_offset_of_a_partition_is_named(store: Path) -> None:
    harm(store, f"UPDATE events SET payload = x'30' {AT} 60", f"UPDATE events SET payload = x'30' {AT} 70")
    report = check_store(store)
    assert [(p.stream, p.partition, p.offset) for p in report.problems] == [(JOURNAL, 0, 60)]


def test_a_page_that_cannot_be_read_is_named(store: Path) -> None:
    data = bytearray((store / "postbus.db").read_bytes())
    data[3 * 8192 : 20 * 8192] = bytes(17 * 8192)
    (store / "postbus.db").write_bytes(data)
    assert "SQLite" in sentences(store) or "cannot be read" in sentences(store)


# --- the anchor -------------------------------------------------------------------------------------------------------


def refused(folder: Path) -> CorruptLog:
    with pytest.raises(CorruptLog) as error:
        Store.open(folder)
    assert error.value.hint
    return error.value


def forge(folder: Path, change: Callable[[Anchor], None]) -> None:
    """Write to the anchor as its owner would."""
    anchor = Anchor(Folder(folder).anchor, read_anchor(Folder(folder)).store_id)
    anchor.open(create=False)
    change(anchor)
    anchor.close()


def test_a_missing_anchor_is_refused_and_can_be_accepted(store: Path) -> None:
    (store / "anchor").unlink()
    assert "the anchor file" in sentences(store)
    assert "is missing" in str(refused(store))
    assert "postbus verify --accept" in str(refused(store).hint)
    write_anchor(Folder(store))
    good(store)
    asyncio.run(Store.open(store).close())


@pytest.mark.parametrize("at", [0, 5, 40, 63, 64, 100, 127])
def test_a_damaged_anchor_is_refused_and_can_be_accepted(store: Path, at: int) -> None:
    data = bytearray((store / "anchor").read_bytes())
    data[at] ^= 16
    (store / "anchor").write_bytes(data)
    assert "is damaged in" in sentences(store)
    assert "is damaged in" in str(refused(store))
    write_anchor(Folder(store))
    good(store)


async def test_a_foreign_anchor_is_refused(store: Path, tmp_path: Path) -> None:
    await Store.open(tmp_path / "foreign").close()
    shutil.copy(tmp_path / "foreign" / "anchor", store / "anchor")
    assert "belongs to another store" in sentences(store)
    assert "belongs to another store" in str(refused(store))


def test_an_anchor_ahead_of_the_log_is_refused(store: Path) -> None:
    mark = read_anchor(Folder(store)).marks[0]
    forge(store, lambda anchor: anchor.note(0, mark._replace(next_offset=mark.next_offset + 3)))
    assert f"it ends at offset {mark.next_offset} but {mark.next_offset + 3} events were acknowledged" in sentences(
        store
    )
    error = refused(store)
    assert "the log was altered or shortened" in str(error)
    assert (error.stream, error.partition, error.offset) == (JOURNAL, 0, mark.next_offset)


def test_an_anchor_with_another_chain_is_refused(store: Path) -> None:
    mark = read_anchor(Folder(store)).marks[0]
    forge(store, lambda anchor: anchor.note(0, mark._replace(chain=bytes(32))))
    assert "its chain is not the one that was acknowledged" in sentences(store)
    assert "its chain is not the one that was acknowledged" in str(refused(store))


def test_an_anchor_of_more_changes_is_refused(store: Path) -> None:
    state = read_anchor(Folder(store))
    forge(store, lambda anchor: anchor.count(state.changes + 1))
    assert "changes to readers and streams were acknowledged" in sentences(store)
    assert "changes to readers and streams were acknowledged" in str(refused(store))


def test_an_anchor_of_a_stream_that_is_gone_is_refused(store: Path) -> None:
    forge(store, lambda anchor: anchor.note(9, Mark(99, 0, 0, 1, bytes(32))))
    assert "stream 99 was there before and is gone" in str(refused(store))


def test_an_anchor_that_lags_is_fine(store: Path) -> None:
    def lag(anchor: Anchor) -> None:
        anchor.note(0, mark._replace(next_offset=0))
        anchor.count(0)

    mark = read_anchor(Folder(store)).marks[0]
    forge(store, lag)
    good(store)
    asyncio.run(Store.open(store).close())


# --- start-up ---------------------------------------------------------------------------------------------------------


BESIDE = ["changes undone", "stream gone", "cursor", "reader", "stream", "partition", "layout", "index gone"]


@pytest.mark.parametrize("name", ["payload", "cut off", "text that is no text", *BESIDE])
def test_start_up_refuses_what_was_altered_or_shortened_at_its_end(store: Path, name: str) -> None:
    statement, _ = DAMAGE[name]
    for middle in ("77", "90"):
        statement = statement.replace(f'"offset" = {middle}', '"offset" = 175').replace(f" {middle}", " 175")
    harm(store, statement)
    error = refused(store)
    assert "altered or shortened" in str(error)
    for word in ("postbus verify", "postbus restore", "postbus salvage"):
        assert word in str(error.hint)


def test_start_up_refuses_what_sqlite_cannot_read(store: Path) -> None:
    (store / "postbus.db").write_bytes(b"this is no database, whatever its name says" * 999)
    error = refused(store)
    assert "is damaged" in str(error)
    assert "postbus salvage" in str(error.hint)


async def test_a_commit_lost_with_the_end_of_the_wal_is_noticed(tmp_path: Path) -> None:
    """Cursors are covered by no chain: the anchor counts their changes."""
    async with opened(tmp_path / "store") as log:
        await log.append(JOURNAL, facts(9))
        await log.ensure_consumer(JOURNAL, "reader", EARLIEST)
        await log.commit(JOURNAL, "reader", 3)
        before = (tmp_path / "store" / "postbus.db-wal").stat().st_size
        await log.commit(JOURNAL, "reader", 7)
        after = (tmp_path / "store" / "postbus.db-wal").stat().st_size
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
    with (tmp_path / "copy" / "postbus.db-wal").open("r+b") as wal:
        assert before < after
        wal.truncate(before)
    assert "changes to readers and streams were acknowledged" in sentences(tmp_path / "copy")
    assert "changes to readers and streams were acknowledged" in str(refused(tmp_path / "copy"))
