"""Salvage: damage costs only what it hit, and every event keeps its address."""

from __future__ import annotations

import asyncio
import shutil
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import apsw
import pytest

from postbus.clock import Clock, SystemClock
from postbus.model import Conflict, NotFound, StorageError
from postbus.store import Folder, Store, records, salvage
from postbus.store.backup import check_store
from postbus.store.database import PAGE_BYTES, connect
from postbus.store.salvage import Salvaged
from tests.conformance.fake_clock import FakeClock
from tests.faults.scene import AGAIN, EARLIEST, JOURNAL, WIDE, build, dump, every_event, fact, facts, opened, varied

Address = tuple[int, int, int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose events fill many pages, all of them in the database file."""
    folder = tmp_path_factory.mktemp("salvage") / "model"
    asyncio.run(_make(folder))
    return folder


async def _make(folder: Path) -> None:
    async with opened(folder) as log:
        await varied(log, 150)
        await log.append(JOURNAL, [fact("z" * 300, native_id=f"big-{number}") for number in range(3000)])
        await log.append(JOURNAL, [fact("w" * 50_000)])
        await log.commit(JOURNAL, "reader", 2000)


@pytest.fixture
def store(model: Path, tmp_path: Path) -> Path:
    shutil.copytree(model, tmp_path / "store", ignore=shutil.ignore_patterns("reserve"))
    return tmp_path / "store"


def events(folder: Path) -> dict[Address, tuple[Any, ...]]:
    return {(row[0], row[1], row[2]): row for row in dump(folder)["by row"]}


def pages(folder: Path, query: str) -> list[int]:
    """Return the numbers of pages that ``dbstat`` names."""
    db = connect(Folder(folder), write=False)
    try:
        return [number for (number,) in db.execute(f"SELECT pageno FROM dbstat WHERE {query}")]
    finally:
        db.close()


def wipe(folder: Path, page: int) -> None:
    with (folder / "postbus.db").open("r+b") as file:
        file.seek((page - 1) * PAGE_BYTES)
        file.write(b"\xa5" * PAGE_BYTES)


def saved(folder: Path, whole: dict[Address, tuple[Any, ...]]) -> tuple[Salvaged, set[Address]]:
    """Salvage, check what must always hold, and return the addresses that are lost."""
    target = folder.with_name("saved")
    result = salvage(folder, target)
    assert check_store(target).problems == []
    asyncio.run(Store.open(target).close())
    found = events(target)
    assert found.keys() == whole.keys()
    lost = {address for address, row in found.items() if row[3] == "postbus.lost"}
    assert {address: row for address, row in found.items() if address not in lost} == {
        address: row for address, row in whole.items() if address not in lost
    }
    assert (result.events, result.lost) == (len(whole) - len(lost), len(lost))
    return result, lost


# --- nothing is wrong -------------------------------------------------------------------------------------------------


def test_a_good_store_is_copied_whole(store: Path) -> None:
    result, lost = saved(store, events(store))
    assert lost == set()
    assert result.notes == []
    assert (result.streams, result.consumers) == (3, 2)
    before, after = dump(store), dump(store.with_name("saved"))
    for name in ("by position", "streams", "partitions", "identities", "readers", "cursors"):
        assert after[name] == before[name], name
    assert {row[4] for row in after["rows"]} == {row[4] for row in before["rows"]}, "the chains are the same"


def test_the_source_is_only_read(store: Path) -> None:
    before = {path.name: path.read_bytes() for path in store.iterdir()}
    salvage(store, store.with_name("saved"))
    after = {path.name: path.read_bytes() for path in store.iterdir()}
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize("clock", [FakeClock(), SystemClock()], ids=["standing clock", "running clock"])
async def test_events_that_were_removed_stay_removed(tmp_path: Path, clock: Clock) -> None:
    """Freed pages still hold them; the chain and the anchor tell them from what is live."""
    async with opened(tmp_path / "store", clock=clock) as log:
        await log.append(JOURNAL, [fact("t" * 200) for _ in range(900)])
        await log.trim(JOURNAL, before=800)
        for life, count in enumerate((900, 700, 500, 300, 40)):
            await log.ensure_stream(AGAIN)
            await log.append(AGAIN, [fact(f"{life} {number} " * 30) for number in range(count)])
            await log.append(JOURNAL, facts(10))
            if life < 4:
                await log.delete_stream(AGAIN)
    whole = events(tmp_path / "store")
    result = await asyncio.to_thread(saved, tmp_path / "store", whole)
    assert result[1] == set()


async def test_free_pages_full_of_an_earlier_life_do_not_matter(tmp_path: Path) -> None:
    """SQLite leaves what it likes in pages it does not use; here every one of them holds another life of the stream."""
    store = tmp_path / "store"
    async with opened(store, clock=FakeClock()) as log:  # at one moment, so that no clock helps
        await log.append(JOURNAL, [fact("filler" * 900) for _ in range(100)])
        await log.ensure_stream(AGAIN)
        await log.append(AGAIN, [fact(f"old {number}") for number in range(90)])
    ghost = (store / "postbus.db").read_bytes()
    async with opened(store, clock=FakeClock()) as log:
        await log.delete_stream(AGAIN)
        await log.trim(JOURNAL, before=90)
        await log.ensure_stream(AGAIN)
        await log.append(AGAIN, [fact(f"new {number}") for number in range(40)])
        await log.append(AGAIN, [fact("x" * 100_000)])
    whole = events(store)
    used = set(pages(store, "TRUE"))
    data = bytearray((store / "postbus.db").read_bytes())
    images = [ghost[at : at + PAGE_BYTES] for at in range(0, len(ghost), PAGE_BYTES)]
    (old,) = [image for image in images if b'"old 7"' in image]
    free = [number for number in range(1, len(data) // PAGE_BYTES + 1) if number not in used]
    for number in free:
        data[(number - 1) * PAGE_BYTES : number * PAGE_BYTES] = old
    (store / "postbus.db").write_bytes(data)
    assert (min(free) - 1) * PAGE_BYTES < data.index(b'"new 7"'), "the ghosts would be found after the living"
    _, lost = await asyncio.to_thread(saved, store, whole)
    assert lost == set()


# --- one thing is wrong -----------------------------------------------------------------------------------------------


def test_one_altered_event_is_lost_alone(store: Path) -> None:
    whole = events(store)
    db = connect(Folder(store))
    db.execute("UPDATE events SET payload = x'30' WHERE native_id = 'big-1000'")
    db.close()
    result, lost = saved(store, whole)
    assert lost == {address for address, row in whole.items() if row[11] == "big-1000"}
    placeholder = next(row for address, row in events(store.with_name("saved")).items() if address in lost)
    assert placeholder[3:5] == ("postbus.lost", "postbus")
    assert placeholder[7] == b'{"lost":true}'
    assert result.lost == 1


def test_an_event_that_claims_another_stream_makes_none_up(store: Path) -> None:
    whole = events(store)
    stream_id, partition, offset = next(iter(whole))
    db = connect(Folder(store))
    where = 'WHERE stream_id = ? AND partition = ? AND "offset" = ?'
    db.execute(f"UPDATE events SET stream_id = stream_id + 64 {where}", (stream_id, partition, offset))
    db.close()
    result, lost = saved(store, whole)
    assert lost == {(stream_id, partition, offset)}
    assert result.lost == 1


async def test_what_lies_beside_the_log_is_taken_over(store: Path, tmp_path: Path) -> None:
    db = connect(Folder(store))
    db.execute("INSERT INTO subscription_registry VALUES ('local.default', 'billing', '{}', 1)")
    db.close()
    assert salvage(store, tmp_path / "saved").notes == []
    kept = connect(Folder(tmp_path / "saved"), write=False)
    try:
        assert list(kept.execute("SELECT subscription FROM subscription_registry")) == [("billing",)]
    finally:
        kept.close()


def test_one_leaf_page_costs_its_events_only(store: Path) -> None:
    whole = events(store)
    leaves = pages(store, "name = 'events' AND pagetype = 'leaf'")
    wipe(store, leaves[len(leaves) // 2])
    _, lost = saved(store, whole)
    offsets = sorted(offset for _, _, offset in lost)
    assert 1 <= len(lost) <= 40
    assert offsets == list(range(offsets[0], offsets[-1] + 1))


@pytest.mark.parametrize("tree", ["events", "events_position", "identities"])
def test_an_interior_page_costs_nothing(store: Path, tree: str) -> None:
    whole, before = events(store), dump(store)
    for page in pages(store, f"name = '{tree}' AND pagetype = 'internal'"):
        wipe(store, page)
    _, lost = saved(store, whole)
    assert lost == set()
    assert dump(store.with_name("saved"))["cursors"] == before["cursors"]
    assert dump(store.with_name("saved"))["identities"] == before["identities"]


@pytest.mark.parametrize("part", ["header", "page"])
def test_the_first_page_costs_nothing(store: Path, part: str) -> None:
    whole, before = events(store), dump(store)
    with (store / "postbus.db").open("r+b") as file:
        file.write(bytes(100 if part == "header" else PAGE_BYTES))
    result, lost = saved(store, whole)
    assert lost == set()
    assert any("cannot be opened" in note for note in result.notes)
    after = dump(store.with_name("saved"))
    for name in ("streams", "partitions", "readers", "cursors", "identities"):
        assert after[name] == before[name], name


def test_a_lost_page_of_cursors_costs_places_not_events(store: Path) -> None:
    whole = events(store)
    for page in pages(store, "name = 'cursors'"):
        wipe(store, page)
    result, lost = saved(store, whole)
    assert lost == set()
    assert result.consumers == 2
    assert any("cursors could not be read" in note for note in result.notes)


def test_a_stream_whose_name_is_lost_keeps_its_events(store: Path) -> None:
    whole = events(store)
    for page in pages(store, "name = 'stream_registry'"):
        wipe(store, page)
    result, lost = saved(store, whole)
    assert lost == set()
    assert len([note for note in result.notes if "its events are in salvaged.streams.stream-" in note]) == 3
    names = [row[1] for row in dump(store.with_name("saved"))["streams"]]
    assert names == [f"salvaged.streams.stream-{number}" for number in (1, 2, 3)]


def test_a_lost_beginning_of_partitions_costs_nothing(store: Path) -> None:
    whole = events(store)
    for page in pages(store, "name = 'partitions'"):
        wipe(store, page)
    _, lost = saved(store, whole)
    assert lost == set()


def test_a_file_that_was_cut_off_keeps_addresses_for_what_is_lost(store: Path) -> None:
    whole = events(store)
    size = (store / "postbus.db").stat().st_size
    with (store / "postbus.db").open("r+b") as file:
        file.truncate(size - size // 4)
    _, lost = saved(store, whole)
    assert 0 < len(lost) < len(whole) // 2


# --- the WAL ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose process was killed, nearly all of it in the WAL."""
    folder = tmp_path_factory.mktemp("salvage") / "unfinished"
    build(folder, checkpointed=False, rows=60)
    return folder


def frames(folder: Path) -> list[tuple[int, int]]:
    """Return (page, pages in the database after a commit or 0) of each frame of the WAL."""
    data = (folder / "postbus.db-wal").read_bytes()
    return [struct.unpack_from(">II", data, at) for at in range(32, len(data), PAGE_BYTES + 24)]


@pytest.mark.parametrize("where", [0.05, 0.3, 0.5, 0.8, 0.97])
def test_a_damaged_frame_of_the_wal_costs_little(unfinished: Path, tmp_path: Path, where: float) -> None:
    shutil.copytree(unfinished, tmp_path / "whole")
    shutil.copytree(unfinished, tmp_path / "store")
    whole, before = events(tmp_path / "whole"), dump(tmp_path / "whole")
    with (tmp_path / "store" / "postbus.db-wal").open("r+b") as file:
        file.seek(32 + int(len(frames(unfinished)) * where) * (PAGE_BYTES + 24) + 24)
        file.write(b"\xa5" * PAGE_BYTES)
    assert not check_store(tmp_path / "store").ok
    target = tmp_path / "saved"
    salvage(tmp_path / "store", target)
    assert check_store(target).problems == []
    found = events(target)
    missing = [address for address, row in whole.items() if found.get(address) != row]
    assert len(missing) <= 40
    after = dump(target)
    assert after["streams"] == before["streams"]
    assert [row[:5] for row in after["cursors"]] == [row[:5] for row in before["cursors"]]


def test_the_header_of_the_wal_costs_nothing(unfinished: Path, tmp_path: Path) -> None:
    shutil.copytree(unfinished, tmp_path / "whole")
    shutil.copytree(unfinished, tmp_path / "store")
    whole, before = events(tmp_path / "whole"), dump(tmp_path / "whole")
    with (tmp_path / "store" / "postbus.db-wal").open("r+b") as file:
        file.write(bytes(32))
    _, lost = saved(tmp_path / "store", whole)
    assert lost == set()
    after = dump(tmp_path / "saved")
    for name in ("streams", "partitions", "readers", "cursors", "identities"):
        assert after[name] == before[name], name


def test_what_was_written_but_never_committed_is_not_brought_back(tmp_path: Path) -> None:
    """A killed process may leave frames without a commit; nobody was told that they hold."""

    async def write() -> dict[Address, tuple[Any, ...]]:
        async with opened(tmp_path / "store") as log:
            await log.append(JOURNAL, facts(5))
            await log.store.read(lambda db: db.execute("SELECT 1").get)
            db = log.store._db
            db.execute("PRAGMA cache_size = 1")
            db.execute("BEGIN IMMEDIATE")
            query = 'SELECT stream_id, chain, bytes_through FROM events ORDER BY "offset" DESC LIMIT 1'
            stream_id, chain, size = db.execute(query).get
            for offset in range(5, 65):  # as an append would write them
                event = (0, offset, "t", "s", "", None, b"0" * 4000, None, None, None, None, None, 1, 1, "trusted")
                encoded = records.encode(event)
                chain, size = records.link(chain, encoded), size + len(encoded)
                rest = (None, 1, None, None, size, zlib.crc32(encoded, stream_id), chain)
                db.execute(records.insert_statement(1), (stream_id, *event[:12], *rest))
            shutil.copytree(tmp_path / "store", tmp_path / "killed")
            db.execute("ROLLBACK")
        return events(tmp_path / "store")

    whole = asyncio.run(write())
    assert any(commit == 0 for _, commit in frames(tmp_path / "killed")[-3:]), "the cache was not spilled to the WAL"
    _, lost = saved(tmp_path / "killed", whole)
    assert lost == set()


# --- what the result is good for --------------------------------------------------------------------------------------


async def test_a_salvaged_store_goes_on(store: Path, tmp_path: Path) -> None:
    leaves = pages(store, "name = 'events' AND pagetype = 'leaf'")
    wipe(store, leaves[len(leaves) // 2])
    salvage(store, tmp_path / "saved")
    async with opened(tmp_path / "saved") as log:
        head = (await log.get_stream_stats(JOURNAL)).partitions[0].high_water_mark
        (receipt,) = await log.append(JOURNAL, [fact("goes on")])
        assert receipt.offset == head
        lost = [event for event in await every_event(log) if event.topic == "postbus.lost"]
        assert len(lost) == len(await log.projections.by_topic("postbus.lost", 1000)) > 0
        reader = await log.get_consumer(JOURNAL, "reader")
        assert reader is not None
        assert reader.cursors[0].committed == 2000
        assert (await log.get_consumer_lag(WIDE, "reader")).partitions[1].committed == 0
        (again,) = await log.append(JOURNAL, [fact("z" * 300, native_id="big-7")])
        assert again.duplicate
    assert check_store(tmp_path / "saved").ok


async def test_a_cursor_is_never_beyond_the_end(tmp_path: Path) -> None:
    async with opened(tmp_path / "store") as log:
        await log.append(JOURNAL, facts(9))
        await log.ensure_consumer(JOURNAL, "reader", EARLIEST)
        await log.commit(JOURNAL, "reader", 8)
    db = connect(Folder(tmp_path / "store"))
    db.execute('DELETE FROM events WHERE "offset" > 3')
    db.execute("VACUUM")  # nothing is left of them in free pages
    db.close()
    (tmp_path / "store" / "anchor").unlink()
    assert salvage(tmp_path / "store", tmp_path / "saved").lost == 0
    async with opened(tmp_path / "saved") as log:
        assert (await log.get_consumer_lag(JOURNAL, "reader")).total == 0


def test_salvage_names_what_it_needs(store: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no database in"):
        salvage(tmp_path / "nothing", tmp_path / "saved")
    with pytest.raises(Conflict, match="already a store in"):
        salvage(store, store)
    assert not (tmp_path / "saved").exists()


def test_a_salvage_that_fails_leaves_nothing(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise apsw.FullError("injected: no room")

    monkeypatch.setattr(sys.modules["postbus.store.salvage"], "_rebuild", no_room)
    with pytest.raises(StorageError, match="could not be written"):
        salvage(store, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
