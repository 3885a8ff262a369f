"""A client of a Spark Connect server: read, follow, fill inboxes, archive, verify, and say what came of it.

``python -m tests.spark.connect_driver URL DATA FOLDER``, in a process of its own: one has sessions of one kind only.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
from pyspark.errors import PySparkException

from postbus.spark.errors import ours
from postbus.spark.jobs.archive import archive
from postbus.spark.jobs.materialize import materialize
from postbus.spark.jobs.verify import verify_lake
from postbus.spark.lake import Lake
from postbus.spark.session import Settings, opened_session


def main(url: str, data: str, folder: str) -> None:
    with opened_session(Settings(remote=url)) as spark:
        told: dict[str, object] = {"read": spark.read.format("postbus").load(data).where("offset < 5").count()}
        try:
            spark.read.format("postbus").load("/nowhere").count()
        except PySparkException as error:
            told["refused"] = str(ours(error))
        copied = spark.readStream.format("postbus").option("stream", "journal").load(data)
        writer = copied.selectExpr("topic", "source", "payload", "id AS native_id").writeStream.format("postbus")
        writer = writer.option("data", data).option("stream", "copy").option("createStream", True)
        query = writer.option("checkpointLocation", str(Path(folder) / "checkpoint")).trigger(availableNow=True).start()
        told["followed"] = query.awaitTermination(300)
        told["materialized"] = asyncio.run(materialize(spark, data))
        lake = Lake(str(Path(folder) / "lake"))
        told["archived"] = archive(spark, data, lake).events
        told["verified"] = verify_lake(spark, lake, data).ok
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
