"""kill -9: what was acknowledged is there byte for byte, at its offset, once."""

from __future__ import annotations

import os
import random
import selectors
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from postbus.log.sqlite import SqliteLog
from postbus.model import Draft, Event
from postbus.store.backup import check_store
from tests.faults.campaign import FULL, dice
from tests.faults.nursery import CONSUMER, SHORT, SINGLE, WIDE, draft
from tests.faults.scene import children, every_event, run_python

KILLS = 120 if FULL else 60
CAMPAIGNS = 20 if FULL else 1  # each on a store of its own
PATIENCE_S = 60.0


@dataclass
class Ledger:
    """What publishers were told, as they told it."""

    acked: dict[tuple[str, int, int], tuple[str, int]] = field(default_factory=dict)
    identified: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    repeated: int = 0
    committed: int = -1
    born: list[int] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def take(self, line: str) -> None:
        word, *rest = line.split()
        if word == "born":
            self.born.append(int(rest[0]))
        elif word == "open":
            self.opened.append(int(rest[0]))
        elif word == "ack":
            kind, number, stream, partition, offset = rest[0], int(rest[1]), rest[2], int(rest[3]), int(rest[4])
            place = (stream, partition, offset)
            if kind == "identified":
                self.repeated += number in self.identified
                assert self.identified.setdefault(number, place) == place, "an identity has two addresses"
            assert self.acked.setdefault(place, (kind, number)) == (kind, number), "an address has two events"
        elif word == "moved":
            self.committed = max(self.committed, int(rest[1]))
        else:
            self.errors.append(line)


class Nursery:
    """The process that forks publishers, and the pipe they all write to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._orders = process.stdin
        self._output = process.stdout.fileno()
        self._rest = b""
        self._wait = selectors.DefaultSelector()
        self._wait.register(self._output, selectors.EVENT_READ)

    def fork(self, folder: Path, seed: int, first: int) -> None:
        self._orders.write(f"{seed} {first} {folder}\n")
        self._orders.flush()

    def listen(self, ledger: Ledger, seconds: float) -> None:
        """Take down what is said for some time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._wait.select(left):
                *lines, self._rest = (self._rest + os.read(self._output, 1 << 16)).split(b"\n")
                for line in lines:
                    ledger.take(line.decode())

    def close(self) -> None:
        self._wait.close()


def campaign(folder: Path, rolls: random.Random, kills: int) -> Ledger:
    """Keep two publishers alive, kill one of them again and again, and sometimes both at once."""
    ledger = Ledger()
    done = lives = checked = 0
    with children(run_python("tests.faults.nursery")) as (process,):
        nursery = Nursery(process)
        while done < kills:
            for _ in range(2 - len(ledger.opened)):
                lives += 1
                first = max(max(ledger.identified, default=0) - rolls.randrange(40), 0)
                nursery.fork(folder, lives, first)
            deadline = time.monotonic() + PATIENCE_S
            while len(ledger.opened) < 2 and not ledger.errors:
                nursery.listen(ledger, 0.002)
                assert time.monotonic() < deadline, "a publisher does not get the store open"
            assert ledger.errors == []
            nursery.listen(ledger, rolls.uniform(0.0, 0.08))
            rolls.shuffle(ledger.opened)
            for _ in range(rolls.choice((1, 1, 2))):
                os.kill(ledger.opened.pop(), signal.SIGKILL)
                done += 1
            if done // (kills // 5) > checked:
                checked += 1
                report = check_store(folder)
                assert report.ok, report.problems
        while ledger.opened:
            os.kill(ledger.opened.pop(), signal.SIGKILL)
        nursery.listen(ledger, 0.2)
        nursery.close()
    assert ledger.errors == []
    return ledger


def as_draft(event: Event) -> Draft:
    names = set(Draft.__struct_fields__)
    return Draft(**{name: getattr(event, name) for name in names if hasattr(event, name)})


async def judge(folder: Path, ledger: Ledger) -> int:
    report = check_store(folder)
    assert report.ok, report.problems
    log = SqliteLog.open(folder)
    seen: set[str] = set()
    total = 0
    for stream, partitions in ((SINGLE, 1), (WIDE, 3), (SHORT, 1)):
        stats = await log.get_stream_stats(stream)
        for partition in range(partitions):
            events = await every_event(log, stream, partition)
            part = stats.partitions[partition]
            assert [event.offset for event in events] == list(range(part.first_offset, part.high_water_mark))
            acked = {
                at: made for (name, number, at), made in ledger.acked.items() if (name, number) == (stream, partition)
            }
            assert max(acked, default=-1) < part.high_water_mark
            for event in events:
                if event.offset in acked:
                    assert as_draft(event) == draft(*acked[event.offset]), f"{event.id} is not what was acknowledged"
                if event.native_id is not None:
                    assert event.native_id not in seen, f"{event.native_id} is there twice"
                    seen.add(event.native_id)
            total += len(events)
    consumer = await log.get_consumer(SINGLE, CONSUMER)
    assert consumer is not None
    assert consumer.cursors[0].committed >= ledger.committed
    await log.projections.catch_up()
    expected = {event.id for stream, n in ((SINGLE, 1), (WIDE, 3), (SHORT, 1)) for p in range(n)
                for event in await every_event(log, stream, p) if event.topic == "plain.t1"}  # fmt: skip
    assert {event.id for event in await log.projections.by_topic("plain.t1", 10**9)} == expected
    await log.close()
    return total


@pytest.mark.xdist_group("kill")
async def test_killed_publishers_lose_nothing_and_repeat_nothing(ground: Path) -> None:
    rolls = dice("kill -9")
    for number in range(CAMPAIGNS):
        folder = ground / str(number)
        ledger = campaign(folder, rolls, KILLS)
        total = await judge(folder, ledger)
        print(f"{KILLS} kills, {len(ledger.acked)} acknowledged, {total} there, {ledger.repeated} retried")  # noqa: T201
        assert len(ledger.acked) > KILLS
        assert ledger.repeated > KILLS // 4
        shutil.rmtree(folder)


@pytest.mark.xdist_group("kill")
async def test_a_publisher_killed_while_it_makes_the_store_leaves_one_that_opens(ground: Path) -> None:
    rolls = dice("kill -9 at the start")
    with children(run_python("tests.faults.nursery")) as (process,):
        nursery = Nursery(process)
        for number in range(500 if FULL else 30):
            ledger = Ledger()
            nursery.fork(ground / str(number), number, 0)
            while not ledger.born:
                nursery.listen(ledger, 0.0005)
            nursery.listen(ledger, rolls.uniform(0.0, 0.03))
            os.kill(ledger.born[0], signal.SIGKILL)
            nursery.listen(ledger, 0.005)
            assert ledger.errors == []
            log = SqliteLog.open(ground / str(number))
            await log.ensure_stream(SINGLE)
            await log.close()
            assert check_store(ground / str(number)).ok
            shutil.rmtree(ground / str(number))
        nursery.close()
