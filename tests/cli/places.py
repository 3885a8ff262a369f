"""The two places where commands work: a data folder, and a server on such a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.command_line import Run
from tests.server.conftest import RunningServer

__all__ = ["place", "served"]


@pytest.fixture
def served(data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], RunningServer]]:
    """Gives the function that puts the store on a server, where all commands go from then on."""
    running: list[RunningServer] = []

    def serve() -> RunningServer:
        running.append(RunningServer(data))
        monkeypatch.setenv("POSTBUS_URL", running[-1].url)
        return running[-1]

    yield serve
    for server in running:
        server.stop()


@pytest.fixture(params=["folder", "server"])
def place(request: pytest.FixtureRequest, run: Run, served: Callable[[], RunningServer]) -> Run:
    """The command line over an empty store, and over a server on one."""
    if request.param == "server":
        served()
    return run
