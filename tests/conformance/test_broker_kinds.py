"""Every kind of broker passes the one suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from postbus.broker import Broker, LocalBroker
from postbus.broker.nats import NatsBroker
from tests.broker.nats_server import NatsServer, nats_server
from tests.conformance.broker import BrokerConformance


class TestLocalBroker(BrokerConformance):
    async def open(self, folder: Path) -> Broker:
        del folder
        return LocalBroker()


class TestNatsBroker(BrokerConformance):
    server: NatsServer

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> object:
        with nats_server(tmp_path_factory.mktemp("nats")) as cls.server:
            yield

    async def open(self, folder: Path) -> Broker:
        del folder
        broker = NatsBroker(self.server.url)
        await broker.start(wait_s=20)
        return broker
