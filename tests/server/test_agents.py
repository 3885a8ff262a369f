"""``/agents`` and their subscriptions over a real socket."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import pytest

from tests.server.conftest import RunningServer

BASE = "/v1/bus/agents"
ANN = f"{BASE}/acme/prod/ann"
SUBS = f"{ANN}/subscriptions"
TOPIC = "acme.prod.orders"


@pytest.fixture
def ann(server: RunningServer) -> httpx2.Client:
    """An operator's client; the agent ``ann`` and a topic are there."""
    server.topic(TOPIC)
    made = server.client.post(BASE, json={"id": "ann", "namespace": "acme", "tenant": "prod"})
    assert made.status_code == 201, made.text
    return server.client


def publish(client: httpx2.Client, *payloads: Any, topic: str = TOPIC) -> None:
    for payload in payloads:
        assert client.post("/v1/bus/publish", json={"topic": topic, "payload": payload}).status_code == 200


def wait(client: httpx2.Client, count: int, path: str = ANN) -> list[Any]:
    """The payloads in the inbox, once there are so many."""
    after: dict[str, str] = {}
    found: list[Any] = []
    while len(found) < count:
        items = client.get(f"{path}/inbox/wait", params={"timeout_ms": "20000"} | after).json()["items"]
        assert items, f"only {found}"
        found += [item["payload"] for item in items]
        after = {"after": items[-1]["id"]}
    return found


# --- agents -----------------------------------------------------------------------------------------------------------


def test_an_agent_is_made_shown_listed_and_removed(ann: httpx2.Client) -> None:
    shown = ann.get(ANN).json()
    assert (shown["id"], shown["namespace"], shown["tenant"], shown["unacked"]) == ("ann", "acme", "prod", 0)
    assert shown["targets"] == [{"kind": "pull"}]
    listed = ann.get(BASE, params={"namespace": "acme", "tenant": "prod"}).json()
    assert [agent["id"] for agent in listed["agents"]] == ["ann"]
    assert ann.delete(ANN).status_code == 204
    assert ann.get(ANN).status_code == ann.delete(ANN).status_code == 404
    assert ann.get(BASE).json() == {"agents": [], "next": None}


def test_without_a_tenant_an_agent_is_local(client: httpx2.Client) -> None:
    assert client.post(BASE, json={"id": "bob"}).json()["tenant"] == "default"
    assert client.get(f"{BASE}/local/default/bob").status_code == 200


def test_exactly_one_of_many_makes_an_agent(ann: httpx2.Client, server: RunningServer) -> None:
    assert ann.post(BASE, json={"id": "ann", "namespace": "acme", "tenant": "prod"}).status_code == 409
    clients = [server.connect() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda one: one.post(BASE, json={"id": "bob"}).status_code, clients))
    assert sorted(answers) == [201] + [409] * 7


def test_pages_of_agents(ann: httpx2.Client) -> None:
    for name in ("bob", "cat", "dan"):
        ann.post(BASE, json={"id": name, "namespace": "acme", "tenant": "prod"})
    found, query = [], {"limit": "2"}
    while True:
        page = ann.get(BASE, params=query).json()
        found += [agent["id"] for agent in page["agents"]]
        if page["next"] is None:
            break
        query["after"] = page["next"]
    assert found == ["ann", "bob", "cat", "dan"]


