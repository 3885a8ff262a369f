from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

from postbus.inbox.replies import Replies, ReplyRules
from postbus.log import SqliteLog
from postbus.model import PostbusError
from postbus.testing import FakeClock
from tests.replies.conftest import TENANT, hook
from tests.sources.conftest import Web, until


async def test_a_worker_carries_what_comes_while_it_runs(tmp_path: Path, web: Web) -> None:
    log = SqliteLog.open(tmp_path / "real")
    async with Replies(log, log.store.clock, TENANT, rules=ReplyRules(allow_private=True)) as replies:
        sent = [await replies.send(hook(web), number) for number in range(5)]

        async def all_sent() -> bool:
            return all([(await replies.get(reply.id)).state == "sent" for reply in sent])

        await until(all_sent)
    assert [call.body for call in web.calls] == [b"0", b"1", b"2", b"3", b"4"]
    await log.close()


async def test_two_workers_send_each_reply_once(tmp_path: Path, web: Web) -> None:
    log = SqliteLog.open(tmp_path / "real")
    rules = ReplyRules(allow_private=True)
    workers = [Replies(log, log.store.clock, TENANT, rules=rules) for _ in range(2)]
    for number in range(30):
        await workers[0].send({"kind": "webhook", "url": f"{web.url}/{number}"}, number)
    await asyncio.gather(*(worker.drain() for worker in workers))
    assert sorted(call.path for call in web.calls) == sorted(f"/{number}" for number in range(30))
    await log.close()


async def test_a_stale_try_settles_nothing(replies: Replies, web: Web, clock: FakeClock) -> None:
    reply = await replies.send(hook(web), 1)
    (stale,) = await replies._claim()
    clock.advance(61)  # its lease is over
    (fresh,) = await replies._claim()
    assert (stale.reply.attempts, fresh.reply.attempts) == (1, 2)
    await replies._failed(stale.reply, PostbusError("late"))
    assert (await replies.get(reply.id)).error is None
    await replies._carry(fresh)
    assert (await replies.get(reply.id)).state == "sent"


async def test_a_worker_that_is_killed_again_and_again_loses_nothing(tmp_path: Path, web: Web) -> None:
    data = tmp_path / "real"
    log = SqliteLog.open(data)
    rules = ReplyRules(allow_private=True)
    replies = Replies(log, log.store.clock, TENANT, rules=rules)
    rng = random.Random(3)
    failing = random.Random(4)
    web.answer = lambda _: (503, {}, b"") if failing.random() < 0.3 else (200, {}, b"")
    made = [await replies.send({"kind": "webhook", "url": f"{web.url}/{n % 7}"}, n) for n in range(60)]
    command = [sys.executable, str(Path(__file__).with_name("replies_process.py")), str(data), "0.3"]
    for _ in range(6):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:  # noqa: ASYNC220 - it is killed
            assert child.stdout is not None
            assert await asyncio.to_thread(child.stdout.readline) == b"ready\n"
            await asyncio.sleep(rng.uniform(0.02, 0.25))
            child.kill()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:  # noqa: ASYNC220 - it is killed

        async def all_sent() -> bool:
            return all([(await replies.get(reply.id)).state == "sent" for reply in made])

        await until(all_sent)
        child.kill()
    arrived = Counter(call.headers["idempotency-key"] for call in web.calls)
    assert set(arrived) == {reply.id for reply in made}
    for lane in range(7):  # the first arrival of each keeps the order they were accepted in
        keys = list(dict.fromkeys(call.headers["webhook-id"] for call in web.calls if call.path == f"/{lane}"))
        assert keys == [reply.id for reply in made[lane::7]]
    await log.close()
