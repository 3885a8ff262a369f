"""Pull subscriptions: leases, acks, redelivery, waiting, partitions, filters, dead letters."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from postbus.bus.purge import dead_letters
from postbus.model import Invalid, LeaseLost, NotFound, OffsetOutOfRange
from tests.pull_office import DLQ, SUB, TENANT, TOPIC, Office, leases, numbers, office, turns, until

__all__ = ["office"]


# --- handing out and acking -------------------------------------------------------------------------------------------


async def test_events_come_in_order_once_and_are_over_when_acked(office: Office) -> None:
    puller = await office.make(10)
    first, second = await puller.pull(4), await puller.pull(100)
    assert numbers(first) == [0, 1, 2, 3]
    assert numbers(second) == [4, 5, 6, 7, 8, 9]
    assert {one.attempt for one in (*first, *second)} == {1}
    assert len(set(leases(first + second))) == 10
    assert await puller.pull() == []
    assert await puller.ack(leases(first)) == 4
    assert await office.lag() == [(3, 10, 6)]
    assert await puller.ack(leases(second)) == 6
    assert await office.lag() == [(9, 10, 0)]
    await office.restart()
    assert await (await office.puller()).pull() == []
    assert await office.query("SELECT count(*) FROM delivery_rows") == [(0,)]


async def test_acks_out_of_order_hold_the_cursor_and_survive_a_crash(office: Office) -> None:
    puller = await office.make(6)
    handed = await puller.pull()
    await puller.ack(leases(handed)[3:])
    await puller.ack(leases(handed)[1:2])
    assert await office.lag() == [(-1, 6, 6)]
    await office.crash()
    await office.open()
    puller = await office.puller()
    again = await puller.pull()
    assert numbers(again) == [0, 2]
    assert [one.attempt for one in again] == [2, 2]
    await puller.ack(leases(again))
    assert await office.lag() == [(5, 6, 0)]
    assert await office.query("SELECT * FROM delivery_rows") == []


async def test_acking_twice_is_harmless_and_a_made_up_lease_is_lost(office: Office) -> None:
    puller = await office.make(3)
    handed = await puller.pull(2)
    assert await puller.ack(leases(handed)) == 2
    assert await puller.ack(leases(handed)) == 0
    with pytest.raises(LeaseLost):
        await puller.ack(["0" * 32 + ".0.2"])
    with pytest.raises(LeaseLost) as refused:
        await puller.ack([*leases(await puller.pull()), "f" * 32 + ".0.0", "f" * 32 + ".9.0"])
    assert refused.value.lease_ids == ("f" * 32 + ".0.0", "f" * 32 + ".9.0")
    assert await office.lag() == [(1, 3, 1)]
    for rubbish in ("", "x", "a.b.c", "a.0.-1", "a.0.1e3", "a.0." + "9" * 30):
        with pytest.raises(Invalid, match="no lease id"):
            await puller.ack([rubbish])


async def test_many_pullers_never_get_the_same_event_and_share_commits(office: Office) -> None:
    puller = await office.make(400)
    batches = await asyncio.gather(*(puller.pull(10) for _ in range(40)))
    assert sorted(n for batch in batches for n in numbers(batch)) == [*range(400)]
    await asyncio.gather(*(puller.ack(leases(batch)) for batch in reversed(batches)))
    assert await office.lag() == [(399, 400, 0)]
    assert await office.query("SELECT count(*) FROM delivery_rows") == [(0,)]


async def test_cumulative_acks(office: Office) -> None:
    puller = await office.make(50)
    await puller.commit(0, 42)
    assert await office.lag() == [(42, 50, 7)]
    await puller.commit(0, 10)
    assert await office.lag() == [(42, 50, 7)]
    for beyond in (50, 1000, -1):
        with pytest.raises(OffsetOutOfRange):
            await puller.commit(0, beyond)
    with pytest.raises(NotFound):
        await puller.commit(1, 0)
    handed = await puller.pull()
    assert numbers(handed) == [*range(43, 50)]
    await puller.ack(leases(handed)[5:6])
    await puller.commit(0, 46)
    assert await office.lag() == [(46, 50, 3)]
    with pytest.raises(LeaseLost):
        await puller.ack(leases(handed)[:1])
    await puller.ack(leases(handed)[4:])
    assert await office.lag() == [(49, 50, 0)]
    assert await office.query("SELECT * FROM delivery_rows") == []


async def test_auto_on_delivery_is_done_once_handed_out(office: Office) -> None:
    puller = await office.make(5, ack_mode="auto_on_delivery")
    handed = await puller.pull(3)
    assert [one.lease_id for one in handed] == [None] * 3
    assert await office.lag() == [(2, 5, 2)]
    await office.crash()
    await office.open()
    assert numbers(await (await office.puller()).pull()) == [3, 4]


async def test_a_window_of_open_events_bounds_what_is_handed_out(office: Office, monkeypatch: Any) -> None:
    monkeypatch.setattr("postbus.delivery.leases.WINDOW_MAX", 20)
    puller = await office.make(50)
    handed = await puller.pull(100)
    assert len(handed) == 20
    await puller.ack(leases(handed)[1:])
    assert await puller.pull() == []
    waiting = asyncio.create_task(puller.pull(100, 60))
    await turns()
    await puller.ack(leases(handed)[:1])
    assert numbers(await waiting) == [*range(20, 40)]


# --- leases end -------------------------------------------------------------------------------------------------------


async def test_an_unacked_event_comes_again_and_is_dead_after_its_attempts(office: Office) -> None:
    puller = await office.make(2)
    first = await puller.pull(1)
    await office.advance(29.9)
    assert numbers(await puller.pull(1)) == [1]
    await office.advance(0.2)
    with pytest.raises(LeaseLost):
        await puller.ack(leases(first))
    second = await puller.pull()
    assert [(one.event.payload["n"], one.attempt) for one in second] == [(0, 2)]
    await office.advance(30)
    third = await puller.pull()
    assert [(one.event.payload["n"], one.attempt) for one in third] == [(0, 3), (1, 2)]
    await puller.ack(leases(third)[1:])
    await office.advance(31)
    await until(lambda: puller.dead == 1)
    assert await puller.pull() == []
    letter = (await dead_letters(office.log, office.clock, TENANT).find())[0]
    assert (letter.subscription, letter.reason, letter.attempts, letter.origin_offset) == (SUB, "max_attempts", 3, 0)
    assert letter.error == "not acknowledged within 30000 ms, 3 times"
    assert letter.id == f"{DLQ}/0/0"
    await turns()
    assert await office.lag() == [(1, 2, 0)]
    statuses = await office.query("SELECT status, error FROM event_journal WHERE topic = ? ORDER BY id", TOPIC)
    assert statuses == [("failed", letter.error), ("done", None)]


async def test_dead_letters_go_beside_the_stream_when_no_topic_is_named(office: Office) -> None:
    await office.log.ensure_stream(TOPIC)
    await office.publish(1)
    await office.desk.create(TENANT, SUB, TOPIC, start="earliest", max_attempts=1)
    puller = await office.puller()
    await puller.pull()
    await office.advance(31)
    await until(lambda: puller.dead == 1)
    assert [event.payload for event in await office.log.fetch(DLQ, 0, 0)] == [{"n": 0}]


async def test_jumps_of_the_wall_clock_change_nothing(office: Office) -> None:
    puller = await office.make(1)
    handed = await puller.pull()
    for jump in (10**15, -(10**15)):
        office.clock.set_wall(office.clock.now_us() + jump)
        await turns()
        assert await puller.pull() == []
    assert await puller.ack(leases(handed)) == 1


async def test_extending_keeps_a_lease(office: Office) -> None:
    puller = await office.make(2)
    handed = await puller.pull()
    await office.advance(20)
    await puller.extend(leases(handed)[:1])
    await office.advance(20)
    assert numbers(await puller.pull()) == [1]
    assert await puller.ack(leases(handed)[:1]) == 1
    with pytest.raises(LeaseLost):
        await puller.extend(leases(handed)[1:])


async def test_nack_brings_an_event_back_after_its_delay_and_across_a_restart(office: Office) -> None:
    puller = await office.make(3)
    handed = await puller.pull()
    assert await puller.nack(leases(handed)[:1], 0) == 1
    assert await puller.nack(leases(handed)[1:2], 60, "busy") == 1
    with pytest.raises(LeaseLost):
        await puller.nack(leases(handed)[:1])
    assert [(one.event.payload["n"], one.attempt) for one in await puller.pull()] == [(0, 2)]
    rows = await office.query('SELECT "offset", status, attempt, error FROM delivery_rows ORDER BY "offset"')
    assert rows == [(0, "processing", 2, None), (1, "waiting", 1, "busy")]
    await office.restart()
    puller = await office.puller()
    again = await puller.pull()
    assert [(one.event.payload["n"], one.attempt) for one in again] == [(0, 3), (2, 2)]
    await puller.ack(leases(again))
    await office.advance(59)
    assert numbers(await puller.pull()) == []
    waiting = asyncio.create_task(puller.pull(10, 30))
    await turns()
    await office.advance(1.5)
    assert [(one.event.payload["n"], one.attempt) for one in await waiting] == [(1, 2)]


async def test_nack_without_a_delay_backs_off_and_the_last_one_is_dead(office: Office) -> None:
    puller = await office.make(1, max_attempts=2)
    await puller.nack(leases(await puller.pull()))
    assert await puller.pull() == []
    await office.advance(2)
    handed = await puller.pull()
    assert [one.attempt for one in handed] == [2]
    await puller.nack(leases(handed), error="cannot parse it")
    assert [letter.error for letter in await dead_letters(office.log, office.clock, TENANT).find()] == [
        "cannot parse it"
    ]
    assert await office.lag() == [(0, 1, 0)]


# --- waiting ----------------------------------------------------------------------------------------------------------


async def test_a_long_poll_wakes_on_a_commit_on_any_partition(office: Office) -> None:
    puller = await office.make(partitions=3)
    for number in range(5):
        waiting = asyncio.create_task(puller.pull(10, 60))
        await turns()
        assert not waiting.done()
        await office.publish(1, number, key=f"k{number}")
        handed = await asyncio.wait_for(waiting, 60)
        assert numbers(handed) == [number]
        await puller.ack(leases(handed))


async def test_a_long_poll_wakes_when_a_lease_ends_and_gives_up_in_time(office: Office) -> None:
    puller = await office.make(1)
    await puller.pull()
    waiting = asyncio.create_task(puller.pull(10, 40))
    await turns()
    await office.advance(30.1)
    assert [one.attempt for one in await asyncio.wait_for(waiting, 60)] == [2]
    waiting = asyncio.create_task(puller.pull(10, 5))
    await turns()
    assert not waiting.done()
    await office.advance(5.1)
    assert await asyncio.wait_for(waiting, 60) == []


async def test_who_stops_waiting_takes_nothing_away(office: Office) -> None:
    puller = await office.make()
    waiting = [asyncio.create_task(puller.pull(10, 60)) for _ in range(3)]
    await turns()
    waiting[0].cancel()
    await office.publish(1)
    waiting[1].cancel()
    handed = await asyncio.wait_for(waiting[2], 60)
    assert numbers(handed) == [0]
    cancelled = asyncio.create_task(puller.pull(10, 60))
    await office.publish(5, 1)
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await turns()
    found = numbers(await puller.pull(10, 1))
    assert found == [1, 2, 3, 4, 5]


async def test_stopping_lets_those_who_wait_go(office: Office) -> None:
    puller = await office.make()
    waiting = asyncio.create_task(puller.pull(10, 600))
    await turns()
    await office.desk.stop()
    assert await asyncio.wait_for(waiting, 60) == []


# --- partitions and filters -------------------------------------------------------------------------------------------


async def test_partitions_take_turns_and_keep_their_order(office: Office) -> None:
    puller = await office.make(partitions=4)
    for key in range(40):
        await office.publish(5, key * 5, key=f"key-{key}")
    places: dict[int, list[int]] = {0: [], 1: [], 2: [], 3: []}
    for _ in range(5):
        handed = await puller.pull(20)
        counts = [sum(one.event.partition == part for one in handed) for part in range(4)]
        assert counts == [5] * 4
        for one in handed:
            places[one.event.partition].append(one.event.offset)
    while handed := await puller.pull(20):
        for one in handed:
            places[one.event.partition].append(one.event.offset)
    assert all(offsets == [*range(len(offsets))] for offsets in places.values())
    assert sum(map(len, places.values())) == 200


async def test_what_does_not_match_is_passed_over_without_a_commit_each(office: Office) -> None:
    pytest.importorskip("postbus.filters")
    puller = await office.make(filter={"payload": {"n": [5, 2500]}})
    await office.publish(3000)
    handed = await puller.pull(10)
    assert numbers(handed) == [5, 2500]
    await puller.ack(leases(handed))
    assert await office.lag() == [(2999, 3000, 0)]
    commits = await office.query("SELECT count(*) FROM consumer_commits WHERE consumer = ?", SUB)
    assert commits[0][0] <= 5
    await office.publish(1, 5)
    unacked = await puller.pull()
    assert numbers(unacked) == [5]
    await office.publish(10, 10)
    await office.crash()
    await office.open()
    puller = await office.puller()
    assert [(one.event.offset, one.attempt) for one in await puller.pull()] == [(3000, 2)]


# --- dead letters by hand ---------------------------------------------------------------------------------------------


async def test_a_dead_letter_by_hand_is_written_once_and_settles_its_event(office: Office) -> None:
    puller = await office.make()
    await office.publish(3, headers={"x-trace-id": "t", "own": "1"})
    handed = await puller.pull(1)
    first = await office.desk.deadletter(
        TENANT, SUB, 0, 0, "schema validation failed", {"x-trace-id": "mine", "b": "2"}
    )
    again = await office.desk.deadletter(TENANT, SUB, 0, 0, "another reason")
    assert (first.stream, first.partition, first.offset, again.offset) == (DLQ, 0, 0, 0)
    ahead = await office.desk.deadletter(TENANT, SUB, 0, 2, "never seen")
    assert ahead.offset == 1
    with pytest.raises(LeaseLost):
        await puller.ack(leases(handed))
    assert numbers(await puller.pull()) == [1]
    await puller.commit(0, 1)
    assert await office.lag() == [(2, 3, 0)]
    letter = (await office.log.fetch(DLQ, 0, 0))[0]
    assert letter.payload == {"n": 0}
    wanted = {"postbus.dlq.reason": "schema validation failed", "postbus.dlq.attempts": "1", "own": "1", "b": "2"}
    wanted["x-trace-id"] = "mine"
    assert wanted.items() <= letter.headers.items()
    await office.restart()
    assert (await office.desk.deadletter(TENANT, SUB, 0, 0, "a third")).offset == 0
    assert len(await office.log.fetch(DLQ, 0, 0)) == 2


async def test_bad_dead_letters_are_refused(office: Office) -> None:
    await office.make(1)
    for headers in ({"postbus.dlq.reason": "x"}, {" POSTBUS.x": "y"}):
        with pytest.raises(Invalid, match="reserved"):
            await office.desk.deadletter(TENANT, SUB, 0, 0, "r", headers)
    with pytest.raises(Invalid):
        await office.desk.deadletter(TENANT, SUB, 0, 0, "  ")
    with pytest.raises(NotFound):
        await office.desk.deadletter(TENANT, SUB, 0, 7, "r")
    await office.desk.create(TENANT, "plain", TOPIC)
    with pytest.raises(Invalid, match="no dead-letter topic"):
        await office.desk.deadletter(TENANT, "plain", 0, 0, "r")
    assert await office.log.fetch(DLQ, 0, 0) == []


async def test_a_replayed_letter_is_handed_out_again_from_attempt_one(office: Office) -> None:
    puller = await office.make(3)
    await puller.commit(0, 2)
    await office.desk.deadletter(TENANT, SUB, 0, 1, "wrong")
    letters = dead_letters(office.log, office.clock, TENANT)
    waiting = asyncio.create_task(puller.pull(10, 60))
    await turns()
    assert await letters.replay(await letters.find()) == 1
    await office.desk.refresh(TENANT)
    handed = await asyncio.wait_for(waiting, 60)
    assert [(one.event.payload["n"], one.attempt) for one in handed] == [(1, 1)]
    assert await office.query("SELECT status, attempt FROM delivery_rows") == [("processing", 1)]
    await puller.ack(leases(handed))
    assert await office.query("SELECT * FROM delivery_rows") == []
    assert [letter.state for letter in await letters.find(state=None)] == ["replayed"]
    await office.desk.refresh(TENANT)
    assert await puller.pull() == []
