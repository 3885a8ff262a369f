from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from postbus.server import hub
from tests.server.conftest import RunningServer

TOPIC = "agents.demo.orders"
TIMEOUT_S = 60


def test_a_topic_is_made_shown_listed_and_removed(client: httpx2.Client) -> None:
    wanted = {
        "namespace": "agents", "tenant": "demo", "name": "orders", "partitions": 3, "labels": {"team": "a"},
        "retention": {"age_s": 3600, "count": 10},
    }  # fmt: skip
    made = client.post("/v1/bus/topics", json=wanted)
    assert made.status_code == 201, made.text
    topic = made.json()
    assert topic["topic"] == TOPIC
    assert {name: topic[name] for name in ("namespace", "tenant", "name", "partitions", "labels")} == {
        name: wanted[name] for name in ("namespace", "tenant", "name", "partitions", "labels")
    }
    assert topic["retention"] == {"age_s": 3600, "bytes": None, "count": 10}
    assert [one["partition"] for one in topic["extents"]] == [0, 1, 2]
    client.post("/v1/bus/publish", json={"topic": TOPIC, "payload": 1, "key": "a"})
    shown = client.get(f"/v1/bus/topics/{TOPIC}").json()
    assert shown["events"] == 1
    listed = client.get("/v1/bus/topics", params={"namespace": "agents", "tenant": "demo"}).json()
    assert shown in listed["topics"]
    assert client.delete(f"/v1/bus/topics/{TOPIC}").status_code == 204
    assert client.get(f"/v1/bus/topics/{TOPIC}").status_code == 404
    assert client.delete(f"/v1/bus/topics/{TOPIC}").status_code == 404
    assert client.post("/v1/bus/topics", json=wanted).json()["epoch"] == 1


def test_the_default_is_one_partition_and_no_bounds(client: httpx2.Client) -> None:
    topic = client.post("/v1/bus/topics", json={"topic": TOPIC}).json()
    assert (topic["partitions"], topic["labels"]) == (1, {})
    assert set(topic["retention"].values()) == {None}


def test_a_topic_exists_once(client: httpx2.Client) -> None:
    assert client.post("/v1/bus/topics", json={"topic": TOPIC}).status_code == 201
    again = client.post("/v1/bus/topics", json={"topic": TOPIC})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")
    assert client.post("/v1/bus/topics", json={"topic": TOPIC, "partitions": 2}).status_code == 409


def test_exactly_one_of_many_makers_wins(server: RunningServer) -> None:
    def make(number: int) -> int:
        body = {"topic": TOPIC, "labels": {"maker": str(number)}}
        return int(server.client.post("/v1/bus/topics", json=body).status_code)

    with ThreadPoolExecutor(20) as pool:
        statuses = list(pool.map(make, range(100)))
    assert sorted(statuses) == [201] + [409] * 99
    winner = server.client.get(f"/v1/bus/topics/{TOPIC}").json()["labels"]["maker"]
    assert int(winner) == statuses.index(201)


@pytest.mark.parametrize(
    "change",
    [
        {"partitions": 0},
        {"partitions": -1},
        {"partitions": 1025},
        {"partitions": 1.5},
        {"partitions": "3"},
        {"partitions": True},
        {"partitions": 2**64},
        {"labels": {"postbus.x": "1"}},
        {"labels": {str(n): "" for n in range(33)}},
        {"labels": {"a": None}},
        {"retention": {"age_s": -1}},
        {"retention": {"count": 1.5}},
        {"retention": None},
        {"topic": "a.b.c.d"},
        {"topic": ""},
        {"topic": "a..c"},
        {"topic": f"a.b.{'c' * 81}"},
        {"surprise": 1},
    ],
)
def test_bad_settings_are_refused_and_make_nothing(server: RunningServer, change: dict[str, Any]) -> None:
    answer = server.client.post("/v1/bus/topics", json={"topic": TOPIC} | change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert server.call(server.hub.log.streams()) == []


def test_topics_are_listed_page_by_page(server: RunningServer) -> None:
    names = [f"agents.demo.t{number:02}" for number in range(12)]
    for name in names:
        server.topic(name)
    server.topic("agents.other.t00")
    seen: list[str] = []
    query: dict[str, Any] = {"namespace": "agents", "tenant": "demo", "limit": 5}
    while True:
        page = server.client.get("/v1/bus/topics", params=query).json()
        assert len(page["topics"]) <= 5
        seen += [topic["topic"] for topic in page["topics"]]
        if page["next"] is None:
            break
        query["after"] = page["next"]
    assert seen == names
    assert len(server.client.get("/v1/bus/topics").json()["topics"]) == 13


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=1001", "limit=x", "namespace=a", "surprise=1", "limit=1&limit=2", "tenant=a&namespace=."],
)
def test_a_bad_query_is_refused(client: httpx2.Client, query: str) -> None:
    assert client.get(f"/v1/bus/topics?{query}").status_code == 400


@pytest.mark.parametrize("name", ["orders", "a.b", "a.b.c.d", "a.b.%00", "a.b.*", "%F0%9F%92%A9.b.c"])
def test_a_bad_name_in_the_path_is_refused(client: httpx2.Client, name: str) -> None:
    assert client.get(f"/v1/bus/topics/{name}").status_code == 400
    assert client.delete(f"/v1/bus/topics/{name}").status_code == 400


def test_the_journal_cannot_be_removed(server: RunningServer) -> None:
    server.topic("agents.demo.journal")
    assert server.client.delete("/v1/bus/topics/agents.demo.journal").status_code == 409


def test_retention_is_applied_while_the_server_runs(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "HOUSE_S", 0.05)
    client = start_server().client
    client.post("/v1/bus/topics", json={"topic": TOPIC, "retention": {"count": 3}})
    batch = {"events": [{"topic": TOPIC, "payload": number} for number in range(10)]}
    assert client.post("/v1/bus/publish/batch", json=batch).status_code == 200
    deadline = time.monotonic() + TIMEOUT_S
    while (topic := client.get(f"/v1/bus/topics/{TOPIC}").json())["events"] > 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert topic["extents"][0]["first_offset"] == 7
    assert client.get(f"/v1/bus/events/{TOPIC}/0/6").status_code == 404
    assert client.get(f"/v1/bus/events/{TOPIC}/0/7").json()["payload"] == 7


def test_topics_outlive_the_server(start_server: Callable[..., RunningServer]) -> None:
    first = start_server()
    first.client.post("/v1/bus/topics", json={"topic": TOPIC, "partitions": 2})
    sent = first.client.post("/v1/bus/publish", json={"topic": TOPIC, "payload": 1, "key": "k"}).json()
    first.stop()
    second = start_server()
    assert second.client.get(f"/v1/bus/topics/{TOPIC}").json()["partitions"] == 2
    assert second.client.get(f"/v1/bus/events/{sent['id']}").json()["payload"] == 1
