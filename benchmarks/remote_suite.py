"""The suite "remote": what a log on NATS or Kafka costs, against the bare client doing the same in the same run."""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
import uuid
from typing import TYPE_CHECKING, Any, Final

import msgspec

from benchmarks.harness import Contender, Measure, Options, Race
from benchmarks.load import DRAFTS, PAYLOADS
from benchmarks.remote_work import BATCH, Work
from postbus.bus import EventBus
from postbus.bus.opening import open_node
from postbus.clock import SystemClock
from postbus.log.address import open_upstream, parse_address
from postbus.log.replica import ReplicaLog

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from postbus.log.upstream import Upstream
    from postbus.model import Draft
    from tools.services import Server

__all__ = ["races"]

STREAM: Final = "bench.default.orders"
HEADER: Final = msgspec.json.encode(
    ["bench.orders.created", "bench:load", "", None, None, None, None, None, 1_700_000_000_000_000, "trusted", "x" * 32]
).decode()  # facts as an event of ours has them; who reads decodes them
LEAST: Final = 0.7
KINDS: Final = {"nats": "NATS", "kafka": "Kafka"}
WORKS: Final = {
    "one": "one publisher that awaits every acknowledgement",
    "publishers": "100 publishers, each awaiting every acknowledgement",
    "batches": f"{BATCH:,} events at once, then their acknowledgements",
    "reading": f"everything, from the first event on, {BATCH:,} at a time",
    "through": "100 publishers and one handler: until it was given everything",
}


def races(options: Options) -> list[Race]:
    """Return the races of the suite."""
    return [_race(options, kind, work) for kind in KINDS for work in WORKS]


def _race(options: Options, kind: str, work: str) -> Race:
    log, node = f"log on {KINDS[kind]}", f"node on {KINDS[kind]}"
    bare = "bare nats-py" if kind == "nats" else "bare confluent-kafka"
    other = BareNats if kind == "nats" else BareKafka
    contenders: list[Contender] = [other(bare, options, kind, work)]
    title = f"{KINDS[kind]}: {work}"
    measures = []
    if work != "through":
        contenders.append(RemoteLog(log, options, kind, work))
        measures.append(Measure(title, "events_s", log, bare, at_least=LEAST))
    if work != "reading":
        contenders.append(Node(node, options, kind, work))
        measures.append(Measure(title, "events_s", node, bare, at_least=LEAST if work == "through" else None))
    measures += [Measure(f"{title}, CPU", "cpu_us", one.name, bare, "µs/event") for one in contenders[1:]]
    return Race(f"{kind}-{work}", WORKS[work], contenders, measures)


def _fresh(word: str) -> str:
    return f"{word}{uuid.uuid4().hex[:12]}"


def _url(server: Server, kind: str, folder: Path) -> str:
    logging.getLogger("postbus.log.kafka").setLevel(logging.ERROR)  # it warns that Kafka does not sync; here for nobody
    synced = "&sync=always" if kind == "nats" else ""
    return f"{server.url}/{_fresh('b')}?answer_s=60{synced}&data={folder / 'node'}"


class RemoteLog(Work):
    """The log's own half on the remote, without a copy of it: what the bare client does."""

    _upstream: Upstream | None = None

    async def connect(self, server: Server, folder: Path) -> None:
        """See ``Work.connect``."""
        (folder / "node").mkdir()
        self._clock = SystemClock()
        remote = parse_address(_url(server, self.kind, folder)).remote
        assert remote is not None
        self._upstream = await open_upstream(remote, self._clock, str(folder / "node"))
        self._stream = await self._upstream.ensure_stream(STREAM)

    async def put(self, number: int) -> None:
        """See ``Work.put``."""
        await self._append([DRAFTS[number % len(DRAFTS)]])

    async def put_batch(self) -> None:
        """See ``Work.put_batch``."""
        await self._append(DRAFTS[:BATCH])

    async def _append(self, drafts: list[Draft]) -> None:
        assert self._upstream is not None
        clock = self._clock
        await self._upstream.append(self._stream, drafts, [clock.new_id() for _ in drafts], clock.now_us())

    async def read(self, count: int) -> None:
        """See ``Work.read``: by position."""
        assert self._upstream is not None
        at = 0
        while at < count:
            at += len(await self._upstream.fetch(self._stream, 0, at, BATCH))

    async def stop(self) -> None:
        """See ``Contender.close``."""
        if self._upstream is not None:
            await self._upstream.close()


