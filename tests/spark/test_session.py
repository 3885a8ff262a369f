"""The session: Java found or a sentence, one session at a time, and nothing of Spark in the base package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from postbus.model import Invalid, NotFound, PostbusError, Unreachable
from postbus.spark import session
from postbus.spark.session import Settings, find_java, opened_session


def java(folder: Path, says: str, code: int = 0) -> Path:
    """A Java that says which version it is."""
    path = folder / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit {code}\n")
    path.chmod(0o755)
    return folder


def test_java_is_found_by_its_home_or_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = java(tmp_path / "home", 'openjdk version "21.0.2" 2024-01-16')
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert find_java() == (str(home / "bin" / "java"), 21)
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", f"{home / 'bin'}{os.pathsep}/usr/bin:/bin")
    assert find_java()[1] == 21


@pytest.mark.parametrize(
    ("says", "code", "message"),
    [
        ('openjdk version "11.0.1"', 0, "Spark needs Java 17 or newer, and .* is version 11"),
        ('java version "1.8.0_392"', 0, "is version 1"),
        ("nonsense", 0, "is version 0"),
        ("broken", 3, "does not run"),
    ],
)
def test_a_java_that_will_not_do_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, code: int, message: str
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "home", says, code)))
    with pytest.raises(NotFound, match=message) as caught:
        find_java()
    assert "openjdk-17-jre-headless" in (caught.value.hint or "")


def test_no_java_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotFound, match="there is none on PATH"):
        find_java()


@pytest.mark.usefixtures("spark")
def test_a_second_session_is_refused_while_one_runs() -> None:
    with pytest.raises(Invalid, match="a Spark session runs in this process already"), opened_session():
        pass


def test_master_and_remote_exclude_each_other() -> None:
    settings = Settings(master="local[1]", remote="sc://127.0.0.1")
    with pytest.raises(Invalid, match="exclude each other"), opened_session(settings):
        pass


@pytest.mark.parametrize(
    ("url", "kind", "words"),
    [
        ("sc://127.0.0.1:1", Unreachable, "no Spark Connect server answers at sc://127.0.0.1:1"),
        ("sc://127.0.0.1:1/;user_id=ann", Unreachable, "no Spark Connect server answers"),
        ("http://127.0.0.1:1", Invalid, "is not the address of a Spark Connect server"),
        ("sc://127.0.0.1:port", Invalid, "is not the address of a Spark Connect server"),
    ],
)
def test_a_connect_server_that_is_not_there_is_said_at_once(url: str, kind: type[PostbusError], words: str) -> None:
    with pytest.raises(kind, match=words), opened_session(Settings(remote=url)):
        pass


def test_what_every_session_has(spark: SparkSession) -> None:
    for name, value in session.SQL_SETTINGS.items():
        assert spark.conf.get(name) == value
    assert spark.sparkContext.master == "local[2,4]"
    assert spark.sparkContext.uiWebUrl is None


def test_the_class_archive_is_made_once_and_used_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (option,) = session._class_archive("/usr/bin/java", 17)
    assert option.startswith("-XX:ArchiveClassesAtExit=")
    made = Path(option.partition("=")[2])
    made.write_bytes(b"classes")
    assert session._class_archive("/usr/bin/java", 17)[0].startswith("-XX:ArchiveClassesAtExit="), "may be unfinished"
    os.utime(made, (0, 0))
    option, _ = session._class_archive("/usr/bin/java", 17)
    assert option.startswith("-XX:SharedArchiveFile=")
    assert Path(option.partition("=")[2]).read_bytes() == b"classes"
    assert not made.exists()


def test_the_base_package_never_imports_pyspark() -> None:
    code = "import sys, postbus, postbus.cli, postbus.testing; sys.exit(bool({'pyspark', 'pyarrow'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
