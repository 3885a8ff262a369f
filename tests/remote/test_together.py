"""What many publish at once through one node: it goes together, and everyone gets an answer of their own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from postbus.bus.outlet import TURN_S
from postbus.log import ReplicaLog
from postbus.model import Draft, Receipt, Refused, StreamSettings, Unreachable
from tests.conformance.log_suite import fact
from tests.memory_upstream import MemoryServer, serve
from tests.remote.conftest import REMOTES
from tests.remote.nodes import STREAM, node, payloads, until


def watched(log: ReplicaLog) -> list[int]:
    """Return a list that gets the size of each append to the remote."""
    sizes: list[int] = []
    append = log.upstream.append

    async def counted(stream: Any, drafts: Sequence[Draft], *rest: Any) -> list[Receipt]:
        sizes.append(len(drafts))
        return await append(stream, drafts, *rest)

    log.upstream.append = counted  # type: ignore[method-assign,assignment]
    return sizes


def refusing(log: ReplicaLog, bad: bytes) -> None:
    """Have the remote take everything but one payload, and say so only after it has taken the others."""
    append = log.upstream.append

    async def picky(stream: Any, drafts: Sequence[Draft], ids: Sequence[str], now_us: int) -> list[Receipt]:
        good = [at for at, draft in enumerate(drafts) if draft.payload_json != bad]
        receipts = await append(stream, [drafts[at] for at in good], [ids[at] for at in good], now_us)
        if len(good) < len(drafts):
            raise Refused("not that one")
        return receipts

    log.upstream.append = picky  # type: ignore[method-assign,assignment]


def hold_first(server: MemoryServer, go_on: asyncio.Event) -> None:
    """Have the next append wait, and no later one."""
    turns = itertools.count()

    async def first_waits() -> None:
        if next(turns) == 0:
            await go_on.wait()

    server.before_append = first_waits


@pytest.mark.parametrize("remote", REMOTES, indirect=True)
async def test_what_is_ready_together_goes_together_in_its_order(
    remote: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with node(remote, tmp_path_factory.mktemp("node")) as log:
        await log.ensure_stream(STREAM)
        sizes = watched(log)
        calls = [log.append(STREAM, [fact(2 * number), fact(2 * number + 1)]) for number in range(60)]
        answers = await asyncio.gather(*calls)
        assert [[receipt.offset for receipt in answer] for answer in answers] == [[2 * n, 2 * n + 1] for n in range(60)]
        assert not any(receipt.duplicate or receipt.spooled for answer in answers for receipt in answer)
        assert sizes == [120]
        assert await payloads(log) == list(range(120))


async def test_a_long_line_goes_in_several_parts(tmp_path_factory: pytest.TempPathFactory) -> None:
    async with node(serve()[1], tmp_path_factory.mktemp("node")) as log:
        await log.ensure_stream(STREAM)
        sizes = watched(log)
        await asyncio.gather(*(log.append(STREAM, [fact(n) for n in range(700)]) for _ in range(3)))
        await log.append(STREAM, [fact(n) for n in range(1500)])
        assert sizes == [700, 700, 700, 1500]


async def test_identities_keep_their_verdicts_and_their_place_among_others(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with node(serve()[1], tmp_path_factory.mktemp("node")) as log:
        await log.ensure_stream(STREAM, StreamSettings())
        drafts = [fact(0), fact(1, native_id="a"), fact(2), fact(1, native_id="a"), fact(4, native_id="a"), fact(5)]
        answers = await asyncio.gather(*(log.append(STREAM, [each]) for each in drafts), return_exceptions=True)
        said = [answer[0].duplicate if isinstance(answer, list) else type(answer).__name__ for answer in answers]
        assert said == [False, False, False, True, "IdempotencyConflict", False]
        assert await payloads(log) == [0, 1, 2, 5]


async def test_one_that_is_refused_refuses_nobody_else(tmp_path_factory: pytest.TempPathFactory) -> None:
    async with node(serve()[1], tmp_path_factory.mktemp("node")) as log:
        await log.ensure_stream(STREAM)
        refusing(log, b"3")
        calls = [log.append(STREAM, [fact(2 * n), fact(2 * n + 1)]) for n in range(4)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers[1], Refused)
        fine = [answer for answer in answers if isinstance(answer, list)]
        found = await log.fetch(STREAM, 0, 0, 100)
        assert [[found[receipt.offset].payload for receipt in answer] for answer in fine] == [[0, 1], [4, 5], [6, 7]]
        assert [event.payload for event in found] == [0, 1, 2, 4, 5, 6, 7]


async def test_who_stops_waiting_has_published_all_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    async with node(serve()[1], tmp_path_factory.mktemp("node")) as log:
        await log.ensure_stream(STREAM)
        tasks = [asyncio.ensure_future(log.append(STREAM, [fact(n)])) for n in range(5)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[2], asyncio.CancelledError)
        assert await payloads(log) == [0, 1, 2, 3, 4]


async def test_nobody_waits_for_an_answer_that_others_wait_for(tmp_path: Path) -> None:
    server, url = serve()
    go_on = asyncio.Event()
    async with node(url, tmp_path / "node") as log:
        await log.ensure_stream(STREAM)
        hold_first(server, go_on)
        first = asyncio.ensure_future(log.append(STREAM, [fact(0)]))
        await until(lambda: log.sending)
        assert (await log.append(STREAM, [fact(1)]))[0].offset == 0
        assert not first.done()
        go_on.set()
        assert (await first)[0].offset == 1


@pytest.mark.parametrize("late_s", [0.0, 2 * TURN_S])
async def test_what_somebody_has_stopped_waiting_for_is_not_overtaken(tmp_path: Path, late_s: float) -> None:
    server, url = serve()
    go_on = asyncio.Event()
    async with node(url, tmp_path / "node") as log:
        await log.ensure_stream(STREAM)
        hold_first(server, go_on)
        first = asyncio.ensure_future(log.append(STREAM, [fact(0)]))
        await until(lambda: log.sending)
        await asyncio.sleep(late_s)
        first.cancel()
        second = asyncio.ensure_future(log.append(STREAM, [fact(1)]))
        await asyncio.wait([second], timeout=3 * TURN_S)
        assert not second.done()
        go_on.set()
        assert (await second)[0].offset == 1
        assert await payloads(log) == [0, 1]


async def test_closing_waits_for_what_is_on_its_way(tmp_path: Path) -> None:
    server, url = serve()
    go_on = asyncio.Event()
    async with node(url, tmp_path / "node") as log:
        await log.ensure_stream(STREAM)
        server.before_append = go_on.wait  # type: ignore[assignment]
        first = asyncio.ensure_future(log.append(STREAM, [fact(0)]))
        await until(lambda: log.sending)
        later = [asyncio.ensure_future(log.append(STREAM, [fact(n)])) for n in (1, 2)]
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(log.close())
        await asyncio.sleep(0)
        go_on.set()
        await closing
        assert [(await each)[0].offset for each in (first, *later)] == [0, 1, 2]


async def test_an_outage_sends_all_of_them_to_the_spool_in_their_order(tmp_path: Path) -> None:
    server, url = serve()
    async with node(url, tmp_path / "node") as log:
        await log.ensure_stream(STREAM)
        server.stop()
        answers = await asyncio.gather(*(log.append(STREAM, [fact(n)]) for n in range(30)))
        assert all(answer[0].spooled for answer in answers)
        await server.restart()
        await until(lambda: not log.away)

        async def there() -> bool:
            return await payloads(log) == list(range(30))

        await until(there)


async def test_without_an_answer_about_the_refusal_nobody_is_told_more_than_is_known(tmp_path: Path) -> None:
    server, url = serve()
    async with node(url, tmp_path / "node") as log:
        await log.ensure_stream(STREAM)
        refusing(log, b"1")
        find = log.upstream.find

        async def lost(*parts: Any) -> Any:
            server.stop()
            return await find(*parts)

        log.upstream.find = lost  # type: ignore[method-assign,assignment]
        answers = await asyncio.gather(*(log.append(STREAM, [fact(n)]) for n in range(3)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [Unreachable] * 3
        log.upstream.find = find  # type: ignore[method-assign]
        await server.restart()
