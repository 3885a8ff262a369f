"""A server that is killed while consumers read: nothing is lost, and nothing that was acked comes again."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.faults.campaign import FULL, dice
from tests.faults.sse_scene import TOPIC, Service
from tests.server.sse_reader import Reader

KILLS = 20 if FULL else 3
BATCH = 40
SUBSCRIPTIONS = "/v1/bus/subscriptions"
PATH = f"{SUBSCRIPTIONS}/agents/demo/worker"

pytestmark = [pytest.mark.xdist_group("sse kill"), pytest.mark.slow]


class Consumers:
    """Some who pull and ack over HTTP, and what they saw."""

    def __init__(self, service: Service, seed: str) -> None:
        self.service = service
        self.dice = dice(seed)
        self.seen: dict[int, int] = {}
        self.acked: set[int] = set()
        self.wrong: list[str] = []
        self.stale = 0
        self.stopping = False

    async def run(self) -> None:
        async with httpx2.AsyncClient(base_url=self.service.url, timeout=60) as client:
            while not self.stopping:
                with contextlib.suppress(httpx2.HTTPError):
                    await self._turn(client)

    async def _turn(self, client: httpx2.AsyncClient) -> None:
        done = set(self.acked)
        answer = await client.post(f"{PATH}/pull", json={"limit": self.dice.randint(1, 30), "wait_ms": 200})
        assert answer.status_code == 200, answer.text
        events: list[dict[str, Any]] = answer.json()["events"]
        for event in events:
            number, attempt = event["payload"]["n"], event["attempt"]
            if number in done:
                self.wrong.append(f"{number} was acked and came again")
            if attempt <= self.seen.get(number, 0):
                self.wrong.append(f"{number} came as attempt {attempt} after {self.seen[number]}")
            self.seen[number] = attempt
        kept = [event for event in events if self.dice.random() < 0.9]
        self.dice.shuffle(kept)
        if kept:
            acked = await client.post(f"{PATH}/ack", json={"lease_ids": [event["lease_id"] for event in kept]})
            if acked.status_code == 200:
                self.acked.update(event["payload"]["n"] for event in kept)
            else:
                assert acked.status_code == 409, acked.text
                self.stale += 1


async def test_kills_while_pulling(tmp_path: Path) -> None:
    with Service(tmp_path / "data") as service:
        async with httpx2.AsyncClient(base_url=service.url) as client:
            wish = {"id": "worker", "topic": TOPIC, "starting_offset": "earliest"}
            made = await client.post(SUBSCRIPTIONS, json=wish | {"ack_timeout_ms": 400, "max_attempts": 1000})
            assert made.status_code == 201, made.text
        consumers = Consumers(service, "kills while pulling")
        running = [asyncio.create_task(consumers.run()) for _ in range(3)]
        total = 0
        for _ in range(KILLS):
            for _ in range(4):
                await asyncio.to_thread(service.publish, total, BATCH)
                total += BATCH
                await asyncio.sleep(consumers.dice.uniform(0, 0.15))
            await asyncio.to_thread(service.kill)
            await asyncio.to_thread(service.start)
        async with httpx2.AsyncClient(base_url=service.url, timeout=60) as client, asyncio.timeout(60):
            while (await client.get(f"{PATH}/lag")).json()["total_lag"]:  # noqa: ASYNC110 - asked of another process
                await asyncio.sleep(0.1)
        consumers.stopping = True
        await asyncio.gather(*running)
    assert consumers.wrong == []
    assert sorted(consumers.seen) == [*range(total)]
    assert len(consumers.acked) > total / 2


@pytest.mark.parametrize("durable", [True, False])
async def test_kills_while_reading(tmp_path: Path, durable: bool) -> None:
    with Service(tmp_path / "data") as service:
        async with httpx2.AsyncClient(base_url=service.url) as client:
            if durable:
                wish = {"id": "worker", "topic": TOPIC, "starting_offset": "earliest", "ack_mode": "auto_on_delivery"}
                assert (await client.post(SUBSCRIPTIONS, json=wish)).status_code == 201
        reader = Reader(service.url, f"/v1/bus/subscribe/worker?topic={TOPIC}&from=earliest")
        total = 0
        for _ in range(KILLS):
            for _ in range(4):
                await asyncio.to_thread(service.publish, total, BATCH)
                total += BATCH
            await asyncio.to_thread(service.kill)
            await asyncio.to_thread(service.start)
        await reader.until(total)
        await asyncio.sleep(0.3)
        await reader.stop()
    assert [message.number for message in reader.messages] == [*range(total)]
    assert reader.connections >= 2
