"""From the broker into the log, and plugins into /readyz."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from postbus import EventBus
from postbus.broker import Bridge, LocalBroker
from postbus.broker.nats import NatsBroker
from postbus.broker.subjects import TASKFLOW_RESUME, plugin_health
from postbus.log import SqliteLog
from postbus.model import Event, NoResponder, Trust, Unreachable
from tests.broker.nats_server import NatsServer

JOURNAL = "local.default.journal"
PATIENCE_S = 60.0


async def test_what_resumes_a_flow_is_kept_and_handled(tmp_path: Path) -> None:
    broker, bus, got = LocalBroker(), EventBus(tmp_path / "data"), asyncio.Queue[Event]()

    @bus.on(TASKFLOW_RESUME, subscriber_id="flows")
    async def resume(event: Event) -> None:
        got.put_nowait(event)

    async with bus, Bridge(broker, await bus.open()):
        headers = {"native_id": "r-1", "correlation_id": "flow-7", "region": "eu"}
        answer = await broker.request(TASKFLOW_RESUME, {"flow": 7}, headers=headers, timeout_s=PATIENCE_S)
        again = await broker.request(TASKFLOW_RESUME, {"flow": 7}, headers=headers, timeout_s=PATIENCE_S)
        await broker.publish(TASKFLOW_RESUME, {"flow": 8})
        async with asyncio.timeout(PATIENCE_S):
            first, second = await got.get(), await got.get()
    assert answer.payload == again.payload == {"id": first.id}
    assert (first.payload, first.native_id, first.correlation_id) == ({"flow": 7}, "r-1", "flow-7")
    assert (first.headers, first.trust, first.source) == ({"region": "eu"}, Trust.UNTRUSTED, "broker")
    assert second.payload == {"flow": 8}
    assert got.empty()


async def test_what_cannot_be_kept_is_said_and_the_next_is_kept(tmp_path: Path) -> None:
    broker, log = LocalBroker(), SqliteLog.open(tmp_path / "data")
    async with Bridge(broker, log):
        for payload in (1, 2):
            answer = await broker.request(TASKFLOW_RESUME, payload, headers={"native_id": "same"}, timeout_s=PATIENCE_S)
        assert "other content" in answer.payload["error"]
        assert "id" in (await broker.request(TASKFLOW_RESUME, 3, timeout_s=PATIENCE_S)).payload
    with pytest.raises(NoResponder):
        await broker.request(TASKFLOW_RESUME, 4)
    assert [event.payload for event in await log.fetch(JOURNAL, 0, 0, 10)] == [1, 3]
    await log.close()


def serve(data: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "postbus", "serve", "--data", str(data), "--json", "--port", "0", *words]


async def answered(url: str, status: int) -> dict[str, Any]:
    """Wait until /readyz answers with a status."""
    async with asyncio.timeout(PATIENCE_S), httpx2.AsyncClient() as client:
        while (found := await client.get(f"{url}/readyz")).status_code != status:  # noqa: ASYNC110 - it does not call us
            await asyncio.sleep(0.05)
    said: dict[str, Any] = found.json()
    return said


async def test_a_server_is_ready_when_its_plugins_are_well(tmp_path: Path, server: NatsServer) -> None:
    words = serve(tmp_path / "data", "--broker", server.url, "--plugin", "browser")
    broker = NatsBroker(server.url)
    await broker.start(wait_s=PATIENCE_S)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:  # noqa: ASYNC220 - short
        try:
            assert child.stdout is not None
            url = json.loads(await asyncio.to_thread(child.stdout.readline))["url"]
            silent = (await answered(url, 503))["error"]
            assert (silent["code"], silent["message"]) == ("plugin_unwell", "silent or not well: browser")
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        kept = await broker.request(TASKFLOW_RESUME, {"flow": 1})
                        break
                    except (NoResponder, Unreachable):  # it has not connected yet
                        await asyncio.sleep(0.05)
            assert kept.payload == {"id": f"{JOURNAL}/0/0"}
            await broker.publish(plugin_health("browser"), {"ok": True})
            assert (await answered(url, 200))["status"] == "ready"
            await broker.publish(plugin_health("browser"), {"ok": False, "error": "/secret/path"})
            assert "secret" not in str(await answered(url, 503))
            child.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(child.wait, PATIENCE_S) == 0
        finally:
            child.kill()
    await broker.close()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--plugin", "browser"), "plugins are heard of by a broker"),
        (("--plugin", "a.b", "--broker", "nats://127.0.0.1:1"), "has a dot"),
        (("--broker", "http://127.0.0.1:1"), "not the address of a NATS server"),
    ],
)
def test_a_broker_that_makes_no_sense_is_refused(tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    done = subprocess.run(serve(tmp_path / "data", *words), capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert sentence in json.loads(done.stderr.splitlines()[-1])["error"]["message"]
