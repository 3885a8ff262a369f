"""Handlers for tests: one that remembers what it got, one that waits until it is let go; and waiting for real time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from postbus import Event

__all__ = ["Gate", "Recorder", "eventually", "fails"]


class Recorder:
    """Remembers every event it is called with; ``fail`` may raise instead of letting it succeed."""

    def __init__(self, fail: Callable[[Event], None] | None = None) -> None:
        self.events: list[Event] = []
        self._fail = fail

    async def __call__(self, event: Event) -> None:
        self.events.append(event)
        if self._fail is not None:
            self._fail(event)

    @property
    def payloads(self) -> list[Any]:
        return [event.payload for event in self.events]

    @property
    def attempts(self) -> list[int]:
        return [event.attempt for event in self.events]


def fails(times: int, error: Exception | None = None) -> Callable[[Event], None]:
    """Fail the first ``times`` attempts of every event."""

    def fail(event: Event) -> None:
        if event.attempt <= times:
            raise error or RuntimeError(f"attempt {event.attempt}")

    return fail


class Gate:
    """A handler that waits at a gate; ``chosen`` says which events have to wait."""

    def __init__(self, chosen: Callable[[Event], bool] = lambda _: True) -> None:
        self.started: list[Event] = []
        self.finished: list[Event] = []
        self.cancelled: list[Event] = []
        self.running = self.most = 0
        self.open = asyncio.Event()
        self._chosen = chosen

    async def __call__(self, event: Event) -> None:
        self.started.append(event)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self._chosen(event):
                await self.open.wait()
            self.finished.append(event)
        except asyncio.CancelledError:
            self.cancelled.append(event)
            raise
        finally:
            self.running -= 1


async def eventually(holds: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait in real time, for what no fake clock moves: threads, other processes, other buses."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 - what is waited for knows nothing of this loop
            await asyncio.sleep(0.005)
