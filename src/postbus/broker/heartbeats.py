"""Signs of life: sending them, and knowing who has been silent for too long."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Self

from postbus.broker.contract import Message
from postbus.broker.subjects import ALL_HEALTH, ALL_HEARTBEATS, HEARTBEAT, agent_heartbeat, plugin_health
from postbus.clock import Clock, SystemClock
from postbus.model import PostbusError, instant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from postbus.broker.contract import Broker
    from postbus.broker.listener import Listener

__all__ = ["Heartbeats", "Liveness"]

logger = logging.getLogger("postbus.broker")


class Heartbeats:
    """Publishes ``agent.events.<id>.heartbeat`` for agents, one after the other, every ``every_s`` seconds."""

    def __init__(
        self, broker: Broker, agents: Iterable[str], *, every_s: float = 30.0, clock: Clock | None = None
    ) -> None:
        self._broker = broker
        self._topics = {agent: agent_heartbeat(agent) for agent in agents}
        self._every_s = every_s
        self._clock = clock or SystemClock()
        self._beats = 0
        self._task: asyncio.Task[None] | None = None

    async def beat(self) -> None:
        """Publish one for each agent, now; a broker that is away is no error."""
        self._beats += 1
        now = instant(self._clock.now_us()).isoformat()
        for agent, topic in self._topics.items():
            try:
                await self._broker.publish(topic, {"agent": agent, "beat": self._beats, "at": now})
            except PostbusError as error:
                logger.info("no heartbeat for %s: %s", agent, error)

    async def _run(self) -> None:
        while True:
            await self.beat()
            await self._clock.sleep(self._every_s)

    async def __aenter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class Liveness:
    """Listens to heartbeats and plugin health, and says who is alive.

    A plugin says how it is on ``plugin.health.<plugin>`` with ``{"ok": true}`` or ``{"ok": false, "error": "…"}``.
    """

    def __init__(self, broker: Broker, *, silent_after_s: float = 90.0, clock: Clock | None = None) -> None:
        self._broker = broker
        self._silent_after_s = silent_after_s
        self._clock = clock or SystemClock()
        self._agents: dict[str, float] = {}
        self._plugins: dict[str, tuple[float, str | None]] = {}
        self._listeners: list[Listener] = []
        self._readers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for pattern, take in ((ALL_HEARTBEATS, self._beat), (ALL_HEALTH, self._health)):
            listener = await self._broker.subscribe(pattern)
            self._listeners.append(listener)
            self._readers.append(loop.create_task(self._read(listener, take)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for listener in self._listeners:
            await listener.close()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    @staticmethod
    async def _read(listener: Listener, take: Callable[[Message], None]) -> None:
        async for got in listener:
            if isinstance(got, Message):
                take(got)

    def _beat(self, got: Message) -> None:
        _, _, *agent, last = got.topic.split(".")
        if agent and last == HEARTBEAT:
            self._agents[".".join(agent)] = self._clock.monotonic_s()

    def _health(self, got: Message) -> None:
        try:
            said: Any = got.payload
        except PostbusError:
            said = None
        ok = isinstance(said, dict) and said.get("ok") is True
        error = None if ok else str(said.get("error") or "it is not well") if isinstance(said, dict) else "unreadable"
        self._plugins[got.topic] = (self._clock.monotonic_s(), error)

    def agent_alive(self, agent: str) -> bool:
        """Say whether an agent's heartbeat came lately."""
        agent_heartbeat(agent)
        return self._lately(self._agents.get(agent))

    def plugin_trouble(self, plugin: str) -> str | None:
        """Return what is wrong with a plugin: what it says, or that it is silent; None when it is well."""
        at_s, error = self._plugins.get(plugin_health(plugin), (None, None))
        return error if self._lately(at_s) else f"nothing was heard of {plugin} for {self._silent_after_s:g} s"

    def _lately(self, at_s: float | None) -> bool:
        return at_s is not None and self._clock.monotonic_s() - at_s <= self._silent_after_s
