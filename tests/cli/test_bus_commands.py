from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.cli.command_line import (
    JOURNAL,
    ORDERS,
    TIMEOUT_S,
    Run,
    Wait,
    next_line,
    on_terminal,
    process,
    started,
    without_colour,
)

# --- publish ----------------------------------------------------------------------------------------------------------


def test_publish_goes_to_the_journal_or_to_the_stream_of_that_name(run: Run) -> None:
    assert run("publish", "order.paid", '{"order": 17}').out == f"published {JOURNAL}/0/0\n"
    run("streams", "orders", "--create")
    assert run("publish", ORDERS, "1").out == f"published {ORDERS}/0/0\n"
    assert run("publish", "local.default.others", "1").out == f"published {JOURNAL}/0/1\n"
    assert run("publish", "order.paid", "1", "--tenant", "acme.eu").out == "published acme.eu.journal/0/0\n"


def test_publish_takes_every_field(run: Run) -> None:
    payload = '{"a" : 1.0e2, "big": 123456789012345678901234567890}'
    words = ["--source", "shop", "--key", "k", "--native-id", "n", "--variant", "v", "--header", "x=1"]
    words += ["--metadata", '{"m": [1]}', "--correlation-id", "c", "--occurred-at", "2026-01-31T13:00:00+01:00"]
    receipt = run("publish", "a.b", payload, *words, "--json").json
    assert receipt.keys() >= {"id", "stream", "partition", "offset", "duplicate", "durability", "created_at"}
    out = run("tail", "--json").out
    assert f'"payload":{payload},' in out
    event = json.loads(out)
    assert event.items() >= {"topic": "a.b", "source": "shop", "key": "k", "native_id": "n", "variant": "v"}.items()
    assert event.items() >= {"headers": {"x": "1"}, "metadata": {"m": [1]}, "correlation_id": "c"}.items()
    assert event["occurred_at"] == "2026-01-31T12:00:00Z"
    assert run("publish", "a.b", payload, *words).out == f"already there: {JOURNAL}/0/0\n"
    run("publish", "a.b", "2", *words, code=5)


def test_a_refused_event_makes_nothing(run: Run, data: Path) -> None:
    assert run("publish", "a.b", '{"a": NaN}', "--json", code=2).error["position"] == 6
    run("publish", "a.b", "1", "--metadata", "[]", code=2)
    assert not data.exists()
    assert process("publish", "a.b", "-", given=b'{"from": "stdin"}').returncode == 0
    assert run("tail", "--json").json["payload"] == {"from": "stdin"}


def test_a_running_process_is_woken(run: Run, running: Wait) -> None:
    run("publish", "idle.talk", "1", "--no-create")
    assert running("saw") == f"saw idle.talk {JOURNAL}/0/0"


# --- tail -------------------------------------------------------------------------------------------------------------


def test_tail_shows_the_last_events_of_the_journal_and_the_streams(run: Run) -> None:
    run("streams", "orders", "--create")
    for number in range(3):
        run("publish", "email.received", str(number))
        run("publish", ORDERS, str(number))
    lines = run("tail").out.splitlines()
    assert [line.split()[0] for line in lines] == [f"{name}/0/{n}" for n in range(3) for name in ("journal", "orders")]
    assert re.fullmatch(r"journal/0/0  \d{4}-\d\d-\d\dT[\d:.]+Z  email\.received  source=cli  0", lines[0])
    assert [event["payload"] for event in run("tail", "email.*", "--limit", "2", "--json").lines] == [1, 2]
    assert [event["stream"] for event in run("tail", "-n", "3", "--json").lines] == [ORDERS, JOURNAL, ORDERS]
    assert run("tail", "nothing").err == "no events there\n"
    assert run("tail", "--limit", "0").out == ""


def test_tail_leaves_out_dead_letters_and_what_the_bus_itself_notes(worked: Run) -> None:
    events = worked("tail", "--json").lines
    assert [event["topic"] for event in events] == ["job.a", "job.b", "idle.talk", "bad.a", "bad.b"]
    assert events[3]["headers"]["postbus.causation_id"] == f"{JOURNAL}/0/0"
    assert "postbus." not in worked("tail").out


