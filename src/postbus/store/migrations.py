"""Migrations: numbered ``.sql`` files shipped with the package, applied in order, one transaction each."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from postbus.model import StorageError

if TYPE_CHECKING:
    import apsw

__all__ = ["latest_version", "migrate", "scripts"]


def scripts() -> list[tuple[int, str]]:
    """Return (version, SQL) of every migration, in order."""
    folder = resources.files("postbus.store") / "sql"
    found = [
        (int(entry.name.split("_", 1)[0]), entry.read_text(encoding="utf-8"))
        for entry in folder.iterdir()
        if entry.name.endswith(".sql")
    ]
    return sorted(found)


def latest_version() -> int:
    """Return the version this package works with."""
    return scripts()[-1][0]


def migrate(db: apsw.Connection) -> int:
    """Bring the database up to this package's version and return it; safe when several processes start at once.

    Raises ``StorageError`` for a database made by a newer package, and leaves it untouched.
    """
    for version, script in scripts():
        if int(db.pragma("user_version")) >= version:
            continue
        db.execute("BEGIN IMMEDIATE")
        try:
            # Another process may have done it while this one waited for the lock.
            if int(db.pragma("user_version")) < version:
                db.execute(script)
                db.execute(f"PRAGMA user_version = {version}")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
    current = int(db.pragma("user_version"))
    if current > latest_version():
        message = f"this store has layout version {current}, this postbus knows up to {latest_version()}"
        raise StorageError(message, hint="upgrade postbus, or open the store with the version that wrote it")
    return current
