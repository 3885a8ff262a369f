"""What the store says when SQLite refuses: the typed error for each kind of trouble."""

from __future__ import annotations

from typing import TYPE_CHECKING

import apsw
import msgspec

from postbus.model import CorruptLog, StorageError, StorageFull, StoreBusy

if TYPE_CHECKING:
    from postbus.store.folder import Folder

__all__ = ["MISREAD", "no_room", "refusal", "unreadable"]

# What reading a damaged row raises beside SQLite's own errors: text that is no UTF-8, JSON that is none.
MISREAD = (UnicodeDecodeError, msgspec.MsgspecError)


def refusal(folder: Folder, error: Exception, what: str) -> StorageError:
    """Return the typed error for one that SQLite raised; ``what`` says what the store then could not do."""
    message = f"the store in {folder.path} {what}: {error}"
    if isinstance(error, (apsw.NotADBError, apsw.CorruptError, *MISREAD)):
        return unreadable(folder, error)
    if isinstance(error, apsw.BusyError):
        return StoreBusy(message, hint="another process holds its lock; try again")
    if no_room(error):
        return StorageFull(message, hint="free some space")
    return StorageError(message, hint="check the folder's owner, mode, disk and free space")


def unreadable(folder: Folder, error: BaseException) -> CorruptLog:
    """Return the refusal for a database that cannot be read."""
    return CorruptLog(
        f"the database in {folder.path} is damaged: {error}",
        hint="restore a backup with `postbus restore`, or copy what is intact with `postbus salvage`",
    )


def no_room(error: Exception) -> bool:
    """Say whether the disk is full; SQLite reports a WAL index that cannot grow in another way than a file."""
    return isinstance(error, apsw.FullError) or (
        isinstance(error, apsw.IOError) and getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHMSIZE
    )
