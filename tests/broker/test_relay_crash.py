"""Nothing is lost, doubled or reordered when the publisher and the NATS server are killed at their work."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import nats
from nats.js.api import StreamConfig

from postbus.bus.purge import dead_letters
from postbus.clock import SystemClock
from postbus.log import SqliteLog
from tests.broker.nats_server import NatsServer
from tests.faults.campaign import FULL, dice

CYCLES = 24 if FULL else 6
PATIENCE_S = 90


class Publisher:
    """The program ``relay_process``; knows the last number that was accepted, and in which ways."""

    def __init__(self, data: Path, url: str) -> None:
        self._words = [sys.executable, "-m", "tests.broker.relay_process", str(data), url]
        self.last = -1
        self.ways: set[str] = set()

    def start(self) -> None:
        self._child = subprocess.Popen(
            [*self._words, str(self.last + 1)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.endswith("\n"):
                number, way = line.split()
                assert int(number) == self.last + 1
                self.last = int(number)
                self.ways.add(way)

    def progress(self, count: int) -> None:
        """Wait until so many more are accepted."""
        wanted, deadline = self.last + count, time.monotonic() + PATIENCE_S
        while self.last < wanted:
            assert self._child.poll() is None, "the publisher ended"
            assert time.monotonic() < deadline, "the publisher does not get on"
            time.sleep(0.005)

    def kill(self) -> None:
        self._child.kill()
        self._over()

    def finish(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        assert self._child.wait(PATIENCE_S) == 0
        self._over()

    def _over(self) -> None:
        self._child.wait()
        self._reader.join()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            pipe.close()


async def make_stream(url: str) -> None:
    client = await nats.connect(url)
    await client.jetstream().add_stream(StreamConfig(name="ORDERS", subjects=["orders.>"]))
    await client.close()


async def stored(url: str) -> list[int]:
    client = await nats.connect(url)
    stream = client.jetstream()
    count = (await stream.stream_info("ORDERS")).state.messages
    reader = await stream.subscribe("orders.>", ordered_consumer=True)
    found = [int((await reader.next_msg(timeout=PATIENCE_S)).data) for _ in range(count)]
    await client.close()
    return found


async def test_killing_the_publisher_and_the_server_loses_and_doubles_nothing(
    server: NatsServer, tmp_path: Path
) -> None:
    chance = dice("relay")
    await make_stream(server.url)
    publisher = Publisher(tmp_path / "data", server.url)
    publisher.start()
    try:
        for cycle in range(CYCLES):
            publisher.progress(chance.randrange(5, 60))
            victim = ("server", "publisher", "both")[cycle % 3]
            if victim != "publisher":
                server.kill()
                publisher.progress(chance.randrange(1, 150))  # into the spool
            if victim != "server":
                publisher.kill()
                publisher.start()
                publisher.progress(chance.randrange(1, 20))
            if victim != "publisher":
                server.start()
                await asyncio.sleep(chance.uniform(0.0, 0.6))  # the next one falls into the drain, or just after it
        publisher.finish()
    except BaseException:
        publisher.kill()
        raise
    found = await stored(server.url)
    assert found == list(range(len(found))), "lost, doubled or out of order"
    assert len(found) > publisher.last
    assert publisher.ways == {"sent", "spooled"}
    log = SqliteLog.open(tmp_path / "data")
    assert await dead_letters(log, SystemClock(), "local.default").find(state=None) == []
    await log.close()
