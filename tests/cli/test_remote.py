"""The same commands on a data folder and on a server: same answers, same refusals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_line import JOURNAL, ORDERS, TIMEOUT_S, Run, next_line, on_terminal, process, started
from tests.cli.places import place, served
from tests.server.conftest import RunningServer

__all__ = ["place", "served"]

Serve = Callable[[], RunningServer]


def payloads(run: Run, *words: str) -> list[Any]:
    return [event["payload"] for event in run(*words, "--json").lines]


# --- topics -----------------------------------------------------------------------------------------------------------


def test_a_topic_from_its_making_to_its_end(place: Run) -> None:
    words = ["--partitions", "2", "--keep-age", "7d", "--keep-count", "1000", "--identity-window", "90s"]
    made = place("topics", "create", "orders", *words, "--label", "team=shop", "--label", "tier=1", "--json").json
    assert made.items() >= {"topic": ORDERS, "partitions": 2, "events": 0, "epoch": 0}.items()
    assert made["retention"] == {"age_s": 604800.0, "bytes": None, "count": 1000}
    assert made.items() >= {"labels": {"team": "shop", "tier": "1"}, "identity_window_s": 90.0}.items()
    assert place("topics", "create", "acme.eu.bills").out == "created acme.eu.bills\n"
    assert place("topics", "show", "orders", "--json").json == made
    listed = {topic["topic"]: topic for topic in place("topics", "list", "--json").json["topics"]}
    assert listed[ORDERS] == made
    assert "acme.eu.bills" in listed
    row = next(line for line in place("topics", "list").out.splitlines() if line.startswith(ORDERS))
    assert row.split()[1:3] == ["2", "0"]
    assert row.endswith("7d, 1,000 events  team=shop, tier=1")
    shown = place("topics", "show", "orders").out
    assert re.search(r"^kept +7d, 1,000 events$", shown, re.MULTILINE)
    assert re.search(r"^identities +90s$", shown, re.MULTILINE)
    assert shown.count("\n        ") == 2  # a row for each partition
    assert place("topics", "delete", "orders", "--yes").out == f"deleted {ORDERS}\n"
    place("topics", "show", "orders", code=4)
    assert place("topics", "create", "orders", "--json").json["epoch"] == 1


REFUSED: list[tuple[list[str], int, str]] = [
    (["create", "orders"], 5, "exists"),
    (["create", "a.b"], 2, "exactly 3 tokens"),
    (["create", "new", "--partitions", "9999"], 2, "1024"),
    (["create", "new", "--keep-age", "long"], 2, "no age"),
    (["create", "new", "--label", "x"], 2, "not NAME=VALUE"),
    (["create", "new", "--label", f"{'x' * 300}=1"], 2, "256"),
    (["show", "nothing"], 4, "nothing"),
    (["delete", "nothing", "--yes"], 4, "nothing"),
    (["delete", "journal", "--yes"], 5, "journal cannot be removed"),
    (["delete", "orders"], 2, "--yes"),
]


def test_what_topics_refuse(place: Run) -> None:
    place("topics", "create", "orders")
    for words, code, message in REFUSED:
        done = place("topics", *words, code=code)
        assert message in done.err
        assert place("topics", *words, "--json", code=code).error["message"] in done.err
    assert {topic["topic"] for topic in place("topics", "list", "--json").json["topics"]} <= {ORDERS, JOURNAL}


def test_removing_a_topic_asks_first(place: Run) -> None:
    place("topics", "create", "orders")
    place("publish", ORDERS, "1")
    code, printed = on_terminal("topics", "delete", "orders", given="n\n")
    assert (code, "with its 1 event for good? [y/N]" in printed) == (1, True)
    place("topics", "show", "orders")
    assert on_terminal("topics", "delete", "orders", given="y\n")[0] == 0
    place("topics", "show", "orders", code=4)


# --- publish, append, tail, read --------------------------------------------------------------------------------------


def test_publish_takes_every_field(place: Run) -> None:
    place("topics", "create", "orders")
    payload = '{"a" : 1.0e2, "big": 123456789012345678901234567890}'
    words = ["--source", "shop", "--key", "k", "--native-id", "n", "--variant", "v", "--header", "x=1"]
    words += ["--metadata", '{"m": [1]}', "--correlation-id", "c", "--occurred-at", "2026-01-31T13:00:00+01:00"]
    receipt = place("publish", ORDERS, payload, *words, "--json").json
    assert receipt.items() >= {"id": f"{ORDERS}/0/0", "stream": ORDERS, "offset": 0, "duplicate": False}.items()
    for command in (["tail"], ["read", "orders"], ["events"]):
        out = place(*command, "--json").out
        assert f'"payload":{payload},' in out
        found = json.loads(out)
        event = found["events"][0] if command == ["events"] else found
        assert event.items() >= {"topic": ORDERS, "source": "shop", "key": "k", "native_id": "n"}.items()
        assert event.items() >= {"headers": {"x": "1"}, "metadata": {"m": [1]}, "correlation_id": "c"}.items()
        assert event.items() >= {"variant": "v", "occurred_at": "2026-01-31T12:00:00Z"}.items()
    assert place("publish", ORDERS, payload, *words).out == f"already there: {ORDERS}/0/0\n"
    place("publish", ORDERS, "2", *words, code=5)
    assert place("publish", ORDERS, '{"a": NaN}', "--json", code=2).error["position"] == 6
    place("publish", ORDERS, "1", "--header", "postbus.x=1", code=2)
    assert len(place("read", "orders", "--json").lines) == 1


def test_a_server_takes_registered_topics_only(run: Run, served: Serve) -> None:
    served()
    run("publish", "orders", "1", code=4)
    assert "registered topics only" in run("publish", "order.paid", "1", code=2).err
    run("topics", "create", "orders")
    assert run("publish", "orders", "1").out == f"published {ORDERS}/0/0\n"
    run("append", "others", "1", code=4)
    assert "full name" in run("append", "orders", "1", "--topic", "a.b", code=2).err
    run("topics", "create", "acme.eu.orders")
    assert run("publish", "orders", "1", "--tenant", "acme.eu").out == "published acme.eu.orders/0/0\n"


def test_appending_a_file(place: Run) -> None:
    place("topics", "create", "orders", "--partitions", "3")
    Path("three.jsonl").write_text('{"n": 1}\n\n{"n": 1.50}\n"x"\n')
    words = ("append", "orders", "--file", "three.jsonl", "--native-id", "monday", "--key", "k")
    assert place(*words).out == f"appended 3 events to {ORDERS}\n"
    assert place(*words, "--json").json == {"stream": ORDERS, "lines": 4, "appended": 0, "duplicates": 3}
    assert '"payload":{"n": 1.50}' in place("read", "orders", "--json").out
    Path("bad.jsonl").write_text("1\n2\n{\n")
    refused = place("append", "orders", "--file", "bad.jsonl", "--json", code=2).error
    assert refused.items() >= {"line": 3, "appended_lines": 0}.items()
    assert place("append", "orders", "7", "--key", "k").out.startswith(f"appended {ORDERS}/")
    assert len(place("read", "orders", "--json").lines) == 4


def test_tail_shows_the_last_events(place: Run) -> None:
    for name in ("orders", "bills"):
        place("topics", "create", name)
    for number in range(3):
        place("publish", ORDERS, str(number))
        place("publish", "local.default.bills", str(number))
    lines = place("tail").out.splitlines()
    assert [line.split()[0] for line in lines] == [f"{name}/0/{n}" for n in range(3) for name in ("orders", "bills")]
    assert payloads(place, "tail", "local.*.orders", "--limit", "2") == [1, 2]
    assert payloads(place, "tail", "-n", "3") == [1, 2, 2]
    assert place("tail", "nothing").err == "no events there\n"
    assert place("tail", "--limit", "0").out == ""
    place("tail", "a.>.b", code=2)


def test_read_from_anywhere(place: Run) -> None:
    place("topics", "create", "orders", "--partitions", "2")
    keys: dict[int, list[int]] = {}
    for number in range(6):
        receipt = place("publish", ORDERS, str(number), "--key", f"k{number % 3}", "--json").json
        keys.setdefault(receipt["partition"], []).append(number)
    whole = [number for partition in sorted(keys) for number in keys[partition]]
    assert payloads(place, "read", "orders") == whole
    assert payloads(place, "read", "orders", "--limit", "4") == whole[:4]
    assert place("read", "orders", "--limit", "4").err == "2 more after --limit 4\n"
    for partition, numbers in keys.items():
        assert payloads(place, "read", "orders", "--partition", str(partition), "--from", "1") == numbers[1:]
    assert place("read", "orders", "--from", "latest").err == "no events there\n"
    place("read", "orders", "--partition", "7", code=4)
    place("read", "orders", "--from", "-1", code=2)
    place("read", "nothing", code=4)


def test_reading_on_as_a_consumer(place: Run) -> None:
    place("topics", "create", "orders")
    for number in range(4):
        place("publish", ORDERS, str(number))
    place("read", "orders", "--consumer", "kitchen", code=4)
    words = ("read", "orders", "--consumer", "kitchen", "--commit")
    assert payloads(place, *words, "--limit", "3") == [0, 1, 2]
    (found,) = place("lag", "orders", "kitchen", "--json").json["consumers"]
    assert found.items() >= {"consumer": "kitchen", "stream": ORDERS, "epoch": 0, "total_lag": 1}.items()
    assert found["partitions"] == [{"partition": 0, "committed": 2, "high_water_mark": 4, "lag": 1}]
    assert [line.split() for line in place("lag", "orders").out.splitlines()][1] == [ORDERS, "kitchen", *"0241"]
    assert payloads(place, "read", "orders", "--consumer", "kitchen") == [3]
    assert payloads(place, *words) == [3]
    assert payloads(place, *words) == []
    place("lag", "nothing", code=4)
    place("lag", "orders", "nobody", code=4)


def test_streams(place: Run) -> None:
    found = place("streams", "orders", "--create", "--partitions", "2", "--json").json["streams"]
    assert [(stream["name"], stream["settings"]["partitions"]) for stream in found] == [(ORDERS, 2)]
    place("streams", "orders", "--create")
    place("streams", "orders", "--create", "--partitions", "3", code=5)
    place("publish", ORDERS, '"tea"', "--key", "k")
    stream = place("streams", "orders", "--json").json["streams"][0]
    assert (stream["count"], sum(part["count"] for part in stream["partitions"])) == (1, 1)
    assert all(part["chain"] for part in stream["partitions"])
    place("streams", "nothing", code=4)


# --- what became of events --------------------------------------------------------------------------------------------


LOOKING = [
    ["tail"],
    ["tail", "bad.*", "--limit", "1"],
    ["events"],
    ["events", "--limit", "2"],
    ["events", "--status", "failed"],
    ["events", "--status", "pending"],
    ["events", "--topic", "bad.*", "--correlation", "case-7"],
    ["events", "--correlation", "journal/0/0"],
    ["events", "--since", "1h", "--until", "2100-01-01T00:00:00Z"],
    ["events", "--until", "2020-01-01T00:00:00Z"],
    ["events", "--tenant", "acme.eu"],
    ["subscriptions"],
    ["trace", "journal/0/0"],
    ["trace", "case-7"],
    ["trace", "case-8"],
    ["trace", "case-7", "--tenant", "acme.eu"],
    ["dlq", "list"],
    ["dlq", "list", "--topic", "*.b", "--reason", "max_attempts"],
    ["dlq", "list", "--all", "--limit", "1"],
    ["dlq", "list", "--subscription", "witness"],
    ["dlq", "show", "journal-dlq/0/1"],
    ["dlq", "show", "journal-dlq/0/99"],
    ["dlq", "replay", "journal-dlq/0/99"],
    ["dlq", "purge", "journal-dlq/0/99", "--yes"],
    ["streams"],
    ["topics", "list"],
    ["topics", "show", "journal"],
    ["read", "journal"],
    ["read", "journal-dlq"],
]


def test_a_server_says_what_its_folder_says(worked: Run, data: Path, served: Serve) -> None:
    served()

    def said(words: list[str], *place: str) -> tuple[int, str, str]:
        done = worked(*words, *place, code=None)
        without_age = re.sub(r"  \d+s  ", "  AGE  ", done.out)
        return done.code, without_age, "" if words[0] == "trace" else done.err

    for words in LOOKING:
        assert said(words) == said(words, "--data", str(data)), words
        there = worked(*words, "--json", code=None)
        here = worked(*words, "--json", "--data", str(data), code=None)
        assert (there.code, there.out) == (here.code, here.out), words
        if here.code:
            assert {name: there.error[name] for name in ("code", "message")} == {
                name: here.error[name] for name in ("code", "message")
            }


def test_stats(worked: Run, data: Path, served: Serve) -> None:
    server = served()
    here = worked("stats", "--json", "--data", str(data)).json
    there = worked("stats", "--json").json
    changing = ("store_bytes", "wal_bytes")
    assert {name: there[name] for name in there if name not in changing} == {
        name: here[name] for name in here if name not in changing
    }
    assert there.keys() == here.keys()
    assert there["statuses"].items() >= {"done": 3, "failed": 2}.items()
    assert worked("stats").out.splitlines()[:2] == worked("stats", "--data", str(data)).out.splitlines()[:2]
    key = server.key("local.default", "admin")
    own = worked("stats", "--api-key", key, "--json").json
    assert (own["store_bytes"], own["rates"], own["statuses"]) == (None, None, here["statuses"])
    assert "store" not in worked("stats", "--api-key", key).out.replace("stored", "")


def test_events_come_page_by_page(run: Run, served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = served()
    server.topic(ORDERS)
    Path("many.jsonl").write_text("\n".join(map(str, range(25))))
    run("append", "orders", "--file", "many.jsonl")
    monkeypatch.setattr("postbus.cli.remote.PAGE_MAX", 10)
    monkeypatch.setattr("postbus.bus.search.SCANNED_MAX", 7)
    found = run("events", "--limit", "23", "--json").json
    assert [event["payload"] for event in found["events"]] == list(range(2, 25))
    assert found["more"] is True
    assert run("events", "--limit", "25", "--json").json["more"] is False
    assert payloads(run, "tail", "--limit", "12") == list(range(13, 25))
    assert payloads(run, "read", "orders") == list(range(25))


def test_dead_letters_delivered_again(worked: Run, served: Serve) -> None:
    served()
    assert worked("dlq", "replay", "journal-dlq/0/0").out == "replayed 1 dead letter\n"
    assert "was replayed already" in worked("dlq", "replay", "journal-dlq/0/0", code=5).err
    done = worked("dlq", "replay", "--topic", ">", "--rate", "50", "--json").json
    assert done == {"replayed": 1, "passed_over": 0}
    assert worked("dlq", "list").err == "no open dead letters\n"
    states = [letter["state"] for letter in worked("dlq", "list", "--all", "--json").json["dead_letters"]]
    assert states == ["replayed", "replayed"]


def test_dead_letters_put_away(worked: Run, served: Serve) -> None:
    served()
    assert "--yes" in worked("dlq", "purge", code=2).err
    Path("there").touch()
    worked("dlq", "purge", "--yes", "--export", "there", code=5)
    worked("dlq", "purge", "journal-dlq/0/0", "--yes", "--export", "purged.jsonl")
    exported = json.loads(Path("purged.jsonl").read_text())
    assert exported["event"]["headers"]["postbus.dlq.origin_offset"] == "3"
    assert worked("dlq", "purge", "--yes", "--json").json == {"purged": 1, "exported": None}
    assert [event["topic"] for event in worked("tail", "--json").lines][-2:] == ["audit.dlq.purged"] * 2


def test_subscriptions_are_forgotten(worked: Run, served: Serve) -> None:
    server = served()
    server.topic(ORDERS)
    made = {"id": "puller", "topic": ORDERS}
    assert server.client.post("/v1/bus/subscriptions", json=made).status_code == 201
    assert worked("subscriptions", "--delete", "puller", "--yes").out == "deleted puller\n"
    worked("subscriptions", "--delete", "puller", "--yes", code=4)
    refused = worked("subscriptions", "--delete", "worker", "--yes", code=5)
    assert "in a program" in refused.err
    assert "--data" in refused.err
    assert len(worked("subscriptions", "--json").json["subscriptions"]) == 3


# --- following --------------------------------------------------------------------------------------------------------


def serving() -> Any:
    return started("serve", "--unix", "bus.sock", "--port", "0")


def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    while b"stop" not in (line := next_line(server)):
        assert line, "it ended"


@pytest.mark.usefixtures("data")
def test_followers_go_on_when_the_server_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    url = ("--url", "unix:bus.sock")

    def publish(*numbers: int) -> None:
        for number in numbers:
            done = process("publish", "orders", str(number), *url)
            assert done.returncode == 0, done

    monkeypatch.delenv("POSTBUS_URL", raising=False)
    with serving() as server:
        wait_until_ready(server)
        assert process("topics", "create", "orders", "--partitions", "2", *url).returncode == 0
        publish(0)
        with (
            started("tail", "--follow", "--json", *url) as tail,
            started("read", "orders", "-f", "--json", *url) as read,
        ):
            for follower in (tail, read):
                assert json.loads(next_line(follower))["payload"] == 0
            publish(1)
            for follower in (tail, read):
                assert json.loads(next_line(follower))["payload"] == 1
            server.kill()
            server.wait(TIMEOUT_S)
            with serving() as again:
                wait_until_ready(again)
                publish(2, 3)
                for follower in (tail, read):
                    assert {json.loads(next_line(follower))["payload"] for _ in range(2)} == {2, 3}
                tail.send_signal(signal.SIGINT)
                assert (tail.wait(TIMEOUT_S), tail.stderr and tail.stderr.read()) == (130, b"")


def test_tail_sees_topics_that_are_made_later(run: Run, served: Serve) -> None:
    served()
    run("topics", "create", "first")
    run("publish", "first", "0")
    with started("tail", "local.>", "--follow", "--json") as reader:
        assert json.loads(next_line(reader))["payload"] == 0
        run("topics", "create", "late")
        run("publish", "late", "1")
        assert json.loads(next_line(reader))["stream"] == "local.default.late"


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["topics", "list"],
        ["publish", "orders", "1"],
        ["tail"],
        ["tail", "-f"],
        ["read", "orders", "-f"],
        ["dlq", "list"],
    ],
)
def test_a_server_that_is_not_there(run: Run, data: Path, words: list[str]) -> None:
    there = ("--url", "http://127.0.0.1:1")
    done = run(*words, *there, code=7)
    assert re.match(
        r"error: the server cannot be reached: .*\nhint: is a server running at http://127.0.0.1:1\?\n", done.err
    )
    assert run(*words, *there, "--json", code=7).error["code"] == "unreachable"
    assert not data.exists()


class Stranger(BaseHTTPRequestHandler):
    """Answers everything with the same page."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize("status", [200, 404])
