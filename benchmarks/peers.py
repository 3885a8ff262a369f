"""Peers with the same promise (an acknowledged event is on disk): Redis Streams and NATS JetStream.

Peers that call handlers are in ``bus_peers.py``. Every server runs as a process of its own on a free loopback port,
with its data beside everyone else's, and is ended by its process id. ``python -m benchmarks.peers`` says which
are here and how to get the others; with ``--install`` it gets the Python parts.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import itertools
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.bare import quantiles_us
from benchmarks.harness import AsyncContender, Missing, Options
from benchmarks.load import PAYLOADS, Stopwatch

__all__ = [
    "JetStreamOne",
    "JetStreamPublishers",
    "RedisClients",
    "RedisOne",
    "RedisPipeline",
    "Server",
    "free_port",
    "how_to_get",
    "main",
    "nats_server",
    "redis_server",
    "redis_version",
]

CLIENTS = 100
START_S_MAX = 20.0
END_S_MAX = 10.0
REQUIREMENTS = Path("requirements/bench-peers.txt")
PYTHON_PARTS = "run `python -m benchmarks.peers --install` with the project's Python"
NEEDS = {
    "Redis Streams": {
        "redis-server": "run `apt-get install -y redis-server && systemctl disable --now redis-server`",
        "redis": PYTHON_PARTS,
    },
    "NATS JetStream": {"nats-server": PYTHON_PARTS, "nats": PYTHON_PARTS},
    "FastStream": {"nats-server": PYTHON_PARTS, "nats": PYTHON_PARTS, "faststream": PYTHON_PARTS},
    "huey": {"huey": PYTHON_PARTS},
    "bubus": {"bubus": PYTHON_PARTS},
}


def program(name: str) -> str | None:
    """Return where a server is: beside this interpreter or on PATH."""
    return shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)


def redis_version() -> str | None:
    """Return the version of the Redis server that is here."""
    server = program("redis-server")
    if server is None:
        return None
    said = subprocess.run([server, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"v=(\S+)", said)
    return found[1] if found else None


def how_to_get(peer: str) -> str | None:
    """Return the sentence that installs what a peer lacks, or None when it is all here."""
    for part, how in NEEDS[peer].items():
        here = program(part) if part.endswith("-server") else importlib.util.find_spec(part)
        if not here:
            return f"{peer} is skipped, {part} is not installed: {how}."
    return None


class Server:
    """A peer's process. Ended by ``end``, whatever it is doing."""

    def __init__(self, command: list[str], folder: Path, port: int) -> None:
        output = (folder / "output").open("wb")
        with output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S_MAX
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.end()
                    raise RuntimeError((folder / "output").read_text(errors="replace")) from None
                time.sleep(0.02)
            else:
                return

    def end(self) -> None:
        """Ask the process to end, and make it when it does not."""
        self._process.terminate()
        try:
            self._process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def free_port() -> int:
    """Return a loopback port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def redis_server(folder: Path, port: int) -> list[str]:
    """Return what starts Redis with its AOF synced always; snapshots and AOF rewrites are off, to spare the disk."""
    server = program("redis-server")
    assert server is not None
    settings = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(folder.resolve()),
        "appendonly": "yes",
        "appendfsync": "always",
        "auto-aof-rewrite-percentage": "0",
        "save": "",
    }
    return [server, *(word for name, value in settings.items() for word in (f"--{name}", value))]


def nats_server(folder: Path, port: int) -> list[str]:
    """Return what starts NATS with JetStream on files, synced always."""
    server = program("nats-server")
    assert server is not None
    settings = folder / "nats.conf"
    store = folder.resolve() / "data"
    settings.write_text(
        f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{store}", sync_interval: always }}\n',
        encoding="utf-8",
    )
    return [server, "--config", str(settings)]


class Peer(AsyncContender):
    """A peer in a race: its server, and the timed work of its clients."""

    peer: str

    def __init__(
        self, name: str, options: Options, loop: Callable[[], asyncio.AbstractEventLoop] | None = None
    ) -> None:
        super().__init__(name, loop)
        self._options = options
        self._server: Server | None = None
        self._connected = False
        self._turns = itertools.count()

    async def start(self, folder: Path) -> None:
        """See ``Contender.open``."""
        reason = how_to_get(self.peer)
        if reason is not None:
            raise Missing(reason)
        port = free_port()
        self._server = Server(self.command(folder, port), folder, port)
        await self.connect(port)
        self._connected = True
        watch = Stopwatch()
        await self.work(lambda: watch.over(self._options.pick(2.0, 0.1)))

    async def turn(self) -> dict[str, float]:
        """See ``Contender.run``."""
        watch = Stopwatch()
        events, taken = await self.work(lambda: watch.over(self._options.round_s))
        numbers = {"events_s": watch.rate(events)["events_s"]}
        return numbers | (quantiles_us(taken) if taken else {})

    async def stop(self) -> None:
        """See ``Contender.close``."""
        try:
            if self._connected:
                await self.disconnect()
        finally:
            if self._server is not None:
                self._server.end()

    def payload(self) -> bytes:
        """Return the next payload."""
        return PAYLOADS[next(self._turns) % len(PAYLOADS)]

    @abstractmethod
    def command(self, folder: Path, port: int) -> list[str]:
        """Return what starts the server, told to sync before it acknowledges."""

    @abstractmethod
    async def connect(self, port: int) -> None:
        """Connect the clients; those of a try that failed end with the server."""

    @abstractmethod
    async def disconnect(self) -> None:
        """Disconnect the clients."""

    @abstractmethod
    async def work(self, over: Callable[[], bool]) -> tuple[int, list[float]]:
        """Publish until it is over; return how many were acknowledged, and the time of each where that is measured."""


async def concurrently(publish: Callable[[int], Awaitable[Any]], over: Callable[[], bool]) -> tuple[int, list[float]]:
    """Have 100 tasks publish one after the other each."""
    done = 0

    async def client(number: int) -> None:
        nonlocal done
        while not over():
            await publish(number)
            done += 1

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return done, []


async def one_by_one(publish: Callable[[int], Awaitable[Any]], over: Callable[[], bool]) -> tuple[int, list[float]]:
    """Publish one after the other, each timed."""
    taken = []
    while not over():
        started = time.perf_counter()
        await publish(0)
        taken.append(time.perf_counter() - started)
    return len(taken), taken


class RedisClients(Peer):
    """Redis Streams, AOF synced always: 100 connections, each awaiting every XADD."""

    peer = "Redis Streams"
    connections = CLIENTS

    def command(self, folder: Path, port: int) -> list[str]:
        """See ``Peer.command``."""
        return redis_server(folder, port)

    async def connect(self, port: int) -> None:
        """See ``Peer.connect``."""
        redis = importlib.import_module("redis.asyncio")
        self._clients: list[Any] = []
        for _ in range(self.connections):
            client = redis.Redis(host="127.0.0.1", port=port, single_connection_client=True)
            self._clients.append(client)
            await client.ping()

    async def disconnect(self) -> None:
        """See ``Peer.disconnect``."""
        for client in self._clients:
            await client.aclose()

    async def work(self, over: Callable[[], bool]) -> tuple[int, list[float]]:
        """See ``Peer.work``."""
        return await concurrently(self._publish, over)

    async def _publish(self, number: int) -> None:
        await self._clients[number].xadd("orders", {"payload": self.payload()})


class RedisPipeline(RedisClients):
    """The same server, one connection that sends 100 XADD at a time: its best case."""

    connections = 1

    async def work(self, over: Callable[[], bool]) -> tuple[int, list[float]]:
        """See ``Peer.work``."""
        done = 0
        while not over():
            pipeline = self._clients[0].pipeline(transaction=False)
            for _ in range(CLIENTS):
                pipeline.xadd("orders", {"payload": self.payload()})
            done += len(await pipeline.execute())
        return done, []


class RedisOne(RedisClients):
    """The same server, one connection, each XADD timed."""

    connections = 1

    async def work(self, over: Callable[[], bool]) -> tuple[int, list[float]]:
        """See ``Peer.work``."""
        return await one_by_one(self._publish, over)


class JetStreamPublishers(Peer):
    """NATS JetStream on files, synced always: 100 tasks on one connection, each awaiting every acknowledgement."""

    peer = "NATS JetStream"

    def command(self, folder: Path, port: int) -> list[str]:
        """See ``Peer.command``."""
        return nats_server(folder, port)

    async def connect(self, port: int) -> None:
        """See ``Peer.connect``."""
        nats, api = importlib.import_module("nats"), importlib.import_module("nats.js.api")
        self._connection = await nats.connect(f"nats://127.0.0.1:{port}")
        self._jetstream = self._connection.jetstream()
        stream = api.StreamConfig(name="orders", subjects=["orders"], storage=api.StorageType.FILE)
        await self._jetstream.add_stream(stream)

    async def disconnect(self) -> None:
        """See ``Peer.disconnect``."""
        await self._connection.close()

    async def work(self, over: Callable[[], bool]) -> tuple[int, list[float]]:
        """See ``Peer.work``."""
        return await concurrently(self._publish, over)

    async def _publish(self, _number: int) -> None:
        await self._jetstream.publish("orders", self.payload())


class JetStreamOne(JetStreamPublishers):
    """The same server, one publisher, each publish timed."""

    async def work(self, over: Callable[[], bool]) -> tuple[int, list[float]]:
        """See ``Peer.work``."""
        return await one_by_one(self._publish, over)


def _install() -> None:
    """Install the Python parts in this interpreter's environment, by uv where it is, otherwise by pip."""
    uv = program("uv")
    if uv is not None:
        command = [uv, "pip", "install", "--python", sys.executable]
    else:
        if importlib.util.find_spec("pip") is None:
            subprocess.run([sys.executable, "-m", "ensurepip"], check=True)
        command = [sys.executable, "-m", "pip", "install"]
    subprocess.run([*command, "--require-hashes", "-r", str(REQUIREMENTS)], check=True)


def main() -> None:
    """Say which peers are here; install their Python parts when asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=main.__doc__)
    parser.add_argument("--install", action="store_true", help=f"install {REQUIREMENTS}")
    if parser.parse_args().install:
        _install()
    for peer in NEEDS:
        print(how_to_get(peer) or f"{peer} is here.")


if __name__ == "__main__":
    main()
