"""Materialize: the log becomes inbox items, for the subscriptions whose engine is ``spark``.

Input: the log from each subscription's cursor on. Output: items, digests and cursors, through the same door as the live
pump. Idempotent: an item is there once whoever makes it, and a cursor moves in the transaction of the items it has
passed, so that a run that dies at any point is repeated from the cursors. There is no checkpoint besides them. A second
run with nothing new does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Literal

import msgspec

from postbus.clock import SystemClock
from postbus.inbox.agents import Agents, end
from postbus.inbox.door import Delivered, deliver
from postbus.inbox.poison import bury_all, poisonous, prepare_grave, revive
from postbus.inbox.pump import ATTEMPTS, LOOK_S, RETRY_S, SAVE_EVENTS
from postbus.log import SqliteLog, open_folder
from postbus.log.address import parse_address
from postbus.log.replica import stays_here
from postbus.model import Conflict, NotFound, OffsetOutOfRange, PostbusError
from postbus.spark.errors import told
from postbus.spark.extent import folder_of
from postbus.spark.frames import CATCH_UP_S, folder_path, tasks_read
from postbus.spark.jobs.archive import FEW, OTHERS
from postbus.spark.jobs.roster import Group, Roster
from postbus.spark.jobs.shares import Page, Share, Work, halves, pages, pages_here

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable

    from pyspark.sql import SparkSession

    from postbus.clock import Clock
    from postbus.inbox.agents import InboxSubscription
    from postbus.inbox.door import Match, Move
    from postbus.log.sqlite import Transaction

__all__ = ["Materialized", "backfill", "backlog", "materialize"]

BUDGET = 800_000
"""Events that are planned at once, shared by all cohorts."""
SHARE_MIN = 1_000
TASK_MIN, TASK_MAX = 2_000, 50_000
TASKS = 16
WAVE = 2
WAVES_AHEAD = 4
"""A wave is a job of Spark's. What came of one is delivered while the next ones run, which are so many at most."""
PAGE_MATCHES = 5_000
TASK_MATCHES = 100_000
POLL_S = 0.1
FRUITLESS_MAX = 20
CLOSE = 1_000
"""A subscription that is behind by fewer events than this can be left to the live pump."""


class Materialized(msgspec.Struct, kw_only=True):
    """What a run did: events read, matches brought to inboxes (whether or not they were there already), Spark jobs.

    ``filter_errors`` has the events for which a subscription's filter had no value, which did not match: a field that
    is not there, a type that does not fit.
    """

    events: int = 0
    matches: int = 0
    jobs: int = 0
    filter_errors: dict[str, int] = msgspec.field(default_factory=dict)


async def materialize(
    spark: SparkSession,
    data: str,
    *,
    follow: bool = False,
    tenant: str | None = None,
    subscriptions: Collection[str] | None = None,
    stop: asyncio.Event | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    clock: Clock | None = None,
) -> Materialized:
    """Serve everything there is at the moment; with ``follow`` also what comes, until ``stop`` is set.

    ``tenant`` and ``subscriptions`` choose among those whose engine is ``spark``. ``progress`` gets the events done and
    the events known of. Raises ``NotFound`` for a subscription that there is not, ``Invalid`` for one that is live.
    """
    async with _opened(data, clock or SystemClock()) as log:
        roster = Roster(log, tenant, subscriptions)
        await roster.check()
        run = _Run(spark, data, log, roster, progress)
        if follow:
            await run.follow(stop or asyncio.Event())
        else:
            await run.once()
        return run.done


