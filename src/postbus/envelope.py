"""The publish edge: every field of an event is checked here, once, and becomes a Draft.

Nothing behind this door checks again. What is refused is refused with the sentence that fixes it, before anything is
written. Text is any Unicode without NUL and without lone surrogates; sizes are counted in bytes of UTF-8.
"""

from __future__ import annotations

import re
import unicodedata
from calendar import monthrange
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, NoReturn

import msgspec

from postbus import strict_json
from postbus.model import Draft, Invalid, InvalidPayload, LimitExceeded, Trust, instant
from postbus.topics import check_topic

__all__ = ["RESERVED_PREFIX", "SOURCE_CHARS_MAX", "Limits", "check_labels", "check_source", "draft", "parse_instant"]

RESERVED_PREFIX: Final = "postbus."
SOURCE_CHARS_MAX: Final = 200


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How large each part of an event may be."""

    payload_bytes: int = strict_json.BYTES_MAX
    depth: int = strict_json.DEPTH_MAX
    headers: int = 20
    header_key_bytes: int = 256
    header_value_bytes: int = 4096
    labels: int = 32
    key_bytes: int = 256
    native_id_bytes: int = 512
    correlation_id_bytes: int = 200
    variant_chars: int = 120
    metadata_bytes: int = 64 * 1024
    delivery_handle_bytes: int = 64 * 1024


_DEFAULT_LIMITS = Limits()


def draft(
    topic: str,
    source: str,
    payload: Any,
    *,
    variant: str = "",
    key: str | None = None,
    metadata: Any = None,
    headers: Mapping[str, str] | None = None,
    correlation_id: str | None = None,
    native_id: str | None = None,
    delivery_handle: Any = None,
    occurred_at: datetime | str | None = None,
    trust: Trust = Trust.TRUSTED,
    system_headers: Mapping[str, str] | None = None,
    limits: Limits = _DEFAULT_LIMITS,
    checked: bool = False,
) -> Draft:
    """Check every field and return the event as a Draft, or refuse the first field that breaks a rule.

    ``payload``: bytes are JSON and are kept byte for byte; anything else is a value and is encoded. ``metadata`` and
    ``delivery_handle`` likewise, and must be JSON objects; empty metadata and empty headers are stored as none.
    ``key``, ``correlation_id`` and ``native_id`` are None or not empty. ``occurred_at``: see ``parse_instant``; None
    leaves it to the log, which takes now. ``system_headers`` are the server's own: they may use the reserved prefix, do
    not count towards the number of headers and win over ``headers``; their values are cut and cleaned to fit instead of
    refused, so that a dead letter can always be written. ``checked``: ``payload`` is a part of a document that
    ``strict_json`` has accepted, so that only its size and depth are looked at.
    """
    return Draft(
        topic=check_topic(topic),
        source=check_source(source),
        payload_json=(
            payload
            if checked and _is_small(payload, limits)
            else _json(payload, "payload", limits.payload_bytes, limits.depth)
        ),
        variant=variant if variant == "" and type(variant) is str else _variant(variant, limits.variant_chars),
        key=None if key is None else _text(key, "key", limits.key_bytes),
        metadata_json=None if metadata is None else _metadata(metadata, limits),
        headers_json=None if headers is None and system_headers is None else _headers(headers, system_headers, limits),
        correlation_id=(
            None if correlation_id is None else _text(correlation_id, "correlation_id", limits.correlation_id_bytes)
        ),
        native_id=None if native_id is None else _text(native_id, "native_id", limits.native_id_bytes),
        delivery_handle_json=(
            None
            if delivery_handle is None
            else _json_object(delivery_handle, "delivery_handle", limits.delivery_handle_bytes, limits.depth)
        ),
        occurred_at_us=None if occurred_at is None else parse_instant(occurred_at),
        trust=trust if type(trust) is Trust else _trust(trust),
    )


def check_labels(labels: Mapping[str, str], *, limits: Limits = _DEFAULT_LIMITS) -> dict[str, str]:
    """Return a copy of the labels, or refuse them by the rules of headers; only their number has its own limit."""
    return _string_map(labels, "label", limits.labels, limits)


# --- text -------------------------------------------------------------------------------------------------------------

_SOURCE = re.compile(f"[A-Za-z0-9._:/@+#~-]{{1,{SOURCE_CHARS_MAX}}}", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SHOWN_CHARS = 60


def check_source(source: str) -> str:
    """Return the source, or refuse it: 1 to 200 of ``A-Z a-z 0-9 . _ : / @ + # ~ -``, as in ``github:owner/repo``."""
    try:
        return _source(source)
    except TypeError:  # not hashable, so not a string
        _refuse_type("source", source, "a string")


