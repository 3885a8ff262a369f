"""Drivers and workers killed for good in the middle of a job: run again, nothing is missing and nothing is twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from postbus.spark.jobs.archive import archive
from postbus.spark.jobs.ingest import ingest
from postbus.spark.jobs.replay import Selection, replay
from postbus.spark.jobs.verify import verify_lake
from postbus.spark.lake import Lake
from tests.spark.office import ORDERS, Office, ids
from tests.spark.victim import BACK

ROOT = Path(__file__).parents[2]
EVENTS = 4_000
FULL = os.environ.get("POSTBUS_CAMPAIGN") == "full"
MOMENTS = ("before the page", "files half checked", "after one")


def killed(job: str, moment: str, data: Path, other: Path) -> None:
    """Run a job in a process of its own until it kills itself."""
    command = [sys.executable, "-m", "tests.spark.victim", job, moment, str(data), str(other)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


@contextmanager
def workers_killed(count: int = 2) -> Iterator[list[int]]:
    """Kill Python workers of this process's Spark as they come, a few times."""
    hit: list[int] = []
    over = threading.Event()

    def hunt() -> None:
        while not over.wait(0.002) and len(hit) < count:
            for pid in fresh_workers():
                if pid not in hit and len(hit) < count:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
                    hit.append(pid)
                    time.sleep(0.3)

    thread = threading.Thread(target=hunt)
    thread.start()
    try:
        yield hit
    finally:
        over.set()
        thread.join()


def fresh_workers() -> list[int]:
    """The Python workers of tasks below this process; who plans a read is not started again when it is killed."""
    parents: dict[int, int] = {}
    daemons: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                if b"pyspark.daemon\0pyspark.worker\0" in entry.joinpath("cmdline").read_bytes():
                    daemons.add(int(entry.name))
            except OSError:
                continue

    def ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return sorted(pid for pid in daemons if parents.get(pid) in daemons and ours(pid))


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "dump.jsonl"
    path.write_text("".join(json.dumps({"payload": {"n": n}}) + "\n" for n in range(EVENTS)))
    return path


@pytest.mark.parametrize("moment", MOMENTS if FULL else MOMENTS[:1])
def test_archive_after_the_driver_was_killed(spark: SparkSession, office: Office, tmp_path: Path, moment: str) -> None:
    office.stream(partitions=2)
    office.fill(EVENTS)
    lake = Lake(str(tmp_path / "lake"))
    killed("archive", moment, office.data, tmp_path / "lake")
    archive(spark, str(office.data), lake)
    assert ids(lake.frame(spark)) == ids(office.read(spark))
    assert verify_lake(spark, lake, str(office.data)).ok


def test_ingest_after_the_driver_was_killed(spark: SparkSession, office: Office, dump: Path) -> None:
    office.stream()
    killed("ingest", "", office.data, dump)
    assert 0 < len(office.events()) < EVENTS
    fed = asyncio.run(ingest(spark, [str(dump)], str(office.data), ORDERS, topic="a", source="s"))
    assert fed.appended + fed.duplicates == EVENTS
    assert [event.payload["n"] for event in office.events()] == list(range(EVENTS))


@pytest.mark.skipif(not FULL, reason="part of the full campaign: make faults")
def test_replay_after_the_driver_was_killed(spark: SparkSession, office: Office, tmp_path: Path) -> None:
    office.fill(EVENTS)
    lake = Lake(str(tmp_path / "lake"))
    archive(spark, str(office.data), lake)
    killed("replay", "", office.data, tmp_path / "lake")
    assert 0 < len(office.events(BACK)) < EVENTS
    asyncio.run(replay(spark, lake, str(office.data), BACK, wanted=Selection(stream=ORDERS)))
    assert [event.payload["n"] for event in office.events(BACK)] == list(range(EVENTS))


def test_jobs_survive_killed_workers(spark: SparkSession, office: Office, dump: Path, tmp_path: Path) -> None:
    with workers_killed() as hit:
        asyncio.run(ingest(spark, [str(dump)], str(office.data), ORDERS, topic="a", source="s"))
    assert hit
    assert [event.payload["n"] for event in office.events()] == list(range(EVENTS))
    lake = Lake(str(tmp_path / "lake"))
    with workers_killed() as hit:
        archive(spark, str(office.data), lake)
    assert hit
    assert verify_lake(spark, lake, str(office.data)).ok
    assert lake.frame(spark).count() == EVENTS
    with workers_killed() as hit:
        asyncio.run(replay(spark, lake, str(office.data), BACK, wanted=Selection(stream=ORDERS)))
    assert hit
    assert [event.payload["n"] for event in office.events(BACK)] == list(range(EVENTS))
