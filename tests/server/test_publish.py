from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.server.conftest import RunningServer

TOPIC = "agents.demo.orders"
JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def topic(server: RunningServer) -> None:
    server.topic(TOPIC)


def post(client: httpx2.Client, body: str | bytes, path: str = "/v1/bus/publish") -> httpx2.Response:
    return client.post(path, content=body, headers=JSON)


def events(server: RunningServer, topic: str = TOPIC) -> list[bytes]:
    return [event.payload_json for event in server.call(server.hub.log.fetch(topic, 0, 0, 1000))]


def test_an_event_is_published_with_all_its_fields(client: httpx2.Client) -> None:
    sent = {
        "namespace": "agents", "tenant": "demo", "name": "orders", "key": "k", "payload": {"a": [1, None]},
        "headers": {"x": "y"}, "native_id": "n-1", "variant": "v", "metadata": {"m": 1}, "correlation_id": "c-1",
        "occurred_at": "2026-01-31T12:00:00+02:00", "delivery_handle": {"kind": "k"}, "source": "shop",
    }  # fmt: skip
    answer = client.post("/v1/bus/publish", json=sent)
    assert answer.status_code == 200, answer.text
    receipt = answer.json()
    assert receipt.pop("produced_at").endswith("Z")
    assert receipt == {"id": f"{TOPIC}/0/0", "topic": TOPIC, "partition": 0, "offset": 0, "duplicate": False}
    shown = client.get(f"/v1/bus/events/{TOPIC}/0/0").json()
    kept = {name: shown[name] for name in ("key", "payload", "headers", "native_id", "variant", "metadata", "source")}
    assert kept == {name: sent[name] for name in kept}
    assert shown["occurred_at"] == "2026-01-31T10:00:00Z"
    assert (shown["correlation_id"], shown["delivery_handle"], shown["trust"]) == ("c-1", {"kind": "k"}, "trusted")


@pytest.mark.parametrize(
    "payload",
    [
        b'{"b": 1,  "a":\t[1.50, 1e2, -0.0]}',
        b'"\\u00e9\xc3\xa9\\/"',
        b"123456789012345678901234567890",
        b"18446744073709551616",
        b"null",
        b'{"deep": ' + b"[" * 63 + b"]" * 63 + b"}",
        b"[" + b" " * 70_000 + b"1]",
    ],
)
def test_the_stored_bytes_are_those_that_came(server: RunningServer, payload: bytes) -> None:
    answer = post(server.client, b'{"topic": "%s", "payload":  %s }' % (TOPIC.encode(), payload))
    assert answer.status_code == 200, answer.text
    assert events(server) == [payload]
    assert payload in server.client.get(f"/v1/bus/events/{TOPIC}/0/0").content


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"NaN", "body"),
        (b"Infinity", "body"),
        (b'{"a": 1, "a": 2}', "duplicate"),
        (b'{"a": 1, "\\u0061": 2}', "duplicate"),
        (b'"\\ud800"', "surrogate"),
        (b'"\xff"', "UTF-8"),
        (b"[" * 65 + b"]" * 65, "nested deeper than 64"),
        (b"[" * 100_000 + b"]" * 100_000, "nested deeper"),
        (b"1e400", "body"),
        (b'"' + b"x" * (1 << 20) + b'"', "limit is 1048576"),
        (b"{", "body"),
        (b"", "body"),
    ],
)
def test_a_payload_that_is_no_strict_json_is_refused(server: RunningServer, payload: bytes, says: str) -> None:
    answer = post(server.client, b'{"topic": "%s", "payload": %s}' % (TOPIC.encode(), payload))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert says in error["message"]
    assert error["code"] in {"invalid_payload", "limit_exceeded"}
    assert events(server) == []


def test_the_refusal_names_the_byte(client: httpx2.Client) -> None:
    body = b'{"topic": "agents.demo.orders", "payload": [1, NaN]}'
    assert post(client, body).json()["error"]["position"] == body.index(b"NaN")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"topic": "a.b"}, "3 tokens"),
        ({"topic": 5}, "Expected `str"),
        ({"topic": None}, "topic is missing"),
        ({"topic": "agents.demo.*"}, "stream name"),
        ({"topic": TOPIC, "tenant": "other"}, "disagree"),
        ({"headers": {"Postbus.x": "1"}}, "reserved"),
        ({"headers": {"a": 1}}, "Expected `str`"),
        ({"headers": {str(n): "" for n in range(21)}}, "limit is 20"),
        ({"key": ""}, "key is empty"),
        ({"key": "k" * 257}, "limit is 256"),
        ({"metadata": []}, "JSON object"),
        ({"occurred_at": "yesterday"}, "instant"),
        ({"source": "no spaces"}, "source"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_bad_field_is_refused_and_changes_nothing(server: RunningServer, change: dict[str, Any], says: str) -> None:
    answer = server.client.post("/v1/bus/publish", json={"topic": TOPIC, "payload": 1} | change)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]
    assert events(server) == []


def test_the_payload_must_be_given(client: httpx2.Client) -> None:
    answer = client.post("/v1/bus/publish", json={"topic": TOPIC})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid")


