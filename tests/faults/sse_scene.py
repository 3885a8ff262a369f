"""A real server process that can be killed and started again on the same folder and port."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

import httpx2

__all__ = ["TOPIC", "Service"]

TOPIC = "agents.demo.orders"


class Service:
    """``postbus serve`` on a folder."""

    def __init__(self, data: Path) -> None:
        self.data = data
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.kills = 0
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def start(self) -> None:
        """Start and return once it answers."""
        command = [sys.executable, "-m", "postbus", "serve", "--data", str(self.data), "--json"]
        command += ["--port", str(self.port)]
        self._child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._child.stdout is not None
        assert json.loads(self._child.stdout.readline())["url"] == self.url

    def kill(self) -> None:
        """End it as a power cut would, as far as a process can tell."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            assert self._child.stdout is not None
            self._child.stdout.close()
            self._child = None
            self.kills += 1

    def __enter__(self) -> Self:
        self.start()
        with httpx2.Client(base_url=self.url) as client:
            client.post("/v1/bus/topics", json={"topic": TOPIC})
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def publish(self, first: int, count: int, **payload: object) -> None:
        """Publish numbered events; again and again until it is certain that they are there."""
        events = [
            {"topic": TOPIC, "payload": {"n": number, **payload}, "native_id": f"n{number}"}
            for number in range(first, first + count)
        ]
        while True:
            try:
                with httpx2.Client(base_url=self.url, timeout=60) as client:
                    answer = client.post("/v1/bus/publish/batch", json={"events": events})
            except httpx2.HTTPError:
                continue
            assert answer.status_code == 200, answer.text
            return
