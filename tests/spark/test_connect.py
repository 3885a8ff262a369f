"""Through a Spark Connect server: a client without a JVM of its own does what a driver does."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.faults.campaign import FULL
from tests.spark.mail import Mail
from tests.spark.test_cluster import LIMIT_S, ROOT, daemon

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


def test_everything_through_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mail = Mail(tmp_path / "data")
    mail.agent()
    mail.subscribe("order.*", "orders")
    mail.fill(30, stream="local.default.journal")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    port = free_port()
    words = (
        "org.apache.spark.deploy.SparkSubmit", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer",
        "--master", "local[2,4]", "--conf", "spark.ui.enabled=false",
        "--conf", "spark.connect.grpc.binding.address=127.0.0.1", "--conf", f"spark.connect.grpc.binding.port={port}",
        "spark-internal",
    )  # fmt: skip
    with daemon(tmp_path, *words, memory="1g") as server:
        server.said(r"(Spark Connect server started)")
        command = [sys.executable, "-W", "ignore", "-m", "tests.spark.connect_driver"]
        command += [f"sc://127.0.0.1:{port}", str(mail.data), str(tmp_path)]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert (told["read"], told["followed"], told["verified"]) == (5, True, True)
    assert told["refused"].startswith("there is no store in /nowhere")
    assert told["materialized"]["events"] == 30
    assert told["archived"] == 60
    assert len(mail.inbox()) == 20
    assert len(mail.events("local.default.copy")) == 30
