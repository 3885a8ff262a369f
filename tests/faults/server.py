"""Holds the lock between servers until it is killed: ``python -m tests.faults.server FOLDER``."""

from __future__ import annotations

import sys
import time

from postbus.store import Folder, ServeLock

if __name__ == "__main__":
    ServeLock(Folder(sys.argv[1])).acquire()
    print("served", flush=True)  # noqa: T201 - its answer
    time.sleep(600)
