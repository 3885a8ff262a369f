"""A remote log with a copy in the node's own store: the remote decides, the copy is what every room above works on.

Events are appended to the remote and copied from it by position, with the remote's offsets and times, so that the
chains of hashes are the same on every node. Cursors, deliveries and inboxes belong to the node and change in one
transaction with their effects. A reader sees what its own process has appended: reading waits until the copy has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from postbus.clock import SystemClock
from postbus.log.cursors import no_stream
from postbus.log.follower import Follower
from postbus.log.outlet import OutletTransaction, stays_here
from postbus.log.settings import accept, check_settings
from postbus.log.sqlite.doors import TransactionDoor
from postbus.log.sqlite.mirror import MirrorLog
from postbus.model import Conflict, NotFound, PostbusError, StorageError, Unreachable
from postbus.topics import check_stream_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from postbus.log.cursors import Change
    from postbus.log.outlet import Outlet
    from postbus.log.sqlite.doors import Transaction
    from postbus.log.sqlite.published import Extent
    from postbus.log.upstream import Upstream
    from postbus.model import Consumer, Draft, Receipt, Start, Stream, StreamSettings, TrimResult
    from postbus.store import Store

__all__ = ["CATCH_UP_S", "ReplicaLog", "stays_here"]

logger = logging.getLogger("postbus.log")

T = TypeVar("T")

REAL = SystemClock()  # whatever the store's clock says: a network does not wait for it
LOOK_S = 1.0
_PARTITION = attrgetter("partition")
CATCH_UP_S = 5.0
PAUSE_S = 0.05
ENDED_S = 0.5


class _Mark(NamedTuple):
    """How far the copy of one life of a stream has to be for a reader; ``turn`` is when that became known."""

    epoch: int
    head: int
    turn: int


class ReplicaLog(MirrorLog):
    """The log of one node. Make one with ``follow``.

    A read sees what this process has appended before, and what others have within the time it takes to come over.
    """

    def __init__(self, store: Store, upstream: Upstream) -> None:
        super().__init__(store)
        self.upstream = upstream
        self.outlet: Outlet | None = None
        self._transaction_doors = {
            grows: TransactionDoor(
                store, self._append_door, self._consumer_door, grows=grows, make=self._make_transaction
            )
            for grows in (False, True)
        }
        self._followers: dict[tuple[str, int], Follower] = {}
        self._marks: dict[tuple[str, int], _Mark] = {}
        self.turns = itertools.count()  # what orders the marks and the attempts of the followers
        self._trimmed: dict[tuple[str, int], tuple[int, int]] = {}
        self._looking, self._look_now = asyncio.Lock(), asyncio.Event()
        self._sending: dict[asyncio.Task[Any], tuple[str, int]] = {}
        self._left_alone: set[asyncio.Task[Any]] = set()
        self._looker: asyncio.Task[None] | None = None
        self._missed: str | None = None
        self._closing = False
        upstream.watch(self._came_up)

    @classmethod
    async def follow(
        cls,
        store: Store,
        upstream: Upstream,
        *,
        name: str | None = None,
        catch_up_s: float = CATCH_UP_S,
    ) -> ReplicaLog:
        """Open the log of a node: begin to follow the remote and wait until the copy has what was there, or the time.

        ``name`` is the remote's address as the folder keeps it. A remote that cannot be reached is waited for in the
        background. Raises ``Conflict`` for a folder that has a log of its own, or is the copy of another remote.
        """
        log = cls(store, upstream)
        try:
            await log._bind(name or upstream.url, stays_here)
            try:
                await log._look()
                await log._catch_up(catch_up_s)
            except Unreachable as error:
                log._missed = str(error)
            for stream in await log._copied():
                log._follow(stream)
        except BaseException:
            await log.close()
            raise
        log._looker = asyncio.get_running_loop().create_task(log._keep_looking())
        return log

    def _make_transaction(self, *parts: Any) -> Transaction:
        made = OutletTransaction(*parts)
        made.outlet = self.outlet
        return made

    @property
    def away(self) -> str | None:
        """Why the copy does not grow; None while the remote answers."""
        return next((follower.away for follower in self._followers.values() if follower.away), self._missed)

    @property
    def behind(self) -> bool:
        """Whether the copy lacks what this process has appended, or is appending."""
        extents = self._published.extents
        return bool(self._sending) or any(
            key not in extents or extents[key][1] < mark.head for key, mark in self._marks.items()
        )

    # --- streams ---

    async def ensure_stream(self, name: str, settings: StreamSettings | None = None) -> Stream:
        """See ``Log.ensure_stream``; the remote decides who of many makes it."""
        check_stream_name(name)
        if stays_here(name):
            return await super().ensure_stream(name, settings)
        if settings is not None:
            check_settings(settings)
        self.store.writer.notice()
        with contextlib.suppress(NotFound):
            return accept(await super()._stream(name), settings)
        made = await self.upstream.ensure_stream(name, settings)
        await self._mirror(made)
        return accept(made, settings)

    async def create_stream(self, name: str, settings: StreamSettings) -> Stream:
        """Make a stream that is not there yet; raises ``Conflict`` when it is, whatever its settings.

        Of two nodes that make it with the same settings in the same moment, both may believe that they did.
        """
        check_stream_name(name)
        if stays_here(name):
            return await super().create_stream(name, settings)
        check_settings(settings)
        await self._look()
        if await super().has_stream(name):
            raise Conflict(f"stream {name} exists already")
        return await self.ensure_stream(name, settings)

    async def delete_stream(self, name: str) -> None:
        """See ``Log.delete_stream``."""
        if stays_here(name):
            await super().delete_stream(name)
            return
        try:
            await self.upstream.delete_stream(name)
        finally:
            await self._look()

    async def _copied(self) -> list[Stream]:
        return [stream for stream in await super().streams() if not stays_here(stream.name)]

    async def _look(self) -> None:
        """Bring the list of streams up to the remote's. What ends in it had begun before it was asked for."""
        async with self._looking:
            before = {stream.name: stream.epoch for stream in await self._copied()}
            there = {stream.name: stream for stream in await self.upstream.streams() if not stays_here(stream.name)}
            for name, epoch in before.items():
                if name not in there:
                    await self._drop_stream(name, epoch)
                    self._ended(name, epoch)
            for stream in there.values():
                follower = self._followers.get((stream.name, 0))
                if follower is None or follower.stream != stream or before.get(stream.name) != stream.epoch:
                    await self._mirror(stream)
            for name, partition in list(self._followers):
                if name not in there:
                    self._followers.pop((name, partition)).stop()

    async def _mirror(self, stream: Stream) -> None:
        try:
            known: Stream | None = await super()._stream(stream.name)
        except NotFound:
            known = None
        if known != stream:
            try:
                firsts = [first for first, _ in await self.upstream.extents(stream)]
            except NotFound:
                return  # it has ended meanwhile
            await self.mirror_stream(stream, firsts)
            if known is not None and known.epoch < stream.epoch:
                self._ended(known.name, known.epoch)
        self._follow(stream)

    def _follow(self, stream: Stream) -> None:
        if self._closing:
            return
        for partition in range(stream.settings.partitions):
            key = (stream.name, partition)
            follower = self._followers.get(key)
            if follower is None or follower.stream.epoch < stream.epoch:
                if follower is not None:
                    follower.stop()
                self._followers[key] = Follower(self, stream, partition)

    async def _keep_looking(self) -> None:
        while True:
            await REAL.wait(self._look_now, LOOK_S)
            self._look_now.clear()
            try:
                await self._look()
                self._missed = None
            except Unreachable as error:
                self._missed = str(error)
            except PostbusError as error:
                logger.warning("the remote's streams cannot be followed: %s", error)

    async def _catch_up(self, seconds: float) -> None:
        """Wait until the copy has what is there now; raises ``Conflict`` when it has more than that."""
        for stream in await self._copied():
            self._follow(stream)
            numbers = range(stream.settings.partitions)
            copied = [(await super(ReplicaLog, self)._where(stream.name, number))[1] for number in numbers]
            for partition, (_, head) in enumerate(await self.upstream.extents(stream)):
                self._mark(stream, partition, head)
                if copied[partition] > head:  # what was copied before the remote was asked
                    raise Conflict(
                        f"the copy of {stream.name}/{partition} has events that {self.upstream.url} has not",
                        hint="the remote has lost events, or is another one: restore it, or name another folder",
                    )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for key in list(self._marks):
                    await self._reach(key)
        self._marks.clear()

    # --- events ---

    async def append(self, stream: str, drafts: Sequence[Draft]) -> list[Receipt]:
        """See ``Log.append``. Raises ``Unreachable`` when the remote does not answer and nothing keeps the events."""
        if stays_here(stream):
            return await super().append(stream, drafts)
        self._check_open()
        if not drafts:
            await self._stream(stream)
            return []
        if self.outlet is not None:
            return await self.outlet.append(stream, drafts)
        return await self.send(stream, drafts, [self.store.clock.new_id() for _ in drafts])

    async def send(self, stream: str, drafts: Sequence[Draft], ids: Sequence[str]) -> list[Receipt]:
        """Append to the remote itself, each draft under its id; raises ``Unreachable`` when it may have arrived."""
        self._check_open()
        while self._left_alone:  # nothing overtakes what is still on its way for somebody who has stopped waiting
            await asyncio.wait(self._left_alone)
        work = asyncio.get_running_loop().create_task(self._send(stream, drafts, ids))
        self._sending[work] = (stream, -1)
        work.add_done_callback(lambda _: self._sending.pop(work))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise no_stream(stream) from None
            if not work.done():
                self._left_alone.add(work)
                work.add_done_callback(self._left_alone.discard)
            raise

    async def _send(self, stream: str, drafts: Sequence[Draft], ids: Sequence[str]) -> list[Receipt]:
        try:
            return await self._attempt(await self._stream(stream), drafts, ids)
        except NotFound:  # deleted, and perhaps made again
            await self._look()
            return await self._attempt(await super()._stream(stream), drafts, ids)

    async def _attempt(self, stream: Stream, drafts: Sequence[Draft], ids: Sequence[str]) -> list[Receipt]:
        work = asyncio.current_task()
        if work in self._sending:
            self._sending[work] = (stream.name, stream.epoch)
        now_us = self.store.clock.now_us()
        receipts = await self.upstream.append(stream, drafts, ids, now_us)
        for partition in set(map(_PARTITION, receipts)):
            there = [pair for pair in zip(drafts, receipts, strict=True) if pair[1].partition == partition]
            self._mark(stream, partition, max(receipt.offset for _, receipt in there) + 1)
            follower = self._followers.get((stream.name, partition))
            if follower is not None and follower.stream == stream:
                follower.take(pair for pair in there if pair[0].native_id is None)
        return receipts

    @property
    def sending(self) -> bool:
        """Whether something is on its way to the remote."""
        return bool(self._sending)

    def _ended(self, name: str, epoch: int) -> None:
        """A life of a stream is over: those who append to it need not wait for an answer that may not come."""

        def end(work: asyncio.Task[Any]) -> None:
            if self._sending.get(work) == (name, epoch):
                work.cancel()

        for work, life in self._sending.items():
            if life == (name, epoch):
                asyncio.get_running_loop().call_later(ENDED_S, end, work)

    async def find(
        self, stream: str, ids: Sequence[str], sinces: Sequence[Sequence[int]]
    ) -> dict[str, tuple[int, int]]:
        """Return where the remote has ids, at or after the heads that were known when they were sent first."""
        if not ids:
            return {}
        known = await self._stream(stream)
        numbers = range(known.settings.partitions)
        since = [min((heads[n] if n < len(heads) else 0 for heads in sinces), default=0) for n in numbers]
        found = await self.upstream.find(known, ids, since)
        for partition, offset in found.values():
            self._mark(known, partition, offset + 1)
        return found

    async def heads(self, stream: str) -> list[int]:
        """Return where the copy's partitions end; never ahead of the remote."""
        extents = self._published.extents
        found: list[int] = []
        for partition in range((await self._stream(stream)).settings.partitions):
            extent = extents.get((stream, partition))
            found.append((extent or await super()._where(stream, partition))[1])
        return found

    async def transact(self, call: Callable[[Transaction], T], *, grows: bool = False) -> T:
        """See ``SqliteLog.transact``; appends to streams of the remote are kept for it in the same transaction."""
        keeps = False

        def run(tx: Transaction) -> T:
            nonlocal keeps
            result = call(tx)
            keeps = isinstance(tx, OutletTransaction) and tx.keeps
            return result

        result = await super().transact(run, grows=grows)
        if keeps and self.outlet is not None:
            self.outlet.kept()
        return result

    async def reset(self, stream: str, consumer: str, start: Start, partition: int | None = None) -> Consumer:
        """See ``Log.reset``."""
        await self._ready(stream)
        return await super().reset(stream, consumer, start, partition)

    async def trim(self, stream: str, before: int | None = None, partition: int | None = None) -> TrimResult:
        """See ``Log.trim``: the copy first, where this node's readers hold it back, then the remote as far."""
        await self._ready(stream)
        result = await super().trim(stream, before, partition)
        if not stays_here(stream):
            known = await self._stream(stream)
            for number, first in enumerate(result.first_offsets):
                await self._trim_there(known, number, first)
        return result

    async def _trim_there(self, stream: Stream, partition: int, first: int) -> None:
        key, place = (stream.name, partition), (stream.epoch, first)
        if first == 0 or self._trimmed.get(key, (-1, 0)) >= place:
            return
        try:
            await self.upstream.trim(stream, partition, first)
            self._trimmed[key] = place
        except (Unreachable, NotFound) as error:
            logger.info("%s/%d is trimmed here, and there at the next time: %s", *key, error)

    async def close(self) -> None:
        """See ``Log.close``: what was acknowledged comes over first, if the remote answers."""
        if self.outlet is not None:
            await self.outlet.stop()
        closing, self._closing = self._closing, True
        if not closing:
            await asyncio.gather(*self._sending, return_exceptions=True)
            with contextlib.suppress(TimeoutError, PostbusError):
                async with asyncio.timeout(self.upstream.answer_s):
                    for key in list(self._marks):
                        await self._reach(key)
            if self._looker is not None:
                self._looker.cancel()
                await asyncio.gather(self._looker, return_exceptions=True)
            tasks = [follower.stop() for follower in self._followers.values()]
            await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()
        await self.upstream.close()

    def _check_open(self) -> None:
        if self._closing:
            raise StorageError("the log is closed")

    # --- for followers ---

    def look_soon(self) -> None:
        """Look now what became of the remote's streams."""
        self._look_now.set()

    def stuck(self, stream: str, partition: int) -> None:
        """Let those go on who wait for the copy of a partition that does not grow."""
        self._published.waiters.wake((stream, partition))

    async def copied(self, stream: Stream, partition: int) -> int:
        """Return where the copy of a partition ends; raises ``NotFound`` when this life of the stream is over."""
        if (await super()._stream(stream.name)).epoch != stream.epoch:
            raise no_stream(stream.name)
        return (await super()._where(stream.name, partition))[1]

    # --- what is known, and when ---

    def _came_up(self) -> None:
        for follower in self._followers.values():
            follower.nudge()

    def _mark(self, stream: Stream, partition: int, head: int) -> None:
        """Remember that reading waits until the copy of this life of the stream reaches ``head``."""
        key = (stream.name, partition)
        if self._marks.get(key, (-1, 0))[:2] < (stream.epoch, head):
            self._marks[key] = _Mark(stream.epoch, head, next(self.turns))

    async def _ready(self, stream: str, partition: int | None = None) -> None:
        """Wait until the copy has what a reader may expect; go on without while the remote is away."""
        if stays_here(stream):
            return
        if self._marks:
            for key in [key for key in self._marks if key[0] == stream and partition in (None, key[1])]:
                await self._reach(key)

    async def _reach(self, key: tuple[str, int]) -> None:
        while (mark := self._marks.get(key)) is not None:
            try:
                known, (_, head, *_) = await super()._stream(key[0]), await super()._where(*key)
            except NotFound:
                reached = True
            else:
                reached = known.epoch > mark.epoch or (known.epoch == mark.epoch and head >= mark.head)
            if reached:
                if self._marks.get(key) == mark:
                    del self._marks[key]
                return
            follower = self._followers.get(key)
            if follower is None or follower.failed_since(mark.turn):
                return
            self.store.writer.notice()
            await self._published.waiters.wait(key, lambda: self._grown(key, mark.head - 1), PAUSE_S)

    async def _where(self, stream: str, partition: int) -> Extent:
        await self._ready(stream, partition)
        try:
            return await super()._where(stream, partition)
        except NotFound:
            if stays_here(stream) or await self.has_stream(stream):
                raise
            await self._stream(stream)
            return await super()._where(stream, partition)

    async def _stream(self, name: str) -> Stream:
        """Return a stream; one that is not known here may have been made elsewhere."""
        known = self._published.streams.get(name)
        if known is not None:
            return known
        try:
            return await super()._stream(name)
        except NotFound:
            if stays_here(name):
                raise
            with contextlib.suppress(Unreachable):
                await self._look()
            return await super()._stream(name)

    async def _change(self, stream: str, consumer: str, rule: Callable[..., Change], *args: object) -> Any:
        await self._ready(stream)
        await self._stream(stream)
        return await super()._change(stream, consumer, rule, *args)

    async def _consumer(self, stream: str, consumer: str) -> Consumer | None:
        await self._ready(stream)
        await self._stream(stream)
        return await super()._consumer(stream, consumer)
