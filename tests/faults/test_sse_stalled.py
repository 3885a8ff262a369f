"""Readers that read nothing cost next to nothing, and those who read get everything."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from tests.faults.campaign import FULL
from tests.faults.sse_scene import TOPIC, Service
from tests.server.sse_reader import Reader

STALLED = 100
EVENTS = 200_000 if FULL else 20_000
BATCH = 1000
GROWTH_BYTES_MAX = 64 * 1024 * 1024

pytestmark = [pytest.mark.xdist_group("sse stalled"), pytest.mark.slow]


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(pid)


def stall(service: Service, number: int) -> socket.socket:
    """Ask for a stream of its own and read nothing of it."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(("127.0.0.1", service.port))
    path = f"/v1/bus/subscribe/stalled-{number}?topic={TOPIC}&from=earliest"
    made.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{service.port}\r\n\r\n".encode())
    return made


async def test_stalled_readers_are_bounded_and_good_ones_unaffected(tmp_path: Path) -> None:
    with Service(tmp_path / "data") as service:
        for first in (0, BATCH):
            await asyncio.to_thread(service.publish, first, BATCH, text="x" * 200)
        warm = Reader(service.url, f"/v1/bus/subscribe/warm?topic={TOPIC}&from=earliest")
        await warm.until(2 * BATCH)
        await warm.stop()
        before = resident_bytes(service.pid)
        stalled = [stall(service, number) for number in range(STALLED)]
        good = Reader(service.url, f"/v1/bus/subscribe/good?topic={TOPIC}&from=earliest")
        largest = before
        try:
            for first in range(2 * BATCH, EVENTS, BATCH):
                await asyncio.to_thread(service.publish, first, BATCH, text="x" * 200)
                largest = max(largest, resident_bytes(service.pid))
            await good.until(EVENTS, 300)
            largest = max(largest, resident_bytes(service.pid))
        finally:
            await good.stop()
            for one in stalled:
                one.close()
    print(f"grew by {(largest - before) / 2**20:.1f} MiB")  # noqa: T201 - for who reads the campaign's output
    assert [message.number for message in good.messages] == [*range(EVENTS)]
    assert good.connections == 1
    assert largest - before <= GROWTH_BYTES_MAX
