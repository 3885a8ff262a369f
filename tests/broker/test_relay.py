"""The spool and what fills and empties it, on a real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from postbus.broker import Breaker, BreakerState, Relay, Spool
from postbus.broker.spool import Broken, DrainLock
from postbus.bus.purge import dead_letters, purge
from postbus.clock import SystemClock
from postbus.delivery.dead import DeadEntry
from postbus.envelope import draft
from postbus.log import SqliteLog
from postbus.model import Backpressure, Draft, Event, Invalid, LimitExceeded, Receipt, SpoolEntry
from tests.broker.remotes import STREAM, MemoryRemote, numbered

PATIENCE_S = 60.0
TENANT = "local.default"


class Slept(SystemClock):
    """Real time, and a record of how long somebody wanted to sleep."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def log(tmp_path: Path) -> AsyncIterator[SqliteLog]:
    opened = SqliteLog.open(tmp_path / "data")
    yield opened
    await opened.close()


def relay(log: SqliteLog, remote: MemoryRemote, **settings: object) -> Relay:
    breaker = Breaker("remote", failures_max=1, open_s=0.05, open_s_max=0.1)
    spool = Spool(log, **settings)  # type: ignore[arg-type] # a test names only what there is
    return Relay(log, remote, breaker=breaker, spool=spool, refused_retry_s=0.01)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.01)


async def letters(log: SqliteLog, state: str | None = "open") -> list[DeadEntry]:
    return await dead_letters(log, SystemClock(), TENANT).find(state=state)


async def some_letters(log: SqliteLog) -> list[DeadEntry]:
    async with asyncio.timeout(PATIENCE_S):
        while not (found := await letters(log)):  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.01)
    return found


async def table(log: SqliteLog, statement: str) -> list[tuple[object, ...]]:
    return await log.store.read(lambda db: list(db.execute(statement)))


async def drained(relay: Relay) -> None:
    assert await relay.drained(PATIENCE_S)


# --- through and by way of the spool ----------------------------------------------------------------------------------


async def test_a_remote_that_answers_gets_it_straight(log: SqliteLog) -> None:
    remote = MemoryRemote()
    async with relay(log, remote) as to:
        await drained(to)
        receipts = [await to.publish(STREAM, numbered(number)) for number in range(3)]
        assert receipts == [Receipt(STREAM, 0, number) for number in range(3)]
        assert (await to.spool.status()).rows == 0
    assert remote.payloads == [0, 1, 2]


async def test_an_outage_spools_everything_and_the_drain_keeps_the_order(log: SqliteLog) -> None:
    remote = MemoryRemote()
    async with relay(log, remote) as to:
        await drained(to)
        await to.publish(STREAM, numbered(0))
        remote.away = True
        receipts = [await to.publish(STREAM, numbered(number)) for number in range(1, 251)]
        assert all(receipt.spooled for receipt in receipts)
        assert [receipt.id for receipt in receipts[:2]] == ["local.default.spool/0/1", "local.default.spool/0/2"]
        assert (await to.spool.status()).rows == 250
        assert (await table(log, "SELECT id, topic, payload, attempts FROM pending_events"))[1][1:] == (
            "orders.paid",
            2,
            0,
        )
        remote.come_back()
        # What is published while the queue is emptied goes behind what is queued.
        later = [await to.publish(STREAM, numbered(number)) for number in range(251, 300)]
        assert later[0].spooled
        await drained(to)
        assert not (await to.publish(STREAM, numbered(300))).spooled
        assert (await to.spool.status()).rows == (await to.spool.status()).bytes == 0
    assert remote.payloads == list(range(301))
    assert await letters(log) == []


