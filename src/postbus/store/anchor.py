"""The anchor: a small file beside the database that remembers how long each partition was.

After every commit the touched partitions' (epoch, next offset, chain) are written to their 64-byte slots, and how many
changes were made to everything else (readers, cursors, streams) to the header, before anyone is told that the commit
happened; the file is fsynced about once a second and on close, off the commit path. The anchor may therefore lag behind
the log after a power cut, and never runs ahead of it: a log that ends before its anchor, or has another chain there,
was shortened or altered.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from postbus.model import CorruptLog

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Anchor", "Anchored", "Mark"]

_MAGIC = b"PBA1"
_HEADER = struct.Struct("<4s32sQ16xI")
_SLOT = struct.Struct("<4sIIIQ32s4xI")
_SIZE = 64
_TRIES = 20


class Mark(NamedTuple):
    """What the anchor remembers of one partition."""

    stream_id: int
    partition: int
    epoch: int
    next_offset: int
    chain: bytes


class Anchored(NamedTuple):
    """All that an anchor remembers: whose it is, how many changes were made, and a mark for each partition."""

    store_id: str
    changes: int
    marks: list[Mark]


class Anchor:
    """The open anchor file. ``note`` is called by whichever thread commits; slots are written whole."""

    def __init__(self, path: Path, store_id: str) -> None:
        self._path = path
        self._store_id = store_id.encode("ascii")
        self._dirty = False
        self._handle = -1

    def open(self, *, create: bool, any_store: bool = False) -> None:
        """Open the file; make it when ``create``; take it whosever it is when ``any_store``.

        Raises ``CorruptLog`` when it is missing, damaged or foreign.
        """
        flags = os.O_RDONLY if any_store else os.O_RDWR | (os.O_CREAT if create else 0)
        try:
            self._handle = os.open(self._path, flags, 0o600)
        except FileNotFoundError as error:
            message = f"the anchor file {self._path} is missing, so nothing shows whether the log is whole"
            raise CorruptLog(
                message, hint="run `postbus verify --accept` to check every event and write a new anchor"
            ) from error
        if create and os.fstat(self._handle).st_size == 0:
            self.count(0)
            self.sync()
            directory = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
            return
        if not any_store and self._header()[0] != self._store_id:
            self._refuse("belongs to another store")

    def note(self, slot: int, mark: Mark) -> None:
        """Write one partition's mark; in the page cache when this returns, on disk after ``sync``."""
        os.pwrite(self._handle, self._sealed(_SLOT, _MAGIC, *mark), (slot + 1) * _SIZE)
        self._dirty = True

    def count(self, changes: int) -> None:
        """Write how many changes were made to what no mark covers; as durable as ``note``."""
        os.pwrite(self._handle, self._sealed(_HEADER, _MAGIC, self._store_id, changes), 0)
        self._dirty = True

    def state(self) -> Anchored:
        """Return all that is remembered. Raises ``CorruptLog`` for a damaged cell."""
        store_id, changes = self._header()
        cells = (max(os.fstat(self._handle).st_size, _SIZE) + _SIZE - 1) // _SIZE
        marks = [self._mark(slot) for slot in range(cells - 1)]
        return Anchored(store_id.decode("ascii", "replace"), changes, [mark for mark in marks if mark is not None])

    def _header(self) -> tuple[bytes, int]:
        cell = self._cell(0)
        if cell is None:
            self._refuse("is damaged in its first 64 bytes")
        _, store_id, changes, _ = _HEADER.unpack(cell)
        return store_id.rstrip(b"\0"), changes

    def _mark(self, slot: int) -> Mark | None:
        cell = self._cell(slot + 1)
        if cell is None:
            self._refuse(f"is damaged in slot {slot}")
        _, stream_id, partition, epoch, next_offset, chain, _ = _SLOT.unpack(cell)
        return Mark(stream_id, partition, epoch, next_offset, chain) if any(cell) else None

    def _cell(self, index: int) -> bytes | None:
        """Return one intact cell, an unused one, or None; another process may be writing it, so it is read again."""
        for _ in range(_TRIES):
            cell = os.pread(self._handle, _SIZE, index * _SIZE)
            if len(cell) == _SIZE and zlib.crc32(cell[:-4]) == int.from_bytes(cell[-4:], "little"):
                return cell
            if index and len(cell) == _SIZE and not any(cell):
                return cell
            time.sleep(0.0005)
        return None

    def sync(self) -> None:
        """Bring what was noted to disk."""
        if self._dirty and self._handle >= 0:
            self._dirty = False
            os.fsync(self._handle)

    def close(self) -> None:
        """Sync and close. Idempotent."""
        if self._handle >= 0:
            try:
                self.sync()
            finally:
                os.close(self._handle)
                self._handle = -1

    @staticmethod
    def _sealed(layout: struct.Struct, *values: object) -> bytes:
        body = layout.pack(*values, 0)[:-4]
        return body + zlib.crc32(body).to_bytes(4, "little")

    def _refuse(self, what: str) -> NoReturn:
        message = f"the anchor file {self._path} {what}"
        raise CorruptLog(message, hint="run `postbus verify --accept` to check every event and write a new anchor")
