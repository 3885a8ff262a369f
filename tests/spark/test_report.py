"""The report: every number on it computed again in plain Python, and the page opened in a real browser."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from postbus import EventBus, Reject, RetryPolicy
from postbus.model import Event, NotFound
from postbus.spark.extent import folder_of
from postbus.spark.jobs.archive import archive
from postbus.spark.jobs.report import report
from postbus.spark.lake import Lake
from postbus.spark.report.facts import Facts, readers_of, width_of
from postbus.spark.report.page import page
from postbus.spark.report.plots import duration, number
from tests.spark.office import Office

ORDERS = 60


async def work(data: Path) -> None:
    """A small shop: orders become invoices, invoices become mails, some orders fail."""
    bus = EventBus(data)
    mails = 0

    @bus.on("order.*", subscriber_id="billing", retry=RetryPolicy(max_attempts=2, backoff_s=0.01, jitter=0))
    async def billing(event: Event, ctx: Any) -> None:
        if event.payload["n"] % 10 == 3:
            raise Reject("<b>no</b>")
        if event.payload["n"] % 20 == 5:
            raise ConnectionError("bank")
        await ctx.publish("invoice.made", event.payload)
        if event.payload["n"] % 4 == 0:
            await ctx.publish("stock.moved", event.payload)

    @bus.on("invoice.*", subscriber_id="mailer")
    async def mailer(event: Event, ctx: Any) -> None:
        nonlocal mails
        await ctx.publish("mail.sent", event.payload)
        mails += 1

    async with bus:
        for n in range(ORDERS):
            correlation = f"case-{n}" if n % 3 == 0 else None
            await bus.publish(("order.paid", "order.sent")[n % 2], "shop", {"n": n}, correlation)
        while mails < ORDERS - 6 - 3 or len(await bus.dead_letters.find()) < 9:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)


def percentile(values: list[float], share: float) -> float:
    """The one between two values, as Spark's exact percentile has it."""
    values = sorted(values)
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Office:
    office = Office(tmp_path_factory.mktemp("shop") / "data")
    asyncio.run(work(office.data))
    return office


@pytest.fixture(scope="module")
def reported(spark: SparkSession, shop: Office) -> tuple[Facts, Path]:
    return report(spark, str(shop.data), str(shop.data.parent / "out"), title="The shop")


def test_every_number_is_what_plain_python_computes(shop: Office, reported: tuple[Facts, Path]) -> None:
    facts, path = reported
    journal = shop.events("local.default.journal")
    dead = shop.events("local.default.journal-dlq")

    assert facts.events == len(journal)
    assert facts.bytes == sum(len(event.payload_json) for event in journal)
    topics = Counter(event.topic for event in journal)
    assert {row["topic"]: row["events"] for row in facts.topics} == topics
    per_topic = {line.name: round(sum(line.values) * facts.bucket_s) for line in facts.rates}
    assert per_topic == topics
    assert [(row["tenant"], row["events"], row["dead"]) for row in facts.tenants] == [
        ("local.default", len(journal), 9)
    ]

    reasons = Counter(
        (event.headers["postbus.dlq.reason"], event.headers["postbus.dlq.subscription"], event.topic) for event in dead
    )
    assert {(row["reason"], row["subscription"], row["origin_topic"]): row["events"] for row in facts.dead} == reasons
    assert sum(row["events"] for row in facts.waiting) == 9

    by_id = {event.id: event for event in journal}
    took: dict[str, list[float]] = defaultdict(list)
    children: Counter[str] = Counter()
    for event in journal:
        cause = event.headers.get("postbus.causation_id")
        if cause is not None:
            parent = by_id[cause]
            took[f"{parent.topic} → {event.topic}"].append((event.created_at_us - parent.created_at_us) / 1e6)
            children[cause] += 1
    assert {step.name: step.events for step in facts.steps} == {name: len(each) for name, each in took.items()}
    for step in facts.steps:
        wanted = [percentile(took[step.name], share) for share in (0.5, 0.9, 0.95, 0.99)]
        assert step.percentiles == pytest.approx(wanted)
        assert step.longest == pytest.approx(max(took[step.name]))
    assert facts.fan_out == max(children.values()) == 2

    chains: dict[str, list[Event]] = defaultdict(list)
    for event in journal:
        chains[event.correlation_id or event.id].append(event)
    caused = {name: each for name, each in chains.items() if any(event.id in children for event in each)}
    assert facts.chain_count == len(caused)
    depths = Counter(max(int(event.headers.get("postbus.hops", 0)) for event in each) + 1 for each in caused.values())
    assert facts.depths == depths
    slowest = max((each[-1].created_at_us - each[0].created_at_us) / 1e6 for each in caused.values())
    assert facts.slowest[0]["took"] == pytest.approx(slowest)

    check_settling(facts, shop, journal)
    assert path.read_text(encoding="utf-8").count("<svg") >= 5
    tables = {folder.name for folder in (path.parent / "tables").iterdir()}
    assert tables == {"rates", "topics", "tenants", "dead_letters", "chains", "steps", "settling"}
    assert json.loads((path.parent / "facts.json").read_bytes())["events"] == len(journal)


