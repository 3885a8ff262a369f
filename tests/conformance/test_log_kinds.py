"""Every kind of log passes the one suite."""

from __future__ import annotations

from tests.conformance.log import LogConformance
from tests.conformance.log_kinds import MemoryKind, SqliteKind


class TestMemoryLog(MemoryKind, LogConformance):
    pass


class TestSqliteLog(SqliteKind, LogConformance):
    pass
