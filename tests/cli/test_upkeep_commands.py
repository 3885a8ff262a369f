from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from postbus import EventBus, StreamSettings
from postbus.bus import stats
from postbus.model import Retention
from tests.cli.command_line import ORDERS, Run, Wait, beside, on_terminal, without_colour


def removed(run: Run, *words: str) -> dict[str, int]:
    duties = run("compact", *words, "--json").json["duties"]
    return {duty["what"]: duty["removed"] for duty in duties if duty["removed"]}


# --- stats ------------------------------------------------------------------------------------------------------------


def test_stats_for_programs(worked: Run) -> None:
    worked("publish", "job.c", "1")
    worked("publish", "order.paid", "1", "--tenant", "acme.eu")
    found = worked("stats", "--json").json
    assert {stream["name"].split(".")[2]: stream["count"] for stream in found["streams"]} == {
        "journal": 6,
        "journal-dlq": 2,
    }
    assert found["statuses"] == {"pending": 1, "processing": 0, "done": 3, "failed": 2, "uncounted": 0}
    assert found["dead_letters"] == {"open": 2, "replayed": 0, "purged": 0}
    assert [state["id"] for state in found["subscriptions"]] == ["fragile", "witness", "worker"]
    assert len(found["rates"]) == 60
    assert sum(found["rates"]) == 9  # of every tenant, dead letters too
    assert found["store_bytes"] > 0
    assert found.keys() >= {"wal_bytes", "durability"}


def test_stats_for_people(worked: Run) -> None:
    shown = worked("stats").out
    assert "events         7 in 2 streams\n" in shown
    assert "statuses       3 done, 0 pending, 0 processing, 2 failed\n" in shown
    assert "dead letters   2 open, 0 replayed, 0 purged\n" in shown
    assert "\nfragile       bad.*       0        0        0        0     2  -\n" in shown
    _, printed = on_terminal("stats")
    assert max(map(len, without_colour(printed).splitlines())) <= 80


def test_a_backlog_that_is_too_long_to_be_counted(worked: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "COUNTED_MAX", 3)
    for _ in range(4):
        worked("publish", "job.c", "1")
    statuses = worked("stats", "--json").json["statuses"]
    assert statuses == {"pending": 1, "processing": 0, "done": 3, "failed": 2, "uncounted": 3}
    assert "3 done, 1 pending, 0 processing, 2 failed, 3 not counted\n" in worked("stats").out


def test_stats_of_an_empty_store(run: Run) -> None:
    run("streams", "orders", "--create")
    assert run("stats", "--json").json["statuses"]["done"] == 0
    assert "events         0 in 1 stream\n" in run("stats").out
    assert "events         0 in 0 streams\n" in run("stats", "--tenant", "acme.eu").out


def test_stats_count_what_runs(run: Run, running: Wait) -> None:
    run("publish", "idle.talk", "1")
    running("saw")
    states = run("stats", "--json").json["subscriptions"]
    assert len({pid for state in states for pid in state["owners"]}) == 1


# --- compact ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def full(worked: Run, data: Path) -> Run:
    """The worked store, with a stream of 10 events that keeps 4."""

    async def fill() -> None:
        bus = EventBus(data)
        await bus.ensure_stream(ORDERS, StreamSettings(retention=Retention(count=4)))
        for number in range(10):
            await bus.publish(ORDERS, "shop", number)
        await bus.stop()

    asyncio.run(fill())
    return worked


def test_compact_applies_the_retention(full: Run) -> None:
    expected = {"events beyond their stream's retention": 6}
    assert removed(full, "--dry-run") == expected
    assert full("streams", "orders", "--json").json["streams"][0]["count"] == 10
    assert removed(full) == expected
    assert full("streams", "orders", "--json").json["streams"][0]["count"] == 4
    assert removed(full) == {}
    assert full("verify").out.startswith("all is well")
    assert [event["payload"] for event in full("events", "--topic", ORDERS, "--json").json["events"]] == [6, 7, 8, 9]


def test_compact_keeps_what_a_reader_has_not_read(full: Run) -> None:
    full("read", "orders", "--consumer", "slow", "--commit", "--limit", "2")
    (duty, *_) = full("compact", "--dry-run", "--json").json["duties"]
    assert (duty["removed"], duty["held_back_by"]) == (2, ["slow"])
    done = full("compact")
    assert done.out.splitlines()[1].split()[0] == "2"
    assert "held back by slow" in done.err
    assert full("streams", "orders", "--json").json["streams"][0]["count"] == 8


def test_compact_keeps_open_dead_letters_unless_told(worked: Run) -> None:
    what = removed(worked, "--older-than", "0s", "--dry-run")
    assert "records of commits" in what
    assert not any("dead letter" in duty for duty in what)
    assert removed(worked, "--older-than", "0s") == what
    assert len(worked("dlq", "list", "--json").json["dead_letters"]) == 2
    assert len(worked("events", "--status", "failed", "--json").json["events"]) == 2
    assert removed(worked, "--failed-older-than", "1h") == {}
    assert removed(worked, "--failed-older-than", "0s", "--dry-run") == {"open dead letters": 2}
    assert removed(worked, "--failed-older-than", "0s") == {"open dead letters": 2}
    assert worked("dlq", "list", "--all").err == "no dead letters\n"
    assert worked("tail", "audit.>", "--json").json["source"] == "cli"
    assert worked("events", "--status", "failed").out == ""


def test_what_waits_for_its_replay_outlives_a_compaction(worked: Run, data: Path) -> None:
    worked("dlq", "replay", "--topic", ">")
    assert "dead letters that were purged or replayed" not in removed(worked, "--older-than", "0s")
    Path("fixed").touch()

    with beside(data) as wait:
        wait("took")
        wait("took")
    assert worked("events", "--status", "done", "--topic", "bad.*", "--json").json["events"][0]["error"] is None
    what = removed(worked, "--older-than", "0s")
    assert what["dead letters that were purged or replayed"] == 2
    assert what["deliveries that are done"] == 2
    assert worked("stats", "--json").json["statuses"] == {
        "pending": 0,
        "processing": 0,
        "done": 5,
        "failed": 0,
        "uncounted": 0,
    }


def test_vacuum_gives_space_back(run: Run, data: Path) -> None:
    Path("in.jsonl").write_text(f'"{"x" * 1000}"\n' * 3000)
    run("append", "orders", "--file", "in.jsonl")

    async def trim() -> None:
        bus = EventBus(data)
        log = await bus.open()
        await log.trim(ORDERS, before=2990)
        await bus.stop()

    asyncio.run(trim())
    before = (data / "postbus.db").stat().st_size
    done = run("compact", "--vacuum", "--json").json["vacuum"]
    assert done == {"bytes_before": before, "bytes_after": (data / "postbus.db").stat().st_size}
    assert done["bytes_after"] < before / 4
    assert run("verify").out == "all is well: 10 events in 2 partitions\n"
    assert run("append", "orders", "1").out == f"appended {ORDERS}/0/3000\n"


def test_compact_beside_a_running_process(worked: Run, running: Wait) -> None:
    worked("compact", "--older-than", "0s", "--vacuum")
    worked("publish", "idle.talk", "1")
    assert running("saw idle.talk local.default.journal/0/5")
    code, printed = on_terminal("compact")
    assert (code, "records of commits" in printed) == (0, True)
