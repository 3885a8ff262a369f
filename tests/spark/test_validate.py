"""History against a schema: exactly the events that the publish edge would have refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from postbus.envelope import draft
from postbus.model import Invalid
from postbus.schemas import Document
from postbus.spark.jobs.validate import validate
from tests.spark.office import Office

SCHEMA = json.dumps(
    {
        "type": "object",
        "required": ["n"],
        "properties": {"n": {"type": "integer", "minimum": 0}, "text": {"type": "string"}},
        "additionalProperties": False,
    }
).encode()


def test_it_finds_what_the_edge_would_have_refused(spark: SparkSession, office: Office, tmp_path: Path) -> None:
    payloads = [{"n": number} for number in range(50)]
    payloads += [{"n": -1}, {"n": "1"}, {"n": 1.5}, {}, {"n": 1, "x": 2}, {"n": -7}]  # type: ignore[dict-item]
    office.append([draft("a", "s", payload) for payload in payloads])
    out = tmp_path / "refused"
    for _ in range(2):  # a second run says the same
        summary = validate(office.read(spark), SCHEMA, str(out))
        assert (summary.checked, summary.refused) == (56, 6)
    document = Document(SCHEMA)
    expected = {event.id for event in office.events() if document.issues(event.payload_json)}
    kept = {row.id: row for row in spark.read.parquet(str(out)).collect()}
    assert kept.keys() == expected
    assert all(row.issues[0].message for row in kept.values())
    assert sum(issue.events for issue in summary.issues) >= 6
    assert summary.issues[0].events >= summary.issues[-1].events


def test_a_history_without_fault(spark: SparkSession, office: Office) -> None:
    office.append([draft("a", "s", {"n": 1})])
    summary = validate(office.read(spark), SCHEMA)
    assert (summary.checked, summary.refused, summary.issues) == (1, 0, ())


def test_a_bad_schema_is_refused_at_once(spark: SparkSession, office: Office) -> None:
    office.append([draft("a", "s", {"n": 1})])
    with pytest.raises(Invalid):
        validate(office.read(spark), b'{"type": "nonsense"}')
