from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from postbus import EventBus, StreamSettings
from postbus.envelope import draft
from postbus.model import Retention
from tests.cli.command_line import JOURNAL, Run, on_terminal, without_colour


def ids(step: dict[str, Any]) -> dict[str, Any]:
    """The ids of a tree."""
    return {step["id"]: [ids(child) for child in step["children"]]}


def test_a_root_without_a_correlation_is_found_by_its_address(worked: Run) -> None:
    found = worked("trace", f"{JOURNAL}/0/0", "--json").json
    assert found.items() >= {"correlation_id": f"{JOURNAL}/0/0", "events": 2, "left_out": 0}.items()
    (root,) = found["roots"]
    assert ids(root) == {f"{JOURNAL}/0/0": [{f"{JOURNAL}/0/3": []}]}
    assert (
        root.items() >= {"topic": "job.a", "source": "boss", "caused_by": None, "after_ms": 0, "status": "done"}.items()
    )
    assert {d["subscription"]: d["status"] for d in root["deliveries"]} == {"witness": "done", "worker": "done"}
    (child,) = root["children"]
    assert child.items() >= {"topic": "bad.a", "caused_by": root["id"], "status": "failed", "source": "worker"}.items()
    fragile, witness = child["deliveries"]
    assert fragile.items() >= {"subscription": "fragile", "status": "failed", "attempts": 2, "replays": 0}.items()
    assert fragile["dead_letter"] == f"{JOURNAL}-dlq/0/0"
    assert fragile["error"].startswith("ValueError")
    assert witness.items() >= {"status": "done", "error": None, "dead_letter": None}.items()
    assert child["after_ms"] > 0 < fragile["took_ms"]
    assert round(child["after_ms"] + fragile["took_ms"], 3) <= round(found["took_ms"], 3)


@pytest.mark.parametrize("name", ["case-7", "journal/0/1", "journal/0/4", f"{JOURNAL}/0/4"])
def test_a_correlation_by_its_id_or_by_any_of_its_events(worked: Run, name: str) -> None:
    found = worked("trace", name, "--json").json
    assert found["correlation_id"] == "case-7"
    assert [ids(root) for root in found["roots"]] == [{f"{JOURNAL}/0/1": [{f"{JOURNAL}/0/4": []}]}]


def test_the_tree_for_people(worked: Run) -> None:
    done = worked("trace", "journal/0/0")
    root, *rest = done.out.splitlines()
    assert root.startswith("job.a  journal/0/0  20")
    assert root.endswith("Z  from boss")
    assert [line[:13] for line in rest] == [
        "├── ✓ witness",
        "├── ✓ worker ",
        "└── bad.a  jo",
        "    ├── ✗ fra",
        "    └── ✓ wit",
    ]
    assert r"failed after " in rest[3]
    assert r", 2 attempts: ValueError: cannot take\x1b[31m {'n': 1}  dead letter journal-dlq/0/0" in rest[3]
    assert done.err.startswith("2 events in ")
    code, printed = on_terminal("trace", "journal/0/0")
    assert code == 0
    assert max(map(len, without_colour(printed).splitlines())) <= 80


def test_what_was_replayed_and_what_waits(worked: Run) -> None:
    worked("dlq", "replay", "journal-dlq/0/0")
    (root,) = worked("trace", "journal/0/0", "--json").json["roots"]
    assert root["children"][0]["deliveries"][0].items() >= {"status": "pending", "replays": 1, "took_ms": None}.items()
    assert "… fragile  pending, replayed" in worked("trace", "journal/0/0").out


def test_an_event_that_led_to_nothing(worked: Run) -> None:
    (root,) = worked("trace", "journal/0/2", "--json").json["roots"]
    assert ids(root) == {f"{JOURNAL}/0/2": []}
    worked("subscriptions", "--delete", "witness", "--yes")
    assert "nobody subscribes" in worked("trace", "journal/0/2").out


def test_what_nobody_knows(worked: Run) -> None:
    for name in ("case-8", "journal/0/99", "nothing/0/0", "journal/0/x", "journal/7/0"):
        assert "no event has the correlation" in worked("trace", name, code=4).err
    worked("trace", "case-7", "--tenant", "acme.eu", code=4)


def test_a_cause_that_is_not_kept_any_more(run: Run, data: Path) -> None:
    async def prepare() -> None:
        bus = EventBus(data)
        stream = "local.default.orders"
        await bus.ensure_stream(stream, StreamSettings(retention=Retention(count=0)))
        first = await bus.publish(stream, "shop", 1)
        log = await bus.open()
        cause = {"postbus.causation_id": first.id, "postbus.hops": "1"}
        derived = [draft("a.b", "x", number, correlation_id=first.id, system_headers=cause) for number in range(2)]
        await log.append(bus.journal, derived)
        await log.trim(stream)
        await bus.stop()

    asyncio.run(prepare())
    found = run("trace", "orders/0/0", "--json").json
    assert [root["caused_by"] for root in found["roots"]] == ["local.default.orders/0/0"] * 2
    assert "caused by orders/0/0, which is not kept" in run("trace", "orders/0/0").out
