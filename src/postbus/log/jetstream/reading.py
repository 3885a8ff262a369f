"""Reading a JetStream stream by position: direct gets in pages, which change nothing on the server."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from postbus.log.wire import HEADER, event_of
from postbus.model import Event, Trust

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nats.aio.msg import Msg

    from postbus.log.jetstream.link import Link

__all__ = ["SOURCE", "event_from", "missing_event", "page", "pages", "sequence_of"]

SOURCE = "nats"
PAGE = 1000
PAGE_BYTES = 8 << 20
PENDING = "Nats-Num-Pending"
SEQUENCE = "Nats-Sequence"
STAMP = "Nats-Time-Stamp"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


async def page(link: Link, stream: str, sequence: int, limit: int) -> tuple[list[Msg], int]:
    """Return messages from a sequence on, as many as fit into one answer, and how many there are behind them."""
    request = msgspec.json.encode({"seq": sequence, "batch": min(limit, PAGE), "max_bytes": PAGE_BYTES})
    messages, end = await link.ask_many(f"$JS.API.DIRECT.GET.{stream}", request)
    return messages, int((end.headers or {}).get(PENDING, "0"))


async def pages(link: Link, stream: str, sequence: int) -> AsyncIterator[Msg]:
    """Go through all messages from a sequence on."""
    more = 1
    while more:
        messages, more = await page(link, stream, sequence, PAGE)
        for message in messages:
            sequence = sequence_of(message, sequence) + 1
            yield message


def sequence_of(message: Msg, otherwise: int) -> int:
    """Return where a message is; one with headers nobody can read is where it was expected."""
    return int(message.headers[SEQUENCE]) if message.headers else otherwise


def event_from(stream: str, partition: int, sequence: int, message: Msg) -> Event:
    """Return a message as an event."""
    headers = message.headers or {}
    facts = headers.get(HEADER)
    header = facts.encode() if facts else None
    return event_of(stream, partition, sequence - 1, header, message.data, SOURCE, _micros(headers.get(STAMP)))


def missing_event(stream: str, partition: int, sequence: int) -> Event:
    """Return what stands in the place of a message that somebody has taken out of the middle."""
    return Event(
        stream, partition, sequence - 1, stream, SOURCE, "", None, b"null", b'{"missing":true}', None, None, None, None,
        0, 0, Trust.UNTRUSTED.value,
    )  # fmt: skip


def _micros(stamp: str | None) -> int:
    if stamp is None:
        return 0
    past = datetime.fromisoformat(stamp) - EPOCH
    return (past.days * 86_400 + past.seconds) * 1_000_000 + past.microseconds
