"""What the suite "spark" works on: logs with subscriptions, made once, and the same work done by plain processes."""

from __future__ import annotations

import asyncio
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.inbox_suite import TENANT, rules
from benchmarks.inbox_suite import events as bench_events
from postbus.clock import SystemClock
from postbus.filters import FilterIndex, compile_filter
from postbus.inbox import Inboxes, Target
from postbus.inbox.cohort import Cohort
from postbus.inbox.door import deliver
from postbus.inbox.pump import SAVE_EVENTS
from postbus.log import SqliteLog
from postbus.model import Draft, Start, StartPolicy, StreamSettings
from postbus.spark.extent import Extent
from postbus.spark.jobs.materialize import PAGE_MATCHES
from postbus.spark.jobs.roster import Group, Roster
from postbus.spark.matcher import NEEDED, Rule, events_of
from postbus.spark.reading import Range, read_range
from postbus.spark.schema import COLUMNS

__all__ = ["build", "materialize_plainly", "read_share", "rule_list"]

STREAM = f"{TENANT}.journal"
PARTITIONS = 4
PAGE = 2_000
RULES = 1_000
AGENTS = 100


def rule_list() -> list[Rule]:
    """Return the subscriptions that are matched: of the kinds people write."""
    return [Rule(str(number), pattern, spec) for number, (pattern, spec) in enumerate(rules(RULES))]


def build(folder: Path, count: int) -> str:
    """Make a log of so many events and the subscriptions that wait for all of them, if it is not there."""
    data = folder / f"log-{count}"
    if not data.exists():
        asyncio.run(_fill(data, count))
    return str(data)


async def _fill(data: Path, count: int) -> None:
    log = SqliteLog.open(data, durability="relaxed")
    try:
        await log.ensure_stream(STREAM, StreamSettings(partitions=PARTITIONS))
        await _subscribe(log)
        sample = bench_events(min(count, 50_000))
        for start in range(0, count, PAGE):
            some = [sample[number % len(sample)] for number in range(start, min(start + PAGE, count))]
            await log.append(STREAM, [_draft(event) for event in some])
    finally:
        await log.close()


async def _subscribe(log: SqliteLog) -> None:
    inboxes = Inboxes(log, SystemClock())
    earliest = Start(policy=StartPolicy.EARLIEST)
    for number in range(AGENTS):
        await inboxes.create_agent(TENANT, f"agent{number}", (Target(kind="pull"),))
    for number, rule in enumerate(rule_list()):
        await inboxes.subscribe(
            TENANT,
            f"agent{number % AGENTS}",
            rule.pattern,
            filter=rule.filter,
            id=f"s{number}",
            start=earliest,
            engine="spark",
        )


def _draft(event: Any) -> Draft:
    return Draft(
        topic=event.topic, source=event.source, payload_json=event.payload_json, metadata_json=event.metadata_json
    )


def read_share(data: str, extent: Extent, matching: bool) -> int:  # noqa: FBT001 - called by starmap
    """Read one partition, match its events if asked to, and say how many they were."""
    index: FilterIndex[str] = FilterIndex()
    for rule in rule_list() if matching else []:
        index.add(rule.id, rule.pattern, compile_filter(rule.filter))
    count = 0
    for batch in read_range(data, Range(extent, extent.first, extent.head), list(COLUMNS.values())):
        count += batch.num_rows
        if matching:
            for event in events_of(batch):
                index.match(event)
    return count


def materialize_plainly(data: str) -> int:
    """Fill the inboxes with the same matcher and through the same door, in this process alone; return the events."""
    return asyncio.run(_materialize(data))


async def _materialize(data: str) -> int:
    log = await asyncio.to_thread(SqliteLog.open, Path(data), create=False)
    try:
        groups = await Roster(log).plan()
        return sum([await _serve(log, data, group) for group in groups])
    finally:
        await log.close()


async def _serve(log: SqliteLog, data: str, group: Group) -> int:
    """Bring one group to the end of its partition, page by page as the job does."""
    extent, first = group.extent, group.offset
    cohort = Cohort(extent.stream, first)
    for name, member in group.members.items():
        cohort.add(member, group.saved[name])
    found = []
    for batch in read_range(data, Range(extent, first, group.head), [COLUMNS[name] for name in NEEDED]):
        for event in events_of(batch):
            found += cohort.match(event)[0]
            following = event.offset + 1
            if len(found) >= PAGE_MATCHES or following == group.head:
                everyone = following == group.head or following - min(group.saved.values()) >= SAVE_EVENTS
                touched = dict.fromkeys(chain.from_iterable(match.matched_by for match in found))
                moves = group.moves(group.members if everyone else touched, following)
                where = (extent.stream, extent.partition, found, moves)
                await log.transact(lambda tx, where=where: deliver(tx, *where, epoch=extent.epoch))  # type: ignore[misc]
                group.moved(moves, following)
                found = []
    return group.head - first
