"""The broker's conformance suite: a kind of broker is one that passes ``BrokerConformance``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from postbus.broker import Broker, Listener, Message, Missed
from postbus.model import Invalid, InvalidPayload, LimitExceeded, NoResponder, RequestTimeout, Unreachable

__all__ = ["BrokerConformance"]

PATIENCE_S = 60.0

# pattern, topic, whether it matches
WILDCARDS = [
    ("a", "a", True),
    ("a", "A", False),
    ("a", "a.b", False),
    ("a.b", "a.b", True),
    ("*", "a", True),
    ("*", "a.b", False),
    ("a.*", "a.b", True),
    ("a.*", "a", False),
    ("a.*", "a.b.c", False),
    ("a.*.c", "a.b.c", True),
    ("a.*.c", "a.b.d", False),
    ("*.*", "a.b", True),
    ("a.>", "a.b", True),
    ("a.>", "a.b.c.d", True),
    ("a.>", "a", False),
    ("a.>", "ab.c", False),
    (">", "a", True),
    (">", "a.b.c", True),
    ("*.b.>", "a.b.c", True),
    ("*.b.>", "a.b", False),
]


async def got(listener: Listener) -> Message | Missed:
    async with asyncio.timeout(PATIENCE_S):
        return await listener.get()


async def payloads(listener: Listener, count: int) -> list[Any]:
    found = [await got(listener) for _ in range(count)]
    return [one.payload if isinstance(one, Message) else one for one in found]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.01)


class BrokerConformance:
    """Every rule of the broker contract. ``open`` gives one more end of the same broker."""

    async def open(self, folder: Path) -> Broker:
        raise NotImplementedError

    async def shut(self) -> None:
        """End what ``open`` shares between its ends."""

    @pytest_asyncio.fixture
    async def broker(self, tmp_path: Path) -> AsyncIterator[Broker]:
        made = await self.open(tmp_path)
        try:
            yield made
        finally:
            await made.close()
            await self.shut()

    @pytest.mark.parametrize(("pattern", "topic", "matching"), WILDCARDS)
    async def test_wildcards(self, broker: Broker, pattern: str, topic: str, matching: bool) -> None:
        async with await broker.subscribe(pattern) as listener, await broker.subscribe("zzz.end") as end:
            await broker.publish(topic, 1)
            await broker.publish("zzz.end", 2)
            assert await payloads(end, 1) == [2]
            await broker.publish(topic, 3)
            await broker.publish("zzz.end", 4)
            assert await payloads(end, 1) == [4]
            if matching:
                seen: list[Any] = []
                while seen[-1:] != [3]:
                    seen += [one for one in await payloads(listener, 1) if one in (1, 3)]
                assert seen == [1, 3]
            else:
                await listener.close()
                assert [one async for one in listener] == []

    async def test_overlapping_patterns_each_get_it_once_and_in_order(self, broker: Broker) -> None:
        patterns = ["job.*", "job.>", "job.new", "*.new", ">", "job.new"]
        listeners = [await broker.subscribe(pattern) for pattern in patterns]
        for number in range(50):
            await broker.publish("job.new", number)
        for listener in listeners:
            assert await payloads(listener, 50) == list(range(50))
            await listener.close()
            assert [one async for one in listener] == []

    async def test_what_is_published_arrives_as_it_was(self, broker: Broker) -> None:
        listener = await broker.subscribe("a.b")
        headers = {"region": "eu", "naïve": "  ünïcode\twith: colon "}
        await broker.publish("a.b", b'{"n": 1.50,  "t": "\xc3\xa9"}', headers=headers, reply="x.y")
        found = await got(listener)
        assert isinstance(found, Message)
        assert (found.topic, found.payload_json) == ("a.b", b'{"n": 1.50,  "t": "\xc3\xa9"}')
        assert (found.headers, found.reply) == (headers, "x.y")
        await broker.publish("a.b", None)
        found = await got(listener)
        assert found == Message("a.b", b"null")

    async def test_who_comes_later_gets_nothing_old_and_who_left_nothing_new(self, broker: Broker) -> None:
        early = await broker.subscribe("a.>")
        await broker.publish("a.b", "old")
        assert await payloads(early, 1) == ["old"]
        late = await broker.subscribe("a.>")
        await early.close()
        await early.close()
        await broker.publish("a.b", "new")
        assert await payloads(late, 1) == ["new"]
        assert [one async for one in early] == []
        with pytest.raises(Unreachable, match="closed"):
            await early.get()

    async def test_a_slow_listener_keeps_256_counts_4_and_stays(self, broker: Broker) -> None:
        slow, quick = await broker.subscribe("a.*"), await broker.subscribe("a.*", slots=1000)
        for number in range(260):
            await broker.publish("a.b", number)
        assert await payloads(quick, 260) == list(range(260))
        await until(lambda: slow.dropped == 4)
        assert await payloads(slow, 256) == list(range(256))
        assert await got(slow) == Missed(4)
        await broker.publish("a.b", "after")
        assert await payloads(slow, 1) == ["after"]
        assert quick.dropped == 0

    async def test_a_gap_is_told_where_it_was(self, broker: Broker) -> None:
        listener = await broker.subscribe("a", slots=2)
        for number in range(5):
            await broker.publish("a", number)
        await until(lambda: listener.dropped == 3)
        assert await payloads(listener, 1) == [0]
        await broker.publish("a", 5)
        await broker.publish("a", 6)
        await until(lambda: listener.dropped == 4)
        assert [await got(listener) for _ in range(4)] == [
            Message("a", b"1"),
            Missed(3),
            Message("a", b"5"),
            Missed(1),
        ]

    async def test_request_and_reply(self, broker: Broker) -> None:
        async with await broker.subscribe("math.*") as listener:

            async def answer() -> None:
                async for asked in listener:
                    assert isinstance(asked, Message)
                    assert asked.reply is not None
                    await broker.publish(asked.reply, asked.payload * 2, headers=asked.headers)

            task = asyncio.create_task(answer())
            answers = await asyncio.gather(
                *(broker.request("math.double", n, timeout_s=PATIENCE_S, headers={"n": str(n)}) for n in range(20))
            )
            assert [(one.payload, one.headers) for one in answers] == [(2 * n, {"n": str(n)}) for n in range(20)]
            await listener.close()
            await task

    async def test_no_responder_is_said_at_once(self, broker: Broker) -> None:
        with pytest.raises(NoResponder, match=r"nobody listens on math\.double"):
            await broker.request("math.double", 1, timeout_s=600)

    async def test_no_answer_is_a_timeout(self, broker: Broker) -> None:
        async with await broker.subscribe("math.*") as listener:
            with pytest.raises(RequestTimeout, match=r"no answer on math\.double within 0\.05 s"):
                await broker.request("math.double", 1, timeout_s=0.05)
            asked = await got(listener)
            assert isinstance(asked, Message)
            assert asked.reply is not None
            await broker.publish(asked.reply, "late")  # reaches nobody
            task = asyncio.create_task(broker.request("math.double", 2, timeout_s=PATIENCE_S))
            again = await got(listener)
            assert isinstance(again, Message)
            assert again.reply not in (None, asked.reply)
            await broker.publish(again.reply or "", "right")
            assert (await task).payload == "right"

    @pytest.mark.parametrize("pattern", ["", "a..b", "a.>.b", "a*", "a b", ".a"])
    async def test_a_bad_pattern_is_refused(self, broker: Broker, pattern: str) -> None:
        with pytest.raises(Invalid):
            await broker.subscribe(pattern)

    async def test_bad_messages_are_refused(self, broker: Broker) -> None:
        listener = await broker.subscribe(">")
        with pytest.raises(Invalid, match="wildcard"):
            await broker.publish("a.*", 1)
        with pytest.raises(InvalidPayload):
            await broker.publish("a", b"{")
        with pytest.raises(LimitExceeded):
            await broker.publish("a", "x" * (1 << 20))
        with pytest.raises(Invalid, match="reserved"):
            await broker.publish("a", 1, headers={"Postbus.x": "1"})
        with pytest.raises(Invalid):
            await broker.publish("a", 1, reply="x y\r\nPUB z 0")
        with pytest.raises(Invalid, match="slots"):
            await broker.subscribe("a", slots=0)
        await broker.publish("a", "good")
        assert await payloads(listener, 1) == ["good"]

    async def test_closing_ends_every_listener(self, broker: Broker) -> None:
        listener = await broker.subscribe("a")
        await broker.publish("a", 1)
        assert await payloads(listener, 1) == [1]
        waiting = asyncio.create_task(listener.get())
        await asyncio.sleep(0)
        await broker.close()
        await broker.close()
        with pytest.raises(Unreachable):
            await waiting
        for call in (broker.publish("a", 1), broker.request("a", 1), broker.subscribe("a")):
            with pytest.raises(Unreachable, match="closed"):
                await call
