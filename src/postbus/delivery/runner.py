"""The runner of one subscription: its lanes, the workers that call its handler, and the clock on each call."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from postbus.delivery.backoff import retry_delay_s
from postbus.delivery.dead import unbury
from postbus.delivery.lane import Lane
from postbus.delivery.table import LaneKey
from postbus.delivery.work import LaneSettings, Outcome, Staff, Verdict, Work
from postbus.model import DeliveryStatus, LoopDetected, NotFound, Reject, Retry, RetryPolicy, event_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from postbus.clock import Clock
    from postbus.delivery.table import DeliveryTable, Row
    from postbus.log.sqlite import SqliteLog
    from postbus.model import Draft, Event

__all__ = ["Runner", "RunnerSettings"]

logger = logging.getLogger("postbus.delivery")

ERROR_CHARS_MAX = 2000
DELAY_S_MAX = 10 * 365 * 86_400.0
CANCEL_S = 5.0
CRASHES_MIN = 2
TURNS = 32


class RunnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a subscription is worked on in this process."""

    subscription: str
    retry: RetryPolicy
    strict: bool = False
    concurrency: int = 10
    timeout_s: float = 300.0
    batch: int = 100
    lease_s: float = 30.0
    poll_s: float = 5.0
    backlog_max: int | None = None


class _Worker:
    """One call at a time."""

    __slots__ = ("expired", "since_s", "task", "work")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.work: Work | None = None
        self.since_s = 0.0
        self.expired = False


