"""The circuit breaker, on a clock that is moved by hand."""

from __future__ import annotations

import asyncio

import pytest

from postbus.broker import Breaker, BreakerState, Change
from postbus.model import Refused, Unreachable
from postbus.server.metrics import Metrics
from postbus.testing import FakeClock

CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN


class Far:
    """The far side: away or there, and how often it was asked."""

    def __init__(self) -> None:
        self.away = False
        self.asked = 0

    async def __call__(self) -> str:
        self.asked += 1
        if self.away:
            raise Unreachable("nobody there")
        return "there"


async def fail(breaker: Breaker, far: Far, times: int) -> None:
    for _ in range(times):
        with pytest.raises(Unreachable):
            await breaker.run(far)


async def test_five_failures_in_a_row_open_it_and_then_nobody_is_asked() -> None:
    clock, far = FakeClock(), Far()
    breaker = Breaker("far", clock=clock)
    far.away = True
    await fail(breaker, far, 4)
    far.away = False
    assert await breaker.run(far) == "there"  # a success starts the count again
    far.away = True
    await fail(breaker, far, 4)
    assert breaker.state is CLOSED
    await fail(breaker, far, 1)
    assert (breaker.state, breaker.wait_s, far.asked) == (OPEN, 10.0, 10)
    with pytest.raises(Unreachable, match=r"far is away; it is asked again in 10\.0 s"):
        await breaker.run(far)
    clock.advance(9.999)
    await fail(breaker, far, 3)
    assert far.asked == 10


async def test_one_failure_is_enough_when_it_is_told_so() -> None:
    far = Far()
    breaker = Breaker("nats", clock=FakeClock(), failures_max=1)
    far.away = True
    await fail(breaker, far, 1)
    assert breaker.state is OPEN


async def test_a_refusal_is_an_answer() -> None:
    breaker = Breaker("far", clock=FakeClock(), failures_max=1)

    async def refuse() -> None:
        raise Refused("no")

    for _ in range(10):
        with pytest.raises(Refused):
            await breaker.run(refuse)
    assert breaker.state is CLOSED


async def test_it_stays_open_twice_as_long_each_time_up_to_two_minutes_and_begins_again_after_closing() -> None:
    clock, far = FakeClock(), Far()
    breaker = Breaker("far", clock=clock, failures_max=1)
    far.away = True
    await fail(breaker, far, 1)
    for wait_s in (10, 20, 40, 80, 120, 120):
        assert breaker.wait_s == wait_s
        clock.advance(wait_s)
        assert breaker.state is OPEN
        await fail(breaker, far, 1)
    far.away = False
    clock.advance(120)
    assert await breaker.run(far) == "there"
    assert breaker.state is HALF_OPEN
    assert await breaker.run(far) == "there"
    assert breaker.state is CLOSED
    far.away = True
    await fail(breaker, far, 1)
    assert breaker.wait_s == 10


async def test_a_failure_after_one_success_opens_it_again() -> None:
    clock, far = FakeClock(), Far()
    breaker = Breaker("far", clock=clock, failures_max=1)
    far.away = True
    await fail(breaker, far, 1)
    clock.advance(10)
    far.away = False
    await breaker.run(far)
    far.away = True
    await fail(breaker, far, 1)
    assert (breaker.state, breaker.wait_s) == (OPEN, 20.0)
    clock.advance(20)
    far.away = False
    await breaker.run(far)
    assert breaker.state is HALF_OPEN  # the success before the failure does not count


async def test_half_open_lets_exactly_one_of_a_hundred_pass() -> None:
    clock = FakeClock()
    breaker = Breaker("far", clock=clock, failures_max=1)
    asked = 0
    gate = asyncio.Event()

    async def slow() -> str:
        nonlocal asked
        asked += 1
        await gate.wait()
        return "there"

    far = Far()
    far.away = True
    await fail(breaker, far, 1)
    clock.advance(10)
    for expected in (HALF_OPEN, CLOSED):
        gate.clear()
        asked = 0
        calls = [asyncio.create_task(breaker.run(slow)) for _ in range(100)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert asked == 1
        gate.set()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert outcomes.count("there") == 1
        assert sum(isinstance(one, Unreachable) for one in outcomes) == 99
        assert breaker.state is expected


async def test_a_probe_that_is_cancelled_lets_another_one_try() -> None:
    clock, far = FakeClock(), Far()
    breaker = Breaker("far", clock=clock, failures_max=1)
    far.away = True
    await fail(breaker, far, 1)
    clock.advance(10)
    probe = asyncio.create_task(breaker.run(asyncio.Event().wait))
    await asyncio.sleep(0)
    with pytest.raises(Unreachable, match="one call is finding out"):
        await breaker.run(far)
    probe.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probe
    far.away = False
    assert await breaker.run(far) == "there"


async def test_what_began_before_it_opened_says_nothing_about_now() -> None:
    clock, far = FakeClock(), Far()
    breaker = Breaker("far", clock=clock, failures_max=1)
    gate = asyncio.Event()

    async def slow() -> None:
        await gate.wait()

    old = [asyncio.create_task(breaker.run(slow)) for _ in range(3)]
    await asyncio.sleep(0)
    far.away = True
    await fail(breaker, far, 1)
    clock.advance(10)
    await fail(breaker, far, 1)  # the probe
    gate.set()
    await asyncio.gather(*old)
    assert (breaker.state, breaker.wait_s) == (OPEN, 20.0)


async def test_a_hint_lets_the_next_call_find_out_at_once() -> None:
    clock, far = FakeClock(), Far()
    breaker = Breaker("far", clock=clock, failures_max=1)
    breaker.hint()
    far.away = True
    await fail(breaker, far, 1)
    breaker.hint()
    assert (breaker.state, breaker.wait_s) == (OPEN, 0.0)
    far.away = False
    assert await breaker.run(far) == "there"


@pytest.mark.parametrize("probe", [False, True])
async def test_a_failure_from_before_a_hint_does_not_keep_the_next_call_waiting(probe: bool) -> None:
    clock, far = FakeClock(), Far()
    breaker = Breaker("far", clock=clock, failures_max=1)
    far.away = True
    if probe:
        await fail(breaker, far, 1)
        clock.advance(10)

    async def slow() -> str:
        breaker.hint()  # it comes back while this call still waits for one that has gone
        return await far()

    with pytest.raises(Unreachable):
        await breaker.run(slow)
    assert (breaker.state, breaker.wait_s) == (OPEN, 0.0)
    await fail(breaker, far, 1)  # it was a false one
    assert (breaker.state, breaker.wait_s) == (OPEN, 20.0)


async def test_changes_are_told_and_show_as_a_metric() -> None:
    clock, far, metrics = FakeClock(), Far(), Metrics()
    breaker = Breaker("far", clock=clock, failures_max=1)
    changes: list[Change] = []
    shown = []

    def told(change: Change) -> None:
        metrics.breaker(change.name, change.state)
        changes.append(change)
        shown.append(metrics.registry.get_sample_value("postbus_breaker_state", {"name": "far"}))

    breaker.listen(told)
    far.away = True
    await fail(breaker, far, 1)
    clock.advance(10)
    far.away = False
    await breaker.run(far)
    await breaker.run(far)
    assert [(one.before, one.state, one.open_s, one.error) for one in changes] == [
        (CLOSED, OPEN, 10.0, "nobody there"),
        (OPEN, HALF_OPEN, 0.0, ""),
        (HALF_OPEN, CLOSED, 0.0, ""),
    ]
    assert shown == [2, 1, 0]
