from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_line import TIMEOUT_S, Run, next_line, process, started

GOOD = """\
from postbus.kernel import ToolSpec

class Good:
    version = 1

    def get_tools(self):
        return [ToolSpec(name="greet")]

    async def call_tool(self, call):
        return "hello"

    async def invoke(self, task, context):
        return "yes"

    async def send(self, message):
        pass

    channel_id = "nowhere"
"""


def write(folder: Path, name: str, code: str, more: str = "") -> Path:
    made = Path(folder) / name
    made.mkdir(parents=True)
    (made / "manifest.yaml").write_text(f"id: {name}\nentrypoint: main:{name.title()}\n{more}")
    (made / "main.py").write_text(code)
    return made


@pytest.fixture
def project(run: Run) -> Run:
    """One extension that works, one that cannot be imported, one whose manifest is wrong; in ./extensions."""
    folder = Path("extensions")
    write(folder, "good", GOOD, "agent: {integration_mode: orchestrator}\n")
    write(folder, "bad", "import no_such_module\n\nclass Bad:\n    tool = 'paint'\n")
    (folder / "odd").mkdir()
    (folder / "odd" / "manifest.yaml").write_text("id: odd\nentrypoint: main:Odd\ncolour: red\n")
    return run


# --- new-extension ----------------------------------------------------------------------------------------------------


def test_a_new_extension_works_and_its_test_passes(run: Run) -> None:
    done = run("new-extension", "word_count")
    assert "made extensions/word_count: manifest.yaml, main.py, test_word_count.py" in done.out
    test = Path("extensions/word_count/test_word_count.py")
    tried = subprocess.run(
        [sys.executable, "-W", "error", str(test)], capture_output=True, timeout=TIMEOUT_S, check=False
    )
    assert (tried.returncode, tried.stderr) == (0, b"")
    spoiled = test.with_name("main.py")
    spoiled.write_text(spoiled.read_text().replace(".split())\n        # With", ".split()) + 1\n        # With"))
    tried = subprocess.run([sys.executable, str(test)], capture_output=True, timeout=TIMEOUT_S, check=False)
    assert b"AssertionError" in tried.stderr
    (status,) = run("extensions", "--json").json["extensions"]
    assert (status["id"], status["state"], status["provides"]) == ("word_count", "loaded", ["ToolProvider"])


def test_a_new_extension_overwrites_nothing(run: Run) -> None:
    assert run("new-extension", "a1", "--extensions", "mine", "--json").json["folder"] == "mine/a1"
    before = Path("mine/a1/main.py").read_bytes()
    done = run("new-extension", "a1", "--extensions", "mine", code=5)
    assert "is there already" in done.err
    assert Path("mine/a1/main.py").read_bytes() == before


@pytest.mark.parametrize("name", ["", "Word", "1st", "a-b", "../a", "kernel", "a" * 41])
def test_a_name_that_is_none_is_refused(run: Run, name: str) -> None:
    assert "is no name" in run("new-extension", "--", name, code=2).err
    assert not Path("extensions").exists()


# --- looking without a host -------------------------------------------------------------------------------------------


def test_extensions_are_listed_with_what_is_wrong(project: Run) -> None:
    done = project("extensions")
    good, bad, odd = (
        next(line for line in done.out.splitlines() if line.startswith(name)) for name in ("good", "bad", "odd")
    )
    assert good.split()[1] == "loaded"
    assert "No module named 'no_such_module'" in bad
    assert "main.py:1" in bad
    assert "manifest.yaml:3" in odd
    assert "also come with Postbus: echo, " in done.err
    listed = project("extensions", "--json").json
    assert (listed["running"], len(listed["extensions"])) == (False, 3)


def test_the_doctor_tells_the_bus_from_an_extension_that_did_not_load(project: Run) -> None:
    project("publish", "a.b", "{}")
    done = project("doctor", code=1)
    assert done.out.startswith("bus         healthy: ")
    assert "problem     bad failed to load: " in done.out
    assert "problem     odd failed to be read: " in done.out
    asked = project("doctor", "--tool", "paint", code=1)
    assert "paint is missing though the bus is healthy: bad names it, and is error: " in asked.out
    other = project("doctor", "--tool", "dance", "--json", code=1).json
    assert other["tool"]["available"] is False
    assert "these did not load: " in other["tool"]["reason"]
    assert {finding["about"] for finding in other["findings"]} == {"extension", "host"}


