"""The jobs on a standalone cluster: a master and two workers on loopback, with the log on JetStream."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark
import pytest

from tests.services import fresh_prefix, running_nats
from tests.spark.office import ORDERS
from tests.spark.test_remote import Remote

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
# It needs no session of this process, so that another worker may have it.
pytestmark = pytest.mark.xdist_group("cluster")


class Daemon:
    """One of Spark's own processes, and the file it logs to."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    def said(self, pattern: str) -> str:
        """Return what the process has said, once it has."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            ended = self._process.poll() is not None
            text = self._log.read_text(errors="replace")
            found = re.search(pattern, text)
            if found is not None:
                return found[1]
            assert not ended, text
            assert time.monotonic() < deadline, text
            time.sleep(0.05)


@contextmanager
def daemon(folder: Path, *words: str, memory: str = "256m") -> Iterator[Daemon]:
    """Run one of Spark's own processes until the end of the block."""
    log = folder / f"{len(list(folder.glob('*.log')))}.log"
    environment = os.environ | {
        "SPARK_DAEMON_MEMORY": memory,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-class"), *words]
    with log.open("wb") as handle, subprocess.Popen(command, stdout=handle, stderr=handle, env=environment) as process:
        try:
            yield Daemon(process, log)
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """A master with two workers of one core each, all on free ports."""
    package = "org.apache.spark.deploy"
    with ExitStack() as stack:
        words = (f"{package}.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        url = stack.enter_context(daemon(tmp_path, *words)).said(r"Starting Spark master at (spark://\S+)")
        options = ("--host", "127.0.0.1", "--webui-port", "0", "--cores", "1", "--memory", "600m")
        workers = [
            stack.enter_context(
                daemon(tmp_path, f"{package}.worker.Worker", *options, "--work-dir", str(tmp_path / name), url)
            )
            for name in ("one", "two")
        ]
        for worker in workers:
            worker.said(r"(Successfully registered with master)")
        yield url


def test_inboxes_and_archive_on_two_workers(master: str, tmp_path: Path) -> None:
    remote = Remote(f"{running_nats().url}/{fresh_prefix()}", tmp_path / "node")
    remote.stream(partitions=2)
    remote.agent()
    remote.subscribe("order.*", "orders", streams=(ORDERS,))
    remote.fill(3_000)
    remote.fill(10, "local.default.orders-dlq")  # only this node has it
    command = [sys.executable, "-m", "tests.spark.cluster_driver", master, remote.url, str(tmp_path / "lake")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert (told["local"], told["read"], told["executors"]) == (False, remote.there, 2)
    assert told["materialized"]["events"] == 3_000
    assert told["archived"]["events"] == 3_010
    assert (told["verified"]["problems"], told["verified"]["compared"]) == ([], 3)
    events = [event for partition in (0, 1) for event in remote.events(partition=partition)]
    wanted = sorted((event.partition, event.offset) for event in events if event.topic.startswith("order."))
    items = remote.query('SELECT partition, "offset" FROM inbox_rows ORDER BY 1, 2')
    assert items == wanted
    assert [remote.place("orders", ORDERS, partition) for partition in (0, 1)] == [
        len(remote.events(partition=partition)) for partition in (0, 1)
    ]
