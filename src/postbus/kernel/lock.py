"""One host per data folder: two would both answer the user."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from postbus.model import Conflict, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["host_lock"]


@contextmanager
def host_lock(state_dir: Path) -> Iterator[None]:
    """Hold the kernel's folder; raises ``Conflict`` naming the process that has it. It ends with the process."""
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(state_dir / "host.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StorageError(f"{state_dir} cannot be used: {error.strerror}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
            message = f"another host (process {holder}) runs on {state_dir.parent}"
            raise Conflict(message, hint="stop it, or use another folder with --data") from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)
