"""A log on Kafka: a stream is a topic, a partition a partition, an offset Kafka's own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import TYPE_CHECKING
from zlib import crc32

from confluent_kafka import KafkaError, TopicPartition

from postbus.clock import SystemClock
from postbus.log.heads import choose_partition
from postbus.log.kafka import names
from postbus.log.kafka.appending import Call, Line
from postbus.log.kafka.extents import offsets
from postbus.log.kafka.groups import Groups
from postbus.log.kafka.identities import Identities
from postbus.log.kafka.link import END, FIRST, GONE, ConfigResource, Link, ResourceType
from postbus.log.kafka.reading import Trimmed
from postbus.log.kafka.records import carried_of, record_of
from postbus.log.kafka.registry import Registry, make_topic
from postbus.log.kafka.repeats import Repeats
from postbus.log.kafka.sharing import SharedReader
from postbus.log.settings import check_settings
from postbus.model import (
    Draft,
    Durability,
    Invalid,
    LimitExceeded,
    NotFound,
    OffsetOutOfRange,
    PostbusError,
    Receipt,
    Refused,
    StreamSettings,
    Unreachable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from postbus.clock import Clock
    from postbus.model import Event, Stream

__all__ = ["Kafka"]

FIND_PAGE = 5_000
ATTEMPTS = 20
ANSWER_S = 5.0
STILL_S = 0.5
_TOO_LARGE = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE, KafkaError.RECORD_LIST_TOO_LARGE}
_REFUSALS = {
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
}
_CONFIGURABLE = ("security.", "sasl.", "ssl.", "client.")
_log = logging.getLogger(__name__)


class Kafka:
    """See ``Upstream``.

    ``replicas``: copies of each topic we make. ``synced``: make topics whose records Kafka fsyncs before it
    acknowledges them. ``data``: a folder for the index of identities; without it every process reads the stream anew.
    ``config``: settings of the client for TLS and authentication (``security.protocol``, ``sasl.…``, ``ssl.…``).
    """

    def __init__(
        self,
        address: str,
        prefix: str = "postbus",
        *,
        answer_s: float = ANSWER_S,
        replicas: int = 1,
        synced: bool = False,
        clock: Clock | None = None,
        data: str | None = None,
        config: Mapping[str, str] | None = None,
    ) -> None:
        for name in config or {}:
            if not name.startswith(_CONFIGURABLE):
                raise Invalid(f"{name} is not a setting of the connection", hint=f"it begins with {_CONFIGURABLE}")
        self.url = f"kafka://{address}"
        self.prefix = prefix
        self.answer_s = answer_s
        self._replicas = replicas
        self._synced = synced
        self._link = Link(address, answer_s, clock or SystemClock(), config or {})
        self._tail = SharedReader(self._link, 20)
        self._scout = SharedReader(self._link, 5)
        self._registry = Registry(self._link, self._tail, prefix, replicas, self._gone)
        self._identities = Identities(self._link, self._scout, prefix, replicas, data)
        self._repeats = Repeats(self._scout)
        self._groups = Groups(self._link)
        self._lines: dict[tuple[str, int], Line] = {}
        self._durability: dict[str, Durability] = {}
        self._turn = itertools.count()
        self._warned = False

    # --- streams ---

    async def ensure_stream(self, name: str, settings: StreamSettings | None = None) -> Stream:
        """See ``Upstream.ensure_stream``."""
        await self._registry.refresh()
        stream = self._registry.get(name)
        if stream is None:
            wanted = check_settings(settings or StreamSettings())
            stream = await self._registry.make(name, wanted, self._link.clock.now_us())
        await self._made(stream)
        return stream

    async def streams(self) -> list[Stream]:
        """See ``Upstream.streams``."""
        await self._registry.refresh()
        return self._registry.all()

    async def delete_stream(self, name: str) -> None:
        """See ``Upstream.delete_stream``."""
        await self._registry.refresh()
        stream = self._registry.get(name)
        if stream is None:
            raise NotFound(f"there is no stream {name}")
        await self._registry.delete(stream)
        topic = names.topic_of(self.prefix, stream)
        topics = [topic, names.identities_topic(topic)]
        await self._link.ask(lambda admin: admin.delete_topics(topics, request_timeout=self.answer_s))

    async def _made(self, stream: Stream) -> None:
        """See to it that the topic is there: whoever decided on the stream may have stopped before making it."""
        topic = names.topic_of(self.prefix, stream)
        if topic in self._durability:
            return
        config = {**names.EVENTS, **({"flush.messages": "1"} if self._synced else {})}
        if self._replicas > 2:  # noqa: PLR2004 - then one copy may be away
            config["min.insync.replicas"] = "2"
        await make_topic(self._link, topic, stream.settings.partitions, self._replicas, config)
        resource = ConfigResource(ResourceType.TOPIC, topic)
        said = (await self._link.ask(lambda admin: admin.describe_configs([resource], request_timeout=self.answer_s)))[
            resource
        ]
        if isinstance(said, KafkaError):
            if said.code() in GONE:
                raise self._missing(stream)
            raise self._link.lost(said.str())
        full = said["flush.messages"].value == "1"
        self._durability[topic] = Durability.FULL if full else Durability.RELAXED
        if not full and not self._warned:
            self._warned = True
            _log.warning(
                "Kafka at %s acknowledges before it fsyncs (flush.messages is not 1): a power cut of all copies at "
                "once can lose what was acknowledged",
                self._link.address,
            )

    async def _alive(self, stream: Stream, partition: int = 0) -> str:
        """Return the stream's topic. Raises ``NotFound``."""
        if self._registry.get(stream.name) != stream:
            await self._registry.refresh()
            if self._registry.get(stream.name) != stream:
                raise self._missing(stream)
        if not 0 <= partition < stream.settings.partitions:
            raise NotFound(f"{stream.name} has no partition {partition}")
        topic = names.topic_of(self.prefix, stream)
        if topic not in self._durability:
            await self._made(stream)
        return topic

    def _missing(self, stream: Stream) -> NotFound:
        return NotFound(f"there is no stream {stream.name} with epoch {stream.epoch}")

    def _gone(self, stream: Stream) -> None:
        topic = names.topic_of(self.prefix, stream)
        self._durability.pop(topic, None)
        self._lines.pop((stream.name, stream.epoch), None)
        for partition in range(stream.settings.partitions):
            self._tail.end(topic, partition)
            self._repeats.forget(topic, partition)

    # --- appending ---

    async def append(
        self,
        stream: Stream,
        drafts: Sequence[Draft],
        ids: Sequence[str],
        now_us: int,
        partition: int | None = None,
    ) -> list[Receipt]:
        """See ``Upstream.append``."""
        if not drafts:
            return []
        topic = await self._alive(stream)
        if any(draft.native_id is not None for draft in drafts):
            return await self._identified(stream, topic, Call(drafts, ids, now_us, partition))
        if stream.settings.partitions == 1:
            partition = 0
        places = [self._place(stream, draft) for draft in drafts] if partition is None else [partition] * len(drafts)
        records = [
            record_of(topic, place, draft, append_id, now_us, None)
            for draft, place, append_id in zip(drafts, places, ids, strict=True)
        ]
        try:
            sending = await self._link.send(records, ids)
        except Unreachable:
            await self._still_there(stream)
            raise
        if sending.failed is not None:
            raise await self._refusal(sending.failed, stream, topic)
        name, durability = stream.name, self._durability.get(topic, Durability.RELAXED)
        return [
            Receipt(name, place, offset, False, durability, now_us)
            for place, offset in zip(places, sending.offsets, strict=True)
        ]

    async def _identified(self, stream: Stream, topic: str, call: Call) -> list[Receipt]:
        for draft, append_id in zip(call.drafts, call.ids, strict=True):
            record_of(topic, 0, draft, append_id, call.now_us, None)  # what is too large is refused before any is sent
        line = self._lines.get((stream.name, stream.epoch))
        if line is None:
            line = self._lines[stream.name, stream.epoch] = Line(
                self._link,
                self._identities,
                self.prefix,
                stream,
                lambda draft: self._place(stream, draft),
                lambda said: self._refusal(said, stream, topic),
            )
        line.durability = self._durability.get(topic, Durability.RELAXED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.answer_s):
                return await line.append(call)
        raise self._link.lost()

    def _place(self, stream: Stream, draft: Draft) -> int:
        partitions = stream.settings.partitions
        if draft.native_id is not None and draft.key is None:  # so that two who race for it meet in one partition
            return crc32(draft.native_id.encode()) % partitions
        return choose_partition(draft, partitions, next(self._turn) if draft.key is None else 0)

    async def _refusal(self, said: KafkaError, stream: Stream, topic: str) -> PostbusError:
        code = said.code()
        if code in GONE:
            return await self._lost_topic(stream, topic)
        if code in _TOO_LARGE:
            return LimitExceeded(
                f"Kafka takes no event of that size: {said.str()}", hint="raise max.message.bytes of its topic"
            )
        if code in _REFUSALS:
            return Refused(f"Kafka refused the event: {said.str()}")
        return self._link.lost(said.str())

    async def _still_there(self, stream: Stream) -> None:
        """After a missing answer: say when it is missing because the stream is gone."""
        with contextlib.suppress(Unreachable, TimeoutError):
            async with asyncio.timeout(STILL_S):  # whoever appends has waited for answer_s already
                await self._registry.refresh()
            if self._registry.get(stream.name) != stream:
                raise self._missing(stream)

    async def find(self, stream: Stream, ids: Sequence[str], since: Sequence[int]) -> dict[str, tuple[int, int]]:
        """See ``Upstream.find``."""
        topic = await self._alive(stream)
        line = self._lines.get((stream.name, stream.epoch))
        if line is not None:
            await line.settled(ids)
        await self._link.settled(ids)
        wanted, found = set(ids), dict[str, tuple[int, int]]()
        if not wanted:
            return found
        for partition, (first, end) in enumerate(await self.extents(stream)):
            offset = max(first, since[partition])
            while offset < end:
                upto = min(end, offset + FIND_PAGE)
                try:
                    entries = await self._scout.read(topic, partition, offset, upto)
                except Trimmed:
                    offset = max(offset, (await self.extents(stream))[partition][0])
                    continue
                for at, message in enumerate(entries, offset):
                    carried = carried_of(message)
                    if carried is not None and carried.append_id in wanted:
                        found.setdefault(carried.append_id, (partition, at))
                offset = upto
            self._scout.forget(topic, partition)
        return found

    # --- reading ---

    async def fetch(self, stream: Stream, partition: int, offset: int, limit: int) -> list[Event]:
        """See ``Upstream.fetch``."""
        topic = await self._alive(stream, partition)
        if offset < 0:
            raise OffsetOutOfRange(f"an offset is at least 0, not {offset}")
        for _ in range(ATTEMPTS):
            start, end = offset, offset + limit
            if not self._tail.has(topic, partition, offset, end):
                first, last = await self._extent(stream, topic, partition)
                self._tail.learn(topic, partition, last)
                start = max(offset, first)
                end = min(start + limit, last)
                if start >= end:
                    return []
            try:
                entries = await self._tail.read(topic, partition, start, end)
            except Trimmed:
                continue
            return await self._repeats.events(stream.name, topic, partition, start, entries)
        raise self._link.lost(f"what {topic} keeps changes faster than it is read")

    async def extents(self, stream: Stream) -> list[tuple[int, int]]:
        """See ``Upstream.extents``."""
        topic = await self._alive(stream)
        partitions = range(stream.settings.partitions)
        firsts, ends = await asyncio.gather(
            offsets(self._link, topic, partitions, FIRST),
            offsets(self._link, topic, partitions, END),
        )
        if firsts is None or ends is None:
            raise await self._lost_topic(stream, topic)
        return list(zip(firsts, ends, strict=True))

    async def _extent(self, stream: Stream, topic: str, partition: int) -> tuple[int, int]:
        firsts, ends = await asyncio.gather(
            offsets(self._link, topic, [partition], FIRST),
            offsets(self._link, topic, [partition], END),
        )
        if firsts is None or ends is None:
            raise await self._lost_topic(stream, topic)
        return firsts[0], ends[0]

    async def _lost_topic(self, stream: Stream, topic: str) -> PostbusError:
        """Return what to say when a topic is not there: the stream is gone, or not yet made again."""
        await self._registry.refresh()
        if self._registry.get(stream.name) != stream:
            return self._missing(stream)
        self._durability.pop(topic, None)
        await self._made(stream)
        return Unreachable(f"the topic {topic} was missing and is made again; try once more")

    async def wait(self, stream: Stream, partition: int, offset: int, timeout_s: float) -> bool:
        """See ``Upstream.wait``."""
        topic = await self._alive(stream, partition)
        clock = self._link.clock
        deadline = clock.monotonic_s() + timeout_s
        while self._tail.known_end(topic, partition) <= offset:
            if not self._tail.listens(topic, partition, offset):
                _, end = await self._extent(stream, topic, partition)
                if end > offset:
                    return True
                self._tail.follow(topic, partition, end)
            left = deadline - clock.monotonic_s()
            if left <= 0:
                return False
            await self._tail.heard(topic, partition, offset, left)
            await self._alive(stream, partition)
        return True

    async def trim(self, stream: Stream, partition: int, before: int) -> None:
        """See ``Upstream.trim``."""
        topic = await self._alive(stream, partition)
        first, end = await self._extent(stream, topic, partition)
        before = min(before, end)
        if before <= first:
            return
        async with self._identities.lock(topic):
            await self._identities.catch_up(stream, [before if one == partition else 0 for one in range(partition + 1)])
            await self._identities.keep(stream, partition, first, before)
        self._tail.forget(topic, partition)
        self._repeats.forget(topic, partition)
        place = TopicPartition(topic, partition, before)
        said = (await self._link.ask(lambda admin: admin.delete_records([place], request_timeout=self.answer_s)))[place]
        if isinstance(said, KafkaError) and said.code() != KafkaError.OFFSET_OUT_OF_RANGE:
            raise await self._lost_topic(stream, topic) if said.code() in GONE else self._link.lost(said.str())

    async def mirror(self, group: str, stream: Stream, nexts: Mapping[int, int]) -> None:
        """Show a reader's cursor (the next offset of each partition) as a Kafka consumer group.

        So Kafka's own tools see the lag. Nobody joins the group; nothing here reads it back. Raises ``Refused`` when
        Kafka does not want it, as for a group that has members.
        """
        topic = await self._alive(stream)
        places = [TopicPartition(topic, partition, following) for partition, following in nexts.items()]
        await self._groups.commit(group, places)

    def watch(self, came_up: Callable[[], None]) -> None:
        """See ``Upstream.watch``."""
        self._link.came_up.append(came_up)

    async def close(self) -> None:
        """See ``Upstream.close``."""
        await self._link.close()
        await asyncio.gather(self._tail.close(), self._scout.close())
        self._identities.close()
