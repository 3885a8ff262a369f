"""kill -9 on the bus: every event is handled at least once and in order, none is lost or stuck, effects happen once."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from postbus.bus import EventBus
from postbus.model import Event, RetryPolicy
from postbus.testing import BusKit
from tests.faults.bus_campaign import PATIENCE_S, Town, query, unfinished
from tests.faults.bus_judge import judge
from tests.faults.bus_nursery import BOMB, HASTY, Diary, store_of
from tests.faults.campaign import FULL, dice
from tests.faults.scene import ROOT, children, run_python

KILLS = 120 if FULL else 12
HARMLESS = 50
LEASE_S = 30.0
OWNED = "SELECT count(*), min(owner), max(token) FROM lanes WHERE owner IS NOT NULL"
APART = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "true"]

pytestmark = [pytest.mark.xdist_group("bus crash"), pytest.mark.slow]


@pytest.mark.parametrize("crew", [("worker", "publisher"), ("worker", "worker", "publisher")], ids=["one", "two"])
def test_killed_workers_and_publishers_lose_nothing(ground: Path, crew: tuple[str, ...]) -> None:
    rolls = dice(f"bus kill -9, {len(crew)} at once")
    with Town(ground / "town") as town:
        of_workers = town.campaign(rolls, KILLS, crew)
        for pid, role in list(town.living.items()):
            if role == "publisher" or Counter(town.living.values())["worker"] > 1:
                town.kill(pid)
        (last,) = town.living
        took_s = town.drain()
        town.stop(last)
        verdict = judge(town.folder, town.said)
    lost = len(town.said.lost)
    print(f"{KILLS} kills, {of_workers} of workers; {lost} leases lost; drained in {took_s:.1f} s; {verdict}")  # noqa: T201
    assert verdict.acked > KILLS
    assert verdict.dead > 0


def test_the_work_of_a_killed_process_is_taken_over_before_its_lease_is_over(ground: Path) -> None:
    with Town(ground / "town") as town:
        first, second = town.fork("worker"), town.fork("worker")
        publisher = town.fork("publisher")
        for pid in (first, second, publisher):
            town.opened(pid)
        town.listen(1.0)
        owners = {int(owner.split(".")[0]) for (owner,) in query(town.folder, "SELECT DISTINCT owner FROM lanes")}
        assert owners <= {first, second}
        for pid in owners - {publisher}:
            town.kill(pid)
            if not {first, second} & town.living.keys():
                town.opened(town.fork("worker"))
        town.kill(publisher)
        assert town.drain(LEASE_S * 0.8) < LEASE_S * 0.8


# --- an event that kills whoever handles it ---------------------------------------------------------------------------


async def load(folder: Path, names: tuple[str, ...], *, keyed: bool) -> None:
    """Publish harmless events with the one that kills in their midst."""
    bus = EventBus(store_of(folder))
    for number in range(HARMLESS + 1):
        for name in names:
            await bus.publish(f"{name}.load", "test", {"n": number}, key=f"key-{number % 5}" if keyed else None)
    await bus.stop()


@pytest.mark.parametrize("keyed", [True, False] if FULL else [True])
@pytest.mark.parametrize("names", [("loose",), ("strict",), ("loose", "strict")], ids=["key", "strict", "both"])
def test_an_event_that_kills_is_dead_in_the_end_and_its_neighbours_are_not(
    ground: Path, names: tuple[str, ...], keyed: bool
) -> None:
    with Town(ground / "town") as town:
        asyncio.run(load(town.folder, names, keyed=keyed))
        deaths = 0
        while True:
            pid = town.fork("bombed")
            deadline = time.monotonic() + PATIENCE_S
            while Path(f"/proc/{pid}").exists() and not (pid in town.said.opened and not unfinished(town.folder)):
                town.listen(0.02)
                assert time.monotonic() < deadline, f"stuck: {unfinished(town.folder)}"
            if Path(f"/proc/{pid}").exists():
                town.stop(pid)
                break
            town.living.pop(pid)
            deaths += 1
            assert deaths <= (HASTY.max_attempts + 2) * len(names), "it goes on and on"
        letters = query(town.folder, "SELECT subscription, origin_offset, reason, attempts FROM dead_letters")
        bombs = {name: BOMB * len(names) + index for index, name in enumerate(names)}
        assert sorted(letters) == sorted((name, at, "crash", HASTY.max_attempts) for name, at in bombs.items())
        for index, name in enumerate(names):
            expected = {number * len(names) + index for number in range(HARMLESS + 1)} - {bombs[name]}
            assert {at for word, at, _, _ in Diary(town.folder, name).read() if word == "done"} == expected
        everything = set(range((HARMLESS + 1) * len(names)))
        assert {at for word, at, _, _ in Diary(town.folder, "bystander").read() if word == "done"} == everything
    print(f"{deaths} deaths")  # noqa: T201 - what it did


def left_of(folder: Path, subscription: str) -> set[int]:
    """Return what is neither done nor dead for a subscription."""
    done = {at for word, at, _, _ in Diary(folder, subscription).read() if word == "done"}
    dead = {
        at for name, at in query(folder, "SELECT subscription, origin_offset FROM dead_letters") if name == subscription
    }
    return set(range(HARMLESS + 1)) - done - dead


@pytest.mark.parametrize("name", ["bomb", "calm"])
def test_an_event_that_hangs_holds_up_only_its_key_even_beside_one_that_kills(ground: Path, name: str) -> None:
    with Town(ground / "town") as town:
        asyncio.run(load(town.folder, (name,), keyed=True))
        behind = set(range(BOMB, HARMLESS + 1, 5))
        deaths = 0
        pid = town.fork("hung")
        deadline = time.monotonic() + PATIENCE_S
        while left_of(town.folder, "hangs") != behind or (name == "bomb" and left_of(town.folder, "dies")):
            assert time.monotonic() < deadline, f"stuck: {left_of(town.folder, 'hangs')}"
            town.listen(0.05)
            if not Path(f"/proc/{pid}").exists():
                town.gone(pid)
                deaths += 1
                pid = town.fork("hung")
        letters = query(town.folder, "SELECT subscription, origin_offset, reason FROM dead_letters")
        assert letters == ([("dies", BOMB, "crash")] if name == "bomb" else [])
        assert deaths == (HASTY.max_attempts + 1 if name == "bomb" else 0)


# --- who is dead ------------------------------------------------------------------------------------------------------


def owned_lanes(process: subprocess.Popen[str], folder: Path) -> list[tuple[Any, ...]]:
    """Wait until a process has taken its three lanes and return what is known of them."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line.startswith("open"):
            break
    deadline = time.monotonic() + PATIENCE_S
    while (found := query(folder, OWNED))[0][0] != 3:
        assert time.monotonic() < deadline
        assert process.poll() is None, "it ended before it began"
        time.sleep(0.02)
    return found


