from __future__ import annotations

import asyncio
from pathlib import Path

from postbus import EventBus
from postbus.kernel import ExtensionState, Kernel, SystemTopics
from postbus.testing import BusKit
from tests.kernel.kernel_kit import ECHO, LISTENER, KernelKit, write_extension

AGENT = """
    import asyncio

    class Agent:
        def __init__(self):
            self.began, self.go, self.life = asyncio.Event(), asyncio.Event(), []

        async def invoke(self, task, context):
            self.began.set()
            await self.go.wait()
            self.life.append(f"answered {task}")
            return f"{task} {context.attempt}"

        async def stop(self):
            self.life.append("stop")

        async def destroy(self):
            self.life.append("destroy")
"""


def said(text: str) -> dict[str, str]:
    return {"text": text, "user_id": "ann", "channel_id": "chat"}


async def test_what_runs_comes_to_its_end_and_nothing_new_begins(extensions: Path) -> None:
    write_extension(extensions, "agent", AGENT)
    async with KernelKit(extensions) as kit:
        agent = kit.kernel.instance("agent")
        await kit.kit.publish(SystemTopics.USER_MESSAGE, said("one"))
        async with asyncio.timeout(60):
            await agent.began.wait()
        stopping = asyncio.create_task(kit.kernel.stop())
        for _ in range(20):
            await asyncio.sleep(0)
        await kit.kit.publish(SystemTopics.USER_MESSAGE, said("two"))
        await kit.settle()
        assert not stopping.done()
        assert agent.life == []
        agent.go.set()
        await stopping
        assert agent.life == ["answered one", "stop", "destroy"]
        assert [one["text"] for one in await kit.payloads(SystemTopics.USER_NOTIFY)] == ["one 1"]
        kit.kernel = Kernel(kit.kit.bus, extensions)
        await kit.kernel.start()
        kit.kernel.instance("agent").go.set()
        await kit.settle()
        assert [one["text"] for one in await kit.payloads(SystemTopics.USER_NOTIFY)] == ["one 1", "two 1"]


async def test_the_bus_is_stopped_by_whoever_started_it(extensions: Path, tmp_path: Path) -> None:
    write_extension(extensions, "listener", LISTENER)
    bus = EventBus(tmp_path / "data")
    await bus.publish("note.old", "test", {"n": 0})
    async with Kernel(bus, extensions) as kernel:
        listener = kernel.instance("listener")
        await bus.publish("note.new", "test", {"n": 1})
        async with asyncio.timeout(60):
            while len(listener.seen) < 2:  # noqa: ASYNC110 - a real bus on a real clock
                await asyncio.sleep(0.01)
    assert sorted(one["n"] for one in listener.seen) == [0, 1]
    assert not bus._running
    assert bus._log is None
    async with BusKit() as kit:
        async with Kernel(kit.bus, extensions):
            pass
        await kit.publish("still.works", {})


async def test_stopping_twice_or_before_the_start_is_harmless(extensions: Path) -> None:
    write_extension(extensions, "echo", ECHO)
    async with BusKit() as kit:
        kernel = Kernel(kit.bus, extensions)
        await kernel.stop()
        await kernel.start()
        await kernel.stop()
        await kernel.stop()
        assert [one.state for one in kernel.report().extensions] == [ExtensionState.STOPPED]


async def test_what_fails_to_stop_keeps_nobody_from_stopping(extensions: Path) -> None:
    code = """
        class Stubborn:
            ends = []

            async def stop(self):
                self.ends.append("stop")
                raise RuntimeError("no")

            async def destroy(self):
                self.ends.append("destroy")
                raise SystemExit(1)
    """
    write_extension(extensions, "a", code)
    write_extension(extensions, "b", code)
    async with KernelKit(extensions) as kit:
        both = [kit.kernel.instance(name) for name in ("a", "b")]
    assert [one.ends for one in both] == [["stop", "destroy"]] * 2
