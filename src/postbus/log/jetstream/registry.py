"""Which streams there are: one message for each name in a JetStream stream, changed by compare-and-set.

So one of many concurrent creators on any machine wins. A stream is written down first, then made, then said to be
there; whoever finds it half made makes the rest.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from postbus.log.cursors import no_stream
from postbus.log.jetstream.link import ApiError, NoStream, parsed
from postbus.log.jetstream.reading import pages
from postbus.model import Refused, Stream, StreamSettings

if TYPE_CHECKING:
    from postbus.clock import Clock
    from postbus.log.jetstream.link import Link
    from postbus.log.jetstream.names import Names

__all__ = ["EXPECTED", "IN_USE", "NO_MESSAGE", "STREAM_GONE", "WRONG_LAST", "Registry", "last_message"]

EXPECTED = "Nats-Expected-Last-Subject-Sequence"
WRONG_LAST = (10071, 10164)  # the second one says: somebody else is just about to
NO_MESSAGE = 10037
STREAM_GONE = 10059
IN_USE = 10058
AT_ONCE = 16


class _Record(msgspec.Struct, frozen=True):
    name: str
    epoch: int
    created_at_us: int
    settings: StreamSettings
    state: Literal["making", "live", "deleted"]

    @property
    def stream(self) -> Stream:
        return Stream(self.name, self.settings, self.epoch, self.created_at_us)


class Registry:
    """The streams under one prefix."""

    def __init__(self, link: Link, names: Names, clock: Clock) -> None:
        self._link = link
        self._names = names
        self._clock = clock
        self._there = False
        self._turn = asyncio.Lock()

    async def ensure(self, name: str, settings: StreamSettings | None) -> Stream:
        """Return the stream, made if it was not there."""
        async with self._turn:
            while True:
                sequence, record = await self._get(name)
                if record is None or record.state == "deleted":
                    epoch = 0
                    if record is not None:
                        await self._remove(record.stream)  # what an interrupted deletion left
                        epoch = record.epoch + 1
                    record = _Record(name, epoch, self._clock.now_us(), settings or StreamSettings(), "making")
                    sequence = await self._put(record, sequence)
                if sequence and record.state == "making":
                    await self._make(record.stream)
                    record = msgspec.structs.replace(record, state="live")
                    sequence = await self._put(record, sequence)
                if sequence:
                    return record.stream

    async def streams(self) -> list[Stream]:
        """Return all streams, by name."""
        await self._ensure_there()
        found = []
        async for message in pages(self._link, self._names.registry, 1):
            record = _record(message.data)
            if record is not None and record.state == "live":
                found.append(record.stream)
        return sorted(found, key=lambda stream: stream.name)

    async def check(self, stream: Stream) -> None:
        """Raise ``NotFound`` unless the stream is there, in this epoch."""
        _, record = await self._get(stream.name)
        if record is None or record.state != "live" or record.epoch != stream.epoch:
            raise no_stream(stream.name)

    async def delete(self, name: str) -> None:
        """Remove a stream; its epoch stays."""
        while True:
            sequence, record = await self._get(name)
            if record is None or record.state == "deleted":
                raise no_stream(name)
            if await self._put(msgspec.structs.replace(record, state="deleted"), sequence):
                await self._remove(record.stream)
                return

    async def make(self, config: dict[str, Any]) -> None:
        """Make a JetStream stream; one that is there stays as it is."""
        try:
            made = await self._link.api(f"STREAM.CREATE.{config['name']}", config)
        except ApiError as error:
            if error.number != IN_USE:
                raise
            return
        if config.get("allow_atomic") and not made["config"].get("allow_atomic"):
            raise Refused("the NATS server is too old for a log", hint="use nats-server 2.12 or later")

    async def _make(self, stream: Stream) -> None:
        configs = [self._names.partition_config(stream, number) for number in range(stream.settings.partitions)]
        if len(configs) > 1:
            configs.append(self._names.identities_config(stream))
        for start in range(0, len(configs), AT_ONCE):
            await asyncio.gather(*(self.make(config) for config in configs[start : start + AT_ONCE]))

    async def _remove(self, stream: Stream) -> None:
        names = [self._names.partition(stream, number) for number in range(stream.settings.partitions)]
        for name in [*names, self._names.identities(stream)]:
            try:
                await self._link.api(f"STREAM.DELETE.{name}", again=False)
            except ApiError as error:
                if error.number != STREAM_GONE:
                    raise

    async def _ensure_there(self) -> None:
        if not self._there:
            await self.make(self._names.registry_config())
            self._there = True

    async def _get(self, name: str) -> tuple[int, _Record | None]:
        await self._ensure_there()
        found = await last_message(self._link, self._names.registry, self._names.record(name))
        if found is None:
            return 0, None
        record = _record(found[2])
        if record is None:
            raise Refused(f"what the JetStream stream {self._names.registry} says of {name} cannot be read")
        return found[0], record

    async def _put(self, record: _Record, after: int) -> int:
        """Write a record unless somebody else was first; returns its sequence, or 0."""
        try:
            answer = await self._link.ask(
                self._names.record(record.name), msgspec.json.encode(record), {EXPECTED: str(after)}
            )
            return int(parsed(answer.data)["seq"])
        except NoStream:
            self._there = False
            raise Refused(f"the JetStream stream {self._names.registry} has gone") from None
        except ApiError as error:
            if error.number not in WRONG_LAST:
                raise
            return 0


def _record(raw: bytes) -> _Record | None:
    try:
        return msgspec.json.decode(raw, type=_Record)
    except msgspec.MsgspecError:
        return None  # somebody else wrote it


async def last_message(link: Link, stream: str, subject: str) -> tuple[int, bytes, bytes] | None:
    """Return (sequence, headers, body) of the last message on a subject as the leader has it, or None."""
    try:
        found = await link.api(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
    except ApiError as error:
        if error.number in (NO_MESSAGE, STREAM_GONE):
            return None
        raise
    message = found["message"]
    return message["seq"], b64decode(message.get("hdrs", "")), b64decode(message.get("data", ""))
