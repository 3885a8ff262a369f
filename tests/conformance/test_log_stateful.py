"""Long random histories on every kind of log, compared with the model step by step."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.conformance.log_kinds import MemoryKind, SqliteKind
from tests.conformance.log_machine import LogMachine

COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck))


class MemoryMachine(LogMachine):
    kind = MemoryKind()


class SqliteMachine(LogMachine):
    kind = SqliteKind()


MemoryMachine.TestCase.settings = settings(COMMON, max_examples=200, stateful_step_count=50)
SqliteMachine.TestCase.settings = settings(COMMON, max_examples=80, stateful_step_count=50)

TestMemory = MemoryMachine.TestCase
TestSqlite = SqliteMachine.TestCase
