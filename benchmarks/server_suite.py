"""The suite "server": publishing, streaming and pulling over HTTP on loopback."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.harness import AsyncContender, Contender, Measure, Missing, Options, Race, loops
from benchmarks.load import PAYLOADS, Stopwatch
from benchmarks.peers import JetStreamPublishers, RedisClients, Server, free_port

__all__ = ["races"]

TOPIC = "bench.default.orders"
CONNECTIONS = 100
BATCH = 100
READERS = 100
UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6}
SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local bodies = {}
for line in io.lines("%s") do bodies[#bodies + 1] = line end
local turn = 0
request = function()
  turn = turn %% #bodies + 1
  return wrk.format(nil, nil, nil, bodies[turn])
end
"""


class Wrk(Contender):
    """A server under wrk: 100 connections, each sending one request after the other."""

    def __init__(self, name: str, options: Options, per_request: int = 1, *, empty: bool = False) -> None:
        self.name = name
        self._options = options
        self._per_request = per_request
        self._empty = empty

    def open(self, folder: Path) -> None:
        """See ``Contender.open``."""
        found = shutil.which("wrk")
        if found is None:
            raise Missing("wrk is not installed: run `apt-get install -y wrk`.")
        self._wrk = found
        port = free_port()
        self._server = Server(empty_server(port) if self._empty else serve(folder, port), folder, port)
        try:
            path = "/v1/bus/publish" + ("/batch" if self._per_request > 1 else "")
            self._url = f"http://127.0.0.1:{port}{path}"
            if not self._empty:
                make_topic(port)
            bodies = folder / "bodies"
            bodies.write_text("\n".join(self._bodies()) + "\n", encoding="utf-8")
            self._script = folder / "post.lua"
            self._script.write_text(SCRIPT % bodies.resolve(), encoding="utf-8")
            self._load(self._options.pick(3.0, 1.0))
        except BaseException:
            self._server.end()
            raise

    def _bodies(self) -> list[str]:
        events = [f'{{"topic": "{TOPIC}", "payload": {payload.decode()}}}' for payload in PAYLOADS]
        if self._per_request == 1:
            return events
        step = self._per_request
        return [f'{{"events": [{", ".join(events[start : start + step])}]}}' for start in range(0, len(events), step)]

    def run(self) -> dict[str, float]:
        """See ``Contender.run``."""
        return self._load(self._options.pick(3.0, 1.0))

    def _load(self, seconds: float) -> dict[str, float]:
        command = [self._wrk, "-t1", f"-c{CONNECTIONS}", f"-d{max(round(seconds), 1)}s", "--latency"]
        said = subprocess.run(
            [*command, "-s", str(self._script), self._url], check=True, capture_output=True, text=True
        ).stdout
        rate = re.search(r"Requests/sec:\s+([\d.]+)", said)
        half = re.search(r"50%\s+([\d.]+)(us|ms|s)", said)
        assert rate is not None, said
        assert half is not None, said
        assert "Non-2xx" not in said, said
        return {"events_s": float(rate[1]) * self._per_request, "p50_us": float(half[1]) * UNITS[half[2]]}

    def close(self) -> None:
        """See ``Contender.close``."""
        self._server.end()


def serve(folder: Path, port: int) -> list[str]:
    """Return what starts our server on a folder."""
    postbus = shutil.which("postbus", path=sysconfig.get_path("scripts"))
    assert postbus is not None
    return [postbus, "serve", "--data", str(folder / "data"), "--port", str(port)]


def empty_server(port: int) -> list[str]:
    """Return what starts the server that does nothing."""
    return [sys.executable, "-m", "benchmarks.empty_server", str(port)]


def make_topic(port: int) -> None:
    """Register the topic that is published to."""
    namespace, tenant, name = TOPIC.split(".")
    body = {"namespace": namespace, "tenant": tenant, "name": name}
    httpx2.post(f"http://127.0.0.1:{port}/v1/bus/topics", json=body).raise_for_status()


class Wire:
    """One kept-alive connection that speaks just enough HTTP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int) -> Wire:
        """Connect to the server."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 24))

    async def post(self, path: str, body: bytes) -> Any:
        """Send a body and return the decoded answer."""
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self.writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await self.reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in answer.split(b"\r\n", 1)[0], answer
        length = re.search(rb"(?i)content-length: (\d+)", answer)
        assert length is not None
        return json.loads(await self.reader.readexactly(int(length[1])))

    async def stream(self, path: str) -> None:
        """Ask for a stream of events and read the head of the answer."""
        self.writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n".encode())
        answer = await self.reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in answer.split(b"\r\n", 1)[0], answer

    def close(self) -> None:
        """Close the connection."""
        self.writer.close()


