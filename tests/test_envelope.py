"""The publish edge: every field at its limit and one beyond, every refusal with its sentence."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from enum import StrEnum
from types import MappingProxyType
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.envelope import Limits, check_labels, check_source, draft, parse_instant
from postbus.model import DeliveryHandle, Draft, Invalid, InvalidPayload, LimitExceeded, Trust, instant


def make(payload: Any = None, **fields: Any) -> Draft:
    return draft("orders.created", "shop", payload, **fields)


class Word(StrEnum):
    TOPIC = "orders.created"
    KEY = "k"


# --- the whole --------------------------------------------------------------------------------------------------------


def test_the_common_case_fills_in_only_what_was_given() -> None:
    assert draft("orders.created", "shop", {"id": 1}) == Draft(
        topic="orders.created", source="shop", payload_json=b'{"id":1}'
    )


def test_every_field_is_carried() -> None:
    made = draft(
        "orders.created",
        "github:owner/repo",
        {"id": 1},
        variant="v2",
        key="customer-1",
        metadata={"region": "eu"},
        headers={"trace": "1"},
        correlation_id="c-1",
        native_id="n-1",
        delivery_handle=DeliveryHandle("chat", {"room": 7}),
        occurred_at="1970-01-01T00:00:01Z",
        trust=Trust.UNTRUSTED,
        system_headers={"postbus.hops": "1"},
    )
    assert made == Draft(
        topic="orders.created",
        source="github:owner/repo",
        payload_json=b'{"id":1}',
        variant="v2",
        key="customer-1",
        metadata_json=b'{"region":"eu"}',
        headers_json=b'{"trace":"1","postbus.hops":"1"}',
        correlation_id="c-1",
        native_id="n-1",
        delivery_handle_json=b'{"kind":"chat","target":{"room":7}}',
        occurred_at_us=1_000_000,
        trust=Trust.UNTRUSTED,
    )


def test_strings_come_out_plain() -> None:
    made = draft(Word.TOPIC, Word.KEY, 1, key=Word.KEY, variant=Word.KEY, headers={Word.KEY: Word.KEY})
    assert {type(made.topic), type(made.source), type(made.key), type(made.variant)} == {str}


def test_a_bad_topic_is_refused() -> None:
    with pytest.raises(Invalid, match="has a wildcard"):
        draft("orders.*", "shop", 1)


# --- source -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["a", "github:owner/repo", "user@host", "feed:rss+atom#x~1", "A_b-c.9", "x" * 200])
def test_a_good_source_is_returned(source: str) -> None:
    assert check_source(source) == source


@pytest.mark.parametrize(
    ("source", "error", "sentence"),
    [
        ("", Invalid, "source is empty"),
        ("a b", Invalid, "may only hold the characters"),
        ("a\n", Invalid, "may only hold the characters"),
        ("é", Invalid, "may only hold the characters"),
        ("a\0", Invalid, "may only hold the characters"),
        ("\ud800", Invalid, "may only hold the characters"),
        ("x" * 201, LimitExceeded, "201 characters; the limit is 200"),
        (None, Invalid, "source must be a string, not NoneType"),
        (7, Invalid, "source must be a string, not int"),
        (["a"], Invalid, "source must be a string, not list"),
    ],
)
def test_a_bad_source_is_refused(source: Any, error: type[Invalid], sentence: str) -> None:
    with pytest.raises(Invalid, match=re.escape(sentence)) as refusal:
        draft("a", source, 1)
    assert type(refusal.value) is error


# --- payload ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Order:
    number: int


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b'{ "kept" : 1.50 }', b'{ "kept" : 1.50 }'),
        (bytearray(b"[1, 2]"), b"[1, 2]"),
        (memoryview(b"xx[1]")[2:], b"[1]"),
        ("text", b'"text"'),
        (None, b"null"),
        ([1, {"a": None}], b'[1,{"a":null}]'),
        (Order(7), b'{"number":7}'),
        (MappingProxyType({"a": 1}), b'{"a":1}'),
    ],
)
def test_bytes_are_kept_and_values_encoded(payload: Any, expected: bytes) -> None:
    made = make(payload)
    assert made.payload_json == expected
    assert type(made.payload_json) is bytes


@pytest.mark.parametrize(
    ("payload", "position", "sentence"),
    [
        (b'{"a":1,"a":2}', 7, "payload: JSON has a duplicate key at byte 7"),
        (bytearray(b"[1"), 2, "payload: JSON should have ',' or ']' but has the end at byte 2"),
        (b"", 0, "payload: "),
        ({"a": float("nan")}, None, "payload: the number nan is not JSON"),
        ({1: 2}, None, "payload: the key 1 is not a string"),
    ],
)
def test_a_bad_payload_is_refused_with_its_position(payload: Any, position: int | None, sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=re.escape(sentence)) as refusal:
        make(payload)
    assert refusal.value.position == position


def test_payload_limits() -> None:
    assert len(make("x" * (2**20 - 2)).payload_json) == 2**20
    assert len(make(b'"' + b"x" * (2**20 - 2) + b'"').payload_json) == 2**20
    for payload in ("x" * (2**20 - 1), b'"' + b"x" * (2**20 - 1) + b'"'):
        with pytest.raises(LimitExceeded, match="payload: JSON has 1048577 bytes; the limit is 1048576"):
            make(payload)
    with pytest.raises(LimitExceeded, match="the limit is 3"):
        make([10], limits=Limits(payload_bytes=3))
    assert len(make(b"[" * 64 + b"]" * 64).payload_json) == 128
    with pytest.raises(InvalidPayload, match="nested deeper than 64 at byte 64"):
        make(b"[" * 65 + b"]" * 65)
    with pytest.raises(InvalidPayload, match="nested deeper than 1"):
        make([[1]], limits=Limits(depth=1))


# --- text fields ------------------------------------------------------------------------------------------------------

BYTE_FIELDS = [("key", 256), ("correlation_id", 200), ("native_id", 512)]


@pytest.mark.parametrize(("field", "limit"), BYTE_FIELDS)
def test_text_fields_are_limited_in_bytes(field: str, limit: int) -> None:
    for text in ("x" * limit, "é" * (limit // 2), "a b\n\t😀"):
        assert getattr(make(**{field: text}), field) == text
    for text in ("x" * (limit + 1), "é" * (limit // 2) + "x"):
        with pytest.raises(LimitExceeded, match=f"{field} has {limit + 1} bytes; the limit is {limit}"):
            make(**{field: text})
    with pytest.raises(LimitExceeded, match="the limit is 2"):
        make(**{field: "abc", "limits": Limits(**{f"{field}_bytes": 2})})


@pytest.mark.parametrize(("field", "limit"), BYTE_FIELDS)
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("", "is empty"),
        ("a\0", "holds a NUL character"),
        ("\ud800", "holds a lone surrogate"),
        (b"a", "must be a string, not bytes"),
        (7, "must be a string, not int"),
        (False, "must be a string, not bool"),
    ],
)
def test_bad_text_fields_are_refused(field: str, limit: int, value: Any, sentence: str) -> None:
    assert limit
    with pytest.raises(Invalid, match=f"{field}.*{sentence}"):
        make(**{field: value})


def test_variant_is_limited_in_characters_and_may_be_empty() -> None:
    assert make(variant="").variant == ""
    assert make(variant="é" * 120).variant == "é" * 120
    with pytest.raises(LimitExceeded, match="variant has 121 characters; the limit is 120"):
        make(variant="x" * 121)
    bad: list[Any] = ["a\0", "\udfff", None, 0, b""]
    for value in bad:
        with pytest.raises(Invalid, match="variant"):
            make(variant=value)


def test_trust_is_one_of_two_words() -> None:
    assert make(trust="untrusted").trust is Trust.UNTRUSTED
    bad: list[Any] = ["", "Trusted", None, True, [], "x" * 500]
    for value in bad:
        with pytest.raises(Invalid, match="trust must be 'trusted' or 'untrusted'"):
            make(trust=value)


# --- metadata and delivery handle -------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["metadata", "delivery_handle"])
def test_json_objects_are_kept_or_encoded(field: str) -> None:
    assert getattr(make(**{field: {"a": [1]}}), f"{field}_json") == b'{"a":[1]}'
    assert getattr(make(**{field: b' {"a": 1}'}), f"{field}_json") == b' {"a": 1}'
    assert getattr(make(**{field: None}), f"{field}_json") is None
    assert len(getattr(make(**{field: {"a": "x" * (2**16 - 8)}}), f"{field}_json")) == 2**16
    with pytest.raises(LimitExceeded, match=f"{field}: JSON has 65537 bytes; the limit is 65536"):
        make(**{field: {"a": "x" * (2**16 - 7)}})


@pytest.mark.parametrize("field", ["metadata", "delivery_handle"])
@pytest.mark.parametrize("value", [[], "x", 1, False, b"[{}]", b"null", b' "{"'])
def test_anything_but_an_object_is_refused(field: str, value: Any) -> None:
    with pytest.raises(Invalid, match=f"{field} must be a JSON object"):
        make(**{field: value})


@pytest.mark.parametrize("field", ["metadata", "delivery_handle"])
def test_bad_json_is_refused_under_the_name_of_its_field(field: str) -> None:
    with pytest.raises(InvalidPayload, match=f"{field}: JSON has a duplicate key at byte 7") as refusal:
        make(**{field: b'{"a":1,"a":2}'})
    assert refusal.value.position == 7
    with pytest.raises(InvalidPayload, match=rf"{field}: the number inf is not JSON \(at \$\.a\)"):
        make(**{field: {"a": float("inf")}})


@pytest.mark.parametrize("value", [{}, b"{}", b" { } "])
def test_empty_metadata_is_none_and_an_empty_handle_is_kept(value: Any) -> None:
    assert make(metadata=value).metadata_json is None
    assert make(delivery_handle=value).delivery_handle_json is not None


# --- headers and labels -----------------------------------------------------------------------------------------------

MapCheck = Callable[[Any], dict[str, str]]


def headers_of(headers: Any) -> dict[str, str]:
    raw = make(headers=headers).headers_json
    found: dict[str, str] = msgspec.json.decode(raw) if raw else {}
    return found


both = pytest.mark.parametrize(
    ("check", "what", "count"), [(headers_of, "header", 20), (check_labels, "label", 32)], ids=["headers", "labels"]
)


@both
def test_headers_and_labels_at_their_limits(check: MapCheck, what: str, count: int) -> None:
    full = {f"k{number}": "v" for number in range(count)}
    assert check(full) == full
    with pytest.raises(LimitExceeded, match=f"there are {count + 1} {what}s; the limit is {count}"):
        check({**full, "more": "v"})
    large = {"é" * 128: "é" * 2048, "empty": "", "lines": "a\nb\t😀"}
    assert check(large) == large
    assert check(MappingProxyType(large)) == large
    with pytest.raises(LimitExceeded, match=f"{what} key has 257 bytes; the limit is 256"):
        check({"é" * 128 + "x": ""})
    with pytest.raises(LimitExceeded, match=f"{what} 'a' has a value of 4097 bytes; the limit is 4096"):
        check({"a": "é" * 2048 + "x"})


@both
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"": "v"}, "key is empty"),
        ({1: "v"}, "key must be a string, not int"),
        ({"a": 1}, "'a' must be a string, not int"),
        ({"a": None}, "'a' must be a string, not NoneType"),
        ({"a": b"v"}, "'a' must be a string, not bytes"),
        ({"a\0": "v"}, "NUL"),
        ({"a": "\0"}, "NUL"),
        ({"a\n": "v"}, "control character"),
        ({"a\r\nb": "v"}, "control character"),
        ({"a\x7f": "v"}, "control character"),
        ({"\ud800": "v"}, "lone surrogate"),
        ({"a": "\udfff"}, "lone surrogate"),
        ([("a", "b")], "must be a mapping of strings to strings, not list"),
        ("a", "must be a mapping of strings to strings, not str"),
        (7, "must be a mapping of strings to strings, not int"),
    ],
)
def test_bad_headers_and_labels_are_refused(check: MapCheck, what: str, count: int, value: Any, sentence: str) -> None:
    assert count
    with pytest.raises(Invalid, match=f"{what}.*{sentence}"):
        check(value)


@both
@pytest.mark.parametrize(
    "name",
    [
        "postbus.x",
        "postbus.",
        "POSTBUS.dlq.reason",
        "  postbus.x",
        "\u00a0\u2003postbus.x",
        "\uff50\uff4f\uff53\uff54\uff42\uff55\uff53\uff0ex",
        "po\u017ftbus.x",
        "postbus\u2024x",
        "\u200bpostbus.x",
        "post\u00adbus.x",
        "ⓟostbus.x",
    ],
)
def test_the_reserved_prefix_is_refused_in_every_disguise(check: MapCheck, what: str, count: int, name: str) -> None:
    assert count
    with pytest.raises(Invalid, match=f"{what} .* begins with the reserved prefix postbus\\."):
        check({"a": "b", name: "v"})


@both
@pytest.mark.parametrize("name", ["postbus", "postbusx.y", "x.postbus.y", "postbüs.x", "postbus-x", " a "])
def test_names_near_the_reserved_prefix_are_taken(check: MapCheck, what: str, count: int, name: str) -> None:
    assert what
    assert count
    assert check({name: "v"}) == {name: "v"}


def test_no_headers_are_none() -> None:
    assert make(headers={}).headers_json is None
    assert make(headers={}, system_headers={}).headers_json is None
    assert check_labels({}) == {}


def test_limits_of_headers_and_labels_can_be_set() -> None:
    tight = Limits(headers=1, labels=1, header_key_bytes=2, header_value_bytes=3)
    assert check_labels({"ab": "abc"}, limits=tight) == {"ab": "abc"}
    for bad in ({"a": "", "b": ""}, {"abc": ""}, {"a": "abcd"}):
        with pytest.raises(LimitExceeded):
            check_labels(bad, limits=tight)
        with pytest.raises(LimitExceeded):
            make(headers=bad, limits=tight)


def system(given: Mapping[str, Any], /, **fields: Any) -> dict[str, str]:
    found: dict[str, str] = msgspec.json.decode(make(system_headers=given, **fields).headers_json or b"{}")
    return found


def test_system_headers_may_use_the_prefix_do_not_count_and_win() -> None:
    full = {f"k{number}": "v" for number in range(20)}
    found = system({"postbus.dlq.reason": "rejected", "k0": "theirs"}, headers=full)
    assert found == {**full, "postbus.dlq.reason": "rejected", "k0": "theirs"}


def test_system_header_values_are_made_to_fit() -> None:
    found = system({"postbus.dlq.error": "é" * 3000 + "x", "a": "x\ud800y\0z", "b": "x" * 4096})
    assert found == {"postbus.dlq.error": "é" * 2048, "a": "x?y\ufffdz", "b": "x" * 4096}
    assert system({"a": "xé"}, limits=Limits(header_value_bytes=2)) == {"a": "x"}


@pytest.mark.parametrize("headers", [{"": "v"}, {"a\n": "v"}, {"x" * 257: "v"}, {1: "v"}, {"a": 1}])
def test_system_headers_with_bad_names_or_types_are_refused(headers: Any) -> None:
    with pytest.raises(Invalid, match="system header"):
        system(headers)


# --- instants ---------------------------------------------------------------------------------------------------------

BASE = 1_767_268_800_000_000  # 2026-01-01T12:00:00Z


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-01T12:00:00Z", BASE),
        ("2026-01-01t12:00:00z", BASE),
        ("2026-01-01 12:00:00Z", BASE),
        ("2026-01-01T12:00:00+00:00", BASE),
        ("2026-01-01T12:00:00-00:00", BASE),
        ("2026-01-01T14:00:00+02:00", BASE),
        ("2026-01-01T06:30:00-05:30", BASE),
        ("2026-01-02T11:59:00+23:59", BASE),
        ("2026-01-01T12:00:00.1Z", BASE + 100_000),
        ("2026-01-01T12:00:00.123456Z", BASE + 123_456),
        ("2026-01-01T12:00:00.123456789Z", BASE + 123_456),
        ("2026-01-01T12:00:00.999999999Z", BASE + 999_999),
        ("1970-01-01T00:00:00Z", 0),
        ("1969-12-31T23:59:59.999999Z", -1),
        ("0001-01-01T00:00:00Z", -62_135_596_800_000_000),
        ("9999-12-31T23:59:59.999999Z", 253_402_300_799_999_999),
        ("2024-02-29T00:00:00Z", 1_709_164_800_000_000),
        ("2016-12-31T23:59:60Z", 1_483_228_800_000_000),
        ("2016-12-31T23:59:60.5Z", 1_483_228_800_500_000),
        ("2017-01-01T00:59:60+01:00", 1_483_228_800_000_000),
        ("2015-06-30T16:59:60-07:00", 1_435_708_800_000_000),
    ],
)
def test_rfc_3339_text_is_an_instant(text: str, expected: int) -> None:
    assert parse_instant(text) == expected
    assert make(occurred_at=text).occurred_at_us == expected


NO_INSTANT: list[tuple[str, list[Any]]] = [
    ("is not an instant", ["", "now", "1767268800", "x" * 100_000, "2026-01-01", "2026-01-01T12:00Z"]),
    ("is not an instant", ["2026-01-01T12:00:00.Z", "2026-01-01T12:00:00,5Z", "2026-01-01T12:00:00.1234567890Z"]),
    ("is not an instant", ["2026-01-01T12:00:00Z\n", " 2026-01-01T12:00:00Z", "12026-01-01T12:00:00Z"]),
    ("is not an instant", ["2026-01-01T12:00:00+0200", "2026-01-01T12:00:00+02", "٢٠٢٦-01-01T12:00:00Z"]),
    ("is not an instant", ["20260101T120000Z", "2026-W01-1T12:00:00Z", "0000-01-01T12:00:00Z"]),
    ("is not an instant: month must be in 1..12", ["2026-13-01T12:00:00Z"]),
    ("is not an instant: day is out of range", ["2025-02-29T12:00:00Z", "2026-01-32T12:00:00Z"]),
    ("is not an instant: hour", ["2026-01-01T24:00:00Z"]),
    ("is not an instant: minute", ["2026-01-01T12:60:00Z"]),
    ("is not an instant: second", ["2026-01-01T12:00:61Z"]),
    ("has no zone", ["2026-01-01T12:00:00", "2026-01-01 12:00:00.5"]),
    ("the datetime has no zone", [datetime(2026, 1, 1)]),  # noqa: DTZ001 - a naive one is the point
    ("offset beyond 23:59", ["2026-01-01T12:00:00+24:00", "2026-01-01T12:00:00+01:60"]),
    ("no leap second can be there", ["2026-01-01T12:00:60Z", "2016-12-30T23:59:60Z", "2016-12-31T23:59:60+01:00"]),
    ("outside the years 1 to 9999", ["0001-01-01T00:00:00+00:01", "9999-12-31T23:59:59-00:01"]),
    ("outside the years 1 to 9999", ["9999-12-31T23:59:60Z", "9999-12-31T23:59:60-01:00"]),
    ("outside the years 1 to 9999", [datetime.min.replace(tzinfo=timezone(timedelta(hours=1)))]),
    ("outside the years 1 to 9999", [datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))]),
    ("cannot be of type date", [date(2026, 1, 1)]),
    ("cannot be of type int", [1_767_268_800]),
    ("cannot be of type float", [1_767_268_800.5]),
    ("cannot be of type bool", [True]),
    ("cannot be of type bytes", [b"2026-01-01T12:00:00Z"]),
]


@pytest.mark.parametrize(("value", "sentence"), [(value, row[0]) for row in NO_INSTANT for value in row[1]])
def test_what_is_no_instant_is_refused(value: Any, sentence: str) -> None:
    with pytest.raises(Invalid, match=re.escape(sentence)) as refusal:
        parse_instant(value)
    assert len(refusal.value.message) < 200
    with pytest.raises(Invalid, match=re.escape(sentence)):
        make(occurred_at=value)


def test_none_is_no_instant_but_may_be_left_out() -> None:
    nothing: Any = None
    with pytest.raises(Invalid, match="cannot be of type NoneType"):
        parse_instant(nothing)
    assert make(occurred_at=None).occurred_at_us is None


class Nowhere(tzinfo):
    def utcoffset(self, _: datetime | None) -> None:
        return None

    def dst(self, _: datetime | None) -> None:
        return None

    def tzname(self, _: datetime | None) -> str:
        return "nowhere"


def test_a_zone_that_gives_no_offset_is_no_zone() -> None:
    with pytest.raises(Invalid, match="the datetime has no zone"):
        parse_instant(datetime(2026, 1, 1, tzinfo=Nowhere()))


def test_both_sides_of_a_clock_change_are_told_apart() -> None:
    zone = ZoneInfo("Europe/Amsterdam")
    first = datetime(2026, 10, 25, 2, 30, tzinfo=zone)
    assert parse_instant(first.replace(fold=1)) - parse_instant(first) == 3_600_000_000


@given(
    moment=st.datetimes(
        min_value=datetime(1, 1, 2),  # noqa: DTZ001 - hypothesis wants naive bounds
        max_value=datetime(9999, 12, 30),  # noqa: DTZ001
        timezones=st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes))),
    )
)
def test_datetimes_and_their_text_are_the_same_instant(moment: datetime) -> None:
    found = parse_instant(moment)
    assert instant(found) == moment
    assert parse_instant(moment.isoformat()) == found
    assert parse_instant(moment.astimezone(UTC).isoformat().replace("+00:00", "Z")) == found
