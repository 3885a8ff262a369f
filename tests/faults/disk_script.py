"""The scripted workload under a failing disk, and what must hold during and after it.

``python -m tests.faults.disk_script GROUND START KIND ONCE AT...`` runs it once per AT (``-1``: without a fault) and
prints one JSON line each. START is ``fresh`` (the store is made under the fault) or ``built`` (it was there before).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
import traceback
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import apsw

from postbus.log.sqlite import SqliteLog
from postbus.model import PostbusError, Receipt, StorageError, StorageFailed, StreamSettings
from postbus.store import Folder
from postbus.store.backup import check_store
from postbus.store.database import connect
from tests.faults.disk import Disk
from tests.faults.scene import EARLIEST, every_event, fact

T = TypeVar("T")
ONE, MANY, GONE = "local.default.one", "local.default.many", "local.default.gone"
PATIENCE_S = 60.0


class Script:
    """One run: what was tried, what was acknowledged, and what the store said instead."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.folder = folder
        self.disk = disk
        self.log: SqliteLog | None = None
        self.acked: dict[tuple[str, int, int], bytes] = {}
        self.sizes: dict[int, int] = {}
        self.facts: dict[str, int] = {}
        self.refused: list[str] = []
        self.failed = False
        self.batches = 0
        self.removable: set[tuple[str, int, int]] = set()  # what the script itself has tried to remove

    async def run(self) -> None:
        if not await self.open():
            return
        log = self.log
        assert log is not None
        await self.write("make one", log.ensure_stream(ONE))
        await self.write("make many", log.ensure_stream(MANY, StreamSettings(partitions=3)))
        await self.write("make gone", log.ensure_stream(GONE))
        await self.append(ONE, 1)
        await self.append(MANY, 7)
        await asyncio.gather(*(self.append(stream, 1) for stream in (ONE, MANY, GONE) * 4))
        await self.append(ONE, 2, text="x" * 20_000)
        await self.write("make reader", log.ensure_consumer(ONE, "reader", EARLIEST))
        if await self.write("commit", log.commit(ONE, "reader", 2)):
            self.facts["committed"] = 2
        await self.look()
        await self.checkpoint()
        await self.append(ONE, 3)
        self.removable = {place for place in self.acked if place[0] == GONE or (place[0] == ONE and place[2] < 2)}
        if trimmed := await self.write("trim", log.trim(ONE, before=2)):
            self.facts["first"] = trimmed.first_offsets[0]
        if await self.write("delete", self.delete(log)):
            self.facts["deleted"] = 1
        await self.write("project", self.project(log), idle=not self.acked)
        await self.append(MANY, 5)
        await self.look()
        if await self.write("commit", log.commit(ONE, "reader", 4)):
            self.facts["committed"] = 4
        await self.checkpoint()
        await self.append(ONE, 1)
        await self.look()
        await asyncio.wait_for(log.close(), PATIENCE_S)

    async def open(self) -> bool:
        """Open the store; a fault that happens once may refuse it once."""
        for _ in range(3):
            try:
                self.log = await asyncio.wait_for(asyncio.to_thread(self._open), PATIENCE_S)
            except PostbusError as error:
                self.refused.append(f"open {type(error).__name__}")
            else:
                return True
        assert self.disk.for_good, "a fault that happened once keeps the store shut"
        return False

    def _open(self) -> SqliteLog:
        return SqliteLog.open(self.folder, vfs=self.disk.name)

    async def write(self, what: str, write: Awaitable[T], *, idle: bool = False) -> T | None:
        """Try a write; None when the store refuses it, which after a failed one it must unless there is none to do."""
        failed = self.failed
        try:
            done = await asyncio.wait_for(write, PATIENCE_S)
        except PostbusError as error:
            if not isinstance(error, StorageError) and not self.refused:  # what was refused before may be missing now
                raise
            self.refused.append(f"{what} {type(error).__name__}")
            self.failed = self.failed or isinstance(error, StorageFailed)
            return None
        assert idle or not failed, f"{what} went through although the store had failed"
        return done

    async def append(self, stream: str, size: int, text: str = "") -> None:
        assert self.log is not None
        batch, self.batches = self.batches, self.batches + 1
        drafts = [
            fact({"batch": batch, "index": index, "text": text}, key=f"k{index}", native_id=f"{batch}-{index}")
            for index in range(size)
        ]
        self.sizes[batch] = size
        receipts: list[Receipt] | None = await self.write("append", self.log.append(stream, drafts))
        for draft, receipt in zip(drafts, receipts or (), strict=False):
            self.acked[stream, receipt.partition, receipt.offset] = draft.payload_json

    async def delete(self, log: SqliteLog) -> bool:
        await log.delete_stream(GONE)
        return True

    async def project(self, log: SqliteLog) -> bool:
        await log.projections.catch_up()
        return True

    async def checkpoint(self) -> None:
        """Have the upkeep thread copy the WAL into the database, as it does when the WAL is long."""
        assert self.log is not None
        upkeep, done = self.log.store._upkeep, threading.Event()
        checkpoint = type(upkeep)._checkpoint

        def watched() -> None:
            try:
                checkpoint(upkeep)
            finally:
                done.set()

        upkeep._checkpoint = watched  # type: ignore[method-assign]
        upkeep._pages = upkeep._due_pages = 100_000
        upkeep._wake.set()
        assert await asyncio.to_thread(done.wait, PATIENCE_S), "the checkpoint hangs"
        await asyncio.sleep(0.01)
        self.failed = self.failed or self.log.store.writer.failed

    async def look(self) -> None:
        """Read what was acknowledged; only a disk that fails for good, or fails right now, may keep it back."""
        assert self.log is not None
        fired = bool(self.disk.fired)
        try:
            found = await self._everything(self.log)
        except PostbusError as error:
            self.refused.append(f"look {type(error).__name__}")
            if fired and not self.disk.for_good:  # the disk is well again
                raise
        else:
            self._compare(found)

    async def _everything(self, log: SqliteLog) -> dict[tuple[str, int, int], bytes]:
        log._published.forget()  # ask the disk, not the memory
        found: dict[tuple[str, int, int], bytes] = {}
        for stream in await log.streams():
            for partition in range(stream.settings.partitions):
                for event in await every_event(log, stream.name, partition):
                    found[stream.name, partition, event.offset] = event.payload_json
        return found

    def _compare(self, found: dict[tuple[str, int, int], bytes]) -> None:
        for place, raw in self.acked.items():
            gone = place in self.removable and place not in found
            assert gone or found.get(place) == raw, f"{place} was acknowledged and is gone"

    async def after(self) -> None:
        """Open the store on a healthy disk and check all that was acknowledged."""
        log = SqliteLog.open(self.folder)
        try:
            found = await self._everything(log)
            self._compare(found)
            self._all_or_nothing(found)
            if "committed" in self.facts:
                reader = await log.get_consumer(ONE, "reader")
                assert reader is not None
                assert reader.cursors[0].committed >= self.facts["committed"]
            if "first" in self.facts:
                assert (await log.get_stream_stats(ONE)).partitions[0].first_offset == self.facts["first"]
            assert "deleted" not in self.facts or GONE not in [stream.name for stream in await log.streams()]
            topics = {event.id for event in await log.projections.by_topic(">", 10_000)}
            assert topics == {f"{stream}/{partition}/{offset}" for stream, partition, offset in found}
            await log.ensure_stream(ONE)
            await log.append(ONE, [fact("goes on")])
        finally:
            await log.close()
        report = check_store(self.folder)
        assert report.ok, report.problems

    def _all_or_nothing(self, found: dict[tuple[str, int, int], bytes]) -> None:
        parts: dict[int, int] = {}
        for (stream, _, _), raw in found.items():
            value = json.loads(raw)
            if isinstance(value, dict) and stream == MANY:
                parts[value["batch"]] = parts.get(value["batch"], 0) + 1
        for batch, count in parts.items():
            assert count == self.sizes[batch], f"{count} of {self.sizes[batch]} events of a batch are there"


async def case(folder: Path, start: str, kind: str, at: int, *, for_good: bool) -> dict[str, Any]:
    if start == "built":
        log = SqliteLog.open(folder)
        await log.ensure_stream(ONE)
        await log.append(ONE, [fact({"batch": -1, "index": 0}), fact(1)])
        other = connect(Folder(folder))
        other.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        other.close()
        await log.append(ONE, [fact(2)])
        await log.close()
    disk = Disk(f"failing {at}", at, for_good=for_good, kind=kind)
    script = Script(folder, disk)
    verdict = "ok"
    try:
        await script.run()
        disk.at = -1
        await script.after()
    except BaseException:  # noqa: BLE001 - the parent decides
        verdict = traceback.format_exc()
    disk.at = -1
    calls = disk.calls
    disk.unregister()
    shutil.rmtree(folder, ignore_errors=True)
    return {"at": at, "calls": calls, "fired": disk.fired, "refused": script.refused, "verdict": verdict}


def main(ground: str, start: str, kind: str, once: str, *indexes: str) -> None:
    for at in indexes:
        result = asyncio.run(case(Path(ground) / at, start, kind, int(at), for_good=once != "once"))
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
