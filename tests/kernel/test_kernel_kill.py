"""A host that is killed in the middle of everything: the next one takes up what was left, once."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

from postbus.bus import EventBus
from postbus.kernel import Kernel, Settings, SystemTopics, TraceTopics
from postbus.kernel.settings import KernelSettings
from postbus.model import Event
from tests.cli.command_line import process
from tests.kernel.kernel_kit import holds, write_extension

DESK = """
    class Desk:
        channel_id = "desk"

        def __init__(self):
            self.sent, self.asked, self.answers = [], [], []

        async def initialize(self, context):
            self.ctx = context

        async def send(self, message):
            self.sent.append(message.text)

        async def show_approval(self, prompt):
            self.asked.append(prompt)

        async def read_secret(self, request):
            return self.answers.pop()
"""
BANK = """
    from postbus.kernel import ToolSpec

    class Bank:
        def __init__(self):
            self.paid, self.told = [], []

        async def initialize(self, context):
            self.ctx = context
            context.subscribe_event("system.channel.secure_input_response", self.on_answer)

        async def on_answer(self, event):
            self.told.append(event.payload)

        def get_tools(self):
            return [ToolSpec(name="pay", needs_approval=True)]

        async def call_tool(self, call):
            self.paid.append((call.arguments["to"], await self.ctx.secret("pin")))
            return "paid"
"""
AGENT = """
    class Agent:
        async def invoke(self, task, context):
            return await context.call_tool("pay", {"to": task})
"""
ROOT = Path(__file__).parents[2]


async def test_a_killed_host_is_taken_over(extensions: Path, tmp_path: Path) -> None:
    for name, code in (("desk", DESK), ("bank", BANK), ("agent", AGENT)):
        write_extension(extensions, name, code)
    data = tmp_path / "data"
    command = (sys.executable, "-m", "tests.kernel.host_process", data, extensions)
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    try:
        assert child.stdout is not None
        assert await asyncio.wait_for(child.stdout.readline(), 60) == b"ready\n"
    finally:
        child.send_signal(signal.SIGKILL)
        await child.wait()

    fired: list[Event] = []

    async def on_fire(event: Event) -> None:
        fired.append(event)

    bus = EventBus(data)
    bus.subscribe("once.due", on_fire, "watcher")
    async with Kernel(bus, extensions, Settings(kernel=KernelSettings(shipped=["scheduler"]))) as kernel:
        desk, bank = kernel.instance("desk"), kernel.instance("bank")
        await holds(lambda: fired and desk.asked)
        request = desk.asked[0].request_id
        await desk.ctx.answer_approval(request, "me", approved=True)
        await holds(lambda: desk.sent)
        assert desk.sent == ["paid"]
        assert bank.paid == [("ann", "hush hush")]
        assert {prompt.request_id for prompt in desk.asked} == {request}
        log = await bus.open()
        events = await log.fetch(bus.journal, 0, 0, 1000)
        topics = [event.topic for event in events]
        once = ("once.due", SystemTopics.TOOL_APPROVAL_REQUEST, SystemTopics.TOOL_APPROVAL_RESPONSE)
        assert [topics.count(topic) for topic in (*once, SystemTopics.USER_NOTIFY)] == [1, 1, 1, 1]
        [said] = [event for event in events if event.topic == SystemTopics.USER_MESSAGE]
        assert not any(b"hush hush" in event.payload_json for event in events)

    shown = await asyncio.to_thread(process, "trace", said.id, "--data", str(data), "--json")
    roots = json.loads(shown.stdout)["roots"]
    assert [root["topic"] for root in roots] == [SystemTopics.USER_MESSAGE]
    steps = [step["topic"] for step in roots[0]["children"]]
    assert steps.count(TraceTopics.AGENT_INVOKED) == 2  # once before the end, once after
    assert steps.count(TraceTopics.AGENT_RESULT) == 1
    assert {TraceTopics.TOOL_CALLED, TraceTopics.TOOL_RESULT, SystemTopics.USER_NOTIFY} < {*steps}
