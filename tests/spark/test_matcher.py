"""The matcher inside Spark says of every event exactly what the same filters say outside of it."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from postbus.envelope import draft
from postbus.filters import FilterIndex, compile_filter
from postbus.model import Invalid, InvalidFilter
from postbus.spark.matcher import Rule, matched, only_matching
from tests.spark.office import ORDERS, Office

# Values on which JSON readers disagree with each other.
TRAPS = [
    b"100", b"100.0", b'"100"', b"true", b'"true"', b"null", b"[]", b"{}", b'{"n": 100}', b'{"n": 100.0}',
    b'{"n": "100"}', b'{"n": true}', b'{"n": 1}', b'{"n": null}', b'{"n": [100, "100"]}', b'{"n": 1e2}',
    b'{"n": 123456789012345678901234567890}', b'{"a": {"b": 1}, "n": "\\u00e9"}', b'{"n": -0.0}', b'{"n": 0}',
]  # fmt: skip

RULES = [
    Rule("all", ">"),
    Rule("hundred", ">", {"payload": {"n": 100}}),
    Rule("text", ">", {"payload": {"n": "100"}}),
    Rule("true", ">", {"payload": {"n": True}}),
    Rule("null", ">", {"payload": {"n": None}}),
    Rule("any", "order.*", {"payload": {"n": [100, "100", 0]}}),
    Rule("deep", ">", {"payload": {"a.b": 1}}),
    Rule("expr", ">", {"expr": "has(payload.n) && payload.n > 99"}),
    Rule("big", ">", {"expr": "payload.n == 123456789012345678901234567890"}),
    Rule("meta", "order.paid", {"metadata": {"m": 1}}),
    Rule("region", ">", {"expr": "headers.region == 'eu' && variant == 'v' && source == 'shop'"}),
    Rule("nobody", "nobody.>"),
]


def fill(office: Office) -> None:
    office.append(
        [
            draft(
                ("order.paid", "order.sent", "user.seen.twice")[number % 3],
                "shop",
                payload,
                variant="v" if number % 2 else "",
                metadata={"m": number % 3} if number % 4 else None,
                headers={"region": "eu"} if number % 5 == 0 else None,
            )
            for number, payload in enumerate(TRAPS * 3)
        ]
    )


def test_every_event_is_matched_by_the_same_rules_as_outside(spark: SparkSession, office: Office) -> None:
    fill(office)
    rules = [rule for rule in RULES if rule.id != "big"]
    index: FilterIndex[str] = FilterIndex()
    for rule in rules:
        index.add(rule.id, rule.pattern, compile_filter(rule.filter))
    expected = {event.id: index.match(event) for event in office.events()}
    frame = matched(office.read(spark, eventsPerTask=7), rules)
    assert frame.columns[-1] == "matched_by"
    found = {row.id: row.matched_by for row in frame.collect()}
    assert found == {address: names for address, names in expected.items() if names}
    assert any("hundred" in names for names in found.values())
    assert any("text" in names for names in found.values())


def test_only_what_matches_is_left_with_the_columns_it_had(spark: SparkSession, office: Office) -> None:
    fill(office)
    frame = only_matching(office.read(spark), Rule("one", "order.>"))
    assert frame.schema == office.read(spark).schema
    assert {row.topic for row in frame.select("topic").distinct().collect()} == {"order.paid", "order.sent"}
    nothing = only_matching(office.read(spark), Rule("none", "nobody.>"))
    assert nothing.count() == 0


def test_only_the_columns_that_are_wanted_travel_on(spark: SparkSession, office: Office) -> None:
    fill(office)
    whole = matched(office.read(spark), RULES[:2]).select("offset", "topic", "matched_by")
    few = matched(office.read(spark), RULES[:2], keep=("offset", "topic"))
    assert few.schema == whole.schema
    assert sorted(few.collect()) == sorted(whole.collect())


def test_a_bad_rule_is_refused_before_a_task_runs(spark: SparkSession, office: Office) -> None:
    office.stream(ORDERS)
    with pytest.raises(InvalidFilter):
        matched(office.read(spark), [Rule("bad", ">", {"expr": "payload.n >"})])
    with pytest.raises(Invalid, match="empty token"):
        matched(office.read(spark), [Rule("bad", "a..b")])