def check_settling(facts: Facts, shop: Office, journal: list[Event]) -> None:
    """From append to the first commit that passed the event, for every subscription by itself."""
    words = {"billing": "order.", "mailer": "invoice."}
    commits: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for _, _, consumer, through, at in readers_of(folder_of(str(shop.data))).commits:
        commits[consumer].append((through, at))
    found = {row.name: row for row in facts.settling}
    assert found.keys() == words.keys()
    for name, word in words.items():
        values = []
        for event in journal:
            passed = [(through, at) for through, at in commits[name] if through >= event.offset]
            if event.topic.startswith(word) and passed:
                values.append((min(passed)[1] - event.created_at_us) / 1e6)
        assert found[name].events == len(values)
        assert found[name].percentiles == pytest.approx([percentile(values, share) for share in (0.5, 0.9, 0.95, 0.99)])
        assert found[name].longest == pytest.approx(max(values))
    assert all(line.values[-1] == 0 for line in facts.lag), "everybody has caught up"


def test_the_archive_gives_the_same_report(
    spark: SparkSession, shop: Office, reported: tuple[Facts, Path], tmp_path: Path
) -> None:
    lake = Lake(str(tmp_path / "lake"))
    archive(spark, str(shop.data), lake)
    kept, _ = report(spark, str(shop.data), str(tmp_path / "kept"), lake=lake)
    assert kept == reported[0]


def test_the_page_needs_nothing_from_elsewhere_and_obeys_no_text_in_it(reported: tuple[Facts, Path]) -> None:
    facts = copy.deepcopy(reported[0])
    facts.topics[0]["topic"] = "<script>alert(1)</script>"
    html = page(facts, "a < b & c", 0)
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "a &lt; b &amp; c" in html
    assert not re.search(r"(?:src|href)=|url\(|@import|https?://", html)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser: apt-get install -y chromium")
def test_a_browser_shows_the_page(reported: tuple[Facts, Path], tmp_path: Path) -> None:
    path = reported[1]
    picture = tmp_path / "page.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,3000"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    shown = subprocess.run(
        ["chromium", *flags, profile, f"--screenshot={picture}", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "<title>The shop</title>" in shown.stdout
    for heading in (
        "How much happened",
        "From append to settled",
        "Who fell behind",
        "What failed",
        "What led to what",
    ):
        assert heading in shown.stdout


def test_nothing_to_report_is_said(spark: SparkSession, office: Office, tmp_path: Path) -> None:
    office.stream()
    with pytest.raises(NotFound, match="there are no events to report on"):
        report(spark, str(office.data), str(tmp_path / "out"))


def test_a_log_without_readers_has_a_report_too(spark: SparkSession, office: Office, tmp_path: Path) -> None:
    office.fill(20)
    facts, path = report(spark, str(office.data), str(tmp_path / "out"))
    assert (facts.settling, facts.lag, facts.dead) == ([], [], [])
    assert "Nothing: no dead letter" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (7, "7"), (1234, "1,234"), (34_000, "34 k"), (1_200_000, "1.2 M"), (0.25, "0.25")]
)
def test_numbers_for_people(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.00025, "250 µs"), (0.012, "12 ms"), (90, "1.5 min"), (7200, "2 h"), (86_400, "1 d")],
)
def test_durations_for_people(value: float, text: str) -> None:
    assert duration(value) == text


def test_there_are_never_too_many_buckets() -> None:
    for span_s in (0, 1, 95, 96, 3_600, 86_400 * 3, 86_400 * 365):
        assert span_s / width_of(0, span_s * 1_000_000) <= 96
