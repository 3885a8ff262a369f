from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from postbus import EventBus
from postbus.log import SqliteLog
from postbus.model import AlreadyServed, Conflict, Invalid, NotFound, Unreachable
from postbus.sources import Polled, SourceHost, Sources
from postbus.sources import kinds as kinds_module
from postbus.sources.contract import Common, made
from postbus.sources.ingress import Ingress, Overtaken
from tests.sources.conftest import QUICK, TENANT, Web, events, until

ATOM = b'<feed xmlns="http://www.w3.org/2005/Atom"><title>t</title><entry><id>%d</id></entry></feed>'


def write(path: Path, *values: Any) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(value) + "\n" for value in values)


async def add_file(sources: Sources, path: Path, name: str = "lines") -> None:
    await sources.add(name, "file", {"path": str(path), "interval_s": 0.05})


def has(log: SqliteLog, name: str, count: int) -> Callable[[], Any]:
    async def enough() -> bool:
        return len(await events(log, name)) >= count

    return enough


# --- life -------------------------------------------------------------------------------------------------------------


async def test_sources_run_side_by_side_with_nobody_subscribed(
    host: SourceHost, log: SqliteLog, sources: Sources, tmp_path: Path, web: Web
) -> None:
    web.answer = lambda _: (500, {}, b"")
    await sources.add("broken", "feed", {"url": web.url, "allow_private": True, "interval_s": 1})
    await add_file(sources, tmp_path / "a", "a")
    async with host:
        write(tmp_path / "a", 1, 2)
        await until(has(log, "a", 2))
        await add_file(sources, tmp_path / "b", "b")  # while it runs
        write(tmp_path / "b", 3)
        await until(has(log, "b", 1))

        async def gave_up_often() -> bool:
            return (await sources.get("broken")).failures >= 3

        await until(gave_up_often)
    broken, good = await sources.get("broken"), await sources.get("a")
    assert "500" in str(broken.last_error)
    assert broken.last_ok_at_us is None
    assert (good.last_error, good.failures, good.events) == (None, 0, 2)


async def test_what_a_source_brought_reaches_a_subscription(
    log: SqliteLog, sources: Sources, host: SourceHost, tmp_path: Path
) -> None:
    await add_file(sources, tmp_path / "a")
    write(tmp_path / "a", "before")
    await host.poll(TENANT, "lines")
    seen: list[Any] = []
    bus = EventBus(log=log)
    bus.subscribe(f"{TENANT}.lines", lambda event: seen.append(event.payload), "reader", start="earliest")
    async with bus:
        write(tmp_path / "a", "after")
        await host.poll(TENANT, "lines")

        async def both() -> bool:
            return seen == ["before", "after"]

        await until(both)