def test_tail_follows_other_processes(run: Run) -> None:
    run("publish", "email.received", "0")
    with started("tail", "email.*", "--follow", "--json") as reader:
        assert json.loads(next_line(reader))["payload"] == 0
        run("publish", "other", "1")
        run("publish", "email.received", "2")
        assert json.loads(next_line(reader))["payload"] == 2
        run("append", "late", "3", "--topic", "email.late")  # a stream that was not there before
        assert json.loads(next_line(reader))["stream"] == "local.default.late"
        reader.send_signal(signal.SIGINT)
        assert (reader.wait(TIMEOUT_S), reader.stderr and reader.stderr.read()) == (130, b"")


def test_nothing_in_an_event_can_steer_a_terminal(run: Run) -> None:
    run("publish", "a.b", '"\u202e"', "--key", "\x1b[31m\n")
    assert run("tail").out.endswith('key=\\x1b[31m\\n  "\\u202e"\n')
    _, printed = on_terminal("tail")
    assert without_colour(printed) == run("tail").out


# --- events -----------------------------------------------------------------------------------------------------------


def test_events_by_status(worked: Run) -> None:
    found = worked("events", "--json").json
    assert found["more"] is False
    assert [(event["topic"], event["status"]) for event in found["events"]] == [
        ("job.a", "done"),
        ("job.b", "done"),
        ("idle.talk", "done"),
        ("bad.a", "failed"),
        ("bad.b", "failed"),
    ]
    numbers = [event["journal_id"] for event in found["events"]]
    assert numbers == sorted(numbers)
    for status, count in {"done": 3, "failed": 2, "pending": 0, "processing": 0}.items():
        chosen = worked("events", "--status", status, "--json").json["events"]
        assert [event for event in found["events"] if event["status"] == status] == chosen
        assert len(chosen) == count
    failed = found["events"][3]
    assert failed["error"].startswith("ValueError: cannot take")
    assert failed["processed_at"] > failed["created_at"]
    assert failed["payload"] == {"n": 1}


def test_events_nobody_has_handled_yet_are_pending(worked: Run) -> None:
    worked("publish", "job.c", "1")
    (event,) = worked("events", "--status", "pending", "--json").json["events"]
    assert (event["topic"], event["processed_at"]) == ("job.c", None)
    lines = worked("events", "--limit", "2").out.splitlines()
    assert re.match(r"failed +journal/0/4  .*  bad\.b  ", lines[0])
    assert lines[1] == r"            ValueError: cannot take\x1b[31m {'n': 2}"
    assert re.match(r"pending +journal/0/5  .*  job\.c  ", lines[2])


def test_events_by_topic_correlation_and_limit(worked: Run) -> None:
    def topics(*words: str) -> list[str]:
        return [event["topic"] for event in worked("events", *words, "--json").json["events"]]

    assert topics("--topic", "bad.*") == ["bad.a", "bad.b"]
    assert topics("--correlation", "case-7") == ["job.b", "bad.b"]
    assert topics("--correlation", "journal/0/0") == ["bad.a"]
    assert topics("--correlation", "case-7", "--topic", "bad.*", "--status", "failed") == ["bad.b"]
    assert topics("--limit", "2") == ["bad.a", "bad.b"]
    assert worked("events", "--limit", "2", "--json").json["more"] is True
    assert worked("events", "--limit", "5").err == ""
    assert worked("events", "--limit", "4").err == "there are older ones; --limit shows more than 4\n"
    assert worked("events", "--topic", "nothing").err == "no events fit\n"
    assert topics("--tenant", "acme.eu") == []


def test_events_by_time(run: Run) -> None:
    for hour in (10, 11, 12):
        run("publish", "a.b", str(hour), "--occurred-at", f"2026-01-31T{hour}:00:00Z")
    run("publish", "a.b", "99")

    def payloads(*words: str) -> list[int]:
        return [event["payload"] for event in run("events", *words, "--json").json["events"]]

    assert payloads("--since", "2026-01-31T11:00:00Z", "--until", "2026-01-31T12:00:00Z") == [11]
    assert payloads("--until", "2026-01-31T12:00:00+01:00") == [10]
    assert payloads("--since", "10m") == [99]
    assert payloads("--until", "10m") == [10, 11, 12]
    assert payloads("--since", "10m", "--until", "5m") == []


