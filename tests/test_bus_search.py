"""Finding and following events: the projections are only a short cut, and nothing is missed or shown twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from postbus import Event, EventBus
from postbus.bus.follow import ends, follow
from postbus.bus.search import EventQuery, find_events
from postbus.envelope import draft
from postbus.log.sqlite import SqliteLog
from postbus.model import DeliveryStatus, StreamSettings
from postbus.topics import matches

TENANT = "local.default"
START_US = 1_750_000_000_000_000
TOPICS = ("email.received", "email.sent", "order.paid", "order.paid.late", "x")


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[SqliteLog]:
    opened = await asyncio.to_thread(SqliteLog.open, tmp_path / "data")
    for name in ("journal", "orders", "journal-dlq"):
        await opened.ensure_stream(f"{TENANT}.{name}", StreamSettings(partitions=2 if name == "orders" else 1))
    await opened.ensure_stream("acme.eu.journal")
    yield opened
    await opened.close()


async def fill(log: SqliteLog, count: int, seed: int) -> None:
    chance = random.Random(seed)
    streams = [stream.name for stream in await log.streams()]
    for _ in range(count // 20):
        drafts = [
            draft(
                chance.choice(TOPICS),
                "test",
                chance.random(),
                correlation_id=chance.choice([None, "a", "b", "rare"] if chance.random() < 0.1 else [None, "a"]),
                occurred_at=f"2025-06-15T{chance.randrange(24):02}:{chance.randrange(60):02}:00Z",
            )
            for _ in range(20)
        ]
        await log.append(chance.choice(streams), drafts)


async def everything(log: SqliteLog) -> list[Event]:
    """What can be found, in the order it was appended."""
    query = 'SELECT stream, partition, "offset" FROM stream_events ORDER BY seq'
    places = await log.store.read(lambda db: list(db.execute(query)))
    kept = [place for place in places if place[0].startswith(TENANT) and not place[0].endswith("-dlq")]
    return [(await log.fetch(stream, part, offset, 1))[0] for stream, part, offset in kept]


@pytest.mark.parametrize("projected", ["nothing", "the first half", "everything"])
async def test_every_combination_finds_what_a_scan_finds(log: SqliteLog, projected: str) -> None:
    await fill(log, 1000, seed=1)
    if projected != "nothing":
        await log.projections.catch_up()
    if projected != "everything":
        await fill(log, 1000, seed=2)
    events = await everything(log)
    chance = random.Random(3)
    for _ in range(60):
        pattern = chance.choice([None, "email.*", "order.>", "x", "nothing"])
        correlation = chance.choice([None, None, "a", "rare", "nothing"])
        since = chance.choice([None, START_US - 86_400_000_000 + chance.randrange(2 * 86_400) * 1_000_000])
        until = chance.choice([None, START_US + chance.randrange(86_400) * 1_000_000])
        limit = chance.choice([1, 7, 5000])
        expected = [
            event.id
            for event in events
            if (pattern is None or matches(pattern, event.topic))
            and correlation in (None, event.correlation_id)
            and (since is None or event.occurred_at_us >= since)
            and (until is None or event.occurred_at_us < until)
        ][-limit:]
        query = EventQuery(
            tenant=TENANT, topic=pattern, correlation_id=correlation, since_us=since, until_us=until, limit=limit
        )
        assert [found.event.id for found in await find_events(log, query)] == expected


async def test_statuses_agree_with_the_journal(tmp_path: Path) -> None:
    bus = EventBus(tmp_path / "data")
    seen: list[str] = []

    async def handle(event: Event) -> None:
        if event.payload % 3 == 0:
            raise ValueError(str(event.payload))
        seen.append(event.id)
        if len(seen) == 6:
            all_seen.set()

    all_seen = asyncio.Event()
    bus.subscribe("a.*", handle, "some", retry=None)
    async with bus:
        for number in range(9):
            await bus.publish("a.b", "test", number)
        await bus.publish("nobody", "test", 0)
        async with asyncio.timeout(60):
            await all_seen.wait()
    for number in range(3):
        await bus.publish("a.b", "test", number)
    log = await bus.open()
    rows = await log.store.read(lambda db: list(db.execute("SELECT id, status FROM event_journal ORDER BY id")))
    assert {status for _, status in rows} >= {"pending", "done"}
    for status in DeliveryStatus:
        found = await find_events(log, EventQuery(tenant=TENANT, status=status))
        assert [(one.journal_id, one.status.value) for one in found] == [row for row in rows if row[1] == status]
    await bus.stop()


# --- follow -----------------------------------------------------------------------------------------------------------


async def collect(log: SqliteLog, count: int, places: dict[tuple[str, int, int], int]) -> list[Event]:
    found: list[Event] = []
    async with asyncio.timeout(60), aclosing(follow(log, TENANT, places)) as pages:  # type: ignore[type-var]
        async for page in pages:
            found += page
            if len(found) >= count:
                break
    return found


async def test_following_sees_each_event_once(log: SqliteLog, tmp_path: Path) -> None:
    await fill(log, 200, seed=1)
    before = len(await everything(log))
    places = await ends(log, TENANT)
    other = await asyncio.to_thread(SqliteLog.open, tmp_path / "data")
    writing = asyncio.gather(fill(log, 400, seed=2), fill(other, 400, seed=3))
    await other.ensure_stream(f"{TENANT}.late")
    await other.append(f"{TENANT}.late", [draft("a.b", "test", 1)])
    await writing
    expected = {event.id for event in (await everything(log))[before:]}
    found = await collect(log, len(expected), places)
    assert len(found) == len(expected)
    assert {event.id for event in found} == expected
    await other.close()


async def test_a_stream_that_was_trimmed_or_made_again(log: SqliteLog) -> None:
    name = f"{TENANT}.orders2"
    await log.ensure_stream(name)
    await log.append(name, [draft("a.b", "test", number) for number in range(5)])
    places = await ends(log, TENANT)
    await log.trim(name, before=5)  # the last rows of all: their numbers are given out again
    await log.append(name, [draft("a.b", "test", 5)])
    assert [event.offset for event in await collect(log, 1, places)] == [5]
    await log.delete_stream(name)
    await log.ensure_stream(name)
    await log.append(name, [draft("a.b", "test", 6)])
    assert [(event.offset, event.payload) for event in await collect(log, 1, places)] == [(0, 6)]
