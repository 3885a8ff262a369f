"""Events as server-sent events: each is encoded once for all who read it, and many go out in one write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from postbus.model import Event

__all__ = ["HELLO", "KEEP_ALIVE", "Frames", "error_frame", "hello", "parse_places"]

BYTES_MAX = 4 * 1024 * 1024
CHUNKS_MAX = 64
PARTITIONS_MAX = 1024
DIGITS_MAX = 18

HELLO = b": postbus\nretry: 1000\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def hello(places: dict[int, int]) -> bytes:
    """Return how a stream begins that the server keeps no place for: with the place to come back to.

    Without it a reader that is cut off before its first event would start at the end again, and miss what came between.
    """
    if not places:
        return HELLO
    return b"id: %s\n%s" % (_cursor(places), HELLO)


def _cursor(places: dict[int, int]) -> bytes:
    return ",".join([f"{partition}:{offset}" for partition, offset in sorted(places.items())]).encode()


def error_frame(code: str, message: str, **facts: int) -> bytes:
    """Return what tells a reader that something is wrong."""
    return b"event: bus.error\ndata: %s\n\n" % msgspec.json.encode({"code": code, "message": message, **facts})


def parse_places(text: str) -> dict[int, int] | None:
    """Return the last offset per partition that a ``Last-Event-ID`` names; None when it is none of ours."""
    places: dict[int, int] = {}
    for pair in text.strip().split(","):
        partition, _, offset = pair.partition(":")
        for number in (partition, offset.removeprefix("-")):
            if not (number.isascii() and number.isdigit() and len(number) <= DIGITS_MAX):
                return None
        places[int(partition)] = max(int(offset), -1)
    return places if len(places) <= PARTITIONS_MAX else None


class Frames:
    """The encoded events of a server, the recent ones kept. Event addresses are never reused within one epoch."""

    def __init__(self) -> None:
        self._bodies: dict[tuple[str, int, int], tuple[int, bytes]] = {}
        self._size = 0
        self._chunks: dict[tuple[str, int, int, int, int], bytes] = {}

    def chunk(self, events: list[Event], places: dict[int, int], partitions: int) -> bytes:
        """Return events as one piece of a stream; moves the reader's places along.

        On a topic with one partition all readers at one place share the piece.
        """
        if partitions > 1:
            pieces: list[bytes] = []
            for event in events:
                places[event.partition] = max(event.offset, places.get(event.partition, -1))
                pieces += (b"id: %s\n" % _cursor(places), self.body(event))
            return b"".join(pieces)
        first, last = events[0], events[-1]
        before = places.get(0, -1)
        shared = first.offset > before and last.offset - first.offset + 1 == len(events)
        key = (first.stream, first.offset, last.offset, first.created_at_us, last.created_at_us)
        found = self._chunks.get(key) if shared else None
        if found is None:
            pieces = []
            for event in events:
                before = max(before, event.offset)
                pieces += (b"id: 0:%d\n" % before, self.body(event))
            found = b"".join(pieces)
            if shared:
                if len(self._chunks) >= CHUNKS_MAX:
                    del self._chunks[next(iter(self._chunks))]
                self._chunks[key] = found
        places[0] = max(before, last.offset)
        return found

    def body(self, event: Event) -> bytes:
        """Return an event without its id line."""
        key = (event.stream, event.partition, event.offset)
        known = self._bodies.get(key)
        if known is not None and known[0] == event.created_at_us:
            return known[1]
        made = b"event: bus.message\ndata: %s\n\n" % _lines(event.to_json())
        if known is not None:
            self._size -= len(known[1])
        self._bodies[key] = (event.created_at_us, made)
        self._size += len(made)
        while self._size > BYTES_MAX:
            self._size -= len(self._bodies.pop(next(iter(self._bodies)))[1])
        return made


def _lines(text: bytes) -> bytes:
    """Return JSON as the lines of one data field; white space between its tokens may hold line breaks."""
    if b"\n" not in text and b"\r" not in text:
        return text
    return text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
