"""A lane at work: one subscription's way through one partition, on this process.

Two tasks drive it. *Feeding* reads events from the cursor on and makes the matching ones ready, in order per key.
*Settling* writes what happened, everything since the last write in one transaction: how far the cursor may move, which
events wait for a retry, which are dead. Handlers run between the two and never wait for a write.
"""

from __future__ import annotations

import asyncio
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from postbus.delivery.table import DONE, PROCESSING, WAITING, LaneKey, Row, Settlement
from postbus.model import LeaseLost, NotFound, PostbusError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from postbus.clock import Clock
    from postbus.delivery.table import DeliveryTable
    from postbus.log.sqlite import SqliteLog
    from postbus.model import Draft, Event

__all__ = ["Lane", "LaneSettings", "Outcome", "Verdict", "Work"]

LINGER_S = 0.25
SKIP_MAX = 1000
SKIP_S = 1.0
ROWS_MAX = 10_000
RETRY_S = 0.5


class Verdict(StrEnum):
    """What a handler's run came to."""

    DONE = "done"
    RETRY = "retry"
    DEAD = "dead"


class Outcome(NamedTuple):
    """A verdict with what goes with it: the error, how long to wait, or where the dead letter goes."""

    verdict: Verdict
    error: str | None = None
    delay_s: float = 0.0
    dead: tuple[str, Draft] | None = None


class Work:
    """One event to be handled, its attempt, and its row if it has one."""

    __slots__ = ("attempt", "event", "lane", "row", "since_s")

    def __init__(self, lane: Lane, event: Event, attempt: int, row: Row | None) -> None:
        self.lane = lane
        self.event = event
        self.attempt = attempt
        self.row = row
        self.since_s: float | None = None


class LaneSettings(NamedTuple):
    """How a lane works."""

    batch: int
    window: int
    strict: bool
    lease_s: float
    poll_s: float


