"""An event on its way through a remote log: its payload is the body, everything else is one header.

So other readers of the remote find the payload as it was published. The header is a JSON array in printable ASCII, for
remotes that take only that. What other writers put beside our events is read as an event too, so that offsets stay
dense.
"""

from __future__ import annotations

import re
from base64 import b64encode
from itertools import count
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from postbus import strict_json
from postbus.model import Draft, Event, Invalid, InvalidPayload, Trust
from postbus.topics import check_topic

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["HEADER", "Carried", "event_of", "foreign_event", "our_event", "our_events", "pack", "unpack"]

HEADER: Final = "postbus"
VERSION: Final = 1
HEADER_BYTES_MAX: Final = 32 * 1024  # JetStream refuses headers of 64 KiB; a larger one travels behind the payload
JSON_BYTES_MAX: Final = 64 << 20

_Instant = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_NONE = msgspec.Raw(b"null")
_NON_ASCII = re.compile(r"[^\x00-\x7e]")
_BEHIND = re.compile(rb"~([0-9]{1,12})")


class _Facts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    version: Literal[1]
    append_id: str
    created_at_us: _Instant
    topic: str
    source: str
    variant: str
    key: str | None
    correlation_id: str | None
    native_id: str | None
    occurred_at_us: _Instant | None
    trust: Literal["trusted", "untrusted"]
    metadata: msgspec.Raw = _NONE
    headers: msgspec.Raw = _NONE
    delivery_handle: msgspec.Raw = _NONE


class Carried(msgspec.Struct, frozen=True, gc=False):
    """One of our own events as it was sent: what was published, the id of the attempt, and when."""

    draft: Draft
    append_id: str
    created_at_us: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Facts).decode
# The same facts without the three last ones, which most events have not: a tuple is taken apart faster.
_decode_short = msgspec.json.Decoder(
    tuple[
        Literal[1], str, _Instant, str, str, str, str | None, str | None, str | None, _Instant | None,
        Literal["trusted", "untrusted"],
    ]
).decode  # fmt: skip
_scan = msgspec.json.Decoder(msgspec.Raw).decode
_NOT_OURS = (msgspec.MsgspecError, UnicodeDecodeError, Invalid)


def pack(draft: Draft, append_id: str, created_at_us: int) -> tuple[bytes, bytes]:
    """Return the value of the header, and the body."""
    facts: tuple[object, ...] = (
        VERSION, append_id, created_at_us, draft.topic, draft.source, draft.variant, draft.key, draft.correlation_id,
        draft.native_id, draft.occurred_at_us, draft.trust,
    )  # fmt: skip
    if draft.metadata_json or draft.headers_json or draft.delivery_handle_json:
        facts += (_written(draft.metadata_json), _written(draft.headers_json), _written(draft.delivery_handle_json))
    header = _encode(facts)
    if not header.isascii() or b"\x7f" in header:
        header = _NON_ASCII.sub(_escaped, header.decode()).encode("ascii")
    body = draft.payload_json
    if len(header) > HEADER_BYTES_MAX:
        return b"~%d" % len(body), body + header
    return header, body


def unpack(header: bytes | None, body: bytes) -> Carried | None:
    """Return what ``pack`` was given, or None for what no ``pack`` has made."""
    read = _read(header, body)
    if read is None:
        return None
    facts, payload = read
    made = Draft(
        topic=facts.topic,
        source=facts.source,
        payload_json=payload,
        variant=facts.variant,
        key=facts.key,
        metadata_json=_part(facts.metadata),
        headers_json=_part(facts.headers),
        correlation_id=facts.correlation_id,
        native_id=facts.native_id,
        delivery_handle_json=_part(facts.delivery_handle),
        occurred_at_us=facts.occurred_at_us,
        trust=facts.trust,
    )
    return Carried(made, facts.append_id, facts.created_at_us)