async def handles_within(folder: Path, seconds: float) -> None:
    """Publish an event on a bus of this process and wait until it is handled here."""
    bus = EventBus(store_of(folder))
    handled = asyncio.Event()

    async def handle(_event: Event) -> None:
        handled.set()

    bus.subscribe("loose.load", handle, "loose")
    async with bus, asyncio.timeout(seconds):
        await bus.publish("loose.load", "test", {"n": 1})
        await handled.wait()


def test_a_process_in_another_container_keeps_its_work_until_its_lease_is_over(ground: Path) -> None:
    """Its pid means nothing here, so that only its lease tells whether it lives."""
    if not shutil.which("unshare") or subprocess.run(APART, check=False, capture_output=True).returncode:
        pytest.skip("this needs the right to make pid namespaces")
    (ground / "town").mkdir()
    command = [*APART[:-1], sys.executable, "-m", "tests.faults.bus_nursery", "bombed", str(ground / "town")]
    with children(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)) as (process,):
        before = owned_lanes(process, ground / "town")
        with pytest.raises(TimeoutError):
            asyncio.run(handles_within(ground / "town", 3.0))
        assert query(ground / "town", OWNED) == before


def test_a_process_that_nobody_buried_is_dead_all_the_same(ground: Path) -> None:
    (ground / "town").mkdir()
    with children(run_python("tests.faults.bus_nursery", "bombed", str(ground / "town"))) as (process,):
        owned_lanes(process, ground / "town")
        process.kill()  # and no wait: it stays in the process table
        while " Z " not in Path(f"/proc/{process.pid}/stat").read_text("ascii"):
            time.sleep(0.01)
        asyncio.run(handles_within(ground / "town", LEASE_S * 0.9))


# --- what the campaigns found, by itself ------------------------------------------------------------------------------


async def hang_forever(_event: Event) -> None:
    await asyncio.Event().wait()


async def test_an_event_that_waited_behind_one_in_flight_at_a_crash_does_not_overtake_it() -> None:
    handled: list[int] = []

    async def first_hangs(event: Event) -> None:
        if event.payload == 0:
            await asyncio.Event().wait()

    async def handle(event: Event) -> None:
        handled.append(event.payload)

    async with BusKit() as kit:
        kit.bus.subscribe("a", first_hangs, "reader")
        for number in range(6):
            await kit.publish("a", number, key="k" if number % 2 == 0 else None)
        await kit.advance(1.0)  # long enough for rows: 0 runs, 2 and 4 wait behind it, what has no key is done
        statuses = await kit.query('SELECT "offset", status FROM deliveries WHERE status <> \'done\' ORDER BY "offset"')
        assert statuses[:2] == [(0, "processing"), (2, "waiting")]
        await kit.crash()
        kit.bus.subscribe("a", handle, "reader")
        await kit.start()
        await kit.advance(5.0)
    assert [number for number in dict.fromkeys(handled) if number % 2 == 0] == [0, 2, 4]


async def test_an_event_cut_off_by_a_clean_stop_has_not_ended_the_process() -> None:
    attempts: list[int] = []

    async def handle(event: Event) -> None:
        attempts.append(event.attempt)

    retry = RetryPolicy(max_attempts=2)
    async with BusKit(stop_grace_s=0) as kit:
        kit.bus.subscribe("a", hang_forever, "reader", retry=retry)
        await kit.publish("a", 1)
        await kit.settle()
        await kit.crash()
        kit.bus.subscribe("a", hang_forever, "reader", retry=retry)
        await kit.start()
        await kit.settle()
        await kit.stop()
        kit.bus.unsubscribe("a", "reader")
        kit.bus.subscribe("a", handle, "reader", retry=retry)
        await kit.start()
        await kit.settle()
        assert await kit.dead() == []
    assert attempts == [3]
