from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from postbus.kernel import ExtensionState, Settings
from postbus.kernel.agents import DEPTH_MAX, Sessions
from postbus.kernel.settings import KernelSettings
from postbus.model import Invalid, NotFound, SchemaMismatch
from tests.kernel.kernel_kit import CHANNEL, ECHO, KernelKit, write_extension

PLAIN = """
    class Plain:
        async def initialize(self, context):
            self.ctx = context
"""

SLOW = """
    import asyncio

    class Slow:
        def __init__(self):
            self.now, self.most, self.done = 0, 0, []
            self.gates = {}

        async def invoke(self, task, context):
            self.now += 1
            self.most = max(self.most, self.now)
            await self.gates.setdefault(task, asyncio.Event()).wait()
            self.now -= 1
            self.done.append(task)
            return task
"""

CALCULATOR = """
    from postbus.kernel import ToolSpec

    class Calculator:
        def __init__(self):
            self.calls = []

        def get_tools(self):
            number = {"type": "number"}
            schema = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
            return [ToolSpec(name="add", description="Adds", parameters=schema), ToolSpec(name="bad")]

        async def call_tool(self, call):
            self.calls.append(call)
            if call.name == "bad":
                raise RuntimeError("out of order")
            return call.arguments["a"] + call.arguments["b"]
"""


async def test_one_invocation_at_a_time_per_session(extensions: Path) -> None:
    write_extension(extensions, "slow", SLOW)
    async with KernelKit(extensions) as kit:
        slow = kit.kernel.instance("slow")

        async def ask(task: str, session: str) -> None:
            await kit.kernel.invoke_agent(task, caller="test", session_id=session)

        work = [asyncio.create_task(ask(f"{session}{n}", session)) for n in range(3) for session in ("x", "y")]
        await kit.kit.until(lambda: slow.now == 2, step_s=0)
        for task in ("y0", "y1", "y2", "x2", "x1", "x0"):  # x0 is last to be let go, and the first of its session
            slow.gates.setdefault(task, asyncio.Event()).set()
        await asyncio.gather(*work)
        assert slow.most == 2
        assert [task for task in slow.done if task[0] == "x"] == ["x0", "x1", "x2"]
        assert kit.kernel.agents.sessions.busy == ()


async def test_a_failed_invocation_frees_its_session(extensions: Path) -> None:
    code = """
        class Bad:
            async def invoke(self, task, context):
                if task == "number":
                    return 5
                raise ConnectionError("away")
    """
    write_extension(extensions, "bad", code)
    async with KernelKit(extensions) as kit:
        with pytest.raises(ConnectionError):
            await kit.kernel.invoke_agent("x", caller="test", session_id="s")
        with pytest.raises(Invalid, match="agent bad answered with int"):
            await kit.kernel.invoke_agent("number", caller="test", session_id="s")
        with pytest.raises(Invalid, match="a prompt is not empty"):
            await kit.kernel.invoke_agent("  ", caller="test")
        assert kit.kernel.agents.sessions.busy == ()
        assert [one["error"] for one in await kit.payloads("agent_error")] == [
            "ConnectionError: away",
            "agent bad answered with int, not with an AgentResponse or a text",
        ]


async def test_the_trace_is_under_one_correlation(extensions: Path) -> None:
    write_extension(extensions, "echo", ECHO)
    write_extension(extensions, "calculator", CALCULATOR)
    asker = """
        class Asker:
            async def initialize(self, context):
                self.ctx = context
                context.subscribe_event("task.received", self.on_task)

            async def on_task(self, event):
                answer = await self.ctx.invoke_agent(event.payload["text"], agent="echo")
                await self.ctx.emit("task.done", {"text": answer.text})
    """
    write_extension(extensions, "asker", asker)
    async with KernelKit(extensions) as kit:
        await kit.publish("task.received", {"text": "hello"}, correlation_id="c1")
        events = await kit.kit.events()
        assert [event.topic for event in events] == ["task.received", "agent_invoked", "agent_result", "task.done"]
        assert {event.correlation_id for event in events} == {"c1"}
        invoked, result = events[1].payload, events[2].payload
        assert (invoked["agent"], invoked["caller"], invoked["prompt"]) == ("echo", "asker", "hello")
        assert (invoked["tools"], invoked["trust"]) == (["add", "bad"], "trusted")
        assert (result["text"], result["invocation_id"]) == ("echo: hello", invoked["invocation_id"])
        context = kit.kernel.instance("echo").asked[0][1]
        assert (context.correlation_id, context.caller, context.attempt, context.depth) == ("c1", "asker", 1, 0)


