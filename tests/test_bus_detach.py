from __future__ import annotations

import pytest

from postbus import NotFound
from postbus.model import Event, Invalid, Trust
from postbus.testing import BusKit


async def test_what_comes_while_nobody_is_attached_waits_for_the_next_handler() -> None:
    async with BusKit() as kit:
        first: list[int] = []
        second: list[int] = []

        async def old(event: Event) -> None:
            first.append(event.payload)

        async def new(event: Event) -> None:
            second.append(event.payload)

        for topic in ("a", "b"):
            kit.bus.subscribe(topic, old, "reader")
        await kit.publish("a", 1)
        await kit.settle()
        kit.bus.unsubscribe(None, "reader")
        await kit.publish("a", 2)
        await kit.publish("b", 3)
        await kit.settle()
        for topic in ("a", "b"):
            kit.bus.subscribe(topic, new, "reader")
        await kit.settle()
        assert sorted(first + second) == [1, 2, 3]
        assert first[0] == 1
        await kit.publish("b", 4)
        await kit.settle()
        assert 4 in second


async def test_the_last_pattern_keeps_what_waits_too() -> None:
    async with BusKit() as kit:
        seen: list[int] = []

        async def handler(event: Event) -> None:
            seen.append(event.payload)

        kit.bus.subscribe("a", handler, "reader")
        await kit.settle()
        for number in range(20):
            kit.bus.unsubscribe("a", "reader")
            await kit.publish("a", number)
            kit.bus.subscribe("a", handler, "reader")
            await kit.publish("a", number + 100)
        await kit.settle()
        assert sorted(seen) == sorted([*range(20), *range(100, 120)])


async def test_what_is_not_subscribed_cannot_be_detached() -> None:
    async with BusKit() as kit:

        async def handler(event: Event) -> None: ...

        kit.bus.subscribe("a", handler, "reader")
        for topic, name in (("b", "reader"), ("a", "other"), (None, "other")):
            with pytest.raises(NotFound):
                kit.bus.unsubscribe(topic, name)


async def test_what_derives_from_an_untrusted_event_is_untrusted() -> None:
    async with BusKit() as kit:

        async def relay(event: Event) -> None:
            await kit.bus.publish("out", "relay", {"of": event.id}, trust=Trust.TRUSTED)

        kit.bus.subscribe("in", relay, "relay")
        for trust in Trust:
            await kit.publish("in", {}, trust=trust)
        await kit.settle()
        events = await kit.events()
        trusts = {event.id: event.trust for event in events}
        out = [event for event in events if event.topic == "out"]
        assert [event.trust for event in out] == [trusts[event.payload["of"]] for event in out]
        assert sorted(trusts.values()) == ["trusted", "trusted", "untrusted", "untrusted"]
        with pytest.raises(Invalid, match="trust must be"):
            await kit.publish("in", {}, trust="maybe")
