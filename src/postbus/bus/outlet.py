"""From a node to the remote log it follows: straight through while it answers, through the spool while it does not."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import chain, groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from postbus.broker import Breaker, Relay
from postbus.clock import SystemClock
from postbus.log.heads import same_content
from postbus.model import (
    Backpressure,
    Durability,
    IdempotencyConflict,
    NotFound,
    PostbusError,
    Receipt,
    StorageError,
    Unreachable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from postbus.broker import BreakerState
    from postbus.log import Log
    from postbus.log.replica import ReplicaLog
    from postbus.log.sqlite import Transaction
    from postbus.model import Draft, SpoolEntry

__all__ = ["NAME", "RemoteOutlet", "outlet_of"]

NAME = "remote-log"
TOGETHER_MAX = 1_000
TURN_S, LATE_S = 0.25, 0.02
_NATIVE_ID = attrgetter("native_id")


class _Call:
    """One append that waits for its receipts."""

    __slots__ = ("answer", "drafts", "ids", "plain")

    def __init__(self, drafts: Sequence[Draft]) -> None:
        self.drafts = drafts
        self.ids: Sequence[str] = ()
        self.plain = set(map(_NATIVE_ID, drafts)) == {None}
        self.answer: asyncio.Future[list[Receipt]] = asyncio.get_running_loop().create_future()

    def end(self, outcome: list[Receipt] | Exception) -> None:
        """Tell who waits, if anybody still does."""
        if self.answer.done():
            return
        if isinstance(outcome, Exception):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


class _LogRemote:
    """The remote of a log as the relay knows remotes: see ``Remote``."""

    def __init__(self, log: ReplicaLog) -> None:
        self._log = log

    async def send(self, stream: str, identity: str, event: Draft) -> Receipt:
        """See ``Remote.send``."""
        return (await self.send_all(stream, [identity], [event]))[0]

    async def send_all(self, stream: str, identities: Sequence[str], events: Sequence[Draft]) -> list[Receipt]:
        """Send events of one stream; as ``send`` does, all or none of them."""
        try:
            return await self._log.send(stream, events, identities)
        except StorageError as error:  # it has no room, which is no fault of the event
            raise Unreachable(f"the remote cannot take it now: {error}") from error

    async def send_many(self, entries: Sequence[SpoolEntry]) -> tuple[int, PostbusError | None]:
        """See ``Remote.send_many``: what goes to one stream goes together, unless one of them is refused."""
        done = 0
        for stream, group in groupby(entries, attrgetter("stream")):
            run = list(group)
            try:
                await self.send_all(stream, [entry.identity for entry in run], [entry.draft for entry in run])
                done += len(run)
            except Unreachable as error:
                return done, error
            except PostbusError as error:
                count, refusal = (0, error) if len(run) == 1 else await self._send_each(run)
                done += count
                if refusal is not None:
                    return done, refusal
        return done, None

    async def _send_each(self, run: list[SpoolEntry]) -> tuple[int, PostbusError | None]:
        """Find the one that is refused: send one after the other, but for those that came through with it."""
        count = 0
        try:
            there = await self.known(run)
            for entry in run:
                if entry.identity not in there:
                    await self.send(entry.stream, entry.identity, entry.draft)
                count += 1
        except PostbusError as error:
            return count, error
        return count, None

    async def known(self, entries: Sequence[SpoolEntry]) -> set[str]:
        """See ``Remote.known``; of what has an identity of its own the remote says so when it is sent again."""
        found: set[str] = set()
        for stream in {entry.stream for entry in entries}:
            mine = [entry for entry in entries if entry.stream == stream and entry.draft.native_id is None]
            with contextlib.suppress(NotFound):  # a stream that is gone has nothing
                there = await self._log.find(
                    stream, [entry.identity for entry in mine], [entry.since for entry in mine]
                )
                found.update(there)
        return found

    def watch(self, came_up: Callable[[], None]) -> None:
        """See ``Remote.watch``."""
        self._log.upstream.watch(came_up)


class RemoteOutlet:
    """See ``Outlet``. One a log; ``start`` begins to send what waits, ``stop`` ends that and loses nothing."""

    def __init__(self, log: ReplicaLog) -> None:
        clock = SystemClock()  # whatever the store's clock says: a network does not wait for it
        self._log = log
        self._remote = _LogRemote(log)
        self._waiting: dict[str, list[_Call]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.relay = Relay(
            log, self._remote, clock=clock, breaker=Breaker(NAME, clock=clock, failures_max=1), make_journal=False
        )

    @property
    def state(self) -> BreakerState:
        """How the way to the remote is: ``closed`` when events go straight through."""
        return self.relay.breaker.state

    async def start(self) -> None:
        """Begin to send what waits, and have the log use this."""
        await self.relay.start()
        self._log.outlet = self

    async def stop(self) -> None:
        """See ``Outlet.stop``."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self.relay.stop()

    async def append(self, stream: str, drafts: Sequence[Draft]) -> list[Receipt]:
        """See ``Outlet.append``: what is ready while others are on their way to the same stream goes together.

        A cancelled wait does not undo it.
        """
        call = _Call(drafts)
        waiting = self._waiting.get(stream)
        if waiting is None:
            waiting = self._waiting[stream] = []
            self._begin(self._serve(stream, waiting))
        waiting.append(call)
        return await call.answer

    async def _serve(self, stream: str, waiting: list[_Call]) -> None:
        """Hand over what was appended to a stream, in its order, until nothing is left.

        Each turn waits for the one before, but not for long: nobody waits longer than for an answer of their own. Only
        what somebody has stopped waiting for is never overtaken.
        """
        late: dict[asyncio.Task[None], list[_Call]] = {}
        try:
            await asyncio.sleep(0)  # all that are ready come along
            while waiting or late:
                for plain, group in groupby(_taken(waiting), attrgetter("plain")):
                    while left := [work for work, calls in late.items() if any(map(_left_alone, calls))]:
                        await asyncio.wait(left)
                        late = {work: calls for work, calls in late.items() if not work.done()}
                    run = list(group)
                    parts = [run] if plain else [[call] for call in run]  # an identity has a verdict of its own
                    late |= {self._begin(self._together(stream, part)): part for part in parts}
                    await asyncio.wait(late, timeout=TURN_S)
                    late = {work: calls for work, calls in late.items() if not work.done()}
                if late and not waiting:
                    await asyncio.wait(late, timeout=LATE_S)
                    late = {work: calls for work, calls in late.items() if not work.done()}
                await asyncio.sleep(0)
        finally:
            del self._waiting[stream]
            for call in waiting:  # only when this was cancelled
                call.answer.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _together(self, stream: str, calls: list[_Call]) -> None:
        """Hand over what several have appended; never raises."""
        drafts = list(chain.from_iterable(call.drafts for call in calls))
        new_id = self._log.store.clock.new_id
        ids = [new_id() for _ in drafts]
        try:
            since = await self._log.heads(stream)
            try:
                receipts = await self._hand_over(stream, drafts, ids, since)
            except (Unreachable, Backpressure, NotFound, StorageError):
                raise
            except PostbusError:
                if len(calls) == 1:
                    raise
                named = iter(ids)
                for call in calls:
                    call.ids = [next(named) for _ in call.drafts]
                await self._each(stream, calls, since)
                return
        except Exception as error:  # noqa: BLE001 - the callers get it
            for call in calls:
                call.end(error)
            return
        except BaseException:
            for call in calls:
                call.answer.cancel()
            raise
        start = 0
        for call in calls:
            end = start + len(call.drafts)
            call.end(receipts[start:end])
            start = end

    async def _each(self, stream: str, calls: list[_Call], since: Sequence[int]) -> None:
        """One of them was refused: hand over one after the other, but for those that came through with it."""
        there = await self._log.find(stream, [name for call in calls for name in call.ids], [since])
        for call in calls:
            todo = [at for at, name in enumerate(call.ids) if name not in there]
            try:
                drafts, ids = [call.drafts[at] for at in todo], [call.ids[at] for at in todo]
                new = dict(zip(todo, await self._hand_over(stream, drafts, ids, since) if todo else (), strict=True))
            except PostbusError as error:
                call.end(error)
                continue
            now_us = self._log.store.clock.now_us()  # found, and not answered: how durable it is was not said
            call.end(
                [
                    new[at] if at in new else Receipt(stream, *there[name], False, Durability.RELAXED, now_us)
                    for at, name in enumerate(call.ids)
                ]
            )

    async def _hand_over(
        self, stream: str, drafts: Sequence[Draft], ids: Sequence[str], since: Sequence[int]
    ) -> list[Receipt]:
        """What is spooled happened when it was published, not when it is sent."""
        at_us = self._log.store.clock.now_us()

        def kept() -> list[tuple[str, Draft]]:
            return list(zip(ids, (_dated(draft, at_us) for draft in drafts), strict=True))

        return await self.relay.hand_over(stream, kept, lambda: self._remote.send_all(stream, ids, drafts), since)

    def keep(self, tx: Transaction, stream: str, drafts: Sequence[Draft]) -> list[Receipt]:
        """See ``Outlet.keep``; what the copy has already is not kept again."""
        verdicts = [_known(tx, stream, draft) for draft in drafts]
        new = [draft for draft, known in zip(drafts, verdicts, strict=True) if known is None]
        ids = [self._log.store.clock.new_id() for _ in new]
        events = list(zip(ids, (_dated(draft, tx.now_us) for draft in new), strict=True))
        since = [tx.head(stream, partition) for partition in range(tx.stream(stream).stream.settings.partitions)]
        added = iter(self.relay.spool.add(tx, stream, events, since=since) if new else ())
        return [known or self.relay.receipt(next(added), tx.now_us) for known in verdicts]

    def kept(self) -> None:
        """See ``Outlet.kept``."""
        self.relay.queued()


