"""Pull subscriptions on a full disk: handing out and acking go on, dead letters wait for room."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from postbus.bus.pull import PullDesk
from postbus.clock import SystemClock
from postbus.envelope import draft
from postbus.log import SqliteLog
from postbus.model import StorageFull
from tests.pull_office import DLQ, SUB, TENANT, TOPIC, leases, until
from tests.test_store_full import Quota

LARGE = {"text": "x" * 4000}


@pytest.fixture
def quota(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Quota]:
    disk = Quota(f"quota {request.node.name}", 20 << 20)
    monkeypatch.setattr("postbus.store.folder.Folder.release_reserve", lambda _: disk.give_back())
    monkeypatch.setattr("postbus.store.folder.Folder.hold_reserve", lambda _: disk.hold())
    yield disk
    disk.unregister()


async def test_consumers_go_on_and_dead_letters_wait(tmp_path: Path, quota: Quota) -> None:
    log, clock = SqliteLog.open(tmp_path, vfs=quota.name), SystemClock()
    desk = PullDesk(log, clock)
    for stream in (TOPIC, DLQ):
        await log.ensure_stream(stream)
    await desk.create(TENANT, SUB, TOPIC, start="earliest", dead_letter_topic=DLQ, max_attempts=1)
    with contextlib.suppress(StorageFull):
        while True:
            await log.append(TOPIC, [draft(TOPIC, "test", LARGE) for _ in range(200)])
    puller = await desk.puller(TENANT, SUB)
    handed = await puller.pull(100)
    assert len(handed) == 100
    assert await puller.ack(leases(handed)[1:50]) == 49
    assert await puller.nack(leases(handed)[:1], error="broken") == 1
    with pytest.raises(StorageFull):
        await desk.deadletter(TENANT, SUB, 0, 70, "by hand")
    assert await puller.ack(leases(handed)[50:]) == 50
    assert await log.fetch(DLQ, 0, 0) == []
    assert (await desk.lag(TENANT, SUB)).partitions[0].committed == -1
    quota.room += 20 << 20
    await until(lambda: puller.dead == 1)
    assert [event.headers["postbus.dlq.error"] for event in await log.fetch(DLQ, 0, 0)] == ["broken"]
    async with asyncio.timeout(60):
        while (await desk.lag(TENANT, SUB)).partitions[0].committed != 99:  # noqa: ASYNC110 - a number, not an event
            await asyncio.sleep(0.01)
    await desk.stop()
    await log.close()
