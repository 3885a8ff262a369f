"""A log on JetStream: a partition is a JetStream stream, and an event's offset its sequence less one."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from postbus.clock import Clock, SystemClock
from postbus.log.cursors import check_partition, check_range
from postbus.log.jetstream.appending import Appending
from postbus.log.jetstream.connection import Servers
from postbus.log.jetstream.gates import Gates
from postbus.log.jetstream.identities import Identities
from postbus.log.jetstream.link import ApiError, Link, NoStream
from postbus.log.jetstream.names import Names
from postbus.log.jetstream.reading import SEQUENCE, event_from, missing_event, page, sequence_of
from postbus.log.jetstream.registry import STREAM_GONE, Registry
from postbus.log.settings import check_settings
from postbus.log.wire import HEADER, unpack
from postbus.model import Durability, Unreachable
from postbus.topics import check_stream_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from postbus.log.security import Security
    from postbus.model import Draft, Event, Receipt, Stream, StreamSettings

__all__ = ["JetStream"]

logger = logging.getLogger("postbus.log")

AGAIN_S = 0.02
FETCH_BYTES = 32 << 20  # more than that is not held for one fetch


class JetStream:
    """See ``Upstream``.

    ``synced``: the server has ``sync_interval: always``, so that what it has acknowledged survives a power cut; a
    client cannot find that out, and without it receipts say ``relaxed``.
    """

    def __init__(
        self,
        url: str,
        prefix: str = "postbus",
        *,
        answer_s: float = 5.0,
        replicas: int = 1,
        synced: bool = False,
        clock: Clock | None = None,
        security: Security | None = None,
    ) -> None:
        self.answer_s = answer_s
        self.prefix = prefix
        clock = clock or SystemClock()
        self._names = Names(prefix, replicas)
        self._link = Link(Servers(url, security), answer_s)
        self.url = self._link.url
        self._registry = Registry(self._link, self._names, clock)
        self._gates = Gates(self._link, self._names, self._registry, clock)
        durability = Durability.FULL if synced else Durability.RELAXED
        self._appending = Appending(self._link, self._names, self._gates, clock, durability)
        self._warned = synced

    # --- streams ------------------------------------------------------------------------------------------------------

    async def ensure_stream(self, name: str, settings: StreamSettings | None = None) -> Stream:
        """See ``Upstream.ensure_stream``."""
        check_stream_name(name)
        if settings is not None:
            check_settings(settings)
        async with self._link.bounded():
            return await self._registry.ensure(name, settings)

    async def streams(self) -> list[Stream]:
        """See ``Upstream.streams``."""
        async with self._link.bounded():
            return await self._registry.streams()

    async def delete_stream(self, name: str) -> None:
        """See ``Upstream.delete_stream``."""
        async with self._link.bounded():
            await self._registry.delete(name)

    # --- events -------------------------------------------------------------------------------------------------------

    async def append(
        self,
        stream: Stream,
        drafts: Sequence[Draft],
        ids: Sequence[str],
        now_us: int,
        partition: int | None = None,
    ) -> list[Receipt]:
        """See ``Upstream.append``.

        Many events of one partition go in batches of up to 1000, each taken as a whole, where that is faster; a refused
        call leaves nothing, unless another client appends one of its identities at the same moment.
        """
        if not drafts:
            return []
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s: NATS acknowledges before it has synced to disk unless it runs with sync_interval: always; "
                "if it does, say sync=always in the URL",
                self.url,
            )
        async with self._link.bounded() as limit:
            return await self._appending.append(stream, drafts, ids, now_us, limit, partition)

    async def find(self, stream: Stream, ids: Sequence[str], since: Sequence[int]) -> dict[str, tuple[int, int]]:
        """See ``Upstream.find``: shuts out what is still on its way, then reads what is there."""
        wanted = set(ids)
        found: dict[str, tuple[int, int]] = {}
        if not wanted:
            return found
        for partition in range(stream.settings.partitions):
            async with self._link.bounded() as limit:
                last = (await self._gates.change(stream, partition))["last_seq"]
                sequence = since[partition] + 1
                while sequence <= last:
                    messages, _ = await page(self._link, self._names.partition(stream, partition), sequence, last)
                    if not messages:  # a copy that lags has answered, or the rest was trimmed
                        sequence = max(sequence, (await self._gates.info(stream, partition))["state"]["first_seq"])
                        await asyncio.sleep(AGAIN_S)
                    for message in messages:
                        at = sequence_of(message, sequence)
                        header = (message.headers or {}).get(HEADER)
                        carried = unpack(header.encode(), message.data) if header else None
                        if carried is not None and carried.append_id in wanted:
                            found.setdefault(carried.append_id, (partition, at - 1))
                        sequence = at + 1
                    self._link.more_time(limit)
        return found

    async def fetch(self, stream: Stream, partition: int, offset: int, limit: int) -> list[Event]:
        """See ``Upstream.fetch``; large events are returned in smaller numbers than asked for, but never none."""
        check_partition(stream, partition)
        check_range(offset, limit)
        name = self._names.partition(stream, partition)
        events: list[Event] = []
        sequence, more, size = offset + 1, 1, 0
        async with self._link.bounded() as bound:
            while more and len(events) < limit and size < FETCH_BYTES:
                try:
                    messages, more = await page(self._link, name, sequence, limit - len(events))
                except NoStream:
                    raise await self._gone(stream, partition) from None
                for message in messages:
                    at = sequence_of(message, sequence)
                    if events:
                        events += [missing_event(stream.name, partition, number) for number in range(sequence, at)]
                    events.append(event_from(stream.name, partition, at, message))
                    size += len(message.data)
                    sequence = at + 1
                self._link.more_time(bound)
        return events[:limit]

    async def extents(self, stream: Stream) -> list[tuple[int, int]]:
        """See ``Upstream.extents``."""
        async with self._link.bounded():
            states = await asyncio.gather(
                *(self._gates.info(stream, partition) for partition in range(stream.settings.partitions))
            )
        return [_extent(state["state"]) for state in states]

    async def wait(self, stream: Stream, partition: int, offset: int, timeout_s: float) -> bool:
        """See ``Upstream.wait``: the server announces each event once it is stored."""
        check_partition(stream, partition)
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while True:
            async with self._link.heard(f"{self._names.new(stream, partition)}.>") as heard:
                async with self._link.bounded():
                    state = (await self._gates.info(stream, partition))["state"]
                if state["last_seq"] > offset:
                    return True
                try:
                    async with asyncio.timeout_at(until):
                        message = await heard
                except TimeoutError:
                    return False
                if message is None:
                    raise Unreachable("the connection to NATS was lost meanwhile")
                if int((message.headers or {}).get(SEQUENCE, "0")) > offset:
                    return True

    async def trim(self, stream: Stream, partition: int, before: int) -> None:
        """See ``Upstream.trim``: keeps the identities, shuts out who could not know of that, and then removes."""
        check_partition(stream, partition)
        async with self._link.bounded() as limit:
            state = (await self._gates.info(stream, partition))["state"]
            first, end = _extent(state)
            before = min(before, end)
            if before <= first:
                return
            await self._registry.make(self._names.identities_config(stream))
            identities = Identities(self._link, self._names, stream)
            if await identities.move(partition, before, lambda: self._link.more_time(limit)):
                await self._gates.change(stream, partition)
            self._link.more_time(limit)
            await self._purge(stream, partition, before)

    async def _purge(self, stream: Stream, partition: int, before: int) -> None:
        name = self._names.partition(stream, partition)
        try:
            await self._link.api(f"STREAM.PURGE.{name}", {"seq": before + 1}, again=False)
        except ApiError as error:
            if error.number != STREAM_GONE:
                raise
            raise await self._gone(stream, partition) from None

    async def _gone(self, stream: Stream, partition: int) -> Exception:
        """Return why nobody answers for a partition: the stream is gone, or JetStream is not up yet."""
        await self._gates.info(stream, partition)
        return Unreachable("JetStream is not ready")

    # --- the connection -----------------------------------------------------------------------------------------------

    def watch(self, came_up: Callable[[], None]) -> None:
        """See ``Upstream.watch``."""
        self._link.up.append(came_up)

    async def close(self) -> None:
        """See ``Upstream.close``."""
        await self._link.close()


def _extent(state: dict[str, Any]) -> tuple[int, int]:
    return max(state["first_seq"] - 1, 0), state["last_seq"]
