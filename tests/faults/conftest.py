"""The ground that campaigns stand on."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")  # noqa: S108 - where there is a disk in memory; campaigns make thousands of stores


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Path]:
    """A folder to make stores in, in memory where that is possible."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="postbus-", dir=MEMORY))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