@lru_cache(4096)
def _source(source: str) -> str:
    if not isinstance(source, str):
        _refuse_type("source", source, "a string")
    if not _SOURCE.fullmatch(source):
        if not source:
            raise Invalid("source is empty", hint="name what produced the event, for example github:owner/repo")
        if len(source) > SOURCE_CHARS_MAX:
            raise LimitExceeded(f"source has {len(source)} characters; the limit is {SOURCE_CHARS_MAX}")
        raise Invalid(f"source {_shown(source)} may only hold the characters A-Z a-z 0-9 . _ : / @ + # ~ -")
    return str.__str__(source)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…")


def _refuse_type(what: str, value: object, wanted: str) -> NoReturn:
    raise Invalid(f"{what} must be {wanted}, not {type(value).__name__}") from None


def _plain(value: str, what: str) -> tuple[str, int]:
    """Return text as a plain string with its size in bytes, or refuse what is no text that can be stored."""
    if not isinstance(value, str):
        _refuse_type(what, value, "a string")
    if "\0" in value:
        raise Invalid(f"{what} {_shown(value)} holds a NUL character")
    if value.isascii():
        return str.__str__(value), len(value)
    try:
        return str.__str__(value), len(str.encode(value))
    except UnicodeEncodeError:
        raise Invalid(f"{what} {_shown(value)} holds a lone surrogate", hint="it cannot be written as UTF-8") from None


def _text(value: str, what: str, max_bytes: int) -> str:
    text, size = _plain(value, what)
    if not size:
        raise Invalid(f"{what} is empty", hint="leave it out instead")
    if size > max_bytes:
        raise LimitExceeded(f"{what} has {size} bytes; the limit is {max_bytes}")
    return text


def _variant(value: str, max_chars: int) -> str:
    text, _ = _plain(value, "variant")
    if len(text) > max_chars:
        raise LimitExceeded(f"variant has {len(text)} characters; the limit is {max_chars}")
    return text


def _trust(value: Any) -> Trust:
    try:
        return Trust(value)
    except ValueError:
        wanted = " or ".join(repr(str(trust)) for trust in Trust)
        raise Invalid(f"trust must be {wanted}, not {_shown(str(value))}") from None


# --- JSON -------------------------------------------------------------------------------------------------------------

_BYTES_LIKE = (bytes, bytearray, memoryview)
_encode = msgspec.json.Encoder().encode


def _is_small(raw: Any, limits: Limits) -> bool:
    """Say whether strict JSON cannot be too large or too deep: it has not even that many brackets."""
    return type(raw) is bytes and len(raw) <= limits.payload_bytes and raw.count(b"[") + raw.count(b"{") <= limits.depth


def _json(value: Any, what: str, max_bytes: int, max_depth: int) -> bytes:
    """Return JSON bytes as they are, or any other value encoded; refusals begin with the field's name."""
    try:
        if not isinstance(value, _BYTES_LIKE):
            return strict_json.encode(value, max_bytes=max_bytes, max_depth=max_depth)
        raw = value if type(value) is bytes else bytes(value)
        strict_json.validate(raw, max_bytes=max_bytes, max_depth=max_depth)
    except InvalidPayload as error:
        raise InvalidPayload(f"{what}: {error.message}", position=error.position, hint=error.hint) from None
    except LimitExceeded as error:
        raise LimitExceeded(f"{what}: {error.message}") from None
    return raw


def _json_object(value: Any, what: str, max_bytes: int, max_depth: int) -> bytes:
    raw = _json(value, what, max_bytes, max_depth)
    if not raw.lstrip().startswith(b"{"):
        raise Invalid(f"{what} must be a JSON object", hint='as in {"name": "value"}')
    return raw


def _metadata(value: Any, limits: Limits) -> bytes | None:
    raw = _json_object(value, "metadata", limits.metadata_bytes, limits.depth)
    # Valid JSON that starts with a brace and holds no quote has no member.
    return raw if b'"' in raw else None


# --- headers and labels -----------------------------------------------------------------------------------------------


def _headers(
    headers: Mapping[str, str] | None, system_headers: Mapping[str, str] | None, limits: Limits
) -> bytes | None:
    merged = {} if headers is None else _string_map(headers, "header", limits.headers, limits)
    if system_headers is not None:
        for name, value in system_headers.items():
            checked = _name(name, "system header", limits)
            merged[checked] = _fitted(value, limits.header_value_bytes)
    return _encode(merged) if merged else None


