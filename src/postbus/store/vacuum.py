"""Giving space back: a store that was trimmed keeps its size until its file is written anew."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import apsw

from postbus.store.database import connect
from postbus.store.folder import Folder
from postbus.store.refusals import refusal

if TYPE_CHECKING:
    import os

__all__ = ["vacuum"]


def vacuum(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Write the database anew without its free pages; return its size in bytes before and after.

    Needs as much free space as the store holds, and keeps other writers waiting meanwhile. Raises ``StorageError``.
    """
    folder = Folder(path)
    db = connect(folder)
    try:
        db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        before = folder.database.stat().st_size
        db.execute("VACUUM")
        with contextlib.suppress(apsw.BusyError):  # somebody reads: the next checkpoint shortens the file
            db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        return before, folder.database.stat().st_size
    except apsw.Error as error:
        raise refusal(folder, error, "could not be vacuumed") from error
    finally:
        db.close()
