"""What travels: events and receipts as the server writes them, and its refusals as the errors they are."""

from __future__ import annotations

import inspect
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from postbus import model
from postbus.model import (
    Backpressure,
    Conflict,
    Event,
    Forbidden,
    Invalid,
    NotFound,
    PostbusError,
    Receipt,
    RequestTimeout,
    StorageError,
    StorageFull,
    Unauthenticated,
    Unreachable,
)

__all__ = [
    "Item",
    "Leased",
    "decode_entries",
    "decode_event",
    "decode_item",
    "decode_items",
    "decode_leased",
    "decode_receipts",
    "refusal",
    "retry_after_s",
]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
NOTHING = (b"", b"null", b"{}")

BY_STATUS: dict[int, type[PostbusError]] = {
    400: Invalid,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    503: Backpressure,
    504: RequestTimeout,
    507: StorageFull,
}
BY_CODE: dict[str, type[PostbusError]] = {
    kind.code: kind for kind in vars(model).values() if isinstance(kind, type) and issubclass(kind, PostbusError)
}


class Leased(msgspec.Struct, frozen=True):
    """An event in this consumer's hands until it is acked, nacked, or its lease runs out.

    ``lease_id`` is None when handing it out was the ack. The event's ``attempt`` says how often it was handed out.
    """

    event: Event
    lease_id: str | None


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    sequence: int
    expired: bool
    matched_by: tuple[str, ...]
    match_reason: str
    acked_at: datetime | None
    topic: str | None = None
    variant: str | None = None
    metadata: dict[str, Any] | None = None
    headers: dict[str, str] | None = None
    source: str | None = None
    key: str | None = None
    correlation_id: str | None = None
    occurred_at: datetime | None = None
    delivery_handle: dict[str, Any] | None = None
    trust: str | None = None


class Item(_Facts, frozen=True, kw_only=True):
    """One event owed to an agent. ``expired``: retention removed it before it was acked, and its facts with it."""

    payload_json: bytes | None

    @property
    def payload(self) -> Any:
        """The payload, decoded afresh; None when it expired."""
        return None if self.payload_json is None else msgspec.json.decode(self.payload_json)


class _Item(_Facts, frozen=True, kw_only=True):
    payload: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)

    def made(self) -> Item:
        facts = {name: getattr(self, name) for name in _Facts.__struct_fields__}
        return Item(**facts, payload_json=bytes(self.payload) or None)


class _Items(msgspec.Struct):
    items: list[_Item]


class _Entries(msgspec.Struct):
    digests: list[dict[str, Any]]
    items: list[_Item]


class _Event(msgspec.Struct, kw_only=True):
    stream: str
    partition: int
    offset: int
    topic: str
    source: str
    payload: msgspec.Raw
    occurred_at: datetime
    created_at: datetime
    variant: str = ""
    key: str | None = None
    metadata: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    headers: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    correlation_id: str | None = None
    native_id: str | None = None
    delivery_handle: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    trust: str = "trusted"
    lease_id: str | None = None
    attempt: int = 0


class _Pulled(msgspec.Struct):
    events: list[_Event]


class _Published(msgspec.Struct):
    topic: str
    partition: int
    offset: int
    duplicate: bool
    produced_at: datetime
    spooled: bool = False


class _PublishedBatch(msgspec.Struct):
    events: list[_Published]


class _Problem(msgspec.Struct):
    code: str
    message: str
    hint: str | None = None
    position: int | None = None
    offset: int | None = None
    issues: list[Any] | None = None


class _Refused(msgspec.Struct):
    error: _Problem


_item = msgspec.json.Decoder(_Item).decode
_items = msgspec.json.Decoder(_Items).decode
_entries = msgspec.json.Decoder(_Entries).decode
_event = msgspec.json.Decoder(_Event).decode
_pulled = msgspec.json.Decoder(_Pulled).decode
_published = msgspec.json.Decoder(_Published).decode
_batch = msgspec.json.Decoder(_PublishedBatch).decode
_refused = msgspec.json.Decoder(_Refused).decode