def _string_map(values: Mapping[str, str], what: str, max_count: int, limits: Limits) -> dict[str, str]:
    if not isinstance(values, Mapping):
        _refuse_type(f"{what}s", values, "a mapping of strings to strings")
    if len(values) > max_count:
        raise LimitExceeded(f"there are {len(values)} {what}s; the limit is {max_count}")
    checked = {}
    for name, value in values.items():
        plain = _name(name, what, limits)
        if _is_reserved(plain):
            raise Invalid(
                f"{what} {_shown(plain)} begins with the reserved prefix {RESERVED_PREFIX}",
                hint="only the server writes those",
            )
        text, size = _plain(value, f"{what} {_shown(plain)}")
        if size > limits.header_value_bytes:
            raise LimitExceeded(
                f"{what} {_shown(plain)} has a value of {size} bytes; the limit is {limits.header_value_bytes}"
            )
        checked[plain] = text
    return checked


def _name(name: str, what: str, limits: Limits) -> str:
    text = _text(name, f"{what} key", limits.header_key_bytes)
    if _CONTROL.search(text):
        raise Invalid(f"{what} key {_shown(text)} holds a control character")
    return text


def _is_reserved(name: str) -> bool:
    """Say whether a name reads as one of the server's: after NFKC, casefold, and without spaces and invisible marks."""
    if not name.isascii():
        folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
        name = "".join(char for char in folded if unicodedata.category(char) != "Cf")
    return name.strip().casefold().startswith(RESERVED_PREFIX)


def _fitted(value: str, max_bytes: int) -> str:
    """Return text made storable: no NUL, no lone surrogates, cut to its limit at a whole character."""
    if not isinstance(value, str):
        _refuse_type("system header value", value, "a string")
    return value.replace("\0", "\ufffd").encode(errors="replace")[:max_bytes].decode(errors="ignore")


# --- instants ---------------------------------------------------------------------------------------------------------

_INSTANT = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:([Zz])|([+-])(\d\d):(\d\d))?", re.ASCII
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LEAP_SECOND = 60
_HOURS, _MINUTES = 24, 60
_FIRST_US, _LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999  # years 1 to 9999
_INSTANT_HINT = "give an aware datetime or RFC 3339 text such as 2026-01-31T12:00:00Z"


def parse_instant(value: datetime | str) -> int:
    """Return an instant as microseconds since 1970 (UTC), or refuse what does not name one instant of years 1 to 9999.

    Taken: a datetime with a zone, or RFC 3339 text with a zone: ``Z`` or an offset, upper or lower case letters, a
    space for the ``T``, up to nine digits of a second of which those beyond microseconds are dropped. A leap second
    (``:60``) is taken where one can be, at the end of a month in UTC, and is the second after it, as in POSIX time.
    """
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise Invalid("the datetime has no zone", hint="use datetime.now(UTC) or .replace(tzinfo=UTC)")
        return _in_range(_since_epoch_us(value), value)
    if not isinstance(value, str):
        raise Invalid(f"an instant cannot be of type {type(value).__name__}", hint=_INSTANT_HINT)
    found = _INSTANT.fullmatch(value)
    if found is None:
        raise Invalid(f"{_shown(value)} is not an instant", hint=_INSTANT_HINT)
    if found[8] is None and found[9] is None:
        raise Invalid(f"the instant {_shown(value)} has no zone", hint="end it with Z or an offset such as +02:00")
    return _in_range(_instant_us(found), value)


def _instant_us(found: re.Match[str]) -> int:
    year, month, day, hour, minute, second = (int(found[group]) for group in range(1, 7))
    leap = second == _LEAP_SECOND
    fraction_us = int((found[7] or "").ljust(6, "0")[:6])
    try:
        local = datetime(year, month, day, hour, minute, second - leap, tzinfo=UTC)
    except ValueError as error:
        raise Invalid(f"{_shown(found[0])} is not an instant: {error}", hint=_INSTANT_HINT) from None
    whole_us = _since_epoch_us(local)
    if found[9]:
        hours, minutes = int(found[10]), int(found[11])
        if hours >= _HOURS or minutes >= _MINUTES:
            raise Invalid(f"the instant {_shown(found[0])} has an offset beyond 23:59", hint=_INSTANT_HINT)
        offset_us = (hours * 3600 + minutes * 60) * 1_000_000
        whole_us += offset_us if found[9] == "-" else -offset_us
    if leap:
        last = instant(_in_range(whole_us, found[0]))
        if (last.hour, last.minute, last.day) != (23, 59, monthrange(last.year, last.month)[1]):
            raise Invalid(
                f"{_shown(found[0])} is not an instant: no leap second can be there",
                hint="leap seconds are at 23:59:60 UTC on the last day of a month",
            )
        whole_us += 1_000_000
    return whole_us + fraction_us


def _since_epoch_us(value: datetime) -> int:
    passed = value - _EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds


def _in_range(instant_us: int, given: datetime | str) -> int:
    if not _FIRST_US <= instant_us <= _LAST_US:
        raise Invalid(f"the instant {_shown(str(given))} is outside the years 1 to 9999 in UTC")
    return instant_us
