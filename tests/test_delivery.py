"""Delivery: order, concurrency, timeouts, leases and retries of one subscription."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus import Event, Reject, Retry, RetryPolicy
from postbus.delivery import DeliveryTable, LaneKey, Settlement, retry_delay_s
from postbus.delivery.table import new_owner
from postbus.model import LeaseLost
from postbus.testing import BusKit
from tests.handlers import Gate, Recorder, fails

EXACT = RetryPolicy(jitter=0.0)
DAYS_30_US = 30 * 86_400 * 1_000_000


# --- order ------------------------------------------------------------------------------------------------------------


async def test_one_hung_handler_delays_no_other_key() -> None:
    gate = Gate(lambda event: event.key == "stuck")
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader")
        for number in range(60):
            await kit.publish("a", number, key="stuck" if number % 3 == 0 else f"key-{number % 7}")
        await kit.settle()
        assert [event.payload for event in gate.started if event.key == "stuck"] == [0]
        assert len(gate.finished) == 40
        gate.open.set()
        await kit.settle()
        assert [event.payload for event in gate.finished if event.key == "stuck"] == [*range(0, 60, 3)]


async def test_many_events_behind_a_hung_one_delay_no_other_key() -> None:
    gate = Gate(lambda event: event.key == "stuck")
    async with BusKit(batch_size=10) as kit:
        kit.bus.subscribe("a", gate, "reader")
        for number in range(300):
            await kit.publish("a", number, key="stuck")
        await kit.publish("a", "free", key="other")
        await kit.advance(3)
        assert [event.payload for event in gate.finished] == ["free"]
        gate.open.set()
        await kit.advance(1)
        assert [event.payload for event in gate.finished] == ["free", *range(300)]
        assert {event.attempt for event in gate.started} == {1}


async def test_a_hung_handler_holds_up_its_whole_subscription_when_strict_but_no_other() -> None:
    gate, other = Gate(lambda event: event.payload == 0), Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "strict", ordering="strict")
        kit.bus.subscribe("a", other, "other")
        for number in range(5):
            await kit.publish("a", number, key=f"key-{number}")
        await kit.advance(5)
        assert [event.payload for event in gate.started] == [0]
        assert other.payloads == [*range(5)]
        gate.open.set()
        await kit.settle()
        assert [event.payload for event in gate.finished] == [*range(5)]
        assert gate.most == 1


async def test_strict_keeps_the_order_across_retries() -> None:
    got = Recorder(lambda event: fails(2)(event) if event.payload == 1 else None)
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "strict", ordering="strict", retry=EXACT)
        for number in range(4):
            await kit.publish("a", number)
        await kit.advance(10)
    assert got.payloads == [0, 1, 1, 1, 2, 3]


async def test_each_key_is_first_in_first_out_even_across_retries() -> None:
    chance = random.Random(3)
    bad = {number for number in range(120) if chance.random() < 0.3}
    got = Recorder(lambda event: fails(2)(event) if event.payload in bad else None)
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader", retry=RetryPolicy(backoff_s=0.5))
        for number in range(120):
            await kit.publish("a", number, key=f"key-{number % 5}")
        await kit.advance(60)
        assert await kit.dead() == []
    orders: dict[str, list[int]] = defaultdict(list)
    for event in got.events:
        orders[str(event.key)].append(event.payload)
    for numbers in orders.values():
        assert numbers == sorted(numbers)
    assert len(got.events) == 120 + 2 * len(bad)


async def test_a_dead_event_lets_the_next_of_its_key_go_on() -> None:
    got = Recorder(lambda event: fails(9)(event) if event.payload == 0 else None)
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader", retry=EXACT)
        for number in range(3):
            await kit.publish("a", number, key="k")
        await kit.advance(10)
        assert got.payloads == [0, 0, 0, 1, 2]
        assert len(await kit.dead()) == 1


@pytest.mark.parametrize("concurrency", [1, 3, 10])
async def test_no_more_handlers_run_at_once_than_allowed(concurrency: int) -> None:
    gate = Gate()
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader", concurrency=concurrency)
        for number in range(40):
            await kit.publish("a", number)
        await kit.settle()
        assert gate.running == concurrency
        gate.open.set()
        await kit.settle()
        assert gate.most == concurrency
        assert len(gate.finished) == 40


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_a_failure_is_retried_with_doubling_waits_and_then_dead() -> None:
    times: list[float] = []
    async with BusKit() as kit:

        async def fail(_event: Event) -> None:
            times.append(kit.clock.monotonic_s())
            raise ValueError("broken")

        kit.bus.subscribe("a", fail, "reader", retry=RetryPolicy(max_attempts=5, jitter=0.0))
        await kit.publish("a", 1)
        await kit.advance(60)
        [letter] = await kit.dead()
    waits = [later - earlier for earlier, later in pairwise(times)]
    assert [round(wait) for wait in waits[:2]] == [1, 2]
    for wait, least in zip(
        waits, (1, 2, 4, 8), strict=True
    ):  # a lane that must take its lease again comes a little late
        assert least - 0.01 <= wait <= least + 1.01
    assert (letter.reason, letter.attempts, letter.error) == ("max_attempts", 5, "ValueError: broken")


async def test_one_attempt_means_no_retry() -> None:
    got = Recorder(fails(9))
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader", retry=RetryPolicy(max_attempts=1))
        await kit.publish("a", 1)
        await kit.settle()
        assert [row[5] for row in await kit.journal()] == ["failed"]
        await kit.jump(600)
    assert got.attempts == [1]


async def test_a_retry_runs_only_the_subscriber_that_failed() -> None:
    good, bad = Recorder(), Recorder(fails(2))
    async with BusKit() as kit:
        kit.bus.subscribe("a", good, "good")
        kit.bus.subscribe("a", bad, "bad")
        await kit.publish("a", 1)
        await kit.advance(30)
        assert await kit.dead() == []
    assert good.attempts == [1]
    assert bad.attempts == [1, 2, 3]


async def test_reject_is_a_dead_letter_now() -> None:
    got = Recorder(fails(9, Reject("never")))
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader")
        await kit.publish("a", 1)
        await kit.settle()
        [letter] = await kit.dead()
    assert (letter.reason, letter.attempts, letter.error) == ("rejected", 1, "never")


@pytest.mark.parametrize("delay", [0.0, 7.5, 3600.0])
async def test_retry_waits_as_long_as_it_says(delay: float) -> None:
    times: list[float] = []
    async with BusKit() as kit:

        async def later(_event: Event) -> None:
            times.append(kit.clock.monotonic_s())
            if len(times) == 1:
                raise Retry(delay)

        kit.bus.subscribe("a", later, "reader")
        await kit.publish("a", 1)
        await kit.settle()
        assert len(times) == (1 if delay else 2)
        await kit.jump(delay * 0.99)
        assert len(times) == (1 if delay else 2)
        await kit.jump(delay * 0.02)
    assert len(times) == 2


async def test_retry_without_a_delay_follows_the_policy_and_counts_as_an_attempt() -> None:
    got = Recorder(fails(9, Retry()))
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader", retry=EXACT)
        await kit.publish("a", 1)
        await kit.advance(10)
        [letter] = await kit.dead()
    assert got.attempts == [1, 2, 3]
    assert (letter.reason, letter.error) == ("max_attempts", "retry")


@pytest.mark.parametrize("delay", [float("nan"), float("inf"), -5.0, 1e30, "soon"])
async def test_a_delay_that_makes_no_sense_does_not_stop_the_subscription(delay: Any) -> None:
    got = Recorder(lambda event: fails(1, Retry(delay))(event) if event.payload == 1 else None)
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader", concurrency=1)
        for number in range(3):
            await kit.publish("a", number)
        await kit.advance(5)
        assert {0, 1, 2} == {*got.payloads}


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("\ud800 and \0"), "ValueError: ? and \0"),
        (ValueError("é" * 10_000), "ValueError: " + "é" * 2000),
        (Mute(), "Mute: (no words)"),
        (Reject(""), "rejected by the handler"),
        (ExceptionGroup("all", [ValueError("a"), KeyError("b")]), "ValueError: a; KeyError: 'b'"),
        (asyncio.CancelledError(), "CancelledError: "),
    ],
    ids=["surrogate", "long", "mute", "empty", "group", "cancelled"],
)
async def test_whatever_a_handler_raises_can_be_kept(error: Any, text: str) -> None:
    got = Recorder(lambda event: fails(9, error)(event) if event.payload == 0 else None)
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader", retry=RetryPolicy(max_attempts=2), concurrency=1)
        await kit.publish("a", 0)
        await kit.publish("a", 1)
        await kit.advance(10)
        [letter] = await kit.dead()
        rows = await kit.query("SELECT error FROM deliveries WHERE status = 'failed'")
    assert got.payloads.count(1) == 1
    assert letter.error == text
    assert rows == [(text,)]


@given(
    attempt=st.integers(1, 200),
    policy=st.builds(
        RetryPolicy, backoff_s=st.floats(0.001, 60), backoff_s_max=st.floats(0.001, 600), jitter=st.floats(0, 1)
    ),
)
def test_backoff_doubles_caps_and_jitters(attempt: int, policy: RetryPolicy) -> None:
    plain = min(policy.backoff_s * 2 ** (attempt - 1), policy.backoff_s_max)
    delay = retry_delay_s(policy, attempt)
    assert plain * (1 - policy.jitter) * 0.999 <= delay <= plain * (1 + policy.jitter) * 1.001


def test_jitter_spreads_retries() -> None:
    assert len({retry_delay_s(RetryPolicy(jitter=0.2), 3) for _ in range(50)}) > 40


async def test_failures_in_the_middle_of_ten_thousand_events_keep_the_cursor_moving() -> None:
    got = Recorder(lambda event: fails(9)(event) if event.payload % 500 == 250 else None)
    kit = BusKit()
    for start in range(0, 10_000, 1000):
        await asyncio.gather(*(kit.publish("a", number) for number in range(start, start + 1000)))
    kit.bus.subscribe("a", got, "reader", retry=RetryPolicy(max_attempts=2))
    async with kit:
        await kit.settle()
        log = await kit.bus.open()
        assert (await log.get_consumer_lag(kit.bus.journal, "reader")).total == 0
        await kit.advance(10)
        assert len(await kit.dead()) == 20
        rows = await kit.query("SELECT status, count(*) FROM deliveries GROUP BY 1")
        assert rows == [("failed", 20)]
    assert len(got.events) == 10_020


async def test_when_everything_fails_everything_ends_as_a_dead_letter() -> None:
    got = Recorder(fails(9))
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader", retry=RetryPolicy(max_attempts=2, backoff_s=0.5))
        await asyncio.gather(*(kit.publish("a", number, key=f"key-{number % 50}") for number in range(1000)))
        for _ in range(45):
            await kit.jump(1)
        assert len(await kit.dead()) == 1000
    assert len(got.events) == 2000


# --- timeouts and leases ----------------------------------------------------------------------------------------------


async def test_a_timeout_counts_as_a_failure() -> None:
    gate = Gate()
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "slow.reader", timeout=2.5, retry=EXACT)
        await kit.publish("a", 1)
        await kit.advance(2.4)
        assert gate.cancelled == []
        await kit.advance(0.2)
        assert len(gate.cancelled) == 1
        [row] = await kit.journal()
        assert (row[5], row[8]) == ("pending", "handler slow.reader timed out after 2.5s")
        await kit.advance(30)
        [letter] = await kit.dead()
    assert [event.attempt for event in gate.started] == [1, 2, 3]
    assert (letter.reason, letter.error) == ("max_attempts", "handler slow.reader timed out after 2.5s")


@pytest.mark.parametrize("then", ["return", "raise"])
async def test_a_timeout_counts_whatever_the_handler_makes_of_it(then: str) -> None:
    async def swallow(_event: Event) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if then == "raise":
                raise ValueError("something else") from None

    async with BusKit() as kit:
        kit.bus.subscribe("a", swallow, "reader", timeout=1, retry=RetryPolicy(max_attempts=1))
        await kit.publish("a", 1)
        await kit.advance(3)
        [letter] = await kit.dead()
        await kit.publish("a", 2)
        await kit.advance(3)
        assert len(await kit.dead()) == 2
    assert letter.error == "handler reader timed out after 1s"


async def test_a_worker_goes_on_after_timeouts() -> None:
    gate = Gate(lambda event: event.payload < 3)
    async with BusKit() as kit:
        kit.bus.subscribe("a", gate, "reader", timeout=1, concurrency=1, retry=RetryPolicy(max_attempts=1))
        for number in range(6):
            await kit.publish("a", number)
        await kit.advance(10)
        assert len(await kit.dead()) == 3
    assert [event.payload for event in gate.finished] == [3, 4, 5]


async def test_long_handlers_keep_their_lease() -> None:
    gate, other = Gate(), Recorder()
    async with BusKit(lease_s=3) as kit:
        kit.bus.subscribe("a", gate, "reader")
        await kit.publish("a", 1)
        await kit.settle()
        async with BusKit(str(kit._path), clock=kit.clock, lease_s=3) as second:
            second.bus.subscribe("a", other, "reader")
            await kit.advance(100)
            assert other.events == []
            gate.open.set()
            await kit.settle()
            await kit.advance(10)
        assert await kit.dead() == []
    assert (len(gate.finished), other.events) == (1, [])
    assert [event.attempt for event in gate.finished] == [1]


async def test_a_lane_that_was_taken_over_refuses_the_stale_settlement() -> None:
    gate = Gate()
    async with BusKit(lease_s=3) as kit:
        kit.bus.subscribe("a", gate, "reader")
        await kit.publish("a", 1)
        await kit.settle()
        log = await kit.bus.open()
        key = LaneKey("reader", kit.bus.journal, 0)
        [(token,)] = await kit.query("SELECT token FROM lanes")
        name = new_owner(kit.clock)
        thief = DeliveryTable(log, kit.clock, name, 3)
        kit.clock._monotonic_us += 4_000_000  # past the lease, before anybody wakes up to renew it
        state = await thief.acquire(key, 100, lambda _: True)
        assert state is not None
        assert (state.token, state.recovered) == (token + 1, 1)
        with pytest.raises(LeaseLost):
            await kit.bus._table.settle(key, token, Settlement(1, 1, [], []))
        gate.open.set()
        await kit.settle()
        [(owner,)] = await kit.query("SELECT owner FROM lanes")
        assert owner == name
        [row] = await kit.query("SELECT status, attempt FROM deliveries")
        assert row == ("waiting", 0)


async def test_a_bus_that_lost_its_lane_takes_it_back_once_it_is_free() -> None:
    got = Recorder()
    async with BusKit(lease_s=3) as kit:
        kit.bus.subscribe("a", got, "reader")
        await kit.publish("a", 1)
        await kit.settle()
        await kit.query("SELECT 1")
        log = await kit.bus.open()
        await log.transact(lambda tx: tx.run("UPDATE lanes SET owner = 'nobody', token = token + 1", ()))
        await kit.publish("a", 2)
        await kit.advance(5)
        await kit.publish("a", 3)
        await kit.advance(5)
    assert {1, 2, 3} <= {*got.payloads}
    assert got.payloads[0] == 1


async def test_a_lease_held_by_a_live_process_is_respected() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(), "reader")
        await kit.publish("a", 1)
        await kit.settle()
        log = await kit.bus.open()
        other = DeliveryTable(log, kit.clock, new_owner(kit.clock), 3)
        assert await other.acquire(LaneKey("reader", kit.bus.journal, 0), 100, lambda _: True) is None


# --- clocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump_us", [DAYS_30_US, -DAYS_30_US])
async def test_jumps_of_the_wall_clock_change_neither_order_nor_leases_nor_retries(jump_us: int) -> None:
    got, other = Recorder(lambda event: fails(2)(event) if event.payload == 1 else None), Recorder()
    async with BusKit(lease_s=3) as kit:
        kit.bus.subscribe("a", got, "reader", ordering="strict", retry=EXACT)
        await kit.publish("a", 0)
        await kit.publish("a", 1)
        await kit.settle()
        assert got.payloads == [0, 1]
        kit.clock.set_wall(kit.clock.now_us() + jump_us)
        await kit.publish("a", 2)
        async with BusKit(str(kit._path), clock=kit.clock, lease_s=3) as second:
            second.bus.subscribe("a", other, "reader", ordering="strict", retry=EXACT)
            await kit.advance(0.9)
            assert got.payloads == [0, 1]
            await kit.advance(0.2)
            assert got.payloads == [0, 1, 1]
            await kit.advance(1.8)
            assert got.payloads == [0, 1, 1]
            await kit.advance(0.3)
            kit.clock.set_wall(kit.clock.now_us() - 2 * jump_us)
            await kit.publish("a", 3)
            await kit.advance(1)
        offsets = [(event.offset, event.payload) for event in await kit.events()]
    assert got.payloads == [0, 1, 1, 1, 2, 3]
    assert offsets == [(number, number) for number in range(4)]
    assert other.events == []


async def test_a_retry_that_waits_is_kept_across_a_restart() -> None:
    got = Recorder(fails(1))
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader", retry=RetryPolicy(backoff_s=100, jitter=0.0))
        await kit.publish("a", 1)
        await kit.settle()
        await kit.stop()
        kit.clock.advance(40)
        await kit.start()
        await kit.advance(50)
        assert got.attempts == [1]
        await kit.advance(12)
    assert got.attempts == [1, 2]


async def test_a_retry_that_waited_through_a_reboot_goes_on_by_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    got = Recorder(fails(1))
    async with BusKit() as kit:
        kit.bus.subscribe("a", got, "reader", retry=RetryPolicy(backoff_s=100, jitter=0.0))
        await kit.publish("a", 1)
        await kit.settle()
        await kit.stop()
        monkeypatch.setattr(kit.clock, "boot_id", lambda: "after the reboot")
        kit.clock._monotonic_us = 5_000_000
        kit.clock.set_wall(kit.clock.now_us() + 90_000_000)
        await kit.start()
        await kit.advance(8)
        assert got.attempts == [1]
        await kit.advance(5)
    assert got.attempts == [1, 2]
