"""The examples on remotes, run as their first lines say."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.services import fresh_prefix, running_kafka, running_nats

EXAMPLES = Path(__file__).parents[2] / "examples"
WAIT_S = 120


@contextmanager
def program(name: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.xdist_group("nats")
def test_two_processes_on_two_sides_of_nats(tmp_path: Path) -> None:
    url = f"{running_nats().url}/{fresh_prefix()}"
    with program("two_nodes.py", "till", f"{url}?data={tmp_path / 'till'}") as till:
        assert till.stdout is not None
        assert till.stdout.readline() == "the till is open\n"
        with program("two_nodes.py", "shop", f"{url}?data={tmp_path / 'shop'}", "5") as shop:
            out, err = shop.communicate(timeout=WAIT_S)
            assert shop.returncode == 0, err
        till.send_signal(signal.SIGTERM)
        _, err = till.communicate(timeout=WAIT_S)
        assert till.returncode == 0, err
    lines = out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("order")] == ["0", "1", "2", "3", "4"]
    assert sorted(line for line in lines if line.startswith("invoice")) == [f"invoice {number}" for number in range(5)]
    assert "spooled" not in out


@pytest.mark.xdist_group("kafka")
def test_neighbours_on_kafka(tmp_path: Path) -> None:
    with program("kafka_neighbours.py", running_kafka().address, str(tmp_path / "node")) as child:
        out, err = child.communicate(timeout=WAIT_S)
        assert child.returncode == 0, err
    lines = set(out.splitlines())
    assert 'a neighbour read {"order":17}' in lines
    assert 'handled local.default.journal/0/0 order.placed from shop: {"order":17}' in lines
    assert any(line.endswith('from kafka: {"from": "a neighbour"}') for line in lines)