async def backlog(
    data: str, *, tenant: str | None = None, subscriptions: Collection[str] | None = None, clock: Clock | None = None
) -> int:
    """Return how many events wait to be read; 0 when they are nothing but records of the pipeline's own runs.

    Raises as ``materialize`` does.
    """
    async with _opened(data, clock or SystemClock()) as log:
        roster = Roster(log, tenant, subscriptions)
        await roster.check()
        groups = await roster.plan()
        total = sum(group.head - group.offset for group in groups)
        if total > FEW:
            return total
        spans = [(group.extent.stream_id, group.extent.partition, group.offset, group.head) for group in groups]
        others = await log.store.read(lambda db: any(db.execute(OTHERS, span).get for span in spans))
        return total if others else 0


async def backfill(
    spark: SparkSession,
    data: str,
    tenant: str,
    subscriptions: Collection[str],
    *,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    clock: Clock | None = None,
) -> Materialized:
    """Serve subscriptions on Spark until they have caught up, then hand them to the live pump.

    A run that dies leaves them to Spark: running it again finishes the work. Raises ``NotFound``.
    """
    async with _opened(data, clock or SystemClock()) as log:
        agents = Agents(log)
        for name in subscriptions:
            await agents.subscription(tenant, name)
        await _hand_over(agents, tenant, subscriptions, "spark")
        run = _Run(spark, data, log, Roster(log, tenant, subscriptions), progress)
        before = -CLOSE
        while run.done.events - before >= CLOSE:
            before = run.done.events
            await run.once()
        await _hand_over(agents, tenant, subscriptions, "live")
        return run.done


async def _hand_over(
    agents: Agents, tenant: str, subscriptions: Iterable[str], engine: Literal["live", "spark"]
) -> None:
    for name in subscriptions:
        with contextlib.suppress(NotFound):  # it was removed meanwhile
            await agents.hand_over(tenant, name, engine)


@contextlib.asynccontextmanager
async def _opened(data: str, clock: Clock) -> AsyncIterator[SqliteLog]:
    address = parse_address(data)
    if address.remote is None:
        folder_of(data)  # or it says that there is none
    log = await open_folder(address, clock, create=address.remote is not None, catch_up_s=CATCH_UP_S)
    try:
        yield log
    finally:
        await log.close()