def test_all_is_well_when_it_is(run: Run) -> None:
    assert run("doctor", "--with", "echo").out.endswith("all is well\n")
    missing = run("doctor", "--with", "echo", "--tool", "dance", code=1)
    assert "dance is not there: no host runs; no extension names it" in missing.out


def test_a_store_that_cannot_be_used_is_the_bus_s_trouble(run: Run, data: Path) -> None:
    run("publish", "a.b", "{}")
    for name in ("postbus.db", "postbus.db-wal"):
        (data / name).write_bytes(b"no database at all" * 1000)
    done = run("doctor", "--with", "echo", code=1)
    assert done.out.startswith("bus         unusable")


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "there are no extensions to run"),
        (["--config", "wrong.yaml", "--with", "echo"], "wrong.yaml:2"),
        (["--config", "none.yaml", "--with", "echo"], "none.yaml"),
        (["--data", "", "--with", "echo"], "empty"),
    ],
)
def test_a_host_that_cannot_begin_says_why(run: Run, words: list[str], sentence: str) -> None:
    Path("wrong.yaml").write_text("kernel:\n  colour: red\n")
    assert sentence in run("host", *words, code=2).err


@pytest.mark.parametrize("words", [("--extensions", "nowhere"), ("--with", "magic")])
def test_extensions_that_are_not_there_are_named(tmp_path: Path, words: tuple[str, str]) -> None:
    done = process("host", *words, cwd=tmp_path)  # a process of its own: a host sets up its logs
    assert done.returncode == 2
    assert words[1] in done.stderr.decode()
    assert b"Traceback" not in done.stderr


def test_an_unknown_variable_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTBUS_KERNEL_COLOUR", "red")
    assert "POSTBUS_KERNEL_COLOUR" in run("host", "--with", "echo", code=2).err


# --- a host that runs -------------------------------------------------------------------------------------------------


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_host_runs_what_can_and_is_looked_at_and_reloaded(project: Run) -> None:
    def status(name: str) -> Any:
        return next(one for one in project("extensions", "--json").json["extensions"] if one["id"] == name)

    with started("host", "--json") as host:
        told = json.loads(next_line(host))
        assert (told["pid"], told["orchestrator"], told["channels"]) == (host.pid, "good", ["nowhere"])
        assert told["extensions"] == {"bad": "error", "good": "running", "odd": "error"}

        done = project("doctor", "--tool", "greet", code=1)
        assert f"host        process {host.pid}, as of " in done.out
        assert "greet is provided by good, which is running" in done.out
        missing = project("doctor", "--tool", "paint", code=1)
        assert "paint is missing though the bus is healthy: bad names it" in missing.out
        assert status("good")["tools"] == ["greet"]

        second = process("host", "--with", "echo")
        assert second.returncode == 5
        assert f"another host (process {host.pid}) runs on" in second.stderr.decode()

        Path("extensions/good/main.py").write_text(GOOD.replace('"greet"', '"welcome"'))
        host.send_signal(signal.SIGHUP)
        until(lambda: status("good")["tools"] == ["welcome"])
        assert status("good")["generation"] == 2
        project("publish", "system.extension.reload", '{"extension_id": "good"}')
        until(lambda: status("good")["generation"] == 3)
        Path("extensions/good/main.py").write_text("class Good")
        host.send_signal(signal.SIGHUP)
        while b"good goes on as it was" not in stderr_line(host):
            pass
        assert status("good")["tools"] == ["welcome"]

        host.send_signal(signal.SIGTERM)
        assert host.wait(TIMEOUT_S) == 0
    assert project("extensions", "--json").json["running"] is False


def stderr_line(host: subprocess.Popen[bytes]) -> bytes:
    assert host.stderr is not None
    assert select.select([host.stderr], [], [], TIMEOUT_S)[0], "nothing came"
    line = host.stderr.readline()
    assert line, "it ended"
    return line


@pytest.mark.usefixtures("project")
def test_a_second_signal_ends_a_host_at_once() -> None:
    stuck = "import asyncio\n\nclass Stuck:\n    async def stop(self):\n        await asyncio.sleep(3600)\n"
    write(Path("extensions"), "stuck", stuck)
    with started("host", "--json") as host:
        next_line(host)
        host.send_signal(signal.SIGINT)
        until(lambda: _signalled(host))
        assert host.wait(TIMEOUT_S) == 130


def _signalled(host: subprocess.Popen[bytes]) -> bool:
    """Send the second signal, again if the first was not yet taken up: signals of one kind are merged."""
    if host.poll() is None:
        host.send_signal(signal.SIGINT)
        time.sleep(0.1)
    return host.poll() is not None