def test_targets_are_replaced(ann: httpx2.Client) -> None:
    hook = {"kind": "webhook", "url": "https://example.com/wake"}
    assert ann.put(f"{ANN}/targets", json={"targets": [hook]}).json()["targets"] == [hook]
    assert ann.get(ANN).json()["targets"] == [hook]
    assert ann.put(f"{ANN}/targets", json={"targets": [{"kind": "webhook"}]}).status_code == 400
    assert ann.put(f"{BASE}/acme/prod/nobody/targets", json={"targets": [hook]}).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"id": "no spaces"},
        {"id": "x" * 121},
        {"id": "x", "namespace": "acme"},
        {"id": "x", "targets": []},
        {"id": "x", "targets": [{"kind": "pigeon"}]},
        {"id": "x", "targets": [{"kind": "webhook"}]},
        {"id": "x", "targets": [{"kind": "pull", "url": "https://example.com"}]},
        {"id": "x", "targets": [{"kind": "pull"}] * 2},
        {"id": "x", "extra": 1},
    ],
)
def test_an_agent_that_cannot_be_is_refused(client: httpx2.Client, body: dict[str, Any]) -> None:
    answer = client.post(BASE, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert client.get(BASE).json()["agents"] == []


# --- subscriptions ----------------------------------------------------------------------------------------------------


def test_a_topics_events_go_to_the_inbox_from_a_pinned_start(ann: httpx2.Client) -> None:
    publish(ann, 0, 1)
    made = ann.post(SUBS, json={"id": "orders", "topic": TOPIC})
    assert made.status_code == 201, made.text
    view = made.json()
    assert (view["id"], view["agent"], view["pattern"], view["engine"]) == ("orders", "ann", TOPIC, "live")
    assert view["start"] == {"policy": "latest"}
    assert view["positions"] == [{"topic": TOPIC, "position": 2}]
    publish(ann, 2)
    assert wait(ann, 1) == [2]


@pytest.mark.parametrize(
    ("start", "owed"),
    [
        ({"policy": "earliest"}, [0, 1, 2]),
        ({"policy": "at_offset", "offset": 1}, [1, 2]),
        ({"policy": "at_time", "time": "2020-01-01T00:00:00Z"}, [0, 1, 2]),
    ],
)
def test_start_policies(ann: httpx2.Client, start: dict[str, Any], owed: list[int]) -> None:
    publish(ann, 0, 1, 2)
    view = ann.post(SUBS, json={"topic": TOPIC, "start": start}).json()
    assert view["start"] == start
    assert view["positions"][0]["position"] == owed[0]
    assert wait(ann, len(owed)) == owed


def test_a_pattern_with_a_filter(ann: httpx2.Client) -> None:
    body = {"id": "big", "pattern": "acme.prod.*", "filter": {"expr": "payload.n > 1"}}
    assert ann.post(SUBS, json=body).status_code == 201
    publish(ann, {"n": 1}, {"n": 2})
    assert wait(ann, 1) == [{"n": 2}]
    (item,) = ann.get(f"{ANN}/inbox").json()["items"]
    assert item["matched_by"] == ["big"]


def test_subscriptions_are_listed_moved_and_ended(ann: httpx2.Client) -> None:
    publish(ann, 0, 1)
    assert ann.post(SUBS, json={"id": "orders", "topic": TOPIC}).status_code == 201
    assert [one["id"] for one in ann.get(SUBS).json()["subscriptions"]] == ["orders"]
    lag = ann.get(f"{SUBS}/orders/lag").json()
    assert lag == {"subscription_id": "orders", "topics": [{"topic": TOPIC, "lag": 0}], "total_lag": 0}
    moved = ann.post(f"{SUBS}/orders/reset", json={"start": {"policy": "earliest"}})
    assert moved.json()["positions"] == [{"topic": TOPIC, "position": 0}]
    assert wait(ann, 2) == [0, 1]
    assert ann.delete(f"{SUBS}/orders").status_code == 204
    for answer in (
        ann.delete(f"{SUBS}/orders"),
        ann.get(f"{SUBS}/orders/lag"),
        ann.post(f"{SUBS}/orders/reset", json={"start": {"policy": "latest"}}),
    ):
        assert answer.status_code == 404
    assert ann.get(SUBS).json() == {"subscriptions": []}


def test_a_subscription_is_found_only_under_its_own_agent(ann: httpx2.Client) -> None:
    ann.post(BASE, json={"id": "bob", "namespace": "acme", "tenant": "prod"})
    ann.post(SUBS, json={"id": "orders", "topic": TOPIC})
    assert ann.delete(f"{BASE}/acme/prod/bob/subscriptions/orders").status_code == 404
    assert ann.get(f"{SUBS}/orders/lag").status_code == 200
    pulled = ann.get("/v1/bus/subscriptions/acme/prod/orders")
    assert pulled.status_code == 404, "it is no pull subscription"


def test_no_partition_shows(ann: httpx2.Client, server: RunningServer) -> None:
    server.topic("acme.prod.wide", partitions=4)
    ann.post(SUBS, json={"id": "wide", "topic": "acme.prod.wide"})
    publish(ann, 1, 2, 3, topic="acme.prod.wide")
    wait(ann, 3)
    for path in (ANN, SUBS, f"{SUBS}/wide/lag", f"{ANN}/inbox", f"{ANN}/inbox/entries"):
        text = ann.get(path).text
        assert "partition" not in text
        assert "offset" not in text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"topic": TOPIC, "pattern": "a"}, 400),
        ({"pattern": "a..b"}, 400),
        ({"pattern": "a", "filter": {"expr": "payload ="}}, 400),
        ({"pattern": "a", "start": {"policy": "sometime"}}, 400),
        ({"pattern": "a", "start": {"policy": "at_time"}}, 400),
        ({"pattern": "a", "start": {"policy": "at_time", "time": "2020-01-01T00:00:00"}}, 400),
        ({"topic": TOPIC, "start": {"policy": "at_offset", "offset": 7}}, 400),
        ({"pattern": "a", "engine": "steam"}, 400),
        ({"pattern": "a", "cleanup": {}}, 400),
        ({"pattern": "a", "digest": {"window_s": -1}}, 400),
        ({"topic": "other.tenant.orders"}, 400),
        ({"topic": "acme.prod.nothing"}, 404),
        ({"topic": TOPIC, "id": "taken"}, 409),
    ],
)
def test_a_subscription_that_cannot_be_is_refused(ann: httpx2.Client, body: dict[str, Any], status: int) -> None:
    assert ann.post(SUBS, json={"id": "taken", "pattern": "x"}).status_code == 201
    answer = ann.post(SUBS, json=body)
    assert answer.status_code == status, answer.text
    if body.get("topic") == "other.tenant.orders":
        assert answer.json()["error"]["message"] == "cross-tenant topic subscription not allowed"
    assert [one["id"] for one in ann.get(SUBS).json()["subscriptions"]] == ["taken"]


