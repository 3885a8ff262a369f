"""A lane at work: one subscription's way through one partition, on this process.

Two tasks drive it. *Feeding* reads events from the cursor on and makes the matching ones ready, in order per key.
*Settling* writes what happened, everything since the last write in one transaction: how far the cursor may move, which
events wait for a retry, which are dead. Handlers run between the two and never wait for a write.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from postbus.delivery.dead import dig
from postbus.delivery.gate import PATIENCE_S
from postbus.delivery.table import DONE, FAILED, PROCESSING, WAITING, LaneKey, Row, Settlement
from postbus.delivery.turns import Turns
from postbus.delivery.work import Verdict, Work
from postbus.model import LeaseLost, NotFound, PostbusError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from postbus.clock import Clock
    from postbus.delivery.table import DeliveryTable
    from postbus.delivery.work import LaneSettings, Outcome
    from postbus.log.sqlite import SqliteLog
    from postbus.model import Draft, Event

__all__ = ["Lane"]

logger = logging.getLogger("postbus.delivery")

LINGER_S = 0.25
SKIP_MAX = 1000
SKIP_S = 1.0
ROWS_MAX = 10_000
RETRY_S = 0.5


class Lane:
    """Feeds and settles. ``ready`` is shared with the runner, which takes work from it and calls ``finish``."""

    def __init__(
        self,
        key: LaneKey,
        log: SqliteLog,
        table: DeliveryTable,
        clock: Clock,
        settings: LaneSettings,
        wants: Callable[[str], bool],
        make_ready: Callable[[Work], None],
        crashed: Callable[[Work], Outcome | None],
        revive: Callable[[Row], Awaitable[Event | None]],
    ) -> None:
        self.key = key
        self.recovered = 0
        self._log = log
        self._table = table
        self._clock = clock
        self._settings = settings
        self._wants = wants
        self._make_ready = make_ready
        self._crashed = crashed
        self._revive = revive
        self._changed = asyncio.Event()
        self._fed = asyncio.Event()
        self._closing = asyncio.Event()
        self._refreshing = asyncio.Lock()
        self._stopping = self._settling = self._resting = self._pausing = False
        self.tasks: list[asyncio.Task[None]] = []
        self._clear()

    def _clear(self) -> None:
        self.token = 0
        self._cursor = self._fetched = self._reach = 0
        self._order: deque[int] = deque()
        self._finished: set[int] = set()
        self._open: dict[int, Work] = {}
        self._rows: dict[int, Work] = {}
        self._turns = Turns(strict=self._settings.strict)
        self._dirty: dict[int, Row] = {}
        self._dead: list[tuple[Row, str, Draft]] = []
        self._claims: list[Work] = []
        self._alone: deque[Work] = deque()
        self._ended: set[int] = set()
        self._settled_s = 0.0
        self._table.gate.leave(self)

    # --- life ---

    def start(self) -> None:
        """Work on the lane from now on."""
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(self._live())]

    async def stop(self, running: Callable[[], Awaitable[None]]) -> None:
        """Stop feeding, wait for what runs, write what happened, and give the lane back."""
        self._stopping = True
        self._fed.set()
        self._changed.set()
        await running()
        self._closing.set()
        self._changed.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.token:
            try:
                self._put_aside()
                await self._settle(self._advance()[0])
                await self._table.release(self.key, self.token)
            except PostbusError:
                pass  # the lease runs out by itself and the next owner recovers what was open
        self._table.gate.leave(self)

    @property
    def ended(self) -> bool:
        """Whether it has stopped working by itself, because its stream or its subscription was deleted."""
        return all(task.done() for task in self.tasks)

    @property
    def busy(self) -> bool:
        """Whether it has something to do that waits neither for time to pass nor for a handler."""
        if self.ended or self._pausing:
            return False
        news = self._dirty or self._dead or self._claims or self._changed.is_set()
        return bool(news) or self._settling or not self._resting

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
            state = await self._table.acquire(self.key, self._settings.window, self._wants)
            if state is not None:
                self._clear()
                self._cursor = self._fetched = state.next_offset
                self._reach = state.reach
                self.recovered += state.recovered
                self._settled_s = self._clock.monotonic_s()
                await self._load(state.rows)
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
        try:
            while not self._closing.is_set():  # also while stopping: what still runs needs its lease
                await self._clock.wait(self._changed, self._pause_s())
                self._changed.clear()
                if feeding.done() and not self._stopping:
                    break
                self._release_due()
                following, done = self._advance()
                if done or self._has_news(following):
                    await self._settle(following)
                self._fed.set()
            if feeding.done():
                feeding.result()
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    # --- feeding ---

    async def _feed(self) -> None:
        settings = self._settings
        grown = False
        while not self._stopping:
            room = min(settings.batch, self._reach - self._fetched)
            if room <= 0 or self._held():
                self._fed.clear()
                self._resting = True
                await self._fed.wait()
                self._resting = False
                continue
            events = await self._log.fetch(self.key.stream, self.key.partition, self._fetched, room)
            if not events:
                if grown:
                    await self._skip_removed()
                self._resting = True
                grown = await self._log.wait(self.key.stream, self.key.partition, self._fetched, settings.poll_s)
                self._resting = False
                continue
            grown = False
            for event in events:
                self._admit(event)
            self._fetched = events[-1].offset + 1
            if not self._order or self._full():
                self._changed.set()
            await asyncio.sleep(0)

    async def _skip_removed(self) -> None:
        """Go on at the first retained event when retention has removed those that come next."""
        stats = await self._log.get_stream_stats(self.key.stream)
        first = stats.partitions[self.key.partition].first_offset
        if first > self._fetched:
            self._fetched = first
            self._changed.set()

    def _held(self) -> bool:
        """Say whether new events must wait: for what was in flight at a crash, or for order."""
        if self._alone or len(self._rows) >= ROWS_MAX or len(self._open) >= self._settings.batch:
            return True
        return self._settings.strict and bool(self._rows)

    def _admit(self, event: Event) -> None:
        if event.offset in self._rows or not self._wants(event.topic):
            return
        work = Work(self, event, 1, None)
        offset = event.offset
        self._order.append(offset)
        self._open[offset] = work
        if self._turns.take(work):
            self._make_ready(work)

    def _next_turn(self, work: Work) -> None:
        following = self._turns.pass_on(work)
        if following is not None and following.row is None:
            self._make_ready(following)  # one with a row is claimed when it is due, see _release_due

    # --- what handlers report ---

    def finish(self, work: Work, outcome: Outcome) -> None:
        """Take note of how a run ended; it is written with the next settlement."""
        if not self.owns(work):
            return  # the lease was lost meanwhile: whoever has the lane now decides
        offset = work.event.offset
        row = work.row
        alone = bool(self._alone) and self._alone[0] is work
        if row is None:
            del self._open[offset]
            self._finished.add(offset)
            if outcome.verdict is Verdict.DONE:
                self._next_turn(work)
                self._changed.set()
                if len(self._open) <= self._settings.batch // 2:
                    self._fed.set()
                return
            row = work.row = Row(offset=offset, key=work.event.key)
        row.attempt, row.error = work.attempt, outcome.error
        if outcome.verdict is Verdict.RETRY:
            row.alone = 0
            self._table.delayed(row, outcome.delay_s)
            self._rows[offset] = work
            self._dirty[offset] = row
            if alone:
                self._turns.take(work)
        else:
            self._end(row, outcome)
            if not alone:
                self._next_turn(work)
        if alone:
            self._alone.popleft()
            self._next_alone()
        self._changed.set()

    def _end(self, row: Row, outcome: Outcome) -> None:
        """Let go of an event with a row: it is done, or dead."""
        self._rows.pop(row.offset, None)
        if self._refreshing.locked():
            self._ended.add(row.offset)
        if outcome.dead is not None:
            self._dead.append((row, *outcome.dead))
        else:
            row.status, row.alone = DONE, 0
            self._dirty[row.offset] = row

    def owns(self, work: Work) -> bool:
        """Say whether a piece of work still belongs to this lane's lease."""
        return (self._open if work.row is None else self._rows).get(work.event.offset) is work

    # --- rows ---

    async def _load(self, rows: list[Row]) -> None:
        """Take over the rows of an earlier owner."""
        lonely: set[str] = set()
        for row in rows:
            event = await self._revive(row)
            if event is None:
                row.status, row.error = FAILED, "retention removed it before it was delivered"
                self._dirty[row.offset] = row
                continue
            if row.status == PROCESSING:  # its owner gave the lane back while this still ran
                row.status = WAITING
            work = Work(self, event, row.attempt, row)
            outcome = self._crashed(work) if row.alone else None
            if outcome is not None and outcome.dead is not None:
                row.error = outcome.error
                self._dead.append((row, *outcome.dead))
                continue
            self._rows[row.offset] = work
            key = self._turns.key(work)
            if not self._turns.taken(work) and (row.alone or key in lonely):
                row.alone = max(row.alone, 1)  # also when only one before it of its key is: nothing overtakes
                self._alone.append(work)
                lonely |= {key} if key is not None else set()
            else:
                row.alone = 0  # it waited behind another event of its key, so it did not run
                self._turns.take(work)
        self._next_alone()
        self._changed.set()

    async def refresh(self) -> None:
        """Take over rows that somebody else made wait again: a replayed dead letter, an operator's re-queue."""
        async with self._refreshing:
            if not self.token or self._stopping:
                return
            token = self.token
            self._ended.clear()
            for row in await self._table.rows(self.key):
                if row.status != WAITING or row.alone:
                    continue
                event = await self._revive(row)
                if token != self.token or self._stopping:
                    return
                known = row.offset in self._rows or row.offset in self._open
                if event is None or known or row.offset in self._ended or row.offset in self._dirty:
                    continue  # known already, or over since what was read was written
                work = Work(self, event, row.attempt, row)
                self._rows[row.offset] = work
                self._turns.take(work)
            self._changed.set()

    def _next_alone(self) -> None:
        """Take those that have to wait behind another event of their key out of the queue of the lonely."""
        while self._alone and self._turns.taken(self._alone[0]):
            work = self._alone.popleft()
            if work.row is not None:
                work.row.alone = 0
            self._turns.take(work)
        if not self._alone:
            self._fed.set()

    def _release_due(self) -> None:
        """Have rows claimed whose time has come and whose turn it is."""
        if self._stopping or not self._rows:
            return
        first = self._alone[0] if self._alone else None
        if first is not None and first.started and self._clock.monotonic_s() - (first.since_s or 0.0) >= PATIENCE_S:
            self._turns.take(self._alone.popleft())  # it is on record, and others have waited long enough for it
            self._table.gate.leave(self)
            self._next_alone()
        works = [self._alone[0]] if self._alone else [work for work in self._rows.values() if not work.behind]
        claimed = {id(work) for work in self._claims}
        for work in works:
            row = work.row
            if row is None or row.status != WAITING or id(work) in claimed or self._table.due_in_us(row) > 0:
                continue
            if not self._alone or self._table.gate.enter(self, self._changed.set):
                self._claims.append(work)

    def _pause_s(self) -> float:
        pause = self._settings.lease_s / 3
        if self._alone:
            pause = min(pause, PATIENCE_S)
        elif self._rows:
            rows = [work.row for work in self._rows.values() if work.row is not None and not work.behind]
            waits = [self._table.due_in_us(row) for row in rows if row.status == WAITING]
            pause = min([pause, *(max(wait, 0) / 1e6 for wait in waits)])
        if self._finished or self._full():
            pause = min(pause, LINGER_S)
        if self._fetched > self._cursor and not self._order:
            pause = min(pause, SKIP_S)
        return pause

    # --- settling ---

    def _has_news(self, following: int) -> bool:
        """Say whether something must be written now; moving past events that do not match can wait a little."""
        if self._dirty or self._dead or self._claims:
            return True
        if self._reach <= following and not self._alone:
            return True  # nothing may be started until it reaches further
        skipped = following - self._cursor
        if skipped >= min(SKIP_MAX, self._settings.window // 2):
            return True
        age = self._clock.monotonic_s() - self._settled_s
        return age >= self._settings.lease_s / 3 or (skipped > 0 and age >= SKIP_S)

    def _full(self) -> bool:
        """Say whether nothing more can be fetched until the cursor moves."""
        return len(self._open) >= self._settings.batch or self._fetched >= self._reach

    def _advance(self) -> tuple[int, bool]:
        """Return how far the cursor may move and whether something was done on the way.

        An event that runs long, or waits behind one that does, gets a row, so that it does not hold up the others.
        """
        order, finished = self._order, self._finished
        done = False
        now = self._clock.monotonic_s()
        while order:
            first = order[0]
            if first not in finished:
                work = self._open[first]
                if work.since_s is None:
                    work.since_s = now
                if self._stopping or not (finished or self._full()):
                    break
                if not work.behind and now - work.since_s < LINGER_S:
                    break
                self._give_row(work)
            order.popleft()
            finished.discard(first)
            done = True
        return (order[0] if order else self._fetched), done

    def _give_row(self, work: Work) -> None:
        offset = work.event.offset
        row = work.row = Row(offset=offset, key=work.event.key)
        if work.behind:
            work.attempt = 0
        else:
            row.status, row.attempt = PROCESSING, work.attempt
        del self._open[offset]
        self._rows[offset] = work
        self._dirty[offset] = row
        self._finished.add(offset)

    def _put_aside(self) -> None:
        """Before giving the lane back: what was not done waits, and what lies below something done gets a row."""
        self._claims.clear()
        top = max(self._finished, default=-1)
        for offset in [offset for offset in self._order if offset < top and offset in self._open]:
            self._give_row(self._open[offset])
        for offset, work in self._rows.items():
            if work.row is not None and work.row.status == PROCESSING:
                work.row.status, work.row.alone = WAITING, 0  # no process died of it
                work.row.attempt -= not work.started
                self._dirty[offset] = work.row

    async def _settle(self, following: int) -> None:
        claims, self._claims = self._claims, []
        for work in claims:
            assert work.row is not None  # noqa: S101 - only rows are claimed
            work.row.status = PROCESSING
            work.row.attempt += 1
            work.attempt = work.row.attempt
            work.started = False
            self._dirty[work.event.offset] = work.row
        dirty, self._dirty = self._dirty, {}
        dead, self._dead = self._dead, []
        reach = following if self._alone else following + self._settings.window
        gone = {row.offset for row, *_ in dead}
        rows = [msgspec.structs.replace(row) for row in dirty.values() if row.offset not in gone]
        self._settling = True
        try:
            await self._table.settle(self.key, self.token, Settlement(following, reach, rows, dead))
        except LeaseLost:
            raise
        except Exception as error:
            self._dirty = {**dirty, **self._dirty}
            self._dead = dead + self._dead
            self._claims = claims + self._claims
            for row in [work.row for work in claims if work.row is not None]:
                row.status = WAITING
                row.attempt -= 1
            if isinstance(error, NotFound):
                await dig(self._log, self.key.stream, {stream for _, stream, _ in dead})
            raise
        finally:
            self._settling = False
        self._cursor, self._reach = following, reach
        self._settled_s = self._clock.monotonic_s()
        for work in claims:
            self._make_ready(work)
        lonely = self._alone[0].row if self._alone else None
        if not (self._dirty or self._dead or (lonely is not None and lonely.status == PROCESSING)):
            self._table.gate.leave(self)  # what it came to is on disk, so nobody will be blamed for it later
