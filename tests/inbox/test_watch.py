"""Watching and waiting: what is there first, then what comes; no gap, no repetition, a sign of life in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from postbus.inbox import Inboxes, Item
from postbus.log import SqliteLog
from postbus.model import NotFound
from tests.inbox.post import TENANT, Post, numbers, until


class Watcher:
    """Collects what a watch yields."""

    def __init__(self, stream: AsyncIterator[list[Item]]) -> None:
        self._stream = stream
        self.lists: list[list[int]] = []
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        async for items in self._stream:
            self.lists.append(numbers(items))

    @property
    def seen(self) -> list[int]:
        return [number for found in self.lists for number in found]

    async def has(self, count: int) -> bool:
        return len(self.seen) >= count

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def ended(self) -> None:
        async with asyncio.timeout(60):
            await self._task


@pytest.fixture
async def orders(post: Post) -> Post:
    await post.subscribe("order.*", "orders")
    return post


async def test_what_is_there_comes_first_and_then_what_is_new(orders: Post) -> None:
    await orders.publish("order.paid", 1, 2)
    await orders.settle()
    await orders.ack(items=["itm_1"])
    watcher = Watcher(orders.inboxes.watch(TENANT, "ann"))
    await until(lambda: watcher.has(1))
    await orders.publish("order.paid", 3)
    await until(lambda: watcher.has(2))
    await watcher.stop()
    assert watcher.seen == [2, 3]


async def test_nothing_is_missed_or_repeated_while_events_come_all_the_time(orders: Post) -> None:
    async def publish() -> None:
        for number in range(300):
            await orders.publish("order.paid", number)
            if number % 7 == 0:
                await asyncio.sleep(0)

    publishing = asyncio.ensure_future(publish())
    watchers = []
    for _ in range(5):
        watchers.append(Watcher(orders.inboxes.watch(TENANT, "ann")))
        await asyncio.sleep(0.01)
    await publishing
    for watcher in watchers:
        await until(lambda watcher=watcher: watcher.has(300))  # type: ignore[misc]  # mypy cannot infer a default's type
        await watcher.stop()
        assert watcher.seen == list(range(300))


async def test_a_watch_goes_on_after_an_item(orders: Post) -> None:
    await orders.publish("order.paid", 1, 2, 3)
    await orders.settle()
    watcher = Watcher(orders.inboxes.watch(TENANT, "ann", after="itm_2"))
    await until(lambda: watcher.has(1))
    await watcher.stop()
    assert watcher.seen == [3]
    with pytest.raises(NotFound):
        await anext(aiter(orders.inboxes.watch(TENANT, "ann", after="itm_9")))
    with pytest.raises(NotFound):
        await anext(aiter(orders.inboxes.watch(TENANT, "nobody")))


async def test_more_than_one_page_comes_in_order(orders: Post) -> None:
    await orders.publish("order.paid", *range(250))
    await orders.settle()
    watcher = Watcher(orders.inboxes.watch(TENANT, "ann"))
    await until(lambda: watcher.has(250))
    await watcher.stop()
    assert watcher.seen == list(range(250))


async def test_a_quiet_watch_gives_a_sign_of_life(orders: Post) -> None:
    watcher = Watcher(orders.inboxes.watch(TENANT, "ann", heartbeat_s=15))
    await orders.settle()
    assert watcher.lists == []

    async def beats(count: int) -> bool:
        if len(watcher.lists) < count:
            orders.clock.advance(0.2)
        return len(watcher.lists) >= count

    began = orders.clock.monotonic_s()
    await until(lambda: beats(1))
    assert orders.clock.monotonic_s() - began >= 15
    await until(lambda: beats(2))
    assert orders.clock.monotonic_s() - began >= 30
    await watcher.stop()
    assert watcher.lists == [[], []]


async def test_a_watch_ends_with_its_agent(orders: Post) -> None:
    watcher = Watcher(orders.inboxes.watch(TENANT, "ann"))
    await orders.settle()
    await orders.inboxes.remove_agent(TENANT, "ann")
    await orders.agent()  # another agent under the name
    orders.clock.advance(1)
    await watcher.ended()
    assert watcher.lists == []


async def test_waiting_ends_when_something_comes(orders: Post) -> None:
    waiting = asyncio.ensure_future(orders.inboxes.wait(TENANT, "ann", 3600))
    await orders.settle()
    assert not waiting.done()
    await orders.publish("order.paid", 1)
    async with asyncio.timeout(60):
        assert await waiting is True
    assert await orders.inboxes.wait(TENANT, "ann", 0) is True
    assert (await orders.inboxes.items.get(TENANT, "ann", "itm_1")).read_at_us is None, "waiting is not reading"


async def test_waiting_for_what_is_after_an_item(orders: Post) -> None:
    await orders.publish("order.paid", 1)
    await orders.settle()
    assert await orders.inboxes.wait(TENANT, "ann", 0, after="itm_1") is False
    waiting = asyncio.ensure_future(orders.inboxes.wait(TENANT, "ann", 3600, after="itm_1"))
    await orders.publish("order.paid", 2)
    async with asyncio.timeout(60):
        assert await waiting is True


async def test_waiting_ends_when_the_time_is_over(orders: Post) -> None:
    waiting = asyncio.ensure_future(orders.inboxes.wait(TENANT, "ann", 10))

    async def over() -> bool:
        orders.clock.advance(1)
        return waiting.done()

    await until(over)
    assert await waiting is False


async def test_no_change_is_missed_between_looking_and_waiting(orders: Post) -> None:
    """Each round the item comes at another moment of the look; a lost signal would wait for the clock for ever."""
    for round_ in range(60):
        waiting = asyncio.ensure_future(orders.inboxes.wait(TENANT, "ann", 3600))
        for _ in range(round_ % 12):
            await asyncio.sleep(0)
        await orders.inboxes.send(TENANT, "ann", f"hello {round_}")
        async with asyncio.timeout(60):
            assert await waiting is True
        await orders.ack(everything=True)


async def test_what_another_process_does_is_seen(orders: Post, folder: Path) -> None:
    """Another log on the same folder is as good as another process: nothing tells this one."""
    waiting = asyncio.ensure_future(orders.inboxes.wait(TENANT, "ann", 3600))
    await orders.settle()
    other = SqliteLog.open(folder, clock=orders.clock)
    try:
        await Inboxes(other, orders.clock).send(TENANT, "ann", "from outside")
    finally:
        await other.close()

    async def over() -> bool:
        orders.clock.advance(0.2)
        return waiting.done()

    await until(over)
    assert await waiting is True
