"""``event_journal``: the ADR's nine columns and four statuses, and an operator's re-queue through plain SQL."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import apsw
import pytest

from postbus import Context, Event, EventBus, Reject, RetryPolicy
from postbus.testing import START_US, BusKit
from tests.handlers import Gate, Recorder, eventually, fails

COLUMNS = ["id", "correlation_id", "topic", "source", "payload", "status", "created_at", "processed_at", "error"]
ONCE = RetryPolicy(max_attempts=1)


def plain(folder: Path) -> apsw.Connection:
    """Open the store as any SQLite tool would."""
    [database] = folder.glob("*.db")
    db = apsw.Connection(str(database))
    db.set_busy_timeout(5000)
    return db


async def statuses(kit: BusKit) -> list[str]:
    return [row[5] for row in await kit.journal()]


# --- columns ----------------------------------------------------------------------------------------------------------


async def test_the_view_has_exactly_the_nine_columns_of_the_adr_in_order() -> None:
    async with BusKit() as kit:
        await kit.publish("tick", {"n": 1}, source="scheduler", correlation_id="chain")
        await kit.settle()
        assert [name for _, name, *_ in await kit.query("PRAGMA table_info(event_journal)")] == COLUMNS
        [row] = await kit.journal()
    assert row[:5] == (1, "chain", "tick", "scheduler", '{"n":1}')
    assert row[6] == START_US / 1e6


async def test_the_id_is_the_rows_number_and_the_order_of_arrival() -> None:
    async with BusKit() as kit:
        await kit.bus.ensure_stream("local.default.orders")
        for topic in ("a", "local.default.orders", "b"):
            await kit.publish(topic, {})
        rows = await kit.journal()
    assert [(row[0], row[2]) for row in rows] == [(1, "a"), (2, "local.default.orders"), (3, "b")]


# --- statuses ---------------------------------------------------------------------------------------------------------


async def test_an_event_goes_from_pending_over_processing_to_done() -> None:
    gate = Gate()
    kit = BusKit()
    await kit.publish("a", 1)
    assert await statuses(kit) == ["pending"]
    kit.bus.subscribe("a", gate, "reader")
    async with kit:
        await kit.settle()
        [row] = await kit.journal()
        assert (row[5], row[7], row[8]) == ("processing", None, None)
        await kit.advance(5)
        assert await statuses(kit) == ["processing"]
        gate.open.set()
        await kit.settle()
        [row] = await kit.journal()
    assert (row[5], row[8]) == ("done", None)
    assert row[7] == pytest.approx(START_US / 1e6 + 5)


async def test_a_failed_event_says_why_and_when() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(fails(9, ValueError("broken"))), "reader", retry=ONCE)
        await kit.publish("a", 1)
        await kit.settle()
        [row] = await kit.journal()
    assert (row[5], row[7], row[8]) == ("failed", START_US / 1e6, "ValueError: broken")


async def test_an_event_that_waits_for_a_retry_is_pending() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(fails(1)), "reader")
        await kit.publish("a", 1)
        await kit.settle()
        [row] = await kit.journal()
        assert (row[5], row[7], row[8]) == ("pending", None, "RuntimeError: attempt 1")
        await kit.advance(5)
        [row] = await kit.journal()
        assert (row[5], row[8]) == ("done", None)


async def test_the_worst_status_over_all_subscribers_counts_and_errors_are_joined() -> None:
    gate = Gate()
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(), "a-good")
        kit.bus.subscribe("a", gate, "b-slow")
        await kit.publish("a", 1)
        await kit.settle()
        assert await statuses(kit) == ["processing"]
        kit.bus.subscribe("a", Recorder(fails(9, ValueError("one"))), "d-bad", retry=ONCE, start="earliest")
        kit.bus.subscribe("a", Recorder(fails(9, Reject("two"))), "c-worse", retry=ONCE, start="earliest")
        await kit.settle()
        [row] = await kit.journal()
        assert (row[5], row[7], row[8]) == ("failed", None, "two; ValueError: one")
        gate.open.set()
        await kit.settle()
        [row] = await kit.journal()
    assert (row[5], row[8]) == ("failed", "two; ValueError: one")
    assert row[7] is not None


async def test_an_event_nobody_handles_is_done_once_it_was_dispatched() -> None:
    async with BusKit() as kit:
        await kit.stop()
        await kit.publish("nobody", 1)
        assert await statuses(kit) == ["pending"]
        await kit.start()
        await kit.advance(2)
        [row] = await kit.journal()
    assert row[5] == "done"
    assert row[7] is not None


async def test_statuses_sum_to_the_number_published() -> None:
    gate = Gate(lambda event: event.payload % 10 == 3)

    async def handle(event: Event) -> None:
        if event.payload % 10 == 7:
            raise Reject("no sevens")
        if event.payload % 10 == 5:
            raise ValueError("later")
        await gate(event)

    async def derive(event: Event, ctx: Context) -> None:
        if event.payload % 50 == 0:
            await ctx.publish("derived", event.payload)

    async with BusKit() as kit:
        kit.bus.subscribe("number", handle, "reader", concurrency=500, retry=RetryPolicy(backoff_s=1000))
        kit.bus.subscribe("number", derive, "deriver")
        for number in range(200):
            await kit.publish("number" if number % 2 else "other", number)
            await kit.publish("number", number)
        await kit.advance(2)
        rows = await kit.query("SELECT status, count(*) FROM event_journal GROUP BY 1")
        counts = {str(status): int(count) for status, count in rows}
        events = len(await kit.events())
        gate.open.set()
        await kit.settle()
    assert sum(counts.values()) == events == 404
    assert counts == {"failed": 40, "pending": 40, "processing": 40, "done": 404 - 120}


async def test_dead_letters_are_not_counted_again() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe(">", Recorder(fails(9)), "reader", retry=ONCE, dead_letter_stream="local.default.mine-dlq")
        kit.bus.subscribe(">", Recorder(fails(9)), "other", retry=ONCE)
        for number in range(5):
            await kit.publish("a", number)
        await kit.settle()
        assert len(await kit.dead()) == 10
        assert await statuses(kit) == ["failed"] * 5


async def test_the_view_is_quick_enough_for_ten_thousand_events() -> None:
    kit = BusKit()
    for start in range(0, 10_000, 1000):
        await asyncio.gather(*(kit.publish("a", number) for number in range(start, start + 1000)))
    for number in range(3):
        kit.bus.subscribe("a", Recorder(), f"reader-{number}")
    async with kit:
        await kit.settle()
        began = time.monotonic()
        assert await kit.query("SELECT status, count(*) FROM event_journal GROUP BY 1") == [("done", 10_000)]
        assert time.monotonic() - began < 10


# --- re-queue ---------------------------------------------------------------------------------------------------------

REQUEUE = "UPDATE event_journal SET status = 'pending' WHERE id = ?"


async def test_an_operator_requeues_a_failed_event_through_plain_sql(tmp_path: Path) -> None:
    good = False
    seen = Recorder()

    async def handle(event: Event) -> None:
        await seen(event)
        if not good:
            raise ValueError("broken")

    async with EventBus(tmp_path) as bus:
        bus.subscribe("a", handle, "reader", retry=ONCE)
        bus.subscribe("a", Recorder(), "other")
        await bus.publish("a", "test", 1)
        db = plain(tmp_path)
        query = "SELECT status FROM event_journal"
        await eventually(lambda: db.execute(query).get == "failed")
        good = True
        db.execute(REQUEUE, (1,))
        await eventually(lambda: db.execute(query).get == "done", 2.5)
        db.close()
        assert await bus.dead_letters.find() == []
    assert seen.attempts == [1, 1]


async def test_only_the_subscribers_that_failed_get_it_again() -> None:
    bad, good = Recorder(fails(9)), Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", bad, "bad", retry=ONCE)
        kit.bus.subscribe("a", good, "good")
        for number in range(3):
            await kit.publish("a", number)
        await kit.settle()
        log = await kit.bus.open()
        await log.store.write(
            lambda db: db.execute("UPDATE event_journal SET status = 'pending' WHERE status = 'failed'")
        )
        await kit.bus._refresh()
        await kit.settle()
        assert await statuses(kit) == ["failed"] * 3
        assert len(await kit.dead()) == 3
    assert sorted(bad.payloads) == [0, 0, 1, 1, 2, 2]
    assert bad.attempts == [1] * 6
    assert good.payloads == [0, 1, 2]


async def test_what_was_requeued_while_nothing_ran_is_delivered_at_the_next_start(tmp_path: Path) -> None:
    good = Recorder()
    async with BusKit(tmp_path) as kit:
        kit.bus.subscribe("a", Recorder(fails(9)), "reader", retry=ONCE)
        await kit.publish("a", 1)
        await kit.settle()
        await kit.stop()
        db = plain(tmp_path)
        db.execute(REQUEUE, (1,))
        db.close()
        kit.bus.unsubscribe("a", "reader")
        kit.bus.subscribe("a", good, "reader", retry=ONCE)
        await kit.start()
        await kit.settle()
        assert await statuses(kit) == ["done"]
    assert good.attempts == [1]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE event_journal SET status = 'done' WHERE id = 1",
        "UPDATE event_journal SET status = 'rubbish' WHERE id = 1",
        "UPDATE event_journal SET status = NULL WHERE id = 1",
        "UPDATE event_journal SET status = 'pending' WHERE id = 2",
        "UPDATE event_journal SET status = 'pending', payload = '{}' WHERE id = 1",
        "UPDATE event_journal SET status = 'pending', error = NULL WHERE id = 1",
        "UPDATE event_journal SET topic = 'b' WHERE id = 1",
        "DELETE FROM event_journal WHERE id = 1",
        "INSERT INTO event_journal (topic, source, payload) VALUES ('a', 'b', '{}')",
    ],
)
async def test_other_changes_through_the_view_are_refused(statement: str, tmp_path: Path) -> None:
    async with BusKit(tmp_path) as kit:
        kit.bus.subscribe("a", Recorder(fails(9)), "reader", retry=ONCE)
        await kit.publish("a", 1)
        await kit.publish("b", 2)
        await kit.advance(2)
        before = await kit.journal()
        db = plain(tmp_path)
        with pytest.raises((apsw.SQLError, apsw.ConstraintError)):
            db.execute(statement)
        db.close()
        assert await kit.journal() == before
        assert await statuses(kit) == ["failed", "done"]
