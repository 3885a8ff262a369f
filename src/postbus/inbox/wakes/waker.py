"""``Waker``: looks where something is new, waits as long as each target asks for, and wakes."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
from typing import TYPE_CHECKING

from postbus.delivery.table import new_owner
from postbus.inbox.agents import find_agent
from postbus.inbox.items import Items
from postbus.inbox.wakes.dispatch import dispatch
from postbus.inbox.wakes.ledger import counters_of, revive_target, states_of
from postbus.inbox.wakes.message import message
from postbus.inbox.wakes.records import Failure, State
from postbus.inbox.wakes.table import WakeTable
from postbus.model import LeaseLost, PostbusError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from postbus.clock import Clock
    from postbus.inbox.signals import Signals
    from postbus.inbox.wakes.records import Attempt, Counters, Sight, TargetState
    from postbus.log.sqlite import SqliteLog

__all__ = ["Waker"]

logger = logging.getLogger("postbus.inbox.wakes")

NOTICE_S = 0.2
IDLE_S = 3600.0
PAUSE_S = 5.0
LOOK_S = 0.01
LOOK_REST_S = 0.5
SIDE_BY_SIDE = 32

Key = tuple[int, str]
"""An agent's number and the id of one of its targets."""


class _Plan:
    """When a target is to be seen to: since when something is new, and whether the agent was at work before."""

    __slots__ = ("due_us", "leased", "opened_us", "patient")

    def __init__(self) -> None:
        self.due_us: int | None = None
        self.opened_us: int | None = None
        self.leased = False
        self.patient = False


