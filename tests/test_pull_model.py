"""Pull subscriptions at random against a model of what each event is owed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from postbus.bus.purge import dead_letters
from postbus.envelope import draft
from postbus.model import LeaseLost, Receipt
from tests.pull_office import DLQ, SUB, TENANT, TOPIC, Office, leases, turns

STEPS = 80
ATTEMPTS_MAX = 3
TIMEOUT_S = 30.0

Place = tuple[int, int]


class Model:
    """What is known of each event: how often it was handed out, who holds it until when, and how it ended."""

    def __init__(self, office: Office, seed: int) -> None:
        self.office = office
        self.dice = random.Random(seed)
        self.attempts: dict[Place, int] = {}
        self.held: dict[Place, tuple[str, float]] = {}
        self.due: dict[Place, float] = {}
        self.over: dict[Place, str] = {}
        self.stale: list[str] = []

    @property
    def now(self) -> float:
        return self.office.clock.monotonic_s()

    def tick(self) -> None:
        """Let leases end."""
        for place, (name, until) in list(self.held.items()):
            if until <= self.now:
                del self.held[place]
                self.stale.append(name)
                self.give_up(place)

    def give_up(self, place: Place) -> None:
        if self.attempts[place] >= ATTEMPTS_MAX:
            self.over[place] = "dead"

    def waiting(self) -> set[Place]:
        return {
            place
            for place in self.attempts
            if place not in self.over and place not in self.held and self.due.get(place, 0) <= self.now
        }

    def some_held(self) -> list[Place]:
        held = sorted(self.held)
        return self.dice.sample(held, self.dice.randint(1, len(held))) if held else []

    # --- steps ---

    async def publish(self) -> None:
        drafts = [draft(TOPIC, "test", {"n": 0}, key=f"k{self.dice.random()}") for _ in range(self.dice.randint(1, 8))]
        receipts: list[Receipt] = await self.office.log.append(TOPIC, drafts)
        self.attempts.update({(one.partition, one.offset): 0 for one in receipts})

    async def pull(self) -> None:
        whole = self.dice.random() < 0.5
        handed = await (await self.office.puller()).pull(1000 if whole else self.dice.randint(1, 6))
        places = [(one.event.partition, one.event.offset) for one in handed]
        assert set(places) <= self.waiting()
        if whole:
            assert set(places) == self.waiting()
        for partition in {place[0] for place in places}:
            offsets = [place[1] for place in places if place[0] == partition]
            assert offsets == sorted(offsets)
        for one, place in zip(handed, places, strict=True):
            self.attempts[place] += 1
            assert one.attempt == self.attempts[place]
            assert one.lease_id is not None
            self.held[place] = (one.lease_id, self.now + TIMEOUT_S)

    async def ack(self) -> None:
        chosen = self.some_held()
        names = [self.held[place][0] for place in chosen]
        self.dice.shuffle(names)
        puller = await self.office.puller()
        if self.stale and self.dice.random() < 0.3:
            with pytest.raises(LeaseLost):
                await puller.ack([*names, self.dice.choice(self.stale)])
            return
        assert await puller.ack(names) == len(names)
        assert await puller.ack(names) == 0
        for place in chosen:
            del self.held[place]
            self.over[place] = "done"

    async def nack(self) -> None:
        chosen, delay_s = self.some_held(), self.dice.choice([0.0, 5.0, 60.0])
        await (await self.office.puller()).nack([self.held[place][0] for place in chosen], delay_s)
        for place in chosen:
            self.stale.append(self.held.pop(place)[0])
            self.due[place] = self.now + delay_s
            self.give_up(place)

    async def extend(self) -> None:
        chosen = self.some_held()
        await (await self.office.puller()).extend([self.held[place][0] for place in chosen])
        for place in chosen:
            self.held[place] = (self.held[place][0], self.now + TIMEOUT_S)

    async def commit(self) -> None:
        if not self.attempts:
            return
        partition, through = self.dice.choice(sorted(self.attempts))
        lag = (await self.office.desk.lag(TENANT, SUB)).partitions[partition]
        cursor = lag.high_water_mark - lag.lag
        await (await self.office.puller()).commit(partition, through)
        for place in self.attempts:
            if place[0] == partition and place[1] <= through and place not in self.over:
                if place in self.held:
                    self.stale.append(self.held.pop(place)[0])
                elif place[1] < cursor:
                    continue  # replayed after the cursor had passed it
                self.over[place] = "done"

    async def deadletter(self) -> None:
        if not self.attempts:
            return
        place = self.dice.choice(sorted(self.attempts))
        await self.office.desk.deadletter(TENANT, SUB, *place, "by hand")
        if place in self.held:
            self.stale.append(self.held.pop(place)[0])
        self.over[place] = "dead"

    async def replay(self) -> None:
        letters = dead_letters(self.office.log, self.office.clock, TENANT)
        found = await letters.find()
        assert {(one.origin_partition, one.origin_offset) for one in found} == {
            place for place, end in self.over.items() if end == "dead"
        }
        await letters.replay(found[:3])
        await self.office.desk.refresh(TENANT)
        for one in found[:3]:
            place = (one.origin_partition, one.origin_offset)
            del self.over[place]
            self.attempts[place] = 0
            self.due.pop(place, None)

    async def advance(self) -> None:
        await self.office.advance(self.dice.choice([0.5, 4.0, 16.0, 31.0]))

    async def restart(self) -> None:
        await (self.office.crash() if self.dice.random() < 0.5 else self.office.close())
        await self.office.open()
        for place in list(self.held):
            self.stale.append(self.held.pop(place)[0])
            self.give_up(place)
        await (await self.office.puller()).extend([])  # the first use reads what was left
        await turns()

    async def run(self) -> None:
        steps: list[Any] = [self.publish, self.pull, self.ack, self.nack, self.extend, self.commit, self.deadletter]
        steps += [self.replay, self.advance, self.restart, self.publish, self.pull, self.pull, self.ack]
        for _ in range(STEPS):
            await self.dice.choice(steps)()
            await turns(5)
            self.tick()
        await self.finish()

    async def finish(self) -> None:
        """Ack everything that is left, and compare the end."""
        await self.office.advance(61)
        self.tick()
        puller = await self.office.puller()
        handed = await puller.pull(1000)
        await puller.ack(leases(handed))
        for one in handed:
            self.over[one.event.partition, one.event.offset] = "done"
        assert set(self.over) == set(self.attempts)
        async with asyncio.timeout(60):
            while (await self.office.desk.lag(TENANT, SUB)).total:  # written a moment after the answer
                await turns()
        rows = await self.office.query('SELECT partition, "offset", status FROM delivery_rows')
        assert {row[2] for row in rows} <= {"failed"}
        assert {row[:2] for row in rows} == {place for place, end in self.over.items() if end == "dead"}


@pytest.mark.parametrize("seed", [0, 1, 2, 45, 51])
async def test_whatever_happens_each_event_is_handed_out_as_it_is_owed(tmp_path: Path, seed: int) -> None:
    office = Office(tmp_path / "data")
    await office.open()
    try:
        await office.make(partitions=2)
        assert await office.log.has_stream(DLQ)
        await Model(office, seed).run()
    finally:
        await office.close()
