"""Ways to run a command: in this process, as its own process, on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMANDS = (
    "demo", "publish", "tail", "events", "subscriptions", "requeue", "trace",
    "dlq", "dlq list", "dlq show", "dlq replay", "dlq purge",
    "spool", "spool status", "spool drain", "filter", "filter test",
    "schemas", "schemas add", "schemas list", "schemas show", "schemas delete", "schemas bind", "schemas unbind",
    "agents", "agents create", "agents list", "agents show", "agents remove", "agents targets",
    "agents revive", "agents subscribe", "agents subscriptions", "agents unsubscribe", "agents reset", "agents lag",
    "inbox", "inbox read", "inbox ack", "inbox wait", "inbox watch", "inbox send", "inbox entries", "inbox flush",
    "inbox receipts", "timers", "timers add", "timers list", "timers remove", "timers pause", "timers resume",
    "sources", "sources add", "sources list", "sources show", "sources pause", "sources resume", "sources remove",
    "sources poll", "sources run", "deliveries", "deliveries send", "deliveries actions", "deliveries invoke",
    "deliveries list", "deliveries show", "deliveries retry", "deliveries run",
    "host", "extensions", "doctor", "new-extension",
    "serve", "topics", "topics create", "topics list", "topics show", "topics delete",
    "keys", "keys create", "keys list", "keys revoke", "keys rotate",
    "quota", "quota set", "quota list", "quota clear",
    "append", "read", "streams", "consumers", "lag",
    "verify", "salvage", "backup", "restore", "copy", "stats", "compact",
    "pipeline", "pipeline archive", "pipeline verify", "pipeline status", "pipeline ingest", "pipeline replay",
    "pipeline validate", "pipeline report", "pipeline run", "pipeline backfill", "pipeline hand-over",
)  # fmt: skip
JOURNAL = "local.default.journal"
ORDERS = "local.default.orders"
TIMEOUT_S = 60


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> Any:
        return json.loads(self.err)["error"]


Run = Callable[..., Done]
Wait = Callable[[str], str]


def process(*words: str | bytes, given: bytes = b"", **more: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a command as its own process, as a shell does."""
    command = [sys.executable, "-m", "postbus", *words]
    more = {"capture_output": True} | more
    return subprocess.run(command, input=given, timeout=TIMEOUT_S, check=False, **more)


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command that goes on; killed at the end if it is still there."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "postbus", *words]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as child:
        try:
            yield child
        finally:
            child.kill()


def next_line(child: subprocess.Popen[bytes]) -> bytes:
    assert child.stdout is not None
    assert select.select([child.stdout], [], [], TIMEOUT_S)[0], "nothing came"
    return child.stdout.readline()


@contextmanager
def beside(data: Path) -> Iterator[Wait]:
    """The program ``office`` on a store; gives the function that waits until it prints a line that begins so."""
    command = [sys.executable, str(Path(__file__).with_name("office.py")), str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as child:

        def wait(beginning: str) -> str:
            while not (line := next_line(child).decode()).startswith(beginning):
                assert line, "it ended"
            return line.rstrip()

        try:
            wait("ready")
            yield wait
            child.terminate()
            assert child.wait(TIMEOUT_S) == 0
        finally:
            child.kill()


def on_terminal(
    *words: str, columns: int = 80, given: str = "", program: Sequence[str] = ("-m", "postbus")
) -> tuple[int, str]:
    """Run a command on a terminal of its own, type what is given; returns its exit code and all it printed there."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color"}
    command = [sys.executable, *program, *words]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as child:
        os.close(slave)
        os.write(master, given.encode())
        printed = b""
        try:
            while block := os.read(master, 65536):
                printed += block
        except OSError:  # the other side is closed
            pass
        finally:
            os.close(master)
    return child.returncode, printed.decode().replace("\r\n", "\n")


def without_colour(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def spoil(data: Path, *texts: bytes) -> None:
    """Change one letter of each text wherever the database keeps it; pages keep copies of rows that have moved."""
    path = data / "postbus.db"
    content = path.read_bytes()
    for text in texts:
        assert text in content
        content = content.replace(text, bytes([text[0] ^ 1]) + text[1:])
    path.write_bytes(content)
