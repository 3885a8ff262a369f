"""The kind ``file``: follows a file of JSON lines through growth, rotation and truncation."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from postbus.model import Invalid
from postbus.sources.contract import Common, Polled, bad
from postbus.sources.lines import event_of

if TYPE_CHECKING:
    from postbus.clock import Clock
    from postbus.model import Draft, Source

__all__ = ["FileSettings", "FileSource"]

TOPIC = "file.line"
BLOCK_BYTES = (1 << 20) + 65_536
LINES_MAX = 2_000
HEAD_BYTES = 256


class FileSettings(Common, frozen=True, kw_only=True):
    """``path``: the file. ``id_field``: where in a line its own id is. ``start``: where to begin the first time.

    ``rotated``: which names the file gets when it is rotated away, as in ``app.log.*``; with it nothing is missed even
    if it is rotated several times while nobody looks.
    """

    path: str
    id_field: str | None = None
    rotated: str | None = None
    interval_s: Annotated[float, msgspec.Meta(ge=0.05)] = 1.0
    start: Literal["earliest", "latest"] = "earliest"


class _Place(msgspec.Struct, kw_only=True):
    """How far a file was read. ``head`` knows it again by its first bytes; ``number`` counts files and truncations."""

    inode: int
    device: int
    offset: int = 0
    number: int = 0
    head: str = ""
    head_bytes: int = 0
    skipping: bool = False
    written_ns: int = 0


class FileSource:
    """Reads whole lines only; the last one waits until it ends, or until its file was rotated away."""

    def __init__(self, source: Source, settings: FileSettings, _clock: Clock) -> None:
        self._source = source
        self._settings = settings
        self.interval_s = settings.interval_s

    @staticmethod
    def check(settings: FileSettings) -> None:
        """Refuse settings that could never work."""
        if not settings.path.startswith("/") or "\0" in settings.path:
            raise Invalid(f"path {settings.path!r} is not absolute", hint="write it from / on")
        if settings.rotated is not None and ("/" in settings.rotated or not settings.rotated):
            raise Invalid(
                f"rotated {settings.rotated!r} is no pattern of names", hint="as in app.log.*, without a folder"
            )

    async def poll(self, checkpoint: Any) -> Polled:
        """See ``Poller.poll``."""
        place = None if checkpoint is None else msgspec.convert(checkpoint, _Place)
        return await asyncio.to_thread(self._poll, place)

    def _poll(self, place: _Place | None) -> Polled:
        path = Path(self._settings.path)
        try:
            handle = _open(path)
        except OSError as error:
            if place is not None and (old := _find(path.parent, place)) is not None:
                with os.fdopen(old, "rb") as file:
                    return self._read(file.fileno(), place, last=False)
            why = f"{path} cannot be read: {error.strerror or error}"
            return Polled(drafts=[], checkpoint=_kept(place), problem=why, wait_s=self.interval_s)
        with os.fdopen(handle, "rb"):
            found = os.fstat(handle)
            if place is None:
                place = _Place(inode=found.st_ino, device=found.st_dev)
                if self._settings.start == "latest":
                    place.offset = _last_line_end(handle, found.st_size)
            elif (place.inode, place.device) != (found.st_ino, found.st_dev):
                return self._rotated(path, place, found)
            if found.st_size < place.offset or _head(handle, place.head_bytes) != place.head:
                place = _Place(inode=place.inode, device=place.device, number=place.number + 1)
            return self._read(handle, place, last=False)

    def _rotated(self, path: Path, place: _Place, found: os.stat_result) -> Polled:
        """Read what is left of the file that was here before, then go on with the new one."""
        drafts: list[Draft] = []
        old = _find(path.parent, place)
        if old is not None:
            with os.fdopen(old, "rb"):
                rest = self._read(old, place, last=True)
            if rest.again:
                return rest
            drafts = rest.drafts
        found = self._between(path.parent, place, found)
        new = _Place(inode=found.st_ino, device=found.st_dev, number=place.number + 1, written_ns=place.written_ns)
        return Polled(drafts=drafts, checkpoint=_kept(new), again=True)

    def _between(self, folder: Path, place: _Place, newest: os.stat_result) -> os.stat_result:
        """Return the first file written after the one of a place: one that was rotated away too, or the newest."""
        if self._settings.rotated is None or not place.written_ns:
            return newest
        known = (place.inode, newest.st_ino)
        rotated = [found for name in folder.glob(self._settings.rotated) if (found := _regular(name)) is not None]
        later = [one for one in rotated if one.st_mtime_ns > place.written_ns and one.st_ino not in known]
        return min(later, key=lambda one: one.st_mtime_ns, default=newest)

    def _read(self, handle: int, place: _Place, *, last: bool) -> Polled:
        """Return the events of the next block; ``last``: a line without an end is not waited for."""
        if place.head_bytes < HEAD_BYTES:
            place.head_bytes = min(HEAD_BYTES, os.fstat(handle).st_size)
            place.head = _head(handle, place.head_bytes)
        place.written_ns = os.fstat(handle).st_mtime_ns
        block = os.pread(handle, BLOCK_BYTES, place.offset)
        full = len(block) == BLOCK_BYTES
        drafts: list[Draft] = []
        begin = 0
        while begin < len(block) and len(drafts) < LINES_MAX:
            end = block.find(b"\n", begin) + 1
            whole = end > 0
            if not whole:
                if not (full and begin == 0) and (full or not last):
                    break
                end = len(block)
            if place.skipping:
                place.skipping = not whole
            elif not whole and full:
                place.skipping = True
                drafts.append(self._endless(place, block))
            else:
                line, name = block[begin:end], self._name(place, begin)
                made = event_of(self._source, self._settings, TOPIC, line, name, self._settings.id_field)
                drafts += [] if made is None else [made]
            begin = end
        place.offset += begin
        return Polled(drafts=drafts, checkpoint=_kept(place), again=full or len(drafts) >= LINES_MAX)

    def _endless(self, place: _Place, block: bytes) -> Draft:
        sample = block[:2000].decode(errors="replace")
        return bad(self._source, self._name(place, 0), "the line is longer than an event may be", sample)

    def _name(self, place: _Place, begin: int) -> str:
        return f"{self._source.created_at_us}.{place.number}:{place.offset + begin}"


def _kept(place: _Place | None) -> Any:
    return None if place is None else msgspec.to_builtins(place)


def _regular(path: Path) -> os.stat_result | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _open(path: Path) -> int:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is no regular file")
    return handle


def _find(folder: Path, place: _Place) -> int | None:
    """Open the file of a place under whatever name it has now in its folder; None when it is gone."""
    try:
        entries = [entry for entry in os.scandir(folder) if entry.inode() == place.inode]
    except OSError:
        return None
    for entry in entries:
        try:
            handle = _open(Path(entry.path))
        except OSError:
            continue
        found = os.fstat(handle)
        same = (found.st_ino, found.st_dev) == (place.inode, place.device) and found.st_size >= place.offset
        if same and _head(handle, place.head_bytes) == place.head:
            return handle
        os.close(handle)
    return None


def _head(handle: int, size: int) -> str:
    return hashlib.sha256(os.pread(handle, size, 0)).hexdigest() if size else ""


def _last_line_end(handle: int, size: int) -> int:
    """Return where the last whole line ends."""
    end = size
    while end > 0:
        begin = max(0, end - 65_536)
        found = os.pread(handle, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0
