from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from tests.server.conftest import RunningServer

TENANT = {"namespace": "agents", "tenant": "demo"}
TOPIC = "agents.demo.orders"
BINDING = "/v1/bus/topics/agents/demo/orders/schema"
ORDER = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}


def add(client: httpx2.Client, schema: Any = ORDER, subject: str = "order", **more: Any) -> httpx2.Response:
    return client.post("/v1/bus/schemas", json=TENANT | {"subject": subject, "schema": schema} | more)


def publish(client: httpx2.Client, payload: Any) -> httpx2.Response:
    return client.post("/v1/bus/publish", json={"topic": TOPIC, "payload": payload})


def test_versions(client: httpx2.Client) -> None:
    made = add(client)
    assert made.status_code == 201, made.text
    first = made.json()
    assert first.items() >= (TENANT | {"subject": "order", "version": 1, "schema": ORDER}).items()
    assert add(client, True).json()["version"] == 2
    path = "/v1/bus/schemas/agents/demo/order"
    assert client.get(path).json() == TENANT | {"subject": "order", "versions": [1, 2], "latest": 2}
    assert client.get(f"{path}/1").json() == first
    assert client.get(f"{path}/latest").json()["version"] == 2
    assert client.delete(f"{path}/2").status_code == 204
    assert client.delete(f"{path}/2").status_code == 404
    assert client.get(f"{path}/latest").json()["version"] == 1
    assert add(client).json()["version"] == 3
    assert client.get(f"{path}/2").status_code == 404


def test_a_schema_comes_back_byte_for_byte(client: httpx2.Client) -> None:
    raw = b'{"type" :  "object", "maxProperties": 1e1}'
    body = b'{"namespace": "agents", "tenant": "demo", "subject": "s", "schema": ' + raw + b"}"
    client.post("/v1/bus/schemas", content=body, headers={"content-type": "application/json"})
    assert raw in client.get("/v1/bus/schemas/agents/demo/s/1").content


def test_listing_pages(client: httpx2.Client) -> None:
    for subject in ("c", "a", "b"):
        add(client, subject=subject)
    add(client, subject="a")
    found = client.get("/v1/bus/schemas", params=TENANT | {"limit": 2}).json()
    assert [(one["subject"], one["versions"]) for one in found["subjects"]] == [("a", [1, 2]), ("b", [1])]
    rest = client.get("/v1/bus/schemas", params=TENANT | {"after": found["next"]}).json()
    assert ([one["subject"] for one in rest["subjects"]], rest["next"]) == (["c"], None)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (TENANT | {"subject": "s", "schema": {"type": "x"}}, "invalid_schema"),
        (TENANT | {"subject": "s", "schema": {"$ref": "http://127.0.0.1:1/x"}}, "invalid_schema"),
        (TENANT | {"subject": "s", "schema": {"pattern": "(?=a)"}}, "invalid_schema"),
        (TENANT | {"subject": "s", "schema": 1}, "invalid_schema"),
        (TENANT | {"subject": "a/b", "schema": {}}, "invalid"),
        (TENANT | {"subject": "s"}, "invalid"),
        (TENANT | {"subject": "s", "schema": {}, "version": 7}, "invalid"),
        ({"subject": "s", "schema": {}}, "invalid"),
        ({"namespace": "a b", "tenant": "demo", "subject": "s", "schema": {}}, "invalid"),
    ],
)
def test_a_bad_schema_is_refused_and_takes_no_number(client: httpx2.Client, body: Any, code: str) -> None:
    refused = client.post("/v1/bus/schemas", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)
    assert client.get("/v1/bus/schemas").json()["subjects"] == []


@pytest.mark.parametrize("version", ["0", "1", "99999999999999999", "-1", "1.0", "first", "%F0%9F%98%80", "٣"])
def test_versions_that_are_not_there(client: httpx2.Client, version: str) -> None:
    for method in ("GET", "DELETE"):
        found = client.request(method, f"/v1/bus/schemas/agents/demo/order/{version}")
        assert found.status_code in {400, 404}
    assert client.delete("/v1/bus/schemas/agents/demo/order/latest").status_code == 400


def test_publish_is_checked_and_says_where(server: RunningServer, client: httpx2.Client) -> None:
    server.topic(TOPIC)
    add(client)
    bound = client.put(BINDING, json={"subject": "order", "version": 1})
    assert (bound.status_code, bound.json()["bound"]) == (200, True), bound.text
    assert client.get(BINDING).json().items() >= {"topic": TOPIC, "subject": "order", "version": 1}.items()
    assert publish(client, {"n": 1}).status_code == 200
    refused = publish(client, {"n": "x"})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "schema_mismatch"
    assert [issue["pointer"] for issue in error["issues"]] == ["/n"]
    many = {"type": "array", "items": {"type": "string"}}
    add(client, many)
    assert client.put(BINDING, json={"subject": "order", "force": True}).json()["version"] == 2
    assert len(publish(client, [1] * 40).json()["error"]["issues"]) == 10
    batch = {"events": [{"topic": TOPIC, "payload": ["a"]}, {"topic": TOPIC, "payload": [1]}]}
    refused = client.post("/v1/bus/publish/batch", json=batch)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "schema_mismatch")
    assert refused.json()["error"]["message"].startswith("events[1]")
    assert client.get(f"/v1/bus/topics/{TOPIC}").json()["events"] == 1
    assert client.delete(BINDING).status_code == 204
    assert publish(client, 1).status_code == 200
    assert [client.delete(BINDING).status_code, client.get(BINDING).status_code] == [404, 404]