class Node(Work):
    """A node on the remote, which brings its copy up to date meanwhile, in the same process."""

    _log: ReplicaLog | None = None
    _bus: EventBus | None = None

    async def connect(self, server: Server, folder: Path) -> None:
        """See ``Work.connect``."""
        url = _url(server, self.kind, folder)
        if self.work == "through":
            self._bus = EventBus(url)
            self._bus.subscribe("bench.>", self._handle, subscriber_id="counter", start="earliest")
            await self._bus.start()
            return
        log = await open_node(parse_address(url))
        assert isinstance(log, ReplicaLog)
        self._log = log
        await log.ensure_stream(STREAM)

    async def _handle(self, _event: Any) -> None:
        self.handle()

    async def put(self, number: int) -> None:
        """See ``Work.put``."""
        if self._bus is not None:
            receipt = await self._bus.publish("bench.orders.created", "bench:load", PAYLOADS[number % len(PAYLOADS)])
            assert not receipt.spooled
        elif self._log is not None:
            await self._log.append(STREAM, [DRAFTS[number % len(DRAFTS)]])

    async def put_batch(self) -> None:
        """See ``Work.put_batch``."""
        assert self._log is not None
        await self._log.append(STREAM, DRAFTS[:BATCH])

    async def read(self, count: int) -> None:
        """See ``Work.read``; a node reads its copy, which is another race."""
        raise NotImplementedError

    async def settle(self) -> None:
        """See ``Work.settle``: the copy catches up."""
        if self._log is not None:
            await self._log.get_stream_stats(STREAM)

    async def stop(self) -> None:
        """See ``Contender.close``."""
        if self._bus is not None:
            await self._bus.stop()
        if self._log is not None:
            await self._log.close()


class BareNats(Work):
    """nats-py with JetStream: a stream on files, the consumer acks every message."""

    _connections: list[Any]

    async def connect(self, server: Server, folder: Path) -> None:
        """See ``Work.connect``."""
        del folder
        nats, self._api = importlib.import_module("nats"), importlib.import_module("nats.js.api")
        self._connections = [await nats.connect(server.url), await nats.connect(server.url)]
        self._jetstream, consuming = (link.jetstream() for link in self._connections)
        self._name = _fresh("bare")
        stream = self._api.StreamConfig(name=self._name, subjects=[self._name], storage=self._api.StorageType.FILE)
        await self._jetstream.add_stream(stream)
        if self.work == "through":
            await consuming.subscribe(self._name, durable="counter", cb=self._handle, manual_ack=True)

    async def _handle(self, message: Any) -> None:
        await message.ack()
        self.handle()

    async def put(self, number: int) -> None:
        """See ``Work.put``."""
        await self._jetstream.publish(self._name, PAYLOADS[number % len(PAYLOADS)], headers={"facts": HEADER})

    async def put_batch(self) -> None:
        """See ``Work.put_batch``."""
        send = self._jetstream.publish_async
        sent = [await send(self._name, payload, headers={"facts": HEADER}) for payload in PAYLOADS[:BATCH]]
        await asyncio.gather(*sent)

    async def read(self, count: int) -> None:
        """See ``Work.read``."""
        config = self._api.ConsumerConfig(ack_policy=self._api.AckPolicy.NONE, mem_storage=True)
        reader = await self._jetstream.pull_subscribe("", stream=self._name, config=config)
        found = 0
        while found < count:
            for message in await reader.fetch(BATCH):
                _ = message.data, msgspec.json.decode(message.headers["facts"])
                found += 1
        await reader.unsubscribe()

    async def stop(self) -> None:
        """See ``Contender.close``."""
        for link in getattr(self, "_connections", []):
            await link.close()


