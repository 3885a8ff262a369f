"""A client of a Spark Connect server: everything that the pipeline does, and what came of it.

``python -m tests.spark.connect_driver URL DATA FOLDER`` does all of it, ``… URL KAFKA`` reads a log on Kafka by both
readers. In a process of its own: one has sessions of one kind only.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from postbus.model import PostbusError
from postbus.spark.errors import ours
from postbus.spark.frames import events_in
from postbus.spark.jobs.archive import archive
from postbus.spark.jobs.ingest import ingest
from postbus.spark.jobs.materialize import backfill, materialize
from postbus.spark.jobs.replay import Selection, replay
from postbus.spark.jobs.report import report
from postbus.spark.jobs.retention import trim_archived
from postbus.spark.jobs.validate import validate
from postbus.spark.jobs.verify import verify_lake
from postbus.spark.kafka import has_connector, log_frame
from postbus.spark.lake import Lake
from postbus.spark.session import Settings, opened_session

SCHEMA = b'{"type": "object", "properties": {"n": {"type": "integer", "maximum": 19}}}'


def main(url: str, data: str, folder: str) -> None:
    place = Path(folder)
    with opened_session(Settings(remote=url)) as spark:
        told: dict[str, Any] = {"read": spark.read.format("postbus").load(data).where("offset < 5").count()}
        told["refused"] = [_refused(spark, "/nowhere"), _refused_row(spark, data)]
        copied = spark.readStream.format("postbus").option("stream", "journal").load(data)
        writer = copied.selectExpr("topic", "source", "payload", "id AS native_id").writeStream.format("postbus")
        writer = writer.option("data", data).option("stream", "copy").option("createStream", True)
        query = writer.option("checkpointLocation", str(place / "checkpoint")).trigger(availableNow=True).start()
        told["followed"] = query.awaitTermination(300)
        for _ in range(2):  # the second time adds nothing
            batch = spark.read.format("postbus").option("stream", "journal").load(data)
            appended = batch.selectExpr("topic", "source", "payload", "key", "occurred_at", "id AS native_id").write
            appended.format("postbus").mode("append").options(data=data, stream="batch", createStream=True).save()
        told["materialized"] = asyncio.run(materialize(spark, data))
        told["backfilled"] = asyncio.run(backfill(spark, data, "local.default", ["late"]))
        told["ingested"] = [_ingested(spark, data, place) for _ in range(2)]
        told["validated"] = validate(events_in(spark, data, stream="journal"), SCHEMA, (place / "refused").as_uri())
        lake = Lake(str(place / "lake"))
        told["archived"] = archive(spark, data, lake).events
        told["verified"] = verify_lake(spark, lake, data).ok
        wanted = Selection(stream="journal", topic="order.*", filter={"expr": "payload.n < 10"})
        told["replayed"] = [
            asyncio.run(replay(spark, lake, data, "local.default.again", wanted=wanted)) for _ in range(2)
        ]
        facts, page = report(spark, data, str(place / "report"))
        told["reported"] = {
            "events": facts.events,
            "page": page.exists(),
            "tables": len(list(place.glob("report/tables/*"))),
        }
        told["trimmed"] = asyncio.run(trim_archived(spark, data, lake, stream="local.default.ingested"))
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")


def read_kafka(url: str, data: str) -> None:
    with opened_session(Settings(remote=url)) as spark:
        ours_gave = sorted(map(tuple, log_frame(spark, data, kafka_reader="postbus").collect()))
        told: dict[str, Any] = {"rows": len(ours_gave), "connector": has_connector(spark)}
        try:
            theirs = log_frame(spark, data, kafka_reader="spark").collect()
            told["same"] = sorted(map(tuple, theirs)) == ours_gave
        except PostbusError as error:
            told["refused"] = f"{error.message}; {error.hint}"
        told["auto"] = log_frame(spark, data).count()
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")


def _refused(spark: SparkSession, data: str) -> str:
    try:
        spark.read.format("postbus").load(data).count()
    except PySparkException as error:
        return str(ours(error))
    return ""


def _refused_row(spark: SparkSession, data: str) -> str:
    frame = spark.sql("SELECT 'a.b' AS topic, 'shop' AS source, 'no JSON' AS payload, 'x' AS native_id")
    try:
        frame.write.format("postbus").mode("append").options(data=data, stream="journal").save()
    except PySparkException as error:
        return str(ours(error))
    return ""


def _ingested(spark: SparkSession, data: str, place: Path) -> Any:
    quarantine = str(place / "quarantine.jsonl")
    files = [str(place / "dump.jsonl")]
    return asyncio.run(
        ingest(spark, files, data, "local.default.ingested", topic="city.seen", source="import", quarantine=quarantine)
    )


if __name__ == "__main__":
    (main if len(sys.argv) > 3 else read_kafka)(*sys.argv[1:])
