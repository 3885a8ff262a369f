"""The kernel's report on disk: what another process, such as ``postbus doctor``, can know of a running host."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from postbus.kernel.contract import KernelReport

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["is_alive", "read_report", "write_report"]

NAME = "status.json"


def write_report(state_dir: Path, report: KernelReport) -> None:
    """Replace the report, whole."""
    state_dir.mkdir(parents=True, exist_ok=True)
    fresh = state_dir / f".{NAME}.{os.getpid()}"
    fresh.write_bytes(msgspec.json.encode(report))
    fresh.replace(state_dir / NAME)


def read_report(state_dir: Path) -> KernelReport | None:
    """Return the last report; None when there is none, or none that can be read."""
    try:
        return msgspec.json.decode((state_dir / NAME).read_bytes(), type=KernelReport)
    except (OSError, msgspec.MsgspecError):
        return None


def is_alive(report: KernelReport) -> bool:
    """Say whether the process that wrote a report is still there and had not stopped."""
    if not report.running:
        return False
    try:
        os.kill(report.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
