from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from postbus.kernel import Settings, SystemTopics, ToolCall, ToolDenied, TraceTopics
from postbus.kernel.approvals import digest_of
from postbus.kernel.settings import KernelSettings
from postbus.model import Conflict, Event, Forbidden, Invalid, NotFound, Trust
from postbus.testing import BusKit, FakeClock
from tests.kernel.kernel_kit import CHANNEL, KernelKit, write_extension

DESK = """
    class Desk:
        channel_id = "desk"

        def __init__(self):
            self.sent, self.asked = [], []

        async def initialize(self, context):
            self.ctx = context

        async def send(self, message):
            self.sent.append(message.text)

        async def show_approval(self, prompt):
            self.asked.append(prompt)
"""

BANK = """
    from postbus.kernel import ToolSpec

    class Bank:
        def __init__(self):
            self.paid = []

        def get_tools(self):
            return [ToolSpec(name="pay", needs_approval=True, server_alias="bank-1"), ToolSpec(name="balance")]

        async def call_tool(self, call):
            if call.name == "balance":
                return 100
            self.paid.append(call.arguments)
            return "paid"
"""

AGENT = """
    from postbus.kernel import ToolDenied

    class Agent:
        def __init__(self):
            self.asked, self.refused = [], []

        async def invoke(self, task, context):
            self.asked.append(context)
            try:
                return await context.call_tool("pay", {"to": task, "amount": 5})
            except ToolDenied as denied:
                self.refused.append(denied.message)
                return f"not paid: {denied.message}"
"""

SETTINGS = Settings(kernel=KernelSettings(approval_ttl_s=600, agent_timeout_s=60))


@pytest.fixture
def host(extensions: Path) -> Path:
    write_extension(extensions, "desk", DESK)
    write_extension(extensions, "bank", BANK)
    write_extension(extensions, "agent", AGENT)
    return extensions


class Scene:
    """A user who asks the agent to pay somebody."""

    def __init__(self, kit: KernelKit) -> None:
        self.kit = kit

    def __getattr__(self, name: str) -> Any:
        return self.kit.kernel.instance(name)

    async def say(self, text: str, user: str = "me") -> None:
        await self.desk.ctx.receive(text, user)
        await self.kit.settle()

    async def answer(self, request_id: str, principal: str = "me", *, approved: bool = True, **rest: Any) -> None:
        await self.desk.ctx.answer_approval(request_id, principal, approved=approved, **rest)
        await self.kit.settle()

    async def states(self) -> list[tuple[Any, ...]]:
        return await self.kit.kit.query("SELECT state, principal, reason FROM approvals ORDER BY created_at_us")


async def test_a_tool_runs_after_a_human_allowed_it(host: Path) -> None:
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        await scene.say("ann")
        [prompt] = scene.desk.asked
        assert (prompt.tool_name, prompt.arguments, prompt.server_alias) == (
            "pay",
            {"to": "ann", "amount": 5},
            "bank-1",
        )
        assert prompt.digest == digest_of("pay", "bank-1", {"amount": 5, "to": "ann"})
        assert prompt.channel_id == "desk"
        assert scene.bank.paid == []
        await scene.answer(prompt.request_id, reason="fine")
        assert scene.bank.paid == [{"to": "ann", "amount": 5}]
        assert scene.desk.sent == ["paid"]
        assert await scene.states() == [("spent", "me", "fine")]
        [asked] = await kit.events(SystemTopics.TOOL_APPROVAL_REQUEST)
        [said] = await kit.events(SystemTopics.TOOL_APPROVAL_RESPONSE)
        assert said.payload == {"request_id": prompt.request_id, "approved": True, "reason": "fine"}
        assert said.correlation_id == asked.correlation_id
        assert said.metadata["principal"] == "me"
        assert await kit.kit.dead() == []


async def test_a_tool_does_not_run_when_a_human_says_no(host: Path) -> None:
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        await scene.say("ann")
        await scene.answer(scene.desk.asked[0].request_id, approved=False, reason="too much")
        assert scene.bank.paid == []
        assert "denied" in scene.agent.refused[0]
        assert "too much" in scene.agent.refused[0]
        [result] = await kit.events(TraceTopics.TOOL_RESULT)
        assert result.payload["status"] == "denied"


async def test_a_tool_without_the_need_is_not_asked_about(host: Path) -> None:
    async with KernelKit(host, SETTINGS) as kit:
        assert await kit.kernel.call_tool("balance", {}, caller="test") == 100
        assert await Scene(kit).states() == []