class Served(AsyncContender):
    """Our server with clients on this side."""

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(name, list(loops().values())[-1])
        self._options = options
        self._server: Server | None = None
        self._wires: list[Wire] = []

    async def start(self, folder: Path) -> None:
        """See ``Contender.open``."""
        self._port = free_port()
        self._server = await asyncio.to_thread(Server, serve(folder, self._port), folder, self._port)
        await asyncio.to_thread(make_topic, self._port)
        await self.connect()
        await self.turn()

    async def connect(self) -> None:
        """Prepare the clients."""

    async def wire(self) -> Wire:
        """Return a new connection."""
        made = await Wire.open(self._port)
        self._wires.append(made)
        return made

    async def publish(self, wire: Wire, events: int) -> None:
        """Publish so many events in batches."""
        for start in range(0, events, BATCH):
            batch = [PAYLOADS[number % len(PAYLOADS)].decode() for number in range(start, min(start + BATCH, events))]
            made = ", ".join(f'{{"topic": "{TOPIC}", "payload": {payload}}}' for payload in batch)
            await wire.post("/v1/bus/publish/batch", f'{{"events": [{made}]}}'.encode())

    async def stop(self) -> None:
        """See ``Contender.close``."""
        for wire in self._wires:
            wire.close()
        if self._server is not None:
            await asyncio.to_thread(self._server.end)


class FanOut(Served):
    """Readers over SSE that each get every event, and one that publishes."""

    async def connect(self) -> None:
        """Open the streams."""
        self._publisher = await self.wire()
        self._readers = [await self.wire() for _ in range(READERS)]
        for number, reader in enumerate(self._readers):
            await reader.stream(f"/v1/bus/subscribe/reader{number}?topic={TOPIC}&from=latest")

    async def turn(self) -> dict[str, float]:
        """See ``Contender.run``."""
        events = self._options.pick(5_000, 500)
        watch = Stopwatch()
        reading = [asyncio.create_task(self._read(reader, events)) for reader in self._readers]
        await self.publish(self._publisher, events)
        await asyncio.gather(*reading)
        return watch.rate(events * READERS)

    @staticmethod
    async def _read(wire: Wire, events: int) -> None:
        seen, rest = 0, b""
        while seen < events:
            piece = rest + await wire.reader.read(1 << 20)
            seen += piece.count(b"event: bus.message")
            rest = piece[-17:] if not piece.endswith(b"event: bus.message") else b""


class PullAck(Served):
    """Clients that pull events and ack them by lease."""

    async def connect(self) -> None:
        """Register the subscription."""
        namespace, tenant, _ = TOPIC.split(".")
        body = {"id": "bench", "topic": TOPIC, "namespace": namespace, "tenant": tenant, "starting_offset": "earliest"}
        url = f"http://127.0.0.1:{self._port}/v1/bus/subscriptions"
        (await asyncio.to_thread(httpx2.post, url, json=body)).raise_for_status()
        self._path = f"/v1/bus/subscriptions/{namespace}/{tenant}/bench"
        self._publisher = await self.wire()
        self._pullers = [await self.wire() for _ in range(8)]

    async def turn(self) -> dict[str, float]:
        """See ``Contender.run``."""
        events = self._options.pick(20_000, 1_000)
        await self.publish(self._publisher, events)
        watch, done = Stopwatch(), 0

        async def puller(wire: Wire) -> None:
            nonlocal done
            while done < events:
                found = (await wire.post(f"{self._path}/pull", b'{"limit": 100, "wait_ms": 100}'))["events"]
                if found:
                    leases = json.dumps({"lease_ids": [event["lease_id"] for event in found]})
                    await wire.post(f"{self._path}/ack", leases.encode())
                    done += len(found)

        await asyncio.gather(*(puller(wire) for wire in self._pullers))
        return watch.rate(events)


def races(options: Options) -> list[Race]:
    """Return the races of the suite."""
    return [_publish(options), _consume(options)]


def _publish(options: Options) -> Race:
    ours, batches, empty = "Postbus, one event", f"Postbus, batches of {BATCH}", "empty Starlette + msgspec route"
    loop = list(loops().values())[-1]
    peers: list[Contender] = [
        JetStreamPublishers("NATS JetStream, 100 publishers", options, loop),
        RedisClients("Redis Streams, 100 clients", options, loop),
    ]
    contenders: list[Contender] = [
        Wrk(ours, options),
        Wrk(empty, options, empty=True),
        Wrk(batches, options, BATCH),
        *peers,
    ]
    measures = [
        Measure("publish over HTTP, FULL", "events_s", ours, empty, at_least=0.5),
        Measure("publish over HTTP, p50 at 100 connections", "p50_us", ours, empty, "µs"),
        Measure("publish in batches over HTTP, FULL", "events_s", batches, empty),
        *(Measure("publish over HTTP, FULL", "events_s", ours, peer.name) for peer in peers),
        *(Measure("publish in batches over HTTP, FULL", "events_s", batches, peer.name) for peer in peers),
    ]
    return Race("publish", "100 connections, each publishing 500-byte events one after the other", contenders, measures)


def _consume(options: Options) -> Race:
    fan, pull = f"SSE to {READERS} readers", "pull and ack"
    contenders: list[Contender] = [FanOut(fan, options), PullAck(pull, options)]
    measures = [
        Measure("deliveries over SSE", "events_s", fan, unit="deliveries/s"),
        Measure("pull and ack, 8 clients, 100 at a time", "events_s", pull, unit="events/s"),
    ]
    return Race("consume", "reading what was published over HTTP", contenders, measures)
