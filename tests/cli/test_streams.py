from __future__ import annotations

from tests.cli.command_line import (
    ORDERS,
    Run,
    on_terminal,
    without_colour,
)

# --- streams, consumers, lag ------------------------------------------------------------------------------------------


def test_streams(five: Run) -> None:
    header, row = five("streams").out.splitlines()
    assert header.split() == ["STREAM", "PARTITION", "FIRST", "NEXT", "EVENTS", "SIZE"]
    assert row.split()[:5] == [ORDERS, "0", "0", "5", "5"]
    (facts,) = five("streams", "orders", "--json").json["streams"]
    assert facts.keys() == {"name", "epoch", "created_at", "settings", "partitions", "count", "bytes"}
    (part,) = facts["partitions"]
    assert part.items() >= {"partition": 0, "first_offset": 0, "high_water_mark": 5, "count": 5}.items()
    five("streams", "orders", "--create")
    five("streams", "orders", "--create", "--partitions", "2", code=5)
    five("streams", "nothing", code=4)


def test_consumers(five: Run) -> None:
    assert five("consumers").err == five("lag").err == "no consumers\n"
    header, row = five("consumers", "orders", "--create", "kitchen").out.splitlines()
    assert header.split() == ["STREAM", "CONSUMER", "START", "PARTITION", "NEXT", "COMMITTED", "MISSED"]
    assert row.split() == [ORDERS, "kitchen", "latest", "0", "5", "-1", "0"]
    five("consumers", "orders", "--create", "kitchen")
    five("consumers", "orders", "--create", "kitchen", "--start", "earliest", code=5)
    moved = five("consumers", "orders", "--reset", "kitchen", "--start", "3", "--json").json["consumers"][0]
    assert moved["cursors"] == [{"partition": 0, "next_offset": 3, "committed": 2, "skipped": 0}]
    assert moved["start"] == {"policy": "latest", "offset": None, "time": None}
    early = five("consumers", "orders", "--create", "early", "--start", "2020-01-01T00:00:00Z", "--json").json
    assert early["consumers"][0]["start"]["time"] == "2020-01-01T00:00:00Z"
    assert [one["id"] for one in five("consumers", "--json").json["consumers"]] == ["early", "kitchen"]
    five("consumers", "orders", "--delete", "early")
    five("consumers", "orders", "--delete", "early", code=4)
    five("consumers", "orders", "--reset", "early", "--start", "0", code=4)
    five("consumers", "orders", "--reset", "kitchen", "--start", "6", code=2)
    five("consumers", "nothing", code=4)
    five("lag", "nothing", code=4)
    five("lag", "orders", "early", code=4)
    header, row = five("lag").out.splitlines()
    assert header.split() == ["STREAM", "CONSUMER", "PARTITION", "COMMITTED", "NEXT", "LAG"]
    assert row.split() == [ORDERS, "kitchen", "0", "2", "5", "2"]
    (lag,) = five("lag", "orders", "--json").json["consumers"]
    assert lag["partitions"] == [{"partition": 0, "committed": 2, "high_water_mark": 5, "lag": 2}]


def test_nothing_is_cut_off_where_a_table_is_narrow(run: Run) -> None:
    name = f"{'n' * 80}.{'t' * 80}.{'s' * 80}"
    run("streams", name, "--create")
    assert name in run("streams").out
    shown = without_colour(on_terminal("streams", columns=60)[1]).splitlines()
    assert "".join(line.split()[0] for line in shown[1:]) == name
