"""``/subscriptions`` over a real socket: made, pulled, acked, given back, moved, and how far behind."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx2

    from tests.server.conftest import RunningServer

TOPIC = "agents.demo.orders"
DLQ = "agents.demo.orders-dlq"
BASE = "/v1/bus/subscriptions"
PATH = f"{BASE}/agents/demo/order-processor"
# As in the seed, word for word.
CREATE = {
    "id": "order-processor",
    "topic": "agents.demo.orders",
    "namespace": "agents",
    "tenant": "demo",
    "starting_offset": "earliest",
    "ack_mode": "manual",
    "dead_letter_topic": "agents.demo.orders-dlq",
    "ack_timeout_ms": 30000,
}


def publish(client: httpx2.Client, count: int, topic: str = TOPIC, first: int = 0, **fields: Any) -> None:
    for start in range(0, count, 500):
        numbers = range(first + start, first + min(start + 500, count))
        events = [{"topic": topic, "payload": {"n": n}, **fields} for n in numbers]
        assert client.post("/v1/bus/publish/batch", json={"events": events}).status_code == 200


def make(server: RunningServer, count: int = 0, **changes: Any) -> httpx2.Client:
    server.topic(TOPIC)
    server.topic(DLQ)
    client = server.client
    publish(client, count)
    made = client.post(BASE, json=CREATE | changes)
    assert made.status_code == 201, made.text
    return client


def pull(client: httpx2.Client, path: str = PATH, **body: Any) -> list[dict[str, Any]]:
    answer = client.post(f"{path}/pull", json=body)
    assert answer.status_code == 200, answer.text
    events: list[dict[str, Any]] = answer.json()["events"]
    return events


def leases(events: list[dict[str, Any]]) -> list[str]:
    return [event["lease_id"] for event in events]


def refused(answer: httpx2.Response, status: int, words: str = "") -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert words in error["message"]
    return error


# --- the seed ---------------------------------------------------------------------------------------------------------


def test_the_seed_word_for_word(server: RunningServer) -> None:
    server.topic(TOPIC)
    server.topic(DLQ)
    client = server.client
    publish(client, 50)
    made = client.post(BASE, json=CREATE)
    assert made.status_code == 201
    assert CREATE.items() <= made.json().items()
    assert made.json()["partitions"] == [{"partition": 0, "next_offset": 0, "committed": -1}]
    never = client.get(f"{PATH}/lag").json()["partitions"]
    assert never == [{"partition": 0, "committed": -1, "high_water_mark": 50, "lag": 50}]
    acked = client.post(f"{PATH}/ack", json={"partition": 0, "offset": 42})
    assert (acked.status_code, acked.json()) == (200, {"committed": True})
    lag = client.get(f"{PATH}/lag")
    assert lag.status_code == 200
    assert lag.json() == {
        "subscription_id": "order-processor",
        "topic": "agents.demo.orders",
        "partitions": [{"partition": 0, "committed": 42, "high_water_mark": 50, "lag": 7}],
        "total_lag": 7,
    }
    dead = client.post(
        f"{PATH}/deadletter",
        json={
            "partition": 0,
            "offset": 42,
            "reason": "schema validation failed",
            "key": "order-42",
            "payload": {"not": "the original"},
            "headers": {"x-trace-id": "abc"},
        },
    )
    assert (dead.status_code, dead.json()) == (200, {"dlq_topic": DLQ, "partition": 0, "offset": 0})
    letter = client.get(f"/v1/bus/events/{DLQ}/0/0").json()
    assert letter["payload"] == {"n": 42}
    wanted = {
        "x-trace-id": "abc",
        "postbus.dlq.origin_topic": TOPIC,
        "postbus.dlq.origin_partition": "0",
        "postbus.dlq.origin_offset": "42",
        "postbus.dlq.subscription": "order-processor",
        "postbus.dlq.reason": "schema validation failed",
    }
    assert wanted.items() <= letter["headers"].items()
    assert pull(client)[0]["offset"] == 43
    assert client.delete(PATH).status_code == 204
    refused(client.get(PATH), 404)


# --- making and removing ----------------------------------------------------------------------------------------------


def test_what_cannot_be_made(server: RunningServer) -> None:
    client = make(server)
    server.topic("agents.other.orders")
    server.topic("agents.demo.wide-dlq", partitions=2)
    new = CREATE | {"id": "new"}
    refused(client.post(BASE, json=CREATE), 409)
    cross = "cross-tenant topic subscription not allowed"
    refused(client.post(BASE, json=new | {"topic": "agents.other.orders"}), 400, cross)
    refused(client.post(BASE, json=new | {"dead_letter_topic": "agents.other.orders-dlq"}), 400, cross)
    refused(client.post(BASE, json=new | {"topic": "agents.demo.none"}), 404, "agents.demo.none")
    refused(client.post(BASE, json=new | {"dead_letter_topic": "agents.demo.none-dlq"}), 404)
    refused(client.post(BASE, json=new | {"dead_letter_topic": "agents.demo.wide-dlq"}), 400, "2 partitions")
    changes: tuple[dict[str, Any], ...] = (
        {"dead_letter_topic": TOPIC},
        {"starting_offset": "whenever"},
        {"starting_offset": 99},
        {"starting_offset": True},
        {"ack_mode": "never"},
        {"ack_timeout_ms": 0},
        {"max_attempts": 0},
        {"id": "no/slashes"},
        {"topic": "not a topic"},
        {"labels": {"postbus.x": "1"}},
        {"filter": {"payloads": {}}},
        {"filter": {"expr": "1 +"}},
        {"surprise": 1},
    )
    for change in changes:
        refused(client.post(BASE, json=new | change), 400)
    assert [one["id"] for one in client.get(BASE).json()["subscriptions"]] == ["order-processor"]


def test_the_same_id_in_another_tenant_is_another_subscription(server: RunningServer) -> None:
    client = make(server, 3)
    server.topic("agents.other.orders")
    other = {"id": "order-processor", "topic": "agents.other.orders"}
    made = client.post(BASE, json=other)
    assert made.status_code == 201
    assert (made.json()["namespace"], made.json()["tenant"]) == ("agents", "other")
    assert pull(client, f"{BASE}/agents/other/order-processor") == []
    assert len(pull(client)) == 3
    listed = client.get(BASE, params={"namespace": "agents", "tenant": "other"}).json()["subscriptions"]
    assert [one["topic"] for one in listed] == ["agents.other.orders"]


def test_one_of_many_concurrent_creates_wins(server: RunningServer) -> None:
    server.topic(TOPIC)
    server.topic(DLQ)
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: server.client.post(BASE, json=CREATE).status_code, range(60)))
    assert sorted(answers) == [201] + [409] * 59


def test_pages_of_subscriptions(server: RunningServer) -> None:
    server.topic(TOPIC)
    names = [f"s{number:02}" for number in range(7)]
    for name in names:
        assert server.client.post(BASE, json={"id": name, "topic": TOPIC}).status_code == 201
    seen, after = [], None
    while True:
        page = server.client.get(BASE, params={"limit": 3} | ({"after": after} if after else {})).json()
        seen += [one["id"] for one in page["subscriptions"]]
        after = page["next"]
        if after is None:
            break
    assert seen == names


def test_where_a_subscription_starts(server: RunningServer) -> None:
    server.topic(TOPIC)
    client = server.client
    publish(client, 5)
    later = "2100-01-01T00:00:00Z"
    places = {"a": ("earliest", 0), "b": ("latest", 5), "c": (3, 3), "d": ("2", 2), "e": (later, 5)}
    for name, (start, offset) in places.items():
        made = client.post(BASE, json={"id": name, "topic": TOPIC, "starting_offset": start}).json()
        assert made["partitions"][0]["next_offset"] == offset
    assert client.post(BASE, json={"id": "f", "topic": TOPIC}).json()["starting_offset"] == "latest"
    assert client.get(f"{BASE}/agents/demo/e").json()["starting_offset"] == later
    assert client.get(f"{BASE}/agents/demo/b/lag").json()["partitions"][0] == {
        "partition": 0,
        "committed": -1,
        "high_water_mark": 5,
        "lag": 0,
    }


# --- pulling and acking -----------------------------------------------------------------------------------------------


def test_pull_ack_nack_and_extend(server: RunningServer) -> None:
    client = make(server, 6)
    events = pull(client, limit=5)
    assert [event["payload"]["n"] for event in events] == [0, 1, 2, 3, 4]
    assert {event["attempt"] for event in events} == {1}
    assert events[0]["id"] == f"{TOPIC}/0/0"
    names = leases(events)
    done = client.post(f"{PATH}/ack", json={"lease_ids": names[:2]})
    assert (done.status_code, done.json()) == (200, {"committed": True, "acked": 2})
    back = client.post(f"{PATH}/nack", json={"lease_ids": names[2:3], "delay_ms": 0, "reason": "busy"})
    assert (back.status_code, back.json()) == (200, {"nacked": 1})
    longer = client.post(f"{PATH}/extend", json={"lease_ids": names[3:], "by_ms": 60_000})
    assert (longer.status_code, longer.json()) == (200, {"extended": 2})
    again = pull(client)
    assert [(event["payload"]["n"], event["attempt"]) for event in again] == [(2, 2), (5, 1)]
    stale = refused(client.post(f"{PATH}/ack", json={"lease_ids": [*leases(again), names[2]]}), 409)
    assert (stale["code"], stale["issues"]) == ("lease_lost", [names[2]])
    assert client.get(f"{PATH}/lag").json()["total_lag"] == 4
    assert client.post(f"{PATH}/ack", json={"lease_ids": [*leases(again), *names[3:]]}).json()["acked"] == 4
    assert client.get(f"{PATH}/lag").json()["total_lag"] == 0


def test_payload_bytes_come_out_as_they_went_in(server: RunningServer) -> None:
    client = make(server)
    raw = b'{"a" : 1.0,\t"big":123456789012345678901234567890, "\\u00e9":"\\u0041"}'
    body = b'{"topic":"%s","payload":%s}' % (TOPIC.encode(), raw)
    client.post("/v1/bus/publish", content=body, headers={"content-type": "application/json"})
    answer = client.post(f"{PATH}/pull", json={})
    assert raw in answer.content


def test_bad_acks_change_nothing(server: RunningServer) -> None:
    client = make(server, 3)
    names = leases(pull(client))
    bodies: tuple[dict[str, Any], ...] = (
        {},
        {"partition": 0},
        {"offset": 1},
        {"partition": 0, "offset": 1, "lease_ids": names},
        {"partition": 0, "lease_ids": names},
        {"lease_ids": []},
        {"lease_ids": ["nonsense"]},
        {"partition": 0, "offset": -1},
        {"partition": 0, "offset": 3},
        {"partition": 0, "offset": 1 << 70},
        {"partition": 0, "offset": 1.5},
    )
    for body in bodies:
        refused(client.post(f"{PATH}/ack", json=body), 400)
    refused(client.post(f"{PATH}/ack", json={"partition": 5, "offset": 0}), 404)
    refused(client.post(f"{BASE}/agents/demo/nobody/ack", json={"partition": 0, "offset": 0}), 404)
    for body in ({"limit": 0}, {"limit": 1001}, {"wait_ms": -1}, {"wait_ms": 60_001}, {"limits": 1}):
        refused(client.post(f"{PATH}/pull", json=body), 400)
    assert client.get(f"{PATH}/lag").json()["partitions"][0]["committed"] == -1


def test_unacked_events_come_again_and_end_as_dead_letters(server: RunningServer) -> None:
    client = make(server, 1, ack_timeout_ms=150, max_attempts=2)
    first = pull(client)
    second = pull(client, wait_ms=60_000)
    assert [(event["payload"]["n"], event["attempt"]) for event in second] == [(0, 2)]
    refused(client.post(f"{PATH}/ack", json={"lease_ids": leases(first)}), 409)
    wait_for(lambda: client.get("/v1/bus/dlq?namespace=agents&tenant=demo").json()["letters"])
    letter = client.get("/v1/bus/dlq?namespace=agents&tenant=demo").json()["letters"][0]
    assert (letter["reason"], letter["attempts"], letter["origin"]) == ("max_attempts", 2, f"{TOPIC}/0/0")
    wait_for(lambda: client.get(f"{PATH}/lag").json()["total_lag"] == 0)


def wait_for(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_auto_on_delivery(server: RunningServer) -> None:
    client = make(server, 3, ack_mode="auto_on_delivery")
    assert leases(pull(client, limit=2)) == [None, None]
    assert client.get(f"{PATH}/lag").json()["total_lag"] == 1


def test_filters(server: RunningServer) -> None:
    client = make(server, 500, filter={"expr": "payload.n >= 100 && payload.n % 100 == 0"})
    events = pull(client)
    assert [event["payload"]["n"] for event in events] == [100, 200, 300, 400]
    client.post(f"{PATH}/ack", json={"lease_ids": leases(events)})
    assert client.get(f"{PATH}/lag").json()["total_lag"] == 0


def test_a_long_poll_ends_with_an_event_or_with_its_time(server: RunningServer) -> None:
    client = make(server)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(pull(server.connect(), wait_ms=60_000)))
    thread.start()
    wait_for(lambda: server.at_work("Puller.pull") == 1)
    publish(client, 1)
    thread.join(60)
    assert [event["payload"]["n"] for event in found] == [0]
    assert pull(client, wait_ms=50) == []


def test_who_hangs_up_while_waiting_takes_nothing_along(server: RunningServer) -> None:
    client = make(server)
    for _ in range(3):
        with pytest.raises(Exception, match="timed out"):
            server.connect().post(f"{PATH}/pull", json={"wait_ms": 30_000}, timeout=0.2)
    wait_for(lambda: server.at_work("Puller.pull") == 0)
    publish(client, 1)
    events = pull(client, wait_ms=60_000)
    assert [(event["payload"]["n"], event["attempt"]) for event in events] == [(0, 1)]


def test_a_server_that_ends_answers_those_who_wait(server: RunningServer) -> None:
    make(server)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(pull(server.connect(), wait_ms=60_000)))
    thread.start()
    wait_for(lambda: server.at_work("Puller.pull") == 1)
    server.call(server.serving.stop())
    thread.join(60)
    assert found == [[]]


def test_after_a_restart_only_what_was_not_acked_comes_again(
    server: RunningServer, start_server: Callable[..., RunningServer]
) -> None:
    client = make(server, 10)
    events = pull(client, limit=6)
    client.post(f"{PATH}/ack", json={"lease_ids": [leases(events)[n] for n in (0, 1, 4)]})
    server.stop()
    client = start_server(server.data).client
    refused(client.post(f"{PATH}/ack", json={"lease_ids": leases(events)[2:3]}), 409)
    again = [(event["payload"]["n"], event["attempt"]) for event in pull(client)]
    assert again == [(2, 2), (3, 2), (5, 2), (6, 1), (7, 1), (8, 1), (9, 1)]


def test_reset(server: RunningServer) -> None:
    client = make(server, 5)
    names = leases(pull(client))
    client.post(f"{PATH}/ack", json={"lease_ids": names})
    moved = client.post(f"{PATH}/reset", json={"to": 3})
    assert (moved.status_code, moved.json()["partitions"][0]["next_offset"]) == (200, 3)
    assert [(event["payload"]["n"], event["attempt"]) for event in pull(client)] == [(3, 1), (4, 1)]
    client.post(f"{PATH}/reset", json={"to": "earliest", "partition": 0})
    assert len(pull(client)) == 5
    for body in ({}, {"to": 77}, {"to": "soon"}):
        refused(client.post(f"{PATH}/reset", json=body), 400)
    refused(client.post(f"{PATH}/reset", json={"to": 1, "partition": 4}), 404)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_scopes_and_tenants(server: RunningServer) -> None:
    make(server, 2)
    reader = server.connect(server.key("agents.demo", "subscribe"))
    acker = server.connect(server.key("agents.demo", "ack"))
    elsewhere = server.connect(
        server.key("agents.demo", ("subscribe", "agents.demo.bills"), ("ack", "agents.demo.bills"))
    )
    stranger = server.connect(server.key("agents.other", "subscribe", "ack", "admin"))
    nobody = server.connect()
    name = leases(pull(reader, limit=1))[0]
    refused(nobody.post(f"{PATH}/pull", json={}), 401)
    refused(reader.post(f"{PATH}/ack", json={"lease_ids": [name]}), 403)
    refused(elsewhere.post(f"{PATH}/ack", json={"lease_ids": [name]}), 403)
    refused(elsewhere.post(f"{PATH}/pull", json={}), 403)
    refused(acker.post(f"{PATH}/pull", json={}), 403)
    for method, path in (
        ("GET", PATH),
        ("DELETE", PATH),
        ("GET", f"{PATH}/lag"),
        ("POST", f"{PATH}/pull"),
        ("POST", f"{PATH}/reset"),
    ):
        body = {"to": "earliest"} if path.endswith("reset") else {}
        refused(stranger.request(method, path, json=body if method == "POST" else None), 404)
    refused(stranger.post(f"{PATH}/ack", json={"lease_ids": [name]}), 404)
    assert stranger.get(BASE).json()["subscriptions"] == []
    assert elsewhere.get(BASE).json()["subscriptions"] == []
    assert acker.post(f"{PATH}/ack", json={"lease_ids": [name]}).status_code == 200
