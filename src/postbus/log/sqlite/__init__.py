"""The embedded kind of log: one SQLite file, appends by group commit, caught-up readers served from memory."""

from postbus.log.sqlite.doors import Transaction
from postbus.log.sqlite.log import SqliteLog

__all__ = ["SqliteLog", "Transaction"]
