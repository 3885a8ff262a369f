"""What a lane has in its hands under one lease: what is open, what has a row, and what is to be written.

Nothing here waits: a lane reads and writes, its board keeps the books.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from postbus.delivery.gate import PATIENCE_S
from postbus.delivery.table import DONE, FAILED, PROCESSING, WAITING, Row, Settlement
from postbus.delivery.turns import Turns
from postbus.delivery.work import Verdict, Work

if TYPE_CHECKING:
    import asyncio

    from postbus.clock import Clock
    from postbus.delivery.lane import Lane
    from postbus.delivery.table import DeliveryTable, LaneState
    from postbus.delivery.work import LaneSettings, Outcome, Staff
    from postbus.model import Draft, Event

__all__ = ["Board", "Pages"]

LINGER_S = 0.25
SKIP_MAX = 1000
SKIP_S = 1.0
ROWS_MAX = 10_000


class Pages(NamedTuple):
    """What one settlement takes from the board."""

    settlement: Settlement
    claims: list[Work]
    dirty: dict[int, Row]
    dead: list[tuple[Row, str, Draft]]


class Board:
    """The books of one lane under one lease. ``changed`` asks for a settlement, ``fed`` for more events."""

    def __init__(
        self,
        lane: Lane,
        table: DeliveryTable,
        clock: Clock,
        settings: LaneSettings,
        staff: Staff,
        changed: asyncio.Event,
        fed: asyncio.Event,
    ) -> None:
        self._lane = lane
        self._table = table
        self._clock = clock
        self._settings = settings
        self._staff = staff
        self._changed = changed
        self._fed = fed
        self._turns = Turns(strict=settings.strict)
        self._rows_max = min(ROWS_MAX, settings.backlog_max or ROWS_MAX)
        self.fetched = 0
        self.reach = 0
        self._cursor = 0
        self._order: deque[int] = deque()
        self._finished: set[int] = set()
        self._open: dict[int, Work] = {}
        self._rows: dict[int, Work] = {}
        self._dirty: dict[int, Row] = {}
        self._dead: list[tuple[Row, str, Draft]] = []
        self._claims: list[Work] = []
        self._alone: deque[Work] = deque()
        self._ended: set[int] | None = None
        self._settled_s = clock.monotonic_s()

    def start(self, state: LaneState) -> None:
        """Begin where the lane stands."""
        self._cursor = self.fetched = state.next_offset
        self.reach = state.reach

    def leave(self) -> None:
        """Give back what other lanes wait for."""
        self._table.gate.leave(self)

    # --- events that arrive ---

    @property
    def idle(self) -> bool:
        """Whether nothing that was fetched waits for its end."""
        return not self._order

    def held(self) -> bool:
        """Say whether new events must wait: for what was in flight at a crash, or for order."""
        if self._alone or len(self._rows) >= self._rows_max or len(self._open) >= self._settings.batch:
            return True
        if self._settings.backlog_max is not None and self.vacant() <= 0:
            return True  # what is taken up beyond what can be started could no longer be dropped
        return self._settings.strict and bool(self._rows)

    def vacant(self) -> int:
        """Return how many more events could be started at once."""
        running = sum(work.row is not None and work.row.status == PROCESSING for work in self._rows.values())
        return max(self._settings.batch - len(self._open) - running, 0)

    def full(self) -> bool:
        """Say whether nothing more can be fetched until the cursor moves."""
        return len(self._open) >= self._settings.batch or self.fetched >= self.reach

    def admit(self, event: Event) -> None:
        """Make an event ready, or have it wait for its turn."""
        offset = event.offset
        if offset in self._rows:
            return
        work = Work(self._lane, event, 1, None)
        self._order.append(offset)
        self._open[offset] = work
        if self._turns.take(work):
            self._staff.make_ready(work)

    def drop(self, letters: dict[int, tuple[str, Draft]], fetched: int) -> None:
        """Pass over events up to ``fetched`` that nobody started; those with a letter become dead.

        Everything open gets a row, so that the cursor moves past the dropped ones in the transaction that buries them.
        """
        for work in list(self._open.values()):
            self._give_row(work)
        for offset, (stream, draft) in letters.items():
            if offset not in self._rows:
                self._dead.append((Row(offset=offset, key=draft.key), stream, draft))
        self.fetched = fetched
        self._changed.set()

    @property
    def dropping(self) -> bool:
        """Whether dead letters still wait to be written."""
        return bool(self._dead)

    def _next_turn(self, work: Work) -> None:
        following = self._turns.pass_on(work)
        if following is not None and following.row is None:
            self._staff.make_ready(following)  # one with a row is claimed when it is due, see release_due

    # --- what handlers report ---

    def owns(self, work: Work) -> bool:
        """Say whether a piece of work still belongs to this lease."""
        return (self._open if work.row is None else self._rows).get(work.event.offset) is work

    def finish(self, work: Work, outcome: Outcome) -> None:
        """Take note of how a run ended."""
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
        if self._ended is not None:
            self._ended.add(row.offset)
        if outcome.dead is not None:
            self._dead.append((row, *outcome.dead))
        else:
            row.status, row.alone = DONE, 0
            self._dirty[row.offset] = row

    # --- rows ---

    def load(self, rows: list[tuple[Row, Event | None]]) -> None:
        """Take over the rows of an earlier owner, each with its event."""
        lonely: set[str] = set()
        for row, event in rows:
            if event is None:
                row.status, row.error = FAILED, "retention removed it before it was delivered"
                self._dirty[row.offset] = row
                continue
            if row.status == PROCESSING:  # its owner gave the lane back while this still ran
                row.status = WAITING
            work = Work(self._lane, event, row.attempt, row)
            outcome = self._staff.crashed(work) if row.alone else None
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

    def watch_ends(self) -> None:
        """Remember from now on which rows come to an end: one that is read meanwhile may be old."""
        self._ended = set()

    def unwatch_ends(self) -> None:
        """Forget which rows came to an end."""
        self._ended = None

    def requeue(self, row: Row, event: Event) -> None:
        """Take over a row that somebody made wait again, unless it is known already, or over since it was read."""
        offset = row.offset
        if offset in self._rows or offset in self._open or offset in self._dirty or offset in (self._ended or ()):
            return
        work = Work(self._lane, event, row.attempt, row)
        self._rows[offset] = work
        self._turns.take(work)

    def _next_alone(self) -> None:
        """Take those that have to wait behind another event of their key out of the queue of the lonely."""
        while self._alone and self._turns.taken(self._alone[0]):
            work = self._alone.popleft()
            if work.row is not None:
                work.row.alone = 0
            self._turns.take(work)
        if not self._alone:
            self._fed.set()

    def release_due(self) -> None:
        """Have rows claimed whose time has come and whose turn it is."""
        if not self._rows:
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

    # --- what is to be written ---

    def pause_s(self) -> float:
        """Return how long nothing needs to be written, unless something happens."""
        pause = self._settings.lease_s / 3
        if self._alone:
            pause = min(pause, PATIENCE_S)
        elif self._rows:
            rows = [work.row for work in self._rows.values() if work.row is not None and not work.behind]
            waits = [self._table.due_in_us(row) for row in rows if row.status == WAITING]
            pause = min([pause, *(max(wait, 0) / 1e6 for wait in waits)])
        if self._finished or self.full():
            pause = min(pause, LINGER_S)
        if self.fetched > self._cursor and not self._order:
            pause = min(pause, SKIP_S)
        return pause

    @property
    def pending(self) -> bool:
        """Whether something must be written, wherever the cursor stands."""
        return bool(self._dirty or self._dead or self._claims)

    def has_news(self, following: int) -> bool:
        """Say whether something must be written now; moving past events that do not match can wait a little."""
        if self.pending:
            return True
        if self.reach <= following and not self._alone:
            return True  # nothing may be started until it reaches further
        skipped = following - self._cursor
        if skipped >= min(SKIP_MAX, self._settings.window // 2):
            return True
        age = self._clock.monotonic_s() - self._settled_s
        return age >= self._settings.lease_s / 3 or (skipped > 0 and age >= SKIP_S)

    def advance(self, *, stopping: bool) -> tuple[int, bool]:
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
                if stopping or not (finished or self.full()):
                    break
                if not work.behind and now - work.since_s < LINGER_S:
                    break
                self._give_row(work)
            order.popleft()
            finished.discard(first)
            done = True
        return (order[0] if order else self.fetched), done

    def put_aside(self) -> None:
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

    def take(self, following: int) -> Pages:
        """Take everything that is to be written; a claim is written with its attempt before it runs."""
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
        return Pages(Settlement(following, reach, rows, dead), claims, dirty, dead)

    def put_back(self, pages: Pages) -> None:
        """Keep what could not be written for the next time."""
        self._dirty = {**pages.dirty, **self._dirty}
        self._dead = pages.dead + self._dead
        self._claims = pages.claims + self._claims
        for row in [work.row for work in pages.claims if work.row is not None]:
            row.status = WAITING
            row.attempt -= 1

    def wrote(self, pages: Pages) -> None:
        """Go on from what was written: what was claimed may run."""
        self._cursor, self.reach = pages.settlement.next_offset, pages.settlement.reach
        self._settled_s = self._clock.monotonic_s()
        for work in pages.claims:
            self._staff.make_ready(work)
        lonely = self._alone[0].row if self._alone else None
        if not (self._dirty or self._dead or (lonely is not None and lonely.status == PROCESSING)):
            self.leave()  # what it came to is on disk, so nobody will be blamed for it later
