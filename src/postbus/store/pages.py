"""Reads rows straight from SQLite pages, without the trees above them: for salvage, when the trees may be broken.

Only what the SQLite file format says of single pages and of WAL frames is used. Nothing here trusts what it reads: a
row that does not decode is passed over, and the caller checks each row's own CRC.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["page_images", "rows"]

_TABLE_LEAF, _INDEX_LEAF, _INDEX_INTERIOR = 0x0D, 0x0A, 0x02
_WAL_HEADER = 32
_FRAME_HEADER = 24
_INTEGERS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
_FLOAT = 7
_ZERO, _ONE = 8, 9
_FIRST_BLOB, _FIRST_TEXT = 12, 13


class _Wal:
    """The committed frames of the WAL's current generation, whether or not SQLite would still believe them."""

    def __init__(self, file: BinaryIO, page_bytes: int) -> None:
        self._file = file
        self._page_bytes = page_bytes
        header = file.read(_WAL_HEADER)
        count = max(file.seek(0, 2) - _WAL_HEADER, 0) // (page_bytes + _FRAME_HEADER)
        frames = [self._header(index) for index in range(count)]
        salts = header[16:24]
        if all(frame[2] != salts for frame in frames) and frames:
            salts = frames[0][2]  # the WAL's own header is damaged
        commits = [index for index, frame in enumerate(frames) if frame[1] and frame[2] == salts]
        end = commits[-1] + 1 if commits else 0
        self.frames = [(index, frames[index][0]) for index in range(end) if frames[index][2] == salts]

    def _header(self, index: int) -> tuple[int, int, bytes]:
        self._file.seek(_WAL_HEADER + index * (self._page_bytes + _FRAME_HEADER))
        number, commit, salts = struct.unpack(">II8s8x", self._file.read(_FRAME_HEADER))
        return number, commit, salts

    def image(self, index: int) -> bytes:
        self._file.seek(_WAL_HEADER + index * (self._page_bytes + _FRAME_HEADER) + _FRAME_HEADER)
        return self._file.read(self._page_bytes)


def page_images(database: Path, wal: Path, page_bytes: int) -> Iterator[tuple[bool, bytes, Callable[[int], bytes]]]:
    """Yield every page image of the database and of its WAL, each with a way to read overflow pages.

    First comes the newest image of each page, said to be so, then the older ones, newest first: what is found twice is
    newer the first time.
    """
    with database.open("rb") as main, (wal if wal.exists() else database).open("rb") as log:
        frames = _Wal(log, page_bytes) if wal.exists() else None
        newest = {number: index for index, number in frames.frames} if frames else {}
        pages = database.stat().st_size // page_bytes

        def from_main(number: int) -> bytes:
            main.seek((number - 1) * page_bytes)
            return main.read(page_bytes)

        def page(number: int) -> bytes:
            if frames and number in newest:
                return frames.image(newest[number])
            return from_main(number)

        for number in sorted({*range(1, pages + 1), *newest}):
            yield True, page(number), page
        if frames:
            for index, number in reversed(frames.frames):
                if newest[number] != index:
                    yield False, frames.image(index), page
            for number in sorted(newest):
                if 1 <= number <= pages:
                    yield False, from_main(number), page


def rows(image: bytes, page: Callable[[int], bytes]) -> Iterator[tuple[int | None, list[Any]]]:
    """Yield (rowid, values) of every row on a page; the rowid is None for tables without one."""
    start = 100 if image.startswith(b"SQLite format 3") else 0  # the first page of a file begins with its header
    kind = image[start] if len(image) > start + 12 else 0
    if kind not in (_TABLE_LEAF, _INDEX_LEAF, _INDEX_INTERIOR):
        return
    cells = start + (12 if kind == _INDEX_INTERIOR else 8)
    count = struct.unpack_from(">H", image, start + 3)[0]
    for index in range(min(count, (len(image) - cells) // 2)):
        at = struct.unpack_from(">H", image, cells + 2 * index)[0]
        rowid: int | None = None
        try:
            size, at = _varint(image, at + 4 if kind == _INDEX_INTERIOR else at)
            if kind == _TABLE_LEAF:
                rowid, at = _varint(image, at)
            values = _record(_payload(image, at, size, page, kind))
        except (IndexError, ValueError, struct.error):
            continue
        yield rowid, values


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for length in range(8):
        byte = data[at + length]
        value = (value << 7) | (byte & 0x7F)
        if byte < 0x80:  # noqa: PLR2004 - the continuation bit
            return value, at + length + 1
    return (value << 8) | data[at + 8], at + 9


def _payload(image: bytes, at: int, size: int, page: Callable[[int], bytes], kind: int) -> bytes:
    usable = len(image)
    most = usable - 35 if kind == _TABLE_LEAF else (usable - 12) * 64 // 255 - 23
    if size <= most:
        if at + size > usable:
            raise ValueError("the cell runs over its page")
        return image[at : at + size]
    least = (usable - 12) * 32 // 255 - 23
    local = least + (size - least) % (usable - 4)
    if local > most:
        local = least
    if size > 1 << 31:
        raise ValueError("no row is that large")
    parts = [image[at : at + local]]
    following = struct.unpack_from(">I", image, at + local)[0]
    left = size - local
    while left > 0 and following:
        overflow = page(following)
        if len(overflow) != usable:
            raise ValueError("an overflow page is missing")
        following = struct.unpack_from(">I", overflow)[0]
        parts.append(overflow[4 : 4 + min(left, usable - 4)])
        left -= usable - 4
    if left > 0:
        raise ValueError("the overflow chain ends early")
    return b"".join(parts)


def _record(data: bytes) -> list[Any]:
    size, at = _varint(data, 0)
    body = size
    values: list[Any] = []
    while at < size:
        kind, at = _varint(data, at)
        length = _length(kind)
        if body + length > len(data):
            raise ValueError("the row runs over its end")
        values.append(_value(kind, data[body : body + length]))
        body += length
    return values


def _length(kind: int) -> int:
    if kind >= _FIRST_BLOB:
        return (kind - _FIRST_BLOB) // 2
    return _INTEGERS.get(kind, 8 if kind == _FLOAT else 0)


def _value(kind: int, raw: bytes) -> Any:
    if kind == 0:
        return None
    if kind in _INTEGERS:
        return int.from_bytes(raw, "big", signed=True)
    if kind == _FLOAT:
        return struct.unpack(">d", raw)[0]
    if kind in (_ZERO, _ONE):
        return kind - _ZERO
    if kind >= _FIRST_TEXT and kind % 2:
        return raw.decode("utf-8")
    if kind >= _FIRST_BLOB:
        return raw
    raise ValueError("a reserved column type")
