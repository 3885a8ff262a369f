"""The guide and the notebook run as they stand, on the session that the tests share."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from postbus.cli import main, spark_bars
from postbus.spark import session
from postbus.spark.session import Settings
from tests.faults.campaign import FULL

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "spark.md").read_text(encoding="utf-8")
FENCE = re.compile(r"test_guide\.py runs it[^\n]*-->\n\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PARTS = FENCE.findall(GUIDE)


@pytest.fixture(autouse=True)
def here(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and no second Spark: starting one takes longer than everything else."""

    @contextmanager
    def shared(_settings: Settings) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(session, "opened_session", shared)
    monkeypatch.setattr(spark_bars, "opened_session", shared)


def test_the_parts_are_found() -> None:
    assert [language for language, _ in PARTS] == ["python", "python", "console"]


@pytest.mark.parametrize("number", [0, 1])
def test_a_snippet_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int) -> None:
    body = PARTS[number][1].replace('"./', f'"{tmp_path}/')  # the workers of the shared session are in another folder
    (tmp_path / "snippet.py").write_text(body, encoding="utf-8")
    runpy.run_path(str(tmp_path / "snippet.py"), run_name="__main__")
    assert ("order.sent|   334" in capsys.readouterr().out) == (number == 0)


@pytest.mark.skipif(not FULL, reason="part of the full campaign: make faults")
def test_the_snippets_run(tmp_path: Path) -> None:
    """In a process of their own, one after the other: a session ends, and the next one opens."""
    bodies = [body for language, body in PARTS if language == "python"]
    (tmp_path / "snippets.py").write_text("\n".join(bodies), encoding="utf-8")
    command = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "snippets.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "order.sent|   334" in done.stdout
    assert done.stderr == "", "Spark itself is silent"


def test_the_commands_run(tmp_path: Path) -> None:
    (body,) = (body for language, body in PARTS if language == "console")
    for line in body.splitlines():
        words = shlex.split(line.removeprefix("$ "))
        assert words[0] == "postbus"
        assert main(words[1:]) == 0
    assert (tmp_path / "report" / "report.html").exists()


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "spark_notebook.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "the archive holds: True" in printed
    assert "dead letters" in printed
