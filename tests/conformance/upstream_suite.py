"""The ground of the upstream suite: what a kind provides, the clients under test, and what the tests share.

A kind sets the class variables, gives the shared server and opens clients on it. What it does not declare is skipped.
Nothing here depends on how long anything takes: every wait is for a condition, and ends only when something is broken.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, ClassVar, Protocol

import pytest
import pytest_asyncio

from postbus.envelope import draft
from postbus.log.upstream import Upstream
from postbus.model import (
    Draft,
    Event,
    Receipt,
    Stream,
    Unreachable,
)

__all__ = [
    "NOW_US",
    "PATIENCE_S",
    "SHORT_S",
    "Server",
    "UpstreamSuite",
    "add",
    "all_unreachable",
    "everything",
    "fact",
    "new_ids",
    "numbers",
    "retried",
    "until_up",
]

PATIENCE_S = 120.0
SHORT_S = 1.0  # how long a client of the outage tests waits for an answer
NOW_US = 1_750_000_000_123_456

_ids = itertools.count()


class Server(Protocol):
    """The shared server of a kind, see ``tests/services.py``."""

    address: str

    def start(self) -> None: ...
    def kill(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


def fact(payload: Any = 0, **fields: Any) -> Draft:
    return draft("orders.paid", "suite", payload, **fields)


async def add(upstream: Upstream, stream: Stream, *drafts: Draft, now_us: int = NOW_US) -> list[Receipt]:
    return await upstream.append(stream, drafts, new_ids(len(drafts)), now_us)


def new_ids(count: int) -> list[str]:
    return [f"id-{next(_ids)}" for _ in range(count)]


def numbers(events: Sequence[Event]) -> list[Any]:
    return [event.payload for event in events]


async def everything(upstream: Upstream, stream: Stream, partition: int = 0) -> list[Event]:
    """Return all retained events of a partition, and see that their offsets are dense."""
    first, end = (await upstream.extents(stream))[partition]
    found: list[Event] = []
    while first + len(found) < end:
        page = await upstream.fetch(stream, partition, first + len(found), 4000)
        assert page, f"nothing at {first + len(found)}, the end is {end}"
        found += page
    assert [event.offset for event in found] == list(range(first, end))
    assert {(event.stream, event.partition) for event in found} <= {(stream.name, partition)}
    return found


class UpstreamSuite:
    """The suite. ``server``, ``opened``, and for foreign messages ``write``, are what a kind provides."""

    atomic_max: ClassVar[int]  # the largest call for one partition that leaves nothing when it is refused
    shared_identities: ClassVar[bool]  # two clients that race for one identity append it once
    fences: ClassVar[bool]  # what ``find`` did not see cannot come later, even if it is still on its way
    foreign_source: ClassVar[str]
    payload_refused: ClassVar[str]  # what a refusal for size says

    @pytest.fixture
    def server(self) -> Server:
        raise NotImplementedError

    async def opened(self, address: str, prefix: str, answer_s: float = PATIENCE_S) -> Upstream:
        """Return a client that is connected, or tries to be."""
        raise NotImplementedError

    async def write(self, upstream: Upstream, stream: Stream, body: bytes) -> None:
        """Put a message of somebody else into partition 0, acknowledged."""
        raise NotImplementedError

    def too_large(self) -> Draft:
        """Return a draft that the server takes in no case."""
        raise NotImplementedError

    @pytest.fixture
    def prefix(self) -> str:
        raise NotImplementedError

    @pytest_asyncio.fixture
    async def upstream(self, server: Server, prefix: str) -> AsyncIterator[Upstream]:
        made = await self.opened(server.address, prefix)
        yield made
        await made.close()

    @pytest_asyncio.fixture
    async def peer(self, server: Server, prefix: str) -> AsyncIterator[Upstream]:
        made = await self.opened(server.address, prefix)
        yield made
        await made.close()

    @pytest_asyncio.fixture
    async def hasty(self, server: Server, prefix: str) -> AsyncIterator[Upstream]:
        """A client that gives up soon, for outages."""
        made = await self.opened(server.address, prefix, SHORT_S)
        yield made
        await made.close()

    @pytest_asyncio.fixture
    async def stream(self, upstream: Upstream) -> Stream:
        return await upstream.ensure_stream("shop.main.orders")


def every_call(upstream: Upstream, stream: Stream) -> list[Callable[[], Any]]:
    return [
        lambda: add(upstream, stream, fact("x", native_id="outage")),
        lambda: add(upstream, stream, fact("y", native_id="outage-y"), fact("z", native_id="outage-z")),
        lambda: upstream.fetch(stream, 0, 0, 10),
        lambda: upstream.extents(stream),
        lambda: upstream.wait(stream, 0, 100, 0.5),
        lambda: upstream.trim(stream, 0, 0),
        lambda: upstream.find(stream, ["x"], [0]),
        lambda: upstream.ensure_stream("shop.main.other"),
        upstream.streams,
        lambda: upstream.delete_stream(stream.name),
    ]


async def all_unreachable(upstream: Upstream, stream: Stream) -> None:
    async with asyncio.timeout(PATIENCE_S):
        said = await asyncio.gather(*(call() for call in every_call(upstream, stream)), return_exceptions=True)
    assert [type(one) for one in said] == [Unreachable] * len(said), said


async def retried(call: Callable[[], Any]) -> Any:
    while True:
        try:
            return await call()
        except Unreachable:
            await asyncio.sleep(0.05)


async def until_up(upstream: Upstream) -> None:
    await retried(upstream.streams)
