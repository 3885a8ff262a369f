"""The command line and the service on a remote log."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx2
import pytest

from tests.cli.command_line import Run
from tests.cli.conftest import run
from tests.memory_upstream import MemoryServer, serve
from tests.server.conftest import RunningServer
from tests.server.test_serve_command import served
from tests.services import NatsServer, fresh_prefix, nats_server

__all__ = ["nats_server", "run"]

TIMEOUT_S = 60.0
TOPIC = "agents.demo.orders"


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture
def server() -> MemoryServer:
    return serve()[0]


@pytest.fixture
def data(tmp_path: Path, server: MemoryServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands work: on a remote, with its copy in this folder."""
    for name in ("POSTBUS_URL", "POSTBUS_KEY"):
        monkeypatch.delenv(name, raising=False)
    from tests.memory_upstream import SERVERS  # noqa: PLC0415 - filled by the fixture above

    name = next(name for name, one in SERVERS.items() if one is server)
    monkeypatch.setenv("POSTBUS_DATA", f"test://{name}/postbus?data={tmp_path / 'node'}")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "node"


def test_commands_work_on_a_remote(run: Run, server: MemoryServer, tmp_path: Path) -> None:
    assert run("publish", "order.paid", '{"n": 1}', "--source", "shop").code == 0
    run("append", "orders", '{"n": 2}')
    assert {*server.lives} == {"local.default.journal", "local.default.orders"}
    (event,) = run("read", "orders", "--json").lines
    assert event["payload"] == {"n": 2}
    assert [line["topic"] for line in run("tail", "order.*", "--json").lines] == ["order.paid"]
    assert "local.default.orders" in run("streams").out
    assert run("verify").out == "all is well: 2 events in 4 partitions\n"
    run("backup", "saved")
    assert run("verify", "--data", "saved").out == "all is well: 2 events in 4 partitions\n"
    assert run("read", "orders", "--data", str(tmp_path / "node"), "--json").lines == [event]


def test_while_the_remote_is_away_commands_read_the_copy_and_keep_what_is_published(
    run: Run, server: MemoryServer
) -> None:
    run("append", "orders", "1")
    server.stop()
    done = run("read", "orders", "--json")
    assert [line["payload"] for line in done.lines] == [1]
    assert "the remote does not answer, so this is about the copy: the remote is down" in done.err
    run("append", "orders", "2")
    assert run("spool", "status", "--json").json["rows"] == 1
    assert "1 event could not be sent" in run("spool", "drain", "--timeout", "0.1", code=7).err
    assert "leave --to out" in run("spool", "drain", "--to", "nats://127.0.0.1:9", code=2).err
    asyncio.run(server.restart())
    assert run("spool", "drain", "--json").json == {"sent": 1, "dead": 0, "left": 0}
    assert [line["payload"] for line in run("read", "orders", "--json").lines] == [1, 2]


def test_drain_needs_a_remote(run: Run) -> None:
    run("append", "orders", "1", "--data", "plain")
    assert "follows no remote log" in run("spool", "drain", "--data", "plain", code=2).err


def test_a_log_is_copied(run: Run, server: MemoryServer) -> None:
    run("append", "orders", "1", "--data", "plain")
    run("append", "letters-dlq", "1", "--data", "plain")
    url = os.environ["POSTBUS_DATA"]
    done = run("copy", "plain", url)
    assert done.out == "copied 1 event of 1 stream; both sides are the same\n"
    assert done.err == "local.default.letters-dlq stays on its node\n"
    again = run("copy", "plain", url, "--json").json
    assert (again["events"], again["known"], [*again["heads"]]) == (0, 1, ["local.default.orders/0"])
    assert run("copy", url, "back").out == "copied 1 event of 1 stream; both sides are the same\n"
    assert run("read", "orders", "--data", "back", "--json").lines == run("read", "orders", "--json").lines
    run("append", "other", "1", "--data", "back")
    assert "has a stream local.default.other" in run("copy", "plain", "back", code=5).err
    assert "there is no store" in run("copy", "nowhere", "back", code=4).err
    assert "no log kind" in run("copy", "ftp://x", "back", code=2).err
    assert "from one place to another" in run("copy", "plain", "plain", code=2).err
    server.stop()
    assert "the remote is down" in run("copy", "plain", url, code=7).err


def test_a_bad_place_is_refused(run: Run) -> None:
    assert "no log kind is called 'redis'" in run("streams", "--data", "redis://x", code=2).err
    assert "memory: ends with the command" in run("streams", "--data", "memory:", code=2).err
    assert "has streams of its own" not in run("streams").err


@pytest.mark.xdist_group("nats")
def test_the_service_says_how_its_remote_is(tmp_path: Path, nats_server: NatsServer) -> None:
    place = f"{nats_server.url}/{fresh_prefix()}?data={tmp_path / 'node'}&answer_s=2"
    server = RunningServer(Path("unused"), place=place)
    try:
        client = server.client
        server.topic(TOPIC)
        receipt = client.post("/v1/bus/publish", json={"topic": TOPIC, "payload": 1}).json()
        assert (receipt["topic"], receipt["offset"], receipt.get("spooled")) == (TOPIC, 0, None)
        assert client.get("/readyz").json() == {"status": "ready", "remote": "closed"}
        nats_server.kill()
        receipt = client.post("/v1/bus/publish", json={"topic": TOPIC, "payload": 2}).json()
        assert (receipt["id"], receipt["topic"], receipt["spooled"]) == ("spool/1", TOPIC, True)
        assert client.get("/readyz").json()["remote"] in {"open", "half_open"}
        numbers = client.get("/metrics").text
        assert 'postbus_breaker_state{name="remote-log"} 0' not in numbers
        assert "postbus_spool_events 1.0" in numbers
        nats_server.start()

        assert server.call(server.hub.log.wait(TOPIC, 0, 1, TIMEOUT_S))
        assert [event.payload for event in server.call(server.hub.log.fetch(TOPIC, 0, 0))] == [1, 2]
    finally:
        server.stop()


@pytest.mark.xdist_group("nats")
def test_serve_takes_the_address_of_a_remote(tmp_path: Path, nats_server: NatsServer) -> None:
    place = f"{nats_server.url.replace('://', '://me:secret@')}/{fresh_prefix()}?data={tmp_path / 'node'}"
    with served(place, "--port", "0") as server:
        assert "secret" not in str(server.said)
        with httpx2.Client(base_url=server.said["url"], timeout=TIMEOUT_S) as client:
            assert client.post("/v1/bus/topics", json={"topic": TOPIC}).status_code == 201
            assert client.post("/v1/bus/publish", json={"topic": TOPIC, "payload": 1}).json()["offset"] == 0
        code, err = server.end(signal.SIGTERM)
    assert code == 0
    assert "secret" not in err
    assert (tmp_path / "node" / "postbus.db").exists()
