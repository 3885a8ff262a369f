"""Spark and the live pump, on copies of one store, fill the inboxes with the same rows and leave the same cursors.

Each generated set of subscriptions and events is a tenant of its own, so that a few Spark jobs serve them all. What
differs between two runs of the pump itself is left out: instants, and in what order events of different partitions
come together in one inbox.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

from postbus.clock import SystemClock
from postbus.envelope import draft
from postbus.filters import compile_filter
from postbus.inbox import Cleanup, Digest, Inboxes
from postbus.inbox.agents import Agents
from postbus.log import SqliteLog
from postbus.model import Draft, InvalidFilter, Start, StartPolicy, StreamSettings, instant
from postbus.spark.jobs import materialize as job
from postbus.spark.jobs.materialize import materialize
from tests.filter_cases import NAMES, Maker
from tests.spark.mail import EARLIEST, PULL, Mail

FULL = os.environ.get("POSTBUS_CAMPAIGN") == "full"
SEED = int(os.environ.get("POSTBUS_SEED", "6"))
SETS = 240 if FULL else 24

# Values on which JSON readers disagree with each other, in a field and alone.
TRAPS = (
    "100", "100.0", "1e2", '"100"', "true", '"true"', "null", "[]", "{}", "-0.0", "0", "1", "1.0", '"1"', "[1]",
    '[100, "100", true]', '["\\u00e9", "é", "e\\u0301"]', '"\\ud83d\\ude00"', '"\\u2028"',
    "123456789012345678901234567890",
    "-9223372036854775808", "9223372036854775807", "9223372036854775808", "9007199254740993", "0.1", "1e-300", "1e300",
    '{"b": {"c": [[1, [2, {"d": null}]]]}}', '{"b": 1, "c": 2}', '[{"a": 1}, {"a": "1"}]', '" 100"', '""',
)  # fmt: skip
TOPICS = ("order.paid", "order.sent", "user.seen.twice", "a.b", "build")
PATTERNS = (">", ">", ">", "order.*", "order.paid", "*.b", "user.>", "*", "build", "nobody.>", "*.*")
DIGESTS = ("metadata.a", "payload.a", "payload.b.c", "key", "topic", "source")
LATEST = Start(policy=StartPolicy.LATEST)


class Generated:
    """One set: a tenant, its agents, its subscriptions and its events, the same for the same seed."""

    def __init__(self, number: int) -> None:
        self.maker = Maker(SEED * 100_000 + number)
        self.random = self.maker.random
        self.tenant = f"set.t{number}"
        self.wide = number % 4 == 3  # more streams and partitions than one
        self.traps = self.random.sample(TRAPS, 6)  # few, so that filters and events meet

    def trap(self) -> Any:
        return msgspec.json.decode(self.random.choice(self.traps))

    def event(self) -> Draft:
        values = self.maker.variables()
        payload: bytes | Any = values["payload"]
        kind = self.random.random()
        if kind < 0.7:
            name = self.random.choice(NAMES)
            payload = f'{{"{name}": {self.random.choice(TRAPS)}, "n": {self.random.choice(self.traps)}}}'.encode()
        elif kind < 0.8:
            payload = self.random.choice(TRAPS).encode()
        return draft(
            self.random.choice(TOPICS),
            values["source"],
            payload,
            variant=self.random.choice(("", "v1", "v2")),
            key=values["key"],
            metadata=values["metadata"],
            headers=values["headers"],
            occurred_at=instant(values["occurred_at_us"]),
        )

    def filter(self) -> dict[str, Any]:
        kind = self.random.random()
        if kind < 0.3:
            return {}
        names = [self.random.choice((*NAMES, "n", "n", "n", "n", "b.c")) for _ in range(self.random.choice((1, 1, 2)))]
        if kind < 0.65:
            return {"payload": {name: self.expected() for name in names}}
        if kind < 0.75:
            return {"metadata": {names[0]: self.expected()}}
        made: dict[str, Any] = {"expr": self.expression()}
        return made | {"payload": {"n": self.expected()}} if kind > 0.95 else made

    def expected(self) -> Any:
        kind = self.random.random()
        return self.trap() if kind < 0.6 else self.maker.value(2) if kind < 0.8 else [self.trap() for _ in range(4)]

    def expression(self) -> str:
        while True:
            text = self.maker.expression()
            try:
                compile_filter({"expr": text})
            except InvalidFilter:
                continue
            return text

    def settings(self, before: int) -> dict[str, Any]:
        kind = self.random.random()
        start = EARLIEST if kind < 0.6 else LATEST
        streams = (f"{self.tenant}.journal",) if self.wide and kind > 0.5 else ()
        if kind > 0.8 and (streams or not self.wide):
            start = Start(policy=StartPolicy.AT_OFFSET, offset=self.random.randint(0, before))
            streams = (f"{self.tenant}.journal",)
        digest = None
        if self.random.random() < 0.5:
            digest = Digest(by=self.random.choice(DIGESTS), window_s=5, items=self.random.randint(1, 5))
        cleanup = None
        if self.random.random() < 0.3:
            cleanup = Cleanup(on_terminal={"payload": {"n": self.expected()}}, grace_s=3600)
        return {"start": start, "streams": streams, "digest": digest, "cleanup": cleanup, "filter": self.filter()}

    async def make(self, log: SqliteLog) -> None:
        inboxes = Inboxes(log, SystemClock())
        agents = [f"agent{number}" for number in range(self.random.randint(1, 3))]
        for agent in agents:
            await inboxes.create_agent(self.tenant, agent, PULL)
        journal, other = f"{self.tenant}.journal", f"{self.tenant}.build"
        before = self.random.randint(0, 20)
        await log.append(journal, [self.event() for _ in range(before)])
        if self.wide:
            await log.ensure_stream(other, StreamSettings(partitions=2))
        for number in range(self.random.randint(2, 8)):
            name, pattern = f"sub{number}", self.random.choice(PATTERNS)
            settings = self.settings(before)
            agent = self.random.choice(agents)
            await inboxes.subscribe(self.tenant, agent, pattern, id=name, engine="spark", **settings)
        await log.append(journal, [self.event() for _ in range(self.random.randint(10, 50))])
        if self.wide:
            await log.append(other, [self.event() for _ in range(20)])
            await log.ensure_stream(f"{self.tenant}.order", StreamSettings())  # made after those who will read it


def fill(office: Mail, count: int) -> list[Generated]:
    sets = [Generated(number) for number in range(count)]

    async def make(log: SqliteLog) -> None:
        for one in sets:
            await one.make(log)

    office.run(make)
    return sets


def twin(office: Mail, path: Path) -> Mail:
    """A copy of a store in which the live pump serves everything."""
    shutil.copytree(office.data, path)
    made = Mail(path)

    async def hand_over(log: SqliteLog) -> None:
        agents = Agents(log)
        for one in await agents.subscriptions():
            await agents.hand_over(one.tenant, one.id, "live")

    made.run(hand_over)
    return made


def of(rows: dict[str, list[tuple[Any, ...]]], one: Generated) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of one set; of a wide one without what depends on which partition was quicker."""
    mine = {
        "items": [row for row in rows["items"] if row[0] == one.tenant],
        "digests": [row for row in rows["digests"] if row[0] == one.tenant],
        "cursors": [row for row in rows["cursors"] if row[0].startswith(f"{one.tenant}.")],
        "ends": [row for row in rows["ends"] if row[0] == one.tenant],
    }
    if one.wide:
        mine["items"] = sorted(((*row[:2], *row[3:8], row[9]) for row in mine["items"]), key=repr)
        mine["digests"] = sorted(((*row[:2], *row[3:8]) for row in mine["digests"]), key=repr)
    return mine


