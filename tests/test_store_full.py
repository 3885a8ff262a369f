"""A full disk: appends are refused, reading and acknowledging go on, appends resume with room, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from postbus.log.sqlite import SqliteLog
from postbus.model import StorageFailed, StorageFull
from postbus.store.backup import check_store
from postbus.store.folder import RESERVE_BYTES
from tests.faults.scene import EARLIEST, JOURNAL, every_event, fact

SIZE_MIB = 44
PAYLOAD = b'"' + b"x" * 4000 + b'"'


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 44 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m,mode=700", "tmpfs", str(tmp_path / "small")]
    (tmp_path / "small").mkdir()
    try:
        done = subprocess.run(mount, check=False, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command; the quota tests below stand in for a real small disk")
    if done.returncode:
        pytest.skip("mounting is not permitted here; the quota tests below stand in for a real small disk")
    try:
        yield tmp_path / "small"
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "small")], check=True)


async def fill(log: SqliteLog, acknowledged: list[int]) -> StorageFull:
    """Append until the disk is full."""
    for _ in range(20_000):
        try:
            (receipt,) = await log.append(JOURNAL, [fact(PAYLOAD)])
        except StorageFull as error:
            return error
        acknowledged.append(receipt.offset)
    raise AssertionError("the disk was never full")


async def refill(log: SqliteLog, acknowledged: list[int]) -> None:
    """Wait until an append goes through again."""
    for _ in range(400):
        with contextlib.suppress(StorageFull):
            (receipt,) = await log.append(JOURNAL, [fact(PAYLOAD)])
            acknowledged.append(receipt.offset)
            return
        await asyncio.sleep(0.02)
    raise AssertionError("appends do not resume")


async def nothing_lost(folder: Path, acknowledged: list[int]) -> None:
    assert check_store(folder).problems == []
    log = SqliteLog.open(folder)
    assert [event.offset for event in await every_event(log)] == acknowledged == list(range(len(acknowledged)))
    await log.close()


async def test_a_full_disk_stops_appends_only(small: Path) -> None:
    folder, acknowledged = small / "store", list[int]()
    log = SqliteLog.open(folder)
    await log.ensure_stream(JOURNAL)
    await log.ensure_consumer(JOURNAL, "reader", EARLIEST)
    ballast = small / "ballast"
    ballast.write_bytes(b"x" * (8 << 20))
    for _ in range(2):
        error = await fill(log, acknowledged)
        assert "the disk is full" in str(error)
        assert error.hint is not None
        assert log.store.writer.full
        assert not log.store.writer.failed
        with pytest.raises(StorageFull):
            await log.append(JOURNAL, [fact(PAYLOAD)])
        # Reading and acknowledging go on, for as long as an operator may need: many more commits than pages are free.
        events = await every_event(log)
        assert [event.offset for event in events] == acknowledged
        log._published.forget()
        assert len(await every_event(log)) == len(acknowledged)
        for number in range(500):
            await log.reset(JOURNAL, "reader", EARLIEST)
            assert (await log.commit(JOURNAL, "reader", number % 100)).moved
        assert len((await log.read(JOURNAL, "reader", 10)).events) == 10
        if ballast.exists():
            ballast.unlink()
        else:  # the operator throws away what is consumed
            committed = (await log.get_consumer_lag(JOURNAL, "reader")).partitions[0].committed
            trimmed = await log.trim(JOURNAL, before=committed)
            assert trimmed.removed > 0
            break
        await refill(log, acknowledged)
    await log.close()
    assert check_store(folder).problems == []
    log = SqliteLog.open(folder)
    assert [event.offset for event in await every_event(log)] == acknowledged[committed:]
    await log.close()


def stuff(folder: Path) -> Path:
    """Use up what room is left."""
    with (folder / "rest").open("wb", buffering=0) as rest, contextlib.suppress(OSError):
        while True:
            rest.write(b"x" * 4096)
    return folder / "rest"


@pytest.mark.parametrize("reserve", [True, False])
async def test_a_store_on_a_full_disk_opens_with_its_reserve_only(small: Path, reserve: bool) -> None:
    folder, acknowledged = small / "store", list[int]()
    log = SqliteLog.open(folder)
    await log.ensure_stream(JOURNAL)
    await log.ensure_consumer(JOURNAL, "reader", EARLIEST)
    for _ in range(50):
        acknowledged.append((await log.append(JOURNAL, [fact(PAYLOAD)]))[0].offset)
    await log.close()
    if not reserve:
        log.store.folder.release_reserve()
    rest = stuff(small)
    if not reserve:
        with pytest.raises(StorageFull) as refused:
            SqliteLog.open(folder)
        assert refused.value.hint == "free some space"
        rest.unlink()
    log = SqliteLog.open(folder)
    assert [event.offset for event in await every_event(log)] == acknowledged
    assert (await log.commit(JOURNAL, "reader", 10)).moved
    if reserve:
        await fill(log, acknowledged)
        rest.unlink()
    await refill(log, acknowledged)
    await log.close()
    await nothing_lost(folder, acknowledged)


# --- a quota instead of a disk: wherever mounting is not permitted ----------------------------------------------------


class Quota(apsw.VFS):
    """The default VFS with room for so many bytes; files of the store that SQLite does not write do not count."""

    def __init__(self, name: str, room: int) -> None:
        self.name = name
        self.room = room
        self.reserve = 0
        self.given_back = 0
        self.sizes: dict[str, int] = {}
        super().__init__(name, "")

    def xOpen(self, name: apsw.URIFilename | str | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802 - SQLite's name
        path = name.filename() if isinstance(name, apsw.URIFilename) else name or ""
        self.sizes[path] = os.stat(path).st_size if os.path.exists(path) else 0  # noqa: PTH110, PTH116 - a string
        return _Counted(self, name, flags, path)

    def grow(self, path: str, size: int) -> None:
        more = max(size - self.sizes[path], 0)
        if sum(self.sizes.values()) + self.reserve + more > self.room:
            raise apsw.FullError("injected: over quota")
        self.sizes[path] += more

    def hold(self) -> bool:
        """Set a third aside, as the store does with a file."""
        if not self.reserve and sum(self.sizes.values()) + self.room // 3 <= self.room:
            self.reserve = self.room // 3
        return self.reserve > 0

    def give_back(self) -> None:
        self.given_back += self.reserve
        self.reserve = 0


class _Counted(apsw.VFSFile):
    def __init__(self, quota: Quota, name: apsw.URIFilename | str | None, flags: list[int], path: str) -> None:
        self._quota = quota
        self._path = path
        super().__init__("", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802 - SQLite's name
        self._quota.grow(self._path, offset + len(data))
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802 - SQLite's name
        super().xTruncate(newsize)
        self._quota.sizes[self._path] = newsize


@pytest.fixture
def quota(request: pytest.FixtureRequest) -> Iterator[Quota]:
    disk = Quota(f"quota {request.node.name}", 20 << 20)
    yield disk
    disk.unregister()


async def test_over_quota_appends_stop_and_resume(
    tmp_path: Path, quota: Quota, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reserve belongs to the real disk, so here it is the quota that the store gives back."""
    monkeypatch.setattr("postbus.store.folder.Folder.release_reserve", lambda _: quota.give_back())
    monkeypatch.setattr("postbus.store.folder.Folder.hold_reserve", lambda _: quota.hold())
    acknowledged: list[int] = []
    log = SqliteLog.open(tmp_path, vfs=quota.name)
    await log.ensure_stream(JOURNAL)
    await log.ensure_consumer(JOURNAL, "reader", EARLIEST)
    await fill(log, acknowledged)
    assert [event.offset for event in await every_event(log)] == acknowledged
    with pytest.raises(StorageFull):
        await log.append(JOURNAL, [fact(PAYLOAD)])
    for offset in range(100):
        assert (await log.commit(JOURNAL, "reader", offset)).moved
    quota.room += 20 << 20
    await refill(log, acknowledged)
    await log.close()
    await nothing_lost(tmp_path, acknowledged)


