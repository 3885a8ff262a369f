"""The strict parser against a table of traps, and against a reference made of the standard library's parser."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections import OrderedDict, UserDict
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postbus import strict_json
from postbus.model import Invalid, InvalidPayload, LimitExceeded
from postbus.strict_json import BYTES_MAX, DEPTH_MAX, encode, parse, validate

# --- what is accepted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"null", None),
        (b"true", True),
        (b" \t\r\n1 \n", 1),
        (b"-0", 0),
        (b"1e2", 100.0),
        (b"1E+2", 100.0),
        (b"1e-400", 0.0),
        (b"123456789012345678901234567890", 123456789012345678901234567890),
        (b"-18446744073709551616", -18446744073709551616),
        (b"1" * 4300, int("1" * 4300)),
        (b"1.7976931348623157e308", sys.float_info.max),
        (b'""', ""),
        (b'"\x7f"', "\x7f"),
        (b'"\\u0000"', "\0"),
        (b'"\\/\\b\\f\\n\\r\\t\\"\\\\"', '/\b\f\n\r\t"\\'),
        (b'"\\ud83d\\ude00"', "😀"),
        (b'"\\\\ud800"', "\\ud800"),
        ('"é😀\u2028"'.encode(), "é😀\u2028"),
        (b"[]", []),
        (b"{}", {}),
        (b'{"":1,"a":{"a":[{"a":1}]},"A":2}', {"": 1, "a": {"a": [{"a": 1}]}, "A": 2}),
        (b'{ "a" : [ 1 , 2 ] , "b" : 1.50 }', {"a": [1, 2], "b": 1.5}),
        (b'{"\\u00e9":1,"e":2}', {"é": 1, "e": 2}),
        (b'{":":":","\\"":"\\":"}', {":": ":", '"': '":'}),
        (b"[" * 64 + b"]" * 64, None),
        (b"[" + b"[]," * 1000 + b"[]]", [[]] * 1001),
        (b'"' + b"[" * 1000 + b'"', "[" * 1000),
    ],
)
def test_good_json_is_accepted(raw: bytes, expected: object) -> None:
    value = parse(raw)
    validate(raw)
    if not raw.startswith(b"[[[["):
        assert value == expected
        assert type(value) is type(expected)
    assert reference(raw)


def test_negative_zero_keeps_its_sign_as_a_double_only() -> None:
    assert math.copysign(1, parse(b"-0.0")) == -1
    assert parse(b"-0") == 0


@pytest.mark.parametrize("raw", [bytearray(b"[1]"), memoryview(b"[1]"), memoryview(b"x]x1x[")[::-2]])
def test_other_bytes_like_objects_are_taken(raw: Any) -> None:
    assert parse(raw) == [1]


@pytest.mark.parametrize("raw", ["[1]", None, 1, [1]])
def test_anything_but_bytes_is_refused(raw: Any) -> None:
    with pytest.raises(Invalid, match="must be given as bytes"):
        parse(raw)


# --- what is refused, and where ---------------------------------------------------------------------------------------

TRAPS: list[tuple[str, list[tuple[bytes, int]]]] = [
    ("a value but has the end", [(b"", 0), (b"  ", 2), (b"[", 1), (b"[1,", 3), (b'{"a":', 5)]),
    ("a value but has something else", [(b"nan", 0), (b"tru", 0), (b"True", 0), (b"undefined", 0), (b"'a'", 0)]),
    ("a value but has something else", [(b"\xc2\xa01", 0), (b"\x0c1", 0), (b"+1", 0), (b".5", 0), (b"]", 0)]),
    ("a value but has something else", [(b"[1,]", 3), (b"[,1]", 1), (b'{"a":}', 5), (b"[}", 1)]),
    ("',' or ']'", [(b"[1", 2), (b"[1 2]", 3), (b"[1}", 2), (b'["a":1]', 4)]),
    ("',' or '}'", [(b'{"a":1 "b":2}', 7), (b'{"a":1]', 6), (b'{"a":1', 6)]),
    ("a key in double quotes", [(b"{", 1), (b"{a:1}", 1), (b"{1:1}", 1), (b'{"a":1,}', 7), (b"{]", 1)]),
    ("':'", [(b'{"a" 1}', 5), (b'{"a"}', 4), (b'{"a"', 4)]),
    ("no NaN and no Infinity", [(b"NaN", 0), (b"[1,NaN]", 3), (b"Infinity", 0), (b'{"a":-Infinity}', 5)]),
    ("byte order mark", [(b"\xef\xbb\xbf1", 0), (b"\xef\xbb\xbf", 0)]),
    ("after its end", [(b"1\x00", 1), (b"1 2", 2), (b"{} {}", 3), (b"1 \x0b", 2), (b"[1]//c", 3), (b"0x1", 1)]),
    ("after its end", [(b"1_0", 1), (b"nullnull", 4), (b'""x', 2)]),
    ("malformed number", [(b"01", 0), (b"[-]", 1), (b"1.", 0), (b"1e", 0), (b"1.e5", 0), (b"--1", 0), (b"-01", 0)]),
    ("beyond the range of a double", [(b"1e400", 0), (b"[0,-1e400]", 3), (b"1" * 400 + b".0", 0)]),
    ("more than 4300 characters", [(b"1" * 4301, 0), (b"[-" + b"1" * 4300, 1)]),
    ("not valid UTF-8", [(b"\xff\xfe1\x00", 0), (b'"\xff"', 1), (b'{"a\xff":1}', 3), (b'"\xc0\x80"', 1)]),
    ("not valid UTF-8", [(b'"\xed\xa0\x80"', 1), (b'"a\xf0\x9f\x98"', 2), (b'"\xf4\x90\x80\x80"', 1)]),
    ("lone surrogate", [(b'[1,"\\ud800"]', 4), (b'"\\udc00"', 1), (b'"\\ud800\\u0041"', 1), (b'"\\ud800\\n"', 1)]),
    ("lone surrogate", [(b'"\\ud83d\\ude00\\uDBFF"', 13), (b'"\\ud800\\ud800\\udc00"', 1), (b'{"\\ud800":1}', 2)]),
    ("lone surrogate", [(b'"\\ud800x\\udc00"', 1), (b'"\\\\\\udfff"', 3)]),
    ("control character 0x0a", [(b'["ab\n"]', 4), (b'"\n', 1)]),
    ("control character 0x1f", [(b'"\x1f"', 1), (b'{"\x1f":1}', 2)]),
    ("escape", [(b'"\\x"', 1), (b'"a\\u12g4"', 2), (b'"\\u12"', 1), (b'"\\', 1), (b'{"\\a":1}', 2)]),
    ("ends inside the string that starts at byte 0", [(b'"abc', 4), (b'"', 1), (b'"\\"', 3)]),
    ("duplicate key", [(b'{"a":1,"a":2}', 7), (b'{"a":1, "b": 2, "a":2}', 16), (b'{"":1,"":2}', 6)]),
    ("duplicate key", [(b'{"a":1,"\\u0061":2}', 7), (b'{"\\u0061":1,"a":2}', 12)]),
    ("duplicate key", [('{"é":1,"\\u00e9":2}'.encode(), 8), (b'[{"a":{"b":[1],"b":2}}]', 15)]),
    ("duplicate key", [(b'{"a":[{}],"a":[{}]}', 10), (b'{"a":{"x":1},"b":1,"c":2,"a":3}', 25)]),
    ("duplicate key", [(b'{"a":1,"a":' + b"[" * 100_000, 7)]),
    ("nested deeper than 64", [(b"[" * 65 + b"]" * 65, 64), (b'{"a":' * 65 + b"1" + b"}" * 65, 320)]),
    ("nested deeper than 64", [(b"[" * 64 + b"1,[],1" + b"]" * 64, 66), (b"[" * 500 + b"]" * 500, 64)]),
    ("nested deeper than 64", [(b"[" * 500_000, 64), (b'[{"a":' * 100_000, 192)]),
]
TRAP_ROWS = [(raw, position, sentence) for sentence, rows in TRAPS for raw, position in rows]


@pytest.mark.parametrize(("raw", "position", "sentence"), TRAP_ROWS, ids=[repr(raw[:24]) for raw, _, _ in TRAP_ROWS])
def test_a_trap_is_refused_with_its_byte_position(raw: bytes, position: int, sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=sentence) as refusal:
        parse(raw)
    assert refusal.value.position == position
    assert refusal.value.message.endswith(f"at byte {position}")
    with pytest.raises(InvalidPayload):
        validate(raw)


def test_the_first_of_two_faults_is_named() -> None:
    for raw, position in [(b'["\xff",]', 2), (b'[,"\xff"]', 1), (b'{"a":1,"a":NaN}', 7), (b'{"a":NaN,"a":1}', 5)]:
        with pytest.raises(InvalidPayload) as refusal:
            parse(raw)
        assert refusal.value.position == position


def test_the_size_limit_is_checked_first_and_named() -> None:
    at_limit = b'"' + b"x" * (BYTES_MAX - 2) + b'"'
    assert len(parse(at_limit)) == BYTES_MAX - 2
    with pytest.raises(LimitExceeded, match="1048577 bytes; the limit is 1048576"):
        parse(at_limit + b" ")
    with pytest.raises(LimitExceeded, match="the limit is 10"):
        validate(b"x" * 11, max_bytes=10)
    validate(b'"xxxxxxxx"', max_bytes=10)


@pytest.mark.parametrize("depth", [0, 1, 3, 64, 200])
def test_the_depth_limit_can_be_set(depth: int) -> None:
    for opener, closer in [(b"[", b"]"), (b'{"a":', b"}")]:
        validate(opener * depth + b"1" + closer * depth, max_depth=depth)
        with pytest.raises(InvalidPayload, match=f"deeper than {depth} at byte {len(opener) * depth}"):
            validate(opener * (depth + 1) + b"1" + closer * (depth + 1), max_depth=depth)


@pytest.mark.parametrize(
    "raw",
    [
        b"{" + b",".join(b'"%d":1' % number for number in range(90_000)) + b',"5":1}',
        b"{" + b",".join(b'"%d":%b' % (number, b"[1]" if number % 2 else b"1") for number in range(60_000)) + b"x",
        b"[" + b"[[1]]," * 150_000 + b"x",
        b'["' + b"\\u00e9" * 150_000,
    ],
    ids=["duplicate at the end", "mixed members", "nested", "escapes"],
)
def test_finding_the_place_takes_linear_time(raw: bytes) -> None:
    started = time.perf_counter()
    with pytest.raises(InvalidPayload) as refusal:
        parse(raw)
    assert refusal.value.position is not None
    assert refusal.value.position > len(raw) - 10
    assert time.perf_counter() - started < 20  # a second at worst; quadratic time would be hours


def test_a_caller_with_no_stack_left_gets_a_refusal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(_: bytes) -> None:
        raise RecursionError

    monkeypatch.setattr(strict_json, "_decode", decode)
    with pytest.raises(InvalidPayload, match="cannot be decoded") as refusal:
        parse(b"[1]")
    assert refusal.value.position is None


# --- against the reference --------------------------------------------------------------------------------------------


class _RefusedError(Exception):
    pass


def unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in members}) < len(members):
        raise _RefusedError
    return dict(members)


def no_constant(_: str) -> None:
    raise _RefusedError


def finite(text: str) -> float:
    if math.isinf(float(text)):
        raise _RefusedError
    return float(text)


def integer(text: str) -> int:
    if len(text) > 4300:
        raise _RefusedError
    return int(text)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


def reference(raw: bytes) -> list[Any] | None:
    """Parse strictly with the standard library: the value in a list, or None when it is refused."""
    try:
        value = json.loads(
            raw.decode("utf-8", "strict"),
            object_pairs_hook=unique,
            parse_constant=no_constant,
            parse_float=finite,
            parse_int=integer,
        )
        json.dumps(value, ensure_ascii=False).encode("utf-8", "strict")
    except (_RefusedError, ValueError, RecursionError):
        return None
    return [value] if depth_of(value) <= DEPTH_MAX else None


json_st = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), inner, max_size=5)
    ),
    max_leaves=20,
)


def identical(one: Any, two: Any) -> bool:
    """Say whether two values are equal with their types, and floats with their sign."""
    return type(one) is type(two) and repr(one) == repr(two)


@settings(deadline=None)
@given(value=json_st)
def test_any_value_round_trips_in_every_spelling(value: Any) -> None:
    raw = encode(value)
    assert identical(parse(raw), value)
    for spelling in (
        json.dumps(value),
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, indent=1, ensure_ascii=False),
        json.dumps(value, separators=(",", ":")),
    ):
        assert identical(parse(spelling.encode()), value)


SYNTAX = [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"0", b"-", b".", b"e", b"//", b"tru", b"null", b"NaN"]
TEXT = [b"\\ud800", b"\\udc00", b"\\u0061", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xc3\xa9", b"\0", b"\n", b" "]
TRICKS = [b'"a":1,', b',"a":1', b"[" * 65, b"1" * 4301, b"1e999", b"-Infinity", b"\x0b"]
interesting_st = st.sampled_from([*SYNTAX, *TEXT, *TRICKS])


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    value = draw(json_st | st.dictionaries(st.sampled_from(["a", "b", "é"]), json_st, max_size=3))
    raw = bytearray(
        json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1]))).encode()
    )
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(raw)))
        match draw(st.integers(0, 3)):
            case 0:
                raw[at:at] = draw(interesting_st)
            case 1:
                raw[at : at + draw(st.integers(1, 4))] = b""
            case 2:
                raw[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case _:
                raw[at:at] = raw[at : at + draw(st.integers(1, 12))]
    return bytes(raw)


@settings(deadline=None, max_examples=600)
@given(raw=mutated() | st.binary(max_size=40))
def test_mutations_are_accepted_and_refused_as_by_the_reference(raw: bytes) -> None:
    expected = reference(raw)
    if expected is not None:
        assert identical(parse(raw), expected[0])
        return
    with pytest.raises(InvalidPayload) as refusal:
        parse(raw)
    assert refusal.value.position is not None
    assert 0 <= refusal.value.position <= len(raw)


# --- encoding ---------------------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = "red"
    BROKEN = math.nan


class Name(StrEnum):
    ANN = "ann"


class Size(IntEnum):
    BIG = 3


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


class Real(float):
    pass


class Pair(NamedTuple):
    one: int
    two: Any


class Record(msgspec.Struct):
    number: Any
    other: Any = msgspec.UNSET


@dataclasses.dataclass
class Data:
    number: Any


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": [1, 2.5, "x", True, None]}, b'{"a":[1,2.5,"x",true,null]}'),
        ("null", b'"null"'),
        (10**30, b"1" + b"0" * 30),
        ((1, (2,)), b"[1,[2]]"),
        (Pair(1, "x"), b'[1,"x"]'),
        (Record(1), b'{"number":1}'),
        (Record({"a": Data(None)}), b'{"number":{"a":{"number":null}}}'),
        (Data([Colour.RED, Name.ANN, Size.BIG]), b'{"number":["red","ann",3]}'),
        (OrderedDict(b=1, a=2), b'{"b":1,"a":2}'),
        (MappingProxyType({"a": UserDict(b=1)}), b'{"a":{"b":1}}'),
        ({Name.ANN: 1, Text("b"): Text("c")}, b'{"ann":1,"b":"c"}'),
        ([Whole(3), Real(0.5)], b"[3,0.5]"),
        (UUID(int=1), b'"00000000-0000-0000-0000-000000000001"'),
        ({"at": datetime(2026, 1, 2, tzinfo=UTC)}, b'{"at":"2026-01-02T00:00:00Z"}'),
        ([Decimal("1.50"), b"ab"], b'["1.50","YWI="]'),
        ({"raw": msgspec.Raw(b'{"kept": 1.0}')}, b'{"raw":{"kept": 1.0}}'),
    ],
)
def test_what_has_a_json_form_is_encoded(value: Any, expected: bytes) -> None:
    assert encode(value) == expected
    validate(encode(value))


class AttrsLike:
    """What msgspec and the walk see of an attrs class."""

    __attrs_attrs__ = (SimpleNamespace(name="number"),)

    def __init__(self, number: Any) -> None:
        self.number = number


class Unreadable(UserDict[str, int]):
    def keys(self) -> Any:
        raise ValueError("the far side is gone")


def cyclic_list() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def cyclic_dict() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["a"] = {"b": value}
    return value


def cyclic_record() -> Record:
    value = Record(1)
    value.other = [value]
    return value


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


NO_JSON: list[tuple[str, list[Any]]] = [
    (r"the number nan is not JSON \(at \$\)", [math.nan, Colour.BROKEN, Real("nan")]),
    (r"the number inf is not JSON \(at \$\.a\[1\]\)", [{"a": [0, math.inf]}]),
    (r"the number -inf is not JSON \(at \$\.number\)", [Record(-math.inf), Data(-math.inf), AttrsLike(-math.inf)]),
    (r"the number nan is not JSON \(at \$\.number\.x\[1\]\)", [Data({"x": Pair(1, math.nan)})]),
    (r"the string '\\ud800' holds a lone surrogate \(at \$\)", ["\ud800", Text("\ud800")]),
    (r"lone surrogate \(at \$\.a\[1\]\)", [{"a": ["ok", "x\udfff"]}]),
    (r"the key '\\ud800' holds a lone surrogate \(at \$\)", [{"\ud800": 1}]),
    (r"the key 1 is not a string \(at \$\)", [{1: 2}, {1: 1, "1": 2}, MappingProxyType({1: 2})]),
    (r"the key 1.5 is not a string \(at \$\.a\)", [{"a": {1.5: 2}}]),
    (r"the key .* is not a string \(at \$\)", [{True: 1}, {None: 1}, {b"a": 1}, {Colour.RED: 1}, {Size.BIG: 1}]),
    (r"the key \(1, 2\) is not a string \(at \$\.number\)", [Record({(1, 2): 3})]),
    (r"a set has no stable order \(at \$\.number\)", [{"number": {1, 2}}, Record(frozenset())]),
    (r"the type \w+ has no JSON form \(at \$\)", [object(), SimpleNamespace(a=1), range(3), 1j, Record, Data]),
    (r"the type UnsetType has no JSON form \(at \$\)", [msgspec.UNSET]),
    (r"the type function has no JSON form \(at \$\.a\[0\]\)", [{"a": [lambda: 1]}]),
    (r"longer than 4300 digits \(at \$\[0\]\)", [[10**5000]]),
    (r"more than 4300 characters at byte 1", [[-(10**4299)]]),
    (r"nested deeper than 64, or holds itself", [cyclic_list(), cyclic_dict(), cyclic_record()]),
    (r"nested deeper than 64, or holds itself", [nested(65), nested(500), nested(50_000), Record(nested(64))]),
    (r"cannot be encoded as JSON: the far side is gone", [[Unreadable(a=1)]]),
    (r"at byte 0", [msgspec.Raw(b"nonsense"), msgspec.Raw(b"")]),
    (r"duplicate key at byte 8", [[msgspec.Raw(b'{"a":1,"a":2}')]]),
    (r"nested deeper than 64 at byte 64", [[msgspec.Raw(b"[" * 64 + b"]" * 64)]]),
]


@pytest.mark.parametrize(("value", "sentence"), [(value, row[0]) for row in NO_JSON for value in row[1]])
def test_what_has_no_json_form_is_refused_with_its_place(value: Any, sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=sentence) as refusal:
        encode(value)
    assert len(refusal.value.message) < 300


def test_encoding_at_the_limits() -> None:
    assert encode(nested(64)) == b"[" * 64 + b"1" + b"]" * 64
    assert encode([nested(63)] * 100)
    assert encode(Record(nested(63)))
    assert len(encode("x" * (BYTES_MAX - 2))) == BYTES_MAX
    with pytest.raises(LimitExceeded, match="1048577 bytes; the limit is 1048576"):
        encode("x" * (BYTES_MAX - 1))
    assert encode([1], max_bytes=3, max_depth=1) == b"[1]"
    with pytest.raises(LimitExceeded, match="the limit is 2"):
        encode([1], max_bytes=2)
    with pytest.raises(InvalidPayload, match="deeper than 0"):
        encode([1], max_depth=0)


odd_st = st.recursive(
    st.none()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from([*Colour, *Name, *Size, Text("x"), Real("inf"), object(), msgspec.Raw(b'{"a":1,"a":2}')])
    | st.frozensets(st.integers(), max_size=2),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.builds(Record, inner)
        | st.builds(Data, inner)
        | st.dictionaries(st.one_of(st.text(max_size=3), st.integers(), st.sampled_from(list(Size))), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(value=odd_st)
def test_odd_values_are_refused_or_become_strict_json(value: Any) -> None:
    try:
        raw = encode(value)
    except InvalidPayload:
        return
    assert reference(raw) is not None
