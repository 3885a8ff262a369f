"""The commands of the pipeline, from the command line down to Spark and the store."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from postbus.cli import main, spark_bars
from postbus.spark.session import Settings
from tests.cli.command_line import Done
from tests.spark.mail import TENANT, Mail
from tests.spark.office import ORDERS, Office

JOURNAL = f"{TENANT}.journal"
SCHEMA = {"type": "object", "properties": {"n": {"maximum": 7}}}


def process(*words: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "postbus", *words]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=False)


class Commands:
    """The command line in this process, on the session that the tests share."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str, code: int = 0) -> Done:
        self._capsys.readouterr()
        done = Done(main(["pipeline", *words]), *self._capsys.readouterr())
        assert done.code == code, done
        assert "Traceback" not in done.err
        assert "\tat " not in done.err
        return done


@pytest.fixture
def run(
    spark: SparkSession,
    office: Office,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Commands:
    @contextmanager
    def shared(_settings: Settings) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(spark_bars, "opened_session", shared)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTBUS_DATA", str(office.data))
    return Commands(capsys)


def test_from_a_dump_to_a_report(run: Commands, office: Office, tmp_path: Path) -> None:
    rows = [{"topic": "order.paid", "source": "old", "payload": {"n": n}} for n in range(12)]
    (tmp_path / "dump.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\nrubbish\n")
    done = run("ingest", "dump.jsonl", "--into", "orders", "--json").json
    assert (done["appended"], done["duplicates"], done["refused"]) == (12, 0, 1)
    assert "rubbish" in Path(done["quarantine"]).read_text()
    assert "appended 0 events" in run("ingest", "dump.jsonl", "--into", "orders").out

    assert run("archive").out == "archived 17 events in 1 batch\n"
    assert run("archive").out == "nothing is new\n", "its own record is no news"
    assert run("verify", "--json").json["ok"]
    status = run("status", "--json").json
    assert {part["key"]: part["archived"] for part in status["partitions"]}[f"{ORDERS}/0"] == 12
    assert [(each["job"], each["state"]) for each in status["runs"]] == [("archive", "finished")] + [
        ("ingest", "finished")
    ] * 2
    shown = run("status").out
    assert f"{ORDERS}/0" in shown
    assert "archive" in shown

    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    checked = run("validate", "orders", "--schema", "schema.json", "--json").json
    assert (checked["checked"], checked["refused"]) == (12, 4)
    assert run("validate", "orders", "--schema", "schema.json").out.startswith("4 events of 12 would have been refused")

    trimmed = run("archive", "--trim", "--stream", "orders", "--json").json
    assert trimmed["trimmed"][0]["removed"] == 12
    assert office.events() == []
    again = run(
        "replay", "--into", "back", "--stream", "orders", "--filter", '{"expr": "payload.n < 5"}', "--json"
    ).json
    assert again["appended"] == 5
    assert [event.payload["n"] for event in office.events("local.default.back")] == list(range(5))

    made = run("report", "--out", "page", "--title", "Mine").out
    assert "the page is" in made
    assert "<title>Mine</title>" in (tmp_path / "page" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["archive"], 4, "there is no store in"),
        (["verify", "--lake", "nowhere"], 4, "there is no archive"),
        (["archive", "--older-than", "1d"], 2, "it goes with --trim"),
        (["ingest", "missing.jsonl", "--into", "orders"], 4, "there is no file missing.jsonl"),
        (["ingest", "x.jsonl", "--into", "a.b"], 2, "exactly 3 tokens"),
        (["ingest", "x.jsonl", "--into", "a", "--format", "xml"], 2, "'xml' is not jsonl, csv or parquet"),
        (["replay", "--into", "x", "--filter", "{"], 2, "the filter is not JSON"),
        (["replay", "--into", "x", "--filter", '{"expr": "payload.n >"}'], 2, ""),
        (["replay", "--into", "x", "--lake", "nowhere"], 4, "there is no archive"),
        (["validate", "orders"], 2, "give one of them"),
        (["validate", "orders", "--schema", "missing.json"], 6, "missing.json"),
        (["report", "--since", "yesterday"], 2, "neither an age like 10m nor an instant"),
        (["status"], 4, "there is no store in"),
    ],
)
def test_wrong_usage_is_refused_in_one_line(
    run: Commands, office: Office, words: list[str], code: int, message: str
) -> None:
    if words[0] not in {"archive", "status"}:
        office.stream()
    done = run(*words, code=code)
    first, *hints = done.err.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert len(hints) <= 1
    assert done.out == ""


