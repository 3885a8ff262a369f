"""The messages of the channel, on disk until many newer ones came: whoever reads late misses nothing."""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_right
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

    from postbus.kernel import OutgoingMessage

__all__ = ["Outbox", "Row"]

KEPT = 10_000


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message as readers get it. Without a session it is for everybody."""

    sequence: int
    id: str
    text: str
    session_id: str | None = None
    user_id: str | None = None
    correlation_id: str | None = None

    def is_for(self, session_id: str | None) -> bool:
        """Say whether somebody who reads a session, or all of them, gets it."""
        return session_id is None or self.session_id in (None, session_id)


class Outbox:
    """Messages in the order they came; their sequence numbers go on over restarts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._torn = False
        self._rows = self._load()
        self._ids = {row.id for row in self._rows}
        self._news = asyncio.Event()

    @property
    def last(self) -> int:
        """The sequence of the newest message; 0 when there is none."""
        return self._rows[-1].sequence if self._rows else 0

    def add(self, message: OutgoingMessage) -> None:
        """Keep a message, once; it is on disk when this returns."""
        if message.id in self._ids:
            return
        row = Row(
            sequence=self.last + 1,
            id=message.id,
            text=message.text,
            session_id=message.session_id,
            user_id=message.user_id,
            correlation_id=message.correlation_id,
        )
        begun, self._torn = self._torn, True  # until it is whole
        with self._path.open("ab") as file:
            file.write((b"\n" if begun else b"") + msgspec.json.encode(row) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._torn = False
        self._rows.append(row)
        self._ids.add(row.id)
        if len(self._rows) > 2 * KEPT:
            self._rewrite()
        self.wake()

    def wake(self) -> None:
        """Wake everybody who waits."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def after(self, sequence: int, session_id: str | None, limit: int) -> list[Row]:
        """Return messages behind a sequence number, oldest first."""
        start = bisect_right(self._rows, sequence, key=lambda row: row.sequence)
        found = (row for row in self._rows[start:] if row.is_for(session_id))
        return [row for row, _ in zip(found, range(limit), strict=False)]

    def news(self) -> asyncio.Event:
        """Return what is set when something comes."""
        return self._news

    def _load(self) -> list[Row]:
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return []
        rows = []
        for line in raw.split(b"\n"):
            try:
                rows.append(msgspec.json.decode(line, type=Row))
            except msgspec.MsgspecError:
                continue
        self._rows = rows
        if raw and not raw.endswith(b"\n"):  # a crash cut the last line short; it was not acknowledged
            self._rewrite()
        return self._rows

    def _rewrite(self) -> None:
        self._rows = self._rows[-KEPT:]
        self._ids = {row.id for row in self._rows}
        fresh = self._path.with_suffix(".new")
        with fresh.open("wb") as file:
            file.writelines(msgspec.json.encode(row) + b"\n" for row in self._rows)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
