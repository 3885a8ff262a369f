"""A kernel on a bus whose clock the test moves, and small extensions written as files, as a user writes them."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from postbus.kernel import ExtensionStatus, Kernel, Settings
from postbus.kernel.entrypoint import forget_code
from postbus.model import Event
from postbus.testing import BusKit

CHANNEL = """
    class Channel:
        channel_id = "chat"

        def __init__(self):
            self.sent = []

        async def initialize(self, context):
            self.ctx = context

        async def send(self, message):
            self.sent.append(message)
"""

ECHO = """
    class Echo:
        def __init__(self):
            self.asked = []

        async def invoke(self, task, context):
            self.asked.append((task, context))
            return f"echo: {task}"
"""

LISTENER = """
    class Listener:
        def __init__(self):
            self.seen = []

        async def initialize(self, context):
            self.ctx = context
            context.subscribe_event("note.*", self.on_note)

        async def on_note(self, event):
            self.seen.append(event.payload)
"""


def write_extension(folder: Path, id: str, code: str | None = None, manifest: str = "") -> Path:  # noqa: A002 - the word of the model
    """Write an extension whose class is the last one in its code; its manifest gets an id and an entrypoint."""
    made = folder / id
    made.mkdir(parents=True, exist_ok=True)
    head = f"id: {id}\nname: {id.title()}\n"
    if code is not None:
        code = textwrap.dedent(code)
        (made / "main.py").write_text(code, encoding="utf-8")
        names = [
            line.split()[1].partition("(")[0].rstrip(":") for line in code.splitlines() if line.startswith("class ")
        ]
        head += f"entrypoint: main:{names[-1]}\n"
    (made / "manifest.yaml").write_text(head + textwrap.dedent(manifest), encoding="utf-8")
    return made


async def holds(what: Callable[[], object]) -> None:
    """Wait until something holds, in real time; for what a moved clock cannot bring about."""
    for _ in range(6000):
        if what():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


class KernelKit:
    """A kernel and its bus: ``kit.settle()`` until nothing is left to do."""

    def __init__(
        self, folder: Path, settings: Settings | None = None, bus: BusKit | None = None, **options: Any
    ) -> None:
        self.folder = folder
        self.kit = bus or BusKit()
        self.settings = settings
        self.options = options
        self.kernel = Kernel(self.kit.bus, folder, settings, **options)

    async def __aenter__(self) -> Self:
        await self.kit.__aenter__()
        await self.kernel.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kernel.stop()
        await self.kit.__aexit__(kind, error, trace)

    async def crash(self) -> None:
        """End as a killed process does, and begin again."""
        if self.kernel._reporting is not None:
            self.kernel._reporting.cancel()
        for entry in self.kernel.loader.entries.values():
            if entry.background is not None:
                entry.background.cancel()
            forget_code(entry.package)
        for part in self.kernel.parts.all():
            for task in (getattr(part, "_watching", None), getattr(part, "_looking", None)):
                if task is not None:
                    task.cancel()
        await self.kit.crash()
        self.kernel = Kernel(self.kit.bus, self.folder, self.settings, **self.options)
        await self.kernel.start()

    async def settle(self) -> None:
        await self.kit.settle()

    async def publish(self, topic: str, payload: Any, **fields: Any) -> None:
        await self.kit.publish(topic, payload, **fields)
        await self.kit.settle()

    async def events(self, topic: str) -> list[Event]:
        return [event for event in await self.kit.events() if event.topic == topic]

    async def payloads(self, topic: str) -> list[Any]:
        return [event.payload for event in await self.events(topic)]

    def status(self, id: str) -> ExtensionStatus:  # noqa: A002 - the word of the model
        return next(status for status in self.kernel.report().extensions if status.id == id)
