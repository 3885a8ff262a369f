"""A host with a scheduler, a channel, and an agent that puts things off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from postbus.kernel import Settings
from postbus.kernel.settings import KernelSettings
from tests.kernel.kernel_kit import CHANNEL, KernelKit, write_extension

SETTINGS = Settings(kernel=KernelSettings(shipped=["scheduler"]))

AGENT = """
    class Agent:
        def __init__(self):
            self.asked, self.results = [], []

        async def invoke(self, task, context):
            self.asked.append((task, context))
            if task.startswith("later "):
                made = await context.call_tool("schedule_once", {"delay_seconds": 60, "prompt": task[6:]})
                self.results.append(made)
            return "ok"
"""


def staffed(extensions: Path) -> Path:
    """Write the channel and the agent."""
    write_extension(extensions, "chat", CHANNEL)
    write_extension(extensions, "agent", AGENT)
    return extensions


def scheduled(folder: Path, **options: Any) -> KernelKit:
    return KernelKit(folder, SETTINGS, **options)


async def call(kit: KernelKit, name: str, **arguments: Any) -> Any:
    """Call a tool of the scheduler."""
    return await kit.kernel.call_tool(name, arguments, caller="test")
