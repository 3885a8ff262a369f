"""The kinds of log that are tested: how each is opened and what it declares."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlencode

from postbus.clock import Clock
from postbus.log import SqliteLog, open_log
from postbus.log.contract import Log
from postbus.log.replica import ReplicaLog
from postbus.model import Durability
from postbus.store import Store
from tests.conformance.log_suite import LogFeatures, LogSuite
from tests.memory_upstream import MemoryServer, MemoryUpstream
from tests.services import fresh_prefix, running_kafka, running_nats

__all__ = ["JetStreamKind", "KafkaKind", "MemoryKind", "ReplicaKind", "SqliteKind"]


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


class ReplicaKind(SqliteKind):
    """A copy of a remote in memory; one remote per folder."""

    features = LogFeatures(durability=Durability.RELAXED, durable=True, identity_window=False, audit=True)
    servers: ClassVar[dict[Path, MemoryServer]] = {}

    async def open(self, folder: Path, clock: Clock) -> Log:
        upstream = MemoryUpstream(self.servers.setdefault(folder, MemoryServer()), clock.now_us)
        store = await asyncio.to_thread(Store.open, folder / "data", clock=clock)
        log = await ReplicaLog.follow(store, upstream)
        log.projections.start()
        return log


class RemoteKind(SqliteKind):
    """A copy of a real remote. The server is shared, so every folder has a prefix of its own."""

    features = LogFeatures(durability=Durability.RELAXED, durable=True, identity_window=False, audit=True)
    prefixes: ClassVar[dict[Path, str]] = {}

    def server(self) -> str:
        """Return the server's URL."""
        raise NotImplementedError

    def url(self, folder: Path) -> str:
        prefix = self.prefixes.setdefault(folder, fresh_prefix())
        return f"{self.server()}/{prefix}?{urlencode({'data': folder / 'data', 'answer_s': 60})}"

    async def open(self, folder: Path, clock: Clock) -> Log:
        return await open_log(self.url(folder), clock=clock, catch_up_s=60.0)


class JetStreamKind(RemoteKind):
    """On NATS."""

    def server(self) -> str:
        return running_nats().url


class KafkaKind(RemoteKind):
    """On Kafka."""

    features = replace(RemoteKind.features, pace=3)

    def server(self) -> str:
        return running_kafka().url