def test_a_failed_run_is_recorded_with_its_reason(run: Commands, office: Office, tmp_path: Path) -> None:
    office.fill(10)
    run("archive")
    office.fill(10, first=10)
    office.trim(15)
    assert "is archived only up to 10" in run("archive", code=2).err
    latest = run("status", "--json").json["runs"][0]
    assert (latest["state"], latest["job"]) == ("failed", "archive")
    assert "is archived only up to 10" in latest["error"]
    assert "archived" in run("archive", "--accept-gaps").out
    file = next((tmp_path / "postbus-lake").rglob("*.parquet"))
    file.unlink()
    assert run("verify", code=3).err.startswith("error: the lake is damaged")


def test_as_a_process_of_its_own(office: Office, tmp_path: Path) -> None:
    office.fill(10)
    words = ["--data", str(office.data), "--lake", str(tmp_path / "lake"), "--master", "local[1,2]", "--json"]
    done = process("pipeline", "archive", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["events"] == 11
    assert done.stderr == b"", "Spark itself is silent"
    refused = process("pipeline", "archive", *words[:4], "--master", "nonsense")
    assert refused.returncode == 0, "nothing is new, so no Spark is needed"
    office.fill(1, first=10)
    refused = process("pipeline", "archive", *words[:4], "--master", "nonsense")
    assert refused.returncode == 2
    assert refused.stderr.decode().startswith("error: Spark cannot be started with master nonsense")
    assert b"\tat " not in refused.stderr


def test_without_java_the_sentence_says_what_to_install(
    office: Office, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    office.fill(1)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "none"))
    done = process("pipeline", "archive", "--data", str(office.data), "--lake", str(tmp_path / "lake"))
    assert done.returncode == 4
    assert b"Spark needs Java" in done.stderr
    assert b"openjdk-17-jre-headless" in done.stderr


def test_the_settings_file_and_what_beats_it(
    run: Commands, office: Office, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    office.fill(3)
    (tmp_path / "config").mkdir()
    file = tmp_path / "config" / "settings.yaml"
    file.write_text("pipeline:\n  lake: lakes/one\n  master: local[1]\n")
    seen: list[Settings] = []

    @contextmanager
    def watched(settings: Settings) -> Iterator[SparkSession]:
        seen.append(settings)
        yield spark

    monkeypatch.setattr(spark_bars, "opened_session", watched)
    run("archive")
    assert (tmp_path / "lakes" / "one" / "_manifest").is_dir()
    assert (seen[-1].master, seen[-1].memory) == ("local[1]", "1g")
    monkeypatch.setenv("POSTBUS_PIPELINE_LAKE", "two")
    assert run("status", "--json").json["partitions"][0]["archived"] == 0
    assert run("status", "--lake", "lakes/one", "--json").json["partitions"][0]["archived"] > 0
    file.write_text("pipeline:\n  lakes: one\n")
    assert "settings.yaml" in run("status", code=2).err


def test_a_tenant_is_handed_over_and_filters_that_fail_are_counted(run: Commands, office: Office) -> None:
    mail = Mail(office.data)
    mail.agent()
    mail.subscribe("order.*", "old", engine="live")
    mail.subscribe("order.*", "kept", engine="spark")
    assert run("hand-over", "--all", "--to", "spark", "--json").json == {"subscriptions": ["old"], "engine": "spark"}
    mail.subscribe("order.*", "new", engine=None, filter={"expr": "payload.missing > 1"})
    office.fill(30, stream=JOURNAL)
    done = run("run", "--json").json
    assert done["filter_errors"] == {"new": 20}
    office.fill(3, stream=JOURNAL, first=30)
    assert "a filter had no value: new 2" in run("run").out
    assert len(mail.inbox()) == 22
    assert "name subscriptions, or say --all" in run("hand-over", "--to", "live", code=2).err
