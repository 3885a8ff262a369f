"""The embedded database: one folder, one writer, many readers.

Opening checks the log against its anchor and refuses an altered or shortened one. Writes go through doors (see
``writer.py``); reads run on reader threads with connections of their own and never wait for the writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import apsw

from postbus.clock import Clock, SystemClock
from postbus.model import (
    Backpressure,
    Durability,
    NotFound,
    StorageError,
    StorageFull,
)
from postbus.store.anchor import Anchor, Mark
from postbus.store.folder import Folder
from postbus.store.migrations import migrate
from postbus.store.refusals import MISREAD, refusal
from postbus.store.upkeep import Upkeep
from postbus.store.verify import check_heads
from postbus.store.writer import Call, Door, Writer

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

__all__ = ["Store", "connect"]

T = TypeVar("T")

PAGE_BYTES = 8192
CACHE_KIB = 32 * 1024
READERS = 2
BUSY_MS_MAX = 10_000
BACKPRESSURE_S = 0.5
HEAVY = 1_000_000


def connect(
    folder: Folder, *, durability: Durability = Durability.FULL, vfs: str | None = None, write: bool = True
) -> apsw.Connection:
    """Open a connection with the settings every Postbus connection has."""
    flags = apsw.SQLITE_OPEN_READWRITE if write else apsw.SQLITE_OPEN_READONLY
    db: apsw.Connection | None = None
    try:
        db = apsw.Connection(str(folder.database), flags=flags, vfs=vfs)
        db.set_busy_timeout(BUSY_MS_MAX)
        if write:
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            _use_wal(db)
            db.execute(f"PRAGMA synchronous = {'FULL' if durability is Durability.FULL else 'NORMAL'}")
            db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        db.execute("PRAGMA temp_store = MEMORY")
        db.execute("PRAGMA cell_size_check = ON")
    except apsw.Error as error:
        if db is not None:
            with contextlib.suppress(apsw.Error):
                db.close()
        raise refusal(folder, error, "cannot be opened") from error
    return db


def _use_wal(db: apsw.Connection) -> None:
    """Switch to WAL; several processes may do so to a new store at once, and SQLite asks no busy handler here."""
    deadline = time.monotonic() + BUSY_MS_MAX / 1000
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except apsw.BusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(random.uniform(0.001, 0.01))  # noqa: S311 - jitter
        else:
            return


class Store:
    """An open store. Make one with ``Store.open``; several processes may have one folder open."""

    def __init__(self, folder: Folder, clock: Clock, durability: Durability, vfs: str | None) -> None:
        self.folder = folder
        self.clock = clock
        self.durability = durability
        self._vfs = vfs
        self._local = threading.local()
        self._reader_connections: list[apsw.Connection] = []
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="postbus-reader")
        self._closed = False
        self._late_marks: dict[int, Mark] = {}
        self._late_changes = 0
        self._calls = {grows: Call(grows=grows) for grows in (False, True)}
        self._db = connect(folder, durability=durability, vfs=vfs)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        durability: Durability | str = Durability.FULL,
        vfs: str | None = None,
        create: bool = True,
    ) -> Store:
        """Open the store in a folder, making it when ``create``.

        Raises ``NotFound`` for a folder without a store when not ``create``, ``CorruptLog`` for an altered or shortened
        log, ``StorageError`` when it cannot be opened.
        """
        folder = Folder(path)
        if not create and not folder.exists():
            message = f"there is no store in {folder.path}"
            raise NotFound(message, hint="name the data folder with --data or POSTBUS_DATA")
        folder.create()
        try:
            return cls._opened(folder, clock or SystemClock(), Durability(durability), vfs)
        except StorageFull:
            if not folder.reserve.exists():
                raise
            folder.release_reserve()  # SQLite needs a little room to open a store at all
            return cls._opened(folder, clock or SystemClock(), Durability(durability), vfs)

    @classmethod
    def _opened(cls, folder: Folder, clock: Clock, durability: Durability, vfs: str | None) -> Store:
        store = cls(folder, clock, durability, vfs)
        try:
            store._start()
        except BaseException as error:
            store._let_go()
            if isinstance(error, (apsw.Error, OSError, *MISREAD)):
                raise refusal(folder, error, "cannot be opened") from error
            raise
        return store

    def _start(self) -> None:
        migrate(self._db)
        self.id = self._store_id()
        self.anchor = Anchor(self.folder.anchor, self.id)
        empty = not self._db.execute("SELECT EXISTS (SELECT 1 FROM partitions)").get
        self.anchor.open(create=empty)
        with self._db:  # one snapshot: others may write meanwhile
            check_heads(self._db, self.anchor.state())
        self.folder.hold_reserve()
        self.writer = Writer(self._db, self.folder, self._count)
        db = connect(self.folder, durability=self.durability, vfs=self._vfs)
        self._upkeep = Upkeep(db, self.folder.wal, self.anchor, self.writer)
        self._db.set_wal_hook(self._upkeep.committed)

    def _store_id(self) -> str:
        statement = "INSERT INTO store_facts VALUES ('store_id', ?) ON CONFLICT DO NOTHING"
        self._db.execute(statement, (self.clock.new_id(),))
        return str(self._db.execute("SELECT value FROM store_facts WHERE name = 'store_id'").get)

    # --- writing ---

    def submit(self, door: Door, item: object, weight: int = 1) -> asyncio.Future[Any]:
        """Queue one item for a door; see ``Writer.submit``."""
        return self.writer.submit(door, item, weight)

    async def write(self, call: Callable[[apsw.Connection], T], *, grows: bool = True, heavy: bool = False) -> T:
        """Run a function of the write connection inside the next transaction and return its result when durable.

        ``heavy`` says that it takes long, so that it runs on the writer thread and not on the loop.
        """
        result: T = await self.submit(self._calls[grows], call, HEAVY if heavy else 1)
        return result

    async def room(self) -> None:
        """Wait for room in the queue; raises ``Backpressure`` when there is none for half a second."""
        deadline = self.clock.monotonic_s() + BACKPRESSURE_S
        while self.writer.crowded:
            if self.clock.monotonic_s() >= deadline:
                message = f"the queue of writes stayed full for {BACKPRESSURE_S} s"
                raise Backpressure(message, hint="publish more slowly, or in batches")
            await asyncio.sleep(0.005)

    def note(self, slot: int, mark: Mark) -> None:
        """Anchor a partition's head. Called by doors in ``committed``."""
        if self._anchored(self.anchor.note, slot, mark):
            if self._late_marks:
                self._late_marks.pop(slot, None)
        else:
            self._late_marks[slot] = mark

    def _count(self, changes: int) -> None:
        self._late_changes = 0 if self._anchored(self.anchor.count, changes) else changes

    def _anchored(self, write: Callable[..., None], *values: Any) -> bool:
        """Write to the anchor; False when that has to wait until the store is closed."""
        if self.durability is not Durability.FULL:
            return False  # a relaxed commit may be lost in a power cut; anchor it only once it is on disk
        try:
            write(*values)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # no room: the anchor lags, which is allowed
                self.writer.fail(error)
            return False
        return True

    # --- reading ---

    async def read(self, call: Callable[[apsw.Connection], T]) -> T:
        """Run a function of a read connection on a reader thread, in one snapshot."""
        if self._closed:
            raise StorageError("the store is closed")
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._read, call)

    def _read(self, call: Callable[[apsw.Connection], T]) -> T:
        db: apsw.Connection | None = getattr(self._local, "db", None)
        if db is None:
            db = self._local.db = connect(self.folder, vfs=self._vfs, write=False)
            self._reader_connections.append(db)
        try:
            db.execute("BEGIN")
            try:
                return call(db)
            finally:
                if db.in_transaction:  # SQLite ends it by itself on some errors
                    db.execute("COMMIT")
        except (apsw.Error, *MISREAD) as error:
            raise refusal(self.folder, error, "could not be read") from error

    # --- ending ---

    async def close(self) -> None:
        """Commit what is queued, checkpoint, anchor and close. Idempotent."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.writer.close()
        self._upkeep.stop()
        if not self.writer.failed:
            with contextlib.suppress(apsw.Error, OSError):
                if self._late_marks or self._late_changes:
                    self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_FULL)
                    for slot, mark in self._late_marks.items():
                        self.anchor.note(slot, mark)
                    if self._late_changes:
                        self.anchor.count(self._late_changes)
                self.anchor.sync()
        self._let_go()

    def _let_go(self) -> None:
        self._closed = True
        self._pool.shutdown()
        writer: Writer | None = getattr(self, "writer", None)
        if writer is not None:
            writer.close()
        upkeep: Upkeep | None = getattr(self, "_upkeep", None)
        connections = [*self._reader_connections, self._db]
        if upkeep is not None:
            upkeep.stop()
            connections.insert(0, upkeep._db)  # noqa: SLF001 - closed with its store
        for db in connections:
            with contextlib.suppress(apsw.Error):
                db.close()
        anchor = getattr(self, "anchor", None)
        if anchor is not None:
            with contextlib.suppress(OSError):
                anchor.close()
