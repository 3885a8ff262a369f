"""The conformance suite of remote logs: a kind of upstream is one that passes it on a real server."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest

from postbus.log.upstream import Upstream
from postbus.model import LimitExceeded, NotFound, Refused, Retention, Stream, StreamSettings, Trust
from tests.conformance.upstream_identity import IdentitySuite
from tests.conformance.upstream_outages import OutageSuite
from tests.conformance.upstream_suite import NOW_US, PATIENCE_S, add, everything, fact, new_ids, numbers, retried

__all__ = ["NOW_US", "PATIENCE_S", "UpstreamConformance", "add", "everything", "fact", "new_ids", "numbers", "retried"]


class UpstreamConformance(IdentitySuite, OutageSuite):
    """All of it."""

    # --- events -------------------------------------------------------------------------------------------------------

    async def test_offsets_are_dense_and_every_field_comes_back(self, upstream: Upstream, stream: Stream) -> None:
        full = fact(
            b'{"a" : "\xc3\xa9\\n"}',
            variant="v \U0001f600",
            key="k\x7f\u00fc",
            metadata=b'{ "m":\n "\xc3\xa9" }',
            headers={"h": "x\r\ny"},
            correlation_id="c",
            native_id="n\n1",
            delivery_handle={"to": "me"},
            occurred_at="2020-01-01T00:00:00Z",
            trust=Trust.UNTRUSTED,
        )
        large = fact("x" * 200_000, metadata={"m": "x" * 60_000}, delivery_handle={"h": "y" * 60_000})
        drafts = [fact(0), full, fact(None), large, fact([1.5, "\u20ac"])]
        receipts = [*await add(upstream, stream, *drafts[:1]), *await add(upstream, stream, *drafts[1:])]
        assert [(one.stream, one.partition, one.offset, one.duplicate) for one in receipts] == [
            (stream.name, 0, number, False) for number in range(5)
        ]
        assert {one.created_at_us for one in receipts} == {NOW_US}
        events = await everything(upstream, stream)
        for event, sent in zip(events, drafts, strict=True):
            for field in sent.__struct_fields__:
                if field != "occurred_at_us":
                    assert getattr(event, field) == getattr(sent, field), field
            assert event.created_at_us == NOW_US
        assert [event.occurred_at_us for event in events] == [NOW_US, full.occurred_at_us, NOW_US, NOW_US, NOW_US]

    async def test_appending_nothing_does_nothing(self, upstream: Upstream, stream: Stream) -> None:
        assert await add(upstream, stream) == []
        assert await upstream.extents(stream) == [(0, 0)]
        assert await upstream.fetch(stream, 0, 0, 10) == []

    async def test_concurrent_appends_of_two_clients_keep_their_own_order(
        self, upstream: Upstream, peer: Upstream, stream: Stream
    ) -> None:
        async def run(client: Upstream, name: str) -> list[int]:
            offsets = []
            for number in range(0, 60, 3):
                first = await add(client, stream, fact([name, number]))
                rest = await add(client, stream, fact([name, number + 1]), fact([name, number + 2]))
                offsets += [one.offset for one in first + rest]
            return offsets

        runs = await asyncio.gather(*(run(client, f"{n}") for n, client in enumerate([upstream, peer] * 3)))
        events = await everything(upstream, stream)
        assert sorted(itertools.chain(*runs)) == list(range(360))
        for n, offsets in enumerate(runs):
            assert [events[offset].payload for offset in offsets] == [[f"{n}", number] for number in range(60)]
            assert offsets == sorted(offsets)
        assert await everything(peer, stream) == events

    async def test_a_key_has_one_partition(self, upstream: Upstream, peer: Upstream) -> None:
        stream = await upstream.ensure_stream("shop.main.wide", StreamSettings(partitions=3))
        keyed = [fact([key, number], key=f"k{key}") for number in range(5) for key in range(6)]
        receipts = await add(upstream, stream, *keyed[:15], *(fact("loose") for _ in range(6)))
        receipts += await add(peer, stream, *keyed[15:])
        found = [await everything(peer, stream, partition) for partition in range(3)]
        assert sum(map(len, found)) == 36
        assert all(found)
        for key in range(6):
            homes = [events for events in found if any(event.key == f"k{key}" for event in events)]
            assert len(homes) == 1
            assert [event.payload for event in homes[0] if event.key == f"k{key}"] == [[key, n] for n in range(5)]
        for receipt, sent in zip(receipts[:15], keyed[:15], strict=True):
            assert found[receipt.partition][receipt.offset].payload_json == sent.payload_json

    async def test_ten_thousand_at_once(self, upstream: Upstream, stream: Stream) -> None:
        drafts = [fact(number, native_id=f"n{number}" if number % 10 == 0 else None) for number in range(10_000)]
        receipts = await add(upstream, stream, *drafts)
        assert [one.offset for one in receipts] == list(range(10_000))
        assert numbers(await everything(upstream, stream)) == list(range(10_000))

    async def test_what_is_too_large_is_refused_and_changes_nothing(self, upstream: Upstream, stream: Stream) -> None:
        for drafts in ([self.too_large()], [fact(1), self.too_large(), fact(2)]):
            with pytest.raises((LimitExceeded, Refused), match=self.payload_refused):
                await add(upstream, stream, *drafts)
        assert await upstream.extents(stream) == [(0, 0)]
        assert (await add(upstream, stream, fact("x" * 1_000_000)))[0].offset == 0

    async def test_messages_of_others_are_events_too(self, upstream: Upstream, stream: Stream) -> None:
        await add(upstream, stream, fact("ours"))
        await self.write(upstream, stream, b'{"their":"json"}')
        await self.write(upstream, stream, b"\xff\x00")
        await self.write(upstream, stream, b"")
        await add(upstream, stream, fact("ours again"))
        events = await everything(upstream, stream)
        assert numbers(events) == ["ours", {"their": "json"}, "/wA=", "", "ours again"]
        for event in events[1:4]:
            assert (event.topic, event.source, event.trust) == (stream.name, self.foreign_source, "untrusted")
            assert event.occurred_at_us == event.created_at_us > NOW_US
        assert [event.metadata for event in events[1:4]] == [{}, {"encoding": "base64"}, {"encoding": "base64"}]

    # --- reading ------------------------------------------------------------------------------------------------------

    async def test_ranges(self, upstream: Upstream, stream: Stream) -> None:
        await add(upstream, stream, *(fact(number) for number in range(30)))

        async def got(offset: int, limit: int) -> list[Any]:
            return numbers(await upstream.fetch(stream, 0, offset, limit))

        assert await got(0, 5) == list(range(5))
        assert await got(28, 5) == [28, 29]
        assert await got(29, 1) == [29]
        assert await got(30, 1) == []
        assert await got(1000, 1) == []
        assert await got(0, 1000) == list(range(30))
        assert await got(0, 5) == list(range(5))  # reading has changed nothing
        await upstream.trim(stream, 0, 12)
        assert await got(0, 3) == [12, 13, 14]
        assert await got(12, 2) == [12, 13]
        assert await got(20, 2) == [20, 21]
        await upstream.trim(stream, 0, 30)
        assert await got(0, 3) == []
        assert await upstream.extents(stream) == [(30, 30)]
        await add(upstream, stream, fact(30))
        assert await got(0, 3) == [30]
        with pytest.raises(NotFound, match="partition"):
            await upstream.fetch(stream, 1, 0, 1)

    async def test_waiting_ends_with_an_event_of_any_client(
        self, upstream: Upstream, peer: Upstream, stream: Stream
    ) -> None:
        assert not await upstream.wait(stream, 0, 0, 0.0)
        assert not await upstream.wait(stream, 0, 0, 0.05)
        for number in range(5):
            waiters = [asyncio.create_task(client.wait(stream, 0, number, PATIENCE_S)) for client in (upstream, peer)]
            await asyncio.sleep(0)
            await add(peer if number % 2 else upstream, stream, fact(number))
            assert await asyncio.gather(*waiters) == [True, True]
        assert await upstream.wait(stream, 0, 4, PATIENCE_S)
        assert await upstream.wait(stream, 0, 0, 0.0)
        beyond = asyncio.create_task(upstream.wait(stream, 0, 6, PATIENCE_S))
        await add(peer, stream, fact(5))
        await add(peer, stream, fact(6))
        assert await beyond

    # --- streams ------------------------------------------------------------------------------------------------------

    async def test_one_of_many_makes_a_stream(self, upstream: Upstream, peer: Upstream) -> None:
        wanted = [StreamSettings(labels={"by": f"{number}"}, retention=Retention(count=9)) for number in range(100)]
        made = await asyncio.gather(
            *(
                client.ensure_stream("shop.main.race", settings)
                for settings, client in zip(wanted, itertools.cycle([upstream, peer]), strict=False)
            )
        )
        assert len({msgspec.json.encode(one) for one in made}) == 1
        assert made[0].settings in wanted
        assert await peer.ensure_stream("shop.main.race") == made[0]
        assert await upstream.streams() == await peer.streams() == [made[0]]
        assert (await add(peer, made[0], fact(1)))[0].offset == 0

    async def test_streams_are_listed_by_name(self, upstream: Upstream, peer: Upstream) -> None:
        assert await upstream.streams() == []
        names = ["shop.main.b", "shop.main.a-b", "shop.main-a.b", "a.b.c", "a.b.C"]
        for name in names:
            await upstream.ensure_stream(name)
        assert [one.name for one in await peer.streams()] == sorted(names)
        for name in names:
            await add(peer, await peer.ensure_stream(name), fact(name))
        assert [numbers(await everything(upstream, one)) for one in await upstream.streams()] == [
            [name] for name in sorted(names)
        ]
        long = ".".join("x" * 80 for _ in range(3))
        await add(upstream, await upstream.ensure_stream(long), fact("long"))
        assert numbers(await everything(peer, await peer.ensure_stream(long))) == ["long"]

    async def test_a_stream_made_again_is_another(self, upstream: Upstream, peer: Upstream, stream: Stream) -> None:
        wide = StreamSettings(partitions=2)
        await add(upstream, stream, fact(0), fact(1, native_id="a"))
        await add(peer, stream, fact(2))
        await upstream.delete_stream(stream.name)
        assert await peer.streams() == []
        with pytest.raises(NotFound):
            await peer.delete_stream(stream.name)
        for gone in (
            add(peer, stream, fact(3)),
            add(upstream, stream, fact(3), fact(4)),
            peer.fetch(stream, 0, 0, 1),
            peer.extents(stream),
            peer.wait(stream, 0, 0, 0.0),
            peer.trim(stream, 0, 0),
        ):
            with pytest.raises(NotFound):
                await gone
        again = await peer.ensure_stream(stream.name, wide)
        assert (again.epoch, again.settings) == (stream.epoch + 1, wide)
        with pytest.raises(NotFound):
            await add(upstream, stream, fact(5))
        receipts = await add(upstream, again, fact("new", native_id="a"))
        assert (receipts[0].offset, receipts[0].duplicate) == (0, False)
        await peer.delete_stream(again.name)
        for drafts in ([fact("new", native_id="a")], [fact(1, native_id="b", key="k"), fact(2, key="l")]):
            with pytest.raises(NotFound):
                await add(upstream, again, *drafts)
        with pytest.raises(NotFound):
            await upstream.delete_stream("shop.main.never")