async def test_an_acknowledgement_gets_the_reserve_when_it_is_the_first_to_find_the_disk_full(
    tmp_path: Path, quota: Quota, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postbus.store.folder.Folder.release_reserve", lambda _: quota.give_back())
    monkeypatch.setattr("postbus.store.folder.Folder.hold_reserve", lambda _: quota.hold())
    log = SqliteLog.open(tmp_path, vfs=quota.name)
    await log.ensure_stream(JOURNAL)
    await log.ensure_consumer(JOURNAL, "reader", EARLIEST)
    await log.append(JOURNAL, [fact(number) for number in range(50)])
    quota.room = sum(quota.sizes.values()) + quota.reserve
    for offset in range(50):
        assert (await log.commit(JOURNAL, "reader", offset)).moved
    assert quota.given_back > 0
    await log.close()
    assert check_store(tmp_path).ok


async def test_refused_appends_leave_their_neighbours_alone(
    tmp_path: Path, quota: Quota, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postbus.store.folder.Folder.hold_reserve", lambda _: False)  # stays full, however slow this is
    acknowledged: list[int] = []
    log = SqliteLog.open(tmp_path, vfs=quota.name)
    await log.ensure_stream(JOURNAL)
    await log.ensure_consumer(JOURNAL, "reader", EARLIEST)
    await fill(log, acknowledged)
    quota.room += 1 << 20
    work = [
        log.append(JOURNAL, [fact(PAYLOAD)]),
        log.commit(JOURNAL, "reader", 5),
        log.append(JOURNAL, [fact(PAYLOAD)]),
        log.commit(JOURNAL, "reader", 7),
    ]
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    assert [isinstance(outcome, StorageFull) for outcome in outcomes] == [True, False, True, False]
    assert not any(isinstance(outcome, StorageFailed) for outcome in outcomes)
    quota.room += RESERVE_BYTES
    await log.close()
    await nothing_lost(tmp_path, acknowledged)
