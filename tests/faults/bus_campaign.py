"""Drives the bus's nursery: who lives, what they said, and how long until nothing is left to do."""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from postbus.store import Folder
from postbus.store.database import connect
from tests.faults.bus_nursery import LEASE_S, store_of
from tests.faults.campaign import FULL
from tests.faults.scene import run_python

__all__ = ["PATIENCE_S", "Said", "Town", "query", "unfinished"]

PATIENCE_S = 400.0 if FULL else 90.0

# What is left to do: events above cursors, and rows that wait or run.
LAGS = """
    SELECT c.consumer || ' lags ' || (IFNULL((SELECT max("offset") + 1 FROM events e WHERE e.stream_id = c.stream_id
                                              AND e.partition = c.partition), 0) - c.next_offset)
    FROM cursors c JOIN stream_registry s USING (stream_id)
    WHERE c.consumer <> '_dispatch' AND c.next_offset < (SELECT max("offset") + 1 FROM events e
                                                         WHERE e.stream_id = c.stream_id AND e.partition = c.partition)
"""
OPEN_ROWS = """
    SELECT consumer || '/' || "offset" || ' ' || status || ' attempt ' || attempt || ' alone ' || alone
    FROM delivery_rows WHERE status IN ('waiting', 'processing') ORDER BY 1 LIMIT 20
"""


@dataclass
class Said:
    """What the processes said."""

    acked: dict[int, int] = field(default_factory=dict)
    opened: list[int] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def take(self, line: str) -> None:
        word, *rest = line.split()
        if word == "ack":
            number, offset = int(rest[0]), int(rest[1])
            assert self.acked.setdefault(offset, number) == number, "an offset was acknowledged twice"
        elif word in ("born", "open", "bye", "lost"):
            where = {"born": self.born, "open": self.opened, "bye": self.left, "lost": self.lost}
            where[word].append(int(rest[0]))
        elif word != "busy":
            self.errors.append(line)


class Town:
    """The nursery and those it brought forth. Everybody in it dies with the block."""

    nursery = "tests.faults.bus_nursery"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = Said()
        self.numbers = 0
        self.living: dict[int, str] = {}
        self._seeds = 0
        self._rest = b""

    def __enter__(self) -> Self:
        self.folder.mkdir(exist_ok=True)
        self._process: subprocess.Popen[str] = run_python(self.nursery)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders = self._process.stdin
        self._output = self._process.stdout.fileno()
        self._wait = selectors.DefaultSelector()
        self._wait.register(self._output, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        for pid in list(self.living):
            os.kill(pid, signal.SIGKILL)
        self._wait.close()
        self._process.kill()
        self._process.wait()
        self._orders.close()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def fork(self, role: str) -> int:
        """Bring somebody forth and return the pid once it is there; it may not be open yet."""
        self._seeds += 1
        self.numbers += 100_000  # numbers of a publisher that was killed are never used again
        known = len(self.said.born)
        self._orders.write(f"{role} {self._seeds} {self.numbers} {self.folder}\n")
        self._orders.flush()
        deadline = time.monotonic() + PATIENCE_S
        while len(self.said.born) == known:
            assert time.monotonic() < deadline, "the nursery does not fork"
            self.listen(0.001)
        pid = self.said.born[-1]
        self.living[pid] = role
        return pid

    def listen(self, seconds: float) -> None:
        """Take down what is said for some time; an error ends the test."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._wait.select(left):
                data = os.read(self._output, 1 << 16)
                assert data, "the nursery ended"
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self.said.take(line.decode())
        assert self.said.errors == [], self.said.errors

    def opened(self, pid: int, patience_s: float = PATIENCE_S) -> None:
        """Wait until somebody has the bus open."""
        deadline = time.monotonic() + patience_s
        while pid not in self.said.opened:
            assert time.monotonic() < deadline, f"{self.living[pid]} {pid} does not get the bus open"
            self.listen(0.002)

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself when it was asked to stop
            os.kill(pid, signal.SIGKILL)
        self.gone(pid)

    def gone(self, pid: int, patience_s: float = PATIENCE_S) -> None:
        """Wait until a process is no more."""
        deadline = time.monotonic() + patience_s
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, f"{pid} does not end"
            self.listen(0.001)
        self.living.pop(pid, None)

    def stop(self, pid: int) -> None:
        """End somebody in good order."""
        os.kill(pid, signal.SIGTERM)
        self.gone(pid)
        self.listen(0.05)
        assert pid in self.said.left, f"{pid} did not stop in good order"

    def drain(self, patience_s: float = PATIENCE_S) -> float:
        """Wait until nothing is left to do; return how long that took."""
        began = time.monotonic()
        while left := unfinished(self.folder):
            self.listen(0.1)
            assert time.monotonic() - began < patience_s, f"stuck: {left}"
        return time.monotonic() - began

    def _trouble(self, rolls: random.Random, pid: int) -> None:
        """Sometimes hold a process until its lease is over and let it go on, or ask it to stop just before its end."""
        lot = rolls.random()
        if lot < 0.1:
            os.kill(pid, signal.SIGSTOP)
            self.listen(rolls.uniform(0.5, 2.5) * LEASE_S)
            os.kill(pid, signal.SIGCONT)
        elif lot < 0.2:
            os.kill(pid, signal.SIGTERM)
        self.listen(rolls.uniform(0.0, 0.3) if lot < 0.2 else 0.0)

    def campaign(self, rolls: random.Random, kills: int, crew: tuple[str, ...]) -> int:
        """Keep a crew alive and kill one of it again and again, sometimes all at once; return the kills of workers."""
        done = workers = 0
        for role in crew:
            self.opened(self.fork(role))
        while done < kills:
            self.listen(rolls.uniform(0.0, rolls.choice((0.3, 0.3, 1.5))))
            victims = list(self.living) if rolls.random() < 0.1 else [rolls.choice(list(self.living))]
            for pid in victims:
                role = self.living[pid]
                if role == "worker":
                    self._trouble(rolls, pid)
                    workers += 1
                self.kill(pid)
                done += 1
                if rolls.random() < 0.3:
                    self.listen(rolls.uniform(0.0, 0.1))
                new = self.fork(role)
                if rolls.random() < 0.8:  # otherwise the next kill may come while it starts
                    self.opened(new)
        return workers


def query(folder: Path, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """Ask the store directly, as an operator would."""
    db = connect(Folder(store_of(folder)), write=False)
    try:
        return list(db.execute(statement, values))
    finally:
        db.close()


def unfinished(folder: Path) -> list[str]:
    """Return what is left to do, in words."""
    return [row[0] for statement in (LAGS, OPEN_ROWS) for row in query(folder, statement)]
