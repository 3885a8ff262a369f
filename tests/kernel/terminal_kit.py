"""A host in a process of its own, with a user at its terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT_S = 90
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Host:
    """``postbus host`` on a terminal; ``printed`` is all that was shown there."""

    def __init__(
        self, folder: Path, *words: str, logs_here: bool = False, environment: dict[str, str] | None = None
    ) -> None:
        self._terminal, other = pty.openpty()
        self._errors = folder / f"stderr-{time.monotonic_ns()}"
        command = [sys.executable, "-W", "error", "-m", "postbus", "host", *words]
        env = {name: value for name, value in os.environ.items() if not name.startswith("POSTBUS_")}
        env |= environment or {}
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=other,
                stdout=other,
                stderr=other if logs_here else errors,
                env=env,
                start_new_session=True,
            )
        os.close(other)
        self._raw = b""
        self._from = 0

    @property
    def printed(self) -> str:
        return CONTROL.sub("", self._raw.decode(errors="replace"))

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def until(self, text: str) -> None:
        """Wait until a text is shown, behind what was waited for before."""
        deadline = time.monotonic() + LIMIT_S
        while (at := self.printed.find(text, self._from)) < 0:
            assert time.monotonic() < deadline, f"{text!r} did not come:\n{self.printed}\n{self.errors}"
            assert self._read(), f"it ended before {text!r}:\n{self.printed}\n{self.errors}"
        self._from = at + len(text)

    def _read(self) -> bool:
        if not select.select([self._terminal], [], [], 0.5)[0]:
            return self.process.poll() is None
        try:
            block = os.read(self._terminal, 65536)
        except OSError:  # nobody is at the other end any more
            return False
        self._raw += block
        return bool(block)

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.kill()
        self.process.wait(LIMIT_S)

    def ended(self) -> int:
        """Wait until it has ended by itself; return its exit code."""
        deadline = time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it did not end:\n{self.printed}\n{self.errors}"
            self._read()
        while self._read():
            pass
        return self.process.returncode

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def hang_up(self) -> None:
        """Close the terminal."""
        if self._terminal >= 0:
            os.close(self._terminal)
            self._terminal = -1

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self.hang_up()


@contextmanager
def hosting(
    folder: Path,
    *words: str,
    greeting: str = "/help says what else there is.",
    logs_here: bool = False,
    environment: dict[str, str] | None = None,
) -> Iterator[Host]:
    """A host that has started; killed at the end if it is still there."""
    host = Host(folder, *words, logs_here=logs_here, environment=environment)
    try:
        host.until(greeting)
        yield host
    finally:
        host.close()


@contextmanager
def on_pipes(folder: Path, *words: str) -> Iterator[tuple[Callable[[bytes], None], Callable[[str], str]]]:
    """A host without a terminal; gives what writes to it, and what waits for a line that begins so."""
    command = [sys.executable, "-W", "error", "-m", "postbus", "host", *words]
    env = {name: value for name, value in os.environ.items() if not name.startswith("POSTBUS_")}
    with (
        (folder / "stderr").open("wb") as errors,
        subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env, bufsize=0
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        given, printed = child.stdin, child.stdout

        def line(beginning: str) -> str:
            while True:
                assert select.select([printed], [], [], LIMIT_S)[0], f"{beginning!r} did not come"
                found = printed.readline().decode()
                assert found, (folder / "stderr").read_text()
                if found.startswith(beginning):
                    return found.rstrip("\n")

        def write(data: bytes) -> None:
            while data:
                data = data[given.write(data) :]

        try:
            line("Postbus")
            yield write, line
            child.terminate()
            assert child.wait(LIMIT_S) == 0
        finally:
            child.kill()
