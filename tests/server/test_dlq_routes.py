"""``/dlq`` over a real socket: listed, shown, delivered again, put away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.server.test_subscriptions import DLQ, PATH, TOPIC, leases, make, pull, refused

if TYPE_CHECKING:
    import httpx2

    from tests.server.conftest import RunningServer

WHOSE = {"namespace": "agents", "tenant": "demo"}


def letters(client: httpx2.Client, **query: Any) -> list[dict[str, Any]]:
    answer = client.get("/v1/bus/dlq", params=WHOSE | query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["letters"]
    return found


def bury(client: httpx2.Client, *offsets: int, reason: str = "bad") -> None:
    for offset in offsets:
        answer = client.post(f"{PATH}/deadletter", json={"partition": 0, "offset": offset, "reason": reason})
        assert answer.status_code == 200, answer.text


def test_listing_and_showing(server: RunningServer) -> None:
    client = make(server, 6)
    bury(client, 1, 2, 3)
    bury(client, 5, reason="worse")
    found = letters(client)
    assert [one["origin"] for one in found] == [f"{TOPIC}/0/{offset}" for offset in (1, 2, 3, 5)]
    assert [one["id"] for one in letters(client, reason="worse")] == [f"{DLQ}/0/3"]
    assert letters(client, subscription="nobody") == []
    assert len(letters(client, topic="agents.>")) == 4
    first = client.get("/v1/bus/dlq", params=WHOSE | {"limit": 3}).json()
    rest = client.get("/v1/bus/dlq", params=WHOSE | {"limit": 3, "after": first["next"]}).json()
    assert ([len(one["letters"]) for one in (first, rest)], rest["next"]) == ([3, 1], None)
    shown = client.get(f"/v1/bus/dlq/{DLQ}/0/0").json()
    assert shown == found[0]
    assert (shown["payload"], shown["subscription"], shown["state"]) == ({"n": 1}, "order-processor", "open")
    refused(client.get(f"/v1/bus/dlq/{DLQ}/0/99"), 404)
    refused(client.get("/v1/bus/dlq/rubbish"), 400)
    refused(client.get(f"/v1/bus/dlq/{DLQ}/0/{1 << 70}"), 400)
    refused(client.get("/v1/bus/dlq", params={"state": "lost"}), 400)


def test_replay_brings_events_back_to_their_subscription(server: RunningServer) -> None:
    client = make(server, 5)
    client.post(f"{PATH}/ack", json={"partition": 0, "offset": 4})
    bury(client, 0, 2, 4)
    answer = client.post("/v1/bus/dlq/replay", json=WHOSE | {"ids": [f"{DLQ}/0/0", f"{DLQ}/0/2"]})
    assert (answer.status_code, answer.json()) == (200, {"replayed": 2})
    events = pull(client, wait_ms=5_000)
    assert [(event["payload"]["n"], event["attempt"]) for event in events] == [(0, 1), (4, 1)]
    assert client.post(f"{PATH}/ack", json={"lease_ids": leases(events)}).status_code == 200
    again = client.post("/v1/bus/dlq/replay", json=WHOSE | {"ids": [f"{DLQ}/0/0"]})
    assert again.json() == {"replayed": 0}
    assert client.post("/v1/bus/dlq/replay", json=WHOSE | {"reason": "bad", "per_second": 1000}).json() == {
        "replayed": 1
    }
    assert [one["state"] for one in letters(client, state="all")] == ["replayed"] * 3
    refused(client.post("/v1/bus/dlq/replay", json=WHOSE | {"ids": [f"{DLQ}/0/9"]}), 404)
    refused(client.post("/v1/bus/dlq/replay", json=WHOSE | {"ids": [f"{DLQ}/0/0"], "reason": "bad"}), 400)
    refused(client.post("/v1/bus/dlq/replay", json=WHOSE | {"per_second": 0}), 400)


def test_purge_needs_to_be_confirmed_and_leaves_a_record(server: RunningServer) -> None:
    client = make(server, 4)
    bury(client, 0, 1, 2)
    refused(client.post("/v1/bus/dlq/purge", json=WHOSE | {"ids": [f"{DLQ}/0/0"]}), 400, "gone for good")
    refused(client.delete(f"/v1/bus/dlq/{DLQ}/0/0"), 400)
    assert len(letters(client)) == 3
    assert client.delete(f"/v1/bus/dlq/{DLQ}/0/1?confirm=true").status_code == 204
    purged = client.post("/v1/bus/dlq/purge", json=WHOSE | {"confirm": True, "reason": "bad"})
    assert (purged.status_code, purged.json()) == (200, {"purged": 2})
    assert letters(client) == []
    audit = client.get("/v1/bus/events/agents.demo.journal/0/0").json()
    assert (audit["topic"], audit["payload"]["count"]) == ("audit.dlq.purged", 1)


def test_scopes_and_tenants(server: RunningServer) -> None:
    client = make(server, 2)
    bury(client, 0)
    one = f"/v1/bus/dlq/{DLQ}/0/0"
    reader = server.connect(server.key("agents.demo", "subscribe"))
    acker = server.connect(server.key("agents.demo", "ack"))
    elsewhere = server.connect(server.key("agents.demo", ("subscribe", "agents.demo.bills")))
    stranger = server.connect(server.key("agents.other", "subscribe", "ack", "admin"))
    assert len(letters(reader)) == 1
    assert letters(elsewhere) == []
    refused(elsewhere.get(one), 403)
    for method, path, body in (
        ("GET", one, None),
        ("DELETE", f"{one}?confirm=true", None),
        ("POST", "/v1/bus/dlq/replay", WHOSE),
        ("POST", "/v1/bus/dlq/purge", WHOSE | {"confirm": True}),
    ):
        refused(stranger.request(method, path, json=body), 404)
    refused(reader.post("/v1/bus/dlq/replay", json={}), 403)
    refused(acker.post("/v1/bus/dlq/purge", json={"confirm": True}), 403)
    refused(acker.delete(f"{one}?confirm=true"), 403)
    assert acker.post("/v1/bus/dlq/replay", json={}).json() == {"replayed": 1}
