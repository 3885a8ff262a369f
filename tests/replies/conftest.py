from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from postbus.inbox.replies import Replies, ReplyRules
from postbus.log import SqliteLog
from postbus.model import RetryPolicy
from postbus.testing import FakeClock
from tests.sources.conftest import Web

TENANT = "local.default"
JOURNAL = f"{TENANT}.journal"
REPO = "octo/hello"
RETRY = RetryPolicy(max_attempts=3, backoff_s=10.0, backoff_s_max=100.0, jitter=0.0)


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    server.answer = lambda _: (200, {}, b"thanks")
    yield server
    server.stop()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def log(tmp_path: Path, clock: FakeClock) -> AsyncIterator[SqliteLog]:
    opened = SqliteLog.open(tmp_path / "data", clock=clock)
    yield opened
    await opened.close()


@pytest.fixture
def replies(log: SqliteLog, clock: FakeClock) -> Replies:
    rules = ReplyRules(commands=frozenset({sys.executable}), allow_private=True)
    return Replies(log, clock, TENANT, rules=rules, retry=RETRY)


def hook(web: Web) -> dict[str, Any]:
    return {"kind": "webhook", "url": f"{web.url}/in"}


async def journal(log: SqliteLog) -> list[Any]:
    return await log.fetch(JOURNAL, 0, 0, 1000)