def test_spark_and_the_live_pump_make_the_same_inboxes(spark: SparkSession, tmp_path: Path) -> None:
    office = Mail(tmp_path / "spark")
    sets = fill(office, SETS)
    live = twin(office, tmp_path / "live")
    live.pump()
    done = asyncio.run(materialize(spark, str(office.data)))
    assert done.jobs >= 1
    expected, found = live.all(), office.all()
    wrong = [
        one.tenant for one in sets if msgspec.json.encode(of(found, one)) != msgspec.json.encode(of(expected, one))
    ]
    assert wrong == [], f"seed {SEED}"
    print(f"seed {SEED}: {SETS} sets, {len(found['items'])} items, {len(found['digests'])} digests, {done}")  # noqa: T201 - a campaign says what it did
    # The comparison is about something.
    assert len(found["items"]) > 20 * SETS
    assert len(found["digests"]) > SETS // 2
    assert sum(ended for *_, ended in found["ends"]) > SETS // 10
    assert any(len(msgspec.json.decode(row[6])) > 1 for row in found["items"])
    # And again there is nothing to do.
    again = asyncio.run(materialize(spark, str(office.data)))
    assert (again.events, again.jobs) == (0, 0)
    assert office.all() == found


def test_seams_between_pages_tasks_and_jobs_show_nowhere(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    office = Mail(tmp_path / "spark")
    sets = fill(office, 8)
    live = twin(office, tmp_path / "live")
    live.pump()
    for name, value in (("SHARE_MIN", 25), ("BUDGET", 200), ("TASK_MIN", 7), ("PAGE_MATCHES", 3), ("TASK_MATCHES", 20)):
        monkeypatch.setattr(job, name, value)
    done = asyncio.run(materialize(spark, str(office.data)))
    assert done.jobs > 1
    expected, found = live.all(), office.all()
    assert [one.tenant for one in sets if of(found, one) != of(expected, one)] == []