async def test_everything_about_the_event_survives_the_spool(log: SqliteLog) -> None:
    remote = MemoryRemote()
    remote.away = True
    full = draft(
        "orders.paid",
        "shop",
        b'{"n": 1.50,  "t": "\xc3\xa9"}',
        variant="v2",
        key="k",
        metadata={"a": [1]},
        headers={"h": "ü"},
        correlation_id="c",
        native_id="n",
        delivery_handle={"kind": "x"},
        occurred_at="2024-01-01T00:00:00Z",
    )
    async with relay(log, remote) as to:
        await to.publish(STREAM, full)
        await to.publish(STREAM, numbered(2))
        remote.come_back()
        await drained(to)
    assert remote.kept == [full, numbered(2)]


async def test_a_native_id_is_the_identity_also_across_the_spool(log: SqliteLog) -> None:
    remote = MemoryRemote()
    event = draft("orders.paid", "shop", 1, native_id="stripe-1")
    async with relay(log, remote) as to:
        await drained(to)
        assert not (await to.publish(STREAM, event)).duplicate
        remote.away = True
        assert (await to.publish(STREAM, event)).spooled
        remote.come_back()
        await drained(to)
        assert (await to.publish(STREAM, event)).duplicate
        await to.publish(STREAM, draft("orders.paid", "shop", 1, native_id="stripe-1", variant="b"))
        await to.publish("local.default.other", event)
    assert len(remote.kept) == 3


async def test_what_arrived_without_an_answer_is_not_sent_twice_even_if_the_remote_has_forgotten(
    log: SqliteLog,
) -> None:
    """``known`` is what makes it safe: the remote of this test keeps duplicates, as NATS does after its window."""

    class Forgetful(MemoryRemote):
        async def send(self, stream: str, identity: str, event: Draft) -> Receipt:
            self.identities.pop(identity, None)
            return await super().send(stream, identity, event)

    remote = Forgetful()
    async with relay(log, remote) as to:
        await drained(to)
        for number in range(30):
            remote.answers_lost = number % 2  # every other publish arrives and is not acknowledged
            await to.publish(STREAM, numbered(number))
            if number % 5 == 4:
                await drained(to)
        await drained(to)
    assert remote.payloads == list(range(30))


async def test_it_starts_with_what_an_earlier_process_left(log: SqliteLog) -> None:
    remote = MemoryRemote()
    remote.away = True
    async with relay(log, remote) as to:
        for number in range(5):
            await to.publish(STREAM, numbered(number))
    remote.come_back()
    async with relay(log, remote) as to:
        assert (await to.publish(STREAM, numbered(5))).spooled  # nothing overtakes
        await drained(to)
    assert remote.payloads == [0, 1, 2, 3, 4, 5]


async def test_a_look_that_came_too_early_does_not_open_the_straight_way(log: SqliteLog) -> None:
    class Slow(Spool):
        """Looks before an event is on disk, says what it saw only after that, and is slow to look again."""

        entering, seen, said, again = (asyncio.Event() for _ in range(4))

        async def put_all(
            self, stream: str, events: Sequence[tuple[str, Draft]], *, tried: bool = False, since: Sequence[int] = ()
        ) -> list[int]:
            self.entering.set()
            await self.seen.wait()
            return await super().put_all(stream, events, tried=tried, since=since)

        async def head(self, limit: int, bytes_max: int) -> tuple[list[SpoolEntry | Broken], bool]:
            if self.seen.is_set():
                await self.again.wait()
                return await super().head(limit, bytes_max)
            found = await super().head(limit, bytes_max)
            if self.entering.is_set():
                self.seen.set()
                await self.said.wait()
            return found

    remote, spool = MemoryRemote(), Slow(log)
    async with Relay(log, remote, spool=spool) as to:
        await drained(to)
        remote.away = True
        assert (await to.publish(STREAM, numbered(0))).spooled
        remote.come_back()
        spool.said.set()
        await asyncio.sleep(0.05)
        assert (await to.publish(STREAM, numbered(1))).spooled
        spool.again.set()
        await drained(to)
    assert remote.payloads == [0, 1]


