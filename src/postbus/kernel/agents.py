"""The agents: which one answers, one invocation at a time per session, each recorded under its correlation id."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec

from postbus.bus.context import current
from postbus.kernel.contract import (
    AgentDescription,
    AgentInvocationContext,
    AgentProvider,
    AgentResponse,
    ToolCall,
    ToolSpec,
)
from postbus.kernel.identity import ambient_correlation, ambient_trust, work_id
from postbus.kernel.patience import limited
from postbus.kernel.router import HOOKS
from postbus.kernel.tools import call_id
from postbus.kernel.topics import TraceTopics
from postbus.model import Invalid, NotFound, PostbusError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from postbus.clock import Clock
    from postbus.kernel.router import MessageRouter
    from postbus.kernel.trace import Trace
    from postbus.kernel.usage import Usage

__all__ = ["Agents", "Invocation", "Sessions"]

DEPTH_MAX = 8
ASK = "ask_"
ASK_PARAMETERS = {
    "type": "object",
    "properties": {"task": {"type": "string", "minLength": 1}},
    "required": ["task"],
    "additionalProperties": False,
}


class Invocation(msgspec.Struct, frozen=True, kw_only=True):
    """A task for an agent: on whose behalf it is asked, and where the answer belongs."""

    task: str
    caller: str
    agent: str | None = None
    channel_id: str | None = None
    session_id: str | None = None
    user_id: str | None = None
    correlation_id: str | None = None


class _Hold:
    """Whoever works for a session now; what it starts belongs to it until it ends."""

    def __init__(self, session_id: str, depth: int) -> None:
        self.session_id = session_id
        self.depth = depth
        self.over = False


_hold: ContextVar[_Hold | None] = ContextVar("postbus_kernel_hold", default=None)


class Sessions:
    """One piece of work at a time per session, in the order it was asked for."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: Counter[str] = Counter()

    @property
    def busy(self) -> tuple[str, ...]:
        """The sessions that work or wait."""
        return tuple(self._locks)

    @asynccontextmanager
    async def turn(self, session_id: str) -> AsyncIterator[tuple[str, int]]:
        """Wait for one's turn; yields the session and how deep in its work this is.

        What is asked for during a turn is part of it, whatever session it names, and does not wait: two sessions can
        never wait for each other.
        """
        outer = _hold.get()
        if outer is not None and not outer.over:
            if outer.depth >= DEPTH_MAX:
                raise Invalid(f"agents call each other more than {DEPTH_MAX} deep")
            async with self._holding(outer.session_id, outer.depth + 1):
                yield outer.session_id, outer.depth + 1
            return
        lock = self._locks.setdefault(session_id, asyncio.Lock())
        self._users[session_id] += 1
        try:
            async with lock, self._holding(session_id, 0):
                yield session_id, 0
        finally:
            self._users[session_id] -= 1
            if not self._users[session_id]:
                del self._users[session_id], self._locks[session_id]

    @asynccontextmanager
    async def _holding(self, session_id: str, depth: int) -> AsyncIterator[None]:
        hold = _Hold(session_id, depth)
        token = _hold.set(hold)
        try:
            yield
        finally:
            hold.over = True
            _hold.reset(token)


