"""A server that speaks just enough of Kafka's protocol to say that its cluster has no broker that is alive.

A real Kafka says so for a moment when its only broker has hung for longer than its session lasts. Here there is a
broker until it is asked for more than that; it does not answer, and from then on the cluster has none.
"""

from __future__ import annotations

import asyncio
import struct

from tests.listening import Listener

__all__ = ["Brokerless"]

VERSIONS, METADATA, CREATE_TOPICS, DESCRIBE_CONFIGS = 18, 3, 19, 32
SPOKEN = ((VERSIONS, 0), (METADATA, 4), (CREATE_TOPICS, 4), (DESCRIBE_CONFIGS, 1))
UNSUPPORTED_VERSION, LEADER_NOT_AVAILABLE = 35, 5
BROKER, NOBODY = 1, -1


def text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


class Brokerless(Listener):
    """``hangs`` says whether it has come to that."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """See ``Listener.serve``."""
        while True:
            (size,) = struct.unpack(">i", await reader.readexactly(4))
            request = await reader.readexactly(size)
            kind, version, number, name = struct.unpack_from(">hhih", request)
            if kind == VERSIONS:
                body = struct.pack(">hi", UNSUPPORTED_VERSION if version else 0, len(SPOKEN))
                body += b"".join(struct.pack(">hhh", one, last, last) for one, last in SPOKEN)
            elif kind == METADATA:
                body = self._metadata(request[10 + max(name, 0) :])
            else:
                self.hangs = True
                continue
            writer.write(struct.pack(">ii", len(body) + 4, number) + body)
            await writer.drain()

    def _metadata(self, asked: bytes) -> bytes:
        (count,) = struct.unpack_from(">i", asked)
        at, topics = 4, b""
        for _ in range(count):
            (size,) = struct.unpack_from(">h", asked, at)
            topics += struct.pack(">h", 0) + asked[at : at + 2 + size] + struct.pack(">?i", False, 1)
            topics += struct.pack(">hiiii", LEADER_NOT_AVAILABLE, 0, NOBODY, 0, 0)
            at += 2 + size
        brokers, gone = struct.pack(">i", 0), self.hangs and not count
        if not gone:
            brokers = struct.pack(">ii", 1, BROKER) + text("127.0.0.1") + struct.pack(">ih", self.port, -1)
        controller = struct.pack(">i", NOBODY if gone else BROKER)
        return struct.pack(">i", 0) + brokers + text("cluster") + controller + struct.pack(">i", max(count, 0)) + topics
