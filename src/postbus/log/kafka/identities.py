"""Identities on Kafka: read from the log up to its end before an append decides, remembered in a topic after a trim."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from confluent_kafka import KafkaError

from postbus.log.heads import Identity
from postbus.log.kafka import names
from postbus.log.kafka.extents import offsets
from postbus.log.kafka.index import KEPT, Index, Row
from postbus.log.kafka.link import END, FIRST
from postbus.log.kafka.posting import Record
from postbus.log.kafka.reading import Trimmed
from postbus.log.kafka.records import row_of
from postbus.log.kafka.registry import make_topic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.log.kafka.link import Link
    from postbus.log.kafka.reading import Reader
    from postbus.model import Stream

__all__ = ["Identities"]

PAGE = 5_000


class _Kept(msgspec.Struct, array_like=True, frozen=True):
    native_id: str
    variant: str
    partition: int
    offset: int
    created_at_us: int
    content: bytes


_decode = msgspec.json.Decoder(_Kept).decode


class Identities:
    """The index of all streams, and what keeps it up to date."""

    def __init__(self, link: Link, reader: Reader, prefix: str, replicas: int, folder: str | None) -> None:
        self._link = link
        self._reader = reader
        self._prefix = prefix
        self._replicas = replicas
        self._folder = folder
        self._index: Index | None = None
        self._locks: dict[str, asyncio.Lock] = {}

    async def index(self) -> Index:
        """Return the table; which cluster it is for has to be asked first."""
        if self._index is None:
            cluster = await self._link.cluster()
            if self._index is None:
                self._index = Index(self._folder, cluster)
        return self._index

    def lock(self, topic: str) -> asyncio.Lock:
        """Return what serialises those who decide by the identities of a stream."""
        return self._locks.setdefault(topic, asyncio.Lock())

    async def catch_up(self, stream: Stream, ends: Sequence[int]) -> None:
        """Read each partition up to an offset; what is read stays read when it takes too long."""
        index = await self.index()
        topic = names.topic_of(self._prefix, stream)
        for partition, end in enumerate(ends):
            following = index.place(topic, partition)
            while following < end:
                (first,) = await offsets(self._link, topic, [partition], FIRST) or [end]
                if first > following:
                    await self._read_kept(index, topic)
                    following = first
                    index.add(topic, partition, following, ())
                    continue
                upto = min(end, following + PAGE)
                try:
                    entries = await self._reader.read(topic, partition, following, upto)
                except Trimmed:
                    continue
                rows = [
                    row
                    for offset, message in enumerate(entries, following)
                    if (row := row_of(partition, offset, message)) is not None
                ]
                index.add(topic, partition, upto, rows)
                following = upto
            self._reader.forget(topic, partition)

    async def keep(self, stream: Stream, partition: int, first: int, before: int) -> None:
        """Remember the identities below an offset where a trim does not reach them."""
        index = await self.index()
        topic = names.topic_of(self._prefix, stream)
        kept = names.identities_topic(topic)
        rows = index.between(topic, partition, first, before)
        if not rows:
            return
        await make_topic(self._link, kept, 1, self._replicas, names.KEPT)
        records: list[Record] = []
        for native_id, variant, identity, _ in rows:
            fact = _Kept(native_id, variant, *identity)
            records.append((kept, 0, msgspec.json.encode(fact), {}, msgspec.json.encode([native_id, variant])))
        sending = await self._link.send(records)
        for said in sending.outcomes:
            if isinstance(said, KafkaError):
                raise self._link.lost(said.str())

    async def _read_kept(self, index: Index, topic: str) -> None:
        kept = names.identities_topic(topic)
        found = await offsets(self._link, kept, [0], END)
        if found is None:
            return
        following, end = index.place(topic, KEPT), found[0]
        while following < end:
            upto = min(end, following + PAGE)
            rows = []
            for message in await self._reader.read(kept, 0, following, upto):
                try:
                    fact = _decode(message.value() or b"") if message is not None else None
                except msgspec.MsgspecError:  # not ours
                    continue
                if fact is not None:
                    where = Identity(fact.partition, fact.offset, fact.created_at_us, fact.content)
                    rows.append(Row(fact.native_id, fact.variant, where, fact.offset + 1))
            index.add(topic, KEPT, upto, rows)
            following = upto
        self._reader.forget(kept, 0)

    def close(self) -> None:
        """Close the table."""
        if self._index is not None:
            self._index.close()
            self._index = None