async def test_one_process_at_a_time_empties_the_spool(log: SqliteLog) -> None:
    remote = MemoryRemote()
    remote.away = True
    other = DrainLock(log)
    assert other.acquire()
    async with relay(log, remote) as to:
        await to.publish(STREAM, numbered(0))
        remote.come_back()
        assert not await to.drained(0.3)
        assert remote.payloads == []
        other.release()
        await drained(to)
    assert remote.payloads == [0]


# --- refusals ---------------------------------------------------------------------------------------------------------


async def test_a_refusal_of_a_direct_publish_is_the_publishers(log: SqliteLog) -> None:
    remote = MemoryRemote()
    remote.refuses = lambda _: True
    async with relay(log, remote) as to:
        await drained(to)
        with pytest.raises(LimitExceeded, match="too large for this remote"):
            await to.publish(STREAM, numbered(0))
        with pytest.raises(Invalid):
            await to.publish("no stream name", numbered(0))
        assert (await to.spool.status()).rows == 0
        assert to.breaker.state is BreakerState.CLOSED


async def test_three_refusals_of_that_event_make_a_dead_letter_and_the_others_go_on(log: SqliteLog) -> None:
    remote = MemoryRemote()
    remote.away = True
    async with relay(log, remote) as to:
        for number in range(5):
            await to.publish(STREAM, numbered(number))
        remote.refuses = lambda event: event.payload_json == b"2"
        sent = remote.sent
        remote.come_back()
        await drained(to)
        assert remote.sent - sent == 4 + 3
        assert remote.payloads == [0, 1, 3, 4]
        status = await to.spool.status()
        assert (status.rows, status.bytes, status.dead) == (0, 0, 1)
        (letter,) = await letters(log)
        assert (letter.topic, letter.payload, letter.reason, letter.attempts) == ("orders.paid", "2", "refused", 3)
        assert (letter.subscription, letter.origin_id) == ("_spool", "local.default.spool/0/3")
        assert letter.error == "too large for this remote"


async def test_a_dead_letter_is_replayed_to_the_spool_with_attempts_from_0(log: SqliteLog) -> None:
    remote = MemoryRemote()
    remote.away = True
    remote.refuses = lambda event: event.payload_json == b"1"
    async with relay(log, remote) as to:
        await to.publish(STREAM, numbered(0))
        await to.publish(STREAM, numbered(1))
        remote.come_back()
        found = await some_letters(log)
        office = dead_letters(log, SystemClock(), TENANT)
        assert await office.replay(found) == 1  # refused again: another letter
        again = await some_letters(log)
        assert [entry.attempts for entry in again] == [3]
        assert again[0].id != found[0].id
        assert [entry.state for entry in await letters(log, None)] == ["replayed", "open"]
        remote.refuses = lambda _: False
        assert await office.replay(again) == 1
        await until(lambda: remote.payloads == [0, 1])
        assert await office.replay(again) == 0
        assert [entry.state for entry in await letters(log, None)] == ["replayed", "replayed"]
        status = await to.spool.status()
        assert (status.rows, status.dead) == (0, 0)


async def test_a_purged_dead_letter_leaves_nothing(log: SqliteLog) -> None:
    remote = MemoryRemote()
    remote.away = True
    remote.refuses = lambda _: True
    async with relay(log, remote) as to:
        await to.publish(STREAM, numbered(0))
        remote.come_back()
        await drained(to)
    found = await letters(log)
    assert await purge(log, SystemClock(), TENANT, found, "test") == 1
    assert await letters(log) == []
    assert await table(log, "SELECT * FROM spool_rows") == []


