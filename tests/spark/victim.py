"""A job that ends its own process with a SIGKILL at a chosen moment: ``python -m tests.spark.victim JOB MOMENT …``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any
from unittest import mock

from postbus.spark.jobs import archive as archive_job
from postbus.spark.jobs.archive import archive
from postbus.spark.jobs.ingest import ingest
from postbus.spark.jobs.replay import Selection, replay
from postbus.spark.lake import Lake
from postbus.spark.session import opened_session
from tests.spark.conftest import TEST_SETTINGS
from tests.spark.office import ORDERS

BACK = "local.default.back"


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(work: int) -> Any:
    return lambda done, _total: die() if done >= work else None


def main(job: str, moment: str, data: str, other: str) -> None:
    hit = die_after(1_500) if moment == "after one" else die_after(10**9)
    if moment == "before the page":
        mock.patch.object(Lake, "add", die).start()
    elif moment == "files half checked":
        mock.patch.object(archive_job, "_check_written", die).start()
    with opened_session(TEST_SETTINGS) as spark:
        if job == "archive":
            archive(spark, data, Lake(other), batch_events=1_500, progress=hit)
        elif job == "ingest":
            asyncio.run(ingest(spark, [other], data, ORDERS, topic="a", source="s", progress=die_after(1)))
        else:
            asyncio.run(
                replay(spark, Lake(other), data, BACK, wanted=Selection(stream=ORDERS), progress=die_after(1_000))
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
