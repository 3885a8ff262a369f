"""When an agent is woken: never for nothing, once for many items, not while it is at work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from postbus.inbox import Target
from postbus.inbox.wakes.records import Failure
from postbus.model import LeaseLost, NotFound
from postbus.testing import FakeClock
from tests.handlers import eventually
from tests.inbox.wake_kit import TENANT, Receiver, WakeKit


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver() as running:
        yield running


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[WakeKit]:
    async with WakeKit(tmp_path / "data") as running:
        yield running


def webhook(receiver: Receiver, **settings: Any) -> Target:
    return Target(kind="webhook", url=receiver.url, allow_private=True, **settings)


# --- the buffer -------------------------------------------------------------------------------------------------------


async def test_items_within_the_buffer_make_one_wake(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver))
    await kit.send()
    await kit.advance(2)
    await kit.send(4)
    await kit.advance(0.9)
    assert receiver.counts == []
    await kit.advance(0.1)
    assert receiver.counts == [5]
    assert receiver.received[0]["agent"] == "alpha"
    assert (receiver.received[0]["first_item"], receiver.received[0]["last_item"]) == ("itm_1", "itm_5")


async def test_twenty_items_do_not_wait(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver))
    await kit.send(19)
    assert receiver.counts == []
    await kit.send()
    assert receiver.counts == [20]


async def test_an_agent_that_pulls_is_never_woken(kit: WakeKit) -> None:
    await kit.agent(Target(kind="pull"))
    await kit.send(50)
    await kit.advance(3600)
    assert kit.waker.next_in_s is None
    assert await kit.query("SELECT * FROM activations") == []
    assert (await kit.state()).state == "pull"


async def test_each_target_is_told_by_itself(kit: WakeKit, receiver: Receiver) -> None:
    async with Receiver() as second:
        await kit.agent(webhook(receiver, id="one"), webhook(second, id="two", buffer_s=30))
        await kit.send()
        await kit.advance(3)
        await kit.send()
        assert (receiver.counts, second.counts) == ([1], [])
        await kit.advance(27)
        assert (receiver.counts, second.counts) == ([1], [2])
        assert receiver.ids[0] != second.ids[0]


async def test_agents_do_not_wait_for_each_other(kit: WakeKit, receiver: Receiver) -> None:
    for name in ("alpha", "beta"):
        await kit.agent(webhook(receiver), name=name)
        await kit.send(2, agent=name)
    await kit.advance(3)
    assert sorted((call["agent"], call["new_item_count"]) for call in receiver.received) == [("alpha", 2), ("beta", 2)]


# --- nothing new, no wake ---------------------------------------------------------------------------------------------


async def test_items_acked_within_the_buffer_cost_no_wake(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver))
    await kit.send(3)
    await kit.ack(everything=True)
    await kit.advance(3600)
    assert receiver.counts == []
    counters = await kit.counters()
    assert counters.avoided == {"acked": 1}
    assert (counters.items, counters.wakes) == (3, 0)


async def test_only_what_is_left_at_dispatch_is_announced(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver))
    first, *_ = await kit.send(3)
    await kit.ack(first)
    await kit.advance(3)
    assert receiver.counts == [2]


async def test_a_lease_that_ends_with_nothing_new_costs_no_wake(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver))
    await kit.send(2)
    await kit.advance(3)
    await kit.advance(7200)
    assert receiver.counts == [2]
    assert (await kit.counters()).avoided == {"coalesced": 1, "nothing_new": 1}
    assert (await kit.state()).state == "idle"


async def test_a_removed_agent_is_not_woken(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver))
    await kit.send(2)
    await kit.inboxes.remove_agent(TENANT, "alpha")
    await kit.advance(3600)
    assert receiver.counts == []
    assert await kit.query("SELECT name, value FROM wake_counters") == [("avoided.removed", 1)]
    with pytest.raises(NotFound, match="alpha"):
        await kit.state()


async def test_too_few_unacked_items_do_not_wake(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver, min_unacked=3))
    first, _ = await kit.send(2)
    await kit.advance(10)
    await kit.ack(first)
    await kit.advance(600)
    assert receiver.counts == []
    assert (await kit.counters()).avoided == {"min_unacked": 1}
    await kit.send(2)
    await kit.advance(3)
    assert receiver.counts == [3]


# --- the lease --------------------------------------------------------------------------------------------------------


async def test_new_items_wait_for_the_end_of_the_lease(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver))
    await kit.send()
    await kit.advance(3)
    state = await kit.state()
    assert (state.state, state.until_at_us) == ("leased", kit.clock.now_us() + 600_000_000)
    await kit.send(25)
    await kit.advance(599.9)
    assert receiver.counts == [1]
    assert (await kit.state()).new_items == 25
    await kit.advance(0.1)
    assert receiver.counts == [1, 25]


async def test_an_item_just_before_the_end_of_the_lease_is_buffered(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver))
    await kit.send()
    await kit.advance(3)
    await kit.advance(599)
    await kit.send()
    await kit.advance(2)
    await kit.send(3)
    assert receiver.counts == [1]
    await kit.advance(1)
    assert receiver.counts == [1, 4]


async def test_an_ack_with_remaining_items_wakes_after_the_buffer(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver))
    [first] = await kit.send()
    await kit.advance(3)
    await kit.send(30)
    await kit.advance(100)
    await kit.ack(first)
    await kit.advance(2.9)
    assert receiver.counts == [1]
    await kit.advance(0.1)
    assert receiver.counts == [1, 30]


async def test_an_ack_of_everything_ends_the_lease_without_a_wake(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver))
    await kit.send()
    await kit.advance(3)
    await kit.send(2)
    await kit.advance(60)
    await kit.ack(everything=True)
    assert (await kit.state()).state == "idle"
    await kit.advance(3600)
    assert receiver.counts == [1]
    assert (await kit.counters()).avoided == {"acked": 1}
    await kit.send()
    await kit.advance(3)
    assert receiver.counts == [1, 1]


async def test_an_ack_that_leaves_only_what_is_known_costs_no_wake(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver))
    first, *_ = await kit.send(3)
    await kit.advance(3)
    await kit.ack(first)
    await kit.advance(3600)
    assert receiver.counts == [3]


async def test_an_agent_that_acks_before_it_answers_is_not_leased(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver, timeout_s=60))
    [first] = await kit.send()
    receiver.hold = hold = asyncio.Event()
    kit.clock.advance(3)
    await eventually(lambda: len(receiver.received) == 1)
    await kit.inboxes.items.ack(TENANT, "alpha", items=[first])
    receiver.hold = None
    hold.set()
    await kit.settle()
    assert (await kit.state()).state == "idle"
    await kit.send()
    await kit.advance(3)
    assert receiver.counts == [1, 1]


# --- digests ----------------------------------------------------------------------------------------------------------


async def test_items_of_a_digest_are_news_once_it_shows_them(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver))
    await kit.digest(5)
    await kit.advance(60)
    assert receiver.counts == []
    await kit.show()
    await kit.advance(3)
    assert receiver.counts == [5]


async def test_items_hidden_when_later_ones_were_announced_are_announced_too(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver, lease_s=0))
    await kit.digest(2)
    await kit.send()
    await kit.advance(3)
    assert receiver.counts == [1]
    await kit.digest(1)
    await kit.show()
    await kit.advance(3)
    assert receiver.counts == [1, 3]
    await kit.show()
    await kit.send()
    await kit.advance(3)
    assert receiver.counts == [1, 3, 1]
    assert (await kit.counters()).items == 5


async def test_too_few_items_become_enough_when_a_digest_shows_more(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver, min_unacked=3))
    await kit.digest(2)
    await kit.send()
    await kit.advance(30)
    assert receiver.counts == []
    await kit.show()
    await kit.advance(3)
    assert receiver.counts == [3]


# --- what is kept -----------------------------------------------------------------------------------------------------


async def test_what_is_owed_survives_a_restart(tmp_path: Path, receiver: Receiver) -> None:
    async with WakeKit(tmp_path / "data") as kit:
        await kit.agent(webhook(receiver))
        await kit.send(2)
    async with WakeKit(tmp_path / "data", kit.clock) as again:
        await again.advance(3)
        assert receiver.counts == [2]
        await again.send()
    async with WakeKit(tmp_path / "data", kit.clock) as third:
        await third.advance(599)
        assert receiver.counts == [2]
        await third.advance(1)
        assert receiver.counts == [2, 1]
        assert (await third.counters()).wakes == 2


class Rebooted(FakeClock):
    """The clock of the same machine after a reboot: its monotonic time began again."""

    def boot_id(self) -> str:
        return "another boot"


async def test_a_lease_goes_on_after_a_reboot_by_the_wall_clock(tmp_path: Path, receiver: Receiver) -> None:
    async with WakeKit(tmp_path / "data") as kit:
        await kit.agent(webhook(receiver))
        await kit.send()
        await kit.advance(3)
        await kit.send()
        wall_us = kit.clock.now_us()
    async with WakeKit(tmp_path / "data", Rebooted(wall_us + 400_000_000)) as again:
        await again.advance(199.9)
        assert receiver.counts == [1]
        await again.advance(0.1)
        assert receiver.counts == [1, 1]


async def test_a_wall_clock_that_was_far_ahead_does_not_hold_a_lease_for_ever(
    tmp_path: Path, receiver: Receiver
) -> None:
    async with WakeKit(tmp_path / "data") as kit:
        await kit.agent(webhook(receiver))
        await kit.send()
        await kit.advance(3)
        await kit.send()
        wall_us = kit.clock.now_us()
    async with WakeKit(tmp_path / "data", Rebooted(wall_us - 10**14)) as again:
        await again.advance(3600)
        assert receiver.counts == [1, 1]


async def test_a_wake_under_way_at_a_reboot_may_have_arrived(tmp_path: Path, receiver: Receiver) -> None:
    async with WakeKit(tmp_path / "data") as kit:
        await kit.agent(webhook(receiver))
        await kit.send(2)
        assert await kit.waker._table.begin(await kit.number(), "default") is not None
        wall_us = kit.clock.now_us()
    async with WakeKit(tmp_path / "data", Rebooted(wall_us + 60_000_000)) as again:
        await again.advance(10)
        assert (await again.state()).state == "leased"
        assert receiver.counts == []
        await again.advance(600)
        assert receiver.counts == [2]
        assert await again.query("SELECT attempts, outcome FROM activations") == [(2, "woken")]


async def test_a_wake_under_way_at_a_reboot_has_arrived_when_its_items_were_acked(
    tmp_path: Path, receiver: Receiver
) -> None:
    async with WakeKit(tmp_path / "data") as kit:
        await kit.agent(webhook(receiver))
        first, _ = await kit.send(2)
        assert await kit.waker._table.begin(await kit.number(), "default") is not None
        await kit.ack(first)
        wall_us = kit.clock.now_us()
    async with WakeKit(tmp_path / "data", Rebooted(wall_us)) as again:
        await again.send()
        await again.advance(3)
        assert receiver.counts == [1]
        assert await again.query("SELECT outcome FROM activations ORDER BY created_at") == [("answered",), ("woken",)]


async def test_a_stale_outcome_is_refused(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver))
    await kit.send()
    table, number = kit.waker._table, await kit.number()
    attempt = await table.begin(number, "default")
    assert attempt is not None
    assert await table.begin(number, "default") is None
    await kit.advance(31)  # longer than a wake can take: it is given up for lost
    with pytest.raises(LeaseLost, match="taken over"):
        await table.arrived(attempt)
    await kit.advance(598)
    kit.clock.advance(5)
    again = await table.begin(number, "default")
    assert again is not None
    assert again.activation == attempt.activation
    with pytest.raises(LeaseLost, match="taken over"):
        await table.failed(attempt, Failure("too late"))
    await table.arrived(again)
    assert (await kit.state()).state == "leased"


@pytest.mark.parametrize("reason", ["acked", "nothing_new", "min_unacked", "removed"])
async def test_a_wake_that_several_processes_avoid_counts_once(kit: WakeKit, receiver: Receiver, reason: str) -> None:
    await kit.agent(webhook(receiver, min_unacked=2 if reason == "min_unacked" else 1))
    await kit.waker.stop()
    await kit.send()
    table, number = kit.waker._table, await kit.number()
    if reason == "acked":
        await kit.ack(everything=True)
    elif reason == "nothing_new":
        attempt = await table.begin(number, "default")
        assert attempt is not None
        await table.arrived(attempt)
        kit.clock.advance(600)
    elif reason == "removed":
        await kit.inboxes.remove_agent(TENANT, "alpha")
    for _ in range(3):
        assert await table.begin(number, "default") is None
    avoided = await kit.query("SELECT name, value FROM wake_counters WHERE name LIKE 'avoided.%'")
    assert avoided == [(f"avoided.{reason}", 1)]


async def test_a_wake_is_on_record_and_its_items_are_delivered(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver))
    await kit.send(2)
    await kit.advance(3)
    facts = "id, agent, target, new_item_count, first_sequence, last_sequence, attempts, outcome, error"
    assert await kit.query(f"SELECT {facts} FROM activations") == [
        (receiver.ids[0], "alpha", "default", 2, 1, 2, 1, "woken", None)
    ]
    await kit.send()
    states = await kit.query("SELECT delivered_at IS NOT NULL FROM inbox_items ORDER BY sequence")
    assert states == [(1,), (1,), (0,)]


async def test_counters_say_what_was_saved(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver))
    await kit.send(10)
    await kit.advance(3)
    await kit.send(2)
    await kit.ack(everything=True)
    await kit.advance(3)
    counters = await kit.counters()
    assert (counters.events, counters.items, counters.wakes, counters.failures) == (12, 12, 1, 0)
    assert counters.avoided == {"coalesced": 9, "acked": 1}


async def test_old_activations_are_forgotten(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver))
    for _ in range(2):
        await kit.send()
        await kit.advance(3)
        await kit.advance(31 * 86_400)
    assert await kit.query("SELECT count(*) FROM activations") == [(1,)]
    assert (await kit.counters()).wakes == 2