class _Run:
    """One run of the job."""

    def __init__(
        self,
        spark: SparkSession,
        data: str,
        log: SqliteLog,
        roster: Roster,
        progress: Callable[[int, int], None],
    ) -> None:
        self._spark = spark
        self._here = folder_path(data)
        self._data = tasks_read(spark, data)
        self._log = log
        self._clock = log.store.clock
        self._roster = roster
        self._progress = progress
        self._budget = BUDGET
        self._fruitless = 0
        self._total = 0
        self.done = Materialized()

    async def once(self) -> None:
        """Serve what is in the log now."""
        goals = {extent.key: extent.head for extent in await self._roster.extents()}
        groups = await self._plan(goals)
        self._expect(groups)
        while groups:
            await self._job(groups)
            groups = await self._plan(goals)

    async def follow(self, stop: asyncio.Event) -> None:
        """Serve what is in the log and what comes."""
        while not stop.is_set():
            seen = self._log.foreign_changes
            groups = await self._plan()
            self._expect(groups)
            if groups:
                await self._job(groups)
            else:
                await self._rest(stop, seen)

    def _expect(self, groups: list[Group]) -> None:
        self._total = self.done.events + sum(group.head - group.offset for group in groups)
        self._progress(self.done.events, self._total)

    async def _rest(self, stop: asyncio.Event, seen: int) -> None:
        """Wait until somebody else has changed the store, or for a while."""
        deadline = self._clock.monotonic_s() + LOOK_S
        while seen == self._log.foreign_changes and self._clock.monotonic_s() < deadline:
            if await self._clock.wait(stop, POLL_S):
                return
            with contextlib.suppress(PostbusError):
                self._log.store.writer.notice()

    async def _plan(self, goals: dict[str, int] | None = None) -> list[Group]:
        """Return who has something to read and how far the next job brings them."""
        planned = await self._roster.plan(goals)
        share = max(SHARE_MIN, self._budget // max(len(planned), 1))
        for group in planned:  # ends are multiples, so that those who are close together meet
            group.end = min(group.head, (group.offset // share + 1) * share)
        for extent, members in self._roster.readers:
            with contextlib.suppress(NotFound):
                await revive(self._log, extent.stream, extent.partition, extent.epoch, members)
        return planned

    # --- a job ---

    async def _job(self, groups: list[Group]) -> None:
        """Have Spark match the groups' ranges, and deliver what it found as far as it came."""
        before = self.done.events
        gone: PostbusError | None = None
        async with contextlib.aclosing(self._pages(groups)) as found:
            try:
                async for page in found:
                    group = groups[page.cohort]
                    if page.start == group.offset:
                        try:
                            await self._deliver(group, page)
                        except (Conflict, NotFound) as error:  # somebody was moved or removed: the next plan knows
                            gone = error
            except (NotFound, OffsetOutOfRange) as error:  # retention or a deletion was quicker: the next plan knows
                gone = error
        for group in groups:
            if group.offset < group.end and (moves := group.moves(group.members, group.offset)):
                with contextlib.suppress(Conflict, NotFound):
                    await self._write(group, [], moves)
        came = self.done.events - before
        cut = gone is None and any(group.offset < group.end for group in groups)
        self._budget = came if cut else min(BUDGET, self._budget * 2)
        self.done.jobs += 1
        if came:
            self._fruitless = 0
        else:
            await self._pause(gone or Conflict("Spark has read nothing"))

    async def _pages(self, groups: list[Group]) -> AsyncGenerator[Page]:
        """Yield what Spark found, in order; it goes on while a page is delivered."""
        far = self._here != self._data
        own = {number for number, group in enumerate(groups) if far and stays_here(group.extent.stream)}
        work = _work(self._data, groups, own)
        waves = [work.tasks[first : first + WAVE] for first in range(0, len(work.tasks), WAVE)]
        running: deque[tuple[list[list[Share]], asyncio.Task[list[Page]]]] = deque()
        stuck: set[int] = set()  # what comes behind the end of a page that was cut, or refused, is of no use
        try:
            while waves or running:
                while waves and len(running) < WAVES_AHEAD:
                    wave = [[share for share in task if share.cohort not in stuck] for task in waves.pop(0)]
                    if any(wave):
                        job = msgspec.structs.replace(work, tasks=wave)
                        running.append((wave, asyncio.create_task(asyncio.to_thread(_collected, self._spark, job))))
                if not running:
                    break
                wave, found = running.popleft()
                for page in await found:
                    yield page
                stuck |= {
                    share.cohort for share in chain.from_iterable(wave) if groups[share.cohort].offset < share.end
                }
        finally:
            await asyncio.gather(*(found for _, found in running), return_exceptions=True)
        if own:
            others = set(range(len(groups))) - own
            for page in await asyncio.to_thread(pages_here, _work(self._here, groups, others)):
                yield page

    async def _pause(self, error: PostbusError) -> None:
        """Wait a moment before the next plan; raises the error when it has been in the way too often."""
        self._fruitless += 1
        if self._fruitless >= FRUITLESS_MAX:
            raise error
        await self._clock.sleep(POLL_S)

    async def _deliver(self, group: Group, page: Page) -> None:
        """Bring a page to the inboxes and move the cursors of those who matched, now and then of everyone."""
        matches = page.matches
        touched = dict.fromkeys(chain.from_iterable(match.matched_by for match in matches))
        # The places of one agent's subscriptions never differ by so much that they would not begin together again.
        everyone = page.end == group.end or page.end - min(group.saved.values()) >= SAVE_EVENTS
        moves = group.moves(group.members if everyone else touched, page.end)
        ended = [group.members[name].subscription for _, name in page.ended]
        try:
            await self._write(group, matches, moves, ended)
        except Exception as error:
            if not matches or not poisonous(error):
                raise
            if page.end - page.start > 1:  # what was before it must not wait for it
                for half in halves(page):
                    await self._deliver(group, half)
                return
            await self._poisoned(group, matches, moves, ended)
        self.done.events += page.end - group.offset
        group.moved(moves, page.end)
        self._progress(min(self.done.events, self._total), self._total)
        self.done.matches += len(matches)
        for name, number in page.errors.items():
            self.done.filter_errors[name] = self.done.filter_errors.get(name, 0) + number

    async def _write(
        self,
        group: Group,
        matches: list[Match],
        moves: list[Move],
        ended: Iterable[InboxSubscription] = (),
        before: Callable[[Transaction], None] = lambda _tx: None,
    ) -> None:
        """Deliver in one transaction; raises ``Conflict``, and does nothing, when a cursor is not where it was."""
        extent = group.extent

        def write(tx: Transaction) -> Delivered:
            before(tx)
            for subscription in ended:
                end(tx, subscription)
            done = deliver(tx, extent.stream, extent.partition, matches, moves, epoch=extent.epoch)
            if done.displaced:
                raise Conflict(f"{', '.join(done.displaced)} was moved meanwhile")
            return done

        if matches or moves:
            await self._log.transact(write, grows=bool(matches))

    async def _poisoned(
        self, group: Group, matches: list[Match], moves: list[Move], ended: list[InboxSubscription]
    ) -> None:
        """Try an event again that could not be materialised; then it is dead for those whose item cannot be made."""
        for _ in range(ATTEMPTS - 1):
            await self._clock.sleep(RETRY_S)
            if await self._possible(group, matches, moves, ended):
                return
        names = [name for match in matches if not await self._possible(group, [match]) for name in match.matched_by]
        extent = group.extent
        (event,) = await self._log.fetch(extent.stream, extent.partition, matches[0].offset, 1)
        dead_stream = await prepare_grave(self._log, extent.stream)
        await self._write(
            group, [], moves, ended, before=lambda tx: bury_all(tx, event, sorted(names), dead_stream, ATTEMPTS)
        )

    async def _possible(
        self,
        group: Group,
        matches: list[Match],
        moves: list[Move] | None = None,
        ended: Iterable[InboxSubscription] = (),
    ) -> bool:
        try:
            await self._write(group, matches, moves or [], ended)
        except Exception as error:
            if poisonous(error):
                return False
            raise
        return True


def _work(data: str, groups: list[Group], left_out: Collection[int] = ()) -> Work:
    """Return the groups' ranges as tasks of about the same size, in their order, but for those that are left out."""
    places: dict[tuple[str, str], int] = {}
    subscriptions: list[tuple[InboxSubscription, int]] = []
    numbers: list[list[tuple[int, int]]] = []
    total = sum(group.end - group.offset for group in groups)
    size = min(max(total // TASKS, TASK_MIN), TASK_MAX)
    tasks: list[list[Share]] = [[]]
    room = size
    for number, group in enumerate(groups):
        numbers.append([])
        for name, member in group.members.items():
            one = member.subscription
            if (one.tenant, one.id) not in places:
                places[one.tenant, one.id] = len(subscriptions)
                subscriptions.append((one, member.agent_no))
            numbers[-1].append((places[one.tenant, one.id], group.saved[name]))
        start = group.end if number in left_out else group.offset
        while start < group.end:
            if not room:
                tasks.append([])
                room = size
            stop = min(group.end, start + room)
            tasks[-1].append(Share(number, group.extent, start, stop))
            room -= stop - start
            start = stop
    return Work(data, subscriptions, numbers, tasks, PAGE_MATCHES, TASK_MATCHES)


def _collected(spark: SparkSession, work: Work) -> list[Page]:
    decoder = msgspec.msgpack.Decoder(Page)
    with told():
        return [decoder.decode(bytes(row.page)) for row in pages(spark, work).collect()]