def test_subscriptions_are_counted(ann: httpx2.Client, server: RunningServer) -> None:
    from postbus.server.quotas import Quota, set_quota  # noqa: PLC0415 - kept beside its use

    server.call(set_quota(server.hub.log, "acme.prod", Quota(subscriptions=1)))
    server.hub.quotas._read_at_s = -1e9
    assert ann.post(SUBS, json={"pattern": "a"}).status_code == 201
    assert ann.post(SUBS, json={"pattern": "b"}).status_code == 429


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_may_be_for_one_inbox_only(ann: httpx2.Client, server: RunningServer) -> None:
    ann.post(BASE, json={"id": "bob", "namespace": "acme", "tenant": "prod"})
    inbox = "acme.prod.inbox.ann"
    key = server.connect(server.key("acme.prod", ("subscribe", inbox), ("ack", inbox), ("publish", inbox)))
    assert key.get(f"{ANN}/inbox").status_code == 200
    assert key.post(f"{ANN}/inbox/ack", json={"all": True}).status_code == 200
    assert key.post(f"{ANN}/inbox/messages", json={"message": "hi"}).status_code == 201
    for path in ("", "/inbox", "/subscriptions", "/inbox/wait"):
        assert key.get(f"{BASE}/acme/prod/bob{path}").status_code == 403
    assert key.post(f"{BASE}/acme/prod/bob/inbox/messages", json={"message": "hi"}).status_code == 403
    assert [agent["id"] for agent in key.get(BASE).json()["agents"]] == ["ann"]


@pytest.mark.usefixtures("ann")
def test_what_a_key_does_not_cover_cannot_come_in_through_an_inbox(server: RunningServer) -> None:
    server.topic("acme.prod.secrets")
    narrow = server.connect(server.key("acme.prod", ("subscribe", "acme.prod.inbox.ann"), ("subscribe", TOPIC)))
    assert narrow.post(SUBS, json={"topic": TOPIC}).status_code == 201
    assert narrow.post(SUBS, json={"topic": "acme.prod.secrets"}).status_code == 403
    assert narrow.post(SUBS, json={"pattern": ">"}).status_code == 403
    wide = server.connect(server.key("acme.prod", ("subscribe", "acme.prod.>")))
    assert wide.post(SUBS, json={"pattern": ">"}).status_code == 201


