"""Long random histories on every kind of log, compared with the model step by step."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.conformance.log_kinds import JetStreamKind, KafkaKind, MemoryKind, ReplicaKind, SqliteKind
from tests.conformance.log_machine import LogMachine
from tests.faults.campaign import FULL

COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck))


class MemoryMachine(LogMachine):
    kind = MemoryKind()


class SqliteMachine(LogMachine):
    kind = SqliteKind()


class ReplicaMachine(LogMachine):
    kind = ReplicaKind()


class JetStreamMachine(LogMachine):
    kind = JetStreamKind()


class KafkaMachine(LogMachine):
    kind = KafkaKind()


MemoryMachine.TestCase.settings = settings(COMMON, max_examples=200 if FULL else 80, stateful_step_count=50)
SqliteMachine.TestCase.settings = settings(COMMON, max_examples=80 if FULL else 40, stateful_step_count=50)
ReplicaMachine.TestCase.settings = settings(COMMON, max_examples=30, stateful_step_count=50)
JetStreamMachine.TestCase.settings = settings(COMMON, max_examples=10, stateful_step_count=30)
KafkaMachine.TestCase.settings = settings(COMMON, max_examples=4, stateful_step_count=30)

TestMemory = MemoryMachine.TestCase
TestSqlite = SqliteMachine.TestCase
TestReplica = ReplicaMachine.TestCase
TestJetStream = pytest.mark.xdist_group("nats")(JetStreamMachine.TestCase)
TestKafka = pytest.mark.xdist_group("kafka")(KafkaMachine.TestCase)
