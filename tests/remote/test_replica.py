"""A node on a remote log: copies that agree, outages that lose and double nothing, and what stays on the node."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from postbus import EventBus
from postbus.broker import BreakerState
from postbus.bus.outlet import outlet_of
from postbus.log import ReplicaLog, open_log
from postbus.log.sqlite import Transaction
from postbus.model import (
    Conflict,
    Event,
    IdempotencyConflict,
    Invalid,
    Receipt,
    Reject,
    StorageError,
    StorageFull,
    StreamSettings,
    Unreachable,
)
from tests.conformance.log_suite import EARLIEST, batch, fact
from tests.handlers import Recorder
from tests.memory_upstream import serve
from tests.remote.nodes import STREAM, WAIT_S, holds, node, payloads, until


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


# --- copies -----------------------------------------------------------------------------------------------------------


async def test_nodes_have_the_same_events_at_the_same_places_with_the_same_hashes(tmp_path: Path) -> None:
    _, url = serve()
    async with node(url, tmp_path / "a") as a, node(url, tmp_path / "b") as b:
        await a.ensure_stream(STREAM, StreamSettings(partitions=3, labels={"team": "x"}))
        await a.append(STREAM, [fact(n, key=f"k{n}", native_id=f"n{n}") for n in range(50)])
        await b.append(STREAM, [fact(n, key=f"k{n}", metadata_json=b'{"m":1}', occurred_at_us=5) for n in range(50)])
        await a.append(STREAM, [fact(n, key=f"k{n}") for n in range(50)])

        async def same() -> bool:
            return (await a.get_stream_stats(STREAM)).count == (await b.get_stream_stats(STREAM)).count == 150

        await until(same)
        assert await a.get_stream_stats(STREAM) == await b.get_stream_stats(STREAM)
        for partition in range(3):
            assert await a.fetch(STREAM, partition, 0, 1000) == await b.fetch(STREAM, partition, 0, 1000)


async def test_a_process_reads_what_it_has_appended(tmp_path: Path) -> None:
    _, url = serve()
    async with node(url, tmp_path / "a") as log:
        await log.ensure_stream(STREAM)
        for number in range(20):
            receipt = (await log.append(STREAM, [fact(number)]))[0]
            assert [event.payload for event in await log.fetch(STREAM, 0, receipt.offset)] == [number]
            assert (await log.ensure_consumer(STREAM, f"reader-{number}")).cursors[0].next_offset == number + 1


@pytest.mark.parametrize("asked_again", [False, True])
async def test_a_moments_silence_hides_nothing_that_the_process_has_appended(
    tmp_path: Path, *, asked_again: bool
) -> None:
    """Whether the follower pauses after an answer that did not come, or has had one since and waits for more."""
    server, url = serve()
    async with node(url, tmp_path / "a") as log:
        await log.ensure_stream(STREAM)
        await log.append(STREAM, batch(1))
        assert await payloads(log) == [0]
        for number in range(1, 4):
            server.stop()
            async with server.grown:
                server.grown.notify_all()
            await until(lambda: log.away is not None)
            server.calls.clear()
            server.down = False  # and nobody is told
            if asked_again:
                await until(lambda: "wait" in server.calls)
            await log.send(STREAM, [fact(number, native_id=f"n{number}")], [f"id-{number}"])
            assert (await log.get_stream_stats(STREAM)).partitions[0].high_water_mark == number + 1


async def test_a_reader_does_not_wait_for_what_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, url = serve()
    async with node(url, tmp_path / "a") as log:
        await log.ensure_stream(STREAM)
        await log.append(STREAM, batch(1))
        assert await payloads(log) == [0]

        async def silent(*_: object) -> list[Event]:
            raise Unreachable("it does not answer")

        monkeypatch.setattr(log.upstream, "fetch", silent)
        await log.send(STREAM, [fact(1, native_id="n")], ["id"])
        assert await payloads(log) == [0]
        assert log.away is not None
        assert await payloads(log) == [0]
        monkeypatch.undo()
        await holds(log, [0, 1])


async def test_a_node_that_comes_later_begins_at_what_is_left(tmp_path: Path) -> None:
    _, url = serve()
    async with node(url, tmp_path / "a") as a:
        await a.ensure_stream(STREAM)
        await a.append(STREAM, batch(10))
        await a.trim(STREAM, 6)
        async with node(url, tmp_path / "b") as b:
            part = (await b.get_stream_stats(STREAM)).partitions[0]
            assert (part.first_offset, part.high_water_mark) == (6, 10)
            assert (await b.ensure_consumer(STREAM, "reader", EARLIEST)).cursors[0].next_offset == 6
            assert await payloads(b) == [6, 7, 8, 9]


async def test_a_copy_goes_on_where_it_was(tmp_path: Path) -> None:
    server, url = serve()
    async with node(url, tmp_path / "a") as a:
        async with node(url, tmp_path / "b") as b:
            await a.ensure_stream(STREAM)
            await a.append(STREAM, batch(5))
            await holds(b, [*range(5)])
        await a.append(STREAM, batch(5, first=5))
        server.calls.clear()
        async with node(url, tmp_path / "b") as b:
            assert await payloads(b) == [*range(10)]


async def test_events_that_were_trimmed_before_they_came_over_are_a_gap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, url = serve()
    async with node(url, tmp_path / "a") as a:
        async with node(url, tmp_path / "b") as b:
            await a.ensure_stream(STREAM)
            await a.append(STREAM, batch(5))
            await holds(b, [*range(5)])
            await b.ensure_consumer(STREAM, "reader", EARLIEST)
            await b.commit(STREAM, "reader", 1)
        await a.append(STREAM, batch(5, first=5))
        await a.trim(STREAM, 8)
        with caplog.at_level(logging.WARNING, "postbus.log"):
            async with node(url, tmp_path / "b") as b:
                await a.append(STREAM, batch(1, first=10))
                await holds(b, [8, 9, 10])
                found = await b.get_consumer(STREAM, "reader")
                assert found is not None
                assert (found.cursors[0].next_offset, found.cursors[0].skipped) == (8, 6)
        assert "events 5 to 7 were trimmed before they came over: reader misses 6" in caplog.text
    async with node(url, tmp_path / "b") as b:  # the store takes it as it is
        assert await payloads(b) == [8, 9, 10]


async def test_everything_trimmed_while_a_node_was_away_is_a_gap_too(tmp_path: Path) -> None:
    _, url = serve()
    async with node(url, tmp_path / "a") as a:
        async with node(url, tmp_path / "b") as b:
            await a.ensure_stream(STREAM)
            await a.append(STREAM, batch(2))
            await holds(b, [0, 1])
        await a.append(STREAM, batch(3))
        await a.trim(STREAM, 5)
        async with node(url, tmp_path / "b") as b:

            async def passed() -> bool:
                return (await b.get_stream_stats(STREAM)).partitions[0].first_offset == 5

            await until(passed)
            await a.append(STREAM, batch(1, first=99))
            await holds(b, [99])


async def test_a_stream_that_was_made_again_elsewhere_begins_anew_here(tmp_path: Path) -> None:
    _, url = serve()
    async with node(url, tmp_path / "a") as a, node(url, tmp_path / "b") as b:
        await a.ensure_stream(STREAM)
        await a.append(STREAM, batch(5))
        await holds(b, [*range(5)])
        await b.ensure_consumer(STREAM, "reader", EARLIEST)
        await b.commit(STREAM, "reader", 4)
        await a.delete_stream(STREAM)
        await a.ensure_stream(STREAM, StreamSettings(partitions=2))
        await a.append(STREAM, [fact(100, key="k")])

        async def anew() -> bool:
            return (await b.get_stream_stats(STREAM)).stream.epoch == 1

        await until(anew)
        (receipt,) = await b.append(STREAM, [fact(101, key="k")])
        assert receipt.offset == 1
        events = [event.payload for n in range(2) for event in await b.fetch(STREAM, n, 0)]
        assert events == [100, 101]
        assert (await b.get_consumer_lag(STREAM, "reader")).total == 2


async def test_a_stream_that_was_deleted_elsewhere_is_gone_here(tmp_path: Path) -> None:
    _, url = serve()
    async with node(url, tmp_path / "a") as a, node(url, tmp_path / "b") as b:
        await a.ensure_stream(STREAM)
        await a.append(STREAM, batch(1))
        await holds(b, [0])
        await a.delete_stream(STREAM)

        async def gone() -> bool:
            return STREAM not in [stream.name for stream in await b.streams()]

        await until(gone)


async def test_a_stream_made_elsewhere_is_known_as_soon_as_it_is_asked_for(tmp_path: Path) -> None:
    _, url = serve()
    async with node(url, tmp_path / "a") as a, node(url, tmp_path / "b") as b:
        await a.ensure_stream(STREAM)
        (receipt,) = await b.append(STREAM, batch(1))
        assert receipt.offset == 0
        await a.ensure_stream("local.default.other")
        assert await b.fetch("local.default.other", 0, 0) == []
        with pytest.raises(Conflict):
            await b.create_stream(STREAM, StreamSettings())
        with pytest.raises(Conflict):
            await b.ensure_stream(STREAM, StreamSettings(partitions=2))


async def test_two_logs_on_one_folder_keep_one_copy(tmp_path: Path) -> None:
    _, url = serve()
    async with node(url, tmp_path / "a") as one, node(url, tmp_path / "a") as two:
        await one.ensure_stream(STREAM)
        for number in range(30):
            await (one if number % 2 else two).append(STREAM, [fact(number)])
        await holds(one, [*range(30)])
        await holds(two, [*range(30)])
    async with node(url, tmp_path / "a") as log:
        assert await payloads(log) == [*range(30)]


# --- outages ----------------------------------------------------------------------------------------------------------


async def test_what_is_published_during_an_outage_is_kept_and_sent_in_order(tmp_path: Path) -> None:
    server, url = serve()
    got = Recorder()
    bus, other = EventBus(f"{url}?data={tmp_path / 'a'}"), EventBus(f"{url}?data={tmp_path / 'b'}")
    other.subscribe("order.*", got, "reader")
    async with bus, other:
        assert not (await bus.publish("order.paid", "test", 0)).spooled
        server.stop()
        receipts = [await bus.publish("order.paid", "test", n) for n in range(1, 6)]
        assert all(receipt.spooled for receipt in receipts)
        outlet = outlet_of(await bus.open())
        assert outlet is not None
        assert outlet.state is BreakerState.OPEN
        await server.restart()
        await until(lambda: len(got.events) >= 6)
        await bus.publish("order.paid", "test", 6)
        await until(lambda: len(got.events) >= 7)
        assert got.payloads == [*range(7)]
        assert await outlet.relay.drained(WAIT_S)
        await until(lambda: outlet.state is BreakerState.CLOSED)


async def test_during_an_outage_the_copy_is_read_and_known_streams_stay_known(tmp_path: Path) -> None:
    server, url = serve()
    async with node(url, tmp_path / "a") as log:
        await log.ensure_stream(STREAM)
        await log.append(STREAM, batch(3))
        assert await payloads(log) == [0, 1, 2]
        server.stop()
        assert (await log.append(STREAM, [fact(3)]))[0].spooled
        assert await payloads(log) == [0, 1, 2]
        assert (await log.ensure_stream(STREAM)).name == STREAM
        await log.ensure_consumer(STREAM, "reader", EARLIEST)
        await log.commit(STREAM, "reader", 2)
        with pytest.raises(Unreachable):
            await log.ensure_stream("local.default.unknown")
        await until(lambda: log.away is not None)
    async with node(url, tmp_path / "a") as log:  # opened while it is down
        assert log.away is not None
        assert await payloads(log) == [0, 1, 2]
        await server.restart()
        await holds(log, [0, 1, 2, 3])
        await until(lambda: log.away is None)


async def test_a_bare_log_says_that_the_remote_is_away(tmp_path: Path) -> None:
    server, url = serve()
    log = await open_log(f"{url}?data={tmp_path / 'a'}")
    await log.ensure_stream(STREAM)
    server.stop()
    with pytest.raises(Unreachable):
        await log.append(STREAM, [fact(1)])
    assert isinstance(log, ReplicaLog)
    with pytest.raises(StorageError, match="nothing carries"):
        await log.transact(lambda tx: tx.append(STREAM, [fact(1)]))
    await log.close()
    with pytest.raises(StorageError):
        await log.append(STREAM, [fact(1)])


@pytest.mark.parametrize("native_id", [None, "mine"])
async def test_an_event_whose_acknowledgement_was_lost_is_there_once(tmp_path: Path, native_id: str | None) -> None:
    server, url = serve()
    async with node(url, tmp_path / "a") as log:
        await log.ensure_stream(STREAM)
        await log.append(STREAM, batch(3))
        server.lose_ack = True
        (receipt,) = await log.append(STREAM, [fact("unsure", native_id=native_id)])
        assert receipt.spooled
        await log.append(STREAM, [fact("next")])
        await server.restart()
        await holds(log, [0, 1, 2, "unsure", "next"])
        outlet = outlet_of(log)
        assert outlet is not None
        assert await outlet.relay.drained(WAIT_S)
        assert await payloads(log) == [0, 1, 2, "unsure", "next"]


async def test_a_batch_whose_acknowledgement_was_lost_is_there_once_after_a_restart(tmp_path: Path) -> None:
    server, url = serve()
    async with node(url, tmp_path / "a") as log:
        await log.ensure_stream(STREAM)
        server.lose_ack = True
        receipts = await log.append(STREAM, batch(3))
        server.stop()
        assert [receipt.spooled for receipt in receipts] == [True] * 3
    await server.restart()
    async with node(url, tmp_path / "a") as log:
        await log.append(STREAM, [fact(3)])
        await holds(log, [0, 1, 2, 3])


async def test_a_remote_without_room_is_an_outage(tmp_path: Path) -> None:
    server, url = serve()
    full = True

    async def refuse() -> None:
        if full:
            raise StorageFull("there is no room")

    server.before_append = refuse
    async with node(url, tmp_path / "a") as log:
        await log.ensure_stream(STREAM)
        (receipt,) = await log.append(STREAM, [fact(1)])
        assert receipt.spooled
        full = False
        await server.restart()
        await holds(log, [1])


async def test_a_refusal_is_the_publishers(tmp_path: Path) -> None:
    _, url = serve()
    async with node(url, tmp_path / "a") as log:
        await log.ensure_stream(STREAM)
        await log.append(STREAM, [fact(1, native_id="n")])
        with pytest.raises(IdempotencyConflict):
            await log.append(STREAM, [fact(0), fact(2, native_id="n")])
        (again,) = await log.append(STREAM, [fact(1, native_id="n")])
        assert (again.duplicate, again.spooled, again.offset) == (True, False, 0)
        assert await payloads(log) == [1]


async def test_what_waits_for_a_stream_that_is_deleted_meanwhile_becomes_a_dead_letter(tmp_path: Path) -> None:
    server, url = serve()
    bus = EventBus(f"{url}?data={tmp_path / 'a'}")
    log = await bus.open()
    await log.ensure_stream(STREAM)
    await log.ensure_stream("local.default.kept")
    server.stop()
    await log.append(STREAM, [fact("lost")])
    await log.append("local.default.kept", [fact("kept")])
    del server.lives[STREAM]
    await server.restart()
    await holds(log, ["kept"], "local.default.kept")
    [letter] = await bus.dead_letters.find()
    assert (letter.subscription, letter.reason) == ("_spool", "refused")
    await bus.stop()


# --- what stays on the node -------------------------------------------------------------------------------------------


async def test_dead_letters_stay_on_the_node(tmp_path: Path) -> None:
    server, url = serve()
    bus = EventBus(f"{url}?data={tmp_path / 'a'}")

    async def reject(_event: Event) -> None:
        raise Reject("no")

    bus.subscribe("order.*", reject, "reader")
    async with bus:
        await bus.publish("order.paid", "test", 1)

        async def dead() -> bool:
            return len(await bus.dead_letters.find()) == 1

        await until(dead)
        log = await bus.open()
        local = {stream.name for stream in await log.streams()} - {*server.lives}
        assert {name.rpartition(".")[2] for name in local} == {"journal-dlq", "spool", "spool-dlq"}


async def test_what_a_transaction_appends_reaches_the_remote_with_it_or_not_at_all(tmp_path: Path) -> None:
    server, url = serve()
    async with node(url, tmp_path / "a") as log:
        await log.ensure_stream(STREAM)
        await log.append(STREAM, [fact("first", native_id="n")])
        assert await payloads(log) == ["first"]

        def write(tx: Transaction) -> list[Receipt]:
            tx.db.execute("INSERT INTO store_facts VALUES ('effect', 'done')")
            return tx.append(STREAM, [fact("second", native_id="m"), fact("first", native_id="n"), fact("third")])

        def fail(tx: Transaction) -> None:
            tx.append(STREAM, [fact("never")])
            raise Invalid("no")

        def conflict(tx: Transaction) -> None:
            tx.append(STREAM, [fact("other", native_id="n")])

        server.stop()
        receipts = await log.transact(write)
        assert [(receipt.spooled, receipt.duplicate) for receipt in receipts] == [
            (True, False),
            (False, True),
            (True, False),
        ]
        with pytest.raises(Invalid):
            await log.transact(fail)
        with pytest.raises(IdempotencyConflict):
            await log.transact(conflict)
        assert (await log.append(STREAM, [fact("fourth")]))[0].spooled  # nothing overtakes
        await server.restart()
        await holds(log, ["first", "second", "third", "fourth"])


async def test_what_a_transaction_appends_is_sent_at_once_while_the_remote_is_there(tmp_path: Path) -> None:
    _, url = serve()
    async with node(url, tmp_path / "a") as log:
        await log.ensure_stream(STREAM)
        await log.transact(lambda tx: tx.append(STREAM, [fact(1)]))
        await log.append(STREAM, [fact(2)])
        await holds(log, [1, 2])
