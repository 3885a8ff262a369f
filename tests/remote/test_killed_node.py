"""A node that is killed while it copies goes on where it was, and ends with the copy that every other node has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from postbus.log import open_log
from tests.conformance.log_suite import batch
from tests.services import NatsServer, fresh_prefix, nats_server

__all__ = ["nats_server"]

STREAM = "local.default.orders"
EVENTS = 20_000
NODE = Path(__file__).with_name("node_process.py")


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@contextmanager
def copying(url: str) -> Iterator[Iterator[int]]:
    """Run a node; gives how many events its copy has, again and again. Killed at the end."""
    words = [sys.executable, str(NODE), url, STREAM]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield map(int, child.stdout)
        finally:
            child.kill()


@pytest.mark.xdist_group("nats")
async def test_a_node_killed_while_it_copies(tmp_path: Path, nats_server: NatsServer) -> None:
    remote = f"{nats_server.url}/{fresh_prefix()}"
    first = await open_log(f"{remote}?data={tmp_path / 'first'}")
    await first.ensure_stream(STREAM)
    for start in range(0, EVENTS, 1000):
        await first.append(STREAM, batch(1000, first=start))
    seen = [0]
    for _ in range(3):
        with copying(f"{remote}?data={tmp_path / 'second'}") as counts:
            seen.append(next(count for count in counts if count > seen[-1] or count == EVENTS))
    second = await open_log(f"{remote}?data={tmp_path / 'second'}", catch_up_s=60.0)
    assert await second.get_stream_stats(STREAM) == await first.get_stream_stats(STREAM)
    assert (await second.get_stream_stats(STREAM)).count == EVENTS
    await second.close()
    await first.close()
