"""Upkeep off the commit path: the WAL's length, its checkpoints, the anchor's fsync, and a queue nobody flushes."""

from __future__ import annotations

import errno
import random
import threading
import time
from typing import TYPE_CHECKING

import apsw

from postbus.store.wal import lengthen

if TYPE_CHECKING:
    from pathlib import Path

    from postbus.store.anchor import Anchor
    from postbus.store.writer import Writer

__all__ = ["Upkeep"]

TICK_S = 0.5
CHECKPOINT_PAGES = 1_000
RESTART_S_MAX = 0.5
WAL_BYTES = CHECKPOINT_PAGES * 8216
LASTING_PAGES = 200
"""A store that has written so much is one that stays open."""


class Upkeep:
    """A thread with a connection of its own. A checkpoint that cannot be done now is done later."""

    def __init__(self, db: apsw.Connection, wal: Path, anchor: Anchor, writer: Writer) -> None:
        self._db = db
        self._path = wal
        self._anchor = anchor
        self._writer = writer
        self._pages = 0
        self._due_pages = CHECKPOINT_PAGES
        self._stopping = self._long = False
        self._wake = threading.Event()
        self._restart_until = 0.0
        db.set_busy_handler(self._busy)
        self._thread = threading.Thread(target=self._main, name="postbus-upkeep", daemon=True)
        self._thread.start()

    def committed(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        """Take note of the WAL's length after a commit (SQLite's WAL hook)."""
        if pages < self._pages:  # it was rewound
            self._due_pages = CHECKPOINT_PAGES
        self._pages = pages
        if (pages >= self._due_pages or (pages >= LASTING_PAGES and not self._long)) and not self._wake.is_set():
            self._wake.set()
        return 0

    def stop(self) -> None:
        """End the thread after what it is doing."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _main(self) -> None:
        synced_s = 0.0
        while not self._stopping:
            self._wake.wait(TICK_S)
            self._wake.clear()
            try:
                if self._pages >= self._due_pages:
                    self._checkpoint()
                elif self._pages >= LASTING_PAGES and not self._long:
                    self._lengthen()
                if time.monotonic() - synced_s >= TICK_S:  # not after every checkpoint, and not never under load
                    synced_s = time.monotonic()
                    self._anchor.sync()
            except apsw.BusyError:
                continue
            except apsw.FullError:
                time.sleep(TICK_S)  # the writer finds out by itself; the WAL keeps what was not copied
            except (OSError, apsw.Error) as error:
                self._writer.fail(error)
            self._writer.kick()

    def _lengthen(self) -> None:
        """Give the WAL of a store that stays open its whole length ahead of need; see below for why."""
        self._long = True
        self._restart_until = time.monotonic() + RESTART_S_MAX
        try:
            lengthen(self._db, self._path, WAL_BYTES)
        except apsw.BusyError:
            self._long = False
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOSPC, errno.EDQUOT):  # no room after all: commits do without
                raise

    def _checkpoint(self) -> None:
        # PASSIVE never stands in the writer's way but cannot rewind the WAL under constant load; RESTART holds the
        # writer up for the little that PASSIVE left, and lets it start over at the WAL's beginning. A WAL that is
        # overwritten in place makes every commit cheaper than one that grows: its fsync has no new blocks to record.
        self._due_pages = self._pages + CHECKPOINT_PAGES
        self._restart_until = 0.0
        self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        self._restart_until = time.monotonic() + RESTART_S_MAX
        self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)

    def _busy(self, _tries: int) -> bool:
        if self._stopping or time.monotonic() > self._restart_until:
            return False
        time.sleep(random.uniform(0.0001, 0.001))  # noqa: S311 - jitter
        return True
