from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

import pytest

from postbus import EventBus
from postbus.sources import KINDS
from tests.cli.command_line import TIMEOUT_S, Run, next_line, started


def lines(path: Path, *values: object) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(value) + "\n" for value in values)


@pytest.fixture
def watched(run: Run, tmp_path: Path) -> Path:
    """A file that the source ``jobs`` follows."""
    path = tmp_path / "jobs.jsonl"
    run("sources", "add", "jobs", "file", "--set", f"path={path}", "--set", "interval_s=0.05")
    return path


def test_a_source_is_added_polled_paused_resumed_and_removed(run: Run, watched: Path) -> None:
    lines(watched, 1, {"a": 2})
    assert run("sources", "poll", "jobs").out == "2 new events, 0 known already\n"
    assert run("read", "jobs", "--json").lines[1]["payload"] == {"a": 2}
    shown = run("sources", "show", "jobs", "--json").json
    assert (shown["kind"], shown["state"], shown["events"], shown["topic"]) == (
        "file",
        "running",
        2,
        "local.default.jobs",
    )
    assert shown["settings"] == {"path": str(watched), "interval_s": 0.05}
    assert run("sources", "pause", "jobs").out == "paused jobs\n"
    assert "paused" in run("sources", "list").out
    assert run("sources", "resume", "jobs", "--json").json["state"] == "running"
    assert "needs a yes" in run("sources", "remove", "jobs", code=2).err
    assert run("sources", "remove", "jobs", "--yes").out == "removed jobs\n"
    assert run("sources", "list", "--json").json == {"sources": []}
    assert len(run("read", "jobs", "--json").lines) == 2


def test_a_failing_source_says_why(run: Run, watched: Path) -> None:
    done = run("sources", "poll", "jobs", code=1)
    assert "No such file" in done.err
    assert run("sources", "poll", "jobs", "--json", code=1).json["error"].endswith("No such file or directory")
    listed = run("sources", "list").out
    assert "failing" in listed
    assert str(watched)[:10] in listed


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["add", "x", "teapot"], 2, "no kind of source"),
        (["add", "x", "file"], 2, "path"),
        (["add", "x", "file", "--set", "path"], 2, "not NAME=VALUE"),
        (["add", "x", "file", "--settings", "{"], 2, "not JSON"),
        (["add", "x", "file", "--settings", "[]"], 2, "no JSON object"),
        (["add", "a b", "timer", "--set", "every_s=60"], 2, "may only hold"),
        (["add", "jobs", "timer", "--set", "every_s=60"], 5, "already"),
        (["show", "nobody"], 4, "no source nobody"),
        (["poll", "nobody"], 4, "no source nobody"),
        (["pause", "nobody"], 4, "no source nobody"),
        (["remove", "nobody", "--yes"], 4, "no source nobody"),
        (["run", "--tenant", "x"], 2, "no tenant"),
    ],
)
@pytest.mark.usefixtures("watched")
def test_what_is_wrong_is_said(run: Run, words: list[str], code: int, why: str) -> None:
    assert why in run("sources", *words, code=code).err


def test_run_hosts_them_until_it_is_told_to_stop(run: Run, watched: Path, data: Path) -> None:
    with started("sources", "run", "--data", str(data), "--json") as child:
        assert json.loads(next_line(child))["pid"] == child.pid
        lines(watched, 1, 2, 3)
        deadline = time.monotonic() + TIMEOUT_S
        while run("sources", "show", "jobs", "--json").json["events"] < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "another process hosts" in run("sources", "run", code=6).err
        child.send_signal(signal.SIGTERM)
        assert child.wait(TIMEOUT_S) == 0


def test_the_help_names_every_kind(run: Run) -> None:
    shown = " ".join(run("sources", "add", "--help").out.split())
    assert all(kind in shown for kind in KINDS)


# --- deliveries -------------------------------------------------------------------------------------------------------


def test_a_reply_is_sent_listed_and_shown(run: Run) -> None:
    run("publish", "order.paid", "1")
    handle = '{"kind": "bus", "topic": "answers.mine"}'
    sent = run("deliveries", "send", "--handle", handle, '{"ok": true}', "--value", "--json").json
    assert (sent["state"], sent["result"]["event"]) == ("sent", "local.default.journal/0/2")
    again = [run("deliveries", "send", "--handle", handle, "hi", "--key", "k", "--json").json["id"] for _ in range(2)]
    assert again[0] == again[1]
    assert [one["id"] for one in run("deliveries", "list", "--json").json["deliveries"]] == [again[0], sent["id"]]
    assert "sent" in run("deliveries", "list").out
    assert run("deliveries", "show", sent["id"], "--json").json["arguments"] == {"payload": {"ok": True}}
    assert "bus publish" in run("deliveries", "send", "--handle", handle, "hi").out
    listed = run("deliveries", "actions", "--handle", handle, "--json").json["actions"]
    assert [action["name"] for action in listed] == ["publish"]
    assert "publish" in run("deliveries", "actions", "--handle", handle).out


