"""The one strict JSON parser and encoder.

What is accepted is exactly RFC 8259 JSON in UTF-8, without what the RFC leaves open and readers disagree about: no byte
order mark, no duplicate keys (compared after unescaping), no lone surrogates, nesting up to a limit, integers exact and
of up to 4300 characters, other numbers within the range of a double (``1e400`` is refused; ``1e-400`` is zero).

The hot path is msgspec's C code: a document that msgspec decodes and encodes back to the same bytes cannot hold a
duplicate key, the one fault of these that msgspec lets pass. Only a document that is known to be wrong is scanned in
Python, to say where.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Final, NoReturn

import msgspec

from postbus.model import Invalid, InvalidPayload, LimitExceeded

__all__ = ["BYTES_MAX", "DEPTH_MAX", "INTEGER_CHARS_MAX", "encode", "parse", "validate"]

BYTES_MAX: Final = 1 << 20
DEPTH_MAX: Final = 64
INTEGER_CHARS_MAX: Final = 4300  # msgspec's own limit; the sign counts


def parse(raw: bytes, *, max_bytes: int = BYTES_MAX, max_depth: int = DEPTH_MAX) -> Any:
    """Return the value of a JSON document, or refuse it with the byte position of the first thing wrong with it.

    Larger than ``max_bytes``: ``LimitExceeded``, before anything is read. A scalar has depth 0, ``[]`` depth 1.
    """
    if type(raw) is not bytes:
        raw = _as_bytes(raw)
    if len(raw) > max_bytes:
        raise LimitExceeded(f"JSON has {len(raw)} bytes; the limit is {max_bytes}")
    try:
        value = _decode(raw)
        if (again := _encode(value)) != raw and _has_duplicate_keys(raw, again):
            _refuse(raw, max_depth)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        _refuse(raw, max_depth)
    if raw.count(b"[") + raw.count(b"{") > max_depth and _is_deeper(value, max_depth):
        _refuse(raw, max_depth)
    return value


def validate(raw: bytes, *, max_bytes: int = BYTES_MAX, max_depth: int = DEPTH_MAX) -> None:
    """Refuse what ``parse`` refuses, and return nothing."""
    parse(raw, max_bytes=max_bytes, max_depth=max_depth)


def encode(value: Any, *, max_bytes: int = BYTES_MAX, max_depth: int = DEPTH_MAX) -> bytes:
    """Return a value as compact JSON that ``parse`` accepts, or refuse it and say where in the value the fault is.

    Taken: dict and other mappings with string keys, list, tuple, str, int, float, bool, None, msgspec Structs,
    dataclasses, attrs classes, enums by value, ``msgspec.Raw``, and as strings: bytes (base64), datetime, date, time,
    timedelta, UUID, Decimal. Refused: NaN and Infinity, lone surrogates, keys that are not strings, sets (their order
    is not stable, so the same fact would not have the same bytes), any other type, values that hold themselves.
    """
    try:
        raw = _encode(value)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        _check_value(value, max_depth)
        raise InvalidPayload(f"the value cannot be encoded as JSON: {error}") from None
    if len(raw) > max_bytes:
        raise LimitExceeded(f"JSON has {len(raw)} bytes; the limit is {max_bytes}")
    # What msgspec changes silently (NaN to null, keys to strings, sets to lists) does not come back equal.
    try:
        decoded = _decode(raw)
        plain = decoded == value
    except (msgspec.MsgspecError, ValueError, RecursionError):
        plain = False
    if not plain:
        _check_value(value, max_depth)
        parse(raw, max_bytes=max_bytes, max_depth=max_depth)
    elif raw.count(b"[") + raw.count(b"{") > max_depth and _is_deeper(decoded, max_depth):
        _check_value(value, max_depth)
    return raw


# --- the fast checks --------------------------------------------------------------------------------------------------


def _as_builtin(value: object) -> object:
    """Give msgspec the builtin of what it does not take itself: mappings, subclasses of str, int and float."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise TypeError(f"type {type(value).__name__} is not supported")


_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder(enc_hook=_as_builtin).encode


def _as_bytes(raw: object) -> bytes:
    if isinstance(raw, bytes | bytearray | memoryview):
        return bytes(raw)
    raise Invalid(f"JSON must be given as bytes, not {type(raw).__name__}", hint="encode text as UTF-8 first")


