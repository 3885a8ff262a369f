"""The one source of time and of ids; swappable in tests and simulation.

Order in Postbus is the offset, never a clock: wall time is data, monotonic time drives leases and timeouts.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from functools import cache
from pathlib import Path
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Time and ids. Every room takes one and never asks the operating system itself."""

    def now_us(self) -> int:
        """Return wall time in microseconds since 1970 (UTC). It may jump in either direction."""

    def monotonic_s(self) -> float:
        """Return seconds that never go back; only differences mean anything."""

    async def sleep(self, seconds: float) -> None:
        """Wait for that much monotonic time."""

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait for an event or for that much monotonic time, whichever is first; say whether it was the event."""

    def new_id(self) -> str:
        """Return an unguessable id of 128 random bits as 32 hexadecimal digits."""

    def boot_id(self) -> str:
        """Return what names the run of the monotonic clock: values of different boots cannot be compared."""


class SystemClock:
    """The operating system's clocks."""

    def now_us(self) -> int:
        """Return wall time in microseconds since 1970 (UTC)."""
        return time.time_ns() // 1_000

    def monotonic_s(self) -> float:
        """Return the monotonic clock in seconds."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep on the event loop."""
        await asyncio.sleep(seconds)

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait on the event loop."""
        if not event.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await event.wait()
            except TimeoutError:
                return False
        return True

    def new_id(self) -> str:
        """Return 128 random bits as hexadecimal digits."""
        try:
            return _ids.pop()
        except IndexError:
            bits = secrets.token_hex(16 * IDS_AHEAD)
            fresh = [bits[start : start + 32] for start in range(0, len(bits), 32)]
            own = fresh.pop()
            _ids.extend(fresh)
            return own

    def boot_id(self) -> str:
        """Return the kernel's boot id, or an id of this process where there is none."""
        return _boot_id()


# Ids that nobody has taken yet: the system is asked for many at a time. A forked process must not take the same ones.
IDS_AHEAD = 64
_ids: list[str] = []
os.register_at_fork(after_in_child=_ids.clear)


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return secrets.token_hex(16)
