"""Pull subscriptions: made, moved and removed, in this process and beside others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from postbus.bus import EventBus
from postbus.bus.pull import PullDesk
from postbus.bus.registry import Registered, Registry
from postbus.bus.stats import subscription_states
from postbus.delivery.claims import Claims
from postbus.delivery.picking import Picker
from postbus.log import SqliteLog
from postbus.model import Conflict, Invalid, LeaseLost, NotFound, OffsetOutOfRange, Start, StartPolicy, StreamSettings
from tests.pull_office import SUB, TENANT, TOPIC, Office, leases, numbers, office, turns

__all__ = ["office"]


# --- resets, removal, other processes ---------------------------------------------------------------------------------


async def test_a_reset_takes_leases_away_and_starts_over(office: Office) -> None:
    puller = await office.make(5)
    handed = await puller.pull()
    await puller.ack(leases(handed)[:2])
    await office.desk.deadletter(TENANT, SUB, 0, 3, "no")
    await office.desk.reset(TENANT, SUB, "earliest")
    with pytest.raises(LeaseLost):
        await puller.ack(leases(handed)[4:])
    again = await puller.pull()
    assert [(one.event.payload["n"], one.attempt) for one in again] == [(n, 1) for n in range(5)]
    await office.desk.reset(TENANT, SUB, 4)
    assert numbers(await puller.pull()) == [4]
    with pytest.raises(OffsetOutOfRange):
        await office.desk.reset(TENANT, SUB, 99)


async def test_a_reset_through_the_log_reaches_those_who_wait(office: Office) -> None:
    puller = await office.make(2)
    await puller.commit(0, 1)
    waiting = asyncio.create_task(puller.pull(10, 60))
    await turns()
    await office.log.reset(TOPIC, SUB, Start(policy=StartPolicy.EARLIEST))
    await office.advance(1.1)
    assert numbers(await asyncio.wait_for(waiting, 60)) == [0, 1]


async def test_retention_that_beats_consumers_is_jumped_over(office: Office) -> None:
    await office.log.ensure_stream(TOPIC, StreamSettings(retention_beats_consumers=True))
    await office.publish(10)
    await office.desk.create(TENANT, SUB, TOPIC, start="earliest")
    puller = await office.puller()
    handed = await puller.pull(2)
    await office.log.trim(TOPIC, before=6)
    assert numbers(await puller.pull()) == [6, 7, 8, 9]
    await office.advance(31)
    again = await puller.pull()
    assert numbers(again) == [6, 7, 8, 9]
    with pytest.raises(LeaseLost):
        await puller.ack(leases(handed))
    await puller.ack(leases(again))
    assert (await office.lag())[0][2] == 0


async def test_a_stream_made_again_is_read_from_its_beginning(office: Office) -> None:
    puller = await office.make(3)
    await puller.pull(2)
    await office.log.delete_stream(TOPIC)
    with pytest.raises(NotFound):
        await puller.pull()
    await office.log.ensure_stream(TOPIC)
    await office.publish(1, 7)
    assert [(one.event.payload["n"], one.attempt) for one in await puller.pull()] == [(7, 1)]


async def test_two_desks_on_one_folder_hand_nothing_out_twice(office: Office) -> None:
    puller = await office.make(4)
    other_log = SqliteLog.open(office.folder, clock=office.clock)
    other_desk = PullDesk(other_log, office.clock)
    other = await other_desk.puller(TENANT, SUB)
    handed = await puller.pull(2)
    assert await other.pull() == []
    with pytest.raises(LeaseLost):
        await other.commit(0, 1)
    await puller.ack(leases(handed))
    await puller.stop()
    assert numbers(await other.pull()) == [2, 3]
    await other_desk.stop()
    await other_log.close()


async def test_idle_lanes_are_given_back(office: Office) -> None:
    puller = await office.make(1)
    await puller.ack(leases(await puller.pull()))
    assert (await office.query("SELECT owner IS NULL FROM lanes")) == [(0,)]
    for _ in range(4):
        await office.advance(11)
    assert (await office.query("SELECT owner IS NULL FROM lanes")) == [(1,)]
    await office.publish(1, 1)
    assert numbers(await puller.pull()) == [1]


# --- subscriptions ----------------------------------------------------------------------------------------------------


async def test_creating_is_once_per_tenant_and_checks_its_topics(office: Office) -> None:
    await office.make()
    with pytest.raises(Conflict):
        await office.desk.create(TENANT, SUB, TOPIC)
    await office.log.ensure_stream("agents.other.orders")
    await office.desk.create("agents.other", SUB, "agents.other.orders")
    for topic, letters in (("agents.other.orders", None), (TOPIC, "agents.other.orders-dlq")):
        with pytest.raises(Invalid, match="cross-tenant topic subscription not allowed"):
            await office.desk.create(TENANT, "new", topic, dead_letter_topic=letters)
    for topic, letters in (("agents.demo.nothing", None), (TOPIC, "agents.demo.nothing-dlq")):
        with pytest.raises(NotFound):
            await office.desk.create(TENANT, "new", topic, dead_letter_topic=letters)
    bad: list[dict[str, Any]] = [
        {"start": 7},
        {"start": "soon"},
        {"ack_mode": "sometimes"},
        {"ack_timeout_ms": 0},
        {"ack_timeout_ms": 10**12},
        {"max_attempts": 0},
        {"labels": {"postbus.x": "y"}},
        {"dead_letter_topic": TOPIC},
    ]
    for settings in bad:
        with pytest.raises(Invalid):
            await office.desk.create(TENANT, "new", TOPIC, **settings)
    assert [one.id for one in await office.desk.list(TENANT)] == [SUB]
    made = await asyncio.gather(
        *(office.desk.create(TENANT, "hundred", TOPIC) for _ in range(100)), return_exceptions=True
    )
    assert sum(not isinstance(one, BaseException) for one in made) == 1
    assert all(isinstance(one, Conflict) for one in made if isinstance(one, BaseException))


async def test_deleting_forgets_everything_and_a_new_one_starts_afresh(office: Office) -> None:
    puller = await office.make(3)
    await puller.ack(leases(await puller.pull())[1:])
    await office.desk.delete(TENANT, SUB)
    with pytest.raises(NotFound):
        await office.desk.puller(TENANT, SUB)
    with pytest.raises(NotFound):
        await office.desk.delete(TENANT, SUB)
    assert await office.query("SELECT * FROM delivery_rows") == []
    assert await office.query("SELECT * FROM lanes") == []
    await office.desk.create(TENANT, SUB, TOPIC, start="earliest")
    assert numbers(await (await office.puller()).pull()) == [0, 1, 2]


async def test_the_journal_shows_what_became_of_events(office: Office) -> None:
    puller = await office.make(4)
    handed = await puller.pull(3)
    await puller.ack(leases(handed)[2:])
    await puller.nack(leases(handed)[1:2], 60)
    query = "SELECT status FROM event_journal WHERE topic = ? ORDER BY id"
    assert [row[0] for row in await office.query(query, TOPIC)] == ["processing", "pending", "done", "pending"]


@pytest.mark.parametrize("step", [(Picker, "pick"), (Claims, "write")], ids=["before it is written", "after"])
async def test_what_is_acked_while_it_is_being_handed_out_again_does_not_come(
    office: Office, monkeypatch: pytest.MonkeyPatch, step: tuple[type, str]
) -> None:
    puller = await office.make(200)
    await puller.pull(200)
    office.clock.advance(31)
    reached, acked = asyncio.Event(), asyncio.Event()
    taken = getattr(*step)

    async def slowly(*arguments: Any) -> Any:
        first = not reached.is_set()
        result = await taken(*arguments)
        if first:
            reached.set()
            await acked.wait()
        return result

    monkeypatch.setattr(*step, slowly)
    pulling = asyncio.create_task(puller.pull(200))
    await reached.wait()
    await puller.commit(0, 99)
    acked.set()
    again = await pulling
    assert numbers(again) == list(range(100, 200))
    await puller.ack(leases(again))
    assert await office.lag() == [(199, 200, 0)]
    assert await office.query("SELECT * FROM delivery_rows") == []


async def test_recovering_a_bus_leaves_what_consumers_hold_alone(office: Office) -> None:
    puller = await office.make(4)
    await puller.ack(leases(await puller.pull(3))[1:2])
    await office.crash()
    await office.open()
    bus = EventBus(tenant=TENANT, clock=office.clock, log=office.log)
    assert await bus.recover() == 0
    assert await office.lag() == [(-1, 4, 4)]
    handed = await (await office.puller()).pull()
    assert [(one.event.payload["n"], one.attempt) for one in handed] == [(0, 2), (2, 2), (3, 1)]


async def test_a_handler_cannot_take_the_id_of_a_pull_subscription(office: Office) -> None:
    await office.make(1)
    registry = Registry(office.log, TENANT)
    with pytest.raises(Conflict, match="another kind"):
        await registry.save(Registered(id=SUB, patterns=("a.*",)))
    await registry.save(Registered(id="handler", patterns=("a.*",)))
    with pytest.raises(Conflict):
        await office.desk.create(TENANT, "handler", TOPIC)
    with pytest.raises(NotFound):
        await office.desk.get(TENANT, "handler")
    assert [one.id for one in await office.desk.list(TENANT)] == [SUB]


async def test_operators_see_pull_subscriptions_as_any_other(office: Office) -> None:
    puller = await office.make(5)
    handed = await puller.pull(3)
    await puller.ack(leases(handed)[:1])
    await puller.nack(leases(handed)[2:], 60)
    await office.desk.deadletter(TENANT, SUB, 0, 4, "no")
    state = (await subscription_states(office.log, office.clock, TENANT))[0]
    assert (state.registered.id, state.lag, state.waiting, state.running, state.dead) == (SUB, 4, 1, 1, 1)
    assert len(state.owners) == 1
