"""Which streams there are: one topic with a record for every making and every deletion, decided by its order.

The first record that makes a name makes it; a later one finds it made. So of many who make a stream at once, on any
machine, one does, and everybody who reads the topic knows which.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from confluent_kafka import KafkaError

from postbus.log.kafka import names
from postbus.log.kafka.extents import offsets
from postbus.log.kafka.link import END, NewTopic
from postbus.log.kafka.posting import Record
from postbus.log.kafka.reading import Trimmed
from postbus.model import NotFound, Refused, Stream, StreamSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from postbus.log.kafka.link import Link
    from postbus.log.kafka.reading import Entry, Reader

__all__ = ["Registry", "make_topic"]


class _Made(msgspec.Struct, tag="made", frozen=True):
    name: str
    settings: StreamSettings
    at_us: int


class _Deleted(msgspec.Struct, tag="deleted", frozen=True):
    name: str
    epoch: int


_decode = msgspec.json.Decoder(_Made | _Deleted).decode


async def make_topic(link: Link, name: str, partitions: int, replicas: int, config: dict[str, str]) -> None:
    """Make a topic unless it is there. Raises ``Refused`` when Kafka will not have it."""
    wanted = NewTopic(name, partitions, replicas, config=config)
    said = (await link.ask(lambda admin: admin.create_topics([wanted], request_timeout=link.answer_s)))[name]
    if isinstance(said, KafkaError) and said.code() != KafkaError.TOPIC_ALREADY_EXISTS:
        raise Refused(f"Kafka does not make the topic {name}: {said.str()}")
    await link.led(name, partitions)


class Registry:
    """The streams as the topic has them; ``gone`` is called when one is deleted."""

    def __init__(self, link: Link, reader: Reader, prefix: str, replicas: int, gone: Callable[[Stream], None]) -> None:
        self._link = link
        self._reader = reader
        self._topic = names.registry_topic(prefix)
        self._replicas = replicas
        self._gone = gone
        self._streams: dict[str, Stream] = {}
        self._epochs: dict[str, int] = {}
        self._next = 0
        self._made = False
        self._lock = asyncio.Lock()

    def get(self, name: str) -> Stream | None:
        """Return a stream as it was known at the last ``refresh``."""
        return self._streams.get(name)

    def all(self) -> list[Stream]:
        """Return all streams, by name, as at the last ``refresh``."""
        return [self._streams[name] for name in sorted(self._streams)]

    async def refresh(self) -> None:
        """Read everything that was decided before this call."""
        while True:
            if not self._made:
                await make_topic(self._link, self._topic, 1, self._replicas, names.REGISTRY)
                self._made = True
            ends = await offsets(self._link, self._topic, [0], END)
            if ends is not None:
                break
            self._made = False
        async with self._lock:
            try:
                if self._next < ends[0]:
                    self._apply(await self._reader.read(self._topic, 0, self._next, ends[0]))
            except Trimmed:
                raise Refused(f"the topic {self._topic} was cut off: it says which streams there are") from None

    async def make(self, name: str, settings: StreamSettings, now_us: int) -> Stream:
        """Decide that a stream is there, and return it as it was decided."""
        return await self._decided(_Made(name, settings, now_us), name) or await self.make(name, settings, now_us)

    async def delete(self, stream: Stream) -> None:
        """Decide that a stream is gone. Raises ``NotFound`` when somebody else did."""
        await self.refresh()
        if self._streams.get(stream.name) != stream:
            raise NotFound(f"there is no stream {stream.name}")
        await self._decided(_Deleted(stream.name, stream.epoch), stream.name)

    async def _decided(self, decision: _Made | _Deleted, name: str) -> Stream | None:
        record: Record = (self._topic, 0, msgspec.json.encode(decision), {}, name.encode())
        sending = await self._link.send([record])
        said = sending.outcomes[0]
        if isinstance(said, KafkaError):
            raise self._link.lost(said.str())
        await self.refresh()
        return self._streams.get(name)

    def _apply(self, entries: Sequence[Entry]) -> None:
        for message in entries:
            self._next += 1
            try:
                decision = _decode(message.value() or b"") if message is not None else None
            except msgspec.MsgspecError:  # not ours
                continue
            if isinstance(decision, _Made):
                self._take_made(decision)
            elif isinstance(decision, _Deleted):
                self._take_deleted(decision)

    def _take_made(self, made: _Made) -> None:
        if made.name not in self._streams:
            epoch = self._epochs.get(made.name, -1) + 1
            self._epochs[made.name] = epoch
            self._streams[made.name] = Stream(made.name, made.settings, epoch, made.at_us)

    def _take_deleted(self, deleted: _Deleted) -> None:
        stream = self._streams.get(deleted.name)
        if stream is not None and stream.epoch == deleted.epoch:
            del self._streams[deleted.name]
            self._gone(stream)