def _left_alone(call: _Call) -> bool:
    return call.answer.cancelled()


def _taken(waiting: list[_Call]) -> list[_Call]:
    """Take as many calls as go together, at least one."""
    count = size = 0
    while count < len(waiting) and (not count or size + len(waiting[count].drafts) <= TOGETHER_MAX):
        size += len(waiting[count].drafts)
        count += 1
    taken, waiting[:count] = waiting[:count], []
    return taken


def outlet_of(log: Log) -> RemoteOutlet | None:
    """Return the way from a log to its remote, if it has one."""
    found = getattr(log, "outlet", None)
    return found if isinstance(found, RemoteOutlet) else None


def _dated(draft: Draft, at_us: int) -> Draft:
    """Return a draft that says when it happened; not one with an identity, since the instant would be part of it."""
    if draft.occurred_at_us is not None or draft.native_id is not None:
        return draft
    return msgspec.structs.replace(draft, occurred_at_us=at_us)


def _known(tx: Transaction, stream: str, draft: Draft) -> Receipt | None:
    """Return the receipt of an event whose identity the copy has; raises ``IdempotencyConflict`` for other content."""
    known = None if draft.native_id is None else tx.identity(stream, draft.native_id, draft.variant)
    if known is None or draft.native_id is None:
        return None
    if not same_content(draft, known):
        raise IdempotencyConflict(
            f"{stream} has native_id {draft.native_id!r} variant {draft.variant!r} with other content",
            stream=stream,
            native_id=draft.native_id,
            variant=draft.variant,
            offset=known.offset,
        )
    return Receipt(stream, known.partition, known.offset, duplicate=True, created_at_us=known.created_at_us)