def _is_deeper(value: Any, max_depth: int) -> bool:
    """Say whether decoded JSON is nested deeper than that; level by level, so that nothing recurses."""
    level: list[Any] = [value]
    for _ in range(max_depth + 1):
        level = [item for item in level if type(item) is dict or type(item) is list]
        if not level:
            return False
        level = [child for item in level for child in (item.values() if type(item) is dict else item)]
    return True


class _DuplicateKeyError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1 and len(dict(pairs)) != len(pairs):
        raise _DuplicateKeyError


_scan_pairs = json.JSONDecoder(object_pairs_hook=_unique, parse_float=len, parse_int=len).decode


def _has_duplicate_keys(raw: bytes, again: bytes) -> bool:
    """Say whether well-formed JSON has a duplicate key; ``again`` is what its decoded value encodes to."""
    if msgspec.json.format(raw, indent=-1) == again:  # it only had spaces
        return False
    try:
        _scan_pairs(raw.decode())
    except _DuplicateKeyError:
        return True
    return False


# --- where a value is wrong -------------------------------------------------------------------------------------------

_Path = tuple["_Path", str | int] | None

_CONTAINERS = (dict, list, tuple, set, frozenset, msgspec.Struct, Mapping)
_SHOWN_CHARS = 40
_PLACE_CHARS = 120


def _check_value(value: Any, max_depth: int) -> None:
    """Refuse a value that msgspec would change silently or cannot encode, naming the place; walks without recursion."""
    stack: list[tuple[Any, int, _Path]] = [(value, 0, None)]
    while stack:
        item, depth, path = stack.pop()
        if isinstance(item, Enum):
            item = item.value
        if isinstance(item, str):
            _check_text(item, "string", path)
        elif isinstance(item, float):
            if not math.isfinite(item):
                _refuse_value(f"the number {item} is not JSON", path, hint="use null or leave the field out")
        elif not _is_container(item):
            _check_leaf(item, path)
        elif depth == max_depth:
            _refuse_value(f"the value is nested deeper than {max_depth}, or holds itself", path)
        else:
            stack.extend([(child, depth + 1, (path, step)) for step, child in _children(item, path)])


def _is_container(item: Any) -> bool:
    if item is None or isinstance(item, int):
        return False
    if isinstance(item, _CONTAINERS):
        return True
    return hasattr(type(item), "__dataclass_fields__") or hasattr(type(item), "__attrs_attrs__")


def _children(item: Any, path: _Path) -> Iterator[tuple[str | int, Any]]:
    if isinstance(item, Mapping):
        for key, child in item.items():
            if not isinstance(key, str):
                _refuse_value(f"the key {_shown(key)} is not a string", path, hint="JSON keys are strings")
            _check_text(key, "key", path)
            yield key, child
    elif isinstance(item, list | tuple):
        yield from enumerate(item)
    elif isinstance(item, set | frozenset):
        _refuse_value("a set has no stable order", path, hint="use a sorted list")
    else:
        for name in _field_names(item):
            child = getattr(item, name, msgspec.UNSET)
            if child is not msgspec.UNSET:
                yield name, child


def _field_names(item: Any) -> Iterator[str]:
    if isinstance(item, msgspec.Struct):
        yield from item.__struct_fields__
    elif dataclasses.is_dataclass(item):
        yield from (field.name for field in dataclasses.fields(item))
    else:
        yield from (attribute.name for attribute in item.__attrs_attrs__)


def _check_leaf(item: Any, path: _Path) -> None:
    try:
        _encode(item)
    except TypeError:
        _refuse_value(f"the type {type(item).__name__} has no JSON form", path)
    except ValueError:
        _refuse_value(f"the integer is longer than {INTEGER_CHARS_MAX} digits", path)


def _check_text(text: str, what: str, path: _Path) -> None:
    if text.isascii():
        return
    try:
        str.encode(text)
    except UnicodeEncodeError:
        _refuse_value(f"the {what} {_shown(text)} holds a lone surrogate", path, hint="it cannot be written as UTF-8")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def _refuse_value(sentence: str, path: _Path, *, hint: str | None = None) -> NoReturn:
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(f"[{step}]" if isinstance(step, int) else f".{step[:_SHOWN_CHARS]}")
    place = "$" + "".join(reversed(steps))
    if len(place) > _PLACE_CHARS:
        place = place[:_PLACE_CHARS] + "…"
    raise InvalidPayload(f"{sentence} (at {place})", hint=hint) from None


