"""Filters as specified: the truth table of the shortcuts, what is refused, limits, explanations."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postbus.filters import View, compile_filter
from postbus.filters.view import STEPS_MAX
from postbus.model import Event, InvalidFilter
from tests.filter_cases import event_of


def event(payload: Any = None, metadata: dict[str, Any] | None = None, **more: Any) -> Event:
    values: dict[str, Any] = {
        "topic": "a.b",
        "source": "test",
        "variant": "",
        "key": None,
        "headers": {},
        "occurred_at_us": 0,
    }
    return event_of(values | {"payload": payload, "metadata": metadata or {}} | more)


# --- the shortcuts ----------------------------------------------------------------------------------------------------

T, F = True, False
BIG = 2**64 + 1
# expected at payload.v, what is there, whether it matches
TABLE: list[tuple[Any, Any, bool]] = [
    # scalars: equality with types
    (1, 1, T), (1, 2, F), (1, 1.0, T), (1.0, 1, T), (1.5, 1.5, T), (1.5, 1, F), (0, -0.0, T),
    (1, True, F), (True, 1, F), (True, 1.0, F), (0, False, F), (False, 0, F), (False, 0.0, F),
    (1, "1", F), ("1", 1, F), (True, "true", F), ("true", True, F), (True, True, T), (False, False, T),
    (True, False, F),
    (None, None, T), (None, 0, F), (None, False, F), (None, "", F), (0, None, F), ("", None, F), (False, None, F),
    ("", "", T), ("a", "a", T), ("a", "A", F), ("a", "a ", F), ("é", "é", T), ("é", "e\u0301", F),
    (BIG, BIG, T), (BIG, BIG + 1, F), (BIG, float(BIG), F), (2**53, float(2**53), T), (2**53 + 1, float(2**53), F),
    (10**400, 10**400, T), (10**400, 10**400 + 1, F),
    # scalar expected, list there: membership
    (1, [1, 2], T), (1, [2, 3], F), (1, [], F), (1, [True], F), (True, [1], F), (True, [1, True], T), (1, [1.0], T),
    ("a", ["a"], T), ("a", ["ab"], F), ("a", "abc", F), (None, [None], T), (None, [], F), (None, [0], F),
    (1, [[1]], F), ("a", [{"a": 1}], F), (0, [False], F), (False, [0], F), ("1", [1], F),
    # scalar expected, dict there
    (1, {"v": 1}, F), ("a", {"a": 1}, F), (None, {}, F),
    # list expected, something else there: any of
    ([1, 2], 1, T), ([1, 2], 2, T), ([1, 2], 3, F), ([], 1, F), ([], None, F), ([], "", F), ([], {}, F), ([1], True, F),
    ([True], 1, F), ([None], None, T), ([None, 1], None, T), (["a", "b"], "b", T), (["a", "b"], "ab", F), ([1], 1.0, T),
    ([[1]], 1, T), ([[1, 2], 3], 2, T), ([[]], 1, F), ([{"a": 1}], {"a": 1, "b": 2}, T), ([{"a": 1}], {"a": 2}, F),
    ([{}], {"a": 1}, T), ([{}], 1, F), ([1, {"a": 1}], 1, T), ([0], False, F), (["1"], 1, F),
    # list expected, list there: every expected element matches some element
    ([1], [1, 2], T), ([1, 2], [2, 1], T), ([1, 2], [1], F), ([1, 1], [1], T), ([], [], T), ([], [1], T), ([1], [], F),
    ([1], [True], F), ([True], [1], F), ([1], [1.0], T), ([None], [None], T), ([None], [], F), (["a"], ["b", "a"], T),
    ([1], [[1]], T), ([1, 2], [[1], [2]], T), ([[1]], [[1, 2]], T), ([[1, 2]], [[1], [2]], F), ([[1]], [1], T),
    ([{"a": 1}], [{"a": 1, "b": 2}], T), ([{"a": 1}], [{"a": 2}, {"b": 1}], F),
    ([{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}], T),
    ([{"a": 1}, 2], [2, {"a": 1}], T), ([{"a": 1}, 2], [{"a": 1}], F), ([{"a": [1]}], [{"a": 1}], T), ([[]], [[]], T),
    # dict expected: subset
    ({}, {}, T), ({}, {"a": 1}, T), ({}, [], F), ({}, None, F), ({}, 0, F), ({}, "", F), ({}, [{}], F),
    ({"a": 1}, {"a": 1}, T), ({"a": 1}, {"a": 1, "b": 2}, T), ({"a": 1}, {"b": 1}, F), ({"a": 1}, {}, F),
    ({"a": 1}, [], F),
    ({"a": None}, {"a": None}, T), ({"a": None}, {}, F), ({"a": None}, {"b": None}, F), ({"a": 1}, None, F),
    ({"a": 1}, "a", F),
    ({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}, T), ({"a": {"b": 1}}, {"a": 1}, F),
    ({"a": {"b": 1}}, {"a": [{"b": 1}]}, F),
    ({"a": {}}, {"a": {}}, T), ({"a": {}}, {"a": 1}, F), ({"a": {}}, {}, F), ({"a": []}, {"a": []}, T),
    ({"a": []}, {"a": 1}, F),
    ({"a": 1, "b": 2}, {"a": 1}, F), ({"": 1}, {"": 1}, T), ({"a": True}, {"a": 1}, F), ({"a": [1, 2]}, {"a": 2}, T),
    # dots are paths through dicts
    ({"a.b": 1}, {"a": {"b": 1}}, T), ({"a.b": 1}, {"a.b": 1}, F), ({"a.b": 1}, {"a": 1}, F),
    ({"a.b": 1}, {"a": [{"b": 1}]}, F),
    ({"a.b.c": "x"}, {"a": {"b": {"c": "x"}}}, T), ({"a.b": None}, {"a": {}}, F),
    ({"a.b": {"c": 1}}, {"a": {"b": {"c": 1}}}, T),
    ({"a": {"b.c": 1}}, {"a": {"b": {"c": 1}}}, T), ({"a..b": 1}, {"a": {"": {"b": 1}}}, T),
    ({"a.b": [1, 2]}, {"a": {"b": 2}}, T),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "actual", "wanted"), TABLE)
@pytest.mark.parametrize("part", ["payload", "metadata"])
def test_truth_table(part: str, expected: Any, actual: Any, wanted: bool) -> None:
    there = {"v": actual}
    given = event(there) if part == "payload" else event({}, there)
    assert compile_filter({part: {"v": expected}}).matches(given) is wanted


def test_the_table_is_as_large_as_promised() -> None:
    assert len(TABLE) >= 100


@pytest.mark.parametrize("payload", [None, 1, "a", [], [{"a": 1}], True])
def test_a_payload_that_is_no_object_has_no_members(payload: Any) -> None:
    assert not compile_filter({"payload": {"a": 1}}).matches(event(payload))
    assert not compile_filter({"payload": {}}).matches(event(payload))
    assert compile_filter({}).matches(event(payload))


def test_all_parts_must_hold() -> None:
    spec = {"metadata": {"repo": "r"}, "payload": {"n": 1}, "expr": "variant == 'v'"}
    filter_ = compile_filter(spec)
    assert filter_.matches(event({"n": 1}, {"repo": "r"}, variant="v"))
    assert not filter_.matches(event({"n": 1}, {"repo": "r"}))
    assert not filter_.matches(event({"n": 2}, {"repo": "r"}, variant="v"))
    assert not filter_.matches(event({"n": 1}, {}, variant="v"))
    assert compile_filter({"metadata": {}}).matches(event())


def test_a_filter_does_not_follow_later_changes_of_its_specification() -> None:
    spec: dict[str, Any] = {"payload": {"n": [1]}}
    filter_ = compile_filter(spec)
    spec["payload"]["n"].append(2)
    assert not filter_.matches(event({"n": 2}))
    assert filter_.spec == {"payload": {"n": [1]}}


# --- what is refused --------------------------------------------------------------------------------------------------

LOOP: dict[str, Any] = {}
LOOP["payload"] = LOOP


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (None, "must be a JSON object"),
        ("payload.a == 1", "must be a JSON object"),
        ([], "must be a JSON object"),
        ({"topic": "a"}, "no part 'topic'"),
        ({1: 2}, "no part 1"),
        ({"payload": 1}, "payload must be a JSON object"),
        ({"payload": None}, "payload must be a JSON object"),
        ({"metadata": []}, "metadata must be a JSON object"),
        ({"expr": 1}, "expr must be a string"),
        ({"expr": None}, "expr must be a string"),
        ({"payload": {"a": float("nan")}}, "not JSON"),
        ({"payload": {"a": {1, 2}}}, "not JSON"),
        ({"payload": {1: 2}}, "not JSON"),
        ({"payload": {"a": "x" * 70_000}}, "too large"),
        (LOOP, "not JSON"),
    ],
)
def test_bad_specifications(spec: Any, sentence: str) -> None:
    with pytest.raises(InvalidFilter, match=sentence) as refusal:
        compile_filter(spec)
    assert refusal.value.line is None


@pytest.mark.parametrize(
    ("text", "line", "column", "sentence"),
    [
        ("", 1, 1, "empty"),
        ("  // only a comment", 1, 20, "empty"),
        ("payload.a = 1", 1, 11, "'=' is not expected"),
        ("payload.a & 1", 1, 11, "'&' is not expected"),
        ("payload.a ==", 1, 13, "the end is not expected"),
        ("(payload.a", 1, 11, r"\) is missing before the end"),
        ("payload.a)", 1, 10, "not expected"),
        ("payload..a", 1, 9, "name of a field"),
        ("payload.true", 1, 9, "name of a field"),
        ("payload.a == 'x", 1, 14, "no end"),
        ("payload.a == 'x\n'", 1, 14, "no end"),
        ("payload.a == '\\q'", 1, 15, "escape"),
        ("payload.a == '\\ud800'", 1, 15, "Unicode"),
        ("payload.a ==\n  nothing", 2, 3, "no variable nothing"),
        ("true &&\n\n payload.a == 1u", 3, 15, "unsigned"),
        ("payload.a == 9223372036854775808", 1, 14, "64 bits"),
        ("payload.a == 12abc", 1, 16, "after a number"),
        ("1 == 'a'", 1, 3, "types int and string"),
        ("topic == 1", 1, 7, "types string and int"),
        ("headers.a > 1", 1, 11, "types string and int"),
        ("topic && true", 1, 1, "wants a bool"),
        ("topic", 1, 1, "not a bool"),
        ("size(topic)", 1, 1, "not a bool"),
        ("size(1) == 1", 1, 6, "does not take"),
        ("topic.x == 1", 1, 7, "has no fields"),
        ("topic[0] == 'a'", 1, 6, "has no elements"),
        ("!topic", 1, 2, "wants a bool"),
        ("-topic == 1", 1, 1, "wants a number"),
        ("true ? 1 : 'a'", 1, 6, "two choices"),
        ("1 ? true : false", 1, 1, "wants a bool"),
        ("has(payload)", 1, 1, "wants one field"),
        ("payload.a.exists(1, true)", 1, 18, "name of a variable"),
        ("payload.a.exists(x)", 1, 11, "variable and a condition"),
        ("topic.exists(x, true)", 1, 7, "has no elements"),
        ("payload.a.foo()", 1, 11, "no method foo"),
        ("foo(1)", 1, 1, "no function foo"),
        ("topic.contains()", 1, 7, "wants 1 arguments, not 0"),
        ("topic.matches('(')", 1, 15, "pattern is not valid"),
        ("topic.matches('(a)\\\\1')", 1, 15, "pattern is not valid"),
        ("topic.matches('" + "a" * 257 + "')", 1, 15, "257 characters"),
        ("topic.matches('(.{1,50}){50}')", 1, 15, "too large|not valid"),
        ("for == 1", 1, 1, "reserved"),
        ("payload.a == \x00", 1, 14, "not expected"),
        ("[1].exists(x, x == 'a')", 1, 17, "types int and string"),
    ],
)
def test_bad_expressions_are_refused_where_they_go_wrong(text: str, line: int, column: int, sentence: str) -> None:
    with pytest.raises(InvalidFilter, match=sentence) as refusal:
        compile_filter({"expr": text})
    assert (refusal.value.line, refusal.value.column) == (line, column)
    assert f"line {line}, column {column}" in refusal.value.message


PIECES = st.sampled_from(
    [
        "payload", "topic", ".", "a", "(", ")", "[", "]", "{", "}", ",", ":", "?", "==", "<", "&&", "||", "!", "-", "+",
        "in", "1", "1.5", "'a'", '"', "null", "true", "has", "exists", "x", "matches", "size", "`", "//", "\n", " ",
        "\\", "é", "0x",
    ]
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.lists(PIECES, max_size=25).map("".join) | st.text(max_size=40))
def test_any_text_is_an_expression_or_refused(text: str) -> None:
    refusal = None
    try:
        compile_filter({"expr": text}).matches(event({"a": [1, "a", {"a": None}]}))
    except InvalidFilter as error:
        refusal = error
    if refusal is not None and refusal.line is not None:
        lines = text.split("\n")
        assert 1 <= refusal.line <= len(lines)
        assert 1 <= (refusal.column or 0) <= len(lines[refusal.line - 1]) + 1


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "(" * 2000 + "true" + ")" * 2000,
        "!" + "(!" * 1000 + "true" + ")" * 1000,
        "[" * 2000 + "]" * 2000 + " == []",
        "{'a':" * 600 + "1" + "}" * 600 + " == {}",
        "payload" + ".a" * 1500,
        "payload" + "[0]" * 1000,
        "1" + "+1" * 2000 + " == 1",
        "true" + " ? true : true" * 280,
        "payload.a.exists(x, " * 150 + "true" + ")" * 150,
        "true || " * 800 + "true",
        "x" * 4097,
        "-" * 4000 + "1 == 1 && " + "(" * 80,
    ],
)
def test_long_and_deep_expressions_are_refused_not_followed(text: str) -> None:
    with pytest.raises(InvalidFilter, match=r"nested deeper|more than 1000 parts|limit is 4096|not expected"):
        compile_filter({"expr": text})


def test_refusing_works_with_little_stack_left() -> None:
    outcome: list[object] = []

    def work() -> None:
        for text in ("(" * 47 + "true" + ")" * 47, "(" * 2000):
            try:
                outcome.append(compile_filter({"expr": text}).matches(event()))
            except InvalidFilter:
                outcome.append(None)

    threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(0)
    assert outcome == [True, None]


def test_what_fits_into_the_limits_works() -> None:
    long = " || ".join(f"payload.a == {number}" for number in range(200))
    assert len(long) < 4096
    assert compile_filter({"expr": long}).matches(event({"a": 199}))
    assert not compile_filter({"expr": long}).matches(event({"a": 200}))


@pytest.mark.parametrize(
    ("text", "payload"),
    [
        ("payload.l.all(x, payload.l.all(y, payload.l.all(z, x != 'b')))", {"l": ["a"] * 2_000}),
        ("payload.l.all(x, payload.l == payload.l)", {"l": [0] * 5_000}),
        ("payload.l.all(x, !('b' in payload.l))", {"l": ["a"] * 5_000}),
        ("payload.l.all(x, payload.s.contains('aab') == false)", {"l": [0] * 5_000, "s": "a" * 100_000}),
        ("payload.l.all(x, payload.s == payload.r)", {"l": [0] * 5_000, "s": "a" * 100_000, "r": "a" * 100_000}),
        ("payload.l.all(x, size(payload.s + payload.s) > 0)", {"l": [0] * 5_000, "s": "a" * 100_000}),
        (" + ".join(["payload.s"] * 40) + " == ''", {"s": "a" * 100_000}),
        ("payload.s.matches('(.?){300}z')", {"s": "a" * 500_000}),
        ("payload.l.all(x, payload.s.matches('(x+x+)+y') == false)", {"l": [0] * 1_000, "s": "x" * 100_000}),
    ],
)
def test_work_that_grows_with_the_data_is_bounded(text: str, payload: Any) -> None:
    given = compile_filter({"expr": text})
    view = View(event(payload))
    assert not given.matches(view)
    assert given.errors == 1
    (reason,) = given.explain(event(payload)).reasons
    assert "takes too long" in reason.found or "too large" in reason.found
    assert view.steps > -STEPS_MAX * 200  # the last step was refused before it was taken


def test_shortcuts_are_bounded_too() -> None:
    spec = {"payload": {"l": [{"a": number} for number in range(400)]}}
    given = compile_filter(spec)
    assert not given.matches(event({"l": [{"a": 0}] * 20_000}))
    assert compile_filter(spec).matches(event({"l": [{"a": number} for number in range(400)]}))


def test_ordinary_loops_are_far_from_the_bound() -> None:
    payload = {"l": [{"name": f"n{number}", "size": number} for number in range(20_000)]}
    assert compile_filter({"expr": "payload.l.exists(f, f.name == 'n19999' && f.size > 10)"}).matches(event(payload))


# --- errors and explanations ------------------------------------------------------------------------------------------


def test_an_evaluation_error_is_no_match_and_counted() -> None:
    filter_ = compile_filter({"expr": "payload.n > 3"})
    outcomes = [filter_.matches(event(payload)) for payload in ({"n": 4}, {"n": 3}, {}, {"n": "4"}, None, {"n": True})]
    assert outcomes == [True, False, False, False, False, False]
    assert filter_.errors == 4


def test_a_value_that_is_no_bool_is_an_error() -> None:
    filter_ = compile_filter({"expr": "payload.n"})
    assert filter_.matches(event({"n": True}))
    assert not filter_.matches(event({"n": False}))
    assert filter_.errors == 0
    assert not filter_.matches(event({"n": 1}))
    assert filter_.errors == 1


def test_a_payload_is_decoded_once_for_all_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def payload(given: Event) -> Any:
        decoded.append(1)
        return msgspec.json.decode(given.payload_json)

    monkeypatch.setattr(Event, "payload", property(payload))
    view = View(event({"n": 1}))
    assert [compile_filter({"payload": {"n": n}}).matches(view) for n in range(5)] == [False, True, False, False, False]
    assert decoded == [1]
    untouched = View(event({"n": 1}))
    assert compile_filter({"expr": "topic == 'a.b'"}).matches(untouched)
    assert decoded == [1]


def test_explanations() -> None:
    spec = {
        "metadata": {"repo.name": "r"},
        "payload": {"a": {"b": 1, "c": [1, 2]}, "gone": None},
        "expr": "payload.a.b ==\n 1 && payload.x > 1 && payload.a.b > 'z' && payload.a.b.c == 1 && !(1 == 1)",
    }
    filter_ = compile_filter(spec)
    found = filter_.explain(event({"a": {"b": 1, "c": 3}}, {"repo": {"name": "other"}}))
    assert not found.matches
    assert [(reason.part, reason.wanted, reason.holds, reason.found) for reason in found.reasons] == [
        ("metadata", 'repo.name: "r"', False, '"other"'),
        ("payload", "a.b: 1", True, "1"),
        ("payload", "a.c: [1,2]", False, "3"),
        ("payload", "gone: null", False, "missing"),
        ("expr", "payload.a.b == 1", True, "true"),
        ("expr", "payload.x > 1", False, "error: there is no field 'x'"),
        ("expr", "payload.a.b > 'z'", False, "error: > cannot compare values of types int and string"),
        ("expr", "payload.a.b.c == 1", False, "error: a field is asked of a value that has none"),
        ("expr", "!(1 == 1)", False, "false"),
    ]
    assert filter_.errors == 0
    assert compile_filter({}).explain(event()).matches
    (only,) = compile_filter({"payload": {"a": 1}}).explain(event([1])).reasons
    assert (only.wanted, only.holds, only.found) == ("payload is an object", False, "[1]")


@pytest.mark.parametrize(("expected", "actual", "wanted"), TABLE)
def test_an_explanation_agrees_with_the_match(expected: Any, actual: Any, wanted: bool) -> None:
    found = compile_filter({"payload": {"v": expected}}).explain(event({"v": actual}))
    assert found.matches is wanted
    assert all(reason.holds for reason in found.reasons) is wanted