class BareKafka(Work):
    """confluent-kafka: an idempotent producer with ``acks=all``, the consumer commits what it was given."""

    _threads: tuple[threading.Thread, ...] = ()

    async def connect(self, server: Server, folder: Path) -> None:
        """See ``Work.connect``."""
        del folder
        self._kafka = importlib.import_module("confluent_kafka")
        admin = importlib.import_module("confluent_kafka.admin")
        self._common = {"bootstrap.servers": server.address, "log_level": 0}
        self._topic = _fresh("bare")
        client = admin.AdminClient(self._common)
        made = client.create_topics([admin.NewTopic(self._topic, 1, 1)])
        await asyncio.to_thread(made[self._topic].result)
        self._producer = self._kafka.Producer({**self._common, "enable.idempotence": True, "linger.ms": 0})
        self._producer.list_topics(self._topic)
        self._ended = threading.Event()
        self._loop = asyncio.get_running_loop()
        jobs = (self._poll, self._consume) if self.work == "through" else (self._poll,)
        self._threads = tuple(threading.Thread(target=job, daemon=True) for job in jobs)
        for thread in self._threads:
            thread.start()

    @property
    def _settings(self) -> dict[str, Any]:
        # As our reader does it: by default the client rests for a second whenever it has read 64 MB ahead.
        ahead = {"fetch.queue.backoff.ms": 10, "fetch.message.max.bytes": 4 << 20, "fetch.max.bytes": 32 << 20}
        return {**self._common, **ahead, "group.id": self._topic, "enable.auto.commit": False}

    def _reader(self) -> Any:
        reader = self._kafka.Consumer(self._settings)
        reader.assign([self._kafka.TopicPartition(self._topic, 0, 0)])
        return reader

    def _consume(self) -> None:
        reader = self._reader()
        while not self._ended.is_set():
            found = reader.consume(BATCH, 0.005)
            for message in found:
                self._give(message)
            if found:
                reader.commit(message=found[-1], asynchronous=True)
                self._loop.call_soon_threadsafe(self.handle, len(found))
        reader.close()

    def _give(self, message: Any) -> None:
        """Be the handler, which is given the payload and the facts of one event."""
        _ = message.value(), msgspec.json.decode(message.headers()[0][1]), message.timestamp()

    def _produce(self, number: int, told: Callable[..., Any] | None = None) -> None:
        payload = PAYLOADS[number % len(PAYLOADS)]
        self._producer.produce(self._topic, payload, headers=[("facts", HEADER)], on_delivery=told)

    def _poll(self) -> None:
        while not self._ended.is_set():
            self._producer.poll(0.1)

    async def put(self, number: int) -> None:
        """See ``Work.put``: as the client's own example for asyncio does it."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self._produce(number, lambda _error, message: loop.call_soon_threadsafe(answer.set_result, message.offset()))
        await answer

    async def put_batch(self) -> None:
        """See ``Work.put_batch``."""
        for number in range(BATCH):
            self._produce(number)
        self._producer.flush()

    async def read(self, count: int) -> None:
        """See ``Work.read``: with the client's own reader for asyncio, which does not block the loop either."""
        reader, found = importlib.import_module("confluent_kafka.aio").AIOConsumer(self._settings), 0
        await reader.assign([self._kafka.TopicPartition(self._topic, 0, 0)])
        while found < count:
            for message in await reader.consume(BATCH, 1.0):
                self._give(message)
                found += 1
        await reader.close()

    async def stop(self) -> None:
        """See ``Contender.close``."""
        for thread in self._threads:
            self._ended.set()
            await asyncio.to_thread(thread.join)
