"""Following one partition of a remote: batch after batch into the copy, and wait for more."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from postbus.clock import SystemClock
from postbus.model import Event, NotFound, PostbusError, Unreachable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from postbus.log.replica import ReplicaLog
    from postbus.model import Draft, Receipt, Stream

__all__ = ["Follower"]

logger = logging.getLogger("postbus.log")

REAL = SystemClock()  # whatever the store's clock says: a network does not wait for it
BATCH_MIN, BATCH_MAX = 16, 2000
BATCH_BYTES = 8 * 1024 * 1024
WAIT_S = 30.0
BUSY_S, LULL_S = 0.01, 0.002
ANSWER_S = 0.01
PAUSE_S, PAUSE_S_MAX = 0.05, 1.0
OWN_MAX = 20_000


class Follower:
    """Keeps the copy of one partition growing, for one life of its stream. ``away`` says why it does not."""

    def __init__(self, log: ReplicaLog, stream: Stream, partition: int) -> None:
        self.stream = stream
        self.away: str | None = None
        self._log = log
        self._partition = partition
        self._limit = 256
        self._copied_s = 0.0
        self._own: dict[int, Event] = {}
        self._answered = asyncio.Event()
        self._nudge = asyncio.Event()
        self._begun = self._failed = -1
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> asyncio.Task[None]:
        """End it; the copy keeps what it has. Idempotent."""
        self._task.cancel()
        return self._task

    def nudge(self) -> None:
        """Look again now."""
        self._nudge.set()

    def failed_since(self, turn: int) -> bool:
        """Say whether the remote was asked in vain after that turn; if it was not, but before, it is asked now."""
        if self.away is None:
            return False
        if self._failed < turn:
            self.nudge()
        return self._failed > turn

    def take(self, appended: Iterable[tuple[Draft, Receipt]]) -> None:
        """Take events that this process has appended, so that they need not be fetched back."""
        if len(self._own) < OWN_MAX:
            for draft, receipt in appended:
                self._own[receipt.offset] = _event(draft, receipt)
        self._answered.set()

    async def _run(self) -> None:
        pause_s = PAUSE_S
        while True:
            self._begun = next(self._log.turns)
            try:
                await self._copy()
                self.away, pause_s = None, PAUSE_S
                continue
            except NotFound:
                self._log.look_soon()  # whoever learns of its next life replaces this follower
            except Unreachable as error:
                self._stuck(str(error))
            except PostbusError as error:
                if self.away != str(error):
                    logger.warning("%s/%d cannot be copied: %s", self.stream.name, self._partition, error)
                self._stuck(str(error))
            self._nudge.clear()
            await REAL.wait(self._nudge, pause_s)
            pause_s = min(pause_s * 2, PAUSE_S_MAX)

    def _stuck(self, why: str) -> None:
        self.away, self._failed = why, self._begun
        self._log.stuck(self.stream.name, self._partition)

    async def _copy(self) -> None:
        """Copy until nothing is left, then wait for more; returns after a while."""
        log, upstream = self._log, self._log.upstream
        head = await log.copied(self.stream, self._partition)
        came = False
        while True:
            events = await self._appended(head)
            if not events:
                events = await upstream.fetch(self.stream, self._partition, head, self._limit)
            if events and events[0].offset <= head:
                head = await log.apply(self.stream, self._partition, events)
                self.away, came = None, False
                if self._again(events) or self._own or log.sending or await self._lull(len(events)):
                    continue
            elif events or came:
                before, head = head, await self._pass_gap(head)
                if head == before:  # announced, and not to be had yet
                    await REAL.sleep(PAUSE_S)
            self.away = None
            came = await upstream.wait(self.stream, self._partition, head, WAIT_S)
            if not came:
                return

    async def _appended(self, head: int) -> list[Event]:
        """Return what this process has appended at the head; waits a moment for what it is appending now."""
        events = self._following(head)
        if not events and not self._own and self._log.sending:
            self._answered.clear()
            await REAL.wait(self._answered, ANSWER_S)
            events = self._following(head)
        return events

    def _following(self, head: int) -> list[Event]:
        own = self._own
        events: list[Event] = []
        while len(events) < BATCH_MAX and (event := own.pop(head + len(events), None)) is not None:
            events.append(event)
        if not events and own:
            self._own = {offset: event for offset, event in own.items() if offset > head}
        return events

    async def _lull(self, count: int) -> bool:
        """Let a few more come while they come one by one in quick succession; say whether it did."""
        now_s = REAL.monotonic_s()
        busy, self._copied_s = now_s - self._copied_s < BUSY_S, now_s
        if count >= BATCH_MIN or not busy:
            return False
        await REAL.sleep(LULL_S)
        return True

    def _again(self, events: list[Event]) -> bool:
        """Choose the next batch's size by what the events take; say whether there may be more at once."""
        full = len(events) >= self._limit
        size = sum(len(event.payload_json) + 500 for event in events)
        self._limit = max(BATCH_MIN, min(BATCH_MAX, BATCH_BYTES * len(events) // size, 2 * self._limit))
        return full

    async def _pass_gap(self, head: int) -> int:
        """Go on at the first event that the remote still has, if what comes next here is gone there."""
        first = (await self._log.upstream.extents(self.stream))[self._partition][0]
        if first <= head:
            return head
        gaps = await self._log.leap(self.stream, self._partition, first)
        missed = ", ".join(f"{gap.consumer} misses {gap.missed}" for gap in gaps) or "no reader misses any"
        name = f"{self.stream.name}/{self._partition}"
        logger.warning("%s: events %d to %d were trimmed before they came over: %s", name, head, first - 1, missed)
        return first


def _event(draft: Draft, receipt: Receipt) -> Event:
    """Return what was appended as every reader of the remote finds it."""
    occurred, created = draft.occurred_at_us, receipt.created_at_us
    return Event(
        receipt.stream, receipt.partition, receipt.offset, draft.topic, draft.source, draft.variant, draft.key,
        draft.payload_json, draft.metadata_json, draft.headers_json, draft.correlation_id, draft.native_id,
        draft.delivery_handle_json, created if occurred is None else occurred, created, draft.trust,
    )  # fmt: skip
