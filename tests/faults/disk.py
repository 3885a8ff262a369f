"""A disk that fails on request: an apsw VFS over the default one that counts every call and fails the chosen one.

WAL works through it (SQLite maps the WAL index past the Python layer, which therefore cannot fail those calls).
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import apsw

__all__ = ["CALLS", "Disk"]

# What can fail, and the error SQLite expects of it.
CALLS = {
    "xOpen": apsw.SQLITE_CANTOPEN,
    "xDelete": apsw.SQLITE_IOERR_DELETE,
    "xAccess": apsw.SQLITE_IOERR_ACCESS,
    "xRead": apsw.SQLITE_IOERR_READ,
    "xWrite": apsw.SQLITE_IOERR_WRITE,
    "xSync": apsw.SQLITE_IOERR_FSYNC,
    "xTruncate": apsw.SQLITE_IOERR_TRUNCATE,
    "xFileSize": apsw.SQLITE_IOERR_FSTAT,
    "xLock": apsw.SQLITE_IOERR_LOCK,
    "xUnlock": apsw.SQLITE_IOERR_UNLOCK,
    "xCheckReservedLock": apsw.SQLITE_IOERR_CHECKRESERVEDLOCK,
}


class Disk(apsw.VFS):
    """Fails the call number ``at`` (counted from 0) once, or every call from there on when ``for_good``.

    ``kind`` is ``eio``, or ``full``: then calls that write say that the disk is full and the others do not fail.
    """

    def __init__(self, name: str, at: int = -1, *, for_good: bool = False, kind: str = "eio") -> None:
        self.name = name
        self.at = at
        self.for_good = for_good
        self.kind = kind
        self.calls = 0
        self.fired = ""
        self._mutex = threading.Lock()
        super().__init__(name, "")

    def pass_through(self, call: str, file: str) -> None:
        """Count a call and let it through, or fail it."""
        with self._mutex:
            number = self.calls
            self.calls += 1
            chosen = self.at >= 0 and (number >= self.at if self.for_good else number == self.at)
            if not chosen or (self.kind == "full" and call != "xWrite"):
                return
            self.fired = self.fired or f"{call} {file}"
        if self.kind == "full":
            raise apsw.FullError("injected: no room")
        if call == "xOpen":
            raise apsw.CantOpenError("injected: cannot open")
        error = apsw.IOError("injected: i/o error")
        error.extendedresult = CALLS[call]  # type: ignore[attr-defined]
        raise error

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802 - SQLite's names
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        self.pass_through("xOpen", Path(path or "temporary").name)
        return _File(self, name, flags, Path(path or "temporary").name)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        self.pass_through("xDelete", Path(filename).name)
        super().xDelete(filename, syncdir)

    def xAccess(self, pathname: str, flags: int) -> bool:  # noqa: N802
        self.pass_through("xAccess", Path(pathname).name)
        return super().xAccess(pathname, flags)


class _File(apsw.VFSFile):
    def __init__(self, disk: Disk, name: Any, flags: list[int], shown: str) -> None:
        self._disk = disk
        self._shown = shown
        super().__init__("", name, flags)

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        self._disk.pass_through("xRead", self._shown)
        return super().xRead(amount, offset)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        self._disk.pass_through("xWrite", self._shown)
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:  # noqa: N802
        self._disk.pass_through("xSync", self._shown)
        super().xSync(flags)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        self._disk.pass_through("xTruncate", self._shown)
        super().xTruncate(newsize)

    def xFileSize(self) -> int:  # noqa: N802
        self._disk.pass_through("xFileSize", self._shown)
        return super().xFileSize()

    def xLock(self, level: int) -> None:  # noqa: N802
        self._disk.pass_through("xLock", self._shown)
        super().xLock(level)

    def xUnlock(self, level: int) -> None:  # noqa: N802
        self._disk.pass_through("xUnlock", self._shown)
        super().xUnlock(level)

    def xCheckReservedLock(self) -> bool:  # noqa: N802
        self._disk.pass_through("xCheckReservedLock", self._shown)
        return super().xCheckReservedLock()
