"""The kinds of log that are tested: how each is opened and what it declares."""

from __future__ import annotations

from pathlib import Path

from postbus.clock import Clock
from postbus.log import SqliteLog, open_log
from postbus.log.contract import Log
from postbus.model import Durability
from tests.conformance.log_suite import LogFeatures, LogSuite

__all__ = ["MemoryKind", "SqliteKind"]


class MemoryKind(LogSuite):
    """The log in memory: everything but surviving."""

    features = LogFeatures(durability=Durability.RELAXED, durable=False)

    async def open(self, folder: Path, clock: Clock) -> Log:
        del folder
        return await open_log("memory:", clock=clock)


class SqliteKind(LogSuite):
    """The embedded store."""

    AUDIT = """
        SELECT partition, committed_offset FROM consumer_commits c JOIN stream_registry s USING (stream_id)
        WHERE s.name = ? AND c.consumer = ? ORDER BY commit_id
    """

    features = LogFeatures(durability=Durability.FULL, durable=True, audit=True, threads=True, multi_process=True)

    def url(self, folder: Path) -> str:
        return f"sqlite:///{folder}/data"

    async def open(self, folder: Path, clock: Clock) -> Log:
        return await open_log(self.url(folder), clock=clock)

    async def audit(self, log: Log, stream: str, consumer: str) -> list[tuple[int, int]]:
        assert isinstance(log, SqliteLog)
        return await log.store.read(lambda db: [(row[0], row[1]) for row in db.execute(self.AUDIT, (stream, consumer))])
