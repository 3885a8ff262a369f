"""Every kind of log passes the one suite."""

from __future__ import annotations

import pytest

from tests.conformance.log import LogConformance
from tests.conformance.log_kinds import JetStreamKind, KafkaKind, MemoryKind, ReplicaKind, SqliteKind


class TestMemoryLog(MemoryKind, LogConformance):
    pass


class TestSqliteLog(SqliteKind, LogConformance):
    pass


class TestReplicaLog(ReplicaKind, LogConformance):
    pass


@pytest.mark.xdist_group("nats")
class TestJetStreamLog(JetStreamKind, LogConformance):
    pass


@pytest.mark.xdist_group("kafka")
class TestKafkaLog(KafkaKind, LogConformance):
    pass
