from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from postbus.kernel import ExtensionContext, Reject, RetryPolicy, Settings, SystemTopics
from postbus.kernel.topics import RECORDS, payload_schema
from postbus.model import Conflict, Event, Forbidden, Invalid, NotFound, SchemaMismatch, Trust
from tests.kernel.kernel_kit import CHANNEL, ECHO, LISTENER, KernelKit, write_extension

PLAIN = """
    class Plain:
        async def initialize(self, context):
            self.ctx = context
"""


def context_of(kit: KernelKit, id: str) -> ExtensionContext:  # noqa: A002 - the word of the model
    found: ExtensionContext = kit.kernel.instance(id).ctx
    return found


async def test_emit_publishes_with_the_extension_as_source(extensions: Path) -> None:
    write_extension(extensions, "plain", PLAIN)
    async with KernelKit(extensions) as kit:
        ctx = context_of(kit, "plain")
        await ctx.emit("task.received", {"text": "Summarize report"})
        await ctx.emit("alert", {"level": "warning"}, correlation_id="req-123")
        receipt = await ctx.emit("alert", {"level": "x"}, key="k", native_id="n", headers={"h": "1"}, metadata={"m": 2})
        again = await ctx.emit("alert", {"level": "x"}, key="k", native_id="n", headers={"h": "1"}, metadata={"m": 2})
        assert (again.duplicate, again.id) == (True, receipt.id)
        [task], [first, second] = await kit.events("task.received"), await kit.events("alert")
        assert (task.source, task.payload, task.correlation_id) == ("plain", {"text": "Summarize report"}, None)
        assert (first.correlation_id, second.key, second.headers, second.metadata) == (
            "req-123",
            "k",
            {"h": "1"},
            {"m": 2},
        )


async def test_what_cannot_be_emitted_is_refused_and_changes_nothing(extensions: Path) -> None:
    manifest = """
        events:
          publishes:
            - topic: order.paid
              schema: {type: object, properties: {total: {type: number}}, required: [total]}
    """
    write_extension(extensions, "plain", PLAIN, manifest)
    async with KernelKit(extensions) as kit:
        ctx = context_of(kit, "plain")
        refusals: list[tuple[str, Any, type[Exception]]] = [
            ("a.b", "text", Invalid),
            ("a.*", {}, Invalid),
            ("a.b", {"x": float("nan")}, Invalid),
            ("order.paid", {"total": "many"}, SchemaMismatch),
            ("system.user.notify", {"txt": "typo"}, Invalid),
            ("system.user.notify", {"text": 5}, Invalid),
            ("system.agent.task", {}, Invalid),
            ("system.made.up", {}, Invalid),
            ("user.message", {"text": "hi"}, Invalid),
            ("system.mcp.tool_approval_response", {"request_id": "1", "approved": True}, Forbidden),
        ]
        before = await kit.kit.events()
        for topic, payload, kind in refusals:
            with pytest.raises(kind):
                await ctx.emit(topic, payload)
        assert await kit.kit.events() == before
        await ctx.emit("order.paid", {"total": 3})


async def test_helpers_emit_the_system_topics(extensions: Path) -> None:
    write_extension(extensions, "plain", PLAIN)
    async with KernelKit(extensions) as kit:
        ctx = context_of(kit, "plain")
        await ctx.notify_user("hello")
        await ctx.notify_user("hello", channel_id="chat")
        await ctx.request_agent_task("do it", "chat")
        await ctx.request_agent_task("do it", correlation_id="c1")
        await ctx.request_agent_background("think", correlation_id="c2")
        await ctx.request_secret("token", "Your token?", "chat")
        assert await kit.payloads(SystemTopics.USER_NOTIFY) == [
            {"text": "hello"},
            {"text": "hello", "channel_id": "chat"},
        ]
        tasks = await kit.events(SystemTopics.AGENT_TASK)
        assert [task.payload for task in tasks] == [
            {"prompt": "do it", "channel_id": "chat"},
            {"prompt": "do it", "correlation_id": "c1"},
        ]
        assert [task.correlation_id for task in tasks] == [None, "c1"]
        [background] = await kit.events(SystemTopics.AGENT_BACKGROUND)
        assert (background.payload, background.correlation_id) == ({"prompt": "think", "correlation_id": "c2"}, "c2")
        assert await kit.payloads(SystemTopics.SECURE_INPUT_REQUEST) == [
            {"secret_id": "token", "prompt": "Your token?", "target_channel": "chat"}
        ]