async def test_nobody_answers_in_time_and_a_late_answer_changes_nothing(host: Path) -> None:
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        await scene.say("ann")
        [prompt] = scene.desk.asked
        await kit.kit.jump(590)
        assert scene.agent.refused == []  # the wait takes none of the agent's own time
        await kit.kit.jump(20)
        assert "expired" in scene.agent.refused[0]
        with pytest.raises(Conflict, match="too late"):
            await scene.answer(prompt.request_id)
        assert scene.bank.paid == []
        assert await scene.states() == [("expired", None, "nobody answered in time")]
        [said] = await kit.events(SystemTopics.TOOL_APPROVAL_RESPONSE)
        assert said.payload["approved"] is False


async def test_an_answer_between_expiry_and_its_notice_is_too_late(host: Path) -> None:
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        await scene.say("ann")
        kit.kit.clock.set_wall(kit.kit.clock.now_us() + 600_000_000)  # nobody has woken up yet
        with pytest.raises(Conflict, match="too late"):
            await scene.answer(scene.desk.asked[0].request_id)
        assert [state for state, *_ in await scene.states()] == ["expired"]


async def test_an_answer_counts_once(host: Path) -> None:
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        await scene.say("ann")
        request = scene.desk.asked[0].request_id
        await scene.answer(request, approved=False)
        for approved in (True, False):
            with pytest.raises(Conflict, match="denied already"):
                await scene.answer(request, approved=approved)
        assert await kit.kernel.approvals.spend(request) is False
        assert len(await kit.events(SystemTopics.TOOL_APPROVAL_RESPONSE)) == 1


async def test_of_many_answers_at_once_one_counts(host: Path) -> None:
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        await scene.say("ann")
        request, ctx = scene.desk.asked[0].request_id, scene.desk.ctx
        answers = [ctx.answer_approval(request, "me", approved=n % 2 == 0) for n in range(10)]
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
        await kit.settle()
        assert sum(outcome is None for outcome in outcomes) == 1
        assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 9
        assert len(scene.bank.paid) == (1 if outcomes.index(None) % 2 == 0 else 0)


@pytest.mark.parametrize(
    ("principal", "kind", "words"),
    [
        ("you", Forbidden, "is for me to answer"),
        ("agent", Forbidden, "no human"),
        ("kernel", Forbidden, "no human"),
        ("  ", Invalid, "name of a human"),
        ("x" * 201, Invalid, "name of a human"),
        (None, Invalid, "name of a human"),
    ],
)
async def test_only_the_human_it_is_for_can_answer(
    host: Path, principal: Any, kind: type[Exception], words: str
) -> None:
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        await scene.say("ann")
        with pytest.raises(kind, match=words):
            await scene.answer(scene.desk.asked[0].request_id, principal)
        assert await scene.states() == [("pending", None, None)]
        assert scene.bank.paid == []


async def test_only_the_channel_that_asked_can_answer(host: Path) -> None:
    write_extension(host, "other", DESK.replace('"desk"', '"other"'))
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        await scene.say("ann")
        request = scene.desk.asked[0].request_id
        with pytest.raises(Forbidden, match="not asked on channel other"):
            await scene.other.ctx.answer_approval(request, "me", approved=True)
        with pytest.raises(Forbidden, match="no channel"):
            await kit.kernel.loader.entries["bank"].context.answer_approval(request, "me", approved=True)  # type: ignore[union-attr]  # it runs
        with pytest.raises(NotFound):
            await scene.answer("nonsense")
        assert scene.other.asked == []
        assert await scene.states() == [("pending", None, None)]


async def test_an_event_is_no_answer(host: Path) -> None:
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        await scene.say("ann")
        forged = {"request_id": scene.desk.asked[0].request_id, "approved": True}
        with pytest.raises(Forbidden, match="answer_approval"):
            await scene.desk.ctx.emit(SystemTopics.TOOL_APPROVAL_RESPONSE, forged)
        await kit.publish(SystemTopics.TOOL_APPROVAL_RESPONSE, forged, source="bank")
        await kit.publish(SystemTopics.TOOL_APPROVAL_RESPONSE, forged, source="kernel", trust=Trust.UNTRUSTED)
        await kit.publish(SystemTopics.TOOL_APPROVAL_RESPONSE, {**forged, "request_id": "x"}, source="kernel")
        await kit.kit.jump(10)
        assert scene.bank.paid == []
        assert await scene.states() == [("pending", None, None)]
        assert {letter.reason for letter in await kit.kit.dead()} == {"rejected"}
        assert len(await kit.kit.dead()) == 3


async def test_an_answer_is_for_these_arguments_and_for_one_call(host: Path) -> None:
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        await scene.say("ann")
        await scene.answer(scene.desk.asked[0].request_id)
        await scene.say("ann")  # the same again is another question
        await scene.say("bob", "you")
        requests = [prompt.request_id for prompt in scene.desk.asked]
        assert len({*requests}) == 3
        assert scene.bank.paid == [{"to": "ann", "amount": 5}]
        assert digest_of("pay", "b", {"x": 1}) != digest_of("pay", "b", {"x": 2})
        assert digest_of("pay", "b", {"x": 1}) != digest_of("pay", "c", {"x": 1})
        assert digest_of("pay", "b", {"x": {"p": 1, "q": 2}}) == digest_of("pay", "b", {"x": {"q": 2, "p": 1}})


