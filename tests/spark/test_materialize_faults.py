"""Drivers, JVMs and workers killed while they fill inboxes: run again, nothing is missing and nothing is there twice.

There is no checkpoint to lose: the cursors are the only memory of a run. Losing the newest of them, as a lost entry of
a commit log would, is a reset.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from postbus.clock import SystemClock
from postbus.envelope import draft
from postbus.inbox import Digest, Inboxes
from postbus.inbox.agents import Agents
from postbus.log import SqliteLog
from postbus.model import Start, StartPolicy
from postbus.spark.jobs import materialize as job
from postbus.spark.jobs.materialize import backfill, materialize
from tests.spark.mail import TENANT, Mail
from tests.spark.materialize_victim import MOMENTS, PAGE
from tests.spark.test_kills import workers_killed

FULL = os.environ.get("POSTBUS_CAMPAIGN") == "full"
ROOT = Path(__file__).parents[2]
JOURNAL = f"{TENANT}.journal"
EVENTS = 2_000
SHORT = {"inside commit"}
RANDOM_KILLS = 8
SEED = int(os.environ.get("POSTBUS_SEED", "6"))


@pytest.fixture
def mail(tmp_path: Path) -> Mail:
    """Two agents, subscriptions of which some match rarely or never, two tenants, and a history."""
    made = Mail(tmp_path / "data")
    made.agent()
    made.agent("bob")
    made.agent("eve", "acme.eu")
    made.subscribe("order.>", "orders", digest=Digest(by="metadata.resource", items=5))
    made.subscribe(">", "rare", filter={"payload": {"n": [3, 700, 1999]}})
    made.subscribe(">", "third", "bob", filter={"expr": "payload.n % 3 == 0"})
    made.subscribe("nobody.>", "nothing", "bob")
    made.subscribe(">", "theirs", "eve", "acme.eu")
    made.subscribe("order.paid", "late", "bob", engine="live")
    for stream, count in ((JOURNAL, EVENTS), ("acme.eu.journal", 300)):
        made.append(
            [
                draft(f"order.{'paid' if n % 2 else 'sent'}", "shop", {"n": n}, metadata={"resource": f"r{n % 7}"})
                for n in range(count)
            ],
            stream,
        )
    return made


def copied(mail: Mail, folder: Path, late: str = "live") -> Mail:
    """A copy of the store that the live pump can serve; ``late`` is left out unless it is to be served too."""
    shutil.copytree(mail.data, folder)
    twin = Mail(folder)

    async def turned(log: SqliteLog) -> None:
        agents = Agents(log)
        for one in await agents.subscriptions():
            chosen = one.id == "late"
            await agents.hand_over(one.tenant, one.id, "spark" if chosen and late == "live" else "live")

    twin.run(turned)
    return twin


def expected(mail: Mail, folder: Path, late: str = "live") -> dict[str, list[tuple[Any, ...]]]:
    """What the live pump makes of a copy of the store."""
    twin = copied(mail, folder, late)
    twin.pump()
    return twin.all()


def killed(moment: str, data: Path) -> None:
    command = [sys.executable, "-m", "tests.spark.materialize_victim", moment, str(data)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode() + done.stdout.decode()


@pytest.mark.parametrize("moment", [each for each in MOMENTS if each != "backfill" and (FULL or each in SHORT)])
def test_after_the_driver_was_killed(spark: SparkSession, mail: Mail, tmp_path: Path, moment: str) -> None:
    right = expected(mail, tmp_path / "live")
    killed(moment, mail.data)
    half = len(mail.all()["items"])
    assert half == 0 if moment == "matched" else half >= 3 * PAGE
    asyncio.run(materialize(spark, str(mail.data)))
    assert mail.all() == right
    assert asyncio.run(materialize(spark, str(mail.data))).jobs == 0


@pytest.mark.skipif(not FULL, reason="the full campaign does this")
def test_after_the_driver_was_killed_in_a_backfill(spark: SparkSession, mail: Mail, tmp_path: Path) -> None:
    right = expected(mail, tmp_path / "live", late="served")
    killed("backfill", mail.data)
    assert mail.place("late") in range(1, EVENTS), "it came half way"
    asyncio.run(backfill(spark, str(mail.data), TENANT, ["late"]))
    asyncio.run(materialize(spark, str(mail.data)))
    found = mail.all()
    assert found["cursors"] == right["cursors"]
    assert facts(found) == facts(right)
    engines = {one.id: one.engine for one in mail.run(lambda log: Agents(log).subscriptions(TENANT))}
    assert engines["late"] == "live"


def facts(rows: dict[str, list[tuple[Any, ...]]]) -> set[tuple[Any, ...]]:
    """Which events are in which inbox; who came first depends on who was served first."""
    found = [(*row[:2], *row[3:6]) for row in rows["items"]]
    assert len(found) == len(set(found))
    return set(found)


def test_after_the_jvm_was_killed(mail: Mail, tmp_path: Path) -> None:
    right = expected(mail, tmp_path / "live")
    command = [sys.executable, "-m", "tests.spark.materialize_victim", "jvm", str(mail.data)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300, check=False)
    assert done.returncode == 3, done.stderr.decode()
    assert done.stdout.decode().splitlines()[1].startswith("Spark has died; ")
    assert mail.all() == right


def test_workers_killed_while_they_match(
    spark: SparkSession, mail: Mail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = expected(mail, tmp_path / "live")
    monkeypatch.setattr(job, "TASK_MIN", 100)
    with workers_killed() as hit:
        asyncio.run(materialize(spark, str(mail.data)))
    assert hit
    assert mail.all() == right


def test_a_lost_cursor_costs_a_second_reading_and_changes_nothing(
    spark: SparkSession, mail: Mail, tmp_path: Path
) -> None:
    right = expected(mail, tmp_path / "live")
    asyncio.run(materialize(spark, str(mail.data)))
    back = Start(policy=StartPolicy.AT_OFFSET, offset=EVENTS // 2)

    async def lose(log: SqliteLog) -> None:
        for name in ("orders", "rare", "third", "nothing"):
            await Inboxes(log, SystemClock()).reset(TENANT, name, back)

    mail.run(lose)
    again = asyncio.run(materialize(spark, str(mail.data)))
    assert again.events == EVENTS // 2
    assert mail.all() == right


@pytest.mark.skipif(not FULL, reason="the full campaign does this")
def test_killed_at_any_moment_again_and_again(spark: SparkSession, mail: Mail, tmp_path: Path) -> None:
    twin = copied(mail, tmp_path / "live")
    moments = random.Random(SEED)
    command = [sys.executable, "-m", "tests.spark.materialize_victim", "never", str(mail.data)]
    cut = 0
    for number in range(RANDOM_KILLS):
        more = [draft("order.paid", "shop", {"n": n}) for n in range(number * 1000, number * 1000 + 1000)]
        for each in (mail, twin):
            each.append(more, JOURNAL)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            try:
                child.wait(moments.uniform(0, 8))
            except subprocess.TimeoutExpired:
                child.kill()
                cut += 1
    assert cut
    asyncio.run(materialize(spark, str(mail.data)))
    twin.pump()
    assert mail.all() == twin.all(), f"seed {SEED}"


@pytest.mark.skipif(not FULL, reason="the full campaign does this")
def test_a_run_that_follows_ends_when_it_is_interrupted(mail: Mail, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "postbus",
        "pipeline",
        "run",
        "--follow",
        "--all-tenants",
        "--data",
        str(mail.data),
    ]
    with (tmp_path / "err").open("wb") as err:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, start_new_session=True)
    deadline = time.monotonic() + 300
    while mail.place("orders") < EVENTS and child.poll() is None:
        assert time.monotonic() < deadline, "it never comes that far"
        time.sleep(0.2)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does: Spark gets it too
    out, _ = child.communicate(timeout=120)
    assert child.returncode == 0, (tmp_path / "err").read_text()
    assert out.startswith(b"read 2,30")
    assert b"Traceback" not in (tmp_path / "err").read_bytes()
