"""Outages of a remote log: said within the time, over by themselves, and nothing lost or doubled."""

from __future__ import annotations

import asyncio

import pytest

from postbus.log.upstream import Upstream
from postbus.model import Stream, Unreachable
from tests.conformance.upstream_suite import (
    NOW_US,
    PATIENCE_S,
    SHORT_S,
    Server,
    UpstreamSuite,
    add,
    all_unreachable,
    everything,
    fact,
    new_ids,
    numbers,
    retried,
    until_up,
)

__all__ = ["OutageSuite"]


class OutageSuite(UpstreamSuite):
    async def test_everything_survives_a_crash_of_the_server(
        self, server: Server, upstream: Upstream, stream: Stream
    ) -> None:
        drafts = [fact(number, native_id=f"n{number}") for number in range(20)]
        await add(upstream, stream, *drafts, fact("plain"))
        await upstream.trim(stream, 0, 3)
        before = await everything(upstream, stream)
        server.kill()
        server.start()
        async with asyncio.timeout(PATIENCE_S):
            await until_up(upstream)
        assert await everything(upstream, stream) == before
        assert all(one.duplicate for one in await add(upstream, stream, *drafts))
        assert (await add(upstream, stream, fact("more")))[0].offset == 21
        assert await upstream.streams() == [stream]

    async def test_an_outage_is_said_and_ends_by_itself(
        self, server: Server, upstream: Upstream, hasty: Upstream, stream: Stream
    ) -> None:
        await add(upstream, stream, fact(0))
        up = asyncio.Event()
        hasty.watch(up.set)
        await until_up(hasty)
        server.kill()
        up.clear()
        await all_unreachable(hasty, stream)
        server.start()
        async with asyncio.timeout(PATIENCE_S):
            await up.wait()
            await until_up(hasty)
            await until_up(upstream)
        assert (await add(upstream, stream, fact(1)))[0].offset >= 1

    async def test_a_client_that_begins_in_an_outage(self, server: Server, prefix: str) -> None:
        server.kill()
        early = await self.opened(server.address, prefix, SHORT_S)
        with pytest.raises(Unreachable):
            await early.ensure_stream("shop.main.orders")
        server.start()
        async with asyncio.timeout(PATIENCE_S):
            await until_up(early)
            stream = await retried(lambda: early.ensure_stream("shop.main.orders"))
        assert stream.epoch == 0
        await early.close()

    async def test_a_server_that_hangs_is_an_outage(self, server: Server, hasty: Upstream, stream: Stream) -> None:
        await until_up(hasty)
        server.pause()
        try:
            await all_unreachable(hasty, stream)
        finally:
            server.resume()
        async with asyncio.timeout(PATIENCE_S):
            await until_up(hasty)

    @pytest.mark.parametrize("crash", [False, True])
    async def test_after_an_unknown_outcome_find_says_what_is_there(
        self, server: Server, upstream: Upstream, hasty: Upstream, stream: Stream, *, crash: bool
    ) -> None:
        await add(upstream, stream, fact("before"))
        await until_up(hasty)
        ids = new_ids(4)
        drafts = [fact(number) for number in range(4)]
        server.pause()
        try:
            with pytest.raises(Unreachable):
                await hasty.append(stream, drafts[:1], ids[:1], NOW_US)
            with pytest.raises(Unreachable):
                await hasty.append(stream, drafts[1:], ids[1:], NOW_US)
            if crash:
                server.kill()
                server.start()
        finally:
            if not crash:
                server.resume()
        async with asyncio.timeout(PATIENCE_S):
            found = await retried(lambda: hasty.find(stream, ids, [0]))
            await until_up(upstream)
        missing = [number for number, one in enumerate(ids) if one not in found]
        rest = await upstream.append(stream, [drafts[n] for n in missing], [ids[n] for n in missing], NOW_US)
        places = dict(found)
        places.update((ids[n], (one.partition, one.offset)) for n, one in zip(missing, rest, strict=True))
        if self.fences or crash:
            assert await upstream.find(stream, ids, [0]) == places
            events = await everything(upstream, stream)
            assert sorted(map(str, numbers(events))) == ["0", "1", "2", "3", "before"]
            for number, one in enumerate(ids):
                assert events[places[one][1]].payload == number

    async def test_find_looks_at_what_is_since(self, upstream: Upstream, stream: Stream) -> None:
        ids = new_ids(5)
        await upstream.append(stream, [fact(number) for number in range(5)], ids, NOW_US)
        assert await upstream.find(stream, [*ids, "never"], [2]) == {one: (0, n) for n, one in enumerate(ids) if n >= 2}
        assert await upstream.find(stream, ids, [5]) == {}
        assert await upstream.find(stream, [], [0]) == {}
        assert (await add(upstream, stream, fact(5)))[0].offset == 5

    async def test_close_is_final(self, server: Server, prefix: str) -> None:
        closed = await self.opened(server.address, prefix)
        stream = await closed.ensure_stream("shop.main.orders")
        await closed.close()
        await closed.close()
        with pytest.raises(Unreachable):
            await add(closed, stream, fact(0))
        never = await self.opened(server.address, prefix)
        await never.close()
