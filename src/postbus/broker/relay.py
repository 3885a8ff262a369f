"""From here to a remote: straight through while it answers, by way of the spool while it does not.

Order: one event after the other is awaited by its publisher; while anything is queued, everything queues behind it; and
the remote takes nothing from the queue behind a gap.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING, Self

import msgspec

from postbus.broker.breaker import Breaker, BreakerState
from postbus.broker.spool import Broken, DrainLock, Spool
from postbus.clock import Clock, SystemClock
from postbus.envelope import draft as make_draft
from postbus.model import Backpressure, PostbusError, Receipt, Unreachable
from postbus.topics import check_stream_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from postbus.broker.breaker import Change
    from postbus.broker.contract import Remote
    from postbus.log.sqlite import SqliteLog
    from postbus.model import Draft, SpoolEntry

__all__ = ["BREAKER_TOPIC", "Relay"]

logger = logging.getLogger("postbus.broker")

BATCH = 500
BATCH_BYTES = 4 * 1024 * 1024
REFUSALS_MAX = 3
REFUSED_RETRY_S = 1.0
RETRY_S = 0.05
LOOK_S = 1.0
DOOR_S = 0.5
BREAKER_TOPIC = "broker.breaker"


class Relay:
    """Publishes to a remote. ``start`` opens the spool and begins to empty it; ``stop`` ends that and loses nothing."""

    def __init__(
        self,
        log: SqliteLog,
        remote: Remote,
        *,
        tenant: str = "local.default",
        clock: Clock | None = None,
        breaker: Breaker | None = None,
        spool: Spool | None = None,
        refused_retry_s: float = REFUSED_RETRY_S,
        make_journal: bool = True,
    ) -> None:
        self._log = log
        self._remote = remote
        self._clock = clock or SystemClock()
        self._journal = check_stream_name(f"{tenant}.journal")
        self._refused_retry_s = refused_retry_s
        self._make_journal = make_journal
        self.spool = spool or Spool(log, tenant=tenant)
        self.breaker = breaker or Breaker("remote", clock=self._clock, failures_max=1)
        self.breaker.listen(self._breaker_changed)
        remote.watch(self._came_up)
        self._lock = DrainLock(log)
        self._direct = False
        self._puts = self._entering = 0
        self._unsure = True
        self.sent = 0
        self._nudge = asyncio.Event()
        self._emptied = asyncio.Event()
        self._door = asyncio.Event()  # shut while the last of the queue is sent, so that publishers do not prolong it
        self._door.set()
        self._held = False
        self._drainer: asyncio.Task[None] | None = None
        self._notes: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Open the spool and begin to empty it."""
        if self._make_journal:
            await self._log.ensure_stream(self._journal)
        await self.spool.open()
        self._direct = (await self.spool.status()).rows == 0
        if self._drainer is None:
            self._drainer = asyncio.get_running_loop().create_task(self._drain())

    async def stop(self) -> None:
        """Stop emptying the spool; what is in it stays there. Idempotent."""
        if self._drainer is not None:
            self._drainer.cancel()
            await asyncio.gather(self._drainer, return_exceptions=True)
            self._drainer = None
        self._door.set()
        await asyncio.gather(*self._notes, return_exceptions=True)
        self._lock.release()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # --- publishing ---

    async def publish(self, stream: str, event: Draft) -> Receipt:
        """Hand an event to the remote, or to the spool while the remote is away; returns when one of them has it.

        A spooled receipt's address is the place in the spool. Raises what the remote refuses this event with, and
        ``Backpressure`` when the spool stays full for half a second.
        """
        check_stream_name(stream)
        identity = self._identity(stream, event)

        async def send() -> list[Receipt]:
            return [await self._remote.send(stream, identity, event)]

        return (await self.hand_over(stream, lambda: [(identity, event)], send))[0]

    async def hand_over(
        self,
        stream: str,
        events: Callable[[], Sequence[tuple[str, Draft]]],
        send: Callable[[], Awaitable[list[Receipt]]],
        since: Sequence[int] = (),
    ) -> list[Receipt]:
        """Do as ``publish`` does with what one call sends; ``events`` are the same as the spool keeps them.

        All or none of them; ``since`` as in ``Spool.add``.
        """
        tried = False

        async def attempt() -> list[Receipt]:
            nonlocal tried
            tried = True
            return await send()

        if not self._door.is_set():
            await self._clock.wait(self._door, DOOR_S)
        if self._direct:
            try:
                return await self.breaker.run(attempt)
            except Unreachable as error:
                logger.info("events go to the spool: %s", error)
        self._direct = False
        self._puts += 1
        self._entering += 1
        try:
            sequences = await self._put(stream, events(), since, tried=tried)
        finally:
            self._entering -= 1
            self.queued()
        now_us = self._clock.now_us()
        return [self.receipt(sequence, now_us) for sequence in sequences]

    def receipt(self, sequence: int, at_us: int) -> Receipt:
        """Return the receipt of what is in the spool."""
        return Receipt(self.spool.stream, 0, sequence, False, self._log.store.durability, at_us, spooled=True)

    def queued(self) -> None:
        """Say that something was put into the spool, so that nothing overtakes it."""
        self._direct = False
        self._puts += 1  # whoever looked before this one was on disk has seen too little
        self._emptied.clear()
        self._nudge.set()

    async def _put(
        self, stream: str, events: Sequence[tuple[str, Draft]], since: Sequence[int], *, tried: bool
    ) -> list[int]:
        delay_s = self.spool.delay_s
        if delay_s > 0:
            await self._clock.sleep(delay_s)
        try:
            return await self.spool.put_all(stream, events, tried=tried, since=since)
        except Backpressure:
            if self.spool.delay_s <= delay_s:
                raise
        await self._clock.sleep(self.spool.delay_s - delay_s)
        return await self.spool.put_all(stream, events, tried=tried, since=since)

    def _identity(self, stream: str, event: Draft) -> str:
        if event.native_id is None:
            return self._clock.new_id()
        return hashlib.sha256(msgspec.json.encode((stream, event.native_id, event.variant))).hexdigest()[:32]

    async def drained(self, timeout_s: float) -> bool:
        """Wait until nothing is queued; say whether that came about in time."""
        return await self._clock.wait(self._emptied, timeout_s)

    # --- emptying the spool ---

    def _came_up(self) -> None:
        self.breaker.hint()
        self._nudge.set()

    async def _drain(self) -> None:
        while True:
            self._nudge.clear()
            try:
                wait_s = await self._turn()
            except (PostbusError, OSError) as error:
                logger.warning("the spool could not be emptied: %s", error)
                self._door.set()
                wait_s = LOOK_S
            if wait_s:
                await self._clock.wait(self._nudge, wait_s)

    async def _turn(self) -> float:
        """Send one batch; return how long there is nothing to do."""
        if self._held and self.breaker.wait_s > 0:
            return self.breaker.wait_s
        self._held = False
        puts = self._puts
        holding = self._lock.acquire()
        batch, whole = await self.spool.head(BATCH if holding else 1, BATCH_BYTES)
        if not batch:
            self._lock.release()
            if puts == self._puts and not self._entering:
                self._direct = True
                self._emptied.set()
                self._door.set()
            return LOOK_S if self._direct else LOOK_S / 10
        self._emptied.clear()
        self._direct = False
        if not holding:
            return LOOK_S
        if whole and self.breaker.state is BreakerState.CLOSED:
            self._door.clear()
        wait_s = await self._send(batch)
        if wait_s:
            self._door.set()
        return wait_s

    async def _send(self, batch: list[SpoolEntry | Broken]) -> float:
        if isinstance(batch[0], Broken):
            await self.spool.bury(batch[0], "undecodable", batch[0].error)
            return 0.0
        acked: list[int] = []
        refusal: tuple[SpoolEntry, PostbusError] | None = None
        try:
            entries = _readable(batch)
            known = await self._already_there(entries)
            acked += [entry.sequence for entry in entries if entry.identity in known]
            refusal = await self._send_on([entry for entry in entries if entry.identity not in known], acked)
        except Unreachable as error:  # an outage: nothing is counted against the event
            self._unsure = self._held = True
            logger.info("the spool waits: %s", error)
            return max(self.breaker.wait_s, RETRY_S)
        finally:
            await asyncio.shield(self.spool.remove(acked))
            self.sent += len(acked)
        if refusal is not None:
            self._door.set()
            await self._refused(*refusal)
        return 0.0

    async def _send_on(self, entries: list[SpoolEntry], acked: list[int]) -> tuple[SpoolEntry, PostbusError] | None:
        """Send events and add what is acknowledged; return the remote's refusal of one, if it refuses one."""
        refusal: tuple[SpoolEntry, PostbusError] | None = None

        async def send() -> None:
            nonlocal refusal
            count, error = await self._remote.send_many(entries)
            acked.extend(entry.sequence for entry in entries[:count])
            if isinstance(error, Unreachable):
                raise error
            refusal = None if error is None else (entries[count], error)

        if entries:
            await self.breaker.run(send)
        return refusal

    async def _already_there(self, entries: list[SpoolEntry]) -> set[str]:
        """Ask the remote for what may have arrived without our knowing: before an outage, or before we died."""
        if not (self._unsure or any(entry.tried for entry in entries)):
            return set()
        known = await self.breaker.run(lambda: self._remote.known(entries))
        self._unsure = False
        return known

    async def _refused(self, entry: SpoolEntry, error: PostbusError) -> None:
        logger.warning("the remote refused spooled event %d: %s", entry.sequence, error)
        if entry.attempts + 1 >= REFUSALS_MAX:
            await self.spool.bury(entry, "refused", str(error))
        else:
            await self.spool.refused(entry, str(error))
            await self._clock.sleep(self._refused_retry_s)

    # --- saying what happens ---

    def _breaker_changed(self, change: Change) -> None:
        task = asyncio.get_running_loop().create_task(self._note(change))
        self._notes.add(task)
        task.add_done_callback(self._notes.discard)

    async def _note(self, change: Change) -> None:
        payload = {"name": change.name, "before": change.before, "state": change.state, "error": change.error}
        noted = make_draft(BREAKER_TOPIC, "broker", payload | {"open_s": change.open_s}, occurred_at=None)
        try:
            if self._make_journal or await self._log.has_stream(self._journal):
                await self._log.append(self._journal, [noted])
        except PostbusError as error:
            logger.warning("the breaker's change could not be recorded: %s", error)


def _readable(batch: list[SpoolEntry | Broken]) -> list[SpoolEntry]:
    """Return the events up to the first that cannot be read."""
    found: list[SpoolEntry] = []
    for entry in batch:
        if isinstance(entry, Broken):
            break
        found.append(entry)
    return found
