"""Who is told when an inbox changes, in this process: those who wait for items, and whoever wakes agents."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator

__all__ = ["Signals"]


class Signals:
    """Changes of inboxes by agent number. Called on the event loop after the commit."""

    def __init__(self) -> None:
        self._waiting: dict[int, set[asyncio.Event]] = {}
        self._listeners: list[Callable[[int], None]] = []

    def listen(self, listener: Callable[[int], None]) -> None:
        """Have a function called with the number of every agent whose inbox changed."""
        self._listeners.append(listener)

    def changed(self, agents: Iterable[int]) -> None:
        """Tell everyone that these inboxes changed: items came, or were acked."""
        for agent in agents:
            for event in self._waiting.get(agent, ()):
                event.set()
            for listener in self._listeners:
                listener(agent)

    @contextlib.contextmanager
    def watching(self, agent: int) -> Iterator[asyncio.Event]:
        """Give an event that is set whenever the agent's inbox changes."""
        event = asyncio.Event()
        self._waiting.setdefault(agent, set()).add(event)
        try:
            yield event
        finally:
            self._waiting[agent].discard(event)
            if not self._waiting[agent]:
                del self._waiting[agent]