def test_a_program_must_be_allowed_and_failures_are_tried_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("publish", "order.paid", "1")
    out = tmp_path / "out"
    text = f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"
    handle = json.dumps({"kind": "command", "argv": [sys.executable, "-c", text]})
    assert "is not allowed" in run("deliveries", "send", "--handle", handle, "hi", code=2).err
    monkeypatch.setenv("POSTBUS_REPLY_COMMANDS", sys.executable)
    sent = run("deliveries", "invoke", "run", "--handle", handle, "--set", "payload=hi", "--json").json
    assert sent["state"] == "accepted"
    monkeypatch.delenv("POSTBUS_REPLY_COMMANDS")
    assert run("deliveries", "run", "--once").out == "made 1 attempt\n"  # whoever carries it does not allow it
    shown = run("deliveries", "show", sent["id"], "--json").json
    assert (shown["state"], len(shown["tries"])) == ("failed", 1)
    assert run("dlq", "list", "--json").json["dead_letters"][0]["reason"] == "reply"
    assert run("deliveries", "retry", sent["id"]).out.startswith("accepted")
    monkeypatch.setenv("POSTBUS_REPLY_COMMANDS", sys.executable)
    assert run("deliveries", "run", "--once", "--json").json == {"attempts": 1}
    assert out.read_text() == '"hi"\n'
    assert run("dlq", "list", "--json").json["dead_letters"] == []


def test_a_reply_goes_through_the_handle_of_an_event(run: Run, data: Path) -> None:
    run("publish", "order.paid", "1")
    assert "asks for no reply" in run("deliveries", "send", "--event", "journal/0/0", "hi", code=2).err
    assert "no event" in run("deliveries", "send", "--event", "journal/0/7", "hi", code=4).err
    bus = EventBus(data)

    async def ask() -> None:
        await bus.publish("order.asked", "shop", 1, delivery_handle={"kind": "bus", "topic": "a.b"})
        await bus.stop()

    asyncio.run(ask())
    sent = run("deliveries", "send", "--event", "journal/0/1", "hi", "--json").json
    assert (sent["handle"]["topic"], sent["state"]) == ("a.b", "sent")
    assert "asks for no reply" in run("deliveries", "send", "--event", sent["event"], "and again", code=2).err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["send", "hi"], 2),
        (["send", "hi", "--handle", "{"], 2),
        (["send", "hi", "--handle", "{}", "--event", "a/0/0"], 2),
        (["send", "{", "--value", "--handle", '{"kind": "bus", "topic": "a"}'], 2),
        (["invoke", "fly", "--handle", '{"kind": "bus", "topic": "a"}'], 2),
        (["show", "nothing"], 4),
        (["retry", "nothing"], 4),
        (["list", "--state", "lost"], 2),
    ],
)
def test_a_bad_reply_is_refused(run: Run, words: list[str], code: int) -> None:
    run("publish", "order.paid", "1")
    assert run("deliveries", *words, code=code).err.startswith("error: ")
    assert run("deliveries", "list", "--json").json["deliveries"] == []


def test_a_server_answers_the_same_commands(run: Run, data: Path, watched: Path) -> None:
    with started("serve", "--data", str(data), "--port", "0", "--json") as child:
        where = ("--url", json.loads(next_line(child))["url"])
        lines(watched, 1)
        deadline = time.monotonic() + TIMEOUT_S
        while run("sources", "show", "jobs", "--json", *where).json["events"] < 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert run("sources", "pause", "jobs", *where).out == "paused jobs\n"
        lines(watched, 2)
        assert run("sources", "poll", "jobs", *where).out == "1 new event, 0 known already\n"
        assert "no kind of source" in run("sources", "add", "x", "teapot", *where, code=2).err
        handle = '{"kind": "bus", "topic": "answers.mine"}'
        sent = run("deliveries", "send", "--handle", handle, "hi", "--json", *where).json
        assert run("deliveries", "show", sent["id"], "--json", *where).json["tries"] == []
        assert run("deliveries", "list", "--json", *where).json["deliveries"][0]["id"] == sent["id"]
        assert "has not failed" in run("deliveries", "retry", sent["id"], *where, code=5).err
        run("sources", "remove", "jobs", "--yes", *where)
        assert run("sources", "list", "--json", *where).json == {"sources": []}
