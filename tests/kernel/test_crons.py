from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from postbus.kernel import ExtensionState, SystemTopics
from postbus.kernel.crons import cron_of
from postbus.model import Invalid
from tests.kernel.kernel_kit import CHANNEL, KernelKit, write_extension

WORKER = """
    import asyncio

    class Worker:
        def __init__(self):
            self.schedule, self.runs, self.answer, self.problem = "*/5 * * * *", 0, {"text": "five minutes"}, None
            self.gate = asyncio.Event()
            self.gate.set()

        def get_schedule(self):
            return self.schedule

        async def execute(self):
            self.runs += 1
            await self.gate.wait()
            if self.problem is not None:
                raise self.problem
            return self.answer
"""


@pytest.fixture
def host(extensions: Path) -> Path:
    write_extension(extensions, "chat", CHANNEL)
    write_extension(extensions, "worker", WORKER)
    return extensions


async def to(kit: KernelKit, text: str) -> None:
    """Let time pass until a moment of the day the clock begins on."""
    moment = datetime.fromisoformat(f"2025-06-15T{text}").replace(tzinfo=UTC)
    await kit.kit.jump(moment.timestamp() - kit.kit.clock.now_us() / 1e6)


async def test_work_runs_by_its_schedule_and_the_user_is_told(host: Path) -> None:
    async with KernelKit(host) as kit:  # it is 15:06:40
        worker = kit.kernel.instance("worker")
        for minute in ("15:07", "15:08", "15:09", "15:10", "15:11", "15:14", "15:15"):
            await to(kit, minute)
        assert worker.runs == 2
        told = await kit.events(SystemTopics.USER_NOTIFY)
        assert [event.source for event in told] == ["worker", "worker"]
        assert [message.text for message in kit.kernel.instance("chat").sent] == ["five minutes"] * 2


async def test_what_was_slept_through_is_not_made_up_for(host: Path) -> None:
    async with KernelKit(host) as kit:
        worker = kit.kernel.instance("worker")
        await to(kit, "15:18:30")
        assert worker.runs == 0
        await to(kit, "15:20:10")
        assert worker.runs == 1


async def test_nothing_to_say_is_fine(host: Path) -> None:
    async with KernelKit(host) as kit:
        worker = kit.kernel.instance("worker")
        worker.answer = None
        await to(kit, "15:10")
        worker.answer = {"other": 1}
        await to(kit, "15:15")
        assert worker.runs == 2
        assert kit.kernel.instance("chat").sent == []
        assert await kit.events(SystemTopics.EXTENSION_ERROR) == []


async def test_a_failure_is_told_and_the_schedule_goes_on(host: Path) -> None:
    async with KernelKit(host) as kit:
        worker = kit.kernel.instance("worker")
        worker.problem = RuntimeError("no network")
        await to(kit, "15:10")
        worker.problem, worker.answer = None, "just a text"
        await to(kit, "15:15")
        worker.answer = {"text": "well again"}
        await to(kit, "15:20")
        told = await kit.payloads(SystemTopics.EXTENSION_ERROR)
        assert [(one["extension_id"], one["stage"]) for one in told] == [("worker", "execute")] * 2
        assert "no network" in told[0]["reason"]
        assert "not str" in told[1]["reason"]
        assert [message.text for message in kit.kernel.instance("chat").sent] == ["well again"]
        assert kit.status("worker").state is ExtensionState.RUNNING


async def test_a_schedule_that_makes_no_sense_is_told_once(host: Path) -> None:
    async with KernelKit(host) as kit:
        worker = kit.kernel.instance("worker")
        worker.schedule = "every day"
        for minute in ("15:07", "15:08", "15:09"):
            await to(kit, minute)
        [told] = await kit.payloads(SystemTopics.EXTENSION_ERROR)
        assert "no schedule" in told["reason"]
        worker.schedule = "* * * * *"
        await to(kit, "15:10")
        assert worker.runs == 1


async def test_work_that_takes_long_is_not_doubled_and_ends_with_the_kernel(host: Path) -> None:
    async with KernelKit(host) as kit:
        worker = kit.kernel.instance("worker")
        worker.gate.clear()
        for minute in ("15:10", "15:15"):
            await to(kit, minute)
        assert worker.runs == 1
        worker.gate.set()
        await kit.settle()
        worker.gate.clear()
        await to(kit, "15:20")
        assert worker.runs == 2
    assert not worker.gate.is_set()  # it never ended by itself


async def test_a_zone_and_a_reload(host: Path) -> None:
    async with KernelKit(host) as kit:
        kit.kernel.instance("worker").schedule = "10 17 * * * Europe/Amsterdam"
        await to(kit, "15:10")
        assert kit.kernel.instance("worker").runs == 1
        write_extension(host, "worker", WORKER.replace("*/5 * * * *", "12 * * * *"))
        await kit.kernel.reload("worker")
        await to(kit, "15:12")
        assert kit.kernel.instance("worker").runs == 1


def test_the_fields_and_the_zone() -> None:
    assert cron_of("*/5  * * * *") == ("*/5 * * * *", "UTC")
    assert cron_of("0 9 * * 1 Europe/Berlin") == ("0 9 * * 1", "Europe/Berlin")
    for wrong in ("", "* * * *", "* * * * * UTC more"):
        with pytest.raises(Invalid):
            cron_of(wrong)
