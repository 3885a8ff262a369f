"""How an event is laid down as a row, encoded for its hash, and linked to the one before it.

Append, verification and salvage share this page, so that what is checked is what was written.
"""

from __future__ import annotations

import hashlib
import zlib

import msgspec

__all__ = [
    "EVENT_FIELDS",
    "GENESIS_BYTES",
    "INSERT_COLUMNS",
    "MINUTE",
    "content_digest",
    "encode",
    "genesis",
    "insert_statement",
    "link",
    "seal",
]

# The facts of an event in the order of ``postbus.model.Event`` after ``stream``: what is read, hashed and handed out.
EVENT_FIELDS = (
    'partition, "offset", topic, source, variant, key, payload, metadata, headers, correlation_id, native_id, '
    "delivery_handle, IFNULL(occurred_at_us, created_at_us), created_at_us, IFNULL(trust, 'trusted')"
)

# The minute in which an event happened, since 1970; SQL's division rounds towards 0, an instant before 1970 must not.
MINUTE = "(IFNULL(occurred_at_us, created_at_us) - 59999999 * (IFNULL(occurred_at_us, created_at_us) < 0)) / 60000000"

INSERT_COLUMNS = (
    "stream_id",
    "partition",
    '"offset"',
    "topic",
    "source",
    "variant",
    "key",
    "payload",
    "metadata",
    "headers",
    "correlation_id",
    "native_id",
    "delivery_handle",
    "occurred_at_us",
    "created_at_us",
    "trust",
    "latest_at_us",
    "bytes_through",
    "crc",
    "chain",
)

GENESIS_BYTES = 32

# Deterministic bytes of a tuple of facts; the same call encodes a row on append and a row read back.
encode = msgspec.msgpack.Encoder().encode


def genesis(stream: str, epoch: int, partition: int) -> bytes:
    """Return the chain value before offset 0, which ties the chain to its stream, epoch and partition."""
    return hashlib.sha256(encode(("postbus", stream, epoch, partition))).digest()


def link(chain: bytes, encoded: bytes) -> bytes:
    """Return the chain value after an encoded event."""
    return hashlib.sha256(chain + encoded).digest()


def content_digest(facts: tuple[object, ...]) -> bytes:
    """Return what decides whether two events under one identity are the same."""
    return hashlib.sha256(encode(facts)).digest()[:16]


def seal(*facts: object) -> int:
    """Return the CRC-32 that guards a row which no chain covers."""
    return zlib.crc32(encode(facts))


def insert_statement(rows: int) -> str:
    """Return the statement that appends ``rows`` events in one step."""
    one = "(" + ",".join("?" * len(INSERT_COLUMNS)) + ")"
    return f"INSERT INTO events ({', '.join(INSERT_COLUMNS)}) VALUES {','.join([one] * rows)}"  # noqa: S608 - no user text
