"""From a node to the remote log it follows: straight through while it answers, through the spool while it does not."""

from __future__ import annotations

import contextlib
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from postbus.broker import Breaker, Relay
from postbus.clock import SystemClock
from postbus.log.heads import same_content
from postbus.model import IdempotencyConflict, NotFound, PostbusError, Receipt, StorageError, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from postbus.broker import BreakerState
    from postbus.log import Log
    from postbus.log.replica import ReplicaLog
    from postbus.log.sqlite import Transaction
    from postbus.model import Draft, SpoolEntry

__all__ = ["NAME", "RemoteOutlet", "outlet_of"]

NAME = "remote-log"


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
                found |= await self._log.find(
                    stream, [entry.identity for entry in mine], [entry.since for entry in mine]
                )
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
        await self.relay.stop()

    async def append(self, stream: str, drafts: Sequence[Draft]) -> list[Receipt]:
        """See ``Outlet.append``; what is spooled happened when it was published, not when it is sent."""
        clock = self._log.store.clock
        since, at_us = await self._log.heads(stream), clock.now_us()
        ids = [clock.new_id() for _ in drafts]

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
