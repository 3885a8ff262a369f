"""`postbus serve` as its own process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.server.wire import request, statuses

TIMEOUT_S = 60
TOPIC = "agents.demo.orders"


class Served:
    """A server process and what it announced."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.child = child
        assert child.stdout is not None
        self.said: dict[str, Any] = json.loads(child.stdout.readline() or b"{}")

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.child.send_signal(number)
        _, err = self.child.communicate(timeout=TIMEOUT_S)
        return self.child.returncode, err.decode()


def command(data: Path | str, *words: str) -> list[str]:
    return [sys.executable, "-m", "postbus", "serve", "--data", str(data), "--json", *words]


@contextmanager
def served(data: Path | str, *words: str) -> Iterator[Served]:
    pipe = subprocess.PIPE
    with subprocess.Popen(command(data, *words or ("--port", "0")), stdout=pipe, stderr=pipe) as child:
        try:
            yield Served(child)
        finally:
            if child.poll() is None:
                child.kill()


def refused(data: Path, *words: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(command(data, *words), capture_output=True, timeout=TIMEOUT_S, check=False)
    assert b"Traceback" not in done.stderr
    return done.returncode, json.loads(done.stderr.splitlines()[-1])["error"]


def keys(data: Path, *words: str) -> dict[str, Any]:
    line = [sys.executable, "-m", "postbus", "keys", *words, "--data", str(data), "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(line, capture_output=True, timeout=TIMEOUT_S, check=True).stdout)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_told_and_keeps_everything(tmp_path: Path, number: int) -> None:
    with served(tmp_path / "data") as server, httpx2.Client(base_url=server.said["url"], timeout=TIMEOUT_S) as client:
        assert client.post("/v1/bus/topics", json={"topic": TOPIC}).status_code == 201
        sent = {"topic": TOPIC, "payload": {"word": "unmentioned"}}
        receipt = client.post("/v1/bus/publish", json=sent).json()
        code, err = server.end(number)
    assert code == 0
    lines = [json.loads(line) for line in err.splitlines()]
    assert [line["message"] for line in lines if line["logger"] == "postbus.server"][-2:] == ["stopping", "stopped"]
    assert "unmentioned" not in err
    with served(tmp_path / "data") as server, httpx2.Client(base_url=server.said["url"], timeout=TIMEOUT_S) as client:
        assert client.get(f"/v1/bus/events/{receipt['id']}").json()["payload"] == sent["payload"]
        assert server.end()[0] == 0


def test_a_request_in_flight_is_finished(tmp_path: Path) -> None:
    with served(tmp_path / "data") as server:
        port = int(server.said["url"].rpartition(":")[2])
        with httpx2.Client(base_url=server.said["url"], timeout=TIMEOUT_S) as client:
            assert client.post("/v1/bus/topics", json={"topic": TOPIC}).status_code == 201
        body = json.dumps({"topic": TOPIC, "payload": "late"}).encode()
        whole = request("POST", "/v1/bus/publish", body, expect="100-continue")
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as made:
            made.sendall(whole[:-5])
            assert made.recv(65536).startswith(b"HTTP/1.1 100 ")  # it waits for the rest of the body
            server.child.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + TIMEOUT_S
            while True:  # it no longer listens, and waits for us
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                except OSError:
                    break
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert server.child.poll() is None
            made.sendall(whole[-5:])
            answer = made.recv(65536)
        assert statuses(answer) == [200]
        assert server.child.wait(TIMEOUT_S) == 0
    with served(tmp_path / "data") as server, httpx2.Client(base_url=server.said["url"], timeout=TIMEOUT_S) as client:
        assert client.get(f"/v1/bus/events/{TOPIC}/0/0").json()["payload"] == "late"


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    acked: list[int] = []
    with served(tmp_path / "data") as server, httpx2.Client(base_url=server.said["url"], timeout=TIMEOUT_S) as client:
        assert client.post("/v1/bus/topics", json={"topic": TOPIC}).status_code == 201

        def publish() -> None:
            try:
                for number in range(100_000):
                    answer = client.post("/v1/bus/publish", json={"topic": TOPIC, "payload": number})
                    acked.append(answer.json()["offset"])
            except httpx2.TransportError:
                pass

        thread = threading.Thread(target=publish)
        thread.start()
        while len(acked) < 50:
            assert thread.is_alive(), "the server went away"
            time.sleep(0.01)
        server.child.kill()
        thread.join(TIMEOUT_S)
    with served(tmp_path / "data") as server, httpx2.Client(base_url=server.said["url"], timeout=TIMEOUT_S) as client:
        stored = client.get(f"/v1/bus/topics/{TOPIC}").json()["extents"][0]["high_water_mark"]
        assert acked == list(range(len(acked)))
        assert len(acked) <= stored <= len(acked) + 1
        assert client.get(f"/v1/bus/events/{TOPIC}/0/{acked[-1]}").json()["payload"] == acked[-1]


def test_one_folder_has_one_server(tmp_path: Path) -> None:
    with served(tmp_path / "data") as server:
        code, error = refused(tmp_path / "data", "--port", "0")
        assert (code, error["code"]) == (6, "already_served")
        assert str(server.child.pid) in error["message"]
        assert httpx2.get(server.said["url"] + "/healthz", timeout=TIMEOUT_S).status_code == 200
        server.child.kill()
        server.child.wait(TIMEOUT_S)
    with served(tmp_path / "data") as server:
        assert "url" in server.said


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        code, error = refused(tmp_path / "data", "--port", str(other.getsockname()[1]))
    assert (code, error["code"]) == (1, "cannot_listen")
    assert refused(tmp_path / "data", "--host", "no.such.host.invalid")[1]["code"] == "cannot_listen"
    assert refused(tmp_path / "data", "--durability", "none")[0] == 2


def test_only_this_machine_is_listened_to_without_a_key(tmp_path: Path) -> None:
    data = tmp_path / "data"
    code, error = refused(data, "--host", "0.0.0.0", "--port", "0")  # noqa: S104 - that it is refused is the point
    assert (code, error["code"]) == (2, "invalid")
    assert "postbus keys create" in error["hint"]
    key = keys(data, "create", "--scope", "admin", "--tenant", "agents.demo")["key"]
    with served(data, "--host", "0.0.0.0", "--port", "0") as server:  # noqa: S104 - with a key it may
        port = server.said["url"].rpartition(":")[2]
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}") as client:
            assert client.get("/v1/bus/topics").status_code == 401
            headers = {"authorization": f"Bearer {key}"}
            assert client.get("/v1/bus/topics", headers=headers).status_code == 200
            keys(data, "revoke", key.split("_")[1])
            assert client.get("/v1/bus/topics", headers=headers).status_code == 401


def test_a_unix_socket_is_only_for_its_user(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with served(tmp_path / "data", "--unix", str(path)) as server:
        assert server.said["url"] == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert client.get("/healthz").status_code == 200
        server.child.kill()
        server.child.wait(TIMEOUT_S)
    assert path.exists()
    with served(tmp_path / "data", "--unix", str(path)) as server:  # what a dead server left is replaced
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert client.get("/healthz").status_code == 200
        assert server.end()[0] == 0
    path.unlink(missing_ok=True)
    path.write_text("mine")
    assert refused(tmp_path / "data", "--unix", str(path))[1]["code"] == "cannot_listen"
    assert path.read_text() == "mine"


def test_requests_are_logged_when_asked_for(tmp_path: Path) -> None:
    with served(tmp_path / "data", "--port", "0", "--access-log") as server:
        with httpx2.Client(base_url=server.said["url"], timeout=TIMEOUT_S) as client:
            client.post("/v1/bus/topics", json={"topic": TOPIC})
            client.post("/v1/bus/publish", json={"topic": TOPIC, "payload": "unmentioned"})
        _, err = server.end()
    lines = [json.loads(line) for line in err.splitlines()]
    logged = [(line["method"], line["route"], line["status"]) for line in lines if line["logger"] == "postbus.access"]
    assert logged == [("POST", "/v1/bus/topics", 201), ("POST", "/v1/bus/publish", 200)]
    assert "unmentioned" not in err


def test_the_banner_is_for_people(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "postbus", "serve", "--data", str(tmp_path / "data"), "--port", "0"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    # Unbuffered: what readline has taken in beyond its line would be lost to communicate.
    with subprocess.Popen(line, stdout=pipe, stderr=pipe, env=environment, bufsize=0) as child:
        assert child.stdout is not None
        first = child.stdout.readline().decode()
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=TIMEOUT_S)
        assert child.returncode == 0
    assert first.startswith("Postbus ")
    assert "http://127.0.0.1:" in first
    assert "/docs" in out.decode()
    assert "none yet" in out.decode()
