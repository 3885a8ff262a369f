"""kill -9 on pumps, publishers and agents: each inbox holds each matching event exactly once, in order."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.faults.bus_campaign import PATIENCE_S, Town, query
from tests.faults.campaign import FULL, dice
from tests.faults.inbox_nursery import AGENTS, populate

KILLS = 220 if FULL else 12

EVENTS = """
    SELECT e."offset", e.topic, CAST(e.payload AS TEXT) FROM events e JOIN stream_registry s USING (stream_id)
    WHERE s.name = 'local.default.journal' ORDER BY e."offset"
"""
# Every item there ever was, in its order; those that were acked long ago are only remembered.
ITEMS = """
    SELECT i."offset", i.sequence, i.matched_by FROM inbox_rows i JOIN agent_registry a USING (agent_no)
    JOIN stream_registry s USING (stream_id)
    WHERE a.agent = ? AND s.name = ? ORDER BY i.sequence
"""
SENT = """
    SELECT e."offset", CAST(e.payload AS TEXT) FROM events e JOIN stream_registry s USING (stream_id)
    WHERE s.name = 'local.default.inbox-messages' ORDER BY e."offset"
"""
UNFIRED = "SELECT timer FROM timer_rows WHERE fired <> 1"

pytestmark = [pytest.mark.xdist_group("inbox crash"), pytest.mark.slow]


class InboxTown(Town):
    nursery = "tests.faults.inbox_nursery"


def wanted(agent: str, topic: str, payload: dict[str, Any]) -> bool:
    """What the judge thinks an agent is owed."""
    if agent == "everything":
        return True
    if not topic.startswith("order."):
        return False
    return payload["n"] % 3 == 0 if agent == "thirds" else True


def judge(folder: Path, acked: dict[int, int]) -> dict[str, int]:
    """Look at every inbox; return how many items each one holds."""
    events = [(offset, topic, json.loads(text)) for offset, topic, text in query(folder, EVENTS)]
    numbers = {offset: payload["n"] for offset, _, payload in events}
    assert {offset: numbers.get(offset) for offset in acked} == acked, "an acknowledged event is not there"
    counts = {}
    for agent in AGENTS:
        items = query(folder, ITEMS, agent, "local.default.journal")
        owed = [offset for offset, topic, payload in events if wanted(agent, topic, payload)]
        found = [offset for offset, _, _ in items]
        assert sorted(found) == sorted(set(found)), f"{agent} has something twice"
        assert set(found) == set(owed), f"{agent} misses {sorted(set(owed) - set(found))[:10]}"
        assert found == owed, f"{agent} has them in another order"
        assert [sequence for _, sequence, _ in items] == list(range(1, len(items) + 1))
        counts[agent] = len(items)
    for offset, _, matched_by in query(folder, ITEMS, "twice", "local.default.journal"):
        both = dict(events_by_offset(events))[offset]
        assert set(json.loads(matched_by)) == ({"twice-0", "twice-1"} if both else {"twice-0"})
    return counts


def events_by_offset(events: list[tuple[int, str, dict[str, Any]]]) -> list[tuple[int, bool]]:
    return [(offset, topic == "order.placed" and payload["even"]) for offset, topic, payload in events]


def judge_messages(folder: Path) -> int:
    """Every message and every fire of a timer is one item; return how many there are."""
    sent = dict(query(folder, SENT))
    items = [offset for offset, _, _ in query(folder, ITEMS, "addressee", "local.default.inbox-messages")]
    assert items == sorted(sent), "a message is lost, twice, or out of order"
    ticks = Counter(text for text in sent.values() if text.startswith('"tick'))
    assert set(ticks.values()) <= {1}, "a timer fired twice"
    fired = {f'"tick {timer[1:]}"' for (timer,) in query(folder, "SELECT timer FROM timer_rows WHERE fired = 1")}
    assert set(ticks) == fired
    assert query(folder, UNFIRED) == [], "a timer never fired"
    return len(items)


@pytest.mark.parametrize(
    "crew",
    [("worker", "publisher", "agent"), ("worker", "worker", "publisher", "agent")],
    ids=["one pump", "two pumps"],
)
def test_killed_pumps_publishers_and_agents_leave_every_inbox_right(ground: Path, crew: tuple[str, ...]) -> None:
    rolls = dice(f"inbox kill -9, {len(crew)} at once")
    folder = ground / "town"
    folder.mkdir()
    asyncio.run(populate(folder))
    with InboxTown(folder) as town:
        of_pumps = town.campaign(rolls, KILLS, crew)
        for pid, role in list(town.living.items()):
            if role != "worker" or Counter(town.living.values())["worker"] > 1:
                town.kill(pid)
        (last,) = town.living
        town.opened(last)
        deadline = time.monotonic() + PATIENCE_S
        while query(folder, UNFIRED):  # the last ones are due by now, and looked for once a second
            assert time.monotonic() < deadline, "a timer never fired"
            town.listen(0.1)
        took_s = town.drain()
        town.stop(last)
        counts = judge(folder, town.said.acked)
        messages = judge_messages(folder)
    assert query(folder, "SELECT count(*) FROM dead_letters") == [(0,)]
    print(f"{KILLS} kills, {of_pumps} of pumps; drained in {took_s:.1f} s; items {counts}; {messages} messages")  # noqa: T201
    assert min(counts.values()) > 0
    assert messages > 0
