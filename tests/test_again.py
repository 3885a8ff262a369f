"""What `make test` does with tests that fail: a few are tried once more alone, and that is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.scene import ROOT

# Fails when another test runs in the same process, as one does that is not patient enough for its neighbours.
SHY = """
import sys
def test_before(): sys.neighbour = True
def test_shy(): assert not hasattr(sys, "neighbour")
"""


def gate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "gate.py"), "-q", "--rootdir", str(folder), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_what_passes_alone_passes_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SHY, "utf-8")
    ended = gate(tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.endswith("passed only alone, which is a bug to be mended:\ntest_it.py::test_shy\n")


def test_what_fails_alone_too_fails(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_wrong(): assert False\ndef test_right(): pass\n", "utf-8")
    ended = gate(tmp_path)
    assert ended.returncode == 1
    assert "passed only alone" not in ended.stdout


def test_many_are_not_tried_again(tmp_path: Path) -> None:
    shy = "".join(f"def test_shy{number}(): assert not hasattr(sys, 'neighbour')\n" for number in range(4))
    (tmp_path / "test_it.py").write_text(SHY.replace("def test_shy()", "def test_other()") + shy, "utf-8")
    ended = gate(tmp_path)
    assert ended.returncode == 1
    assert ended.stdout.count("5 failed") == 1
    assert "passed only alone" not in ended.stdout


@pytest.mark.parametrize("arguments", [["--no-such-option"], ["no_such_file.py"], ["-k", "nothing_of_that_name"]])
def test_a_run_that_goes_wrong_by_itself_fails(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "test_it.py").write_text("def test_right(): pass\n", "utf-8")
    assert gate(tmp_path, *arguments).returncode not in (0, 1)


def test_what_an_earlier_run_left_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_wrong(): assert False\n", "utf-8")
    assert gate(tmp_path).returncode == 1
    (tmp_path / "test_it.py").write_text(SHY, "utf-8")
    assert gate(tmp_path).returncode == 0
