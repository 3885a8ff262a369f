from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from postbus import EventBus
from postbus.inbox.replies import Replies
from postbus.log import SqliteLog
from postbus.model import Invalid
from postbus.sources import Sources
from postbus.testing import FakeClock
from tests.replies.conftest import JOURNAL, REPO, TENANT, journal
from tests.sources.conftest import Web


async def test_a_reply_on_the_bus_answers_a_request(log: SqliteLog, clock: FakeClock, tmp_path: Path) -> None:
    bus = EventBus(tmp_path / "bus")
    seen: list[Any] = []

    async def answer(event: Any) -> None:
        handle = event.delivery_handle
        seen.append(await Replies(await bus.open(), bus.clock, TENANT).send(handle, {"pong": event.payload}))

    bus.subscribe("ping", answer, "ponger")
    async with bus:
        event = await bus.request("ping", 7, timeout=60)
    assert event.payload == {"pong": 7}
    assert (seen[0].state, seen[0].result["event"]) == ("sent", event.id)
    assert (await log.streams(), clock.now_us() > 0) == ([], True)


async def test_a_reply_on_a_registered_topic_goes_to_its_stream(replies: Replies, log: SqliteLog) -> None:
    await log.ensure_stream(f"{TENANT}.answers")
    await replies.send({"kind": "bus", "topic": f"{TENANT}.answers", "correlation_id": "c"}, [1])
    (event,) = await log.fetch(f"{TENANT}.answers", 0, 0)
    assert (event.payload, event.correlation_id, event.trust) == ([1], "c", "untrusted")


async def test_a_reply_may_run_a_program_that_is_allowed(replies: Replies, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = (
        f"import os, sys; open({str(out)!r}, 'w').write(os.environ['POSTBUS_DELIVERY'] + sys.stdin.read()); print('ok')"
    )
    reply = await replies.send({"kind": "command", "argv": [sys.executable, "-c", text]}, {"say": "hi"})
    await replies.drain()
    assert (await replies.get(reply.id)).result == {"exit_code": 0, "output": "ok\n"}
    assert await asyncio.to_thread(out.read_text) == f'{reply.id}{{"say":"hi"}}\n'
    bad = await replies.send({"kind": "command", "argv": [sys.executable, "-c", "import sys; sys.exit('no')"]}, 1)
    await replies.drain()
    assert str((await replies.get(bad.id)).error).endswith("exit code 1: no")


@pytest.mark.parametrize(
    "handle",
    [
        None,
        "text",
        {},
        {"kind": "pigeon"},
        {"kind": "webhook"},
        {"kind": "webhook", "url": "file:///etc/passwd"},
        {"kind": "webhook", "url": "http://127.0.0.1/"},
        {"kind": "webhook", "url": "http://169.254.169.254/"},
        {"kind": "webhook", "url": "https://example.com/", "source": "nobody"},
        {"kind": "bus", "topic": "a.*"},
        {"kind": "bus", "topic": "system.user.notify"},
        {"kind": "bus", "topic": "other.tenant.stream"},
        {"kind": "command", "argv": []},
        {"kind": "command", "argv": ["/bin/sh", "-c", "true"]},
        {"kind": "github", "repo": REPO, "number": 1, "source": "nobody"},
        {"kind": "github", "repo": "../..", "number": 1, "source": "repo"},
        {"kind": "github", "repo": REPO, "number": 0, "source": "repo"},
        {"kind": "github", "repo": "mallory/repo", "number": 1, "source": "repo"},
    ],
)
async def test_a_handle_that_may_not_be_used_is_refused_and_changes_nothing(
    log: SqliteLog, clock: FakeClock, handle: Any
) -> None:
    await log.ensure_stream("other.tenant.stream")
    await Sources(log, TENANT).add("repo", "github", {"repo": REPO})
    careful = Replies(log, clock, TENANT)
    with pytest.raises(Invalid):
        await careful.send(handle, "x")
    assert await careful.find() == []
    assert await log.has_stream(JOURNAL) is False or await journal(log) == []


async def test_a_private_address_behind_a_name_is_refused_when_it_is_called(
    log: SqliteLog, clock: FakeClock, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(*_: Any, **_more: Any) -> list[Any]:
        return [(2, 1, 6, "", ("127.0.0.1", 80))]

    careful = Replies(log, clock, TENANT)
    reply = await careful.send({"kind": "webhook", "url": web.url.replace("127.0.0.1", "rebound.example")}, 1)
    monkeypatch.setattr(asyncio.get_running_loop().__class__, "getaddrinfo", resolve)
    await careful.drain()
    done = await careful.get(reply.id)
    assert done.state == "failed"
    assert "private address" in str(done.error)
    assert web.calls == []


async def test_the_source_of_a_webhook_vouches_for_its_own_address_only(
    log: SqliteLog, clock: FakeClock, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_SECRET", "whsec_c2VjcmV0IHNlY3JldA==")
    settings = {"secret_env": "HOOK_SECRET", "reply_url": f"{web.url}/back", "allow_private": True}
    await Sources(log, TENANT).add("hook", "webhook", settings)
    careful = Replies(log, clock, TENANT)
    good = await careful.send({"kind": "webhook", "url": f"{web.url}/back", "source": "hook"}, 1)
    bad = await careful.send({"kind": "webhook", "url": f"{web.url}/admin", "source": "hook"}, 1)
    await careful.drain()
    assert [(await careful.get(one.id)).state for one in (good, bad)] == ["sent", "failed"]
    assert [call.path for call in web.calls] == ["/back"]
    assert web.calls[0].headers["webhook-signature"].startswith("v1,")
