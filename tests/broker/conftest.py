from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker.nats_server import NatsServer, nats_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as running:
        yield running