async def test_handlers_run_in_the_order_they_were_registered(extensions: Path) -> None:
    code = """
        class Order:
            def __init__(self):
                self.seen = []

            async def initialize(self, context):
                self.ctx = context
                context.subscribe_event("a.b", self.first)
                context.subscribe_event("a.*", self.second)
                context.subscribe_event("a.b", self.third)

            async def first(self, event):
                self.seen.append(("first", event.status, event.attempt))
                raise RuntimeError("the others still run")

            async def second(self, event):
                self.seen.append("second")

            async def third(self, event):
                self.seen.append("third")
    """
    write_extension(extensions, "order", code)
    async with KernelKit(extensions) as kit:
        await kit.publish("a.b", {})
        assert kit.kernel.instance("order").seen == [("first", "processing", 1), "second", "third"]
        assert [one.id for one in await kit.kit.bus.subscriptions() if one.id == "order"] == ["order"]


async def test_a_named_handler_has_a_subscription_of_its_own(extensions: Path) -> None:
    write_extension(extensions, "plain", PLAIN)
    async with KernelKit(extensions) as kit:
        ctx = context_of(kit, "plain")
        seen: list[Any] = []

        async def picky(event: Event) -> None:
            seen.append(event.payload["n"])
            raise Reject("once is enough")

        ctx.subscribe_event("n.*", picky, name="picky", filter={"payload": {"n": 2}}, retry=RetryPolicy(max_attempts=1))
        for n in (1, 2, 3):
            await kit.publish("n.x", {"n": n})
        assert seen == [2]
        assert [letter.subscription for letter in await kit.kit.dead()] == ["plain.picky"]
        ctx.unsubscribe_event("n.*", name="picky")
        await kit.publish("n.x", {"n": 2})
        assert seen == [2]
        with pytest.raises(NotFound):
            ctx.unsubscribe_event("n.*", name="picky")
        with pytest.raises(Invalid, match="needs a subscription of its own"):
            ctx.subscribe_event("n.*", picky, timeout=5)
        with pytest.raises(Invalid):
            ctx.subscribe_event("n..", picky)


async def test_hooks_are_immediate_and_apart_from_events(extensions: Path) -> None:
    write_extension(extensions, "chat", CHANNEL)
    write_extension(extensions, "echo", ECHO)
    write_extension(extensions, "plain", PLAIN)
    async with KernelKit(extensions) as kit:
        ctx, seen = context_of(kit, "plain"), []
        ctx.subscribe("user_message", lambda said: seen.append(said["text"]))
        hook = lambda said: seen.append((said["agent"], said["text"]))  # noqa: E731 - the same object twice
        ctx.subscribe("agent_response", hook)
        await ctx.emit("user_message", {"text": "an event of that name is no hook"})
        await kit.settle()
        assert seen == []
        await context_of(kit, "chat").receive("hi", "ann")
        assert seen[0] == "hi"  # before any handler of the bus ran
        await kit.settle()
        seen.clear()
        await ctx.invoke_agent("go")
        assert seen == [("echo", "echo: go")]
        ctx.unsubscribe("agent_response", hook)
        await ctx.invoke_agent("go")
        assert len(seen) == 1
        with pytest.raises(Invalid):
            ctx.subscribe("email.received", print)


