from __future__ import annotations

import httpx2
import pytest

from tests.server.conftest import RunningServer

TOPIC = "agents.demo.orders"


@pytest.fixture
def three(server: RunningServer) -> httpx2.Client:
    """A client of a server with the events 0 to 2; the last two have a correlation."""
    server.topic(TOPIC)
    for number in range(3):
        body = {"topic": TOPIC, "payload": number} | ({"correlation_id": "case/7"} if number else {})
        assert server.client.post("/v1/bus/publish", json=body).status_code == 200
    return server.client


def test_an_event_is_found_by_its_address(three: httpx2.Client) -> None:
    for address in (f"{TOPIC}/0/2", f"{TOPIC}%2F0%2F2"):
        answer = three.get(f"/v1/bus/events/{address}")
        assert (answer.status_code, answer.json()["payload"], answer.json()["id"]) == (200, 2, f"{TOPIC}/0/2")


@pytest.mark.parametrize(
    ("address", "status"),
    [
        (f"{TOPIC}/0/3", 404),
        (f"{TOPIC}/1/0", 404),
        ("agents.demo.none/0/0", 404),
        (f"{TOPIC}/0/99999999999999999999999999", 404),
        (f"{TOPIC}/99999999999999999999999999/0", 404),
        (f"{TOPIC}/0/{'9' * 5000}", 400),
        (f"{TOPIC}/0/-1", 400),
        (f"{TOPIC}/0", 400),
        (TOPIC, 400),
        ("a/0/0", 400),
    ],
)
def test_what_is_not_there_is_refused(three: httpx2.Client, address: str, status: int) -> None:
    assert three.get(f"/v1/bus/events/{address}").status_code == status


def test_a_correlation_is_traced(three: httpx2.Client) -> None:
    answer = three.get("/v1/bus/trace/case/7", params={"namespace": "agents", "tenant": "demo"})
    assert answer.status_code == 200, answer.text
    trace = answer.json()
    assert (trace["correlation_id"], trace["left_out"]) == ("case/7", 0)
    assert [one["event"]["payload"] for one in trace["events"]] == [1, 2]
    assert trace["events"][0]["deliveries"] == []


def test_a_trace_begins_at_an_address_too(three: httpx2.Client) -> None:
    answer = three.get(f"/v1/bus/trace/{TOPIC}/0/2", params={"namespace": "agents", "tenant": "demo"})
    assert [one["event"]["offset"] for one in answer.json()["events"]] == [1, 2]


def test_the_trace_of_another_tenant_is_not_there(three: httpx2.Client) -> None:
    assert three.get("/v1/bus/trace/case/7").status_code == 404
    other = {"namespace": "agents", "tenant": "other"}
    assert three.get("/v1/bus/trace/case/7", params=other).status_code == 404
    assert three.get("/v1/bus/trace/case/7", params={"namespace": "agents"}).status_code == 400
    assert three.get(f"/v1/bus/trace/{'9' * 5000}").status_code == 400