# --- subscriptions ----------------------------------------------------------------------------------------------------


def test_subscriptions(worked: Run) -> None:
    header, *rows = (line.split() for line in worked("subscriptions").out.splitlines())
    assert header == ["SUBSCRIPTION", "PATTERNS", "LAG", "PENDING", "RUNNING", "WAITING", "DEAD", "OWNER"]
    assert rows[0] == ["fragile", "bad.*", "0", "0", "0", "0", "2", "-"]
    worked("publish", "job.c", "1")
    worked("publish", "idle.talk", "1")
    found = {state["id"]: state for state in worked("subscriptions", "--json").json["subscriptions"]}
    assert found.keys() == {"fragile", "witness", "worker"}
    assert [found[name]["lag"] for name in sorted(found)] == [2, 2, 2]
    assert [found[name]["pending"] for name in sorted(found)] == [0, 2, 1]
    assert found["worker"].items() >= {"patterns": ["job.*"], "ordering": "key", "owners": []}.items()
    assert found["worker"]["retry"]["max_attempts"] == 2


def test_subscriptions_name_the_process_that_works_on_them(run: Run, running: Wait) -> None:
    run("publish", "idle.talk", "1")
    running("saw")
    states = run("subscriptions", "--json").json["subscriptions"]
    assert len({pid for state in states for pid in state["owners"]}) == 1
    assert re.search(r"witness +> .* pid \d+$", run("subscriptions").out, re.MULTILINE)


def test_deleting_a_subscription_asks_first(worked: Run) -> None:
    worked("subscriptions", "--delete", "nobody", "--yes", code=4)
    assert "--yes" in worked("subscriptions", "--delete", "fragile", code=2).err
    code, printed = on_terminal("subscriptions", "--delete", "fragile", given="n\n")
    assert (code, "2 open dead letters)? [y/N]" in printed) == (1, True)
    assert len(worked("subscriptions", "--json").json["subscriptions"]) == 3
    assert on_terminal("subscriptions", "--delete", "fragile", given="y\n")[0] == 0
    assert worked("subscriptions", "--delete", "witness", "--yes").out == "deleted witness\n"
    assert worked("subscriptions", "--delete", "worker", "--yes", "--json").json["deleted"]["id"] == "worker"
    assert worked("subscriptions").err == "no subscriptions yet; a program that subscribes makes them\n"


# --- requeue ----------------------------------------------------------------------------------------------------------


def test_requeue_by_number_and_by_address(worked: Run) -> None:
    number = worked("events", "--topic", "bad.a", "--json").json["events"][0]["journal_id"]
    assert worked("requeue", str(number)).out == f"requeued {JOURNAL}/0/3 for fragile\n"
    (done,) = worked("requeue", "journal/0/4", "--json").json["requeued"]
    assert (done["id"], done["subscriptions"]) == (f"{JOURNAL}/0/4", ["fragile"])
    assert [event["topic"] for event in worked("events", "--status", "pending", "--json").json["events"]] == [
        "bad.a",
        "bad.b",
    ]
    assert worked("dlq", "list").err == "no open dead letters\n"


@pytest.mark.parametrize(
    ("word", "code", "message"),
    [
        ("journal/0/0", 5, "has not failed: it is done"),
        ("journal/0/99", 4, "there is no event local.default.journal/0/99"),
        ("nothing/0/0", 4, "there is no event local.default.nothing/0/0"),
        ("journal-dlq/0/0", 4, "there is no event"),
        ("99", 4, "there is no event number 99 in the journal"),
        ("9" * 30, 2, "is no event's address"),
        ("journal", 2, "is no event's address"),
        ("journal/0/-1", 2, "is no event's address"),
    ],
)
def test_requeue_refuses_all_when_one_cannot_be(worked: Run, word: str, code: int, message: str) -> None:
    assert message in worked("requeue", "journal/0/3", word, code=code).err
    assert len(worked("events", "--status", "failed", "--json").json["events"]) == 2


def test_a_running_process_takes_up_what_is_requeued(worked: Run, running: Wait) -> None:
    Path("fixed").touch()
    worked("requeue", "journal/0/3", "journal/0/4")
    assert {running("took"), running("took")} == {f"took bad.a {JOURNAL}/0/3", f"took bad.b {JOURNAL}/0/4"}
