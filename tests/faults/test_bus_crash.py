"""kill -9 on the bus: every event is handled at least once, in order, none is lost, none is stuck, effects happen once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.bus_campaign import Town
from tests.faults.bus_judge import judge
from tests.faults.campaign import FULL, dice

KILLS = 120 if FULL else 20

pytestmark = [pytest.mark.xdist_group("bus crash"), pytest.mark.slow]


@pytest.mark.parametrize("crew", [("worker", "publisher"), ("worker", "worker", "publisher")], ids=["one", "two"])
def test_killed_workers_and_publishers_lose_nothing(ground: Path, crew: tuple[str, ...]) -> None:
    rolls = dice(f"bus kill -9, {len(crew)} at once")
    with Town(ground / "town") as town:
        of_workers = town.campaign(rolls, KILLS, crew)
        for pid, role in list(town.living.items()):
            if role == "publisher" or len([other for other in town.living.values() if other == "worker"]) > 1:
                town.kill(pid)
        (last,) = town.living
        took_s = town.drain()
        town.stop(last)
        verdict = judge(town.folder, town.said)
    print(f"{KILLS} kills, {of_workers} of workers; drained in {took_s:.1f} s; {verdict}")  # noqa: T201 - what it did
    assert verdict.acked > KILLS
    assert verdict.dead > 0
