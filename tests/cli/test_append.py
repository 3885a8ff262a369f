from __future__ import annotations

import json
import re
import signal
from pathlib import Path

from tests.cli.command_line import (
    ORDERS,
    TIMEOUT_S,
    Run,
    next_line,
    on_terminal,
    process,
    started,
    without_colour,
)

# --- append -----------------------------------------------------------------------------------------------------------


def test_append_and_read(run: Run) -> None:
    assert run("append", "orders", '{"item": "tea"}').out == f"appended {ORDERS}/0/0\n"
    assert run("append", ORDERS, '"second"', "--key", "k").out == f"appended {ORDERS}/0/1\n"
    first, second = run("read", "orders").out.splitlines()
    assert re.fullmatch(r'0/0  \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z  orders  source=cli  {"item": "tea"}', first)
    assert second.endswith('  source=cli  key=k  "second"')


def test_every_field_comes_back(run: Run) -> None:
    payload = '{"a" : 1.0e2,\t"big": 123456789012345678901234567890, "ü😀": "\\u00e9\\ud83d\\ude00"}'
    words = ["--topic", "a.b", "--source", "github:o/r", "--key", "k", "--native-id", "n", "--variant", "v"]
    words += ["--header", "x=1", "--header", "y=a=b"]
    words += ["--metadata", '{"m": [1]}', "--correlation-id", "c", "--occurred-at", "2026-01-31T13:00:00+01:00"]
    receipt = run("append", "orders", payload, *words, "--json").json
    assert receipt.items() >= {"id": f"{ORDERS}/0/0", "stream": ORDERS, "partition": 0, "offset": 0}.items()
    assert receipt.items() >= {"duplicate": False, "durability": "full"}.items()
    out = run("read", "orders", "--json").out
    assert f'"payload":{payload},' in out
    event = json.loads(out)
    assert event.items() >= {"topic": "a.b", "source": "github:o/r", "key": "k", "native_id": "n"}.items()
    assert event.items() >= {"variant": "v", "headers": {"x": "1", "y": "a=b"}, "metadata": {"m": [1]}}.items()
    assert event.items() >= {"correlation_id": "c", "occurred_at": "2026-01-31T12:00:00Z"}.items()
    assert event["created_at"] == receipt["created_at"]


def test_the_same_native_id_twice(run: Run) -> None:
    run("append", "orders", "1", "--native-id", "n")
    assert run("append", "orders", "1", "--native-id", "n").out == f"already there: {ORDERS}/0/0\n"
    assert run("append", "orders", "1", "--native-id", "n", "--json").json["duplicate"] is True
    assert run("append", "orders", "2", "--native-id", "n", "--json", code=5).error["offset"] == 0
    assert run("streams", "--json").json["streams"][0]["count"] == 1


def test_a_refused_payload_makes_nothing(run: Run, data: Path) -> None:
    error = run("append", "orders", '{"a": NaN}', "--json", code=2).error
    assert (error["code"], error["position"]) == ("invalid_payload", 6)
    run("append", "orders", "[" * 100 + "]" * 100, code=2)
    assert not data.exists()
    assert b"UTF-8 at byte 1" in process("append", "orders", b'"\xff"').stderr


def test_no_create(run: Run, data: Path) -> None:
    run("append", "orders", "1", "--no-create", code=4)
    assert not data.exists()
    run("append", "orders", "1")
    run("append", "others", "1", "--no-create", code=4)
    assert [stream["name"] for stream in run("streams", "--json").json["streams"]] == [ORDERS]


def test_a_large_payload_from_stdin(run: Run) -> None:
    big = b'{\n "text": "' + "é".encode() * 500_000 + b'"\n}'
    assert process("append", "orders", "-", given=big).returncode == 0
    assert process("append", "orders", "-", given=b'"' + b"x" * 1_100_000 + b'"').returncode == 2
    (event,) = run("read", "orders", "--json").lines
    assert event["payload"] == json.loads(big)
    assert "--json shows all" in without_colour(on_terminal("read", "orders")[1])


# --- append --file ----------------------------------------------------------------------------------------------------


def test_a_file_of_lines(run: Run) -> None:
    Path("in.jsonl").write_bytes(b'{"n": 1}\n\n  {"n": 2}\r\n"no end of line"')
    assert run("append", "orders", "--file", "in.jsonl").out == f"appended 3 events to {ORDERS}\n"
    assert [event["payload"] for event in run("read", "orders", "--json").lines] == [
        {"n": 1},
        {"n": 2},
        "no end of line",
    ]
    Path("empty.jsonl").write_bytes(b"\n")
    done = run("append", "orders", "--file", "empty.jsonl", "--json").json
    assert done == {"stream": ORDERS, "lines": 1, "appended": 0, "duplicates": 0}


def test_a_bad_line_takes_its_chunk_along_and_nothing_before(run: Run) -> None:
    lines = [str(number) for number in range(2500)]
    Path("in.jsonl").write_text("\n".join([*lines[:1502], "{bad", *lines[1503:]]))
    done = run("append", "orders", "--file", "in.jsonl", "--native-id", "in", code=2)
    assert done.err.startswith("error: line 1503: payload: ")
    assert done.err.endswith("lines 1 to 1000 are appended, nothing after them: go on from line 1001\n")
    error = run("append", "orders", "--file", "in.jsonl", "--native-id", "in", "--json", code=2).error
    assert (error["line"], error["appended_lines"], error["position"]) == (1503, 1000, 1)
    assert run("streams", "--json").json["streams"][0]["count"] == 1000
    Path("in.jsonl").write_text("\n".join(lines))
    done = run("append", "orders", "--file", "in.jsonl", "--native-id", "in")
    assert done.out == f"appended 1,500 events to {ORDERS}; 1,000 already there\n"
    assert [event["payload"] for event in run("read", "orders", "--json").lines] == list(range(2500))


def test_a_bad_first_line_makes_nothing(run: Run, data: Path) -> None:
    Path("in.jsonl").write_text("nope\n")
    assert "hint: nothing was appended" in run("append", "orders", "--file", "in.jsonl", code=2).err
    endless = process("append", "orders", "--file", "-", given=b"[" + b" " * 3_000_000)
    assert endless.returncode == 2
    assert endless.stderr.startswith(b"error: line 1: payload: ")
    assert not data.exists()


def test_lines_of_a_pipe_are_appended_as_they_come(run: Run) -> None:
    run("append", "orders", "0")
    with started("append", "orders", "--file", "-") as writer, started("read", "orders", "-f", "--json") as reader:
        assert json.loads(next_line(reader))["payload"] == 0
        assert writer.stdin is not None
        for number in (1, 2):
            writer.stdin.write(b"%d\n" % number)
            writer.stdin.flush()
            assert json.loads(next_line(reader))["payload"] == number
        writer.send_signal(signal.SIGINT)  # while it waits for input
        assert (writer.wait(TIMEOUT_S), writer.stderr and writer.stderr.read()) == (130, b"")