class Waker:
    """Wakes the agents of all tenants on one log. Several processes may do so: each wake is made by one of them."""

    def __init__(self, log: SqliteLog, clock: Clock, signals: Signals) -> None:
        self._log = log
        self._clock = clock
        self._items = Items(log, signals)
        self._table = WakeTable(log, clock, new_owner(clock))
        self._plans: dict[Key, _Plan] = {}
        self._heap: list[tuple[int, Key]] = []
        self._dirty: set[int] = set()
        self._looking = False
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._room = asyncio.Semaphore(SIDE_BY_SIDE)
        signals.listen(self.look_at)

    # --- life ---

    async def start(self) -> None:
        """Wake from now on; what was owed before is found. Idempotent."""
        if not self._tasks:
            self._stopping.clear()
            loop = asyncio.get_running_loop()
            seen = self._log.foreign_changes
            self._tasks = [loop.create_task(self._run()), loop.create_task(self._follow_others(seen))]
            self._look_at_all(await self._table.everyone())

    async def stop(self) -> None:
        """Begin no more wakes and let those under way finish. Idempotent; the log stays open."""
        self._stopping.set()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._running:
            await asyncio.gather(*self._running.values())
        self._plans, self._heap, self._dirty, self._looking = {}, [], set(), False

    @property
    def busy(self) -> bool:
        """Whether something is under way that waits for no clock."""
        return bool(self._dirty or self._looking or self._running or self.next_in_s == 0)

    @property
    def next_in_s(self) -> float | None:
        """How long until a target is to be seen to; None when nothing waits."""
        due = self._next_us()
        return None if due is None else max(due - self._table.now_us(), 0) / 1e6

    # --- what an owner and an operator ask ---

    async def state(self, tenant: str, agent: str) -> list[TargetState]:
        """Return how the targets of an agent stand; raises ``NotFound``."""
        return await self._log.store.read(lambda db: states_of(db, find_agent(db, tenant, agent), self._table))

    async def counters(self, tenant: str, agent: str) -> dict[str, Counters]:
        """Return what each target of an agent has cost and saved, by its id; raises ``NotFound``."""
        return await self._log.store.read(lambda db: counters_of(db, find_agent(db, tenant, agent)))

    async def revive(self, tenant: str, agent: str, target: str) -> bool:
        """Put a target that is offline back to work; False when it was not offline. Raises ``NotFound``."""
        number, revived = await self._log.transact(lambda tx: revive_target(tx, tenant, agent, target))
        self.look_at(number)
        return revived

    # --- looking ---

    def look_at(self, agent_no: int) -> None:
        """Have a look at an agent's inbox soon: items came, were shown or were acked, or its targets changed."""
        self._look_at_all((agent_no,))

    def _look_at_all(self, agents: Iterable[int]) -> None:
        if self._tasks:
            self._dirty.update(agents)
            self._changed.set()

    async def _follow_others(self, seen: int) -> None:
        """Notice what other processes change."""
        while True:
            await asyncio.sleep(NOTICE_S)
            with contextlib.suppress(PostbusError):
                self._log.store.writer.notice()
                if self._log.foreign_changes != seen:
                    seen = self._log.foreign_changes
                    self._look_at_all(await self._table.everyone())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            began = loop.time()
            try:
                await self._look()
            except Exception:
                logger.exception("inboxes could not be looked at; agents are woken later")
                await self._clock.sleep(PAUSE_S)
                continue
            took = loop.time() - began
            self._fire()
            if took > LOOK_S:  # many inboxes change all the time: leave most of the machine to those who fill them
                await asyncio.sleep(min(3 * took, LOOK_REST_S))
            left_s = self.next_in_s
            if not self._dirty and left_s != 0:
                await self._clock.wait(self._changed, IDLE_S if left_s is None else left_s)

    async def _look(self) -> None:
        agents, self._dirty = self._dirty, set()
        if not agents:
            return
        self._looking = True
        try:
            for sight in await self._table.look(agents):
                self._plan(sight)
        except BaseException:
            self._dirty |= agents
            raise
        finally:
            self._looking = False

    # --- planning ---

    def _plan(self, sight: Sight) -> None:
        """Decide when a target is to be seen to."""
        key = (sight.agent_no, sight.target.id)
        if key in self._running:
            return  # it is looked at again afterwards
        if sight.state is State.OFFLINE:
            self._plans.pop(key, None)
            return
        plan = self._plans.setdefault(key, _Plan())
        now = self._table.now_us()
        acked = plan.leased and sight.state is State.IDLE
        plan.leased = sight.state is State.LEASED
        if sight.news and (plan.opened_us is None or acked):
            # An agent that acks is awake and may well read on: it gets the whole buffer, however much is there.
            plan.opened_us, plan.patient = now, acked
        due = None
        if plan.opened_us is not None:
            full = sight.news >= sight.target.buffer_items and not plan.patient
            due = now if full else plan.opened_us + round(sight.target.buffer_s * 1e6)
        if sight.state is State.LEASED:
            due = max(due or 0, sight.until_us)
        elif sight.state is not State.IDLE:
            due = sight.until_us
        if due is None:
            del self._plans[key]
        elif due != plan.due_us:
            plan.due_us = due
            heapq.heappush(self._heap, (due, key))

    def _next_us(self) -> int | None:
        while self._heap:
            due, key = self._heap[0]
            plan = self._plans.get(key)
            if plan is not None and plan.due_us == due:
                return due
            heapq.heappop(self._heap)
        return None

    def _fire(self) -> None:
        while (due := self._next_us()) is not None and due <= self._table.now_us():
            _, key = heapq.heappop(self._heap)
            del self._plans[key]
            self._running[key] = asyncio.get_running_loop().create_task(self._wake(*key))

    # --- waking ---

    async def _wake(self, agent_no: int, name: str) -> None:
        try:
            async with self._room:
                if self._tasks:
                    attempt = await self._table.begin(agent_no, name)
                    if attempt is not None:
                        await self._make(attempt)
        except LeaseLost as error:
            logger.warning("%s", error.message)
        except Exception:
            logger.exception("agent %s could not be woken; it is tried again", agent_no)
            await self._clock.wait(self._stopping, PAUSE_S)
        finally:
            del self._running[agent_no, name]
            self.look_at(agent_no)

    async def _make(self, attempt: Attempt) -> None:
        try:
            body = await message(self._items, attempt)
            failure = await dispatch(attempt, body, self._clock.now_us())
        except PostbusError as error:
            failure = Failure(error.message)
        except Exception as error:
            logger.exception("waking agent %s of %s failed", attempt.agent, attempt.tenant)
            failure = Failure(f"waking failed inside: {type(error).__name__}")
        if failure is None:
            await self._table.arrived(attempt)
        else:
            logger.info("agent %s of %s was not woken: %s", attempt.agent, attempt.tenant, failure.message)
            await self._table.failed(attempt, failure)
