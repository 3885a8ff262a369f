"""Topic grammar, matching and the trie, against tables and against a matcher simple enough to be obviously right."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postbus import topics
from postbus.model import Invalid, LimitExceeded
from postbus.topics import PatternTrie, check_id, check_pattern, check_stream_name, check_topic, matches

T80 = "x" * 80
T81 = "x" * 81
C512 = ".".join(["x" * 80] * 6) + "." + "x" * 26
C513 = ".".join(["x" * 80] * 6) + "." + "x" * 27
N16 = ".".join(["a"] * 16)
N17 = ".".join(["a"] * 17)


class Named(StrEnum):
    CREATED = "orders.created"


# --- the grammar ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", ["a", "a.b", "A.b-c.d_e.0", T80, C512, N16, "-", "_", "plugin.inbound.whatsapp"])
def test_a_good_topic_is_returned_and_is_also_a_pattern(topic: str) -> None:
    assert len(C512) == 512
    assert check_topic(topic) == topic
    assert check_pattern(topic) == topic


@pytest.mark.parametrize(
    ("topic", "error", "sentence"),
    [
        ("", Invalid, "topic is empty"),
        (".", Invalid, "empty token"),
        (".a", Invalid, "empty token"),
        ("a.", Invalid, "empty token"),
        ("a..b", Invalid, "empty token"),
        ("a.b\n", Invalid, "may only hold the characters A-Z a-z 0-9 _ -"),
        ("a\n", Invalid, "may only hold"),
        ("a b", Invalid, "may only hold"),
        ("a.é", Invalid, "may only hold"),
        ("a.٣", Invalid, "may only hold"),
        ("a.\ud800", Invalid, "may only hold"),
        ("a.\0", Invalid, "may only hold"),
        ("a/b", Invalid, "may only hold"),
        ("*", Invalid, "has a wildcard"),
        ("a.*", Invalid, "has a wildcard"),
        ("a.>", Invalid, "has a wildcard"),
        ("a.b*", Invalid, "has a wildcard"),
        (T81, LimitExceeded, "token of 81 characters; the limit is 80"),
        (C513, LimitExceeded, "513 characters; the limit is 512"),
        (N17, LimitExceeded, "17 tokens; the limit is 16"),
        ("a" * 10_000_000, LimitExceeded, "10000000 characters; the limit is 512"),
    ],
)
def test_a_bad_topic_is_refused_with_the_rule(topic: str, error: type[Invalid], sentence: str) -> None:
    with pytest.raises(Invalid, match=re.escape(sentence)) as refusal:
        check_topic(topic)
    assert type(refusal.value) is error
    assert len(refusal.value.message) < 250


@pytest.mark.parametrize(
    "pattern",
    ["*", ">", "a.*", "*.a", "*.*", "*.>", "a.>", "a.*.b.>", ".".join(["*"] * 16), ".".join(["*"] * 15) + ".>"],
)
def test_a_good_pattern_is_returned(pattern: str) -> None:
    assert check_pattern(pattern) == pattern


@pytest.mark.parametrize(
    ("pattern", "error", "sentence"),
    [
        ("", Invalid, "pattern is empty"),
        ("a..>", Invalid, "empty token"),
        (">.a", Invalid, "> before its end"),
        ("a.>.b", Invalid, "> before its end"),
        ("a.>.>", Invalid, "> before its end"),
        ("a.b*", Invalid, "wildcard inside the token"),
        ("a.*b", Invalid, "wildcard inside the token"),
        ("a.**", Invalid, "wildcard inside the token"),
        ("a.>>", Invalid, "wildcard inside the token"),
        ("a.>\n", Invalid, "wildcard inside the token"),
        ("a.*\n", Invalid, "wildcard inside the token"),
        (".".join(["*"] * 17), LimitExceeded, "17 tokens; the limit is 16"),
        (".".join(["*"] * 16) + ".>", LimitExceeded, "17 tokens; the limit is 16"),
        (T81 + ".*", LimitExceeded, "token of 81 characters"),
        (C513 + ".*", LimitExceeded, "the limit is 512"),
    ],
)
def test_a_bad_pattern_is_refused_with_the_rule(pattern: str, error: type[Invalid], sentence: str) -> None:
    with pytest.raises(Invalid, match=re.escape(sentence)) as refusal:
        check_pattern(pattern)
    assert type(refusal.value) is error
    with pytest.raises(error, match=re.escape(sentence)):
        PatternTrie[int]().add(pattern, 1)
    with pytest.raises(error, match=re.escape(sentence)):
        matches(pattern, "a")


@pytest.mark.parametrize("name", ["local.default.journal", f"{T80}.{T80}.{T80}", "n.t.orders-dlq"])
def test_a_good_stream_name_is_returned(name: str) -> None:
    assert check_stream_name(name) == name


@pytest.mark.parametrize(
    ("name", "error", "sentence"),
    [
        ("", Invalid, "exactly 3 tokens"),
        ("a.b", Invalid, "exactly 3 tokens"),
        ("a.b.c.d", Invalid, "exactly 3 tokens"),
        ("a..c", Invalid, "empty token"),
        ("a.b.c\n", Invalid, "may only hold"),
        ("a.b.*", Invalid, "may only hold"),
        ("a.b.>", Invalid, "may only hold"),
        (f"a.b.{T81}", LimitExceeded, "81 characters; the limit is 80"),
    ],
)
def test_a_bad_stream_name_is_refused(name: str, error: type[Invalid], sentence: str) -> None:
    with pytest.raises(Invalid, match=re.escape(sentence)) as refusal:
        check_stream_name(name)
    assert type(refusal.value) is error


@pytest.mark.parametrize("value", ["a", "A.b_c-9", "x" * 120])
def test_a_good_id_is_returned(value: str) -> None:
    assert check_id(value, "agent id") == value


@pytest.mark.parametrize(
    ("value", "error", "sentence"),
    [
        ("", Invalid, "agent id is empty"),
        ("a b", Invalid, "may only hold the characters"),
        ("a\n", Invalid, "may only hold the characters"),
        ("a/b", Invalid, "may only hold the characters"),
        ("é", Invalid, "may only hold the characters"),
        ("x" * 121, LimitExceeded, "121 characters; the limit is 120"),
    ],
)
def test_a_bad_id_is_refused_by_its_name(value: str, error: type[Invalid], sentence: str) -> None:
    with pytest.raises(Invalid, match=re.escape(sentence)) as refusal:
        check_id(value, "agent id")
    assert type(refusal.value) is error
    assert refusal.value.message.startswith("agent id")


@pytest.mark.parametrize("check", [check_topic, check_pattern, check_stream_name, lambda v: check_id(v, "agent id")])
@pytest.mark.parametrize("value", [None, 1, 1.5, True, b"a.b.c", ["a"], {"a": 1}, object])
def test_anything_but_a_string_is_refused(check: Callable[[Any], str], value: object) -> None:
    with pytest.raises(Invalid, match=f"must be a string, not {type(value).__name__}"):
        check(value)


def test_a_string_enum_comes_back_as_a_plain_string() -> None:
    topics._topic.cache_clear()
    assert type(check_topic(Named.CREATED)) is str
    assert type(check_topic("orders.created")) is str


def test_refusals_are_not_remembered() -> None:
    before = topics._topic.cache_info().currsize
    for number in range(100):
        with pytest.raises(Invalid):
            check_topic(f"bad topic {number}")
    assert topics._topic.cache_info().currsize == before


# --- matching ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "topic", "expected"),
    [
        ("a", "a", True),
        ("a", "A", False),
        ("a", "a.b", False),
        ("a.b", "a", False),
        ("a.*", "a", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a", False),
        ("a.>", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "ab.c", False),
        (">", "a", True),
        (">", "a.b", True),
        ("*", "a", True),
        ("*", "a.b", False),
        ("*.b", "a.b", True),
        ("*.b", "b.a", False),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.c", False),
        ("*.>", "a", False),
        ("*.>", "a.b", True),
        ("a.*.>", "a.b", False),
        ("a.*.>", "a.b.c", True),
    ],
)
def test_what_matches_what(pattern: str, topic: str, expected: bool) -> None:
    assert matches(pattern, topic) is expected
    assert reference(pattern, topic) is expected
    trie: PatternTrie[str] = PatternTrie()
    trie.add(pattern, "here")
    assert trie.match(topic) == (("here",) if expected else ())


def test_matches_refuses_a_bad_topic() -> None:
    with pytest.raises(Invalid, match="has a wildcard"):
        matches("a.>", "a.*")


def reference(pattern: str, topic: str) -> bool:
    def same(wanted: list[str], tokens: list[str]) -> bool:
        if not wanted or not tokens:
            return not wanted and not tokens
        if wanted[0] == ">":
            return True
        return wanted[0] in ("*", tokens[0]) and same(wanted[1:], tokens[1:])

    return same(pattern.split("."), topic.split("."))


token_st = st.sampled_from(["a", "b", "c", "A", "ab", "-"])
topic_st = st.lists(token_st, min_size=1, max_size=6).map(".".join)
pattern_st = st.builds(
    lambda head, last: ".".join([*head, last]),
    st.lists(st.one_of(token_st, st.just("*")), max_size=5),
    st.one_of(token_st, st.just("*"), st.just(">")),
)


@given(pattern=pattern_st, topic=topic_st)
def test_matches_agrees_with_the_reference(pattern: str, topic: str) -> None:
    assert matches(pattern, topic) is reference(pattern, topic)


Registrations = dict[tuple[str, int], int]


def expected_match(registered: Registrations, topic: str) -> tuple[int, ...]:
    ordered = sorted(registered.items(), key=lambda entry: entry[1])
    return tuple(dict.fromkeys(value for (pattern, value), _ in ordered if reference(pattern, topic)))


@settings(deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("add"), pattern_st, st.integers(0, 5)),
            st.tuples(st.just("remove"), pattern_st, st.integers(0, 5)),
            st.tuples(st.just("remove known"), st.just(""), st.integers(0, 100)),
            st.tuples(st.just("match"), topic_st, st.just(0)),
        ),
        max_size=60,
    ),
    probes=st.lists(topic_st, max_size=8),
)
def test_the_trie_agrees_with_a_dict_and_the_reference(steps: list[tuple[str, str, int]], probes: list[str]) -> None:
    trie: PatternTrie[int] = PatternTrie()
    registered: Registrations = {}
    for sequence, (step, name, value) in enumerate(steps):
        match step:
            case "add":
                assert trie.add(name, value) is ((name, value) not in registered)
                registered.setdefault((name, value), sequence)
            case "remove":
                assert trie.remove(name, value) is (registered.pop((name, value), None) is not None)
            case "remove known" if registered:
                known = list(registered)[value % len(registered)]
                del registered[known]
                assert trie.remove(*known)
            case _:
                assert trie.match(name) == expected_match(registered, name)
        assert len(trie) == len(registered)
    for topic in probes:
        assert trie.match(topic) == expected_match(registered, topic)
        assert trie.match(topic) is trie.match(topic)
    for known in list(registered):
        assert trie.remove(*known)
    assert not trie._exact
    assert trie._root.is_empty()


def test_order_is_that_of_adding_across_kinds_of_pattern() -> None:
    trie: PatternTrie[str] = PatternTrie()
    for pattern, value in [("a.>", "1"), ("a.b", "2"), ("*.b", "3"), (">", "4"), ("a.*", "5"), ("a.b", "6")]:
        trie.add(pattern, value)
    assert trie.match("a.b") == ("1", "2", "3", "4", "5", "6")
    trie.remove("a.b", "2")
    trie.add("a.b", "2")
    assert trie.match("a.b") == ("1", "3", "4", "5", "6", "2")


def test_a_value_under_two_matching_patterns_is_given_once_at_its_oldest_place() -> None:
    trie: PatternTrie[str] = PatternTrie()
    trie.add("a.*", "x")
    trie.add("a.b", "y")
    trie.add("a.b", "x")
    assert trie.match("a.b") == ("x", "y")
    assert trie.remove("a.*", "x")
    assert trie.match("a.b") == ("y", "x")
    assert not trie.remove("a.*", "x")


def test_adding_the_same_pair_again_changes_nothing() -> None:
    trie: PatternTrie[str] = PatternTrie()
    assert trie.add("a.>", "x")
    kept = trie.match("a.b")
    assert not trie.add("a.>", "x")
    assert trie.match("a.b") is kept
    assert len(trie) == 1


def test_the_cache_is_bounded_in_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PatternTrie, "CACHED_TOPICS_MAX", 10)
    trie: PatternTrie[int] = PatternTrie()
    trie.add("t.*", 1)
    for number in range(1000):
        assert trie.match(f"t.{number}") == (1,)
        assert len(trie._hot) + len(trie._warm) <= 22
    hot = trie.match("t.999")
    for number in range(15):
        trie.match(f"u.{number}")
        assert trie.match("t.999") is hot


def test_the_cache_is_bounded_in_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PatternTrie, "CACHED_VALUES_MAX", 100)
    trie: PatternTrie[int] = PatternTrie()
    for value in range(60):
        trie.add(">", value)
    for number in range(50):
        assert len(trie.match(f"t.{number}")) == 60
        assert len(trie._hot) + len(trie._warm) <= 6


def test_a_change_in_another_thread_is_never_hidden_by_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PatternTrie, "CACHED_TOPICS_MAX", 4)
    trie: PatternTrie[int] = PatternTrie()
    stop = threading.Event()

    def read() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            trie.match(f"t.{number % 20}")

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for value in range(500):
            trie.add(("t.*", "t.1", ">", "*.1")[value % 4], value)
            assert value in trie.match("t.1")
            assert trie.remove(("t.*", "t.1", ">", "*.1")[value % 4], value)
            assert value not in trie.match("t.1")
    finally:
        stop.set()
        for reader in readers:
            reader.join()
