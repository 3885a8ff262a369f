"""Agents, inboxes and timers on the command line: on a data folder, and on a server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_line import TIMEOUT_S, Done, Run, next_line
from tests.server.conftest import RunningServer

Where = Callable[..., Done]


@pytest.fixture(params=["folder", "server"])
def where(request: pytest.FixtureRequest, run: Run, tmp_path: Path) -> Iterator[Where]:
    """Run a command on a data folder, or on a server."""
    if request.param == "folder":
        yield run
        return
    server = RunningServer(tmp_path / "served")
    try:
        yield lambda *words, code=0: run(*words, "--url", server.url, code=code)
    finally:
        server.stop()


def test_an_agent_from_beginning_to_end(where: Where) -> None:
    made = where("agents", "create", "ann", "--json").json
    assert (made["id"], made["targets"]) == ("ann", [{"kind": "pull"}])
    assert where("agents", "create", "bob", "--webhook", "https://example.com/w").out == "made bob, woken by webhook\n"
    assert [agent["id"] for agent in where("agents", "list", "--json").json["agents"]] == ["ann", "bob"]
    assert where("agents", "subscribe", "ann", "order.*", "--id", "orders").out == (
        "subscribed ann to order.* as orders\n"
    )
    shown = where("agents", "show", "ann")
    assert "0 items not acked" in shown.out
    assert "subscribed to order.* as orders" in shown.out
    listed = where("agents", "subscriptions", "ann", "--json").json["subscriptions"]
    assert [(one["id"], one["pattern"]) for one in listed] == [("orders", "order.*")]
    assert "orders" in where("agents", "subscriptions", "ann").out
    lag = where("agents", "lag", "ann", "orders", "--json").json
    assert (lag["subscription_id"], lag["total_lag"]) == ("orders", 0)
    assert "journal" in where("agents", "lag", "ann", "orders").out
    assert where("agents", "reset", "ann", "orders", "--start", "earliest").out == "moved orders to earliest\n"
    assert where("agents", "unsubscribe", "ann", "orders").out == "ended orders\n"
    assert where("agents", "remove", "ann", "--yes").out == "removed ann\n"
    assert "AGENT" in where("agents", "list").out
    where("agents", "show", "ann", code=4)


def test_messages_are_sent_read_acked_and_followed(where: Where) -> None:
    where("agents", "create", "ann")
    sent = where("inbox", "send", "ann", "hello", "--json").json
    where("inbox", "send", "ann", '{"n": 2}', "--value", "--sender", "bob")
    assert "accepted" in where("inbox", "receipts", sent["event"]).out
    items = where("inbox", "read", "ann", "--json").json["items"]
    assert [(item["payload"], item["source"]) for item in items][1] == ({"n": 2}, "bob")
    first, second = where("inbox", "read", "ann").out.splitlines()
    assert first.startswith("itm_1 ")
    assert first.endswith('"hello"')
    assert 'source=bob  {"n":2}' in second
    assert where("inbox", "ack", "ann", "itm_1").out == "acked 1 item\n"
    assert where("inbox", "ack", "ann", "itm_1").out == "acked 0 items\n"
    assert where("inbox", "receipts", sent["event"], "--json").json["receipts"][0]["state"] == "acked"
    assert len(where("inbox", "read", "ann", "--acked").out.splitlines()) == 2
    assert where("inbox", "ack", "ann", "--through", "itm_2", "--json").json == {"acked": 1}
    assert where("inbox", "ack", "ann", "--all", "--json").json == {"acked": 0}
    empty = where("inbox", "read", "ann")
    assert (empty.out, empty.err) == ("", "nothing there\n")


def test_waiting(where: Where) -> None:
    where("agents", "create", "ann")
    assert where("inbox", "wait", "ann", "--timeout", "0s", code=1).err == "nothing came within 0s\n"
    where("inbox", "send", "ann", "hello")
    assert '"hello"' in where("inbox", "wait", "ann").out
    assert where("inbox", "wait", "ann", "--after", "itm_1", "--timeout", "0s", "--json", code=1).json == {"items": []}


def test_timers(where: Where) -> None:
    where("agents", "create", "ann")
    assert where("timers", "add", "past", "ann", "late", "--at", "2020-01-01T00:00:00Z").out == (
        "added past, due 2020-01-01T00:00:00Z\n"
    )
    added = where("timers", "add", "tick", "ann", "[1]", "--value", "--every", "1h", "--json").json
    assert (added["every"], added["message"]) == (3600, [1])
    where("timers", "add", "daily", "ann", "up!", "--cron", "0 9 * * 1-5", "--zone", "Europe/Amsterdam")
    assert [one["id"] for one in where("timers", "list", "--json").json["timers"]] == ["daily", "past", "tick"]
    assert "0 9 * * 1-5 Europe/Amsterdam" in where("timers", "list", "--agent", "ann").out
    assert where("timers", "pause", "tick", "--json").json["due_at"] is None
    assert where("timers", "resume", "tick").out.startswith("resumed tick, due 20")
    assert where("timers", "remove", "tick").out == "removed tick\n"
    where("timers", "remove", "tick", code=4)
    assert '"late"' in where("inbox", "wait", "ann").out, "waiting fires what is due"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["agents", "create", "no spaces"], 2, "agent"),
        (["agents", "create", "ann"], 5, "has an agent ann"),
        (["agents", "create", "x", "--secret-env", "A"], 2, "--webhook"),
        (["agents", "create", "x", "--command", "'"], 2, "--command"),
        (["agents", "create", "x", "--target", "{"], 2, "not JSON"),
        (["agents", "create", "x", "--target", '{"kind": "pigeon"}'], 2, "pigeon"),
        (["agents", "remove", "nobody", "--yes"], 4, "no agent nobody"),
        (["agents", "remove", "ann"], 2, "--yes"),
        (["agents", "subscribe", "nobody", "a"], 4, "no agent nobody"),
        (["agents", "subscribe", "ann", "a..b"], 2, "empty token"),
        (["agents", "subscribe", "ann", "a", "--filter", '{"expr": "("}'], 2, "expr"),
        (["agents", "subscribe", "ann", "a", "--filter", "{"], 2, "not JSON"),
        (["agents", "subscribe", "ann", "a", "--start", "soon"], 2, "instant"),
        (["agents", "subscribe", "ann", "a", "--until", "soon"], 2, "instant"),
        (["agents", "unsubscribe", "ann", "nothing"], 4, "nothing"),
        (["agents", "lag", "ann", "nothing"], 4, "nothing"),
        (["inbox", "read", "nobody"], 4, "no agent nobody"),
        (["inbox", "read", "ann", "--after", "itm_9"], 4, "itm_9"),
        (["inbox", "read", "ann", "--limit", "0"], 2, "--limit"),
        (["inbox", "ack", "ann"], 2, "name items"),
        (["inbox", "ack", "ann", "itm_1", "--all"], 2, "name items"),
        (["inbox", "ack", "ann", "itm_9"], 4, "itm_9"),
        (["inbox", "send", "ann", "  "], 2, "blank"),
        (["inbox", "send", "ann", "{", "--value"], 2, "not JSON"),
        (["inbox", "send", "nobody", "x"], 4, "no agent nobody"),
        (["inbox", "wait", "ann", "--timeout", "soon"], 2, "no age"),
        (["inbox", "receipts", "nonsense"], 2, "address"),
        (["timers", "add", "t", "ann", "x"], 2, "one of --at, --every and --cron"),
        (["timers", "add", "t", "ann", "x", "--every", "10s"], 2, "60"),
        (["timers", "add", "t", "nobody", "x", "--every", "60s"], 4, "no agent nobody"),
        (["timers", "pause", "nothing"], 4, "no timer nothing"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(run: Run, words: list[str], code: int, says: str) -> None:
    run("agents", "create", "ann")
    done = run(*words, code=code)
    assert done.out == ""
    assert says in done.err
    assert len(done.err.splitlines()) <= 2
    assert run("agents", "list", "--json").json["agents"][0]["unacked"] == 0


@pytest.mark.parametrize("words", [["agents", "list"], ["inbox", "read", "ann"], ["timers", "list"]])
def test_looking_makes_no_store(run: Run, data: Path, words: list[str]) -> None:
    run(*words, code=4)
    assert not data.exists()


def test_a_server_that_is_not_there_is_said_so(run: Run) -> None:
    done = run("agents", "list", "--url", "http://127.0.0.1:1", code=7)
    assert "cannot be reached" in done.err
    assert "is a server running" in done.err


# --- on a data folder -------------------------------------------------------------------------------------------------


def test_reading_brings_the_inbox_up_to_date(run: Run) -> None:
    run("agents", "create", "ann")
    run("agents", "subscribe", "ann", "order.*", "--filter", '{"expr": "payload.n > 1"}')
    for number in (1, 2, 3):
        run("publish", "order.paid", f'{{"n": {number}}}')
    items = run("inbox", "read", "ann", "--json").json["items"]
    assert [item["payload"]["n"] for item in items] == [2, 3]


def test_digests_on_the_command_line(run: Run) -> None:
    run("agents", "create", "ann")
    run("agents", "subscribe", "ann", "issue.*", "--digest-by", "payload.on")
    for number in (1, 2):
        run("publish", "issue.comment", f'{{"on": "x", "n": {number}}}')
    assert run("inbox", "entries", "ann").err == "nothing there\n"
    assert run("inbox", "flush", "ann").out == "dig_1_1  2 on x: 2 x issue.comment\n"
    assert run("inbox", "entries", "ann", "--json").json["digests"][0]["item_ids"] == ["itm_1", "itm_2"]
    assert run("inbox", "ack", "ann", "dig_1_1").out == "acked 2 items\n"


def test_what_a_message_holds_cannot_command_the_terminal(run: Run) -> None:
    run("agents", "create", "ann")
    run("inbox", "send", "ann", "\x1b[31mred\nline")
    shown = run("inbox", "read", "ann").out
    assert "\x1b" not in shown
    assert len(shown.splitlines()) == 1


def test_watching_follows_until_it_is_interrupted(run: Run, data: Path) -> None:
    run("agents", "create", "ann")
    run("agents", "subscribe", "ann", "order.*")
    run("inbox", "send", "ann", "first")
    command = [sys.executable, "-m", "postbus", "inbox", "watch", "ann", "--json"]
    environment = os.environ | {"POSTBUS_DATA": str(data)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, env=environment) as child:
        try:
            assert payload(next_line(child)) == "first"
            run("publish", "order.paid", '"second"')
            assert payload(next_line(child)) == "second"
            run("inbox", "send", "ann", "third")
            assert payload(next_line(child)) == "third"
            child.send_signal(signal.SIGINT)
            assert child.wait(TIMEOUT_S) == 130
        finally:
            child.kill()


def payload(line: bytes) -> Any:
    import json  # noqa: PLC0415 - kept beside its use

    return json.loads(line)["payload"]
