"""A run of ``materialize`` that is killed: ``python -m tests.spark.materialize_victim MOMENT DATA``.

At most moments it ends its own process with a SIGKILL. At ``jvm`` it kills Spark's JVM, says what became of the run,
and begins again with another JVM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from postbus.model import PostbusError
from postbus.spark.jobs import materialize as module
from postbus.spark.jobs.materialize import backfill, materialize
from postbus.spark.session import opened_session
from tests.spark.conftest import TEST_SETTINGS
from tests.spark.mail import TENANT

__all__ = ["MOMENTS", "PAGE"]

PAGE = 100
job: Any = module
SECOND = 3  # pages are committed before it dies
MOMENTS = ("matched", "before commit", "inside commit", "after commit", "places saved", "backfill")


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def jvm_pids() -> list[int]:
    """The Java processes whose parent is this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid() and entry.joinpath("comm").read_text().strip() == "java":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def arm(moment: str) -> None:
    deliver, write, collected = job.deliver, job._Run._write, job._collected
    pages = [0]

    def delivered(*args: Any, **more: Any) -> Any:
        """Inside the open transaction."""
        pages[0] += 1
        if pages[0] > SECOND and moment == "before commit":
            die()
        done = deliver(*args, **more)
        if pages[0] > SECOND and moment in {"inside commit", "backfill"}:
            die()
        return done

    async def written(*args: Any, **more: Any) -> None:
        await write(*args, **more)
        if pages[0] > SECOND and moment == "after commit":
            die()

    def matched(*args: Any) -> Any:
        if moment == "jvm":
            for pid in jvm_pids():
                os.kill(pid, signal.SIGKILL)
        found = collected(*args)
        if moment == "matched":
            die()
        return found

    job.deliver = delivered
    job._Run._write = written
    job._collected = matched
    job.PAGE_MATCHES = PAGE


def main(moment: str, data: str) -> None:
    collected = job._collected
    arm(moment)
    try:
        with opened_session(TEST_SETTINGS) as spark:
            say("ready\n")
            if moment == "backfill":
                asyncio.run(backfill(spark, data, TENANT, ["late"]))
            else:
                last = die if moment == "places saved" else lambda *_: None
                asyncio.run(materialize(spark, data, progress=lambda done, _: last() if done else None))
    except PostbusError as error:
        say(f"{error.message}; {error.hint}\n")
        job._collected = collected
        with opened_session(TEST_SETTINGS) as spark:  # a JVM of its own, in the process whose first one was killed
            asyncio.run(materialize(spark, data))
        sys.exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
