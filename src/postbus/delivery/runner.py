"""The runner of one subscription: its lanes, the workers that call its handler, and the clock on each call."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from postbus.delivery.backoff import retry_delay_s
from postbus.delivery.lane import Lane, LaneSettings, Outcome, Verdict, Work
from postbus.delivery.table import LaneKey
from postbus.model import DeliveryStatus, LoopDetected, Reject, Retry, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from postbus.clock import Clock
    from postbus.delivery.table import DeliveryTable, Row
    from postbus.log.sqlite import SqliteLog
    from postbus.model import Draft, Event

__all__ = ["Runner", "RunnerSettings"]

ERROR_CHARS_MAX = 2000
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


class _Worker:
    """One call at a time."""

    __slots__ = ("expired", "since_s", "task", "work")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.work: Work | None = None
        self.since_s = 0.0
        self.expired = False


class Runner:
    """Works on one subscription. ``handle`` is called with an event and its attempt; ``bury`` makes a dead letter."""

    def __init__(
        self,
        settings: RunnerSettings,
        log: SqliteLog,
        table: DeliveryTable,
        clock: Clock,
        match: Callable[[str], bool],
        handle: Callable[[Event, Work], Awaitable[None]],
        bury: Callable[[Event, str, int, str, int], tuple[str, Draft]],
    ) -> None:
        self.settings = settings
        self._log = log
        self._table = table
        self._clock = clock
        self._match = match
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
        self.handled = self.failed = self.dead = 0

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
        if (stream, partition) in self._lanes:
            return
        key = LaneKey(self.settings.subscription, stream, partition)
        batch = self.settings.batch
        settings = LaneSettings(batch, 4 * batch, self.settings.strict, self.settings.lease_s, self.settings.poll_s)
        lane = Lane(
            key,
            self._log,
            self._table,
            self._clock,
            settings,
            self._match,
            self._make_ready,
            self._crashed,
            lambda row: self._revive(key, row),
        )
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
        for task in [self._watch, *(worker.task for worker in self._workers)]:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(w.task for w in self._workers if w.task), return_exceptions=True)

    async def _quiet(self, grace_s: float) -> None:
        if self.running:
            await self._clock.wait(self._rested, grace_s)

    async def refresh(self) -> None:
        """Look for events that were re-queued by somebody else."""
        await asyncio.gather(*(lane.refresh() for lane in self._lanes.values()))

    @property
    def running(self) -> list[str]:
        """The ids of the events whose handlers run now."""
        return [worker.work.event.id for worker in self._workers if worker.work is not None]

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
        if not self._calls.is_set():
            self._calls.set()
        event = work.event
        try:
            await self._handle(
                msgspec.structs.replace(event, status=DeliveryStatus.PROCESSING, attempt=work.attempt), work
            )
        except asyncio.CancelledError:
            if not worker.expired:
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]  # a task runs this
            name, limit = self.settings.subscription, self.settings.timeout_s
            return self._failed(work, f"handler {name} timed out after {limit:g}s")
        except LoopDetected as error:
            return self._dead(work, "loop", str(error))
        except Reject as error:
            return self._dead(work, "rejected", str(error) or "rejected by the handler")
        except Retry as error:
            return self._failed(work, str(error), error.delay_s)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is its failure, not ours
            return self._failed(work, f"{type(error).__name__}: {error}")
        else:
            self.handled += 1
            return Outcome(Verdict.DONE)
        finally:
            worker.work = None
            if self._stopping and not self.running:
                self._rested.set()

    def _failed(self, work: Work, error: str, delay_s: float | None = None) -> Outcome:
        self.failed += 1
        policy = self.settings.retry
        if work.attempt >= policy.max_attempts:
            return self._dead(work, "max_attempts", error)
        wait = retry_delay_s(policy, work.attempt) if delay_s is None else max(delay_s, 0.0)
        return Outcome(Verdict.RETRY, error[:ERROR_CHARS_MAX], wait)

    def _dead(self, work: Work, reason: str, error: str) -> Outcome:
        self.dead += 1
        replays = work.row.replays if work.row is not None else 0
        error = error[:ERROR_CHARS_MAX]
        return Outcome(Verdict.DEAD, error, 0.0, self._bury(work.event, reason, work.attempt, error, replays))

    def _crashed(self, work: Work) -> Outcome | None:
        """Judge an event that was in flight when a process died: dead once it has used up its attempts."""
        if work.attempt < self.settings.retry.max_attempts:
            return None
        return self._dead(work, "crash", f"the process ended {work.attempt} times while handling it")

    async def _revive(self, key: LaneKey, row: Row) -> Event | None:
        """Find the event of a row: in its stream, or in the dead-letter stream when retention removed it."""
        found = await self._log.fetch(key.stream, key.partition, row.offset, 1)
        if found and found[0].offset == row.offset:
            return found[0]
        if row.dead_stream is None or row.dead_offset is None:
            return None
        copies = await self._log.fetch(row.dead_stream, 0, row.dead_offset, 1)
        if not copies or copies[0].offset != row.dead_offset:
            return None
        return msgspec.structs.replace(copies[0], stream=key.stream, partition=key.partition, offset=row.offset)

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
