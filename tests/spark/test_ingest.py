"""Dumps become events: once, in order, with every bad row named and nothing else lost."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from postbus.model import Invalid, NotFound
from postbus.spark.feed import Fed, Page
from postbus.spark.jobs import ingest as job
from postbus.spark.jobs.ingest import Defaults, _pages, ingest, splits
from tests.spark.office import ORDERS, Office


def run(spark: SparkSession, office: Office, *paths: Path, **more: Any) -> Fed:
    names = [str(path) for path in paths]
    return asyncio.run(ingest(spark, names, str(office.data), ORDERS, **more))


def counts(fed: Fed) -> tuple[int, int, int]:
    return fed.appended, fed.duplicates, fed.refused


def test_json_lines_become_events_in_order_and_only_once(
    spark: SparkSession, office: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "SPLIT_BYTES", 4_000)
    folder = tmp_path / "dump"
    folder.mkdir()
    lines = [json.dumps({"topic": "order.paid", "source": "old", "payload": {"n": n}}) for n in range(400)]
    (folder / "b.jsonl").write_text("\n".join(lines[250:]))
    (folder / "a.jsonl").write_text("\n".join(lines[:250]) + "\n\n")
    (folder / "_left_over.jsonl").write_text("rubbish")
    assert len(splits([str(folder)])) > 4
    seen: list[tuple[int, int]] = []
    assert counts(run(spark, office, folder, progress=lambda *at: seen.append(at))) == (400, 0, 0)
    assert [event.payload["n"] for event in office.events()] == list(range(400))
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert counts(run(spark, office, folder)) == (0, 400, 0)
    assert len(office.events()) == 400


def test_equal_rows_are_all_kept(spark: SparkSession, office: Office, tmp_path: Path) -> None:
    dump = tmp_path / "same.jsonl"
    dump.write_text('{"payload": 1}\n' * 5)
    assert counts(run(spark, office, dump, topic="a", source="s")) == (5, 0, 0)
    assert counts(run(spark, office, dump, topic="a", source="s")) == (0, 5, 0)


def test_every_field_of_an_event_is_taken_and_payloads_keep_their_bytes(
    spark: SparkSession, office: Office, tmp_path: Path
) -> None:
    dump = tmp_path / "all.jsonl"
    dump.write_text(
        '{"id": "x/0/9", "topic": "a.b", "source": "s", "payload": {"big": 123456789012345678901234567890,  "x":1.0},'
        ' "variant": "v", "key": "k", "metadata": {"m": 1}, "headers": {"h": "1"}, "correlation_id": "c",'
        ' "native_id": "n", "delivery_handle": {"to": 1}, "occurred_at": "2026-01-01T00:00:00Z",'
        ' "trust": "untrusted"}\n'
    )
    assert counts(run(spark, office, dump)) == (1, 0, 0)
    (event,) = office.events()
    assert event.payload_json == b'{"big": 123456789012345678901234567890,  "x":1.0}'
    facts = (event.topic, event.source, event.variant, event.key, event.metadata, event.headers, event.correlation_id)
    assert facts == ("a.b", "s", "v", "k", {"m": 1}, {"h": "1"}, "c")
    more = (event.native_id, event.delivery_handle, event.occurred_at.isoformat(), event.trust)
    assert more == ("n", {"to": 1}, "2026-01-01T00:00:00+00:00", "untrusted")


def test_bad_rows_are_kept_aside_with_their_reason(spark: SparkSession, office: Office, tmp_path: Path) -> None:
    dump, aside = tmp_path / "mixed.jsonl", tmp_path / "aside" / "bad.jsonl"
    rows = [
        '{"payload": 1}',
        "{nonsense",
        '{"payload": 1, "payload": 2}',
        '{"payload": 1, "topic": "a.*"}',
        '{"payload": 1, "colour": "red"}',
        '{"payload": 1, "headers": {"postbus.x": "1"}}',
        '{"payload": 1, "headers": "x"}',
        '{"payload": 1, "trust": "maybe"}',
        '{"payload": 1, "occurred_at": "yesterday"}',
        '"just a value"',
        '{"payload": 2, "native_id": "same"}',
        '{"payload": 3, "native_id": "same"}',
        '{"payload": 4}',
    ]
    dump.write_bytes("\n".join(rows).encode() + b'\n{"payload": "\xff"}\n')
    fed = run(spark, office, dump, topic="a", source="s", quarantine=str(aside))
    assert counts(fed) == (4, 0, 10)
    assert [event.payload for event in office.events()] == [1, "just a value", 2, 4]
    kept = [json.loads(line) for line in aside.read_text().splitlines()]
    reasons = {row["row"]: row["reason"] for row in kept}
    assert "topic" in reasons[rows[3]] or "pattern" in reasons[rows[3]] or "wildcard" in reasons[rows[3]]
    assert reasons[rows[4]] == "an event has no field 'colour'"
    assert "reserved prefix" in reasons[rows[5]]
    assert all(row["place"].startswith("mixed.jsonl:") for row in kept)
    assert any("same" in row["reason"] for row in kept), "other content under a native id that is taken"
    dump.write_text('{"payload": 1}\n')
    run(spark, office, dump, topic="a", source="s", quarantine=str(aside))
    assert not aside.exists(), "nothing was refused this time"


def test_csv_and_parquet_rows(spark: SparkSession, office: Office, tmp_path: Path) -> None:
    plain, events = tmp_path / "plain.csv", tmp_path / "events.csv"
    plain.write_text('city,people\n"Den Haag, NL",562\n"two\nlines",1\n')
    events.write_text('topic,source,payload,key\na.b,s,"{""n"": 1}",k\n,s,2,\n')
    assert counts(run(spark, office, plain, events, topic="d", source="x")) == (4, 0, 0)
    assert [(event.topic, event.source, event.key, event.payload) for event in office.events()] == [
        ("d", "x", None, {"city": "Den Haag, NL", "people": "562"}),
        ("d", "x", None, {"city": "two\nlines", "people": "1"}),
        ("a.b", "s", "k", {"n": 1}),
        ("d", "s", None, 2),
    ]
    table = tmp_path / "table.parquet"
    pq.write_table(pa.table({"n": [1, None], "when": pa.array([0, 1], pa.timestamp("us", "UTC"))}), table)
    assert counts(run(spark, office, table, topic="t", source="x")) == (2, 0, 0)
    assert [event.payload["n"] for event in office.events()[-2:]] == [1, None]
    assert counts(run(spark, office, table, plain, topic="t", source="x")) == (0, 2, 2), "the topic differs now"


def test_packed_lines(spark: SparkSession, office: Office, tmp_path: Path) -> None:
    dump = tmp_path / "dump.jsonl.gz"
    dump.write_bytes(gzip.compress(b'{"payload": 1}\n{"payload": 2}'))
    assert counts(run(spark, office, dump, topic="a", source="s")) == (2, 0, 0)
    dump.write_bytes(gzip.compress(b'{"payload": 3}\n' * 3)[:-9])
    fed = run(spark, office, dump, topic="a", source="s")
    assert fed.refused == 1, "a broken file is said"


def test_what_cannot_be_ingested_is_refused_before_anything_is_written(
    spark: SparkSession, office: Office, tmp_path: Path
) -> None:
    good, odd = tmp_path / "a.jsonl", tmp_path / "a.doc"
    good.write_text('{"payload": 1}')
    odd.write_text("")
    with pytest.raises(NotFound, match="there is no file"):
        run(spark, office, tmp_path / "missing.jsonl")
    with pytest.raises(Invalid, match="no kind of file"):
        run(spark, office, odd)
    with pytest.raises(Invalid, match="wildcard"):
        run(spark, office, good, topic="a.*")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match="there are no files"):
        run(spark, office, tmp_path / "empty")
    assert not office.data.exists()


def test_lines_are_found_whole_wherever_a_file_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = tmp_path / "cut.jsonl"
    lines = [json.dumps({"payload": "x" * (n % 7)}) for n in range(60)]
    dump.write_text("\n".join(lines))
    monkeypatch.setattr(job, "BLOCK_BYTES", 13)
    for size in (1, 2, 3, 17, 18, 19, 40, 10_000):
        monkeypatch.setattr(job, "SPLIT_BYTES", size)
        found = [
            draft.payload_json
            for part in splits([str(dump)])
            for raw in _pages(part, Defaults("a", "s"))
            for draft in msgspec.msgpack.decode(raw, type=Page).drafts
        ]
        assert found == [json.dumps("x" * (n % 7)).encode() for n in range(60)], size