def test_a_binding_holds_after_a_restart(start_server: Callable[..., RunningServer]) -> None:
    server = start_server()
    server.topic(TOPIC)
    add(server.client)
    server.client.put(BINDING, json={"subject": "order"})
    server.stop()
    again = start_server(server.data)
    assert publish(again.client, {}).status_code == 400
    assert publish(again.client, {"n": 1}).status_code == 200


def test_events_that_are_there_are_checked_before_binding(server: RunningServer, client: httpx2.Client) -> None:
    server.topic(TOPIC)
    add(client)
    for payload in ({"n": 1}, {"n": "x"}, {}):
        publish(client, payload)
    report = client.put(BINDING, json={"subject": "order", "dry_run": True}).json()
    assert report.items() >= {"bound": False, "checked": 3, "refused_count": 2}.items()
    assert [one["id"] for one in report["refused"]] == [f"{TOPIC}/0/1", f"{TOPIC}/0/2"]
    assert report["refused"][0]["issues"][0]["pointer"] == "/n"
    refused = client.put(BINDING, json={"subject": "order"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "schema_conflict")
    assert refused.json()["error"]["issues"][0]["id"] == f"{TOPIC}/0/1"
    assert publish(client, {}).status_code == 200
    assert client.put(BINDING, json={"subject": "order", "force": True}).status_code == 200
    assert publish(client, {}).status_code == 400


def test_a_bound_version_stays(server: RunningServer, client: httpx2.Client) -> None:
    server.topic(TOPIC)
    add(client)
    client.put(BINDING, json={"subject": "order"})
    refused = client.delete("/v1/bus/schemas/agents/demo/order/1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    client.delete(f"/v1/bus/topics/{TOPIC}")
    assert client.delete("/v1/bus/schemas/agents/demo/order/1").status_code == 204


def test_what_cannot_be_bound(server: RunningServer, client: httpx2.Client) -> None:
    server.topic(TOPIC)
    add(client)
    for path, body, status in (
        (BINDING, {"subject": "missing"}, 404),
        (BINDING, {"subject": "order", "version": 2}, 404),
        (BINDING, {"subject": "order", "version": 0}, 400),
        (BINDING, {"subject": "order", "version": "1"}, 400),
        (BINDING, {"subject": "order", "sample": -1}, 400),
        (BINDING, {}, 400),
        ("/v1/bus/topics/agents/demo/missing/schema", {"subject": "order"}, 404),
        ("/v1/bus/topics/agents/demo/journal/schema", {"subject": "order"}, 400),
        ("/v1/bus/topics/agents/demo/a%20b/schema", {"subject": "order"}, 400),
        ("/v1/bus/topics/system/demo/orders/schema", {"subject": "order"}, 403),
    ):
        assert client.put(path, json=body).status_code == status, (path, body)
    assert client.get(BINDING).status_code == 404


def test_another_tenants_schemas_are_not_there(server: RunningServer) -> None:
    server.topic(TOPIC)
    owner = server.connect(server.key("agents.demo", "admin", "subscribe", "publish"))
    other = server.connect(server.key("agents.other", "admin", "subscribe"))
    reader = server.connect(server.key("agents.demo", "subscribe"))
    assert add(owner).status_code == 201
    assert owner.put(BINDING, json={"subject": "order"}).status_code == 200
    path = "/v1/bus/schemas/agents/demo/order"
    for method, url in (
        ("GET", path), ("GET", f"{path}/1"), ("DELETE", f"{path}/1"), ("GET", BINDING), ("DELETE", BINDING),
    ):  # fmt: skip
        assert other.request(method, url).status_code == 404
    assert other.put(BINDING, json={"subject": "order"}).status_code == 404
    assert add(other).status_code == 404
    assert other.get("/v1/bus/schemas").json()["subjects"] == []
    assert [reader.get(url).status_code for url in (path, f"{path}/1", BINDING)] == [200, 200, 200]
    assert add(reader).status_code == 403
    assert [reader.delete(BINDING).status_code, reader.delete(f"{path}/1").status_code] == [403, 403]
    assert server.client.get(path).status_code == 401
    assert len(owner.get("/v1/bus/schemas").json()["subjects"]) == 1
