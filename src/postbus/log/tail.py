"""The tail cache and the waiters: a reader that has caught up is served from memory and woken on commit."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from postbus.model import Event

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ANY", "Tails", "Waiters"]

EVENTS_MAX = 2048
BYTES_MAX = 4 * 1024 * 1024
PARTITIONS_MAX = 1024

Key = tuple[str, int]
_Waiting = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]", "Callable[[], bool] | None"]

# The key of those who wait for any partition at all.
ANY: Key = ("", -1)


class _Tail:
    """The last events of one partition, contiguous. Readers take ``view`` once, so a writer may replace it any time."""

    __slots__ = ("size", "view")

    def __init__(self, base: int) -> None:
        self.view: tuple[int, list[Any]] = (base, [])
        self.size = 0


class Tails:
    """Recently committed events by partition. Extended by whoever commits, read by the event loops."""

    def __init__(self) -> None:
        self._tails: dict[Key, _Tail] = {}

    def extend(self, key: Key, links: list[tuple[Any, ...]], size: int) -> None:
        """Add freshly committed facts of ``size`` bytes, oldest first; starts over when they do not follow on."""
        first = links[0][1]
        tail = self._tails.get(key)
        if tail is None or tail.view[0] + len(tail.view[1]) != first:
            self._tails.pop(key, None)
            if len(self._tails) >= PARTITIONS_MAX:
                with contextlib.suppress(StopIteration, KeyError, RuntimeError):
                    del self._tails[next(iter(self._tails))]
            tail = self._tails[key] = _Tail(first)
        base, entries = tail.view
        entries.extend(links)
        tail.size += size + 300 * len(links)
        if len(entries) > 2 * EVENTS_MAX or tail.size > 2 * BYTES_MAX:
            # Half of it goes; how large that half was is known well enough from the average.
            share = min(EVENTS_MAX / len(entries), BYTES_MAX / tail.size)
            kept = entries[-max(int(share * len(entries)), 1) :]
            tail.view = (base + len(entries) - len(kept), kept)
            tail.size = int(tail.size * len(kept) / len(entries))

    def get(self, key: Key, start: int, end: int) -> list[Event] | None:
        """Return the events of [start, end), or None when they are not all here."""
        tail = self._tails.get(key)
        if tail is None:
            return None
        base, entries = tail.view
        if start < base or end > base + len(entries):
            return None
        stream = key[0]
        found = entries[start - base : end - base]
        for index, entry in enumerate(found):
            if type(entry) is tuple:
                found[index] = entries[start - base + index] = Event(stream, *entry)
        return found

    def forget(self) -> None:
        """Drop everything."""
        self._tails = {}


class Waiters:
    """Those who wait for a partition to grow."""

    def __init__(self) -> None:
        self._waiting: dict[Key, list[_Waiting]] = {}

    async def wait(
        self, key: Key, grown: Callable[[], bool], timeout_s: float, at_once: Callable[[], bool] | None = None
    ) -> None:
        """Return when the partition is woken, when ``grown`` says so, or when the time is over.

        ``at_once`` is called by whoever would wake it on the same loop for a lone event: it must be quick, must not
        raise, and says whether that was enough, so that it goes on waiting.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        entry = (loop, future, at_once)
        self._waiting.setdefault(key, []).append(entry)
        try:
            if not grown():  # asked after registering, so that no commit falls between
                timer = loop.call_later(timeout_s, _finish, future)
                try:
                    await future
                finally:
                    timer.cancel()
        finally:
            with contextlib.suppress(KeyError, ValueError):
                self._waiting[key].remove(entry)
                if not self._waiting[key]:
                    del self._waiting[key]

    def wake(self, key: Key, *, lone: bool = False) -> None:
        """Wake everyone who waits for the partition; callable from any thread. ``lone``: for one event only."""
        waiting = self._waiting.get(key)
        if waiting is None:
            return
        here = asyncio._get_running_loop()  # noqa: SLF001 - the one way to ask without an exception
        for loop, future, at_once in list(waiting):
            if loop is here:
                if not lone or at_once is None or future.done() or not at_once():
                    _finish(future)
                continue
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_finish, future)

    def wake_all(self) -> None:
        """Wake everyone, to look again."""
        for key in list(self._waiting):
            self.wake(key)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
