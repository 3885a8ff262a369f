"""The servers that the tests and `make services` run."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import running_kafka, running_nats

ROOT = Path(__file__).parents[1]
TOOL = str(ROOT / "tools" / "services.py")

pytestmark = pytest.mark.xdist_group("kafka")


def listens(url: str) -> bool:
    host, _, port = url.rpartition("/")[2].partition(":")
    with socket.socket() as tried:
        return tried.connect_ex((host, int(port))) == 0


@pytest.fixture
def needed() -> None:
    """Skips or fails, as the suite does, when a server cannot be had."""
    running_nats()
    running_kafka()


@pytest.mark.usefixtures("needed")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_command_runs_both_until_it_is_stopped(end: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, TOOL], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        urls = [process.stdout.readline().strip() for _ in range(2)]
        assert [url.partition("://")[0] for url in urls] == ["nats", "kafka"]
        assert all(listens(url) for url in urls)
        assert "Ctrl-C" in process.stdout.readline()
        process.send_signal(end)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    assert not any(listens(url) for url in urls)


@pytest.mark.parametrize(("java", "sentence"), [(False, "Java 17"), (True, "Maven")])
def test_what_is_missing_is_said_in_one_sentence(tmp_path: Path, java: bool, sentence: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    if java:
        (folder / "java").touch(mode=0o755)
    ran = subprocess.run(
        [sys.executable, TOOL, "fetch"],
        env={"PATH": str(folder), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert sentence in ran.stderr


def test_it_is_the_same_server_after_a_crash_and_a_pause() -> None:
    server = running_nats()
    url = server.url
    server.kill()
    assert not server.running
    assert not listens(url)
    assert running_nats() is server
    assert server.url == url
    assert listens(url)
    server.pause()
    assert running_nats() is server
    server.restart()
    assert server.running