async def test_a_used_permission_is_used_after_a_crash_too(host: Path) -> None:
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        asked = ToolCall(id="c" * 32, name="pay", arguments={"to": "ann"}, channel_id="desk", user_id="me")
        first = asyncio.create_task(kit.kernel.tools.call(asked))
        await kit.kit.until(lambda: bool(scene.desk.asked), step_s=0)
        await scene.answer(scene.desk.asked[0].request_id)
        assert await first == "paid"
        await kit.crash()
        with pytest.raises(ToolDenied, match="used already"):
            await kit.kernel.tools.call(asked)
        assert scene.bank.paid == []
        assert len(await kit.events(SystemTopics.TOOL_APPROVAL_REQUEST)) == 1


async def test_arguments_that_are_changed_while_a_human_thinks_are_not_what_runs(host: Path) -> None:
    async with KernelKit(host, SETTINGS) as kit:
        scene, arguments = Scene(kit), {"to": "ann"}
        call = asyncio.create_task(kit.kernel.call_tool("pay", arguments, caller="test"))
        await kit.kit.until(lambda: bool(scene.desk.asked), step_s=0)
        arguments["to"] = "mallory"
        await scene.answer(scene.desk.asked[0].request_id)
        assert await call == "paid"
        assert scene.bank.paid == [{"to": "ann"}]


# --- restart ----------------------------------------------------------------------------------------------------------


async def test_a_question_survives_a_restart(host: Path, tmp_path: Path) -> None:
    clock = FakeClock()
    async with KernelKit(host, SETTINGS, bus=BusKit(tmp_path / "data", clock=clock)) as kit:
        scene = Scene(kit)
        await scene.say("ann")
        [before] = scene.desk.asked
    async with KernelKit(host, SETTINGS, bus=BusKit(tmp_path / "data", clock=clock)) as kit:
        scene = Scene(kit)
        assert scene.desk.asked == [before]  # shown again
        await scene.answer(before.request_id)  # before the agent has come back to it
        await kit.kit.jump(10)
        assert scene.bank.paid == [{"to": "ann", "amount": 5}]
        assert scene.desk.sent == ["paid"]
        assert len(await kit.events(SystemTopics.TOOL_APPROVAL_REQUEST)) == 1
        assert await kit.kit.dead() == []


async def test_an_answer_survives_a_crash(host: Path) -> None:
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        await scene.say("ann")
        kit.kernel.approvals._news.clear()  # type: ignore[attr-defined]  # nobody hears of the answer before the end
        await scene.desk.ctx.answer_approval(scene.desk.asked[0].request_id, "me", approved=True)
        await kit.crash()
        await kit.kit.jump(10)
        assert scene.bank.paid == [{"to": "ann", "amount": 5}]
        assert await scene.states() == [("spent", "me", None)]


async def test_a_question_that_ended_while_nothing_ran_has_expired(host: Path, tmp_path: Path) -> None:
    clock = FakeClock()
    async with KernelKit(host, SETTINGS, bus=BusKit(tmp_path / "data", clock=clock)) as kit:
        await Scene(kit).say("ann")
    clock.advance(3600)
    async with KernelKit(host, SETTINGS, bus=BusKit(tmp_path / "data", clock=clock)) as kit:
        scene = Scene(kit)
        await kit.kit.jump(10)
        assert scene.desk.asked == []
        assert scene.bank.paid == []
        assert "expired" in scene.agent.refused[0]


async def test_a_permission_that_was_not_used_in_time_is_none(host: Path) -> None:
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        await scene.say("ann")
        request = scene.desk.asked[0].request_id
        kit.kernel.approvals._news.clear()  # type: ignore[attr-defined]  # nobody hears of the answer before the end
        await scene.desk.ctx.answer_approval(request, "me", approved=True)
        kit.kit.clock.set_wall(kit.kit.clock.now_us() + 600_000_000)
        assert await kit.kernel.approvals.spend(request) is False
        await kit.kit.jump(10)
        assert scene.bank.paid == []


async def test_what_was_settled_long_ago_is_forgotten(host: Path, tmp_path: Path) -> None:
    clock = FakeClock()
    async with KernelKit(host, SETTINGS, bus=BusKit(tmp_path / "data", clock=clock)) as kit:
        scene = Scene(kit)
        await scene.say("ann")
        await scene.answer(scene.desk.asked[0].request_id)
    clock.advance(40 * 86_400)
    async with KernelKit(host, SETTINGS, bus=BusKit(tmp_path / "data", clock=clock)) as kit:
        assert await Scene(kit).states() == []