async def test_every_invocation_has_an_id_that_a_retry_has_too(extensions: Path) -> None:
    write_extension(extensions, "echo", ECHO)
    twice = """
        class Twice:
            async def initialize(self, context):
                self.ctx = context
                context.subscribe_event("task", self.first)
                context.subscribe_event("task", self.second)

            async def first(self, event):
                await self.ctx.invoke_agent("same")
                if event.attempt == 1:
                    raise RuntimeError("in the middle")
                await self.ctx.invoke_agent("same")

            async def second(self, event):
                await self.ctx.invoke_agent("same")
    """
    write_extension(extensions, "twice", twice)
    async with KernelKit(extensions) as kit:
        await kit.publish("task", {})
        await kit.kit.advance(60)
        ids = [(context.attempt, context.invocation_id) for _, context in kit.kernel.instance("echo").asked]
        (_, first), (_, other) = [one for one in ids if one[0] == 1]
        assert [found for attempt, found in ids if attempt == 2] == [first, ids[3][1], other]
        assert len({found for _, found in ids}) == 3
        await kit.kernel.invoke_agent("same", caller="test")  # outside of any handler there is nothing to repeat
        assert kit.kernel.instance("echo").asked[-1][1].invocation_id not in {found for _, found in ids}


async def test_a_long_prompt_is_cut_in_the_trace_only(extensions: Path) -> None:
    write_extension(extensions, "echo", ECHO)
    async with KernelKit(extensions) as kit:
        answer = await kit.kernel.invoke_agent("x" * 20_000, caller="test", correlation_id="c1")
        assert len(answer.text) > 20_000
        [invoked] = await kit.events("agent_invoked")
        assert len(invoked.payload["prompt"]) < 9_000
        assert invoked.correlation_id == "c1"


async def test_who_is_the_orchestrator(extensions: Path) -> None:
    write_extension(extensions, "one", ECHO)
    async with KernelKit(extensions) as kit:
        assert kit.kernel.agents.orchestrator == "one"
    write_extension(extensions, "two", ECHO)
    async with KernelKit(extensions) as kit:
        assert kit.kernel.agents.orchestrator is None
        with pytest.raises(NotFound, match="there is no orchestrator"):
            await kit.kernel.invoke_agent("x", caller="test")
        with pytest.raises(NotFound, match="there is no agent three"):
            await kit.kernel.invoke_agent("x", caller="test", agent="three")
    write_extension(extensions, "three", ECHO, "agent: {integration_mode: orchestrator}\n")
    async with KernelKit(extensions) as kit:
        assert kit.kernel.agents.orchestrator == "three"
    async with KernelKit(extensions, Settings(kernel=KernelSettings(orchestrator="two"))) as kit:
        assert kit.kernel.agents.orchestrator == "two"
    async with KernelKit(extensions, Settings(kernel=KernelSettings(orchestrator="ghost"))) as kit:
        with pytest.raises(NotFound, match="ghost does not run"):
            await kit.kernel.invoke_agent("x", caller="test")


async def test_an_agent_uses_tools_and_colleagues(extensions: Path) -> None:
    boss = """
        class Boss:
            async def invoke(self, task, context):
                self.context = context
                total = await context.call_tool("add", {"a": 1, "b": 2})
                again = await context.call_tool("add", {"a": 1, "b": 2})
                said = await context.call_tool("ask_echo", {"task": f"say {total}"})
                return f"{said} {again}"
    """
    write_extension(extensions, "boss", boss, "agent: {integration_mode: orchestrator}\n")
    write_extension(extensions, "echo", ECHO)
    write_extension(extensions, "calculator", CALCULATOR)
    async with KernelKit(extensions) as kit:
        answer = await kit.kernel.invoke_agent("go", caller="test", session_id="s", correlation_id="c1")
        assert answer.text == "echo: say 3 3"
        context = kit.kernel.instance("boss").context
        assert [tool.name for tool in context.tools] == ["add", "bad", "ask_echo"]
        inner = kit.kernel.instance("echo").asked[0][1]
        assert (inner.depth, inner.session_id, inner.caller, inner.correlation_id) == (1, "s", "boss", "c1")
        assert "ask_echo" not in [tool.name for tool in inner.tools]
        first, second = kit.kernel.instance("calculator").calls
        assert first.id != second.id
        assert (first.extension_id, first.correlation_id, first.session_id) == ("calculator", "c1", "s")
        assert [one["status"] for one in await kit.payloads("tool_result")] == ["ok", "ok"]


