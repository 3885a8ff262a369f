"""A driver on a cluster: fill the inboxes, archive, verify, and say what came of it.

``python -m tests.spark.cluster_driver MASTER DATA LAKE``, in a process of its own because there is one session in each.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from postbus.spark.frames import is_local, tasks_read
from postbus.spark.jobs.archive import archive
from postbus.spark.jobs.materialize import materialize
from postbus.spark.jobs.verify import verify_lake
from postbus.spark.lake import Lake
from postbus.spark.session import Settings, opened_session

# Loopback, and executors small enough for two of them.
MORE = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.cores": "1",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    "spark.cores.max": "2",
}


def main(master: str, data: str, lake: str) -> None:
    with opened_session(Settings(master=master, memory="512m", shuffle_partitions=2, more=MORE)) as spark:
        done = asyncio.run(materialize(spark, data))
        archived = archive(spark, data, Lake(lake))
        found = verify_lake(spark, Lake(lake), data)
        processes = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()
        told = {
            "local": is_local(spark),
            "read": tasks_read(spark, data),
            "executors": processes - 1,  # the driver is one of them
            "materialized": done,
            "archived": archived,
            "verified": found,
        }
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
