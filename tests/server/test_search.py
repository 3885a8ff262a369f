from __future__ import annotations

import threading
from typing import Any

import httpx2
import pytest

from postbus.bus.search import find_news
from tests.server.conftest import RunningServer

EVENTS = "/v1/bus/events"
ORDERS, BILLS = "acme.prod.orders", "acme.prod.bills"
ACME = {"namespace": "acme", "tenant": "prod"}


def publish(server: RunningServer, topic: str, *payloads: Any, **facts: Any) -> None:
    events = [{"topic": topic, "payload": payload, **facts} for payload in payloads]
    assert server.client.post("/v1/bus/publish/batch", json={"events": events}).status_code == 200


@pytest.fixture
def filled(server: RunningServer) -> RunningServer:
    """Orders 0 to 4 in two partitions, bills 5 and 6, and something of another tenant."""
    for topic, partitions in ((ORDERS, 2), (BILLS, 1), ("umbrella.lab.orders", 1)):
        server.topic(topic, partitions=partitions)
    for number in range(5):
        publish(server, ORDERS, number, correlation_id="case-7", occurred_at=f"2026-01-31T1{number}:00:00Z")
    publish(server, "umbrella.lab.orders", "secret", correlation_id="case-7")
    publish(server, BILLS, 5, 6)
    return server