async def test_a_tool_that_cannot_be_called_is_refused(extensions: Path) -> None:
    write_extension(extensions, "calculator", CALCULATOR)
    write_extension(extensions, "plain", PLAIN)
    async with KernelKit(extensions) as kit:
        ctx = kit.kernel.instance("plain").ctx
        assert await ctx.call_tool("add", {"a": 1, "b": 2}) == 3
        with pytest.raises(SchemaMismatch, match="these are no arguments of add"):
            await ctx.call_tool("add", {"a": "one", "b": 2})
        with pytest.raises(NotFound, match="there is no tool divide") as caught:
            await ctx.call_tool("divide", {})
        assert "postbus doctor" in (caught.value.hint or "")
        with pytest.raises(RuntimeError):
            await ctx.call_tool("bad", {})
        assert len(kit.kernel.instance("calculator").calls) == 2
        assert (await kit.payloads("tool_result"))[-1]["error"] == "RuntimeError: out of order"


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "ask_me", "a.b"])
async def test_a_tool_no_model_can_name_is_refused(extensions: Path, name: str) -> None:
    code = f"""
        from postbus.kernel import ToolSpec

        class Odd:
            def get_tools(self):
                return [ToolSpec(name={name!r})]

            async def call_tool(self, call):
                return None
    """
    write_extension(extensions, "odd", code)
    async with KernelKit(extensions) as kit:
        assert "is no name of a tool" in kit.status("odd").reason
        assert kit.kernel.tools.specs() == ()


@pytest.mark.parametrize(
    "tools", ["[5]", "[ToolSpec(name='a', parameters={'type': 5})]", "[ToolSpec(name='a'), ToolSpec(name='a')]"]
)
async def test_what_is_no_tool_is_refused(extensions: Path, tools: str) -> None:
    code = f"""
        from postbus.kernel import ToolSpec

        class Odd:
            def get_tools(self):
                return {tools}

            async def call_tool(self, call):
                return None
    """
    write_extension(extensions, "odd", code)
    async with KernelKit(extensions) as kit:
        assert (kit.status("odd").state, kit.status("odd").stage) == (ExtensionState.ERROR, "wire")


async def test_a_provider_that_cannot_say_its_tools_any_more_breaks_no_other(extensions: Path) -> None:
    code = """
        from postbus.kernel import ToolSpec

        class Forgetful:
            broken = False

            def get_tools(self):
                if self.broken:
                    raise RuntimeError("forgot")
                return [ToolSpec(name="hum")]

            async def call_tool(self, call):
                return object()
    """
    write_extension(extensions, "calculator", CALCULATOR)
    write_extension(extensions, "forgetful", code)
    async with KernelKit(extensions) as kit:
        with pytest.raises(Invalid):  # what it returns is no JSON value
            await kit.kernel.call_tool("hum", {}, caller="test")
        kit.kernel.instance("forgetful").broken = True
        assert [tool.name for tool in kit.kernel.tools.specs()] == ["add", "bad"]


async def test_agents_that_ask_each_other_for_ever_are_stopped(extensions: Path) -> None:
    code = """
        class Parrot:
            async def invoke(self, task, context):
                other = "ask_left" if self.me == "right" else "ask_right"
                return await context.call_tool(other, {"task": task})

            async def initialize(self, context):
                self.me = context.extension_id
    """
    write_extension(extensions, "left", code)
    write_extension(extensions, "right", code)
    async with KernelKit(extensions) as kit:
        with pytest.raises(Invalid, match=f"more than {DEPTH_MAX} deep"):
            await kit.kernel.invoke_agent("x", caller="test", agent="left")
        assert kit.kernel.agents.sessions.busy == ()


async def test_work_inside_a_turn_never_waits_for_another_session() -> None:
    sessions = Sessions()
    met = asyncio.Barrier(2)

    async def work(own: str, other: str) -> tuple[str, int]:
        async with sessions.turn(own):
            await met.wait()
            async with sessions.turn(other) as inner:
                return inner

    async with asyncio.timeout(60):
        found = await asyncio.gather(work("x", "y"), work("y", "x"))
    assert list(found) == [("x", 1), ("y", 1)]
    assert sessions.busy == ()


async def test_what_outlives_a_turn_waits_like_everybody() -> None:
    sessions, go = Sessions(), asyncio.Event()

    async def late() -> int:
        await go.wait()
        async with sessions.turn("x") as (_, depth):
            return depth

    async with sessions.turn("x"):
        task = asyncio.create_task(late())
    async with sessions.turn("x"):
        go.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
    assert await task == 0


async def test_pieces_of_an_answer_are_shown_as_they_come(extensions: Path) -> None:
    code = """
        class Talker:
            async def invoke(self, task, context):
                await context.delta("one ")
                await context.delta("two")
                return "one two"
    """
    channel = (
        CHANNEL
        + """
        async def send_delta(self, session_id, text):
            self.sent.append((session_id, text))
    """
    )
    write_extension(extensions, "talker", code)
    write_extension(extensions, "chat", channel)
    async with KernelKit(extensions) as kit:
        await kit.kernel.invoke_agent("x", caller="test", channel_id="chat", session_id="s")
        assert kit.kernel.instance("chat").sent == [("s", "one "), ("s", "two")]
