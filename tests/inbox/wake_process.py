"""Processes for tests of wakes: ``python -m tests.inbox.wake_process FOLDER``.

Each line on its standard input forks a process that wakes the agents of the store until it is killed; its number is
written to standard output. Everything is imported already, so that a life costs a fork.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from postbus.clock import SystemClock
from postbus.inbox.signals import Signals
from postbus.inbox.wakes import Waker
from postbus.log.sqlite import SqliteLog
from postbus.outside.web import _trusted


async def wake(folder: str) -> None:
    clock = SystemClock()
    log = SqliteLog.open(folder, clock=clock)
    waker = Waker(log, clock, Signals())
    await waker.start()
    await asyncio.Event().wait()


def main(folder: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _trusted()  # reading the certificates takes longer than everything else
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asyncio.run(wake(folder))
        os.write(1, f"{pid}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1])
