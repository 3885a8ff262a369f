"""Events come back from the lake: the chosen ones, in order, once, also after the log has let them go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from postbus.envelope import draft
from postbus.model import Event, Invalid, InvalidFilter, NotFound
from postbus.spark.feed import Fed
from postbus.spark.jobs.archive import archive
from postbus.spark.jobs.replay import ORIGIN, Selection, replay
from postbus.spark.jobs.retention import trim_archived
from postbus.spark.lake import Lake
from tests.conformance.fake_clock import FakeClock
from tests.spark.office import ORDERS, Office

BACK = "local.default.back"


@pytest.fixture
def lake(spark: SparkSession, office: Office, tmp_path: Path) -> Lake:
    office.stream(partitions=2)
    office.fill(150)
    office.fill(20, "acme.eu.other")
    made = Lake(str(tmp_path / "lake"))
    archive(spark, str(office.data), made)
    return made


def run(spark: SparkSession, lake: Lake, office: Office, **wanted: Any) -> Fed:
    return asyncio.run(replay(spark, lake, str(office.data), BACK, wanted=Selection(**wanted)))


def facts(event: Event) -> tuple[Any, ...]:
    """What must come back as it was."""
    return (
        event.topic, event.source, event.variant, event.key, event.payload_json, event.metadata_json,
        event.correlation_id, event.delivery_handle_json, event.occurred_at_us, event.trust,
    )  # fmt: skip


def test_a_trimmed_range_is_restored_in_order_and_once(spark: SparkSession, office: Office, lake: Lake) -> None:
    before = {event.id: event for partition in (0, 1) for event in office.events(partition=partition)}
    asyncio.run(trim_archived(spark, str(office.data), lake))
    assert office.events() == []
    fed = run(spark, lake, office, stream="orders")
    assert (fed.appended, fed.duplicates, fed.refused) == (150, 0, 0)
    back = office.events(BACK)
    assert [facts(event) for event in back] == [facts(before[event.headers[ORIGIN]]) for event in back]
    origins = [event.headers[ORIGIN] for event in back]
    assert origins == [event.id for event in before.values()], "each partition in its order"
    again = run(spark, lake, office, stream="orders")
    assert (again.appended, again.duplicates) == (0, 150)
    assert len(office.events(BACK)) == 150


def test_into_another_log(spark: SparkSession, lake: Lake, tmp_path: Path) -> None:
    other = Office(tmp_path / "other")
    fed = asyncio.run(replay(spark, lake, str(other.data), BACK, wanted=Selection(stream="acme.>")))
    assert fed.appended == 20
    assert [event.payload["n"] for event in other.events(BACK)] == list(range(20))


@pytest.mark.parametrize(
    ("wanted", "condition"),
    [
        ({"topic": "order.*"}, lambda event: event.topic.startswith("order.")),
        ({"topic": "*.seen", "stream": ORDERS}, lambda event: event.topic == "user.seen" and event.stream == ORDERS),
        (
            {"stream": ORDERS, "partition": 0, "first": 10, "end": 20},
            lambda event: event.stream == ORDERS and event.partition == 0 and 10 <= event.offset < 20,
        ),
        ({"filter": {"expr": "payload.n % 10 == 3"}}, lambda event: event.payload["n"] % 10 == 3),
        ({"filter": {"metadata": {"m": [5, 15]}}}, lambda event: event.metadata.get("m") in {5, 15}),
        ({"until_us": 0}, lambda _event: False),
    ],
)
def test_a_selection_is_replayed_and_nothing_else(
    spark: SparkSession, office: Office, lake: Lake, wanted: dict[str, Any], condition: Any
) -> None:
    streams = ((ORDERS, 0), (ORDERS, 1), ("acme.eu.other", 0))
    expected = {event.id for stream, number in streams for event in office.events(stream, number) if condition(event)}
    fed = run(spark, lake, office, **wanted)
    clash = 20 if not wanted.get("stream") and fed.refused else 0
    assert fed.appended + fed.refused + fed.duplicates == len(expected), clash
    if expected:
        assert {event.headers[ORIGIN] for event in office.events(BACK)} <= expected


def test_two_events_with_one_native_id_are_said(spark: SparkSession, office: Office, lake: Lake) -> None:
    refused: list[Any] = []
    fed = asyncio.run(replay(spark, lake, str(office.data), BACK, refuse=refused.extend))
    assert fed.refused == 10, "the other stream has the same native ids for other addresses"
    assert len(refused) == 10
    assert fed.appended == 160


def test_the_servers_own_headers_come_back_too(spark: SparkSession, office: Office, tmp_path: Path) -> None:
    office.append([draft("a", "s", 1, headers={"mine": "1"}, system_headers={"postbus.hops": "3"})])
    lake = Lake(str(tmp_path / "own"))
    archive(spark, str(office.data), lake)
    run(spark, lake, office)
    (event,) = office.events(BACK)
    assert event.headers == {"mine": "1", "postbus.hops": "3", ORIGIN: f"{ORDERS}/0/0"}
    assert event.native_id == f"{ORDERS}/0/0"


def test_the_rate_is_held(spark: SparkSession, lake: Lake, office: Office) -> None:
    from postbus.spark.feed import feed  # noqa: PLC0415 - on a clock of its own
    from postbus.spark.jobs.replay import pages, selected  # noqa: PLC0415

    class Sleeper(FakeClock):
        slept = 0.0

        def monotonic_s(self) -> float:
            return self.slept

        async def sleep(self, seconds: float) -> None:
            self.slept += seconds

    clock = Sleeper()
    rows = pages(selected(lake.frame(spark), Selection(stream=ORDERS))).collect()
    fed = asyncio.run(feed(rows, str(office.data), BACK, rate=100, clock=clock))
    assert fed.appended == 150
    assert clock.slept == pytest.approx(1.5, abs=0.01)


def test_what_makes_no_sense_is_refused(spark: SparkSession, office: Office, lake: Lake, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot be replayed into"):
        asyncio.run(replay(spark, lake, str(office.data), ORDERS))
    with pytest.raises(InvalidFilter):
        run(spark, lake, office, filter={"expr": "payload.n >"})
    with pytest.raises(Invalid, match="rate"):
        asyncio.run(replay(spark, lake, str(office.data), BACK, rate=0))
    with pytest.raises(NotFound, match="there is no archive"):
        asyncio.run(replay(spark, Lake(str(tmp_path / "none")), str(office.data), BACK))
    assert not office.run(lambda log: log.has_stream(BACK))
