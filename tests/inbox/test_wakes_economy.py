"""A day of events costs few wakes, none of them for nothing, and none of them late."""

from __future__ import annotations

from benchmarks.wake_economy import WAKES_MAX, run


async def test_a_day_costs_few_wakes() -> None:
    result = await run()
    assert (result.events, result.counters.items) == (770, result.items)
    assert result.ours.wakes <= WAKES_MAX
    assert result.ours.empty == 0
    assert result.late == 0
    assert result.counters.wakes == result.ours.wakes
    assert result.per_batch.wakes > 3 * result.ours.wakes
    assert result.per_batch.empty > 0