class Lane:
    """Feeds and settles. ``ready`` is shared with the runner, which takes work from it and calls ``finish``."""

    def __init__(
        self,
        key: LaneKey,
        log: SqliteLog,
        table: DeliveryTable,
        clock: Clock,
        settings: LaneSettings,
        match: Callable[[str], bool],
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
        self._match = match
        self._whole = match(key.stream)
        self._make_ready = make_ready
        self._crashed = crashed
        self._revive = revive
        self._changed = asyncio.Event()
        self._fed = asyncio.Event()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._clear()

    def _clear(self) -> None:
        self.token = 0
        self._cursor = self._fetched = self._reach = 0
        self._order: deque[int] = deque()
        self._finished: set[int] = set()
        self._open: dict[int, Work] = {}
        self._rows: dict[int, Work] = {}
        self._busy: dict[str, deque[Work]] = {}
        self._dirty: dict[int, Row] = {}
        self._dead: list[tuple[Row, str, Draft]] = []
        self._claims: list[Work] = []
        self._alone: deque[Work] = deque()
        self._settled_s = 0.0

    # --- life ---

    def start(self) -> None:
        """Work on the lane from now on."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._live())]

    async def stop(self, running: Callable[[], Awaitable[None]]) -> None:
        """Stop feeding, wait for what runs, write what happened, and give the lane back."""
        self._stopping = True
        self._fed.set()
        self._changed.set()
        await running()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.token:
            try:
                self._put_aside()
                await self._settle(self._advance()[0])
                await self._table.release(self.key, self.token)
            except PostbusError:
                pass  # the lease runs out by itself and the next owner recovers what was open

    async def _live(self) -> None:
        while not self._stopping:
            try:
                if not self.token:
                    await self._acquire()
                await self._work()
            except LeaseLost:
                self._clear()
            except NotFound:
                return  # the stream or the subscription was deleted
            except PostbusError:
                await self._clock.sleep(RETRY_S)  # full, busy or failed: said elsewhere; keep what is known, try again

    async def _acquire(self) -> None:
        while not self._stopping:
            state = await self._table.acquire(self.key, self._settings.window, self._match)
            if state is not None:
                self._clear()
                self.token = state.token
                self._cursor = self._fetched = state.next_offset
                self._reach = state.next_offset + self._settings.window
                self.recovered += state.recovered
                self._settled_s = self._clock.monotonic_s()
                await self._load(state.rows)
                return
            await self._clock.wait(self._changed, 1.0)

    async def _work(self) -> None:
        feeding = asyncio.get_running_loop().create_task(self._feed())
        try:
            while not self._stopping and not feeding.done():
                await self._clock.wait(self._changed, self._pause_s())
                self._changed.clear()
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
        while not self._stopping:
            room = min(settings.batch, self._reach - self._fetched)
            if room <= 0 or self._held():
                self._fed.clear()
                await self._fed.wait()
                continue
            events = await self._log.fetch(self.key.stream, self.key.partition, self._fetched, room)
            if not events:
                await self._log.wait(self.key.stream, self.key.partition, self._fetched, settings.poll_s)
                continue
            for event in events:
                self._admit(event)
            self._fetched = events[-1].offset + 1
            if not self._order:
                self._changed.set()
            await asyncio.sleep(0)

    def _held(self) -> bool:
        """Say whether new events must wait: for what was in flight at a crash, or for order."""
        if self._alone or len(self._rows) >= ROWS_MAX or len(self._open) >= self._settings.batch:
            return True
        return self._settings.strict and bool(self._rows)

    def _admit(self, event: Event) -> None:
        if not (self._whole or self._match(event.topic)):
            return
        work = Work(self, event, 1, None)
        offset = event.offset
        self._order.append(offset)
        self._open[offset] = work
        if self._turn(work):
            self._make_ready(work)

    def _turn(self, work: Work) -> bool:
        """Say whether it is this work's turn for its key; otherwise it waits behind the one before it."""
        key = "" if self._settings.strict else work.event.key
        if key is None:
            return True
        behind = self._busy.get(key)
        if behind is None:
            self._busy[key] = deque()
            return True
        behind.append(work)
        return False

    def _next_turn(self, work: Work) -> None:
        key = "" if self._settings.strict else work.event.key
        if key is None:
            return
        behind = self._busy[key]
        if not behind:
            del self._busy[key]
            return
        following = behind.popleft()
        if following.row is None:
            self._make_ready(following)
        else:
            self._claims.append(following)

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
            row.alone = False
            self._table.delayed(row, outcome.delay_s)
            self._rows[offset] = work
            self._dirty[offset] = row
            if alone:
                self._turn(work)
        else:
            self._rows.pop(offset, None)
            if outcome.dead is not None:
                self._dead.append((row, *outcome.dead))
            else:
                row.status, row.alone = DONE, False
                self._dirty[offset] = row
            if not alone:
                self._next_turn(work)
        if alone:
            self._alone.popleft()
            self._next_alone()
        self._changed.set()

    def owns(self, work: Work) -> bool:
        """Say whether a piece of work still belongs to this lane's lease."""
        return (self._open if work.row is None else self._rows).get(work.event.offset) is work

    # --- rows ---

    async def _load(self, rows: list[Row]) -> None:
        """Take over the rows of an earlier owner."""
        for row in rows:
            event = await self._revive(row)
            if event is None:  # retention removed it; nothing is left to deliver
                row.status = DONE
                self._dirty[row.offset] = row
                continue
            if row.status == PROCESSING:  # its owner gave the lane back while this still ran
                row.status = WAITING
            work = Work(self, event, row.attempt, row)
            self._rows[row.offset] = work
            outcome = self._crashed(work) if row.alone else None
            if outcome is not None and outcome.dead is not None:
                row.error = outcome.error
                self._dead.append((row, *outcome.dead))
                del self._rows[row.offset]
            elif row.alone and not self._blocked(work):
                self._alone.append(work)
            else:
                row.alone = False  # it waited behind another event of its key, so it did not run
                self._turn(work)
        self._next_alone()
        self._changed.set()

    async def refresh(self) -> None:
        """Take over rows that somebody else made wait again: a replayed dead letter, an operator's re-queue."""
        if not self.token or self._stopping:
            return
        token = self.token
        for row in await self._table.rows(self.key):
            if row.status != WAITING or row.offset in self._rows or row.offset in self._open or row.alone:
                continue
            if any(dead.offset == row.offset for dead, *_ in self._dead) or row.offset in self._dirty:
                continue  # not written yet, so what was read is old
            event = await self._revive(row)
            if event is None or token != self.token or row.offset in self._rows:
                continue
            work = Work(self, event, row.attempt, row)
            self._rows[row.offset] = work
            self._turn(work)
        self._changed.set()

    def _blocked(self, work: Work) -> bool:
        key = "" if self._settings.strict else work.event.key
        return key is not None and key in self._busy

    def _next_alone(self) -> None:
        while self._alone:
            work = self._alone[0]
            if not self._blocked(work):
                self._claims.append(work)
                return
            self._alone.popleft()
            if work.row is not None:
                work.row.alone = False
            self._turn(work)
        self._fed.set()

    def _release_due(self) -> None:
        """Have rows claimed whose time has come and whose turn it is."""
        if self._alone or not self._rows:
            return
        waiting = {id(work) for behind in self._busy.values() for work in behind} if self._busy else set()
        claimed = {id(work) for work in self._claims}
        for work in self._rows.values():
            row = work.row
            if row is None or row.status != WAITING or id(work) in waiting or id(work) in claimed:
                continue
            if self._table.due_in_us(row) <= 0:
                self._claims.append(work)

    def _pause_s(self) -> float:
        pause = self._settings.lease_s / 3
        if self._rows and not self._alone:
            waits = [self._table.due_in_us(w.row) for w in self._rows.values() if w.row and w.row.status == WAITING]
            pause = min([pause, *(max(wait, 0) / 1e6 + 0.001 for wait in waits)])
        if self._finished:
            pause = min(pause, LINGER_S)
        if self._fetched > self._cursor and not self._order:
            pause = min(pause, SKIP_S)
        return pause

    # --- settling ---

    def _has_news(self, following: int) -> bool:
        """Say whether something must be written now; moving past events that do not match can wait a little."""
        if self._dirty or self._dead or self._claims:
            return True
        skipped = following - self._cursor
        if skipped >= min(SKIP_MAX, self._settings.window // 2):
            return True
        age = self._clock.monotonic_s() - self._settled_s
        return age >= self._settings.lease_s / 3 or (skipped > 0 and age >= SKIP_S)

    def _advance(self) -> tuple[int, bool]:
        """Return how far the cursor may move and whether something was done on the way.

        An event that runs long gets a row, so that it does not hold up the cursor.
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
                if not finished or now - work.since_s < LINGER_S:
                    break
                self._give_row(work)
            order.popleft()
            finished.discard(first)
            done = True
        return (order[0] if order else self._fetched), done

    def _give_row(self, work: Work) -> None:
        offset = work.event.offset
        started = all(work not in behind for behind in self._busy.values())
        row = work.row = Row(offset=offset, key=work.event.key)
        if started:
            row.status, row.attempt = PROCESSING, work.attempt
        else:
            work.attempt = 0
        del self._open[offset]
        self._rows[offset] = work
        self._dirty[offset] = row
        self._finished.add(offset)

    def _put_aside(self) -> None:
        """Before giving the lane back: what never ran but lies below something done gets a row."""
        top = max(self._finished, default=-1)
        for offset in [offset for offset in self._order if offset < top and offset in self._open]:
            work = self._open[offset]
            self._give_row(work)
            assert work.row is not None  # noqa: S101 - just given
            work.row.status = WAITING

    async def _settle(self, following: int) -> None:
        claims, self._claims = self._claims, []
        for work in claims:
            assert work.row is not None  # noqa: S101 - only rows are claimed
            work.row.status = PROCESSING
            work.row.attempt += 1
            work.attempt = work.row.attempt
            self._dirty[work.event.offset] = work.row
        dirty, self._dirty = self._dirty, {}
        dead, self._dead = self._dead, []
        reach = following + self._settings.window
        rows = [msgspec.structs.replace(row) for row in dirty.values()]
        try:
            await self._table.settle(self.key, self.token, Settlement(following, reach, rows, dead))
        except LeaseLost:
            raise
        except PostbusError:
            self._dirty = {**dirty, **self._dirty}
            self._dead = dead + self._dead
            for work in claims:
                assert work.row is not None  # noqa: S101 - only rows are claimed
                work.row.status = WAITING
                work.row.attempt -= 1
            raise
        self._cursor, self._reach = following, reach
        self._settled_s = self._clock.monotonic_s()
        for work in claims:
            self._make_ready(work)