class Agents:
    """The agents that are loaded, and how they are asked."""

    def __init__(
        self,
        clock: Clock,
        router: MessageRouter,
        trace: Trace,
        usage: Usage,
        tools: Callable[[], tuple[ToolSpec, ...]],
        call_tool: Callable[[ToolCall], Awaitable[Any]],
        wanted: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._router = router
        self._trace = trace
        self._usage = usage
        self._tools = tools
        self._call_tool = call_tool
        self._wanted = wanted
        self._agents: dict[str, tuple[AgentDescription, AgentProvider]] = {}
        self.sessions = Sessions()

    def attach(self, description: AgentDescription, provider: AgentProvider) -> None:
        """Add an agent."""
        self._agents[description.id] = (description, provider)

    def detach(self, agent_id: str) -> None:
        """Remove an agent, if it is there."""
        self._agents.pop(agent_id, None)

    @property
    def orchestrator(self) -> str | None:
        """Who answers users: the one the settings name, else the first that says so, else the only one there is."""
        if self._wanted is not None:
            return self._wanted if self._wanted in self._agents else None
        for description, _ in self._agents.values():
            if description.mode == "orchestrator":
                return description.id
        return next(iter(self._agents)) if len(self._agents) == 1 else None

    def descriptions(self) -> tuple[AgentDescription, ...]:
        """Return the agents there are."""
        return tuple(description for description, _ in self._agents.values())

    async def invoke(self, asked: Invocation) -> AgentResponse:
        """Have an agent answer and return the answer.

        Invocations of one session run one after the other; what an agent asks of another runs inside its own. Raises
        ``NotFound`` when there is no such agent or no orchestrator, and what the agent raises.
        """
        if (asked.agent or self.orchestrator) not in self._agents:
            await self._usage.back()
        description, provider = self._choose(asked.agent)
        async with self.sessions.turn(asked.session_id or asked.channel_id or asked.caller) as (session, depth):
            context = self._context(asked, description, session, depth)
            facts = {
                "invocation_id": context.invocation_id,
                "agent": description.id,
                "caller": asked.caller,
                "session_id": session,
                "depth": depth,
            }
            said = {"prompt": asked.task, "trust": str(context.trust), "tools": [tool.name for tool in context.tools]}
            await self._trace.record(TraceTopics.AGENT_INVOKED, {**facts, **said}, context.correlation_id)
            try:
                with self._usage.calling(description.id):
                    answer = _response(description.id, await self._run(provider, asked.task, context))
            except Exception as error:
                problem = error.message if isinstance(error, PostbusError) else f"{type(error).__name__}: {error}"
                await self._trace.record(TraceTopics.AGENT_ERROR, {**facts, "error": problem}, context.correlation_id)
                raise
            await self._trace.record(TraceTopics.AGENT_RESULT, {**facts, "text": answer.text}, context.correlation_id)
        spoken = {"agent": description.id, "text": answer.text, "session_id": session, "channel_id": asked.channel_id}
        await self._router.fire(HOOKS.AGENT_RESPONSE, {**spoken, "correlation_id": context.correlation_id})
        return answer

    async def _run(self, provider: AgentProvider, task: str, context: AgentInvocationContext) -> Any:
        async def work() -> Any:
            return await provider.invoke(task, context)

        return await limited(self._clock, self._timeout_s, work())

    def _choose(self, agent: str | None) -> tuple[AgentDescription, AgentProvider]:
        name = self.orchestrator if agent is None else agent
        if name is None:
            hint = (
                "load an agent with integration_mode: orchestrator, or name one in settings under kernel.orchestrator"
            )
            wanted = "" if self._wanted is None else f": {self._wanted} does not run"
            raise NotFound(f"there is no orchestrator{wanted}", hint=hint)
        if name not in self._agents:
            raise NotFound(f"there is no agent {name}", hint="`postbus doctor` shows what was loaded")
        return self._agents[name]

    def _context(
        self, asked: Invocation, description: AgentDescription, session: str, depth: int
    ) -> AgentInvocationContext:
        invocation = work_id(self._clock)
        correlation = asked.correlation_id or ambient_correlation(self._clock)
        trust, delivery = ambient_trust(), current.get()
        turns: Counter[str] = Counter()

        async def call_tool(name: str, arguments: dict[str, Any]) -> Any:
            target = self._asked_agent(name, description.id)
            first = call_id(invocation, name, arguments, 0)
            call = ToolCall(
                id=call_id(invocation, name, arguments, turns[first]),
                name=name,
                arguments=arguments,
                correlation_id=correlation,
                session_id=session,
                channel_id=asked.channel_id,
                user_id=asked.user_id,
                trust=trust,
            )
            turns[first] += 1
            if target is None:
                return await self._call_tool(call)
            return await self._ask(target, arguments, asked, session, description.id, correlation)

        async def delta(text: str) -> None:
            if depth == 0 and asked.channel_id is not None:
                await self._router.stream(asked.channel_id, session, text)

        return AgentInvocationContext(
            invocation_id=invocation,
            correlation_id=correlation,
            session_id=session,
            channel_id=asked.channel_id,
            user_id=asked.user_id,
            caller=asked.caller,
            depth=depth,
            attempt=1 if delivery is None else delivery.attempt,
            trust=trust,
            tools=(*self._tools(), *self._colleagues(description.id)),
            call_tool=call_tool,
            delta=delta,
        )

    def _colleagues(self, asking: str) -> tuple[ToolSpec, ...]:
        """Return the agents that serve others, as tools."""
        return tuple(
            ToolSpec(name=f"{ASK}{one.id}", description=one.description or one.name, parameters=ASK_PARAMETERS)
            for one in self.descriptions()
            if one.mode == "tool" and one.id != asking
        )

    def _asked_agent(self, name: str, asking: str) -> str | None:
        found = {spec.name for spec in self._colleagues(asking)}
        return name.removeprefix(ASK) if name in found else None

    async def _ask(
        self, target: str, arguments: dict[str, Any], asked: Invocation, session: str, caller: str, correlation: str
    ) -> str:
        task = arguments.get("task")
        if set(arguments) != {"task"} or not isinstance(task, str) or not task:
            raise Invalid(f"{ASK}{target} takes a task, a text")
        inner = Invocation(
            task=task,
            caller=caller,
            agent=target,
            channel_id=asked.channel_id,
            session_id=session,
            user_id=asked.user_id,
            correlation_id=correlation,
        )
        return (await self.invoke(inner)).text


def _response(agent: str, answer: Any) -> AgentResponse:
    if isinstance(answer, str):
        return AgentResponse(text=answer)
    if not isinstance(answer, AgentResponse):
        raise Invalid(f"agent {agent} answered with {type(answer).__name__}, not with an AgentResponse or a text")
    return answer