def event_of(
    stream: str, partition: int, offset: int, header: bytes | None, body: bytes, foreign: str, at_us: int
) -> Event:
    """Return the event at an address, whoever wrote it; see ``foreign_event``."""
    event = our_event(stream, partition, offset, header, body)
    return event or foreign_event(stream, partition, offset, body, foreign, at_us)


def our_events(
    stream: str, partition: int, first: int, headers: Iterable[bytes | None], bodies: Iterable[bytes]
) -> list[Event | None]:
    """Return the events of headers and bodies from an offset on; None in the place of what no ``pack`` has made.

    One long loop over local names, because every event that is read in bulk passes here.
    """
    made: list[Event | None] = []
    add, decode, scan = made.append, _decode_short, _scan
    topics: set[str] = set()
    for offset, header, body in zip(count(first), headers, bodies, strict=False):
        try:
            _, _, created, topic, source, variant, key, correlation, native, occurred, trust = decode(header or b"")
            scan(body)
            if topic not in topics:
                topics.add(check_topic(topic))
        except _NOT_OURS:
            add(our_event(stream, partition, offset, header, body))
        else:
            add(
                Event(
                    stream, partition, offset, topic, source, variant, key, body, None, None, correlation, native, None,
                    created if occurred is None else occurred, created, trust,
                )
            )  # fmt: skip
    return made


def our_event(stream: str, partition: int, offset: int, header: bytes | None, body: bytes) -> Event | None:
    """Return the event at an address, or None when no ``pack`` has made it."""
    read = _read(header, body)
    if read is None:
        return None
    facts, payload = read
    occurred = facts.occurred_at_us
    metadata, headers, handle = _part(facts.metadata), _part(facts.headers), _part(facts.delivery_handle)
    return Event(
        stream, partition, offset, facts.topic, facts.source, facts.variant, facts.key, payload, metadata, headers,
        facts.correlation_id, facts.native_id, handle, facts.created_at_us if occurred is None else occurred,
        facts.created_at_us, facts.trust,
    )  # fmt: skip


def foreign_event(stream: str, partition: int, offset: int, body: bytes, source: str, at_us: int) -> Event:
    """Return what is not ours as an event, so that offsets stay dense.

    It gets the stream's name as its topic, the remote's own time ``at_us``, and is not trusted; a body that is not JSON
    becomes a base64 string.
    """
    payload, metadata = _foreign(body)
    return Event(
        stream, partition, offset, stream, source, "", None, payload, metadata, None, None, None, None, at_us, at_us,
        Trust.UNTRUSTED.value,
    )  # fmt: skip


def _read(header: bytes | None, body: bytes) -> tuple[_Facts, bytes] | None:
    """Return the facts and the payload, or None when they are not ours or could not be told on as they are."""
    if not header:
        return None
    try:
        if header.startswith(b"~"):
            found = _BEHIND.fullmatch(header)
            if found is None or int(found[1]) > len(body):
                return None
            header, body = body[int(found[1]) :], body[: int(found[1])]
        facts = _decode(header)
        _scan(body)
        check_topic(facts.topic)
    except _NOT_OURS:
        return None
    return facts, body


def _foreign(body: bytes) -> tuple[bytes, bytes | None]:
    try:
        strict_json.validate(body, max_bytes=JSON_BYTES_MAX)
    except (InvalidPayload, Invalid):
        return b'"' + b64encode(body) + b'"', b'{"encoding":"base64"}'
    return body, None


def _written(raw: bytes | None) -> msgspec.Raw | str:
    """Return JSON as it is, or as a string where its bytes could not stand in a header and come back the same."""
    if raw is None:
        return _NONE
    text = raw.decode()
    if text.isascii() and text.isprintable() and text[:1] == "{" and text[-1:] == "}":
        return msgspec.Raw(raw)
    return text


def _part(raw: msgspec.Raw) -> bytes | None:
    found = bytes(raw)
    if found[:1] == b'"':
        return msgspec.json.decode(found, type=str).encode()
    return None if found == b"null" else found


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x10000:  # noqa: PLR2004 - the last code point JSON writes as one escape
        return f"\\u{code:04x}"
    high, low = divmod(code - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"
