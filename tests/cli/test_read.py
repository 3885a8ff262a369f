from __future__ import annotations

import json
import os
import select
import signal
from pathlib import Path

import pytest

from tests.cli.command_line import (
    TIMEOUT_S,
    Run,
    next_line,
    on_terminal,
    process,
    started,
    without_colour,
)

# --- read -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "offsets", "remark"),
    [
        ([], [0, 1, 2, 3, 4], ""),
        (["--from", "3"], [3, 4], ""),
        (["--from", "earliest", "--limit", "2"], [0, 1], "3 more after --limit 2\n"),
        (["--limit", "5"], [0, 1, 2, 3, 4], ""),
        (["--from", "latest"], [], "no events there\n"),
        (["--from", "99"], [], "no events there\n"),
        (["--partition", "0", "--from", "4"], [4], ""),
    ],
)
def test_read_from_a_place(five: Run, words: list[str], offsets: list[int], remark: str) -> None:
    done = five("read", "orders", *words)
    assert [line.split()[0] for line in done.out.splitlines()] == [f"0/{offset}" for offset in offsets]
    assert done.err == remark
    assert [event["offset"] for event in five("read", "orders", *words, "--json").lines] == offsets


def test_read_refuses_what_is_not_there(five: Run) -> None:
    five("read", "orders", "--from", "-1", code=2)
    five("read", "orders", "--partition", "1", code=4)
    five("read", "nothing", code=4)
    assert "has no consumer kitchen" in five("read", "orders", "--consumer", "kitchen", code=4).err
    assert five("consumers", "--json").json == {"consumers": []}


def test_a_consumer_reads_on_where_it_committed(five: Run) -> None:
    words = ("read", "orders", "--consumer", "kitchen")
    assert [event["offset"] for event in five(*words, "--commit", "--limit", "2", "--json").lines] == [0, 1]
    for _ in range(2):  # without --commit nothing moves
        assert [event["offset"] for event in five(*words, "--json").lines] == [2, 3, 4]
    five(*words, "--commit")
    assert five(*words, "--commit").err == "no events there\n"
    assert five("lag", "orders", "kitchen", "--json").json["consumers"][0]["total_lag"] == 0


def test_partitions(run: Run) -> None:
    run("streams", "orders", "--create", "--partitions", "3")
    for number in range(12):
        run("append", "orders", str(number), "--key", f"k{number % 4}")
    events = run("read", "orders", "--consumer", "c", "--commit", "--json").lines
    assert sorted(event["payload"] for event in events) == list(range(12))
    places = [(event["partition"], event["offset"]) for event in events]
    assert places == sorted(places)
    for part in {event["partition"] for event in events}:
        only = run("read", "orders", "--partition", str(part), "--json").lines
        assert only == [event for event in events if event["partition"] == part]
    lag = run("lag", "--json").json["consumers"][0]
    assert (len(lag["partitions"]), lag["total_lag"]) == (3, 0)


def test_follow_until_interrupted(five: Run) -> None:
    with started("read", "orders", "--from", "latest", "--follow") as reader:
        assert reader.stdout is not None
        written = 0
        while not select.select([reader.stdout], [], [], 0.1)[0]:  # it starts at the end, whenever that is
            five("append", "orders", '"news"')
            written += 1
            assert written < 1000
        assert next_line(reader).endswith(b'"news"\n')
        reader.send_signal(signal.SIGINT)
        assert (reader.wait(TIMEOUT_S), reader.stderr and reader.stderr.read()) == (130, b"")


def test_what_a_closed_pipe_did_not_take_is_not_committed(run: Run) -> None:
    Path("in.jsonl").write_text(f'"{"x" * 1000}"\n' * 2000)
    run("append", "orders", "--file", "in.jsonl")
    with started("read", "orders", "--consumer", "c", "--commit") as reader:
        next_line(reader)
        assert reader.stdout is not None
        reader.stdout.close()
        assert (reader.wait(TIMEOUT_S), reader.stderr and reader.stderr.read()) == (141, b"")
    assert 1000 < run("lag", "--json").json["consumers"][0]["total_lag"] <= 2000


def test_one_event_is_one_line_and_cannot_steer_a_terminal(run: Run) -> None:
    payload = '{\n  "a": [1,\r\n 2],\n  "c1": "\u009b31m", "turn": "\u202e"\n}'
    run("append", "orders", payload, "--key", "\x1b[31m\nred")
    (event,) = run("read", "orders", "--json").lines
    assert (event["payload"], event["key"]) == (json.loads(payload), "\x1b[31m\nred")
    (line,) = run("read", "orders").out.splitlines()
    assert line.endswith(r'  key=\x1b[31m\nred  { "a": [1, 2], "c1": "\x9b31m", "turn": "\u202e" }')
    _, printed = on_terminal("read", "orders")
    assert without_colour(printed).rstrip("\n") == line


def test_a_character_set_that_lacks_a_character(run: Run) -> None:
    run("append", "orders", '"é😀"')
    shown = process("read", "orders", env=os.environ | {"PYTHONIOENCODING": "latin-1"}).stdout
    assert shown.endswith('"é\\U0001f600"\n'.encode("latin-1"))
    exact = process("read", "orders", "--json", env=os.environ | {"PYTHONIOENCODING": "latin-1"}).stdout
    assert json.loads(exact)["payload"] == "é😀"
