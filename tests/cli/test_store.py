from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.command_line import (
    Run,
    on_terminal,
    process,
    spoil,
    without_colour,
)

# --- verify, salvage, backup, restore ---------------------------------------------------------------------------------


@pytest.fixture
def marked(run: Run) -> Run:
    """The command line over a store with two streams of 100 events that can be told apart."""
    for stream in ("a", "b"):
        Path("in.jsonl").write_text("".join(f'"{stream}-needle-{number:03}"\n' for number in range(100)))
        run("append", stream, "--file", "in.jsonl")
    run("read", "a", "--consumer", "c", "--commit", "--limit", "60")
    return run


def test_verify_finds_nothing_wrong(marked: Run) -> None:
    assert marked("verify").out == "all is well: 200 events in 2 partitions\n"
    done = marked("verify", "--json").json
    assert done == {"ok": True, "events": 200, "partitions": 2, "problems": [], "accepted": []}


def test_verify_names_the_first_bad_offset_of_each_partition(marked: Run, data: Path) -> None:
    spoil(data, b"a-needle-041", b"a-needle-017", b"b-needle-033")
    done = marked("verify", code=3)
    header, *rows = (re.split(r"  +", line) for line in done.out.splitlines())
    assert header == ["STREAM", "PARTITION", "FIRST BAD", "WHAT"]
    assert [row[:3] for row in rows] == [["local.default.a", "0", "17"], ["local.default.b", "0", "33"]]
    assert re.search(r"^error: damage found at local\.default\.a/0/17: .*\nhint: .*restore.*salvage", done.err)
    done = marked("verify", "--json", code=3)
    found = {(problem["stream"], problem["offset"]) for problem in done.json["problems"]}
    assert done.json["ok"] is False
    assert found == {("local.default.a", 17), ("local.default.b", 33)}
    assert (done.error["stream"], done.error["partition"], done.error["offset"]) == ("local.default.a", 0, 17)
    assert marked("verify", "--accept", code=3).out != ""


def test_salvage_keeps_what_is_intact(marked: Run, data: Path, tmp_path: Path) -> None:
    spoil(data, b"a-needle-017")
    assert marked("salvage", str(data), "saved").out == (
        "salvaged 199 events of 2 streams and 1 consumer to saved; 1 event lost\n"
    )
    assert marked("salvage", str(data), "more", "--json").json.items() >= {"events": 199, "lost": 1}.items()
    marked("salvage", str(data), "saved", code=5)
    marked("salvage", "nowhere", "other", code=4)
    saved = ("--data", str(tmp_path / "saved"))
    marked("verify", *saved)
    events = marked("read", "a", *saved, "--from", "16", "--limit", "3", "--json").lines
    assert [event["topic"] for event in events] == ["a", "postbus.lost", "a"]
    assert events[2]["payload"] == "a-needle-018"
    assert marked("lag", "a", "c", *saved, "--json").json["consumers"][0]["total_lag"] == 40


def test_a_lost_anchor_is_refused_until_it_is_accepted(marked: Run, data: Path) -> None:
    data.joinpath("anchor").unlink()
    assert "verify --accept" in marked("lag", code=3).err
    assert "anchor" in marked("verify", code=3).out
    assert marked("verify", "--accept").out.splitlines()[-1] == "all is well: 200 events in 2 partitions"
    assert marked("verify").out == "all is well: 200 events in 2 partitions\n"
    assert marked("append", "a", "1").out == "appended local.default.a/0/100\n"


def test_a_shortened_log_is_refused_until_it_is_accepted(marked: Run, data: Path) -> None:
    old = data.joinpath("postbus.db").read_bytes()
    marked("append", "a", "1")
    data.joinpath("postbus.db").write_bytes(old)
    (problem,) = marked("verify", "--json", code=3).json["problems"]
    assert (problem["stream"], problem["offset"]) == ("local.default.a", 100)
    marked("append", "a", "2", code=3)
    (accepted,) = marked("verify", "--accept", "--json").json["accepted"]
    assert accepted == problem
    assert marked("append", "a", "2").out == "appended local.default.a/0/100\n"


@pytest.mark.parametrize("content", [b"", b"garbage" * 5000, None])
def test_a_database_that_is_none(marked: Run, data: Path, content: bytes | None) -> None:
    path = data / "postbus.db"
    path.write_bytes(path.read_bytes()[:20_000] if content is None else content)
    for words in (
        ["verify"],
        ["verify", "--accept"],
        ["lag"],
        ["append", "a", "1"],
        ["restore", str(data), "--data", "r"],
    ):
        assert marked(*words, code=3).err.startswith("error: ")
    assert not Path("r", "postbus.db").exists()


def test_backup_and_restore(marked: Run, data: Path) -> None:
    assert re.fullmatch(r"copied \S+ [kM]?B to copy\n", marked("backup", "copy").out)
    assert marked("backup", "other", "--json").json.keys() == {"source", "target", "bytes"}
    marked("backup", "copy", code=5)
    marked("append", "a", "1")
    marked("restore", "copy", code=5)
    assert marked("restore", "copy", "--data", "back").out == "restored 200 events in 2 partitions to back\n"
    facts = marked("restore", "copy", "--data", "back2", "--json").json
    assert facts == {"source": "copy", "target": "back2", "events": 200, "partitions": 2}
    assert marked("read", "b", "--data", "back").out == marked("read", "b").out
    assert marked("append", "a", "1", "--data", "back").out == "appended local.default.a/0/100\n"
    marked("restore", "nowhere", "--data", "x", code=4)
    spoil(data.parent / "copy", b"b-needle-033")
    assert marked("restore", "copy", "--data", "x", "--json", code=3).error["offset"] == 33
    assert not Path("x").exists()


@pytest.mark.usefixtures("marked")
def test_progress_is_shown_on_a_terminal_only() -> None:
    code, printed = on_terminal("verify")
    assert code == 0
    assert "verifying" in printed
    assert without_colour(printed).splitlines()[-1] == "all is well: 200 events in 2 partitions"
    assert process("verify").stderr == b""