async def test_what_a_user_says_is_durable_and_taken_once(extensions: Path) -> None:
    write_extension(extensions, "chat", CHANNEL)
    write_extension(extensions, "plain", PLAIN)
    async with KernelKit(extensions) as kit:
        chat, seen = context_of(kit, "chat"), []
        context_of(kit, "plain").subscribe("user_message", lambda said: seen.append(said["text"]))
        first = await chat.receive("hi", "ann", message_id="m1")
        again = await chat.receive("hi", "ann", message_id="m1")
        await chat.receive("more", "ann", session_id="s9")
        assert (again.duplicate, again.id) == (True, first.id)
        assert seen == ["hi", "more"]
        said = await kit.events(SystemTopics.USER_MESSAGE)
        assert [event.payload for event in said] == [
            {"text": "hi", "user_id": "ann", "channel_id": "chat", "session_id": "chat:ann"},
            {"text": "more", "user_id": "ann", "channel_id": "chat", "session_id": "s9"},
        ]
        assert [event.key for event in said] == ["session:chat:ann", "session:s9"]
        assert kit.kernel.router.active_channel == "chat"
        with pytest.raises(Forbidden, match="plain is no channel"):
            await context_of(kit, "plain").receive("hi", "ann")
        with pytest.raises(Forbidden):
            await context_of(kit, "plain").answer_approval("r", "ann", approved=True)


async def test_config_data_and_dependencies(extensions: Path) -> None:
    write_extension(extensions, "helper", PLAIN)
    write_extension(extensions, "plain", PLAIN, "depends_on: [helper]\nconfig: {a: 1, b: 2}\n")
    settings = Settings(extensions={"plain": {"b": 3}})
    async with KernelKit(extensions, settings) as kit:
        ctx = context_of(kit, "plain")
        assert ctx.config == {"a": 1, "b": 3}
        assert ctx.folder == extensions / "plain"
        ctx.data_dir.joinpath("x").write_text("kept")
        assert ctx.data_dir == kit.kernel.state_dir / "extensions" / "plain"
        assert ctx.extension("helper") is kit.kernel.instance("helper")
        with pytest.raises(Forbidden):
            context_of(kit, "helper").extension("plain")


async def test_a_context_of_the_past_subscribes_no_more(extensions: Path) -> None:
    write_extension(extensions, "listener", LISTENER)
    async with KernelKit(extensions) as kit:
        old = context_of(kit, "listener")
        await kit.kernel.reload("listener")
        with pytest.raises(Conflict):
            old.subscribe_event("a.b", kit.settle)
        with pytest.raises(Conflict):
            old.subscribe("user_message", print)


async def test_trust_is_declared_and_inherited(extensions: Path) -> None:
    write_extension(extensions, "mail", PLAIN, "events: {publishes: [{topic: email.received, trust: untrusted}]}\n")
    relay = """
        class Relay:
            async def initialize(self, context):
                self.ctx = context
                context.subscribe_event("email.*", self.on_mail)

            async def on_mail(self, event):
                await self.ctx.emit("mail.summary", {"of": event.id}, trust="trusted")
                await self.ctx.notify_user("you have mail")
    """
    write_extension(extensions, "relay", relay)
    async with KernelKit(extensions) as kit:
        mail = context_of(kit, "mail")
        await mail.emit("email.received", {"subject": "hi"})
        await mail.emit("email.checked", {})
        await kit.settle()
        trusts = {event.topic: event.trust for event in await kit.kit.events()}
        assert trusts["email.received"] == Trust.UNTRUSTED
        assert trusts["email.checked"] == Trust.TRUSTED
        origins = {event.id: event.trust for event in await kit.kit.events()}
        summaries = await kit.events("mail.summary")
        assert [event.trust for event in summaries] == [origins[event.payload["of"]] for event in summaries]
        told = [event.trust for event in await kit.events(SystemTopics.USER_NOTIFY)]
        assert sorted(told) == ["trusted", "untrusted"]
        with pytest.raises(Invalid, match="trust must be"):
            await mail.emit("a.b", {}, trust="sometimes")  # type: ignore[arg-type]


def test_every_system_topic_has_a_schema() -> None:
    topics = {value for name, value in vars(SystemTopics).items() if name.isupper()}
    assert topics == set(RECORDS)
    for topic in topics:
        schema = payload_schema(topic)
        assert schema["$defs"][RECORDS[topic].__name__]["additionalProperties"] is False
