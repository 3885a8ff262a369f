from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_line import Run, process

EVENT: dict[str, Any] = {
    "topic": "order.paid",
    "payload": {"total": 40, "items": [1, 2]},
    "headers": {"postbus.hops": "1"},
}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "event.json"
    path.write_text(json.dumps(EVENT))
    return str(path)


def test_an_event_of_the_log(run: Run) -> None:
    run("publish", "order.paid", '{"total": 40}', "--source", "shop")
    spec = '{"payload": {"total": [40, 50]}, "expr": "payload.total > 10 && source == \'shop\'"}'
    done = run("filter", "test", spec, "--id", "journal/0/0", "--json")
    assert done.json == {
        "matches": True,
        "reasons": [
            {"part": "payload", "wanted": "total: [40,50]", "holds": True, "found": "40"},
            {"part": "expr", "wanted": "payload.total > 10", "holds": True, "found": "true"},
            {"part": "expr", "wanted": "source == 'shop'", "holds": True, "found": "true"},
        ],
    }
    assert run("filter", "test", "{}", "--id", "journal/0/0").out == "match\n"
    run("filter", "test", "{}", "--id", "journal/0/1", code=4)
    run("filter", "test", "{}", "--id", "nonsense", code=2)


def test_an_event_in_a_file_that_does_not_match(run: Run, file: str) -> None:
    spec = "{\"expr\": \"payload.total > 50 && payload.gone == 1 && headers['postbus.hops'] == '1'\"}"
    done = run("filter", "test", spec, "--event", file, code=1)
    assert done.out.splitlines() == [
        "no match",
        "  ✗ expr: payload.total > 50  → false",
        "  ✗ expr: payload.gone == 1  → error: there is no field 'gone'",
        "  ✓ expr: headers['postbus.hops'] == '1'  → true",
    ]


def test_stdin(file: str) -> None:
    done = process("filter", "test", '{"payload": {"items": 2}}', "--event", "-", given=Path(file).read_bytes())
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, b"match")
    done = process("filter", "test", "-", "--event", file, given=b'{"payload": {"items": 3}}')
    assert (done.returncode, done.stdout.splitlines()[0]) == (1, b"no match")


def test_a_bad_filter_is_refused_with_its_position(run: Run, file: str) -> None:
    done = run("filter", "test", '{"expr": "payload.total >"}', "--event", file, "--json", code=2)
    assert done.error.items() >= {"code": "invalid_filter", "line": 1, "column": 16}.items()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["{}"], 2),
        (["{}", "--id", "journal/0/0", "--event", "-"], 2),
        (["-", "--event", "-"], 2),
        (["{", "--event", "event.json"], 2),
        (["[]", "--event", "event.json"], 2),
        (["{}", "--event", "missing.json"], 6),
    ],
)
def test_usage(run: Run, file: str, words: list[str], code: int) -> None:
    assert file
    run("filter", "test", *words, code=code)


@pytest.mark.parametrize(
    "text",
    ["[]", "1", "{}", '{"payload": 1, "headers": 1}', '{"payload": 1, "topic": ">"}', '{"payload": 1, "key": ""}'],
)
def test_a_bad_event_is_refused(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    run("filter", "test", "{}", "--event", str(tmp_path / "bad.json"), code=2)
