"""A kernel on a real store, for what talks to sockets and processes: it is waited for, on the real clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from postbus import EventBus
from postbus.kernel import Kernel, OutgoingMessage, Settings

LIMIT_S = 60


async def until(holds: Callable[[], Any], what: str = "it") -> Any:
    """Wait until something holds; returns what it gave."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := holds()):
        assert time.monotonic() < deadline, f"{what} did not happen"
        await asyncio.sleep(0.01)
    return found


def settings_of(**sections: Any) -> Settings:
    return msgspec.convert(sections, Settings)


@asynccontextmanager
async def real_kernel(
    folder: Path, extensions: Path | None = None, settings: Settings | None = None
) -> AsyncIterator[Kernel]:
    bus = EventBus(folder / "data")
    try:
        async with Kernel(bus, extensions, settings) as kernel:
            yield kernel
    finally:
        await bus.stop()


class Chat:
    """A user on the channel extension ``chat`` of a kernel."""

    def __init__(self, kernel: Kernel, user: str = "ann") -> None:
        self.kernel = kernel
        self.user = user
        self.channel = kernel.instance("chat")

    @property
    def sent(self) -> list[str]:
        messages: list[OutgoingMessage] = self.channel.sent
        return [message.text for message in messages]

    async def say(self, text: str, **more: Any) -> None:
        await self.channel.ctx.receive(text, self.user, **more)

    async def ask(self, text: str, **more: Any) -> str:
        """Say something and return the next thing that comes."""
        known = len(self.sent)
        await self.say(text, **more)
        await until(lambda: len(self.sent) > known, f"an answer to {text!r}")
        return self.sent[known]
