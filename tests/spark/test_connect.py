"""Through a Spark Connect server: a client without a JVM of its own does what a driver does."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.faults.campaign import FULL
from tests.services import fresh_prefix, running_kafka
from tests.spark.mail import Mail
from tests.spark.test_cluster import LIMIT_S, ROOT, daemon
from tests.spark.test_remote import Remote

pytestmark = [
    pytest.mark.xdist_group("cluster"),
    pytest.mark.skipif(not FULL, reason="part of the full campaign: make faults"),
    pytest.mark.skipif(
        find_spec("grpc") is None, reason="Spark Connect is not installed: pip install 'pyspark[connect]'"
    ),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(folder: Path, *words: str) -> Iterator[str]:
    """Run a Spark Connect server until the end of the block, and give its address."""
    port = free_port()
    command = (
        "org.apache.spark.deploy.SparkSubmit", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer",
        "--master", "local[2,4]", "--conf", "spark.ui.enabled=false",
        "--conf", "spark.connect.grpc.binding.address=127.0.0.1", "--conf", f"spark.connect.grpc.binding.port={port}",
        *words, "spark-internal",
    )  # fmt: skip
    with daemon(folder, *command, memory="1g") as server:
        server.said(r"(Spark Connect server started)")
        yield f"sc://127.0.0.1:{port}"


def driven(*words: str) -> dict[str, Any]:
    """Let a client do its work, and return what it tells."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.spark.connect_driver", *words]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False)
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("there", [True, False])
def test_kafka_with_and_without_sparks_own_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connector: list[Path], there: bool
) -> None:
    """Which reader is used depends on the server's class path."""
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    node = Remote(f"{running_kafka().url}/{fresh_prefix()}", tmp_path / "node")
    node.stream(partitions=2)
    node.fill(40)
    jars = ("--jars", ",".join(map(str, connector))) if there else ()
    with served(tmp_path, *jars) as url:
        told = driven(url, node.there)
    assert (told["rows"], told["auto"], told["connector"]) == (40, 40, there)
    if there:
        assert told["same"]
    else:
        assert told["refused"].startswith("Spark's Kafka source was asked for, and its connector is not")
        assert "spark-sql-kafka-0-10" in told["refused"]


def test_everything_through_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mail = Mail(tmp_path / "data")
    mail.agent()
    mail.subscribe("order.*", "orders")
    mail.subscribe("user.*", "late", engine="live")
    mail.fill(30, stream="local.default.journal")
    lines = [b'{"city": %d}' % number for number in range(2_500)]
    (tmp_path / "dump.jsonl").write_bytes(b"\n".join([*lines, b"{broken"]))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    with served(tmp_path) as url:
        told = driven(url, str(mail.data), str(tmp_path))
        command = [
            sys.executable, "-m", "postbus", "pipeline", "ingest", "dump.jsonl", "--into", "typed",
            "--topic", "city.seen", "--source", "import", "--data", str(mail.data), "--remote", url, "--json",
        ]  # fmt: skip
        typed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (typed.returncode, typed.stderr) == (0, "")
    assert json.loads(typed.stdout)["appended"] == 2_500
    assert (told["read"], told["followed"], told["verified"]) == (5, True, True)
    assert told["refused"][0].startswith("there is no store in /nowhere")
    assert told["refused"][1].startswith("the row with native_id 'x' is refused")
    assert told["materialized"]["events"] == 30
    assert told["backfilled"]["matches"] == 10
    assert [event.payload for event in mail.events("local.default.batch")] == [
        event.payload for event in mail.events("local.default.journal")[:30]
    ]
    once, again = told["ingested"]
    assert once == {"appended": 2_500, "duplicates": 0, "refused": 1}
    assert again == {"appended": 0, "duplicates": 2_500, "refused": 1}
    assert told["validated"]["checked"] == 30
    assert told["validated"]["refused"] == 10
    assert told["archived"] == 90 + 2_500
    once, again = told["replayed"]
    assert once == {"appended": 7, "duplicates": 0, "refused": 0}
    assert again == {"appended": 0, "duplicates": 7, "refused": 0}
    replayed = mail.events("local.default.again")
    assert [event.payload["n"] for event in replayed] == [0, 1, 3, 4, 6, 7, 9]
    assert told["reported"] == {"events": 90 + 2_500 + 7, "page": True, "tables": 7}
    assert [(each["key"], each["removed"]) for each in told["trimmed"]] == [("local.default.ingested/0", 2_500)]
    assert len(mail.inbox()) == 30
    assert len(mail.events("local.default.copy")) == 30