# --- channels and extensions ------------------------------------------------------------------------------------------


async def test_a_channel_that_cannot_ask_means_no(host: Path) -> None:
    write_extension(host, "chat", CHANNEL)
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        await scene.chat.ctx.receive("ann", "me")
        await kit.settle()
        assert "cannot ask for approval" in scene.agent.refused[0]
        assert scene.desk.asked == []
        assert scene.bank.paid == []


async def test_without_a_named_channel_one_that_can_ask_is_found(host: Path) -> None:
    write_extension(host, "a_chat", CHANNEL)  # the first channel there is
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        call = asyncio.create_task(kit.kernel.call_tool("pay", {"to": "ann"}, caller="test"))
        await kit.kit.until(lambda: bool(scene.desk.asked), step_s=0)
        await scene.answer(scene.desk.asked[0].request_id, "anybody")
        assert await call == "paid"


async def test_an_extension_asks_a_question_of_its_own(host: Path) -> None:
    async with KernelKit(host, SETTINGS) as kit:
        scene, answers = Scene(kit), []

        async def on_answer(event: Event) -> None:
            answers.append(event.payload)

        kit.kit.bus.subscribe(SystemTopics.TOOL_APPROVAL_RESPONSE, on_answer, "asker")
        asked = {"request_id": "q1", "tool_name": "format", "arguments": {"disk": 1}, "server_alias": "ops"}
        await kit.publish(SystemTopics.TOOL_APPROVAL_REQUEST, asked, source="bank")
        assert scene.desk.asked[0].arguments == {"disk": 1}
        # Nobody else can put another call behind the same question.
        await kit.publish(SystemTopics.TOOL_APPROVAL_REQUEST, {**asked, "arguments": {"disk": 2}}, source="agent")
        await kit.publish(SystemTopics.TOOL_APPROVAL_REQUEST, {**asked, "arguments": {"disk": 3}}, source="kernel")
        assert len(await kit.kit.dead()) == 2
        await scene.answer("q1", "anybody")
        assert answers == [{"request_id": "q1", "approved": True}]
        assert len(scene.desk.asked) == 1
        later = {**asked, "request_id": "q2"}
        await kit.publish(SystemTopics.TOOL_APPROVAL_REQUEST, later, source="bank")
        await kit.kit.jump(610)
        assert answers[1:] == [{"request_id": "q2", "approved": False, "reason": "nobody answered in time"}]


async def test_a_channel_that_was_reloaded_is_shown_what_waits(host: Path) -> None:
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        await scene.say("ann")
        request = scene.desk.asked[0].request_id
        await kit.kernel.reload("desk")
        scene.desk.show_approval, show = away, scene.desk.show_approval
        await kit.kit.jump(5)
        assert scene.desk.asked == []
        scene.desk.show_approval = show
        await kit.kit.jump(5)
        await kit.kit.jump(5)
        assert [prompt.request_id for prompt in scene.desk.asked] == [request]
        await scene.answer(request)
        assert len(scene.bank.paid) == 1


async def away(_: Any) -> None:
    raise ConnectionError("away")


async def test_a_question_waits_for_its_channel(host: Path) -> None:
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        show, tries = scene.desk.show_approval, []

        async def broken(prompt: Any) -> None:
            tries.append(prompt.request_id)
            raise ConnectionError("away")

        scene.desk.show_approval = broken
        await scene.say("ann")
        for _ in range(4):
            await kit.kit.jump(20)
        scene.desk.show_approval = show
        await kit.kit.jump(100)
        [prompt] = scene.desk.asked
        assert {*tries} == {prompt.request_id}
        assert len(tries) >= 4


async def test_the_time_a_human_takes_is_not_the_agents(host: Path) -> None:
    write_extension(
        host,
        "agent",
        """
        import asyncio

        class Agent:
            def __init__(self):
                self.contexts = []

            async def invoke(self, task, context):
                self.contexts.append(context)
                if context.attempt == 1:
                    await context.call_tool("pay", {"to": task})
                    await asyncio.Event().wait()
                return "again"
        """,
    )
    async with KernelKit(host, SETTINGS) as kit:
        scene = Scene(kit)
        await scene.say("ann")
        await kit.kit.jump(300)
        await scene.answer(scene.desk.asked[0].request_id)
        await kit.kit.jump(59)
        assert len(scene.agent.contexts) == 1
        await kit.kit.jump(2)
        [error] = await kit.events(TraceTopics.AGENT_ERROR)
        assert "took longer than 60s" in error.payload["error"]
        await kit.kit.jump(10)
        assert scene.desk.sent == ["again"]