async def test_what_cannot_be_read_becomes_a_dead_letter(log: SqliteLog) -> None:
    remote = MemoryRemote()
    remote.away = True
    async with relay(log, remote) as to:
        for number in range(4):
            await to.publish(STREAM, numbered(number))
        await log.store.write(lambda db: db.execute("UPDATE spool_rows SET draft = x'ff00' WHERE sequence = 2"))
        await log.store.write(lambda db: db.execute("UPDATE spool_rows SET draft = '{}' WHERE sequence = 3"))
        await table(log, "SELECT * FROM pending_events")  # an operator can still look
        remote.come_back()
        await drained(to)
    assert remote.payloads == [0, 3]
    found = await letters(log)
    assert [(entry.reason, entry.topic) for entry in found] == [("undecodable", "spool.undecodable")] * 2
    assert msgspec.json.decode(found[0].payload) == {"base64": "/wA="}


async def test_an_outage_never_makes_a_dead_letter(log: SqliteLog) -> None:
    remote = MemoryRemote()
    remote.away = True
    async with relay(log, remote) as to:
        await to.publish(STREAM, numbered(0))
        await until(lambda: remote.sent + remote.asked > 12)  # many times more than three
        assert await letters(log) == []
        assert await table(log, "SELECT attempts FROM pending_events") == [(0,)]
        remote.come_back()
        await drained(to)
    assert remote.payloads == [0]


# --- capacity ---------------------------------------------------------------------------------------------------------


async def test_publishers_slow_down_above_half_and_are_refused_at_the_cap(log: SqliteLog) -> None:
    remote = MemoryRemote()
    remote.away = True
    clock = Slept()
    spool = Spool(log, rows_max=10)
    to = Relay(log, remote, spool=spool, clock=clock)
    await spool.open()  # nothing empties it
    for number in range(10):
        await to.publish(STREAM, numbered(number))
    assert clock.slept == pytest.approx([0.1, 0.2, 0.3, 0.4])
    with pytest.raises(Backpressure, match="the spool is full: 10 of 10 events"):
        await to.publish(STREAM, numbered(10))
    assert clock.slept[4:] == [0.5]
    assert (await spool.status()).rows == 10
    await spool.remove([1, 2, 3, 4, 5, 6])
    clock.slept.clear()
    await to.publish(STREAM, numbered(11))
    assert clock.slept == []
    await to.stop()


async def test_bytes_are_a_cap_too_and_a_hundred_at_once_cannot_pass_it(log: SqliteLog) -> None:
    remote = MemoryRemote()
    remote.away = True
    spool = Spool(log, bytes_max=4_000)
    to = Relay(log, remote, spool=spool, clock=Slept())
    await spool.open()
    outcomes = await asyncio.gather(
        *(to.publish(STREAM, draft("orders.paid", "shop", "x" * 200)) for _ in range(100)), return_exceptions=True
    )
    status = await spool.status()
    taken = [one for one in outcomes if isinstance(one, Receipt)]
    assert all(isinstance(one, Receipt | Backpressure) for one in outcomes)
    assert status.rows == len(taken) == 4_000 // (status.bytes // status.rows)
    assert status.bytes <= 4_000
    await to.stop()


def test_a_spool_without_room_is_refused(log: SqliteLog) -> None:
    with pytest.raises(Invalid, match="at least one row"):
        Spool(log, rows_max=0)


# --- what is said -----------------------------------------------------------------------------------------------------


async def test_the_breakers_changes_are_events_in_the_journal(log: SqliteLog) -> None:
    remote = MemoryRemote()
    async with relay(log, remote) as to:
        await drained(to)
        remote.away = True
        await to.publish(STREAM, numbered(0))
        await until(lambda: to.breaker.state is not BreakerState.CLOSED)
        remote.come_back()
        await drained(to)
        await to.publish(STREAM, numbered(1))
        await until(lambda: to.breaker.state is BreakerState.CLOSED)
    found: list[Event] = await log.fetch("local.default.journal", 0, 0)
    assert {event.topic for event in found} == {"broker.breaker"}
    said = [event.payload for event in found]
    assert [said[0]["before"], said[0]["state"], said[0]["error"]] == ["closed", "open", "away"]
    assert said[-1]["state"] == "closed"
    assert all(one["before"] == before["state"] for before, one in pairwise(said))
