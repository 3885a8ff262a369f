"""An event as a Kafka record, and back; with what tells a repeat from a first.

A publisher looks for an identity in the log and then appends it. Two may do so at the same moment, and Kafka takes
both. So an event with an identity says how far its publisher had looked: if the same identity stands between there and
the event, the event came second. Every reader sees that alike, and reads a note in its place.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
from confluent_kafka import Message

from postbus.log import wire
from postbus.log.heads import Identity, digest_of
from postbus.log.kafka.index import Row
from postbus.log.kafka.names import MESSAGE_BYTES_MAX
from postbus.model import Event, LimitExceeded, Trust

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.log.kafka.posting import Headers, Record
    from postbus.log.wire import Carried
    from postbus.model import Draft

__all__ = ["FOREIGN", "Looked", "carried_of", "events_of", "looked_of", "note", "record_of", "row_of"]

FOREIGN = "kafka"
AFTER = "postbus-after"
FRAME_BYTES = 1024  # what the key, the other header and the protocol add, generously
HOLE = "postbus.hole"
REPEAT = "postbus.repeat"
_NOTHING = Message()


class Looked(NamedTuple):
    """A publisher had seen everything before ``after``, and expected its event at ``expected``."""

    after: int
    expected: int


def record_of(topic: str, partition: int, draft: Draft, append_id: str, now_us: int, looked: Looked | None) -> Record:
    """Return what is sent for a draft. Raises ``LimitExceeded``."""
    header, body = wire.pack(draft, append_id, now_us)
    size = len(header) + len(body) + FRAME_BYTES
    if size > MESSAGE_BYTES_MAX:
        raise LimitExceeded(
            f"the event takes {size:,} bytes with its headers; the limit on Kafka is {MESSAGE_BYTES_MAX:,}"
        )
    headers: Headers = {wire.HEADER: header}  # a dict of bytes is nothing to the garbage collector
    if looked is not None:
        headers[AFTER] = b"%d:%d" % looked
    return topic, partition, body, headers, None if draft.key is None else draft.key.encode()


def events_of(stream: str, partition: int, first: int, entries: Sequence[Message | None]) -> list[Event]:
    """Return the events from an offset on, whoever wrote them; for what Kafka keeps for itself, a note that says so."""
    known: Sequence[Any] = [_NOTHING if each is None else each for each in entries] if None in entries else entries
    heads = [each.headers() for each in known]
    name = wire.HEADER
    headers = [head[0][1] if head and head[0][0] == name else _among(head, name) for head in heads]
    bodies = [each.value() for each in known]
    if None in bodies:
        bodies = [body or b"" for body in bodies]
    made = wire.our_events(stream, partition, first, headers, bodies)
    if None not in made:
        return cast("list[Event]", made)
    return [
        event or _other(stream, partition, offset, message)
        for offset, message, event in zip(count(first), entries, made, strict=False)
    ]


def _other(stream: str, partition: int, offset: int, message: Message | None) -> Event:
    if message is None:
        return note(stream, partition, offset, HOLE, {"why": "Kafka keeps a mark of a transaction here"}, 0)
    kind, at_ms = message.timestamp()
    return wire.foreign_event(stream, partition, offset, message.value() or b"", FOREIGN, at_ms * 1000 if kind else 0)


def note(stream: str, partition: int, offset: int, topic: str, why: dict[str, object], at_us: int) -> Event:
    """Return an event that stands for a record which is none, so that offsets stay dense."""
    return Event(
        stream, partition, offset, topic, FOREIGN, "", None, b"null", msgspec.json.encode(why), None, None, None, None,
        at_us, at_us, Trust.UNTRUSTED.value,
    )  # fmt: skip


def carried_of(message: Message | None) -> Carried | None:
    """Return one of our own events as it was sent."""
    return None if message is None else wire.unpack(_header(message, wire.HEADER), message.value() or b"")


def looked_of(message: Message, offset: int) -> Looked:
    """Return how far the publisher had looked; all the way when it does not say."""
    after, colon, expected = (_header(message, AFTER) or b"").partition(b":")
    if colon and after.isdigit() and expected.isdigit():
        return Looked(int(after), int(expected))
    return Looked(offset, offset)


def row_of(partition: int, offset: int, message: Message | None) -> Row | None:
    """Return the identity that a record has, if it has one."""
    carried = carried_of(message)
    if carried is None or message is None or carried.draft.native_id is None:
        return None
    looked = looked_of(message, offset)
    after = offset + 1 if offset <= looked.expected else looked.after
    identity = Identity(partition, offset, carried.created_at_us, digest_of(carried.draft))
    return Row(carried.draft.native_id, carried.draft.variant, identity, after)


def _header(message: Message, name: str) -> bytes | None:
    return _among(message.headers(), name)


def _among(headers: Any, name: str) -> bytes | None:
    for found, value in headers or ():
        if found == name:
            return value  # type: ignore[no-any-return]  # the client does not say what its headers are
    return None