async def test_pause_resume_and_remove_while_it_runs(
    host: SourceHost, log: SqliteLog, sources: Sources, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    await add_file(sources, path)
    async with host:
        write(path, 1)
        await until(has(log, "lines", 1))
        assert (await sources.pause("lines")).paused
        assert (await sources.pause("lines")).paused  # again
        write(path, 2)
        await asyncio.sleep(0.6)
        assert len(await events(log, "lines")) == 1
        assert not (await sources.resume("lines")).paused
        await until(has(log, "lines", 2))
        await sources.remove("lines")
        await asyncio.sleep(0.5)
        write(path, 3)
        await asyncio.sleep(0.3)
    assert [event.payload for event in await events(log, "lines")] == [1, 2]
    with pytest.raises(NotFound):
        await sources.get("lines")


async def test_a_source_that_is_replaced_while_it_waits_runs_as_the_new_one(
    host: SourceHost, log: SqliteLog, sources: Sources, tmp_path: Path, web: Web
) -> None:
    web.answer = lambda _: (200, {}, ATOM % 1)
    await sources.add("lines", "feed", {"url": web.url, "allow_private": True, "interval_s": 3600})
    async with host:
        await until(has(log, "lines", 1))
        await sources.remove("lines")
        await add_file(sources, tmp_path / "a")
        write(tmp_path / "a", 7)
        await until(has(log, "lines", 2))
    assert (await events(log, "lines"))[1].payload == 7


async def test_a_second_host_is_refused_and_may_take_over(log: SqliteLog, host: SourceHost) -> None:
    second = SourceHost(log, log.store.clock)
    async with host:
        with pytest.raises(AlreadyServed):
            await second.start()
    async with second:
        pass


async def test_after_a_restart_a_source_is_not_asked_before_its_time(
    log: SqliteLog, sources: Sources, web: Web
) -> None:
    web.answer = lambda _: (429, {"retry-after": "3600"}, b"")
    await sources.add("news", "feed", {"url": web.url, "allow_private": True})

    async def asked() -> bool:
        return (await sources.get("news")).failures == 1

    async with SourceHost(log, log.store.clock, retry=QUICK):
        await until(asked)
    async with SourceHost(log, log.store.clock, retry=QUICK):
        await asyncio.sleep(0.5)
    assert len(web.calls) == 1


async def test_stop_lets_a_running_poll_finish(
    log: SqliteLog, sources: Sources, tmp_path: Path, host: SourceHost
) -> None:
    began = tmp_path / "began"
    text = f"import time; open({str(began)!r}, 'w').close(); time.sleep(0.5); print(1)"
    await sources.add("slow", "command", {"argv": [sys.executable, "-c", text]})

    async def running() -> bool:
        return began.exists()

    async with host:
        await until(running)
    assert len(await events(log, "slow")) == 1


async def test_failures_wait_longer_each_time_and_are_forgotten_by_a_success(
    log: SqliteLog, sources: Sources, web: Web
) -> None:
    host = SourceHost(log, log.store.clock)
    web.answer = lambda _: (500, {}, b"")
    await sources.add("news", "feed", {"url": web.url, "allow_private": True})
    waits = []
    for _ in range(4):
        turn = await host.poll(TENANT, "news")
        waits.append(turn.wait_s(log.store.clock.now_us()))
    assert all(later > sooner * 1.2 for sooner, later in pairwise(waits))
    web.answer = lambda _: (200, {}, ATOM % 1)
    await host.poll(TENANT, "news")
    assert (await sources.get("news")).failures == 0


async def test_a_source_with_nothing_new_is_not_written_each_time(
    host: SourceHost, sources: Sources, tmp_path: Path
) -> None:
    write(tmp_path / "a", 1)
    await add_file(sources, tmp_path / "a")
    for _ in range(5):
        await host.poll(TENANT, "lines")
    source = await sources.get("lines")
    assert (source.turn, source.polls, source.events) == (1, 1, 1)
    write(tmp_path / "a", 2)
    await host.poll(TENANT, "lines")
    assert (await sources.get("lines")).turn == 2


async def test_a_host_may_wait_for_its_turn(host: SourceHost, log: SqliteLog, sources: Sources, tmp_path: Path) -> None:
    await add_file(sources, tmp_path / "a")
    second = SourceHost(log, log.store.clock)
    async with host:
        await second.start(wait=True)
    write(tmp_path / "a", 1)
    await until(has(log, "lines", 1))
    await second.stop()


# --- append and checkpoint are one ------------------------------------------------------------------------------------


class Counter:
    """A source that counts, and fails the way its test says."""

    interval_s = 0.01
    fail: Exception | None = None

    def __init__(self, source: Any, settings: Common, _clock: Any) -> None:
        self._source = source
        self._settings = settings

    @staticmethod
    def check(_settings: Common) -> None:
        pass

    async def poll(self, checkpoint: Any) -> Polled:
        if Counter.fail is not None:
            raise Counter.fail
        number = checkpoint or 0
        drafts = [made(self._source, self._settings, "count", n, native_id=f"n{n}") for n in (number, number + 1)]
        return Polled(drafts=drafts, checkpoint=number + 2)


@pytest.fixture
async def counter(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> type[Counter]:
    monkeypatch.setitem(kinds_module.KINDS, "counter", kinds_module.Kind(Common, Counter))
    monkeypatch.setattr(Counter, "fail", None)
    await sources.add("count", "counter", {})
    return Counter


@pytest.mark.usefixtures("counter")
async def test_a_poll_that_was_overtaken_keeps_nothing(log: SqliteLog, sources: Sources, host: SourceHost) -> None:
    before = await sources.get("count")
    await host.poll(TENANT, "count")
    late = Polled(drafts=[made(before, Common(), "count", "late", native_id="late")], checkpoint=99)
    with pytest.raises(Overtaken):
        await Ingress(log).keep(before, late, 0)
    assert (await sources.get("count")).checkpoint == 2
    assert [event.payload for event in await events(log, "count")] == [0, 1]


@pytest.mark.usefixtures("counter")
async def test_a_pause_in_the_middle_of_a_poll_keeps_nothing(log: SqliteLog, sources: Sources) -> None:
    before = await sources.get("count")
    await sources.pause("count")
    with pytest.raises(Overtaken):
        await Ingress(log).keep(before, Polled(drafts=[], checkpoint=99), 0)
    assert (await sources.get("count")).checkpoint is None


async def test_any_error_is_visible_and_moves_nothing(
    counter: type[Counter], log: SqliteLog, sources: Sources, host: SourceHost
) -> None:
    await host.poll(TENANT, "count")
    for error, text in ((Unreachable("gone"), "gone"), (RuntimeError("odd"), "unexpected RuntimeError: odd")):
        counter.fail = error
        assert (await host.poll(TENANT, "count")).error == text
        source = await sources.get("count")
        assert (source.last_error, source.checkpoint) == (text, 2)
    assert len(await events(log, "count")) == 2


@pytest.mark.usefixtures("counter")
async def test_what_the_stream_does_not_take_becomes_an_event_about_it(log: SqliteLog) -> None:
    async def odd_only(stream: str, payload: bytes) -> None:
        assert stream == f"{TENANT}.count"
        if int(payload) % 2 == 0:
            raise Invalid("even")

    await SourceHost(log, log.store.clock, checks=(odd_only,)).poll(TENANT, "count")
    found = await events(log, "count")
    assert [event.topic for event in found] == ["source.bad", "count"]
    assert found[0].payload["error"] == "even"


@pytest.mark.usefixtures("counter")
async def test_two_sources_in_one_stream_do_not_hide_each_other(
    log: SqliteLog, sources: Sources, host: SourceHost
) -> None:
    await log.ensure_stream(f"{TENANT}.shared")
    for name in ("one", "two"):
        await sources.add(name, "counter", {"stream": f"{TENANT}.shared", "topic": "my.topic", "trusted": True})
        await host.poll(TENANT, name)
    found = await events(log, "shared")
    assert [event.native_id for event in found] == ["one:n0", "one:n1", "two:n0", "two:n1"]
    assert {(event.topic, event.trust) for event in found} == {("my.topic", "trusted")}


@pytest.mark.usefixtures("counter")
async def test_an_own_stream_that_was_deleted_is_made_again(log: SqliteLog, host: SourceHost) -> None:
    await host.poll(TENANT, "count")
    await log.delete_stream(f"{TENANT}.count")
    assert (await host.poll(TENANT, "count")).error is None
    assert [event.payload for event in await events(log, "count")] == [2, 3]


async def test_an_operator_sees_the_sources_table(log: SqliteLog, sources: Sources) -> None:
    await sources.add("tick", "timer", {"every_s": 60})
    rows = await log.store.read(lambda db: db.execute("SELECT source, kind, state, stream FROM sources").fetchall())
    assert rows == [("tick", "timer", "running", f"{TENANT}.tick")]


@pytest.mark.parametrize(
    ("name", "kind", "settings", "error"),
    [
        ("a b", "timer", {"every_s": 60}, Invalid),
        ("", "timer", {"every_s": 60}, Invalid),
        ("with.dot", "timer", {"every_s": 60}, Invalid),
        ("journal", "timer", {"every_s": 60}, Invalid),
        ("x-dlq", "timer", {"every_s": 60}, Invalid),
        ("x", "teapot", {}, Invalid),
        ("x", "timer", {"every_s": 60, "stream": f"{TENANT}.missing"}, NotFound),
        ("x", "timer", {"every_s": 60, "stream": "other.tenant.stream"}, Invalid),
        ("x", "timer", {"every_s": 60, "payload": "x" * 70_000}, Invalid),
    ],
)
async def test_a_bad_source_is_refused_and_makes_nothing(
    log: SqliteLog, sources: Sources, name: str, kind: str, settings: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await sources.add(name, kind, settings)
    assert await sources.all() == []
    assert await log.streams() == []


async def test_an_id_is_given_once_and_each_tenant_has_its_own(log: SqliteLog, sources: Sources) -> None:
    await sources.add("tick", "timer", {"every_s": 60})
    with pytest.raises(Conflict):
        await sources.add("tick", "timer", {"every_s": 60})
    other = Sources(log, "other.tenant")
    await other.add("tick", "timer", {"every_s": 60})
    await other.remove("tick")
    assert [source.id for source in await sources.all()] == ["tick"]
    with pytest.raises(NotFound):
        await other.pause("tick")


# --- kill -9 ----------------------------------------------------------------------------------------------------------


async def test_a_host_that_is_killed_again_and_again_loses_and_doubles_nothing(tmp_path: Path) -> None:
    data, path = tmp_path / "data", tmp_path / "lines"
    log = SqliteLog.open(data)
    settings = {"path": str(path), "interval_s": 0.05, "rotated": "lines.*"}
    await Sources(log, TENANT).add("lines", "file", settings)
    await log.close()
    rng = random.Random(7)
    written = 0
    command = [sys.executable, str(Path(__file__).with_name("host_process.py")), str(data)]
    for _ in range(8):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:  # noqa: ASYNC220 - it is killed
            assert child.stdout is not None
            assert await asyncio.to_thread(child.stdout.readline) == b"ready\n"
            for _ in range(rng.randrange(2, 12)):
                write(path, *range(written, written + 50))
                written += 50
                await asyncio.sleep(rng.uniform(0, 0.03))
            child.kill()
        if rng.random() < 0.5:
            path.rename(tmp_path / f"lines.{written}")
    log = SqliteLog.open(data)
    host = SourceHost(log, log.store.clock)
    for _ in range(100):
        turn = await host.poll(TENANT, "lines")
        if not turn.receipts and turn.wait_s(log.store.clock.now_us()) > 0:
            break
    assert [event.payload for event in await events(log, "lines")] == list(range(written))
    await log.close()
