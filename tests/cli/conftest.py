from __future__ import annotations

from pathlib import Path

import pytest

from postbus.cli import main
from tests.cli.command_line import Done, Run


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSTBUS_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


@pytest.fixture
def run(data: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process."""
    assert not data.exists()

    def call(*words: str, code: int = 0) -> Done:
        capsys.readouterr()
        done = Done(main(words), *capsys.readouterr())
        assert done.code == code, done
        assert "Traceback" not in done.err
        return done

    return call


@pytest.fixture
def five(run: Run) -> Run:
    """The command line over a store with the events 0 to 4."""
    Path("five.jsonl").write_text("\n".join("01234"))
    run("append", "orders", "--file", "five.jsonl")
    return run
