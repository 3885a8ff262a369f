from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from postbus.kernel import MessageRouter, OutgoingMessage
from postbus.model import Conflict, Invalid, NotFound
from postbus.testing import BusKit


class Channel:
    def __init__(self, name: str) -> None:
        self.channel_id = name
        self.sent: list[str] = []
        self.pieces: list[str] = []

    async def send(self, message: OutgoingMessage) -> None:
        self.sent.append(message.text)

    async def send_delta(self, session_id: str, text: str) -> None:
        if text == "boom":
            raise ConnectionError
        self.pieces.append(f"{session_id}: {text}")


@pytest.fixture
async def kit() -> AsyncIterator[BusKit]:
    async with BusKit() as made:
        yield made


@pytest.fixture
def router(kit: BusKit) -> MessageRouter:
    return MessageRouter(kit.bus)


async def test_hooks_run_at_once_in_order_and_one_that_fails_breaks_nothing(router: MessageRouter, kit: BusKit) -> None:
    seen: list[Any] = []

    def first(payload: dict[str, Any]) -> None:
        seen.append(("first", payload["text"]))
        payload["text"] = "changed"

    async def failing(payload: dict[str, Any]) -> None:
        raise RuntimeError(payload["text"])

    async def last(payload: dict[str, Any]) -> None:
        seen.append(("last", payload["text"]))

    for hook in (first, failing, last):
        router.subscribe("user_message", hook)
    await router.fire("user_message", {"text": "hi"})
    assert seen == [("first", "hi"), ("last", "hi")]
    assert await kit.events() == []  # nothing of this is durable
    router.unsubscribe("user_message", first)
    await router.fire("user_message", {"text": "again"})
    assert seen[2:] == [("last", "again")]
    await router.fire("agent_response", {"text": "nobody listens"})


def test_hooks_that_do_not_exist_are_refused(router: MessageRouter) -> None:
    with pytest.raises(Invalid, match="there is no hook"):
        router.subscribe("email.received", print)
    with pytest.raises(Invalid, match="a hook is a function"):
        router.subscribe("user_message", 5)  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        router.unsubscribe("user_message", print)


async def test_the_channel_is_named_or_active_or_default_or_first(kit: BusKit) -> None:
    router = MessageRouter(kit.bus, "second")
    with pytest.raises(NotFound, match="there is no channel to the user"):
        router.choose()
    first, second, third = Channel("first"), Channel("second"), Channel("third")
    router.attach(first)
    assert router.choose() is first
    router.attach(second)
    router.attach(third)
    assert router.choose() is second
    router.active_channel = "third"
    assert router.choose() is third
    assert router.choose("first") is first
    router.detach("third")
    assert router.choose() is second
    with pytest.raises(NotFound, match="there is no channel third"):
        router.choose("third")
    with pytest.raises(Conflict):
        router.attach(Channel("first"))
    for name in ("", "a b", "x" * 81, 5):
        with pytest.raises(Invalid, match="is no name of a channel"):
            router.attach(Channel(name))  # type: ignore[arg-type]


async def test_a_message_is_handed_over_now(router: MessageRouter) -> None:
    channel = Channel("chat")
    router.attach(channel)
    await router.deliver(OutgoingMessage(id="1", text="hello", channel_id="chat"))
    await router.stream("chat", "s", "piece")
    await router.stream("chat", "s", "boom")
    await router.stream("nowhere", "s", "piece")
    assert (channel.sent, channel.pieces) == (["hello"], ["s: piece"])


async def test_a_notification_is_durable_and_said_once(router: MessageRouter, kit: BusKit) -> None:
    first = await router.notify_user("hello", native_id="n1")
    again = await router.notify_user("hello", native_id="n1")
    other = await router.notify_user("other words", native_id="n1")
    await router.notify_user("there", "chat")
    assert (again.duplicate, other.duplicate, other.id) == (True, True, first.id)
    assert [event.payload for event in await kit.events()] == [
        {"text": "hello"},
        {"text": "there", "channel_id": "chat"},
    ]
