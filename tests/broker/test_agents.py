"""Agents that give each other tasks: the same on both brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from postbus.broker import Agent, Broker, Heartbeats, Listener, Liveness, LocalBroker, Message, Task, subjects
from postbus.broker.agents import CHAIN_MAX
from postbus.broker.nats import NatsBroker
from postbus.model import Forbidden, Invalid, LoopDetected, Refused, RequestTimeout
from postbus.testing import FakeClock
from tests.broker.nats_server import NatsServer

PATIENCE_S = 60.0


@pytest_asyncio.fixture(params=["local", "nats"])
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    made: Broker
    if request.param == "local":
        made = LocalBroker()
    else:
        server: NatsServer = request.getfixturevalue("server")
        made = NatsBroker(server.url)
        await made.start(wait_s=PATIENCE_S)
    yield made
    await made.close()


async def echo(task: Task) -> Any:
    return {"from": task.sender, "body": task.body}


async def got(listener: Listener) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        found = await listener.get()
    assert isinstance(found, Message)
    return found.payload


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.01)


async def test_an_agent_asks_and_is_answered(broker: Broker) -> None:
    async with Agent(broker, "ana") as ana, Agent(broker, "ops", echo):
        assert await ana.delegate("ops", {"n": 1}, timeout_s=PATIENCE_S) == {"from": "ana", "body": {"n": 1}}
        answers = await asyncio.gather(*(ana.delegate("ops", n, timeout_s=PATIENCE_S) for n in range(50)))
        assert [answer["body"] for answer in answers] == list(range(50))


async def test_the_correlation_id_has_128_random_bits(broker: Broker) -> None:
    async with (
        await broker.subscribe("agent.route.ops") as seen,
        Agent(broker, "ana") as ana,
        Agent(broker, "ops", echo),
    ):
        await ana.delegate_many(["ops"], 1, timeout_s=PATIENCE_S)
        await ana.delegate("ops", 2, timeout_s=PATIENCE_S)
        ids = [(await got(seen))["correlation_id"] for _ in range(2)]
    assert all(len(bytes.fromhex(one)) == 16 for one in ids)
    assert ids[0] != ids[1]


async def test_several_are_asked_at_once_and_each_answer_finds_its_place(broker: Broker) -> None:
    async def slow(task: Task) -> Any:
        await asyncio.sleep(0.1)
        return f"slow {task.body}"

    async def broken(_: Task) -> Any:
        raise RuntimeError("secret detail")

    async with AsyncExitStack() as stack:
        ana = await stack.enter_async_context(Agent(broker, "ana"))
        for name, handler in (("quick", echo), ("slow", slow), ("broken", broken)):
            await stack.enter_async_context(Agent(broker, name, handler))
        found = await ana.delegate_many(["slow", "quick", "broken", "nobody", "quick"], 7, timeout_s=2.0)
    assert list(found) == ["slow", "quick", "broken", "nobody"]
    assert (found["slow"], found["quick"]) == ("slow 7", {"from": "ana", "body": 7})
    assert isinstance(found["broken"], Refused)
    assert str(found["broken"]) == "broken: the task failed: RuntimeError"
    assert isinstance(found["nobody"], RequestTimeout)


async def test_late_foreign_and_doubled_answers_complete_nothing(broker: Broker) -> None:
    tasks: list[dict[str, Any]] = []
    async with await broker.subscribe("agent.route.ops") as ops, Agent(broker, "ana") as ana:

        async def answer(task: dict[str, Any], body: Any, sender: str = "ops", **more: Any) -> None:
            wire = {"kind": "reply", "correlation_id": task["correlation_id"], "sender": sender, "body": body} | more
            await broker.publish("agent.route.ana", wire)

        with pytest.raises(RequestTimeout, match=r"ops did not answer within 0\.05 s"):
            await ana.delegate("ops", "first", timeout_s=0.05)
        tasks.append(await got(ops))
        second = asyncio.create_task(ana.delegate("ops", "second", timeout_s=PATIENCE_S))
        tasks.append(await got(ops))
        third = asyncio.create_task(ana.delegate("ops", "third", timeout_s=PATIENCE_S))
        tasks.append(await got(ops))
        await answer(tasks[0], "late")
        await answer(tasks[1], "foreign", sender="eve")
        await answer({"correlation_id": "0" * 32}, "made up")
        await broker.publish("agent.route.ana", "rubbish")
        await broker.publish("agent.route.ana", {"kind": "reply"})
        await answer(tasks[2], "right 3")
        await answer(tasks[2], "doubled")
        await answer(tasks[1], "right 2")
        assert (await second, await third) == ("right 2", "right 3")
        await until(lambda: sum(ana.strays.values()) == 6)
    assert ana.strays == {"late": 3, "foreign": 1, "unreadable": 2}


async def test_a_circle_is_refused_and_the_chain_travels_along(broker: Broker) -> None:
    chains: list[tuple[str, ...]] = []

    def passing_on(name: str, to: str) -> Callable[[Task], Awaitable[Any]]:
        async def handler(task: Task) -> Any:
            chains.append(task.chain)
            return await agents[name].delegate(to, task.body, timeout_s=PATIENCE_S)

        return handler

    async with AsyncExitStack() as stack:
        agents: dict[str, Agent] = {}
        for name, to in (("ana", "bob"), ("bob", "cy"), ("cy", "ana")):
            agents[name] = await stack.enter_async_context(Agent(broker, name, passing_on(name, to)))
        with pytest.raises(Refused, match="ana -> bob -> cy -> ana would go in a circle"):
            await agents["ana"].delegate("bob", "go", timeout_s=PATIENCE_S)
        assert chains == [("ana",), ("ana", "bob")]
        with pytest.raises(LoopDetected, match="ana -> ana"):
            await agents["ana"].delegate("ana", "me")
        # The chain belongs to the task, not to the agent: the next one begins anew.
        chains.clear()
        with pytest.raises(Refused):
            await agents["bob"].delegate("cy", "go", timeout_s=PATIENCE_S)
        assert chains[0] == ("bob",)


async def test_a_circle_that_the_sender_hides_is_refused_by_who_is_asked(broker: Broker) -> None:
    async with await broker.subscribe("agent.route.eve") as eve, Agent(broker, "ops", echo):
        wire = {"kind": "task", "correlation_id": "1" * 32, "sender": "eve", "body": 1}
        await broker.publish("agent.route.ops", wire | {"chain": ["ops", "eve"]})
        assert (await got(eve))["error"]["code"] == "loop"
        await broker.publish("agent.route.ops", wire | {"chain": ["eve"]})
        assert (await got(eve))["body"] == {"from": "eve", "body": 1}


async def test_only_who_is_allowed_asks_and_is_asked(broker: Broker) -> None:
    async with (
        Agent(broker, "ana", may_ask=["team.*", "ops"]) as ana,
        Agent(broker, "eve") as eve,
        Agent(broker, "ops", echo, may_be_asked_by=["ana"]),
        Agent(broker, "team.night", echo),
        Agent(broker, "mute"),
    ):
        assert (await ana.delegate("ops", 1, timeout_s=PATIENCE_S))["body"] == 1
        assert (await ana.delegate("team.night", 2, timeout_s=PATIENCE_S))["body"] == 2
        with pytest.raises(Forbidden, match="agent ana may not ask eve"):
            await ana.delegate("eve", 1)
        with pytest.raises(Refused, match="eve may not ask agent ops"):
            await eve.delegate("ops", 1, timeout_s=PATIENCE_S)
        with pytest.raises(Refused, match="takes no tasks"):
            await eve.delegate("mute", 1, timeout_s=PATIENCE_S)


async def test_bad_names_and_agents_that_are_not_started_are_refused(broker: Broker) -> None:
    with pytest.raises(Invalid):
        Agent(broker, "no one")
    with pytest.raises(Invalid):
        Agent(broker, "ana", may_ask=["a*"])
    ana = Agent(broker, "ana")
    with pytest.raises(Invalid, match="not started"):
        await ana.delegate("ops", 1)
    async with ana:
        with pytest.raises(Invalid):
            await ana.delegate("ops.>", 1)
        with pytest.raises(Invalid):
            await ana.delegate("ops", float("nan"))


async def test_stopping_ends_the_calls_that_wait(broker: Broker) -> None:
    async with Agent(broker, "ana") as ana:
        call = asyncio.create_task(ana.delegate("nobody", 1, timeout_s=600))
        await asyncio.sleep(0.01)
    with pytest.raises(RequestTimeout, match="ana stopped before nobody answered"):
        await call
    await ana.stop()


# --- subjects and signs of life ---------------------------------------------------------------------------------------


def test_subjects() -> None:
    assert subjects.plugin_inbound("whatsapp") == "plugin.inbound.whatsapp"
    assert subjects.plugin_inbound("telegram", "sales_bot") == "plugin.inbound.telegram.sales_bot"
    assert subjects.plugin_outbound("whatsapp", "ana") == "plugin.outbound.whatsapp.ana"
    assert subjects.plugin_health("browser") == "plugin.health.browser"
    assert subjects.agent_events("ana") == "agent.events.ana"
    assert subjects.agent_heartbeat("kate") == "agent.events.kate.heartbeat"
    assert subjects.agent_route("team.ops") == "agent.route.team.ops"
    assert subjects.TASKFLOW_RESUME == "taskflow.resume"


@pytest.mark.parametrize(
    "make",
    [
        lambda: subjects.plugin_inbound("a.b"),
        lambda: subjects.plugin_inbound("a", "b.c"),
        lambda: subjects.plugin_outbound(""),
        lambda: subjects.plugin_health("*"),
        lambda: subjects.agent_route("a b"),
        lambda: subjects.agent_route(">"),
        lambda: subjects.agent_events("ana.heartbeat"),
    ],
)
def test_names_that_would_be_other_subjects_are_refused(make: Callable[[], str]) -> None:
    with pytest.raises(Invalid):
        make()


async def test_heartbeats_and_health_say_who_is_alive(broker: Broker) -> None:
    clock = FakeClock()
    async with Liveness(broker, silent_after_s=60, clock=clock) as liveness:
        assert not liveness.agent_alive("kate")
        assert liveness.plugin_trouble("browser") == "nothing was heard of browser for 60 s"
        beats = Heartbeats(broker, ["kate", "team.ops"], every_s=30, clock=clock)
        await beats.beat()
        await broker.publish("agent.events.eve", {"not": "a heartbeat"})
        await broker.publish("plugin.health.browser", {"ok": True})
        await broker.publish("plugin.health.mail", {"ok": False, "error": "no route"})
        await broker.publish("plugin.health.odd", 7)
        await until(lambda: liveness.agent_alive("team.ops") and liveness.plugin_trouble("odd") == "unreadable")
        assert liveness.agent_alive("kate")
        assert not liveness.agent_alive("eve")
        assert (liveness.plugin_trouble("browser"), liveness.plugin_trouble("mail")) == (None, "no route")
        clock.advance(61)
        assert not liveness.agent_alive("kate")
        assert liveness.plugin_trouble("browser") == "nothing was heard of browser for 60 s"
        async with beats:
            await until(lambda: liveness.agent_alive("kate"))
            clock.advance(61)
            await until(lambda: liveness.agent_alive("kate"))


async def test_a_heartbeat_reaches_its_agent_and_a_broker_that_is_away_is_no_error(broker: Broker) -> None:
    async with await broker.subscribe(subjects.agent_heartbeat("kate")) as heart:
        beats = Heartbeats(broker, ["kate"])
        await beats.beat()
        await beats.beat()
        assert [(await got(heart))["beat"] for _ in range(2)] == [1, 2]
    await broker.close()
    await beats.beat()


async def test_a_chain_has_an_end(broker: Broker) -> None:
    async def on(task: Task) -> Any:
        number = int(task.body)
        return await agents[number].delegate(f"a{number + 1}", number + 1, timeout_s=PATIENCE_S)

    async with AsyncExitStack() as stack:
        agents = [Agent(broker, f"a{number}", on) for number in range(CHAIN_MAX + 1)]
        for agent in agents:
            await stack.enter_async_context(agent)
        with pytest.raises(Refused, match="the chain of tasks is 32 agents long; the limit is 32"):
            await agents[0].delegate("a1", 1, timeout_s=PATIENCE_S)