def decode_event(raw: bytes | str) -> Event:
    """Return one event; the payload's bytes are those that were published."""
    return _made(_event(raw))


def decode_leased(raw: bytes) -> list[Leased]:
    """Return the events of a pull."""
    return [Leased(_made(found), found.lease_id) for found in _pulled(raw).events]


def decode_item(raw: bytes) -> Item:
    """Return one item of an inbox."""
    return _item(raw).made()


def decode_items(raw: bytes | str) -> list[Item]:
    """Return items of an inbox, in order."""
    return [one.made() for one in _items(raw).items]


def decode_entries(raw: bytes) -> tuple[list[dict[str, Any]], list[Item]]:
    """Return the digests of an inbox, and the items in none."""
    found = _entries(raw)
    return found.digests, [one.made() for one in found.items]


def decode_receipts(raw: bytes, *, many: bool) -> list[Receipt]:
    """Return where events were put."""
    found = _batch(raw).events if many else [_published(raw)]
    return [
        Receipt(
            one.topic,
            one.partition,
            one.offset,
            one.duplicate,
            created_at_us=_micros(one.produced_at),
            spooled=one.spooled,
        )
        for one in found
    ]


def _made(found: _Event) -> Event:
    return Event(
        stream=found.stream,
        partition=found.partition,
        offset=found.offset,
        topic=found.topic,
        source=found.source,
        variant=found.variant,
        key=found.key,
        payload_json=bytes(found.payload),
        metadata_json=_given(found.metadata),
        headers_json=_given(found.headers),
        correlation_id=found.correlation_id,
        native_id=found.native_id,
        delivery_handle_json=_given(found.delivery_handle),
        occurred_at_us=_micros(found.occurred_at),
        created_at_us=_micros(found.created_at),
        trust=found.trust,
        attempt=found.attempt,
    )


def _given(raw: msgspec.Raw) -> bytes | None:
    found = bytes(raw)
    return None if found in NOTHING else found


def _micros(at: datetime) -> int:
    return (at - EPOCH) // MICROSECOND


# --- refusals ---------------------------------------------------------------------------------------------------------


def retry_after_s(value: str | None) -> float | None:
    """Return what a ``Retry-After`` header asks for in seconds; dates are not understood."""
    return float(value) if value is not None and value.isascii() and value.isdigit() else None


def refusal(status: int, raw: bytes, retry_after: str | None = None) -> PostbusError:
    """Return the error that a refusal stands for; one that is not Postbus's own is ``Unreachable``."""
    try:
        problem = _refused(raw).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Unreachable(f"what answered with status {status} is no Postbus server, or stands in front of one")
    error = _rebuilt(status, problem, retry_after_s(retry_after))
    if problem.issues is not None:
        error.issues = problem.issues  # type: ignore[attr-defined]  # as the server's own errors have them
    return error


def _rebuilt(status: int, problem: _Problem, wait_s: float | None) -> PostbusError:
    """Return an error of the kind that the code names, with what that kind knows; else of the kind of its status."""
    kind = BY_CODE.get(problem.code)
    facts: dict[str, Any] = {
        "hint": problem.hint,
        "position": problem.position,
        "offset": problem.offset or 0,
        "issues": problem.issues or [],
        "lease_ids": tuple(str(one) for one in problem.issues or ()),
        "retry_after_s": wait_s or 1.0,
        "stream": "",
        "native_id": "",
        "variant": "",
    }
    if kind is not None:
        asked = inspect.signature(kind).parameters.values()
        if all(one.name in {"message", *facts} for one in asked if one.default is one.empty):
            error: PostbusError = kind(
                problem.message, **{one.name: facts[one.name] for one in asked if one.name in facts}
            )
            return error
    error = BY_STATUS.get(status, StorageError)(problem.message, hint=problem.hint)
    error.code = problem.code
    return error
