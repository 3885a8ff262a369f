"""The lake: everything in it once, provably what the log held, and the log trimmed only behind it."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from postbus.model import AlreadyServed, CorruptLog, Invalid, NotFound, OffsetOutOfRange, Start, StartPolicy
from postbus.spark.jobs.archive import archive
from postbus.spark.jobs.retention import trim_archived
from postbus.spark.jobs.verify import verify_lake
from postbus.spark.lake import Lake
from postbus.spark.schema import EVENT_SCHEMA
from tests.spark.office import ORDERS, Office, ids

OTHER = "acme.eu.other"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


@pytest.fixture
def filled(office: Office) -> Office:
    office.stream(partitions=2)
    office.fill(120)
    office.fill(40, OTHER)
    return office


def test_the_lake_holds_every_event_once_in_batches(spark: SparkSession, filled: Office, lake: Lake) -> None:
    seen: list[tuple[int, int]] = []
    done = archive(spark, str(filled.data), lake, batch_events=50, progress=lambda *at: seen.append(at))
    assert (done.batches, done.events) == (4, 160)
    assert seen[0] == (0, 160)
    assert seen[-1] == (160, 160)
    again = archive(spark, str(filled.data), lake)
    assert (again.batches, again.events) == (0, 0)
    filled.fill(7, OTHER, first=40)
    more = archive(spark, str(filled.data), lake)
    assert (more.batches, more.events) == (1, 7)
    assert more.ends[f"{OTHER}/0"] == 47

    frame = lake.frame(spark)
    columns = EVENT_SCHEMA.names
    assert frame.columns == [*columns, "tenant", "day", "batch"]
    logged = filled.read(spark)
    assert frame.select(columns).exceptAll(logged).count() == 0
    assert logged.exceptAll(frame.select(columns)).count() == 0
    assert {row.tenant for row in frame.select("tenant").distinct().collect()} == {"local.default", "acme.eu"}


def test_files_lie_by_tenant_stream_and_day_and_are_in_order(
    spark: SparkSession, filled: Office, lake: Lake, tmp_path: Path
) -> None:
    archive(spark, str(filled.data), lake)
    files = sorted((tmp_path / "lake" / "events").rglob("*.parquet"))
    assert files
    for file in files:
        batch, tenant, stream, day = [part.partition("=")[0] for part in file.parts[-5:-1]]
        assert (batch, tenant, stream, day) == ("batch", "tenant", "stream", "day")
        table = pq.ParquetFile(file).read()
        assert table.column("offset").to_pylist() == sorted(table.column("offset").to_pylist())


def test_one_stream_can_be_archived_by_itself(spark: SparkSession, filled: Office, lake: Lake) -> None:
    archive(spark, str(filled.data), lake, stream="acme.eu.*")
    assert {row.stream for row in lake.frame(spark).select("stream").distinct().collect()} == {OTHER}
    archive(spark, str(filled.data), lake)
    assert lake.frame(spark).count() == 160
    assert verify_lake(spark, lake, str(filled.data)).ok


def test_a_run_that_died_before_its_page_leaves_nothing_that_counts(
    spark: SparkSession, filled: Office, lake: Lake, tmp_path: Path
) -> None:
    archive(spark, str(filled.data), lake, batch_events=100)
    before = ids(lake.frame(spark))
    newest = max((tmp_path / "lake" / "_manifest").glob("*.json"))
    newest.unlink()  # as if the run had died just before it wrote the page
    assert len(ids(lake.frame(spark))) == 100
    done = archive(spark, str(filled.data), lake)
    assert (done.dropped, done.events) == (1, 60)
    assert ids(lake.frame(spark)) == before
    assert verify_lake(spark, lake, str(filled.data)).ok


def test_verify_proves_the_lake_by_itself_and_against_the_log(spark: SparkSession, filled: Office, lake: Lake) -> None:
    archive(spark, str(filled.data), lake, batch_events=70)
    alone = verify_lake(spark, lake)
    assert (alone.ok, alone.batches, alone.events, alone.compared) == (True, 3, 160, 0)
    both = verify_lake(spark, lake, str(filled.data))
    assert both.ok
    assert both.compared == sum(len(batch.segments) for batch in lake.batches())
    assert sum(both.verified.values()) == 160


@pytest.mark.parametrize("damage", ["payload", "lost", "twice"])
def test_verify_names_what_is_not_as_it_was_archived(
    spark: SparkSession, filled: Office, lake: Lake, tmp_path: Path, damage: str
) -> None:
    archive(spark, str(filled.data), lake)
    file = next((tmp_path / "lake" / "events").rglob("stream=acme.eu.other/**/*.parquet"))
    table = pq.ParquetFile(file).read()
    if damage == "payload":
        payloads = table.column("payload").to_pylist()
        payloads[3] = payloads[3].replace("3", "4")
        table = table.set_column(table.column_names.index("payload"), "payload", [payloads])
    elif damage == "lost":
        table = table.slice(0, table.num_rows - 1)
    else:
        table = table.take([0, 0, *range(1, table.num_rows)])
    file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
    pq.write_table(table, file)
    report = verify_lake(spark, lake, str(filled.data))
    assert [problem.key for problem in report.problems] == [f"{OTHER}/0"]
    expected = {"payload": "an event is altered", "lost": "and the manifest 40", "twice": "is missing or twice"}
    assert expected[damage] in report.problems[0].what
    assert f"{OTHER}/0" not in report.verified
    with pytest.raises(CorruptLog, match="nothing was trimmed"):
        asyncio.run(trim_archived(spark, str(filled.data), lake))
    assert filled.read(spark).count() == 160


def test_a_log_that_differs_from_the_lake_is_found(
    spark: SparkSession, filled: Office, lake: Lake, tmp_path: Path
) -> None:
    archive(spark, str(filled.data), lake)
    other = Office(tmp_path / "other")
    other.fill(200)
    with pytest.raises(CorruptLog, match="holds another store"):
        archive(spark, str(other.data), lake)
    assert not verify_lake(spark, lake, str(other.data)).ok


# --- retention --------------------------------------------------------------------------------------------------------


def test_only_what_is_archived_is_trimmed(spark: SparkSession, filled: Office, lake: Lake) -> None:
    archive(spark, str(filled.data), lake)
    filled.fill(11, OTHER, first=40)
    done = asyncio.run(trim_archived(spark, str(filled.data), lake))
    assert sum(each.removed for each in done) == 160
    assert ids(filled.read(spark)) == sorted(f"{OTHER}/0/{offset}" for offset in range(40, 51))
    assert lake.frame(spark).count() == 160
    assert asyncio.run(trim_archived(spark, str(filled.data), lake)) == []
    archive(spark, str(filled.data), lake)
    assert verify_lake(spark, lake, str(filled.data)).ok


def test_a_reader_and_an_age_hold_back_what_is_trimmed(spark: SparkSession, filled: Office, lake: Lake) -> None:
    archive(spark, str(filled.data), lake)
    assert asyncio.run(trim_archived(spark, str(filled.data), lake, older_than_s=3_600)) == []
    start = Start(policy=StartPolicy.AT_OFFSET, offset=15)
    filled.run(lambda log: log.ensure_consumer(OTHER, "slow", start))
    done = asyncio.run(trim_archived(spark, str(filled.data), lake, stream=OTHER, older_than_s=0))
    assert [(each.key, each.removed, each.first, each.held_back_by) for each in done] == [
        (f"{OTHER}/0", 15, 15, ("slow",))
    ]
    assert len(filled.events()) > 0, "other streams were not asked for"


def test_events_that_were_trimmed_unarchived_are_said(spark: SparkSession, filled: Office, lake: Lake) -> None:
    archive(spark, str(filled.data), lake, stream=OTHER)
    filled.fill(20, OTHER, first=40)
    filled.trim(50, OTHER)
    with pytest.raises(OffsetOutOfRange, match=f"{OTHER}/0 was trimmed to 50, and is archived only up to 40"):
        archive(spark, str(filled.data), lake)
    done = archive(spark, str(filled.data), lake, accept_gaps=True)
    assert done.events == 10 + 120
    assert verify_lake(spark, lake, str(filled.data)).ok


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_lake_that_is_not_there_or_not_whole(spark: SparkSession, filled: Office, lake: Lake, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no archive"):
        verify_lake(spark, lake)
    with pytest.raises(NotFound, match="there is no archive"):
        lake.frame(spark)
    with pytest.raises(Invalid, match="cannot be used"):
        Lake("nothing://x")
    archive(spark, str(filled.data), lake, batch_events=60)
    manifest = tmp_path / "lake" / "_manifest"
    (manifest / "00000002.json").rename(manifest / "00000002.lost")
    with pytest.raises(CorruptLog, match="lacks page 2"):
        archive(spark, str(filled.data), lake)
    (manifest / "00000002.json").write_text("{")
    with pytest.raises(CorruptLog, match="cannot be read"):
        lake.batches()


def test_two_runs_do_not_write_to_one_lake(spark: SparkSession, filled: Office, lake: Lake, tmp_path: Path) -> None:
    with lake.locked(), pytest.raises(AlreadyServed, match="another run writes"):
        archive(spark, str(filled.data), Lake(str(tmp_path / "lake")))
    assert archive(spark, str(filled.data), lake).events == 160


def test_the_manifest_is_readable(spark: SparkSession, filled: Office, lake: Lake, tmp_path: Path) -> None:
    archive(spark, str(filled.data), lake)
    page = json.loads((tmp_path / "lake" / "_manifest" / "00000001.json").read_text())
    assert page["events"] == 160
    assert {(each["stream"], each["partition"], each["first"]) for each in page["segments"]} == {
        (ORDERS, 0, 0),
        (ORDERS, 1, 0),
        (OTHER, 0, 0),
    }
    copy = tmp_path / "moved"
    shutil.copytree(tmp_path / "lake", copy)
    assert verify_lake(spark, Lake(str(copy)), str(filled.data)).ok, "a lake can be moved"
