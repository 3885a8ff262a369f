"""Agents that give each other tasks over a broker: answers by correlation id, no cycles, and only who is allowed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from postbus.broker.contract import Missed
from postbus.broker.subjects import agent_route
from postbus.clock import Clock, SystemClock
from postbus.model import Forbidden, Invalid, LimitExceeded, LoopDetected, PostbusError, Refused, RequestTimeout
from postbus.topics import check_pattern, matches

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from postbus.broker.contract import Broker
    from postbus.broker.listener import Listener

    Handler = Callable[["Task"], Awaitable[Any]]

__all__ = ["CHAIN_MAX", "Agent", "Task"]

logger = logging.getLogger("postbus.broker")

CHAIN_MAX = 32
TASKS_MAX = 100

_chain: ContextVar[tuple[str, ...]] = ContextVar("postbus_chain", default=())


class Task(msgspec.Struct, frozen=True):
    """What an agent was asked to do: by whom, and on behalf of which chain of agents, oldest first."""

    correlation_id: str
    sender: str
    body: Any
    chain: tuple[str, ...]


class _Wire(msgspec.Struct, omit_defaults=True):
    """A task or an answer on its way."""

    kind: Literal["task", "reply"]
    correlation_id: str
    sender: str
    body: Any = None
    chain: tuple[str, ...] = ()
    error: dict[str, str] | None = None


class _Call(msgspec.Struct, frozen=True):
    to: str
    answer: asyncio.Future[Any]


class Agent:
    """One agent on a broker: gives tasks with ``delegate``, takes them with its ``handler``.

    ``may_ask`` and ``may_be_asked_by`` are patterns over agent ids, as in ``team.*``; by default everybody. Answers
    that are late, doubled, or from somebody who was not asked complete nothing and are counted in ``strays``.
    """

    def __init__(
        self,
        broker: Broker,
        agent: str,
        handler: Handler | None = None,
        *,
        may_ask: Iterable[str] = (">",),
        may_be_asked_by: Iterable[str] = (">",),
        clock: Clock | None = None,
    ) -> None:
        self.id = agent
        self.strays: Counter[str] = Counter()
        self._broker = broker
        self._route = agent_route(agent)
        self._handler = handler
        self._may_ask = tuple(check_pattern(pattern) for pattern in may_ask)
        self._may_be_asked_by = tuple(check_pattern(pattern) for pattern in may_be_asked_by)
        self._clock = clock or SystemClock()
        self._calls: dict[str, _Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: Listener | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to listen for tasks and answers."""
        if self._listener is None:
            self._listener = await self._broker.subscribe(self._route)
            self._reader = asyncio.get_running_loop().create_task(self._read(self._listener))

    async def stop(self) -> None:
        """Stop listening; tasks that run are cancelled, calls that wait end in ``RequestTimeout``. Idempotent."""
        if self._listener is not None and self._reader is not None:
            await self._listener.close()
            for task in (self._reader, *self._tasks):
                task.cancel()
            await asyncio.gather(self._reader, *self._tasks, return_exceptions=True)
            self._listener = self._reader = None
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(RequestTimeout(f"{self.id} stopped before {call.to} answered"))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # --- giving tasks ---

    async def delegate(self, to: str, body: Any, *, timeout_s: float = 60.0) -> Any:
        """Ask another agent and return its answer.

        Raises ``Forbidden`` when this agent may not ask that one, ``LoopDetected`` when that one waits for this task
        already, ``Refused`` when it refuses or fails, ``RequestTimeout`` when it does not answer in time.
        """
        route = agent_route(to)
        if self._listener is None:
            raise Invalid(f"agent {self.id} is not started", hint="use `async with` or call start()")
        if not _allowed(self._may_ask, to):
            raise Forbidden(f"agent {self.id} may not ask {to}")
        chain = (*_chain.get(), self.id)
        if to in chain:
            raise LoopDetected(f"{' -> '.join((*chain, to))} would go in a circle")
        if len(chain) >= CHAIN_MAX:
            raise LimitExceeded(f"the chain of tasks is {len(chain)} agents long; the limit is {CHAIN_MAX}")
        correlation_id = self._clock.new_id()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[correlation_id] = _Call(to, answer)
        try:
            async with asyncio.timeout(timeout_s):
                await self._broker.publish(
                    route, msgspec.to_builtins(_Wire("task", correlation_id, self.id, body, chain))
                )
                return await answer
        except TimeoutError:
            raise RequestTimeout(f"{to} did not answer within {timeout_s:g} s") from None
        finally:
            del self._calls[correlation_id]

    async def delegate_many(
        self, to: Sequence[str], body: Any, *, timeout_s: float = 60.0
    ) -> dict[str, Any | PostbusError]:
        """Ask several agents at once; return for each its answer, or the error that came instead."""
        outcomes = await asyncio.gather(
            *(self.delegate(one, body, timeout_s=timeout_s) for one in dict.fromkeys(to)), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, PostbusError):
                raise outcome
        return dict(zip(dict.fromkeys(to), outcomes, strict=True))

    # --- taking tasks and answers ---

    async def _read(self, listener: Listener) -> None:
        async for got in listener:
            if isinstance(got, Missed):
                logger.warning("agent %s missed %s tasks or answers", self.id, got.count or "some")
                continue
            try:
                wire = msgspec.convert(got.payload, _Wire)
            except (PostbusError, msgspec.ValidationError):
                self.strays["unreadable"] += 1
                continue
            if wire.kind == "reply":
                self._answered(wire)
            elif len(self._tasks) >= TASKS_MAX:
                await self._reply(wire, error=Refused(f"{self.id} has {TASKS_MAX} tasks already"))
            else:
                task = asyncio.get_running_loop().create_task(self._work(wire))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _answered(self, wire: _Wire) -> None:
        call = self._calls.get(wire.correlation_id)
        if call is None or call.answer.done():
            self.strays["late"] += 1  # over, or answered before
        elif wire.sender != call.to:
            self.strays["foreign"] += 1
        elif wire.error is not None:
            message = wire.error.get("message", "no reason was given")
            call.answer.set_exception(Refused(f"{call.to}: {message}"))
        else:
            call.answer.set_result(wire.body)

    async def _work(self, wire: _Wire) -> None:
        try:
            self._check(wire)
            assert self._handler is not None  # noqa: S101 - checked above
            _chain.set(wire.chain)
            result = await self._handler(Task(wire.correlation_id, wire.sender, wire.body, wire.chain))
            await self._reply(wire, result)
        except PostbusError as error:
            await self._reply(wire, error=error)
        except Exception as error:
            logger.exception("agent %s failed at a task of %s", self.id, wire.sender)
            await self._reply(wire, error=Refused(f"the task failed: {type(error).__name__}"))

    def _check(self, wire: _Wire) -> None:
        if not _allowed(self._may_be_asked_by, wire.sender):
            raise Forbidden(f"{wire.sender} may not ask agent {self.id}")
        if self.id in wire.chain:
            raise LoopDetected(f"{' -> '.join((*wire.chain, self.id))} goes in a circle")
        if self._handler is None:
            raise Refused(f"agent {self.id} takes no tasks")

    async def _reply(self, wire: _Wire, body: Any = None, error: PostbusError | None = None) -> None:
        facts = None if error is None else {"code": error.code, "message": error.message}
        try:
            answer = msgspec.to_builtins(_Wire("reply", wire.correlation_id, self.id, body, error=facts))
            await self._broker.publish(agent_route(wire.sender), answer)
        except (PostbusError, TypeError) as failure:  # away, or no JSON: who asked finds out by its timeout
            logger.warning("agent %s could not answer %s: %s", self.id, wire.sender, failure)


def _allowed(patterns: tuple[str, ...], agent: str) -> bool:
    try:
        return any(matches(pattern, agent) for pattern in patterns)
    except Invalid:  # a sender whose name is none
        return False
