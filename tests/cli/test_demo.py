from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

from tests.cli.command_line import TIMEOUT_S, Run, next_line, on_terminal, process, started, without_colour

COUNTS = {"archive": 11, "assistant": 11, "calendar": 5}


def test_the_demo_line_by_line(run: Run) -> None:
    lines = run("demo", "--fast", "--data", "d").out.splitlines()
    sentences = [line.partition("--- ")[2] for line in lines if "--- " in line]
    assert [sentence.split()[0] for sentence in sentences] == [
        *("Emails", "assistant", "calendar", "After", "The", "Emails", "Started", "Now", "calendar")
    ]
    assert sum("email.received" in line for line in lines) == 11
    for name, count in COUNTS.items():
        assert re.search(rf"{name} +0 to do, {count} done, 0 to retry, 0 dead", "\n".join(lines))
    commands = [line.split("  # ")[0].strip() for line in lines[-5:]]
    for command in commands:
        program, *words = command.split()
        assert program == "postbus"
        assert words[-2:] == ["--data", "d"]
        assert run(*words).out != ""


def test_what_the_demo_leaves(run: Run) -> None:
    done = run("demo", "--seconds", "2", "--data", "d", "--json").json
    assert {one["id"]: one["done"] for one in done["subscribers"]} == COUNTS
    assert {one["id"]: one["failed_attempts"] for one in done["subscribers"]} == dict.fromkeys(COUNTS, 0) | {
        "calendar": 3
    }
    assert all((one["pending"], one["dead"]) == (0, 0) for one in done["subscribers"])
    data = ("--data", "d")
    stats = run("stats", *data, "--json").json
    assert stats["statuses"].items() >= {"done": 22, "pending": 0, "failed": 0}.items()
    assert stats["dead_letters"] == {"open": 0, "replayed": 1, "purged": 0}
    (root,) = run("trace", done["trace"], *data, "--json").json["roots"]
    assert root["children"][0]["deliveries"][0].items() >= {"subscription": "calendar", "replays": 1}.items()
    assert run("verify", *data).out == "all is well: 23 events in 2 partitions\n"
    assert "holds a store already" in run("demo", *data, code=5).err


def test_the_demo_on_a_terminal() -> None:
    code, printed = on_terminal("demo", "--fast")
    shown = without_colour(printed)
    assert code == 0
    assert "Traceback" not in shown
    assert "postbus demo: emails for an assistant" in shown
    assert re.search(r"archive +email\.\* +files every email +0 +11 +0 +0", shown)
    assert re.search(r"calendar +meeting\.\* +notes the meetings +0 +2 +0 +1", shown)  # once, in the middle
    assert max(map(len, shown.splitlines())) <= 80
    assert printed.count("\x1b[?25h") >= printed.count("\x1b[?25l") > 0  # the cursor comes back
    folder = Path(re.findall(r"--data (\S+)", shown)[-1])
    assert folder.joinpath("postbus.db").exists()
    shutil.rmtree(folder)


def test_the_demo_can_be_interrupted(tmp_path: Path) -> None:
    with started("demo", "--data", str(tmp_path / "d")) as child:
        assert b"Emails arrive" in next_line(child)
        child.send_signal(signal.SIGINT)
        assert (child.wait(TIMEOUT_S), child.stderr and child.stderr.read()) == (130, b"")


def test_a_folder_that_cannot_be_made() -> None:
    done = process("demo", "--fast", "--data", "/proc/no")
    assert done.returncode == 6
    assert done.stderr.startswith(b"error: cannot make a store")
