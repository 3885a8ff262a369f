"""Peers that call handlers: Redis Streams with a consumer group, FastStream over JetStream, huey, and bubus.

What each promises when a handler is done differs, and is said at each. None promises more than Postbus does.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.handling import PATIENCE_S, PUBLISHERS, Handling, Loop
from benchmarks.harness import Missing, Options
from benchmarks.peers import Server, free_port, how_to_get, nats_server, redis_server

__all__ = ["BubusHandling", "FastStreamHandling", "HueyHandling", "RedisHandling"]

STREAM = "orders"
CONSUMER = "counter"
READ_AT_ONCE = 100
POLL_S = 0.001
BUBUS_QUEUE = 40


class PeerHandling(Handling):
    """A peer that may not be installed."""

    peer: str

    def __init__(self, name: str, options: Options, loop: Loop = None) -> None:
        super().__init__(name, options, loop)
        self._connected = False
        self._server: Server | None = None

    async def start(self, folder: Path) -> None:
        """See ``Contender.open``."""
        reason = how_to_get(self.peer)
        if reason is not None:
            raise Missing(reason)
        await self.connect(folder)
        self._connected = True
        await self.warm()

    async def stop(self) -> None:
        """See ``Contender.close``."""
        try:
            if self._connected:
                await self.disconnect()
        finally:
            if self._server is not None:
                self._server.end()

    async def connect(self, folder: Path) -> None:
        """Get ready to publish and to consume."""
        raise NotImplementedError

    async def disconnect(self) -> None:
        """Let go of what ``connect`` got."""
        raise NotImplementedError


class RedisHandling(PeerHandling):
    """Redis Streams, AOF synced always: 100 connections await every XADD, one reads 100 and acks them at once."""

    peer = "Redis Streams"

    async def connect(self, folder: Path) -> None:
        """See ``PeerHandling.connect``."""
        port = free_port()
        self._server = Server(redis_server(folder, port), folder, port)
        redis = importlib.import_module("redis.asyncio")
        self._clients: list[Any] = []
        for _ in range(PUBLISHERS + 1):
            client = redis.Redis(host="127.0.0.1", port=port, single_connection_client=True, socket_timeout=None)
            self._clients.append(client)
            await client.ping()
        await self._clients[-1].xgroup_create(STREAM, CONSUMER, id="0", mkstream=True)
        self._task = asyncio.get_running_loop().create_task(self._consume())

    async def disconnect(self) -> None:
        """See ``PeerHandling.disconnect``."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for client in self._clients:
            await client.aclose()

    async def _consume(self) -> None:
        client = self._clients[-1]
        while True:
            found = await client.xreadgroup(CONSUMER, CONSUMER, {STREAM: ">"}, count=READ_AT_ONCE, block=0)
            for _, entries in found:
                ids = []
                for number, _fields in entries:
                    await self._handle()
                    ids.append(number)
                await client.xack(STREAM, CONSUMER, *ids)

    async def _handle(self) -> None:
        self.note()

    async def publish(self, number: int) -> None:
        """See ``Handling.publish``."""
        await self._clients[number].xadd(STREAM, {"payload": self.payload()})

    async def nothing_left(self) -> bool:
        """See ``Handling.nothing_left``."""
        groups = await self._clients[0].xinfo_groups(STREAM)
        return int(groups[0]["pending"]) == 0


class FastStreamHandling(PeerHandling):
    """FastStream over NATS JetStream, synced always; 100 tasks publish, one durable subscriber that acks each.

    Its acks are sent, not confirmed one by one; the clock runs until the server has them all.
    """

    peer = "FastStream"

    async def connect(self, folder: Path) -> None:
        """See ``PeerHandling.connect``."""
        port = free_port()
        self._server = Server(nats_server(folder, port), folder, port)
        nats, api = importlib.import_module("faststream.nats"), importlib.import_module("nats.js.api")
        self._broker = nats.NatsBroker(f"nats://127.0.0.1:{port}", logger=None)
        stream = nats.JStream(STREAM, storage=api.StorageType.FILE)
        self._broker.subscriber(STREAM, stream=stream, durable=CONSUMER)(self._handle)
        await self._broker.start()
        client = importlib.import_module("nats")
        self._asking = await client.connect(f"nats://127.0.0.1:{port}")

    async def disconnect(self) -> None:
        """See ``PeerHandling.disconnect``."""
        await self._asking.close()
        await self._broker.stop()

    async def _handle(self, _body: bytes) -> None:
        self.note()

    async def publish(self, number: int) -> None:
        """See ``Handling.publish``."""
        del number
        await self._broker.publish(self.payload(), STREAM, stream=STREAM)

    async def nothing_left(self) -> bool:
        """See ``Handling.nothing_left``."""
        consumer = await self._asking.jetstream().consumer_info(STREAM, CONSUMER)
        return int(consumer.num_pending) == 0 and int(consumer.num_ack_pending) == 0


