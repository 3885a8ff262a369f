"""The judgement over a bus that was killed many times: what was promised, held against files and tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from postbus.store.backup import check_store
from tests.faults.bus_campaign import Said, query, unfinished
from tests.faults.bus_nursery import JOURNAL, Diary, payload_of, store_of

__all__ = ["Verdict", "judge"]

EVENTS = """
    SELECT "offset", topic, key, CAST(payload AS TEXT) FROM events
    WHERE stream_id = (SELECT stream_id FROM stream_registry WHERE name = ?) ORDER BY "offset"
"""
DEAD = "SELECT subscription, origin_offset, topic, reason, attempts, state FROM dead_letters"
FAILED = "SELECT consumer, \"offset\" FROM delivery_rows WHERE status = 'failed'"
STATUSES = "SELECT status, count(*) FROM event_journal GROUP BY status"
ONCE = 'SELECT "offset", result FROM once_results WHERE consumer = ?'

WANTS = {
    "keyed": ("order.placed", "order.poison"),
    "strict": ("order.placed",),
    "faulty": ("order.placed", "order.poison"),
    "deriver": ("order.placed",),
    "sink": ("derived.made",),
    "effects": ("order.placed",),
}


@dataclass
class Verdict:
    """How it was, in numbers."""

    published: int = 0
    acked: int = 0
    handled: int = 0
    again: int = 0
    dead: int = 0
    effects: int = 0
    uncertain: int = 0
    statuses: dict[str, int] | None = None


def judge(folder: Path, said: Said) -> Verdict:
    """Hold everything that was promised against what is there."""
    assert unfinished(folder) == []
    report = check_store(store_of(folder))
    assert report.ok, report.problems
    events = {row[0]: (row[1], row[2], msgspec.json.decode(row[3])) for row in query(folder, EVENTS, JOURNAL)}
    verdict = Verdict(published=len(events), acked=len(said.acked))
    _all_published(events, said)
    poison = {offset for offset, (topic, _, _) in events.items() if topic == "order.poison"}
    for name, topics in WANTS.items():
        expected = {offset for offset, (topic, _, _) in events.items() if topic in topics}
        done = [offset for word, offset, _, _ in Diary(folder, name).read() if word == "done"]
        missing = expected - set(done) - (poison if name == "faulty" else set())
        assert missing == set(), f"{name} never handled {sorted(missing)[:20]}"
        assert set(done) <= expected, f"{name} handled what it did not ask for"
        assert name != "faulty" or not poison & set(done)
        verdict.handled += len(done)
        verdict.again += len(done) - len(set(done))
        _in_order(name, list(dict.fromkeys(done)), events)
    _derived(events)
    _dead(folder, poison, verdict)
    _effects(folder, {offset for offset, (topic, _, _) in events.items() if topic == "order.placed"}, verdict)
    statuses = dict(query(folder, STATUSES))
    assert statuses == {"done": len(events) - len(poison), "failed": len(poison)}
    verdict.statuses = statuses
    return verdict


def _all_published(events: dict[int, tuple[str, str | None, Any]], said: Said) -> None:
    assert list(events) == list(range(len(events))), "offsets are not dense"
    for offset, number in said.acked.items():
        topic, _, payload = events[offset]
        assert (topic, payload) == payload_of(number), f"offset {offset} is not what was acknowledged"


def _in_order(name: str, firsts: list[int], events: dict[int, tuple[str, str | None, Any]]) -> None:
    """Every event's first success comes after those of the earlier events of its key (or of all, when strict)."""
    if name == "strict":
        assert firsts == sorted(firsts), f"strict went {_disorder(firsts)}"
        return
    keyed: dict[str, list[int]] = defaultdict(list)
    for offset in firsts:
        key = events[offset][1]
        if key is not None:
            keyed[key].append(offset)
    for key, offsets in keyed.items():
        assert offsets == sorted(offsets), f"{name} went {_disorder(offsets)} on {key}"


def _disorder(offsets: list[int]) -> str:
    pairs = [pair for pair in pairwise(offsets) if pair[0] > pair[1]]
    return f"from {pairs[0][0]} back to {pairs[0][1]}, {len(pairs)} times"


def _derived(events: dict[int, tuple[str, str | None, Any]]) -> None:
    made = Counter(payload["from"] for topic, _, payload in events.values() if topic == "derived.made")
    origins = {offset for offset, (topic, _, _) in events.items() if topic == "order.placed"}
    assert made.keys() == origins
    assert set(made.values()) <= {1}, "an event was derived twice"


def _dead(folder: Path, poison: set[int], verdict: Verdict) -> None:
    letters = query(folder, DEAD)
    wrong = [letter for letter in letters if letter[0] != "faulty" or letter[1] not in poison]
    assert wrong == [], "an innocent event is dead"
    deaths = Counter(letter[1] for letter in letters)
    assert deaths.keys() == poison, f"not dead: {sorted(poison - deaths.keys())[:20]}"
    assert set(deaths.values()) <= {1}, "somebody died twice"
    assert {letter[5] for letter in letters} <= {"open"}
    assert {letter[3] for letter in letters} <= {"max_attempts", "rejected", "crash"}
    assert {(row[0], row[1]) for row in query(folder, FAILED)} == {("faulty", offset) for offset in poison}
    verdict.dead = len(letters)


def _effects(folder: Path, placed: set[int], verdict: Verdict) -> None:
    """Effects never happen twice, and once unless the process died between their record and its end."""
    happened = Counter(offset for _, offset, _, _ in Diary(folder, "effect").read())
    assert max(happened.values(), default=0) <= 1, "a side effect happened twice"
    recorded = dict(query(folder, ONCE, "effects"))
    assert recorded.keys() == placed
    uncertain = {offset for offset, result in recorded.items() if result is None}
    assert placed - uncertain <= happened.keys(), "an effect is on record that never happened"
    assert happened.keys() <= placed
    verdict.effects, verdict.uncertain = len(happened), len(uncertain)
    assert verdict.effects + verdict.uncertain >= len(placed)