def test_a_server_that_is_something_else(run: Run, status: int) -> None:
    with HTTPServer(("127.0.0.1", 0), type("Other", (Stranger,), {"status": status})) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            for words in (["tail"], ["topics", "list"], ["dlq", "show", "a-dlq/0/0"]):
                done = run(*words, "--url", f"http://127.0.0.1:{other.server_port}", code=7)
                assert "is no Postbus server" in done.err
        finally:
            other.shutdown()
            thread.join()


@pytest.mark.parametrize("url", ["", "x", "ftp://127.0.0.1", "http://", "http://a:b"])
def test_an_address_that_is_none(run: Run, url: str) -> None:
    done = run("topics", "list", "--url", url, code=2)
    assert "is no address of a server" in done.err


def test_whom_the_server_does_not_let_in(run: Run, served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = served()
    server.topic("acme.eu.orders")
    server.topic(ORDERS)
    key = server.key("acme.eu", "publish", source="shop")
    assert run("topics", "list", "--json", code=1).error["code"] == "unauthenticated"
    assert "error: " in run("tail", "--api-key", "pb_nonsense", code=1).err
    monkeypatch.setenv("POSTBUS_KEY", key)
    assert run("publish", "orders", "1", "--tenant", "acme.eu").out == "published acme.eu.orders/0/0\n"
    assert run("append", "acme.eu.orders", "1").out == "appended acme.eu.orders/0/1\n"
    run("publish", "orders", "1", "--tenant", "acme.eu", "--source", "other", code=2)
    run("publish", ORDERS, "1", code=4)
    assert run("read", "acme.eu.orders", "--json", code=1).error["code"] == "forbidden"
    monkeypatch.setenv("POSTBUS_KEY", server.key("acme.eu", "subscribe"))
    assert [event["source"] for event in run("read", "acme.eu.orders", "--json").lines] == ["shop", "shop"]
    assert [topic["topic"] for topic in run("topics", "list", "--json").json["topics"]] == [
        "acme.eu.journal",
        "acme.eu.orders",
    ]
    run("topics", "create", "acme.eu.more", code=1)
    run("topics", "delete", "acme.eu.orders", "--yes", code=1)
    run("stats", "--tenant", "acme.eu", code=1)
    run("tail", code=4)


def test_the_command_line_beats_the_environment(run: Run, served: Serve, tmp_path: Path) -> None:
    server = served()
    server.topic(ORDERS)
    run("topics", "show", "orders")  # POSTBUS_URL beats POSTBUS_DATA
    other = str(tmp_path / "other")
    run("topics", "show", "orders", "--data", other, code=4)
    run("topics", "create", "bills", "--data", other)
    run("topics", "show", "bills", code=4)
    for words in (["--url", server.url, "--data", other], ["--data", other, "--url", server.url]):
        assert "give --url or --data, one of the two" in run("topics", "list", *words, code=2).err
        assert "one of the two" in run("publish", "orders", "1", *words, "--json", code=2).error["message"]


@pytest.mark.parametrize(
    "words",
    [
        ["verify"],
        ["salvage", "out"],
        ["backup", "out"],
        ["restore", "out"],
        ["compact"],
        ["demo"],
        ["requeue", "1"],
        ["consumers"],
        ["keys", "list"],
        ["quota", "list"],
        ["serve"],
    ],
)
def test_what_only_works_on_a_folder_says_so(run: Run, data: Path, words: list[str]) -> None:
    done = run(*words, "--url", "http://127.0.0.1:1", code=2)
    assert "No such option: --url" in done.err
    assert "run it on the server's machine with --data" in done.err
    assert not data.exists()