class Runner:
    """Works on one subscription.

    ``wants_topic`` says whether an event of a stream on a topic may be for it and ``wants`` whether one is, ``handle``
    is called with an event, and ``bury`` makes a dead letter.
    """

    def __init__(
        self,
        settings: RunnerSettings,
        log: SqliteLog,
        table: DeliveryTable,
        clock: Clock,
        wants_topic: Callable[[str, str], bool],
        wants: Callable[[Event], bool],
        handle: Callable[[Event, Work], Awaitable[None]],
        bury: Callable[[Event, str, int, str], tuple[str, Draft]],
    ) -> None:
        self.settings = settings
        self._log = log
        self._table = table
        self._clock = clock
        self._wants_topic = wants_topic
        self._wants = wants
        self._handle = handle
        self._bury = bury
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._ready: deque[Work] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._workers: list[_Worker] = []
        self._watch: asyncio.Task[None] | None = None
        self._calls = asyncio.Event()
        self._rested = asyncio.Event()
        self._stopping = False
        self.handled = self.failed = self.dead = self.dropped = 0

    # --- life ---

    def start(self) -> None:
        """Start the workers."""
        loop = asyncio.get_running_loop()
        for _ in range(1 if self.settings.strict else self.settings.concurrency):
            worker = _Worker()
            worker.task = loop.create_task(self._work(worker))
            self._workers.append(worker)
        self._watch = loop.create_task(self._watch_calls())

    def add_lane(self, stream: str, partition: int) -> None:
        """Work on one more partition; nothing happens when that is done already."""
        known = self._lanes.get((stream, partition))
        if self._stopping or (known is not None and not known.ended):
            return
        key = LaneKey(self.settings.subscription, stream, partition)
        asked = self.settings
        # With a bounded backlog no more is taken up than can be started.
        batch = asked.batch if asked.backlog_max is None else min(asked.batch, len(self._workers))
        settings = LaneSettings(batch, 4 * batch, asked.strict, asked.lease_s, asked.poll_s, asked.backlog_max)
        staff = Staff(
            partial(self._wants_topic, stream),
            self._wants,
            self._make_ready,
            self._crashed,
            partial(self._revive, key),
            self._overflowed,
        )
        lane = Lane(key, self._log, self._table, self._clock, settings, staff)
        self._lanes[stream, partition] = lane
        lane.start()

    async def stop(self, grace_s: float) -> None:
        """Take no new work, let running handlers finish for up to ``grace_s``, write what happened, free the lanes."""
        self._stopping = True
        self._ready.clear()
        waiting = asyncio.get_running_loop().create_task(self._quiet(grace_s))

        async def quiet() -> None:
            await asyncio.shield(waiting)

        await asyncio.gather(*(lane.stop(quiet) for lane in self._lanes.values()))
        await waiting

    async def _quiet(self, grace_s: float) -> None:
        """Return when no handler runs any more; one that outlasts the grace is cancelled, and that is said."""
        if self.running and grace_s > 0:
            await self._clock.wait(self._rested, grace_s)
        for event in self.running:
            message = "%s still ran on %s after %gs of grace; it is cancelled, to be run again"
            logger.warning(message, self.settings.subscription, event, grace_s)
        tasks = self._own_tasks()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_S)

    def _own_tasks(self) -> list[asyncio.Task[None]]:
        return [task for task in [self._watch, *(worker.task for worker in self._workers)] if task is not None]

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return everything that works on the subscription here."""
        return [*self._own_tasks(), *(task for lane in self._lanes.values() for task in lane.tasks)]

    async def refresh(self) -> None:
        """Look for events that were re-queued by somebody else."""
        await asyncio.gather(*(lane.refresh() for lane in self._lanes.values()))

    @property
    def running(self) -> list[str]:
        """The ids of the events whose handlers run now."""
        return [worker.work.event.id for worker in self._workers if worker.work is not None]

    @property
    def busy(self) -> bool:
        """Whether something is to be done that waits neither for time to pass nor for a handler."""
        ready = bool(self._ready) and len(self.running) < len(self._workers)
        return ready or any(lane.busy for lane in self._lanes.values())

    @property
    def recovered(self) -> int:
        """How many events of a dead process were taken over."""
        return sum(lane.recovered for lane in self._lanes.values())

    # --- calling the handler ---

    def _make_ready(self, work: Work) -> None:
        self._ready.append(work)
        if self._idle:
            future = self._idle.popleft()
            if not future.done():
                future.set_result(None)

    async def _work(self, worker: _Worker) -> None:
        turns = 0
        loop = asyncio.get_running_loop()
        while not self._stopping:
            if not self._ready:
                future: asyncio.Future[None] = loop.create_future()
                self._idle.append(future)
                await future
                continue
            work = self._ready.popleft()
            if not work.lane.owns(work):
                continue
            outcome = await self._call(worker, work)
            work.lane.finish(work, outcome)
            turns += 1
            if turns % TURNS == 0:  # a handler that never waits must not starve everybody else
                await asyncio.sleep(0)

    async def _call(self, worker: _Worker, work: Work) -> Outcome:
        worker.work, worker.expired, worker.since_s = work, False, self._clock.monotonic_s()
        work.started, work.since_s = True, worker.since_s
        if not self._calls.is_set():
            self._calls.set()
        event = msgspec.structs.replace(work.event, status=DeliveryStatus.PROCESSING, attempt=work.attempt)
        error: BaseException | None = None
        try:
            await self._handle(event, work)
        except asyncio.CancelledError as cancelled:
            if worker.task is not None and worker.task.cancelling() and not worker.expired:
                raise  # the worker itself is to end
            error = cancelled  # by the watch below, or something the handler waited for was cancelled
        except Exception as raised:  # noqa: BLE001 - whatever a handler raises is its failure, not ours
            error = raised
        finally:
            worker.work = None
            if self._stopping and not self.running:
                self._rested.set()
        if worker.expired:
            if worker.task is not None:
                worker.task.uncancel()
            name, limit = self.settings.subscription, self.settings.timeout_s
            return self._failed(work, f"handler {name} timed out after {limit:g}s")
        return self._judge(work, error)

    def _judge(self, work: Work, error: BaseException | None) -> Outcome:
        match error:
            case None:
                self.handled += 1
                return Outcome(Verdict.DONE)
            case LoopDetected():
                return self._dead(work, "loop", _text(error))
            case Reject():
                return self._dead(work, "rejected", _text(error) or "rejected by the handler")
            case Retry():
                return self._failed(work, _text(error), error.delay_s)
            case _:
                return self._failed(work, _described(error))

    def _failed(self, work: Work, error: str, delay_s: float | None = None) -> Outcome:
        self.failed += 1
        policy = self.settings.retry
        if work.attempt >= policy.max_attempts:
            return self._dead(work, "max_attempts", error)
        wait = _delay_s(delay_s)
        if wait is None:
            wait = retry_delay_s(policy, work.attempt)
        name, event = self.settings.subscription, work.event.id
        logger.info("%s failed on %s (attempt %d): %s; again in %.3gs", name, event, work.attempt, error, wait)
        return Outcome(Verdict.RETRY, error, wait)

    def _dead(self, work: Work, reason: str, error: str) -> Outcome:
        self.dead += 1
        name, event = self.settings.subscription, work.event.id
        logger.warning("%s gave up on %s (%s, attempt %d): %s", name, event, reason, work.attempt, error)
        return Outcome(Verdict.DEAD, error, 0.0, self._bury(work.event, reason, work.attempt, error))

    def _crashed(self, work: Work) -> Outcome | None:
        """Judge an event that was in flight when a process died: dead once it has used up its attempts.

        Processes end for other reasons too, so that one end is never enough.
        """
        if work.attempt < max(self.settings.retry.max_attempts, CRASHES_MIN):
            return None
        return self._dead(work, "crash", f"the process ended {work.attempt} times while handling it")

    def _overflowed(self, events: list[Event]) -> dict[int, tuple[str, Draft]]:
        """Make dead letters of events that more than ``backlog_max`` others wait behind."""
        chosen = [event for event in events if self._wants(event)]
        if not chosen:
            return {}
        self.dropped += len(chosen)
        name, limit = self.settings.subscription, self.settings.backlog_max
        logger.warning("%s dropped %d events up to %s: more than %s wait", name, len(chosen), chosen[-1].id, limit)
        error = f"dropped: more than {limit} events waited"
        return {event.offset: self._bury(event, "overflow", 0, error) for event in chosen}

    async def _revive(self, key: LaneKey, row: Row) -> Event | None:
        """Find the event of a row: in its stream, or in the dead-letter stream when retention removed it."""
        found = await self._log.fetch(key.stream, key.partition, row.offset, 1)
        if found and found[0].offset == row.offset:
            return found[0]
        if row.dead_stream is None or row.dead_offset is None:
            return None
        try:
            copies = await self._log.fetch(row.dead_stream, 0, row.dead_offset, 1)
        except NotFound:
            return None
        if not copies or copies[0].offset != row.dead_offset:
            return None
        return unbury(copies[0], key.subscription, event_id(key.stream, key.partition, row.offset))

    async def _watch_calls(self) -> None:
        """End calls that take longer than the timeout."""
        limit = self.settings.timeout_s
        while True:
            await self._calls.wait()
            busy = [worker for worker in self._workers if worker.work is not None]
            if not busy:
                self._calls.clear()
                continue
            now = self._clock.monotonic_s()
            for worker in busy:
                if now - worker.since_s >= limit and not worker.expired and worker.task is not None:
                    worker.expired = True
                    worker.task.cancel()
            oldest = min(worker.since_s for worker in busy)
            await self._clock.sleep(max(oldest + limit - now, limit / 100, 0.001))


def _delay_s(asked: object) -> float | None:
    """Return the delay a handler asked for within what can be kept, None when it makes no sense or none was given."""
    if isinstance(asked, int | float) and not math.isnan(asked):
        return min(max(float(asked), 0.0), DELAY_S_MAX)
    return None


def _text(error: BaseException) -> str:
    """Return an error's own words, cut, and fit to be stored."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - even saying what went wrong may go wrong
        text = "(no words)"
    return text[:ERROR_CHARS_MAX].encode("utf-8", "replace").decode()


def _described(error: BaseException | None) -> str:
    """Return an error with its kind; those of a group are joined by semicolons."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_described(one) for one in error.exceptions)[:ERROR_CHARS_MAX]
    return f"{type(error).__name__}: {_text(error)}" if error is not None else ""
