"""Identities on a remote log: once, whoever else tries, and for ever."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from postbus.log.upstream import Upstream
from postbus.model import IdempotencyConflict, Stream, StreamSettings
from tests.conformance.upstream_suite import NOW_US, UpstreamSuite, add, everything, fact, numbers

__all__ = ["IdentitySuite"]


class IdentitySuite(UpstreamSuite):
    async def test_an_identity_is_appended_once(self, upstream: Upstream, peer: Upstream, stream: Stream) -> None:
        one, other = fact(1, native_id="a"), fact(1, native_id="a", variant="v")
        (first,) = await add(upstream, stream, one)
        again = await add(peer, stream, one, fact("new"), other, other, now_us=NOW_US + 5)
        assert [(r.offset, r.duplicate, r.created_at_us) for r in again] == [
            (first.offset, True, NOW_US),
            (1, False, NOW_US + 5),
            (2, False, NOW_US + 5),
            (2, True, NOW_US + 5),
        ]
        (late,) = await add(upstream, stream, other)
        assert (late.offset, late.duplicate) == (2, True)
        assert len(await everything(peer, stream)) == 3

    async def test_an_identity_with_other_content_is_refused(
        self, upstream: Upstream, peer: Upstream, stream: Stream
    ) -> None:
        await add(upstream, stream, fact(0), fact(1, native_id="a"))
        for changed in (
            fact(2, native_id="a"),
            fact(1, native_id="a", key="k"),
            fact(1, native_id="a", occurred_at="2020-01-01T00:00:00Z"),
        ):
            for client in (upstream, peer):
                with pytest.raises(IdempotencyConflict) as caught:
                    await add(client, stream, changed)
                assert (caught.value.offset, caught.value.native_id) == (1, "a")
        with pytest.raises(IdempotencyConflict):
            await add(upstream, stream, fact(3, native_id="b"), fact(4, native_id="b"))
        assert numbers(await everything(upstream, stream)) == [0, 1]

    async def test_a_refused_batch_leaves_nothing(self, upstream: Upstream, stream: Stream) -> None:
        await add(upstream, stream, fact(0, native_id="a"))
        size = min(self.atomic_max, 300)
        if size < 2:
            pytest.skip("batches of this kind are not atomic")
        drafts = [fact(number, native_id=f"n{number}") for number in range(size)]
        drafts[size // 2] = fact("changed", native_id="a")
        with pytest.raises(IdempotencyConflict):
            await add(upstream, stream, *drafts)
        assert await upstream.extents(stream) == [(0, 1)]

    async def test_an_identity_holds_across_partitions(self, upstream: Upstream, peer: Upstream) -> None:
        stream = await upstream.ensure_stream("shop.main.wide", StreamSettings(partitions=4))
        keys = [None, *(f"k{number}" for number in range(8))]
        (first,) = await add(upstream, stream, fact(1, native_id="a", key="k0"))
        (again,) = await add(peer, stream, fact(1, native_id="a", key="k0"))
        assert (again.partition, again.offset, again.duplicate) == (first.partition, first.offset, True)
        for key in keys:
            if key != "k0":
                with pytest.raises(IdempotencyConflict):
                    await add(peer, stream, fact(1, native_id="a", key=key))
        loose = [await add(client, stream, fact(2, native_id="b")) for client in (upstream, peer, peer, upstream)]
        assert {(one.partition, one.offset) for (one,) in loose} == {(loose[0][0].partition, loose[0][0].offset)}
        assert [one.duplicate for (one,) in loose] == [False, True, True, True]
        assert sum(end for _, end in await upstream.extents(stream)) == 2

    async def test_racing_clients_append_an_identity_once(
        self, upstream: Upstream, peer: Upstream, stream: Stream
    ) -> None:
        if not self.shared_identities:
            pytest.skip("this kind does not decide between two clients")
        drafts = [fact(number, native_id=f"n{number}") for number in range(20)]
        singles = [add(client, stream, one) for one in drafts for client in (upstream, peer) for _ in range(2)]
        batches = [add(client, stream, *drafts[start:]) for client in (upstream, peer) for start in (0, 5)]
        receipts = list(itertools.chain(*await asyncio.gather(*singles, *batches)))
        assert sum(not one.duplicate for one in receipts) == 20
        events = await everything(upstream, stream)
        assert sorted(numbers(events)) == list(range(20))

        changed = await asyncio.gather(
            *(add(client, stream, fact([n, m], native_id=f"c{n}")) for n in range(10) for m, client in
              enumerate((upstream, peer, upstream))),
            return_exceptions=True,
        )  # fmt: skip
        assert sum(isinstance(one, IdempotencyConflict) for one in changed) == 20
        assert await upstream.extents(stream) == [(0, 30)]

    async def test_identities_outlive_a_trim(self, upstream: Upstream, peer: Upstream, stream: Stream) -> None:
        drafts = [fact(number, native_id=f"n{number}") for number in range(10)]
        await add(upstream, stream, *drafts)
        await add(peer, stream, drafts[0])
        await upstream.trim(stream, 0, 4)
        assert await peer.extents(stream) == [(4, 10)]
        for client in (upstream, peer):
            receipts = await add(client, stream, *drafts)
            assert [(one.offset, one.duplicate, one.created_at_us) for one in receipts] == [
                (number, True, NOW_US) for number in range(10)
            ]
            (one,) = await add(client, stream, drafts[2])
            assert (one.offset, one.duplicate) == (2, True)
            with pytest.raises(IdempotencyConflict) as caught:
                await add(client, stream, fact("changed", native_id="n3"))
            assert caught.value.offset == 3
        await peer.trim(stream, 0, 10)
        await peer.trim(stream, 0, 4)
        assert await upstream.extents(stream) == [(10, 10)]
        receipts = await add(upstream, stream, fact("new"), *drafts, fact("newer", native_id="newer"))
        assert [one.offset for one in receipts] == [10, *range(10), 11]

    async def test_identities_outlive_a_trim_of_several_partitions(self, upstream: Upstream, peer: Upstream) -> None:
        stream = await upstream.ensure_stream("shop.main.wide", StreamSettings(partitions=3))
        drafts = [fact(number, native_id=f"n{number}", key=f"k{number % 5}") for number in range(20)]
        first = await add(upstream, stream, *drafts)
        for partition, (_, end) in enumerate(await upstream.extents(stream)):
            await peer.trim(stream, partition, end)
        again = await add(upstream, stream, *drafts)
        assert [(one.partition, one.offset) for one in again] == [(one.partition, one.offset) for one in first]
        assert all(one.duplicate for one in again)
        with pytest.raises(IdempotencyConflict):
            await add(peer, stream, fact(0, native_id="n0", key="other"))
