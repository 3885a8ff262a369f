from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command_line import JOURNAL, Run, Wait, on_terminal, without_colour

LETTERS = [f"{JOURNAL}-dlq/0/0", f"{JOURNAL}-dlq/0/1"]


def letters(run: Run, *words: str) -> dict[str, str]:
    """The dead letters that fit: id -> state."""
    return {entry["id"]: entry["state"] for entry in run("dlq", "list", *words, "--json").json["dead_letters"]}


# --- list and show ----------------------------------------------------------------------------------------------------


def test_list(worked: Run) -> None:
    header, *rows = worked("dlq", "list").out.splitlines()
    assert header.split() == ["ID", "SUBSCRIPTION", "TOPIC", "REASON", "AGE", "ERROR"]
    assert [row.split()[:4] for row in rows] == [
        [f"journal-dlq/0/{n}", "fragile", f"bad.{'ab'[n]}", "max_attempts"] for n in range(2)
    ]
    assert rows[0].endswith(r"ValueError: cannot take\x1b[31m {'n': 1}")
    first = worked("dlq", "list", "--json").json["dead_letters"][0]
    assert first.items() >= {"id": LETTERS[0], "subscription": "fragile", "topic": "bad.a", "state": "open"}.items()
    assert first.items() >= {"origin": f"{JOURNAL}/0/3", "reason": "max_attempts", "attempts": 2}.items()
    assert first["payload"] == {"n": 1}


@pytest.mark.usefixtures("worked")
def test_list_fits_a_narrow_terminal() -> None:
    _, printed = on_terminal("dlq", "list")
    lines = without_colour(printed).splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= 80


def test_list_filters(worked: Run) -> None:
    assert list(letters(worked)) == LETTERS
    assert list(letters(worked, "--subscription", "fragile", "--topic", "*.b")) == [LETTERS[1]]
    assert letters(worked, "--subscription", "witness") == letters(worked, "--reason", "loop") == {}
    assert list(letters(worked, "--reason", "max_attempts", "--limit", "1")) == [LETTERS[0]]
    worked("dlq", "replay", "journal-dlq/0/0")
    assert letters(worked) == {LETTERS[1]: "open"}
    assert letters(worked, "--all") == {LETTERS[0]: "replayed", LETTERS[1]: "open"}
    assert worked("dlq", "list", "--topic", "x").err == "no open dead letters\n"
    assert worked("dlq", "list", "--all", "--topic", "x").err == "no dead letters\n"
    worked("dlq", "list", "--topic", "x..y", code=2)


def test_show(worked: Run) -> None:
    facts = dict(line.split(maxsplit=1) for line in worked("dlq", "show", "journal-dlq/0/1").out.splitlines())
    assert facts.items() >= {"id": LETTERS[1], "state": "open", "origin": f"{JOURNAL}/0/4"}.items()
    assert facts.items() >= {"subscription": "fragile", "attempts": "2", "correlation": "case-7"}.items()
    assert facts.items() >= {"payload": '{"n":2}', "source": "worker"}.items()
    shown = worked("dlq", "show", LETTERS[1], "--json").json
    assert shown["error"] == "ValueError: cannot take\x1b[31m {'n': 2}"
    assert shown["event"]["headers"]["postbus.dlq.origin_offset"] == "4"
    for missing in ("journal-dlq/0/9", "journal/0/0", "nonsense"):
        assert "there is no dead letter" in worked("dlq", "show", missing, code=4).err


# --- replay -----------------------------------------------------------------------------------------------------------


def test_replay_one_or_those_that_fit(worked: Run) -> None:
    assert worked("dlq", "replay", LETTERS[0]).out == "replayed 1 dead letter\n"
    assert "was replayed already" in worked("dlq", "replay", "journal-dlq/0/0", code=5).err
    worked("dlq", "replay", "journal-dlq/0/9", code=4)
    worked("dlq", "replay", "journal-dlq/0/1", "--topic", ">", code=2)
    assert letters(worked) == {LETTERS[1]: "open"}
    assert worked("dlq", "replay", "--topic", "nothing").out == "replayed 0 dead letters\n"
    done = worked("dlq", "replay", "--topic", ">", "--rate", "100", "--json").json
    assert done == {"replayed": 1, "passed_over": 0}
    assert worked("subscriptions", "--json").json["subscriptions"][0].items() >= {"waiting": 2, "dead": 0}.items()


def test_a_running_process_takes_up_what_is_replayed(worked: Run, running: Wait) -> None:
    worked("dlq", "replay", "--subscription", "fragile")  # still broken: both die again
    while set(letters(worked, "--all").values()) != {"open", "replayed"} or len(letters(worked)) != 2:
        pass
    again = worked("dlq", "list", "--json").json["dead_letters"]
    assert [(entry["origin"], entry["attempts"]) for entry in again] == [(f"{JOURNAL}/0/3", 2), (f"{JOURNAL}/0/4", 2)]
    Path("fixed").touch()
    worked("dlq", "replay", "--subscription", "fragile", "--rate", "50")
    assert {running("took"), running("took")} == {f"took bad.a {JOURNAL}/0/3", f"took bad.b {JOURNAL}/0/4"}
    assert letters(worked) == {}


# --- purge ------------------------------------------------------------------------------------------------------------


def test_purge_asks_first(worked: Run) -> None:
    error = worked("dlq", "purge", "--json", code=2).error
    assert error["hint"] == "give --yes to do it unasked"
    code, printed = on_terminal("dlq", "purge", given="n\n")
    assert (code, "Put away 2 open dead letters for good? [y/N]" in printed) == (1, True)
    assert letters(worked) == dict.fromkeys(LETTERS, "open")
    code, printed = on_terminal("dlq", "purge", given="y\n")
    assert (code, printed.endswith("purged 2 dead letters\n")) == (0, True)
    assert letters(worked) == {}


def test_purge_keeps_a_record_and_a_copy(worked: Run) -> None:
    done = worked("dlq", "purge", "journal-dlq/0/0", "--export", "out.jsonl", "--yes", "--json").json
    assert done == {"purged": 1, "exported": "out.jsonl"}
    (kept,) = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert kept.items() >= {"id": LETTERS[0], "subscription": "fragile", "payload": {"n": 1}}.items()
    assert kept["event"]["headers"]["postbus.dlq.reason"] == "max_attempts"
    (audit,) = worked("tail", "audit.>", "--json").lines
    assert (audit["topic"], audit["source"]) == ("audit.dlq.purged", "cli")
    assert audit["payload"] == {
        "count": 1,
        "letters": [LETTERS[0]],
        "subscriptions": {"fragile": 1},
        "reasons": {"max_attempts": 1},
    }
    assert letters(worked) == {LETTERS[1]: "open"}
    assert worked("events", "--status", "failed", "--json").json["events"][0]["topic"] == "bad.b"


def test_a_file_that_exists_is_not_written_over_and_nothing_is_purged(worked: Run) -> None:
    Path("out.jsonl").write_text("precious")
    worked("dlq", "purge", "--export", "out.jsonl", "--yes", code=5)
    worked("dlq", "purge", "--export", "no/such/folder", "--yes", code=6)
    assert Path("out.jsonl").read_text() == "precious"
    assert letters(worked) == dict.fromkeys(LETTERS, "open")


@pytest.mark.parametrize("words", [["--topic", "nothing"], ["--subscription", "witness"]])
def test_purging_nothing_needs_no_yes_and_leaves_no_record(worked: Run, words: list[str]) -> None:
    assert worked("dlq", "purge", *words).out == "purged 0 dead letters\n"
    assert worked("tail", "audit.>").out == ""
