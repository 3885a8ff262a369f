"""Which messages were shown already, over restarts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Shown"]

KEPT = 1_000


class Shown:
    """The ids of the last messages, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._torn = False
        try:
            ids = path.read_text("utf-8", errors="replace").split("\n")
        except FileNotFoundError:
            ids = []
        kept = [one for one in ids if one][-KEPT:]
        if len(ids) > 2 * KEPT or (ids and ids[-1]):  # a crash may have cut the last line short
            fresh = path.with_suffix(".new")
            fresh.write_text("".join(f"{one}\n" for one in kept), "utf-8")
            fresh.replace(path)
        self._ids = set(kept)

    def __contains__(self, message_id: object) -> bool:
        return message_id in self._ids

    def add(self, message_id: str) -> None:
        """Remember a message; it is on disk when this returns."""
        self._ids.add(message_id)
        begun, self._torn = self._torn, True  # until it is whole
        with self._path.open("a", encoding="utf-8") as file:
            file.write(("\n" if begun else "") + f"{message_id}\n")
            file.flush()
            os.fsync(file.fileno())
        self._torn = False
