"""How long an agent may work. The time a human takes to answer is not the agent's."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from postbus.clock import Clock

__all__ = ["limited", "paused"]

Result = TypeVar("Result")

LOOK_S = 3600.0


class _Watch:
    """A stopwatch for one piece of work, stopped while anything in it is paused."""

    def __init__(self, clock: Clock, seconds: float, outer: _Watch | None) -> None:
        self._clock = clock
        self.left_s = seconds
        self._since_s = clock.monotonic_s()
        self._pauses = 0
        self.outer = outer
        self.news = asyncio.Event()

    def pause(self, step: int) -> None:
        """Stop it (1), or let it go on (-1) when nothing else stops it."""
        self.look()
        self._pauses += step
        self.news.set()

    def look(self) -> float:
        """Return how long to wait before the next look; not above 0 when the time is up."""
        now_s = self._clock.monotonic_s()
        if not self._pauses:
            self.left_s -= now_s - self._since_s
        self._since_s = now_s
        return LOOK_S if self._pauses else self.left_s


_watch: ContextVar[_Watch | None] = ContextVar("postbus_kernel_watch", default=None)


async def limited(clock: Clock, seconds: float, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what the work comes to; raises ``TimeoutError``, and ends it, when it takes longer than that."""
    watch = _Watch(clock, seconds, _watch.get())
    token = _watch.set(watch)
    task = asyncio.get_running_loop().create_task(work)
    _watch.reset(token)
    task.add_done_callback(lambda _: watch.news.set())
    try:
        while not task.done():
            watch.news.clear()
            wait_s = watch.look()
            if wait_s <= 0:
                raise TimeoutError(f"it took longer than {seconds:g}s")
            await clock.wait(watch.news, wait_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    return task.result()


@contextmanager
def paused() -> Iterator[None]:
    """Stop the watches of the work that runs here for a while."""
    watches, watch = list[_Watch](), _watch.get()
    while watch is not None:
        watches.append(watch)
        watch = watch.outer
    for one in watches:
        one.pause(1)
    try:
        yield
    finally:
        for one in watches:
            one.pause(-1)
