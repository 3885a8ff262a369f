"""Who is being called: nobody is taken down while somebody waits for its answer, nor missed while it is renewed."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from postbus.clock import Clock

__all__ = ["Usage"]

_renewing: ContextVar[str | None] = ContextVar("postbus_kernel_renewing", default=None)


class Usage:
    """The calls of extensions that run, and the extensions that are being renewed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._calls: Counter[str] = Counter()
        self._idle: dict[str, asyncio.Event] = {}
        self._renewed: dict[str, asyncio.Event] = {}

    @contextmanager
    def calling(self, extension_id: str) -> Iterator[None]:
        """Note that an extension works for somebody."""
        self._calls[extension_id] += 1
        try:
            yield
        finally:
            self._calls[extension_id] -= 1
            if not self._calls[extension_id]:
                del self._calls[extension_id]
                self._idle.pop(extension_id, asyncio.Event()).set()

    async def idle(self, extension_id: str, seconds: float) -> bool:
        """Wait until nobody waits for an extension; False when somebody still does after that long."""
        if not self._calls[extension_id]:
            return True
        return await self._clock.wait(self._idle.setdefault(extension_id, asyncio.Event()), seconds)

    @contextmanager
    def renewing(self, extension_id: str) -> Iterator[None]:
        """Note that an extension is away for a moment."""
        done = self._renewed[extension_id] = asyncio.Event()
        token = _renewing.set(extension_id)
        try:
            yield
        finally:
            _renewing.reset(token)
            del self._renewed[extension_id]
            done.set()

    async def back(self) -> None:
        """Wait for those that are away; who is being renewed does not wait for itself."""
        own = _renewing.get()
        for name, done in list(self._renewed.items()):
            if name != own:
                await done.wait()
