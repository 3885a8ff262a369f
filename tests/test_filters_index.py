"""The index finds what evaluating every filter would find, without evaluating every filter."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postbus.filters import Filter, FilterIndex, View, compile_filter
from postbus.filters.view import Fault
from postbus.model import Invalid
from postbus.topics import matches
from tests.test_filters import event

SCALARS = st.sampled_from([0, 1, 1.0, True, False, None, "a", "b", "1", 2**70])
PLACES = st.sampled_from(["t", "u", "t.x"])
ACTUAL = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("tux"), inner)
)
TEXTS = st.sampled_from(
    [
        "payload.t == 'a'", "payload.t == 1 && payload.u == 'b'", "payload.t in ['a', 1, true]",
        "variant == 'v'", "'b' == payload['u']", "topic == 'a.b' && payload.t != 1", "payload.t.x == null",
        "payload.t == 'a' || payload.u == 'b'", "!(payload.t == 'a')", "has(payload.t)",
        "key == null", "payload.t in [payload.u]", "payload == 'a'",
        "'a' in payload.t", "1 in payload.t", "'t' in payload", "null in payload.u",
        "payload.t == 'a' || payload.t == 1",
        "payload.t == 'a' || variant == 'v' || 'b' in payload.u", "payload.t == 'a' || has(payload.u)",
        "(payload.t == 'a' && payload.u == 'b') || (variant == 'v' && 'x' in payload.t)",
        "payload.u != 1 && (payload.t == true || key == 'a' || payload.u.t == 'b')",
    ]
)  # fmt: skip
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "payload": st.dictionaries(PLACES, SCALARS | st.lists(SCALARS, max_size=3), max_size=2),
        "metadata": st.dictionaries(PLACES, SCALARS, max_size=1),
        "expr": TEXTS,
    },
)
PATTERNS = st.sampled_from(["a.b", "a.*", ">", "x.>", "a.c"])


@settings(max_examples=300, deadline=None)
@given(
    registrations=st.lists(st.tuples(st.integers(0, 12), PATTERNS, SPECS), max_size=16),
    removed=st.lists(st.integers(0, 12), max_size=3),
    payloads=st.lists(ACTUAL | st.fixed_dictionaries({"t": ACTUAL, "u": ACTUAL}), min_size=1, max_size=4),
    metadata=st.dictionaries(st.sampled_from("tu"), SCALARS),
    variant=st.sampled_from(["", "v"]),
)
def test_the_same_as_one_by_one(
    registrations: list[tuple[int, str, dict[str, Any]]],
    removed: list[int],
    payloads: list[Any],
    metadata: dict[str, Any],
    variant: str,
) -> None:
    index: FilterIndex[int] = FilterIndex()
    known: dict[tuple[int, str], Filter] = {}
    for name, pattern, spec in registrations:
        filter_ = compile_filter(spec)
        index.add(name, pattern, filter_)
        known.pop((name, pattern), None)
        known[name, pattern] = filter_
    for name in removed:
        there = [place for place in known if place[0] == name]
        assert index.remove(name) is bool(there)
        for place in there:
            del known[place]
    assert len(index) == len({name for name, _ in known})
    for payload in payloads:
        given_event = event(payload, metadata, variant=variant)
        expected = [name for (name, pattern), f in known.items() if matches(pattern, "a.b") and f.matches(given_event)]
        assert index.match(given_event) == list(dict.fromkeys(expected))


def count_evaluations(monkeypatch: pytest.MonkeyPatch) -> list[Filter]:
    evaluated: list[Filter] = []
    original = Filter.outcome

    def outcome(self: Filter, view: View) -> bool | None:
        evaluated.append(self)
        return original(self, view)

    monkeypatch.setattr(Filter, "outcome", outcome)
    return evaluated


def test_only_candidates_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = count_evaluations(monkeypatch)
    index: FilterIndex[int] = FilterIndex()
    draw = random.Random(1)
    for number in range(2_000):
        spec: dict[str, Any] = {"payload": {"kind": draw.choice("abc"), "repo": f"r{number % 500}"}}
        if number % 2:
            spec = {"expr": f"payload.kind == 'a' && payload.repo == 'r{number % 500}' && payload.n > {number}"}
        index.add(number, "a.>" if number % 3 else "a.b", compile_filter(spec))
    found = index.match(event({"kind": "a", "repo": "r7", "n": 10_000}))
    assert found == list(range(7, 2_000, 500))
    assert len(evaluated) <= 12


def test_what_an_alternative_or_a_list_must_hold_leads_to_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = count_evaluations(monkeypatch)
    index: FilterIndex[int] = FilterIndex()
    for number in range(500):
        index.add(number, "a.>", compile_filter({"expr": f"payload.n == {number} || metadata.by == 'u{number}'"}))
        index.add(500 + number, "a.>", compile_filter({"expr": f"'u{number}' in payload.asked"}))
        both = f"(payload.n == {number} && metadata.by == 'u{number}') || 'k{number}' in metadata"
        index.add(1_000 + number, "a.>", compile_filter({"expr": both}))
    given_event = event({"n": 3, "asked": ["u5", "u6"]}, {"by": "u3", "k9": 1})
    assert sorted(index.match(given_event)) == [3, 505, 506, 1_003, 1_009]
    assert len(evaluated) <= 6
    for number in range(1_500):
        assert index.remove(number) is True
    assert index.match(given_event) == []


def test_the_same_filter_is_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = count_evaluations(monkeypatch)
    index: FilterIndex[str] = FilterIndex()
    for number in range(100):
        index.add(f"agent-{number}", "a.*", compile_filter({"expr": "payload.n > 1"}))
    assert index.match(event({"n": 2})) == [f"agent-{number}" for number in range(100)]
    assert len(evaluated) == 1


def test_errors_are_counted_for_every_registration() -> None:
    index: FilterIndex[int] = FilterIndex()
    filters = [compile_filter({"expr": "payload.n > 1"}) for _ in range(3)]
    for number, filter_ in enumerate(filters):
        index.add(number, ">", filter_)
    assert index.match(event({})) == []
    assert [filter_.errors for filter_ in filters] == [1, 1, 1]


@pytest.mark.parametrize(
    "expr", ["payload.n > 1 && payload.n < 3", "payload.n > 1 || true", "[1].all(i, payload.n > i)"]
)
def test_errors_hold_nothing_in_memory(expr: str) -> None:
    """So that matching many events needs no collector of cycles."""
    filter_ = compile_filter({"expr": expr})
    gc.collect()
    gc.disable()
    try:
        filter_.matches(event({"n": "text"}))
        assert [found for found in gc.get_objects() if isinstance(found, Fault)] == []
    finally:
        gc.enable()


def test_adding_again_replaces_and_goes_to_the_end() -> None:
    index: FilterIndex[str] = FilterIndex()
    for name in ("one", "two"):
        index.add(name, "a.b", compile_filter({}))
    index.add("one", "a.b", compile_filter({"payload": {"n": 1}}))
    assert index.match(event({"n": 1})) == ["two", "one"]
    assert index.match(event({"n": 2})) == ["two"]
    assert index.remove("one", "a.*") is False
    assert index.remove("one", "a.b") is True
    assert index.match(event({"n": 1})) == ["two"]
    assert index.remove("two") is True
    assert index.remove("two") is False
    assert (len(index), index.match(event({"n": 1}))) == (0, [])


def test_a_bad_pattern_is_refused_and_changes_nothing() -> None:
    index: FilterIndex[str] = FilterIndex()
    index.add("one", "a.b", compile_filter({}))
    with pytest.raises(Invalid, match="before its end"):
        index.add("one", "a.>.b", compile_filter({}))
    assert index.match(event()) == ["one"]


def test_a_view_can_be_shared_with_an_index() -> None:
    index: FilterIndex[str] = FilterIndex()
    index.add("one", "a.b", compile_filter({"payload": {"n": 1}}))
    view = View(event({"n": 1}))
    assert index.match(view) == ["one"]
    assert compile_filter({"payload": {"n": 1}}).matches(view)
