from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main

from postbus import __version__, cli, model
from postbus.cli import main
from tests.cli.command_line import (
    COMMANDS,
    Run,
    on_terminal,
    process,
    without_colour,
)
from tools import reference

# --- help and usage ---------------------------------------------------------------------------------------------------


HELP = """
import sys
from postbus.cli import main
for command in sys.argv[1:]:
    code = main([*command.split(), "--help"])
    print(f"\\x1e{code}", end="\\x1e")
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, tuple[str, str]]:
    """The exit code and the help of every command, by one process: a hundred of them would take two minutes."""
    code, printed = on_terminal(*COMMANDS, program=("-c", HELP))
    assert code == 0, printed
    parts = printed.split("\x1e")
    assert len(parts) == 2 * len(COMMANDS) + 1
    return dict(zip(COMMANDS, zip(parts[1::2], parts[0::2], strict=False), strict=True))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_narrow_terminal_and_shows_examples(command: str, helps: dict[str, tuple[str, str]]) -> None:
    code, printed = helps[command]
    shown = without_colour(printed)
    assert code == "0"
    assert f"Usage: postbus {command}" in shown
    assert f"$ postbus {command}" in shown
    assert "--json" in shown or command in {"dlq", "spool", "keys", "quota", "topics"}
    assert max(map(len, shown.splitlines())) <= 80


def test_help_lists_every_command(run: Run) -> None:
    done = run("--help")
    names = {command.split()[0] for command in COMMANDS}
    assert all(re.search(rf"^\W*{name} ", done.out, re.MULTILINE) for name in names)
    bare = run(code=2)
    assert bare.out.split() == done.out.split()
    assert bare.err == ""


def test_version(run: Run) -> None:
    assert run("--version").out == f"postbus {__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["appnd"], "Did you mean 'append'"),
        (["--data", "x", "streams"], "No such option: --data"),
        (["append"], "Missing argument 'STREAM'"),
        (["append", "orders"], "give the JSON value or --file PATH"),
        (["append", "orders", "1", "--file", "-"], "give the JSON value or --file PATH"),
        (["append", "orders", "--file", "missing.jsonl"], "missing.jsonl"),
        (["append", "orders", "1", "--header", "a"], "'a' is not NAME=VALUE"),
        (["append", "orders", "1", "--header", "a=1", "--header", "a=2"], "given twice"),
        (["append", "a.b", "1"], "exactly 3 tokens"),
        (["append", "orders", "1", "--data", ""], "folder is empty"),
        (["append", "orders", "1", "--topic", "a.*"], "wildcard"),
        (["append", "orders", "1", "--occurred-at", "yesterday"], "not an instant"),
        (["append", "orders", "1", "--metadata", "[]"], "JSON object"),
        (["append", "orders", "1", "--header", "postbus.x=1"], "reserved prefix"),
        (["read", "orders", "--commit"], "needs --consumer"),
        (["read", "orders", "--consumer", "a", "--from", "1"], "starts at its cursor"),
        (["read", "orders", "--from", "first"], "'first' is not an offset"),
        (["read", "orders", "--limit", "0"], "--limit"),
        (["streams", "--create"], "needs a STREAM"),
        (["streams", "orders", "--partitions", "2"], "goes with --create"),
        (["streams", "orders", "--create", "--partitions", "9999"], "at most 1024 partitions"),
        (["consumers", "--create", "a"], "give a STREAM"),
        (["consumers", "orders", "--create", "a", "--delete", "a"], "one of --create, --reset, --delete"),
        (["consumers", "orders", "--reset", "a"], "--start"),
        (["consumers", "orders", "--start", "latest"], "--start"),
        (["consumers", "orders", "--create", "a", "--start", "soon"], "not an instant"),
        (["publish", "order.paid"], "Missing argument 'JSON'"),
        (["publish", "order.*", "1"], "wildcard"),
        (["publish", "order.paid", "1", "--tenant", "a"], "exactly 3 tokens"),
        (["publish", "order.paid", "1", "--header", "postbus.x=1"], "reserved prefix"),
        (["tail", "a.>.b"], "has > before its end"),
        (["tail", "--limit", "-1"], "--limit"),
        (["events", "--topic", "a..b"], "token"),
        (["events", "--since", "yesterday"], "neither an age like 10m nor an instant"),
        (["events", "--status", "lost"], "'lost' is not one of"),
        (["requeue"], "Missing argument 'EVENT'"),
        (["dlq", "lst"], "No such command 'lst'"),
        (["dlq", "replay"], "name dead letters, or choose them"),
        (["dlq", "replay", "a-dlq/0/1", "--rate", "0"], "--rate"),
        (["compact", "--older-than", "30"], "'30' is no age"),
        (["compact", "--vacuum", "--dry-run"], "a dry run changes nothing"),
        (["demo", "--seconds", "0"], "--seconds"),
    ],
)
def test_wrong_usage_is_refused_in_one_line_and_makes_nothing(
    run: Run, data: Path, words: list[str], message: str
) -> None:
    done = run(*words, code=2)
    first, *hints = done.err.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert all(hint.startswith("hint: ") for hint in hints)
    assert len(hints) <= 1
    assert done.out == ""
    refused = run(*words, "--json", code=2)
    assert refused.out == ""
    assert {"code", "message", "hint"} <= refused.error.keys()
    assert message in refused.error["message"]
    assert not data.joinpath("postbus.db").exists() or words[0] == "streams"


# --- exit codes -------------------------------------------------------------------------------------------------------

EXPECTED = {
    "CorruptLog": 3, "NotFound": 4, "Conflict": 5, "IdempotencyConflict": 5, "StorageError": 6, "StorageFull": 6,
    "StorageFailed": 6, "StoreBusy": 6, "AlreadyServed": 6, "Invalid": 2, "LimitExceeded": 2, "InvalidPayload": 2,
    "OffsetOutOfRange": 2, "PostbusError": 1, "Backpressure": 1, "LeaseLost": 1, "RequestTimeout": 1, "Unreachable": 7,
}  # fmt: skip
ERRORS = [kind for kind in vars(model).values() if inspect.isclass(kind) and issubclass(kind, model.PostbusError)]


def example_of(kind: Any) -> Any:
    """An error of that kind, with something for whatever it needs."""
    needed = {
        name: 7 if parameter.annotation == "int" else name
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
    }
    return kind("no", **needed)


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_has_its_exit_code(kind: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    error = example_of(kind)
    error.hint = "do this"

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("postbus.cli.options.open_node", fail)
    code = next(EXPECTED[base.__name__] for base in kind.__mro__ if base.__name__ in EXPECTED)
    assert run("streams", code=code).err == "error: no\nhint: do this\n"
    facts = run("streams", "--json", code=code).error
    assert facts.items() >= {"code": kind.code, "message": "no", "hint": "do this"}.items()


def test_an_unexpected_error_shows_no_traceback_unless_asked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("at last")

    monkeypatch.setattr("postbus.cli.options.open_node", fail)
    assert run("streams", code=1).err.startswith("error: unexpected ZeroDivisionError: at last\nhint: ")
    monkeypatch.setenv("POSTBUS_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["streams"])


def test_a_folder_that_cannot_be_used(run: Run, tmp_path: Path) -> None:
    tmp_path.joinpath("file").write_text("")
    assert "error: cannot make a store" in run("append", "orders", "1", "--data", "file/x", code=6).err


@pytest.mark.parametrize(
    "words",
    [
        ["read", "orders"],
        ["streams"],
        ["consumers"],
        ["lag"],
        ["verify"],
        ["backup", "b"],
        ["tail"],
        ["tail", "--follow"],
        ["events"],
        ["subscriptions"],
        ["subscriptions", "--delete", "a", "--yes"],
        ["requeue", "1"],
        ["trace", "a"],
        ["dlq", "list"],
        ["dlq", "show", "a-dlq/0/1"],
        ["dlq", "replay", "a-dlq/0/1"],
        ["dlq", "purge", "--yes"],
        ["stats"],
        ["compact"],
        ["publish", "order.paid", "1", "--no-create"],
    ],
)
def test_looking_never_makes_a_store(run: Run, data: Path, words: list[str]) -> None:
    assert "there is no store in" in run(*words, code=4).err
    assert not data.exists()
    assert not Path("b").exists()


def test_output_that_cannot_be_written_is_said(data: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = process("append", "orders", "1", stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert (done.returncode, done.stderr) == (1, b"error: the output cannot be written: No space left on device\n")
    assert data.exists()


def test_every_command_takes_json_and_has_examples() -> None:
    found = dict(reference.commands(typer.main.get_command(cli.app), "postbus"))
    assert tuple(found) == ("postbus", *(f"postbus {name}" for name in COMMANDS))
    for path, command in found.items():
        group = hasattr(command, "commands")
        assert group or any("--json" in parameter.opts for parameter in command.params), path
        assert f"$ {path}" in command.epilog
