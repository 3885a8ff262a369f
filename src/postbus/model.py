"""The words of Postbus as frozen records, enums and typed errors.

Records carry facts and no behaviour beyond decoding their own bytes. Payload, metadata, headers and delivery handle are
kept as the JSON bytes that were accepted; the properties without ``_json`` decode a fresh value on every access, so
that no reader can change what another reader sees.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec

__all__ = [
    "Activation",
    "AlreadyServed",
    "Backpressure",
    "CommitResult",
    "Conflict",
    "Consumer",
    "ConsumerLag",
    "CorruptLog",
    "Cursor",
    "DeadLetter",
    "Delivery",
    "DeliveryHandle",
    "DeliveryStatus",
    "Draft",
    "Durability",
    "Event",
    "Forbidden",
    "Gap",
    "IdempotencyConflict",
    "Inbox",
    "InboxItem",
    "Invalid",
    "InvalidFilter",
    "InvalidPayload",
    "InvalidSchema",
    "LeaseLost",
    "LimitExceeded",
    "LoopDetected",
    "NoResponder",
    "NotFound",
    "OffsetOutOfRange",
    "Ordering",
    "Overflow",
    "PartitionLag",
    "PartitionStats",
    "PostbusError",
    "QuotaExceeded",
    "ReadResult",
    "Receipt",
    "Refused",
    "Reject",
    "RequestTimeout",
    "Retention",
    "Retry",
    "RetryPolicy",
    "SchemaConflict",
    "SchemaMismatch",
    "Source",
    "SpoolEntry",
    "Start",
    "StartPolicy",
    "StorageError",
    "StorageFailed",
    "StorageFull",
    "StoreBusy",
    "Stream",
    "StreamSettings",
    "StreamStats",
    "Subscription",
    "TrimResult",
    "Trust",
    "Unauthenticated",
    "Unreachable",
    "event_id",
    "instant",
]


# --- enums ------------------------------------------------------------------------------------------------------------


class Durability(StrEnum):
    """What an acknowledged write survives: ``full`` a power cut, ``relaxed`` the end of the process only."""

    FULL = "full"
    RELAXED = "relaxed"


class StartPolicy(StrEnum):
    """Where a new reader starts: after everything, at the first retained event, at an offset, or at an instant."""

    LATEST = "latest"
    EARLIEST = "earliest"
    AT_OFFSET = "at_offset"
    AT_TIME = "at_time"


class Trust(StrEnum):
    """Whether an event's text may reach a prompt as it is (``trusted``) or only marked as data (``untrusted``)."""

    TRUSTED = "trusted"
    UNTRUSTED = "untrusted"


class Ordering(StrEnum):
    """``key``: serial per key, parallel across keys. ``strict``: one event at a time."""

    KEY = "key"
    STRICT = "strict"


class Overflow(StrEnum):
    """What a subscription does that falls too far behind. ``drop_oldest``: the oldest become dead letters."""

    WAIT = "wait"
    DROP_OLDEST = "drop_oldest"


class DeliveryStatus(StrEnum):
    """The state of one event for one subscription; ``done`` has no row once the cursor has passed it."""

    PENDING = "pending"
    PROCESSING = "processing"
    DONE = "done"
    FAILED = "failed"


# --- helpers shared by the records ------------------------------------------------------------------------------------


def event_id(stream: str, partition: int, offset: int) -> str:
    """Return the address of an event, which is its id."""
    return f"{stream}/{partition}/{offset}"


def instant(microseconds: int) -> datetime:
    """Return microseconds since 1970 as an aware UTC datetime."""
    seconds, rest = divmod(microseconds, 1_000_000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest)


def _decode(raw: bytes | None) -> Any:
    return None if raw is None else msgspec.json.decode(raw)


# --- events -----------------------------------------------------------------------------------------------------------


