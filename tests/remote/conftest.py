"""Every kind of remote, and folders that follow it: what any test opens there is a copy of that remote."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from postbus.log.sqlite.mirror import SAVE_FACT
from postbus.store import Store
from postbus.testing import BusKit
from tests.inbox.conftest import MEMORY
from tests.memory_upstream import serve
from tests.services import fresh_prefix, running_kafka, running_nats

REMOTES = [
    "memory",
    pytest.param("nats", marks=pytest.mark.xdist_group("nats")),
    pytest.param("kafka", marks=pytest.mark.xdist_group("kafka")),
]


def remote_url(kind: str) -> str:
    """Return the address of a remote that nobody has used."""
    if kind == "memory":
        return serve()[1]
    server = running_nats() if kind == "nats" else running_kafka()
    return f"{server.url}/{fresh_prefix()}"


def bind(folder: Path, url: str) -> None:
    """Have a folder follow a remote before anything else happens in it."""
    store = Store.open(folder)
    store._db.execute(SAVE_FACT, (url,))
    store._close()


@pytest.fixture
def remote(request: pytest.FixtureRequest) -> str:
    """The address of a remote of its own for each test; on memory unless a test is parametrised with more kinds."""
    return remote_url(getattr(request, "param", "memory"))


@pytest.fixture
def bound(remote: str) -> Callable[[Path], Path]:
    """What binds a folder to the remote of the test."""

    def made(folder: Path) -> Path:
        if not (folder / "postbus.db").exists():
            bind(folder, remote)
        return folder

    return made


@pytest.fixture
def tmp_path(tmp_path: Path, bound: Callable[[Path], Path]) -> Path:
    """The folder of a test, and `data` in it, follow its remote."""
    bound(tmp_path / "data")
    return bound(tmp_path)


@pytest.fixture
def folder(bound: Callable[[Path], Path]) -> Iterator[Path]:
    """The folder of a test of inboxes, which follows its remote."""
    made = Path(tempfile.mkdtemp(prefix="postbus-", dir=MEMORY if MEMORY.is_dir() else None))
    yield bound(made / "store")
    shutil.rmtree(made)


@pytest.fixture(autouse=True)
def kits(monkeypatch: pytest.MonkeyPatch, bound: Callable[[Path], Path]) -> None:
    """The kit of a test of the bus follows its remote, too."""
    make = BusKit._make

    def made(kit: BusKit) -> Any:
        bound(Path(str(kit._path)))
        return make(kit)

    monkeypatch.setattr(BusKit, "_make", made)
