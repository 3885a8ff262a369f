"""What a salvage takes over beside the log: subscriptions, deliveries, keys, schemas, agents, inboxes, sources.

These rows carry no seal, so they are taken as SQLite reads them, and what it cannot read is named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import apsw

from postbus.model import StorageError
from postbus.store.database import connect
from postbus.store.verify import UNREADABLE, sealed_tables

if TYPE_CHECKING:
    from postbus.store.folder import Folder

__all__ = ["carry_over"]

# Made again by others: the log's own rows, the projections, the store's facts.
ELSEWHERE = {
    *sealed_tables(),
    "events",
    "store_facts",
    "projection_place",
    "topic_blocks",
    "correlation_rows",
    "time_buckets",
    "consumer_commits",
    "lanes",
}
TABLES = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT GLOB 'sqlite_*' ORDER BY name"


def carry_over(have: Folder, new: apsw.Connection) -> list[str]:
    """Copy what can be read of every table beside the log; return a sentence for each that was not read to its end."""
    wanted = [name for (name,) in new.execute(TABLES) if name not in ELSEWHERE]
    try:
        old = connect(have, write=False)
    except StorageError:
        return [f"{', '.join(wanted)} could not be read and are empty"]
    notes: list[str] = []
    try:
        for table in wanted:
            columns = [row[1] for row in new.execute(f"PRAGMA table_info({table})")]
            names, marks = ", ".join(f'"{name}"' for name in columns), ",".join("?" * len(columns))
            taken = 0
            try:
                for row in old.execute(f"SELECT {names} FROM {table}"):  # noqa: S608 - names of our own layout
                    new.execute(f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({marks})", row)  # noqa: S608 - the same
                    taken += 1
            except (apsw.ConstraintError, *UNREADABLE) as error:
                if not _is_absent(old, table):
                    notes.append(f"{table} could not be read to its end, {taken} rows were taken: {error}")
    finally:
        old.close()
    return notes


def _is_absent(old: apsw.Connection, table: str) -> bool:
    """Say whether the store was made before there was such a table."""
    try:
        return not old.execute("SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = ?)", (table,)).get
    except apsw.Error:
        return False
