from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from postbus.log import SqliteLog
from postbus.model import Invalid
from postbus.sources import SourceHost, Sources
from tests.sources.conftest import TENANT, events


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


async def test_its_lines_become_events_each_run_anew(host: SourceHost, log: SqliteLog, sources: Sources) -> None:
    await sources.add("cmd", "command", {"argv": program('print(\'{"a": 1}\'); print("oops"); print(2)')})
    await host.poll(TENANT, "cmd")
    await host.poll(TENANT, "cmd")
    found = await events(log, "cmd")
    assert [event.topic for event in found] == ["command.line", "source.bad", "command.line"] * 2
    assert [event.payload for event in found if event.topic == "command.line"] == [{"a": 1}, 2] * 2
    assert found[1].payload["sample"] == "oops"


async def test_no_shell_reads_its_arguments(host: SourceHost, log: SqliteLog, sources: Sources) -> None:
    argv = [*program("import json, sys; print(json.dumps(sys.argv[1:]))"), "$HOME; echo 1", "*"]
    await sources.add("cmd", "command", {"argv": argv})
    await host.poll(TENANT, "cmd")
    assert (await events(log, "cmd"))[0].payload == ["$HOME; echo 1", "*"]


async def test_its_exit_code_is_visible_and_what_it_printed_is_kept(
    host: SourceHost, log: SqliteLog, sources: Sources
) -> None:
    await sources.add("cmd", "command", {"argv": program('import sys; print(1); sys.exit("no luck")')})
    turn = await host.poll(TENANT, "cmd")
    assert str(turn.error).endswith("exit code 1: no luck")
    assert [event.payload for event in await events(log, "cmd")] == [1]
    source = await sources.get("cmd")
    assert (source.failures, source.last_error) == (1, turn.error)


async def test_a_slow_one_is_killed_with_its_children(host: SourceHost, sources: Sources, tmp_path: Path) -> None:
    mark = tmp_path / "survivor"
    child = f"import time; time.sleep(1.5); open({str(mark)!r}, 'w').close()"
    text = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    await sources.add("cmd", "command", {"argv": program(text), "timeout_s": 0.7})
    assert "longer than 0.7 s" in str((await host.poll(TENANT, "cmd")).error)
    await asyncio.sleep(1.5)
    assert not mark.exists()


async def test_a_talkative_one_is_stopped(host: SourceHost, sources: Sources) -> None:
    text = "import sys\nwhile True: sys.stdout.write('1\\n' * 100000)"
    await sources.add("cmd", "command", {"argv": program(text)})
    assert "more than" in str((await host.poll(TENANT, "cmd")).error)


async def test_a_missing_program_is_visible(host: SourceHost, sources: Sources) -> None:
    await sources.add("cmd", "command", {"argv": ["/no/such/program"]})
    assert "No such file" in str((await host.poll(TENANT, "cmd")).error)


async def test_it_learns_when_it_ran_before(host: SourceHost, log: SqliteLog, sources: Sources) -> None:
    text = "import json, os; print(json.dumps(os.environ.get('POSTBUS_SINCE')))"
    await sources.add("cmd", "command", {"argv": program(text)})
    await host.poll(TENANT, "cmd")
    checkpoint = (await sources.get("cmd")).checkpoint
    await host.poll(TENANT, "cmd")
    assert [event.payload for event in await events(log, "cmd")] == [None, checkpoint["since"]]


@pytest.mark.parametrize(
    "settings", [{}, {"argv": []}, {"argv": "ls"}, {"argv": ["a\0b"]}, {"argv": ["a"], "timeout_s": 0}]
)
async def test_bad_settings_are_refused(sources: Sources, settings: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        await sources.add("bad", "command", settings)
