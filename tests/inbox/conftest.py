from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.inbox.post import Post

MEMORY = Path("/dev/shm")  # noqa: S108 - where there is a disk in memory


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A place for a store, in memory where that is possible."""
    if not MEMORY.is_dir():
        yield tmp_path / "store"
        return
    made = Path(tempfile.mkdtemp(prefix="postbus-", dir=MEMORY))
    yield made / "store"
    shutil.rmtree(made)


@pytest.fixture
async def post(folder: Path) -> AsyncIterator[Post]:
    """A running post office with an agent ``ann``."""
    async with Post(folder) as made:
        await made.agent()
        yield made
