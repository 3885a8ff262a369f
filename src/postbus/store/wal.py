"""A WAL of full length: commits that overwrite it in place have no new blocks to record, which makes them cheaper."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import apsw

__all__ = ["lengthen"]

STEP_BYTES = 1024 * 1024
PLENTY_BYTES = 1024 * 1024 * 1024


def lengthen(db: apsw.Connection, path: Path, length: int) -> None:
    """Write zeros behind the end of the WAL until it has that length; nothing happens where disk space is short.

    Zeros are no frame to SQLite, so it takes them for the end, as it takes what was left there by an earlier round.
    Each step has SQLite's write lock, so that nobody writes at that place meanwhile. Raises ``OSError``.
    """
    handle = os.open(path, os.O_RDWR)
    try:
        while step := _step(db, handle, length):
            os.fdatasync(handle)  # without the lock, and before a commit would have to
            if step < STEP_BYTES:
                return
    finally:
        os.close(handle)


def _step(db: apsw.Connection, handle: int, length: int) -> int:
    """Write a part of what is missing; return how much that was."""
    db.execute("BEGIN IMMEDIATE")
    try:
        there = os.fstat(handle)
        room = os.fstatvfs(handle)
        step = min(length - there.st_size, STEP_BYTES)
        if step <= 0 or there.st_nlink == 0 or room.f_bavail * room.f_frsize < PLENTY_BYTES:
            return 0
        return os.pwrite(handle, bytes(step), there.st_size)
    finally:
        db.execute("ROLLBACK")
