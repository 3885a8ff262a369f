from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from postbus.kernel.graph import arrange, dependents

NAMES = "abcdef"


def test_each_comes_after_what_it_needs() -> None:
    assert arrange({"c": ["b"], "b": ["a"], "a": [], "z": []}) == (["a", "b", "c", "z"], {})


def test_a_missing_one_is_a_reason() -> None:
    ordered, reasons = arrange({"a": ["ghost"], "b": []})
    assert ordered == ["b"]
    assert reasons == {"a": "it depends on ghost, which is not there"}


def test_a_circle_is_a_reason_for_its_members_only() -> None:
    ordered, reasons = arrange({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"], "e": [], "f": ["f"]})
    assert reasons == {
        "a": "it depends on itself: a → b → c → a",
        "b": "it depends on itself: b → c → a → b",
        "c": "it depends on itself: c → a → b → c",
        "f": "it depends on itself: f → f",
    }
    assert sorted(ordered) == ["d", "e"]


def test_dependents_reach_through_others() -> None:
    needs = {"a": [], "b": ["a"], "c": ["b"], "d": []}
    assert dependents("a", needs) == {"b", "c"}
    assert dependents("c", needs) == set()


@settings(deadline=None)
@given(st.fixed_dictionaries({name: st.lists(st.sampled_from(NAMES), unique=True, max_size=3) for name in NAMES}))
def test_whatever_the_needs_everybody_is_placed_or_has_a_reason(needs: dict[str, list[str]]) -> None:
    ordered, reasons = arrange(needs)
    assert sorted([*ordered, *reasons]) == sorted(needs)
    for index, name in enumerate(ordered):
        assert all(other in ordered[:index] or other in reasons for other in needs[name])
    assert set(reasons) == {name for name in needs if name in dependents(name, needs)}