@pytest.mark.usefixtures("ann")
def test_scopes_of_an_inbox(server: RunningServer) -> None:
    reads, acks, sends = (server.connect(server.key("acme.prod", scope)) for scope in ("subscribe", "ack", "publish"))
    assert reads.get(f"{ANN}/inbox").status_code == 200
    assert reads.post(f"{ANN}/inbox/ack", json={"all": True}).status_code == 403
    assert reads.post(f"{ANN}/inbox/messages", json={"message": 1}).status_code == 403
    assert acks.get(f"{ANN}/inbox").status_code == 403
    assert acks.post(f"{ANN}/inbox/ack", json={"all": True}).status_code == 200
    assert sends.post(f"{ANN}/inbox/messages", json={"message": 1}).status_code == 201
    assert sends.get(ANN).status_code == 403


@pytest.mark.usefixtures("ann")
def test_another_tenants_agents_are_not_there(server: RunningServer) -> None:
    other = server.connect(server.key("other.tenant", "admin"))
    for path in (ANN, SUBS, f"{ANN}/inbox", f"{ANN}/inbox/watch"):
        assert other.get(path).status_code == 404
    assert other.delete(ANN).status_code == 404
    assert other.post(BASE, json={"id": "x", "namespace": "acme", "tenant": "prod"}).status_code == 404
    assert other.get(BASE).json()["agents"] == []


@pytest.mark.parametrize(
    "target",
    [
        {"kind": "command", "argv": ["rm", "-rf", "x"]},
        {"kind": "tmux", "pane": "main:0.0"},
        {"kind": "webhook", "url": "http://127.0.0.1:1/", "allow_private": True},
    ],
)
def test_only_the_operator_makes_the_server_run_programs(
    ann: httpx2.Client, server: RunningServer, target: dict[str, Any]
) -> None:
    body = {"id": "bob", "namespace": "acme", "tenant": "prod", "targets": [target]}
    assert ann.post(BASE, json=body).status_code == 201
    tenant = server.connect(server.key("acme.prod", "admin"))
    assert tenant.post(BASE, json=body | {"id": "cat"}).status_code == 403
    assert tenant.put(f"{ANN}/targets", json={"targets": [target]}).status_code == 403
    assert tenant.get(ANN).json()["targets"] == [{"kind": "pull"}]
    operator = server.connect(server.key(None, "admin"))
    assert operator.post(BASE, json=body | {"id": "cat"}).status_code == 201


# --- targets ----------------------------------------------------------------------------------------------------------


class Gone(BaseHTTPRequestHandler):
    """Answers every wake with 410."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(410)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_a_target_that_is_gone_is_offline_until_it_is_revived(ann: httpx2.Client) -> None:
    (pull,) = ann.get(f"{ANN}/targets").json()["targets"]
    assert (pull["id"], pull["kind"], pull["state"], pull["wakes"]) == ("default", "pull", "pull", 0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Gone) as gone:
        threading.Thread(target=gone.serve_forever, daemon=True).start()
        hook = {"kind": "webhook", "id": "hook", "url": f"http://127.0.0.1:{gone.server_port}/", "buffer_s": 0}
        ann.put(f"{ANN}/targets", json={"targets": [hook | {"allow_private": True}]})
        assert ann.post(f"{ANN}/targets/hook/revive").json() == {"revived": False}
        ann.post(f"{ANN}/inbox/messages", json={"message": "wake up"})
        deadline = time.monotonic() + 60
        while (shown := ann.get(f"{ANN}/targets").json()["targets"][0])["state"] != "offline":
            assert time.monotonic() < deadline, shown
            time.sleep(0.02)
        gone.shutdown()
    assert (shown["failures"], shown["wakes"], shown["new_items"]) == (1, 0, 1)
    assert "410" in shown["why"]
    assert ann.post(SUBS, json={"pattern": "a"}).status_code == 409, "it could not be woken"
    assert ann.post(f"{ANN}/targets/hook/revive").json() == {"revived": True}
    assert ann.post(SUBS, json={"pattern": "a"}).status_code == 201
    assert ann.post(f"{ANN}/targets/nothing/revive").status_code == 404
    assert ann.get(f"{BASE}/acme/prod/nobody/targets").status_code == 404