def ask(client: httpx2.Client, **query: Any) -> dict[str, Any]:
    answer = client.get(EVENTS, params=ACME | query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def payloads(found: dict[str, Any]) -> list[Any]:
    return [one["event"]["payload"] for one in found["events"]]


# --- finding ----------------------------------------------------------------------------------------------------------


def test_find_by_every_field(filled: RunningServer) -> None:
    client = filled.client
    assert payloads(ask(client)) == [0, 1, 2, 3, 4, 5, 6]
    assert payloads(ask(client, topic="acme.*.bills")) == [5, 6]
    assert payloads(ask(client, correlation_id="case-7")) == [0, 1, 2, 3, 4]
    assert payloads(ask(client, since="2026-01-31T12:00:00Z", until="2026-01-31T14:00:00Z")) == [2, 3]
    assert payloads(ask(client, status="failed")) == []
    assert payloads(ask(client, limit=2)) == [5, 6]
    assert payloads(ask(client, limit=0)) == []
    first = ask(client)["events"][0]
    assert first["event"].items() >= {"id": f"{ORDERS}/0/0", "topic": ORDERS, "correlation_id": "case-7"}.items()
    assert first.keys() == {"event", "journal_id", "status", "error", "processed_at"}


def test_pages_go_back_to_the_first_event(filled: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for scanned in (10_000, 2):  # also when a request looks at less than it could find
        monkeypatch.setattr("postbus.bus.search.SCANNED_MAX", scanned)
        found: list[Any] = []
        page = ask(filled.client, limit=3)
        while page["older"] is not None:
            found[:0] = payloads(page)
            page = ask(filled.client, limit=3, before=page["older"])
        assert payloads(page) + found == [0, 1, 2, 3, 4, 5, 6]


def test_a_page_is_bounded_in_bytes(filled: RunningServer) -> None:
    publish(filled, BILLS, *["x" * 900_000] * 6)
    page = ask(filled.client, topic=BILLS)
    assert 0 < len(page["events"]) < 6
    assert payloads(ask(filled.client, topic=BILLS, before=page["older"]))[:2] == [5, 6]
    read = filled.client.get(f"/v1/bus/topics/{BILLS}/events").json()["events"]
    assert [event["offset"] for event in read] == list(range(len(read)))


@pytest.mark.parametrize(
    "query",
    [
        {"topic": "a..b"},
        {"since": "yesterday"},
        {"until": "2026-13-01T00:00:00Z"},
        {"status": "lost"},
        {"limit": "1001"},
        {"limit": "-1"},
        {"before": "-1"},
        {"after": str(1 << 63)},
        {"after": "1", "before": "2"},
        {"after": "1", "status": "done"},
        {"after": "1", "limit": "0"},
        {"wait_ms": "30001"},
        {"colour": "red"},
        {"namespace": "acme"},
    ],
)
def test_what_cannot_be_looked_for(client: httpx2.Client, query: dict[str, str]) -> None:
    whose = {} if "namespace" in query else ACME
    answer = client.get(EVENTS, params=whose | query)
    assert (answer.status_code, "code" in answer.json()["error"]) == (400, True)


def test_a_key_finds_what_it_may_read(filled: RunningServer) -> None:
    whole = filled.connect(filled.key("acme.prod", "subscribe"))
    assert payloads(ask(whole)) == [0, 1, 2, 3, 4, 5, 6]
    some = filled.connect(filled.key("acme.prod", ("subscribe", BILLS)))
    assert payloads(ask(some)) == [5, 6]
    assert payloads(ask(some, after=0)) == [5, 6]
    assert some.get(f"/v1/bus/topics/{BILLS}/events").status_code == 200
    assert some.get(f"/v1/bus/topics/{ORDERS}/events").status_code == 403
    assert filled.connect(filled.key("acme.prod", "publish")).get(EVENTS, params=ACME).status_code == 403
    assert whole.get(EVENTS, params={"namespace": "umbrella", "tenant": "lab"}).status_code == 404
    assert payloads(whole.get(EVENTS).json()) == [0, 1, 2, 3, 4, 5, 6]


# --- waiting for new ones ---------------------------------------------------------------------------------------------


def test_news_come_once_each(filled: RunningServer) -> None:
    end = ask(filled.client, limit=0)["end"]
    assert ask(filled.client, after=end) == {"events": [], "older": None, "end": end}
    publish(filled, "umbrella.lab.orders", "secret")
    publish(filled, ORDERS, 7, 8, 9)
    page = ask(filled.client, after=end, limit=2)
    assert payloads(page) == [7, 8]
    assert payloads(ask(filled.client, after=page["end"])) == [9]
    assert payloads(ask(filled.client, after=end, topic=BILLS)) == []


def test_whoever_waits_is_told_at_once(filled: RunningServer) -> None:
    end = ask(filled.client, limit=0)["end"]
    found: list[list[Any]] = []
    other = filled.connect()
    waiting = threading.Thread(target=lambda: found.append(payloads(ask(other, after=end, wait_ms=30_000))))
    waiting.start()
    publish(filled, "umbrella.lab.orders", "secret")
    publish(filled, BILLS, "news")
    waiting.join(60)
    assert found == [["news"]]


def test_whoever_waits_goes_when_the_server_goes(filled: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    end = ask(filled.client, limit=0)["end"]
    looked = threading.Event()

    async def look(*arguments: Any) -> Any:
        page = await find_news(*arguments)
        looked.set()
        return page

    monkeypatch.setattr("postbus.server.search.find_news", look)
    found: list[list[Any]] = []
    with httpx2.Client(base_url=filled.url, timeout=60) as other:
        waiting = threading.Thread(target=lambda: found.append(payloads(ask(other, after=end, wait_ms=30_000))))
        waiting.start()
        assert looked.wait(60)
        filled.stop()
        waiting.join(60)
    assert found == [[]]


def test_news_go_on_after_the_last_events_were_removed(filled: RunningServer) -> None:
    end = ask(filled.client, limit=0)["end"]
    assert filled.client.delete(f"/v1/bus/topics/{BILLS}").status_code == 204
    page = ask(filled.client, after=end)
    assert (payloads(page), page["end"] < end) == ([], True)
    publish(filled, ORDERS, "next")
    assert payloads(ask(filled.client, after=page["end"])) == ["next"]


# --- reading ----------------------------------------------------------------------------------------------------------


def test_read_by_place(filled: RunningServer) -> None:
    path = f"/v1/bus/topics/{ORDERS}/events"

    def read(**query: Any) -> list[tuple[int, int]]:
        answer = filled.client.get(path, params=query)
        assert answer.status_code == 200
        return [(event["partition"], event["offset"]) for event in answer.json()["events"]]

    both = read() + read(partition=1)
    assert len(both) == 5
    assert read(partition=0, offset=1, limit=1) == [(0, 1)]
    assert read(offset=99) == []
    assert filled.client.get(path, params={"partition": 2}).status_code == 404
    assert filled.client.get("/v1/bus/topics/acme.prod.nothing/events").status_code == 404
    for bad in ({"offset": -1}, {"limit": 0}, {"partition": "x"}, {"x": 1}):
        assert filled.client.get(path, params=bad).status_code == 400


# --- counts -----------------------------------------------------------------------------------------------------------


def test_stats_tell_a_tenant_nothing_of_others(filled: RunningServer) -> None:
    made = {"id": "worker", "topic": ORDERS, "starting_offset": "earliest"}
    assert filled.client.post("/v1/bus/subscriptions", json=made).status_code == 201
    mine = filled.client.get("/v1/bus/stats", params=ACME).json()
    assert [topic["topic"] for topic in mine["topics"] if topic["events"]] == [BILLS, ORDERS]
    assert (sum(mine["rates"]) >= 3, mine["store_bytes"] > 0) == (True, True)
    states = filled.client.get("/v1/bus/stats/subscriptions", params=ACME).json()["subscriptions"]
    assert [(state["registered"]["id"], state["lag"]) for state in states] == [("worker", 5)]
    assert states == mine["subscriptions"]
    client = filled.connect(filled.key("acme.prod", "admin"))
    own = client.get("/v1/bus/stats").json()
    assert own == mine | {"rates": None, "store_bytes": None, "wal_bytes": None}
    for path in ("/v1/bus/stats", "/v1/bus/stats/subscriptions"):
        assert client.get(path, params={"namespace": "umbrella", "tenant": "lab"}).status_code == 404
        some = filled.connect(filled.key("acme.prod", ("admin", ORDERS), "subscribe"))
        assert some.get(path).status_code == 403
        assert filled.connect(filled.key("acme.prod", ("admin", "acme.prod.*"))).get(path).status_code == 200
