"""The data folder: which files it holds, their modes, the lock between servers, and the reserve for a full disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

from postbus.model import AlreadyServed, StorageError

__all__ = ["RESERVE_BYTES", "Folder", "ServeLock"]

# Enough to copy a WAL of two checkpoints' length into the database, after which acknowledgements take no more room.
RESERVE_BYTES = 16 * 1024 * 1024


class Folder:
    """Paths inside one data folder. Everything in it is readable by its owner only."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.database = self.path / "postbus.db"
        self.wal = self.path / "postbus.db-wal"
        self.anchor = self.path / "anchor"
        self.reserve = self.path / "reserve"
        self.serve_lock = self.path / "serve.lock"

    def exists(self) -> bool:
        """Say whether a store was made here."""
        return self.database.exists()

    def create(self) -> None:
        """Make the folder and an empty database file with private modes; leaves what exists alone."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.database.exists():
                self._make_database()
        except OSError as error:
            message = f"cannot make a store in {self.path}: {error.strerror}"
            raise StorageError(message, hint="choose a folder you can write to with --data or POSTBUS_DATA") from error

    def _make_database(self) -> None:
        # The file is made under another name and then linked: SQLite's locks belong to the process, and closing any
        # handle of the database itself would drop those of a store that this process has open.
        handle, name = tempfile.mkstemp(dir=self.path, prefix="new-")  # made with mode 0600
        try:
            os.close(handle)
            with contextlib.suppress(FileExistsError):  # somebody else was quicker
                os.link(name, self.database)
        finally:
            os.unlink(name)  # noqa: PTH108 - mkstemp gives a string

    def hold_reserve(self) -> bool:
        """Set space aside for acknowledgements on a full disk; False when there is no room for it."""
        handle = -1
        try:
            handle = os.open(self.reserve, os.O_RDWR | os.O_CREAT, 0o600)
            if os.fstat(handle).st_size < RESERVE_BYTES:
                os.posix_fallocate(handle, 0, RESERVE_BYTES)
        except OSError:
            self.release_reserve()
            return False
        finally:
            if handle >= 0:
                os.close(handle)
        return True

    def release_reserve(self) -> None:
        """Give the reserve back to the disk."""
        with contextlib.suppress(OSError):
            self.reserve.unlink()


class ServeLock:
    """Keeps two servers off one folder; held by an open file, so it ends with the process that has it."""

    def __init__(self, folder: Folder) -> None:
        self._path = folder.serve_lock
        self._handle = -1

    def acquire(self) -> None:
        """Take the lock or raise ``AlreadyServed`` naming the process that has it."""
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(handle)
            message = f"another server (process {holder}) serves {self._path.parent}"
            raise AlreadyServed(message, hint="stop it, or serve another folder with --data") from error
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        self._handle = handle

    def release(self) -> None:
        """Let go of the lock. Idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