def test_an_unregistered_topic_is_a_404_and_makes_nothing(server: RunningServer) -> None:
    before = server.call(server.hub.log.streams())
    for name in ("agents.demo.other", "nobody.here.orders"):
        answer = server.client.post("/v1/bus/publish", json={"topic": name, "payload": 1})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert {one.name for one in server.call(server.hub.log.streams())} <= {
        *(one.name for one in before),
        "agents.demo.journal",
    }


def test_a_native_id_makes_publishing_idempotent(server: RunningServer) -> None:
    body = {"topic": TOPIC, "payload": {"a": 1}, "native_id": "n"}
    first, again = (server.client.post("/v1/bus/publish", json=body).json() for _ in range(2))
    assert again == first | {"duplicate": True}
    other = server.client.post("/v1/bus/publish", json=body | {"payload": 2})
    assert other.status_code == 409
    assert other.json()["error"]["code"] == "idempotency_conflict"
    assert other.json()["error"]["offset"] == 0
    assert len(events(server)) == 1


@pytest.mark.parametrize("name", ["system.user.notify", "system.a.b"])
def test_topics_of_the_system_are_refused(client: httpx2.Client, name: str) -> None:
    assert client.post("/v1/bus/publish", json={"topic": name, "payload": 1}).status_code == 403
    assert client.post("/v1/bus/topics", json={"topic": name}).status_code == 403
    batch = {"events": [{"topic": name, "payload": 1}]}
    assert client.post("/v1/bus/publish/batch", json=batch).status_code == 403


def test_a_dead_letter_topic_takes_no_events(server: RunningServer) -> None:
    server.topic(f"{TOPIC}-dlq")
    answer = server.client.post("/v1/bus/publish", json={"topic": f"{TOPIC}-dlq", "payload": 1})
    assert answer.status_code == 400
    assert "dead-letter" in answer.json()["error"]["message"]


def test_many_publishers_at_once_lose_nothing(server: RunningServer) -> None:
    def send(number: int) -> int:
        answer = server.client.post("/v1/bus/publish", json={"topic": TOPIC, "payload": number})
        assert answer.status_code == 200
        return int(answer.json()["offset"])

    with ThreadPoolExecutor(16) as pool:
        offsets = list(pool.map(send, range(200)))
    stored = [json.loads(one) for one in events(server)]
    assert sorted(offsets) == list(range(200))
    assert [stored[offset] for offset in offsets] == list(range(200))


# --- batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_is_published_in_order(server: RunningServer) -> None:
    server.topic("agents.demo.other")
    sent = [{"topic": TOPIC if n % 2 else "agents.demo.other", "payload": n} for n in range(6)]
    answer = server.client.post("/v1/bus/publish/batch", json={"events": sent})
    assert answer.status_code == 200, answer.text
    assert [(one["topic"], one["offset"]) for one in answer.json()["events"]] == [
        (event["topic"], n // 2) for n, event in enumerate(sent)
    ]
    assert events(server) == [b"1", b"3", b"5"]


def test_a_batch_on_one_topic_keeps_bytes_and_finds_duplicates(server: RunningServer) -> None:
    one = b'{"topic": "agents.demo.orders", "payload": {"a" : 1.0}, "native_id": "n"}'
    answer = post(server.client, b'{"events": [%s, %s]}' % (one, one), "/v1/bus/publish/batch")
    assert [event["duplicate"] for event in answer.json()["events"]] == [False, True]
    assert events(server) == [b'{"a" : 1.0}']


@pytest.mark.parametrize(
    ("bad", "status", "says"),
    [
        ({"topic": TOPIC, "payload": 1, "headers": {"postbus.x": ""}}, 400, "events[2]: "),
        ({"topic": TOPIC, "payload": 1, "key": 1}, 400, "events"),
        ({"topic": TOPIC}, 400, "payload"),
        ({"topic": "agents.demo.missing", "payload": 1}, 404, "agents.demo.missing"),
        ({"topic": "agents.other.orders", "payload": 1}, 400, "one tenant"),
        ({"topic": TOPIC, "payload": "other", "native_id": "n"}, 409, "n"),
    ],
)
def test_a_batch_is_all_or_nothing(server: RunningServer, bad: dict[str, Any], status: int, says: str) -> None:
    good = [{"topic": TOPIC, "payload": 1, "native_id": "n"}, {"topic": TOPIC, "payload": 2}]
    answer = server.client.post("/v1/bus/publish/batch", json={"events": [*good, bad]})
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]["message"]
    assert events(server) == []


@pytest.mark.parametrize("count", [0, 1001])
def test_a_batch_has_a_size(server: RunningServer, count: int) -> None:
    batch = {"events": [{"topic": TOPIC, "payload": 1}] * count}
    assert server.client.post("/v1/bus/publish/batch", json=batch).status_code == 400
    assert events(server) == []


def test_a_full_batch_is_taken(server: RunningServer) -> None:
    batch = {"events": [{"topic": TOPIC, "payload": {"n": n, "text": "x" * 100}} for n in range(1000)]}
    answer = server.client.post("/v1/bus/publish/batch", json=batch)
    assert answer.status_code == 200
    assert [one["offset"] for one in answer.json()["events"]] == list(range(1000))
