"""``examples/agent_loop.py`` at work, killed and started again: each item answered once."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from postbus.bus import EventBus
from postbus.clock import SystemClock
from postbus.inbox import Inboxes
from postbus.log import SqliteLog
from tests.inbox.post import PULL, TENANT, until

PROGRAM = Path(__file__).parents[2] / "examples" / "agent_loop.py"
HANDLE = {"kind": "bus", "topic": "answer.given"}
COUNT = 12
ANSWERS = "SELECT CAST(payload AS TEXT) FROM events WHERE topic = 'answer.given' ORDER BY seq"


@contextmanager
def agent(data: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-W", "error", str(PROGRAM), str(data), "ann"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


async def test_the_agent_loop_answers_each_item_once(folder: Path) -> None:
    clock = SystemClock()
    log = SqliteLog.open(folder, clock=clock)
    inboxes = Inboxes(log, clock)
    bus = EventBus(tenant=TENANT, clock=clock, log=log)

    async def acked(count: int) -> bool:
        return (
            len([item for item in await inboxes.items.read(TENANT, "ann", include_acked=True) if item.acked_at_us])
            >= count
        )

    try:
        await inboxes.create_agent(TENANT, "ann", PULL)
        await inboxes.subscribe(TENANT, "ann", "question.*", id="questions")
        for number in range(COUNT):
            await bus.publish("question.asked", "test", " word" * number, delivery_handle=HANDLE)
        with agent(folder) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"done with itm_1\n"
            child.kill()  # in the middle of everything
        with agent(folder) as child:
            await until(lambda: acked(COUNT))
            await inboxes.send(TENANT, "ann", "no reply needed")
            await until(lambda: acked(COUNT + 1))
            child.send_signal(signal.SIGTERM)
            assert child.wait(60) == 0
        answers = await log.store.read(lambda db: [text for (text,) in db.execute(ANSWERS)])
        assert answers == [f'{{"about":"itm_{number + 1:x}","words":{number}}}' for number in range(COUNT)]
    finally:
        await bus.stop()
        await log.close()