class HueyHandling(PeerHandling):
    """huey on SQLite with ``fsync=True``: 100 threads that enqueue, one worker thread.

    A task is taken off the queue before it runs, so one that is under way when the process dies is lost. Its worker
    polls; it is told to do so every millisecond, where its default is 100 ms and growing.
    """

    peer = "huey"

    async def connect(self, folder: Path) -> None:
        """See ``PeerHandling.connect``."""
        huey = importlib.import_module("huey")
        self._huey = huey.SqliteHuey("bench", filename=str(folder / "huey.db"), fsync=True, results=False)
        self._task = self._huey.task()(self._handle)
        self._entered = threading.Event()

    async def disconnect(self) -> None:
        """See ``PeerHandling.disconnect``."""
        self._huey.storage.close()

    async def attach(self) -> None:
        """Start the worker, which polls and would disturb others between its turns."""
        self._consumer = self._huey.create_consumer(
            workers=1, periodic=False, initial_delay=POLL_S, max_delay=POLL_S, check_worker_health=False
        )
        self._consumer._set_signal_handlers = lambda: None  # signals are the benchmark's
        self._consumer.start()

    async def detach(self) -> None:
        """Stop the worker."""
        self._consumer.stop(graceful=True)

    def _handle(self, _payload: bytes) -> None:
        self.note()
        self._entered.set()

    async def publish(self, number: int) -> None:
        """See ``Handling.publish``; blocks, there is nobody else on this loop."""
        del number
        self._entered.clear()
        self._task(self.payload())

    async def entry(self) -> None:
        """See ``Handling.entry``."""
        assert self._entered.wait(PATIENCE_S)

    async def saturate(self, over: Callable[[], bool]) -> int:
        """See ``Handling.saturate``."""
        counts = [0] * PUBLISHERS
        lock = threading.Lock()

        def publisher(number: int) -> None:
            while True:
                with lock:
                    payload = self.payload()
                self._task(payload)
                counts[number] += 1
                if over():
                    return

        threads = [threading.Thread(target=publisher, args=(number,)) for number in range(PUBLISHERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts)

    async def nothing_left(self) -> bool:
        """See ``Handling.nothing_left``."""
        return int(self._huey.storage.queue_size()) == 0


class BubusHandling(PeerHandling):
    """bubus with its write-ahead log, which despite its name is written after the handlers, and never synced.

    An event waits in memory and is lost with the process: there is no durability to compare. Its queue takes 50 events
    at most, so of the 100 publishers 40 at a time wait for theirs to be handled and written.
    """

    peer = "bubus"

    async def connect(self, folder: Path) -> None:
        """See ``PeerHandling.connect``."""
        bubus = importlib.import_module("bubus")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._event = type("OrderCreated", (bubus.BaseEvent,), {"__annotations__": {"payload": str}})
        self._wal = folder / "wal.jsonl"
        self._bus = bubus.EventBus(name="Bench", wal_path=self._wal)
        self._bus.on("OrderCreated", self._handle)
        self._room = asyncio.Semaphore(BUBUS_QUEUE)

    async def disconnect(self) -> None:
        """See ``PeerHandling.disconnect``."""
        await self._bus.stop(clear=True)

    async def _handle(self, _event: Any) -> None:
        self.note()

    async def publish(self, number: int) -> None:
        """See ``Handling.publish``; ``dispatch`` returns at once, an event that is awaited is handled and written."""
        del number
        async with self._room:
            await self._bus.dispatch(self._event(payload=self.payload().decode()))

    async def nothing_left(self) -> bool:
        """See ``Handling.nothing_left``."""
        await self._bus.wait_until_idle()
        return True