# --- where bytes are wrong --------------------------------------------------------------------------------------------


def _refuse(raw: bytes, max_depth: int) -> NoReturn:
    """Refuse bytes that are known to be wrong, naming the first wrong byte."""
    fault = _Scanner(raw, max_depth).fault()
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        if fault is None or error.start <= fault.position:
            fault = _Fault(error.start, "JSON is not valid UTF-8")
    if fault is None:
        raise InvalidPayload("JSON cannot be decoded") from None
    raise InvalidPayload(f"{fault.sentence} at byte {fault.position}", position=fault.position) from None


class _Fault(Exception):
    """What is wrong with a document, and where; raised and caught inside the scanner only."""

    def __init__(self, position: int, sentence: str) -> None:
        super().__init__(position, sentence)
        self.position = position
        self.sentence = sentence


_INTEGER = rb"-?(?:0|[1-9][0-9]*+)"
_GAP = rb"[ \t\n\r]*+"
_SPACE = re.compile(_GAP)
_NUMBER_RUN = re.compile(rb"[-+.0-9eE]++")
_NUMBER = re.compile(_INTEGER + rb"(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?")
_WHOLE = re.compile(_INTEGER)
_NOT_FINITE = re.compile(rb"-?(?:NaN|Infinity)")
_WORD = re.compile(rb"true|false|null")
_STRING_BODY = re.compile(rb'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_ESCAPE = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)")
_HIGH_SURROGATES = range(0xD800, 0xDC00)
_LOW_SURROGATES = range(0xDC00, 0xE000)
# Elements and members in which nothing can be wrong but a key given twice, read at the speed of C.
_PLAIN_STRING = rb'"[^"\\\x00-\x1f]*+"'
_PLAIN = rb"(?:-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,17})?|true|false|null|\[\]|\{\}|" + _PLAIN_STRING + rb")"
_MEMBER = rb"(" + _PLAIN_STRING + rb")" + _GAP + rb":" + _GAP + _PLAIN + _GAP + rb"," + _GAP
_PLAIN_ELEMENTS = re.compile(rb"(?:" + _PLAIN + _GAP + rb"," + _GAP + rb")++")
_PLAIN_MEMBERS = re.compile(rb"(?:" + _MEMBER + rb")++")
_PLAIN_MEMBER = re.compile(_MEMBER)


class _Scanner:
    """Reads a document byte by byte to find the first fault: slow, exact, without recursion.

    Positions: a wrong token where it starts, an escape at its backslash, a duplicate key at its second opening quote,
    an unfinished document at its end.
    """

    def __init__(self, raw: bytes, max_depth: int) -> None:
        self.raw = raw
        self.max_depth = max_depth
        self.at = 0
        # One entry per open container: the keys seen so far of an object, None for an array.
        self.open: list[set[bytes] | None] = []
        self.just_opened = False

    def fault(self) -> _Fault | None:
        """Return the first fault, or None when there is none (bytes that are not UTF-8 are not looked for)."""
        try:
            if self.raw.startswith(b"\xef\xbb\xbf"):
                raise _Fault(0, "JSON starts with a byte order mark")  # noqa: TRY301 - one way out for every fault
            self._value()
            while self.open:
                self._next()
            self._skip_space()
            if self.at < len(self.raw):
                raise _Fault(self.at, "JSON has text after its end")  # noqa: TRY301
        except _Fault as fault:
            return fault
        return None

    def _skip_space(self) -> bytes:
        """Move to the next byte that is no space and return it; empty at the end."""
        byte = self.raw[self.at : self.at + 1]
        if byte.isspace() and (space := _SPACE.match(self.raw, self.at)):
            self.at = space.end()
            byte = self.raw[self.at : self.at + 1]
        return byte

    def _next(self) -> None:
        """Read one step inside the innermost container: its end, or a separator with what follows it."""
        keys = self.open[-1]
        byte = self._skip_space()
        if byte == (b"]" if keys is None else b"}"):
            self.at += 1
            self.open.pop()
            self.just_opened = False
            return
        if not self.just_opened:
            if byte != b",":
                self._unexpected("',' or ']'" if keys is None else "',' or '}'")
            self.at += 1
        self.just_opened = False
        self._element(keys)

    def _element(self, keys: set[bytes] | None) -> None:
        """Read a value of an array, or a key and a value of an object."""
        self._skip_space()
        if len(self.open) < self.max_depth:  # otherwise even an empty container is too deep
            self._skip_plain(keys)
        if keys is not None:
            if self._skip_space() != b'"':
                self._unexpected("a key in double quotes")
            self._key(keys)
            if self._skip_space() != b":":
                self._unexpected("':'")
            self.at += 1
        self._value()

    def _skip_plain(self, keys: set[bytes] | None) -> None:
        """Move past a run of elements or members, if any, in which nothing can be wrong but a key given twice."""
        run = (_PLAIN_ELEMENTS if keys is None else _PLAIN_MEMBERS).match(self.raw, self.at)
        if run is None:
            return
        if keys is not None:
            for member in _PLAIN_MEMBER.finditer(self.raw, self.at, run.end()):
                self._add_key(member[1], member.start(1), keys)
        self.at = run.end()

    def _value(self) -> None:
        byte = self._skip_space()
        if byte in {b"[", b"{"}:
            if len(self.open) == self.max_depth:
                raise _Fault(self.at, f"JSON is nested deeper than {self.max_depth}")
            self.at += 1
            self.open.append(set() if byte == b"{" else None)
            self.just_opened = True
        elif byte == b'"':
            self._string()
        elif word := _WORD.match(self.raw, self.at):
            self.at = word.end()
        elif _NOT_FINITE.match(self.raw, self.at):
            raise _Fault(self.at, "JSON has no NaN and no Infinity, but there is one")
        elif byte == b"-" or byte.isdigit():
            self._number()
        else:
            self._unexpected("a value")

    def _key(self, keys: set[bytes]) -> None:
        start = self.at
        key = self._string()
        if b"\\" in key:  # bytes that are not UTF-8 stay as they are: they are reported before any later key
            key = b'"%b"' % json.loads(key.decode(errors="surrogateescape")).encode(errors="surrogatepass")
        self._add_key(key, start, keys)

    @staticmethod
    def _add_key(key: bytes, start: int, keys: set[bytes]) -> None:
        if key in keys:
            raise _Fault(start, "JSON has a duplicate key")
        keys.add(key)

    def _string(self) -> bytes:
        """Read a string and return it as it is written, quotes included."""
        start = self.at
        body = _STRING_BODY.match(self.raw, start)
        end = body.end() if body else start + 1
        stop = self.raw[end : end + 1]
        if stop == b"":
            raise _Fault(end, f"JSON ends inside the string that starts at byte {start}, cut off")
        if stop == b"\\":
            raise _Fault(end, "JSON has an escape that does not exist or is cut off")
        if stop != b'"':
            raise _Fault(end, f"JSON has the control character 0x{stop.hex()} in a string; write it as an escape")
        self.at = end + 1
        written = self.raw[start : self.at]
        if b"\\u" in written:
            self._check_surrogates(start, written)
        return written

    @staticmethod
    def _check_surrogates(start: int, written: bytes) -> None:
        """Refuse half of a surrogate pair; the pair's halves must follow each other, high before low."""
        high: re.Match[bytes] | None = None
        for escape in _ESCAPE.finditer(written):
            code = int(escape[1], 16) if escape[1] else 0
            paired = high is not None and high.end() == escape.start() and code in _LOW_SURROGATES
            if high is not None and not paired:
                break
            if code in _LOW_SURROGATES and not paired:
                high = escape
                break
            high = escape if code in _HIGH_SURROGATES else None
        if high is not None:
            raise _Fault(start + high.start(), "JSON has a lone surrogate")

    def _number(self) -> None:
        start = self.at
        run = _NUMBER_RUN.match(self.raw, start)
        text = run[0] if run else b""
        self.at += len(text)
        if not _NUMBER.fullmatch(text):
            raise _Fault(start, "JSON has a malformed number")
        if _WHOLE.fullmatch(text):
            if len(text) > INTEGER_CHARS_MAX:
                raise _Fault(start, f"JSON has an integer of more than {INTEGER_CHARS_MAX} characters")
        elif not math.isfinite(float(text)):
            raise _Fault(start, "JSON has a number beyond the range of a double")

    def _unexpected(self, wanted: str) -> NoReturn:
        found = "something else" if self.at < len(self.raw) else "the end"
        raise _Fault(self.at, f"JSON should have {wanted} but has {found}")
