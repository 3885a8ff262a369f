"""A lane at work: one subscription's way through one partition, on this process.

Two tasks drive it. *Feeding* reads events from the cursor on and makes the matching ones ready, in order per key.
*Settling* writes what happened, everything since the last write in one transaction: how far the cursor may move, which
events wait for a retry, which are dead. Handlers run between the two and never wait for a write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from postbus.delivery.board import Board
from postbus.delivery.dead import dig
from postbus.delivery.table import WAITING, LaneKey
from postbus.model import LeaseLost, NotFound, PostbusError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from postbus.clock import Clock
    from postbus.delivery.table import DeliveryTable
    from postbus.delivery.work import LaneSettings, Outcome, Staff, Work
    from postbus.log.sqlite import SqliteLog
    from postbus.model import Event

__all__ = ["Lane"]

logger = logging.getLogger("postbus.delivery")

RETRY_S = 0.5
SETTLE_S = 0.005
QUIET_S = 0.0015
DROP_MAX = 500
DROP_S = 0.1


class Lane:
    """Feeds and settles. What it makes ready the runner takes, and calls ``finish``."""

    def __init__(
        self,
        key: LaneKey,
        log: SqliteLog,
        table: DeliveryTable,
        clock: Clock,
        settings: LaneSettings,
        staff: Staff,
    ) -> None:
        self.key = key
        self.recovered = 0
        self.token = 0
        self._log = log
        self._table = table
        self._clock = clock
        self._settings = settings
        self._staff = staff
        self._changed = asyncio.Event()
        self._fed = asyncio.Event()
        self._hurry = asyncio.Event()
        self._closing = asyncio.Event()
        self._refreshing = asyncio.Lock()
        self._stopping = self._settling = self._resting = self._pausing = self._lost = False
        self.tasks: list[asyncio.Task[None]] = []
        self._board = self._new_board()

    def _new_board(self) -> Board:
        return Board(self, self._table, self._clock, self._settings, self._staff, self._changed, self._fed)

    def _clear(self) -> None:
        self.token = 0
        self._lost = False
        self._board.leave()
        self._board = self._new_board()

    # --- life ---

    def start(self) -> None:
        """Work on the lane from now on."""
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(self._live())]

    async def stop(self, running: Callable[[], Awaitable[None]]) -> None:
        """Stop feeding, wait for what runs, write what happened, and give the lane back."""
        self._stopping = True
        self._fed.set()
        self._hurry.set()
        self._changed.set()
        await running()
        self._closing.set()
        self._changed.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.token:
            try:
                self._board.put_aside()
                await self._settle(self._board.advance(stopping=True)[0])
                await self._table.release(self.key, self.token)
            except PostbusError:
                pass  # the lease runs out by itself and the next owner recovers what was open
        self._board.leave()

    @property
    def ended(self) -> bool:
        """Whether it has stopped working by itself, because its stream or its subscription was deleted."""
        return all(task.done() for task in self.tasks)

    @property
    def busy(self) -> bool:
        """Whether it has something to do that waits neither for time to pass nor for a handler."""
        if self.ended or self._pausing:
            return False
        return self._board.pending or self._changed.is_set() or self._settling or not self._resting

    async def _live(self) -> None:
        while not self._closing.is_set():
            try:
                if not self.token and not await self._acquire():
                    return
                await self._work()
            except LeaseLost:
                logger.warning("lost the lease of %s on %s/%s", *self.key)
                self._clear()
            except NotFound:
                self._clear()
                return  # the stream or the subscription was deleted
            except PostbusError:
                await self._pause()  # full, busy or failed: said elsewhere; keep what is known, try again
            except Exception:
                logger.exception("working on %s on %s/%s failed; it goes on", *self.key)
                await self._pause()

    async def _pause(self) -> None:
        self._pausing = True
        await self._clock.wait(self._closing, RETRY_S)
        self._pausing = False
        self._changed.set()

    async def _acquire(self) -> bool:
        """Wait for the lane's lease; False when the lane is to stop instead."""
        while not self._stopping:
            state = await self._table.acquire(self.key, self._settings.window, self._staff.wants_topic)
            if state is not None:
                self._clear()
                self._board.start(state)
                self.recovered += state.recovered
                try:
                    self._board.load([(row, await self._staff.revive(row)) for row in state.rows])
                except PostbusError:
                    await self._table.release(self.key, state.token)
                    raise
                self.token = state.token
                return True
            self._changed.clear()
            self._resting = True
            await self._clock.wait(self._changed, 1.0)
            self._resting = False
        return False

    async def _work(self) -> None:
        feeding = asyncio.get_running_loop().create_task(self._feed())
        feeding.add_done_callback(lambda _: self._changed.set())
        board = self._board
        try:
            while not self._closing.is_set():  # also while stopping: what still runs needs its lease
                await self._clock.wait(self._changed, board.pause_s())
                await self._gather()
                self._changed.clear()
                if feeding.done() and not self._stopping:
                    break
                if not self._stopping:
                    board.release_due()
                following, done = board.advance(stopping=self._stopping)
                if done or self._lost or board.has_news(following):
                    await self._settle(following)
                self._fed.set()
            if feeding.done():
                feeding.result()
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def _gather(self) -> None:
        """Let more come together before it is written, unless something waits for the write or nothing more comes.

        Right after an event was handled the next one is often being published; its commit must not wait for ours, and
        one that is published a little later should not carry ours along.
        """
        board = self._board
        self._hurry.clear()
        if self._stopping or self._lost or board.pending or board.fetched >= board.reach:
            return
        self._changed.set()  # it is not at rest meanwhile
        fetched = board.fetched
        if not await self._hurried(QUIET_S) and board.fetched != fetched:  # more is coming
            await self._hurried(SETTLE_S - QUIET_S)

    async def _hurried(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._hurry.wait()
        return False

    # --- feeding ---

    async def _feed(self) -> None:
        settings, board = self._settings, self._board
        grown = False
        while not self._stopping:
            if settings.backlog_max is not None and await self._shed(settings.backlog_max):
                continue
            room = min(settings.batch, board.reach - board.fetched)
            if room <= 0 or board.held():
                if room <= 0:
                    self._hurry.set()
                await self._wait_fed()
                continue
            _, stream, partition = self.key
            events = self._log.recent(stream, partition, board.fetched, room) or await self._log.fetch(
                stream, partition, board.fetched, room
            )
            if not events:
                if grown:
                    await self._skip_removed()
                self._resting = True
                fetched = board.fetched
                grown = await self._log.wait(stream, partition, fetched, settings.poll_s, self._arrived)
                grown = grown and board.fetched == fetched
                self._resting = False
                continue
            grown = False
            self._admit(events)
            await asyncio.sleep(0)

    def _admit(self, events: list[Event]) -> None:
        board, wants = self._board, self._staff.wants
        for event in events:
            if wants(event):
                board.admit(event)
            board.fetched = event.offset + 1
        if board.idle or board.full():
            self._changed.set()

    def _arrived(self) -> bool:
        """Take up what was committed just now; a lone event need not wait until the feeding has its turn.

        Say whether that was all there is.
        """
        board, (_, stream, partition) = self._board, self.key
        room = min(self._settings.batch, board.reach - board.fetched)
        if not self._resting or self._stopping or self._settings.backlog_max is not None or room <= 0 or board.held():
            return False
        events = self._log.recent(stream, partition, board.fetched, room)
        try:
            self._admit(events)
        except Exception:  # noqa: BLE001 - the feeding meets it too, and says so
            return False
        return 0 < len(events) < room

    async def _wait_fed(self) -> None:
        self._fed.clear()
        self._resting = True
        if self._settings.backlog_max is None:
            await self._fed.wait()
        else:
            await self._clock.wait(self._fed, DROP_S)  # the backlog grows also while nothing is taken from it
        self._resting = False

    async def _skip_removed(self) -> None:
        """Go on at the first retained event when retention has removed those that come next."""
        stats = await self._log.get_stream_stats(self.key.stream)
        first = stats.partitions[self.key.partition].first_offset
        if first > self._board.fetched:
            self._board.fetched = first
            self._changed.set()

    async def _shed(self, backlog_max: int) -> bool:
        """Give up on the oldest events nobody has started when more than ``backlog_max`` wait; say whether any were."""
        board, (_, stream, partition) = self._board, self.key
        stats = await self._log.get_stream_stats(stream)
        excess = stats.partitions[partition].high_water_mark - board.fetched - backlog_max - board.vacant()
        if excess <= 0:
            return False
        if board.dropping:  # one batch at a time: each is written before the next is read
            await self._wait_fed()
            return True
        events = await self._log.fetch(stream, partition, board.fetched, min(excess, DROP_MAX))
        last = board.fetched + min(excess, DROP_MAX)
        board.drop(self._staff.overflowed([event for event in events if event.offset < last]), last)
        return True

    # --- what handlers report ---

    def finish(self, work: Work, outcome: Outcome) -> None:
        """Take note of how a run ended; it is written with the next settlement."""
        if self._board.owns(work):  # else the lease was lost meanwhile: whoever has the lane now decides
            self._board.finish(work, outcome)
            if self._board.pending:
                self._hurry.set()

    def owns(self, work: Work) -> bool:
        """Say whether a piece of work still belongs to this lane's lease."""
        return self._board.owns(work)

    # --- what others changed ---

    async def refresh(self) -> None:
        """Take over what somebody else changed: a replayed dead letter, an operator's re-queue, a reset."""
        async with self._refreshing:
            board, token = self._board, self.token
            if not token or self._stopping:
                return
            board.watch_ends()
            try:
                found, rows = await self._table.look(self.key)
                if found != token and token == self.token:
                    self._lost = True  # the next settlement finds out by itself; have it now
                    self._hurry.set()
                    rows = []
                for row in rows:
                    if row.status != WAITING or row.alone:
                        continue
                    event = await self._staff.revive(row)
                    if board is not self._board or self._stopping:
                        return
                    if event is not None:
                        board.requeue(row, event)
            finally:
                board.unwatch_ends()
                self._changed.set()

    # --- settling ---

    async def _settle(self, following: int) -> None:
        board = self._board
        pages = board.take(following)
        self._settling = True
        try:
            await self._table.settle(self.key, self.token, pages.settlement)
        except LeaseLost:
            raise
        except Exception as error:
            board.put_back(pages)
            if isinstance(error, NotFound):
                await dig(self._log, self.key.stream, {stream for _, stream, _ in pages.dead})
            raise
        finally:
            self._settling = False
        board.wrote(pages)