class Draft(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An event before it has an address. Make one with ``postbus.envelope.draft``, which checks every field."""

    topic: str
    source: str
    payload_json: bytes
    variant: str = ""
    key: str | None = None
    metadata_json: bytes | None = None
    headers_json: bytes | None = None
    correlation_id: str | None = None
    native_id: str | None = None
    delivery_handle_json: bytes | None = None
    occurred_at_us: int | None = None
    trust: str = Trust.TRUSTED.value


class Event(msgspec.Struct, frozen=True, gc=False):
    """An immutable fact at its address. The field order is the order of the columns that backends read."""

    stream: str
    partition: int
    offset: int
    topic: str
    source: str
    variant: str
    key: str | None
    payload_json: bytes
    metadata_json: bytes | None
    headers_json: bytes | None
    correlation_id: str | None
    native_id: str | None
    delivery_handle_json: bytes | None
    occurred_at_us: int
    created_at_us: int
    trust: str = Trust.TRUSTED.value
    status: DeliveryStatus = DeliveryStatus.PENDING
    attempt: int = 0

    @property
    def id(self) -> str:
        """The address ``<stream>/<partition>/<offset>``."""
        return f"{self.stream}/{self.partition}/{self.offset}"

    @property
    def payload(self) -> Any:
        """The payload, decoded afresh."""
        return msgspec.json.decode(self.payload_json)

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata, decoded afresh; empty when none was given."""
        return _decode(self.metadata_json) or {}

    @property
    def headers(self) -> dict[str, str]:
        """The headers, decoded afresh; empty when none were given."""
        return _decode(self.headers_json) or {}

    @property
    def delivery_handle(self) -> dict[str, Any] | None:
        """Where a reply goes, decoded afresh."""
        handle: dict[str, Any] | None = _decode(self.delivery_handle_json)
        return handle

    @property
    def occurred_at(self) -> datetime:
        """When it happened, as the source says."""
        return instant(self.occurred_at_us)

    @property
    def created_at(self) -> datetime:
        """When it was appended here."""
        return instant(self.created_at_us)

    def to_json(self) -> bytes:
        """Return the event as one JSON object; the payload's bytes are passed through untouched."""
        return msgspec.json.encode(
            {
                "id": self.id,
                "stream": self.stream,
                "partition": self.partition,
                "offset": self.offset,
                "topic": self.topic,
                "source": self.source,
                "variant": self.variant,
                "key": self.key,
                "payload": msgspec.Raw(self.payload_json),
                "metadata": msgspec.Raw(self.metadata_json or b"{}"),
                "headers": msgspec.Raw(self.headers_json or b"{}"),
                "correlation_id": self.correlation_id,
                "native_id": self.native_id,
                "delivery_handle": msgspec.Raw(self.delivery_handle_json or b"null"),
                "occurred_at": self.occurred_at,
                "created_at": self.created_at,
                "trust": self.trust,
            }
        )


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """What a publisher gets back once its event is durable."""

    stream: str
    partition: int
    offset: int
    duplicate: bool = False
    durability: Durability = Durability.FULL
    created_at_us: int = 0
    spooled: bool = False

    @property
    def id(self) -> str:
        """The address ``<stream>/<partition>/<offset>``."""
        return f"{self.stream}/{self.partition}/{self.offset}"


# --- streams ----------------------------------------------------------------------------------------------------------


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How much of each partition of a stream is kept; ``None`` means no bound of that kind."""

    age_s: float | None = None
    bytes: int | None = None
    count: int | None = None


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream was created with. ``identity_window_s``: how long a native id is remembered (None: forever)."""

    partitions: int = 1
    retention: Retention = Retention()
    retention_beats_consumers: bool = False
    identity_window_s: float | None = None
    labels: dict[str, str] = {}


class Stream(msgspec.Struct, frozen=True):
    """An append-only log. ``epoch`` grows each time the stream is deleted and made again."""

    name: str
    settings: StreamSettings
    epoch: int
    created_at_us: int


class PartitionStats(msgspec.Struct, frozen=True):
    """The extent of one partition: ``first_offset`` retained, ``high_water_mark`` next to be written."""

    partition: int
    first_offset: int
    high_water_mark: int
    bytes: int
    chain: str

    @property
    def count(self) -> int:
        """How many events are retained; offsets are dense."""
        return self.high_water_mark - self.first_offset


class StreamStats(msgspec.Struct, frozen=True):
    """The extent of a stream; O(1) to compute."""

    stream: Stream
    partitions: tuple[PartitionStats, ...]

    @property
    def count(self) -> int:
        """How many events are retained."""
        return sum(part.count for part in self.partitions)

    @property
    def bytes(self) -> int:
        """How many bytes of events are retained."""
        return sum(part.bytes for part in self.partitions)


class Gap(msgspec.Struct, frozen=True):
    """A reader's cursor was passed by retention: ``missed`` events were removed before it read them."""

    consumer: str
    partition: int
    missed: int


class TrimResult(msgspec.Struct, frozen=True):
    """What a trim did: events removed, the first retained offset per partition, who held it back, whom it passed."""

    removed: int
    first_offsets: tuple[int, ...]
    held_back_by: tuple[str, ...] = ()
    gaps: tuple[Gap, ...] = ()


# --- readers ----------------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A start policy with its argument: ``offset`` for ``at_offset``, ``time_us`` for ``at_time``."""

    policy: StartPolicy = StartPolicy.LATEST
    offset: int | None = None
    time_us: int | None = None


class Cursor(msgspec.Struct, frozen=True):
    """One reader's place in one partition. ``committed`` is the last consumed offset, -1 if it never committed."""

    partition: int
    next_offset: int
    committed: int = -1
    skipped: int = 0


class Consumer(msgspec.Struct, frozen=True):
    """A durable, named reader of one stream with its cursors in partition order."""

    id: str
    stream: str
    start: Start
    epoch: int
    cursors: tuple[Cursor, ...]
    created_at_us: int
    updated_at_us: int


class ReadResult(msgspec.Struct, frozen=True):
    """What a read saw: the consumer unchanged, the events at its cursor, and the next offset to be written."""

    consumer: Consumer
    events: list[Event]
    high_water_mark: int


class CommitResult(msgspec.Struct, frozen=True):
    """Whether a commit moved the cursor, and where the cursor is now."""

    moved: bool
    committed: int
    next_offset: int


class PartitionLag(msgspec.Struct, frozen=True):
    """How far one cursor is behind: ``lag = high_water_mark - next_offset``, never negative."""

    partition: int
    committed: int
    high_water_mark: int
    lag: int


class ConsumerLag(msgspec.Struct, frozen=True):
    """How far a reader is behind. ``epoch`` changes when the stream was recreated."""

    consumer: str
    stream: str
    epoch: int
    partitions: tuple[PartitionLag, ...]

    @property
    def total(self) -> int:
        """The lag over all partitions."""
        return sum(part.lag for part in self.partitions)


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How often and when a failed delivery is tried again before it becomes a dead letter."""

    max_attempts: int = 3
    backoff_s: float = 1.0
    backoff_s_max: float = 300.0
    jitter: float = 0.2


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """A durable, named reader: what it matches, where it starts, how it retries, where its dead letters go."""

    id: str
    pattern: str
    streams: tuple[str, ...] = ()
    filter: dict[str, Any] = {}
    start: Start = Start()
    retry: RetryPolicy = RetryPolicy()
    ordering: Ordering = Ordering.KEY
    dead_letter_stream: str | None = None
    target: str = "handler"
    labels: dict[str, str] = {}


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one event for one subscription; a row exists only above the cursor or for the dead."""

    subscription: str
    stream: str
    partition: int
    offset: int
    status: DeliveryStatus
    attempt: int = 0
    owner: str | None = None
    token: int = 0
    due_at_us: int | None = None
    error: str | None = None


class DeadLetter(msgspec.Struct, frozen=True):
    """A dead letter: the event in the dead-letter stream and where it came from."""

    event: Event
    subscription: str
    origin_stream: str
    origin_partition: int
    origin_offset: int
    reason: str
    attempts: int
    error: str = ""


# --- inboxes, sources, spool ------------------------------------------------------------------------------------------


class DeliveryHandle(msgspec.Struct, frozen=True):
    """Where a reply to an event goes; copied from event to item, never rebuilt."""

    kind: str
    target: dict[str, Any]


class Inbox(msgspec.Struct, frozen=True):
    """An agent's mailbox and its counters."""

    agent: str
    items: int
    unacked: int


class InboxItem(msgspec.Struct, frozen=True, kw_only=True):
    """One event owed to an agent. Acking an item is not committing a cursor."""

    id: str
    agent: str
    sequence: int
    event: Event
    matched_by: tuple[str, ...]
    match_reason: str = ""
    acked_at_us: int | None = None


class Activation(msgspec.Struct, frozen=True, kw_only=True):
    """One wake-up of an agent, coalesced from new items."""

    id: str
    agent: str
    new_item_count: int
    created_at_us: int


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Something outside that produces events, with its own ingress checkpoint.

    ``failures`` counts those in a row; ``events`` what was appended; ``turn`` grows with each change of the checkpoint
    and ``revision`` with each change of what it is.
    """

    id: str
    kind: str
    stream: str
    tenant: str = ""
    settings_json: bytes = b"{}"
    checkpoint_json: bytes | None = None
    last_error: str | None = None
    paused: bool = False
    failures: int = 0
    polls: int = 0
    events: int = 0
    duplicates: int = 0
    last_ok_at_us: int | None = None
    next_due_at_us: int | None = None
    created_at_us: int = 0
    revision: int = 0
    turn: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """What it was registered with, decoded afresh."""
        found: dict[str, Any] = _decode(self.settings_json)
        return found

    @property
    def checkpoint(self) -> Any:
        """How far it has read, decoded afresh; None before its first success."""
        return _decode(self.checkpoint_json)


class SpoolEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One event waiting on disk for a remote that cannot be reached; the remote knows it by its ``identity``.

    ``since``: where the remote's partitions ended, as far as was known, before it was sent for the first time.
    """

    sequence: int
    stream: str
    draft: Draft
    identity: str = ""
    tried: bool = False
    attempts: int = 0
    enqueued_at_us: int = 0
    since: tuple[int, ...] = ()


# --- errors -----------------------------------------------------------------------------------------------------------


class PostbusError(Exception):
    """Base of every error a caller can act on: a stable ``code``, a sentence, and often a hint that fixes it."""

    code = "error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Invalid(PostbusError):
    """An argument breaks a rule; nothing was changed."""

    code = "invalid"


class LimitExceeded(Invalid):
    """An argument is larger than a limit that the message names."""

    code = "limit_exceeded"


class InvalidPayload(Invalid):
    """The payload is not strict JSON; ``position`` is the byte where it goes wrong, when known."""

    code = "invalid_payload"

    def __init__(self, message: str, *, position: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.position = position


class InvalidFilter(Invalid):
    """A content filter is refused; ``line`` and ``column`` (from 1) say where in its expression, when it is there."""

    code = "invalid_filter"

    def __init__(
        self, message: str, *, line: int | None = None, column: int | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.line = line
        self.column = column


class InvalidSchema(Invalid):
    """A JSON Schema is refused: not valid, of another draft, with references that leave it, or too intricate."""

    code = "invalid_schema"


class SchemaMismatch(Invalid):
    """A payload does not match its schema; ``issues`` say where and why, each with a JSON pointer."""

    code = "schema_mismatch"

    def __init__(self, message: str, *, issues: list[Any], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.issues = issues


class NotFound(PostbusError):
    """The named stream, consumer, subscription or event does not exist."""

    code = "not_found"


class Conflict(PostbusError):
    """The name exists with other settings."""

    code = "conflict"


class SchemaConflict(Conflict):
    """Events that are there do not match the schema that is to be bound; ``issues`` name the first ones."""

    code = "schema_conflict"

    def __init__(self, message: str, *, issues: list[Any], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.issues = issues


class IdempotencyConflict(Conflict):
    """The identity (stream, native_id, variant) exists with other content at ``offset``."""

    code = "idempotency_conflict"

    def __init__(self, message: str, *, stream: str, native_id: str, variant: str, offset: int) -> None:
        super().__init__(message, hint="publish a changed fact under another native_id or variant")
        self.stream = stream
        self.native_id = native_id
        self.variant = variant
        self.offset = offset


class OffsetOutOfRange(Invalid):
    """The offset is negative or beyond what the partition holds."""

    code = "offset_out_of_range"


class Backpressure(PostbusError):
    """The durable path is full and stayed full for the whole waiting time; nothing was written."""

    code = "backpressure"


class LeaseLost(PostbusError):
    """The lease of a delivery was taken over or has expired; the acknowledgement was refused.

    ``lease_ids`` names the leases that are lost, when they are known by name.
    """

    code = "lease_lost"

    def __init__(self, message: str, *, hint: str | None = None, lease_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.lease_ids = lease_ids
        self.issues = list(lease_ids) or None


class Unauthenticated(PostbusError):
    """A key is needed, or the one that was given is unknown, expired or revoked."""

    code = "unauthenticated"


class Forbidden(PostbusError):
    """The caller is known but may not do this."""

    code = "forbidden"


class QuotaExceeded(PostbusError):
    """The tenant has used up what it may use of something; ``retry_after_s`` says when to try again."""

    code = "quota_exceeded"

    def __init__(self, message: str, *, retry_after_s: float, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class Unreachable(PostbusError):
    """The server did not answer, or something else answered in its place.

    ``retry_after_s`` is how long it asked to be left alone; ``permanent``: asking again the same way is useless.
    """

    code = "unreachable"
    permanent = False

    def __init__(
        self, message: str, *, hint: str | None = None, retry_after_s: float | None = None, permanent: bool = False
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s
        if permanent:
            self.permanent = True


class RequestTimeout(PostbusError):
    """No reply arrived in time."""

    code = "request_timeout"


class NoResponder(PostbusError):
    """Nobody listens where the request went."""

    code = "no_responder"


class Refused(PostbusError):
    """The far side was reached and said no."""

    code = "refused"


class StorageError(PostbusError):
    """The embedded store cannot do what was asked."""

    code = "storage"


class StorageFull(StorageError):
    """The disk is full: appends are refused, reads and acknowledgements go on, appends resume when there is room."""

    code = "storage_full"


class StorageFailed(StorageError):
    """A write or fsync failed: the store is read-only until it is reopened and verified."""

    code = "storage_failed"


class StoreBusy(StorageError):
    """Another process held the write lock for longer than the busy limit."""

    code = "store_busy"


class AlreadyServed(StorageError):
    """Another server serves this data folder."""

    code = "already_served"


class CorruptLog(StorageError):
    """The log is altered or shortened; ``stream``, ``partition`` and ``offset`` name the first bad place when known."""

    code = "corrupt_log"

    def __init__(
        self,
        message: str,
        *,
        stream: str | None = None,
        partition: int | None = None,
        offset: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.stream = stream
        self.partition = partition
        self.offset = offset


# --- what a handler may raise -----------------------------------------------------------------------------------------


class Reject(Exception):
    """Raised by a handler: this event will never succeed; dead-letter it now."""


class LoopDetected(PostbusError, Reject):
    """An event has derived from too many others; the one being handled becomes a dead letter with reason ``loop``."""

    code = "loop"


class Retry(Exception):
    """Raised by a handler: try this event again after ``delay_s`` (None: by the policy)."""

    def __init__(self, delay_s: float | None = None) -> None:
        super().__init__(f"retry after {delay_s}s" if delay_s is not None else "retry")
        self.delay_s = delay_s
