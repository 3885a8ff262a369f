"""Where every identity is: a table built from the log itself, kept in a file of the node or in memory.

It can be made again at any time by reading the topics, so it is a cache: it need not survive a power cut, but what it
says is always what the topics say up to the place it has read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import apsw

from postbus.log.heads import Identity

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Index", "Row"]

FILE = "kafka-identities.sqlite"
BUSY_MS = 5_000
KEPT = -1  # the "partition" that stands for the topic of trimmed identities

_TABLES = """
    PRAGMA journal_mode = WAL;
    PRAGMA synchronous = NORMAL;
    CREATE TABLE IF NOT EXISTS places (
        topic TEXT, partition INTEGER, next INTEGER NOT NULL, PRIMARY KEY (topic, partition)
    ) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS identities (
        topic TEXT, native_id TEXT, variant TEXT, partition INTEGER NOT NULL, "offset" INTEGER NOT NULL,
        created_at_us INTEGER NOT NULL, content BLOB NOT NULL, PRIMARY KEY (topic, native_id, variant)
    ) WITHOUT ROWID;
"""
_PLACE = "SELECT next FROM places WHERE topic = ? AND partition = ?"
_MOVE = """
    INSERT INTO places VALUES (?, ?, ?)
    ON CONFLICT DO UPDATE SET next = max(next, excluded.next)
"""
_FIND = """
    SELECT partition, "offset", created_at_us, content FROM identities
    WHERE topic = ? AND native_id = ? AND variant = ?
"""
_PUT = "INSERT OR REPLACE INTO identities VALUES (?, ?, ?, ?, ?, ?, ?)"
_BELOW = """
    SELECT native_id, variant, partition, "offset", created_at_us, content FROM identities
    WHERE topic = ? AND partition = ? AND "offset" >= ? AND "offset" < ?
"""


class Row(NamedTuple):
    """An identity as it was read. It repeats an earlier one that is at ``after`` or later in the same partition."""

    native_id: str
    variant: str
    identity: Identity
    after: int


class Index:
    """The table. ``cluster`` keeps apart what one folder has seen of several clusters."""

    def __init__(self, folder: str | None, cluster: str) -> None:
        self._cluster = cluster
        path = ":memory:"
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            path = str(Path(folder) / FILE)
        self._db = apsw.Connection(path)
        self._db.set_busy_timeout(BUSY_MS)
        self._db.execute(_TABLES).fetchall()

    def place(self, topic: str, partition: int) -> int:
        """Return how far a partition was read."""
        row = self._db.execute(_PLACE, (self._key(topic), partition)).fetchone()
        return row[0] if row else 0

    def get(self, topic: str, native_id: str, variant: str) -> Identity | None:
        """Return where an identity is."""
        row = self._db.execute(_FIND, (self._key(topic), native_id, variant)).fetchone()
        return Identity(*row) if row else None

    def add(self, topic: str, partition: int, following: int, rows: Iterable[Row]) -> None:
        """Take what was read up to ``following``; the first of several that raced for one identity has it."""
        key = self._key(topic)
        with self._db:
            for row in rows:
                known = self.get(topic, row.native_id, row.variant)
                if known is None or not _repeats(row, known):
                    self._db.execute(_PUT, (key, row.native_id, row.variant, *row.identity))
            self._db.execute(_MOVE, (key, partition, following))

    def between(self, topic: str, partition: int, first: int, end: int) -> list[Row]:
        """Return the identities of a range of a partition."""
        found = self._db.execute(_BELOW, (self._key(topic), partition, first, end))
        return [Row(native_id, variant, Identity(*rest), 0) for native_id, variant, *rest in found]

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _key(self, topic: str) -> str:
        return f"{self._cluster}/{topic}"


def _repeats(row: Row, known: Identity) -> bool:
    return known.partition == row.identity.partition and row.after <= known.offset <= row.identity.offset
