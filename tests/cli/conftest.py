from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from postbus.cli import main
from tests.cli import office
from tests.cli.command_line import TIMEOUT_S, Done, Run, Wait, beside


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSTBUS_DATA", str(tmp_path / "data"))
    for name in ("POSTBUS_URL", "POSTBUS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


@pytest.fixture
def run(data: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process."""
    assert not data.exists()

    def call(*words: str, code: int | None = 0) -> Done:
        capsys.readouterr()
        done = Done(main(words), *capsys.readouterr())
        assert code in (None, done.code), done
        assert "Traceback" not in done.err
        return done

    return call


@pytest.fixture
def five(run: Run) -> Run:
    """The command line over a store with the events 0 to 4."""
    Path("five.jsonl").write_text("\n".join("01234"))
    run("append", "orders", "--file", "five.jsonl")
    return run


@pytest.fixture
def worked(run: Run, data: Path) -> Run:
    """The command line over a store in which a job led to a dead letter, and nothing runs any more.

    Events 0 and 1 are jobs, 2 is nobody's business; 3 and 4 derive from the jobs and have failed.
    """

    async def work() -> None:
        bus = office.office(data)
        await bus.publish("job.a", "boss", {"n": 1})
        await bus.publish("job.b", "boss", {"n": 2}, "case-7")
        await bus.publish("idle.talk", "boss", "hm", key="k")
        async with bus:
            deadline = time.monotonic() + TIMEOUT_S
            while len(await bus.dead_letters.find()) < 2:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)

    asyncio.run(work())
    return run


@pytest.fixture
def running(data: Path) -> Iterator[Wait]:
    """A program with a bus on the store; gives the function that waits until it prints a line that begins so."""
    with beside(data) as wait:
        yield wait
