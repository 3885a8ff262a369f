"""The cross-tenant matrix: every route of the OpenAPI document, asked for by a key of another tenant."""

from __future__ import annotations

from typing import Any

import httpx2

from postbus.server.openapi import document
from postbus.server.table import ROUTES
from tests.server.conftest import RunningServer

OWN, OTHER = ("acme", "prod"), ("umbrella", "lab")
API = document(ROUTES)
NAMES = {"namespace": OTHER[0], "tenant": OTHER[1], "topic": "umbrella.lab.orders"}
# What other parameters may stand for; an id of the other tenant where a route takes one.
GUESSES = {"id": "worker", "name": "orders", "subject": "orders", "version": "1", "correlation_id": "case-7"}


def names_a_tenant(operation: dict[str, Any], path: str) -> bool:
    """Say whether the caller can name a tenant: in the path, the query or the body."""
    names = {part["name"] for part in operation["parameters"]}
    if path.endswith("/events/{id}"):
        return True
    body = operation.get("requestBody")
    if body is not None:
        schema = body["content"]["application/json"]["schema"]
        found = API["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        names |= set(found.get("properties", ()))
    return bool(names & {"namespace", "tenant", "topic"}) or "events" in names


def smallest(schema: dict[str, Any]) -> Any:
    """Return a value that a schema takes: what it must have, named for the other tenant."""
    if "$ref" in schema:
        schema = API["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return smallest(schema["anyOf"][0])
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        names = [*schema.get("required", ()), *(name for name in NAMES if name in schema["properties"])]
        if "topic" in names and "name" in schema["properties"]:
            names = [name for name in names if name not in {"namespace", "tenant"}]
        return {name: NAMES.get(name) or smallest(schema["properties"][name]) for name in names}
    if kind == "array":
        return [smallest(schema["items"])] if schema.get("minItems") else []
    return {"object": {}, "integer": schema.get("minimum", 0), "string": "worker", "boolean": False}.get(str(kind), 1)


def ask(client: httpx2.Client, method: str, path: str, operation: dict[str, Any]) -> httpx2.Response:
    values = GUESSES | NAMES
    if path.endswith("/events/{id}"):
        values["id"] = "umbrella.lab.orders/0/0"
    query = {}
    for part in operation["parameters"]:
        if part["in"] == "path":
            path = path.replace(f"{{{part['name']}}}", values.get(part["name"], "worker"))
        elif part["name"] in NAMES or part["required"]:
            query[part["name"]] = values.get(part["name"], "1")
    body = operation.get("requestBody")
    sent = None if body is None else smallest(body["content"]["application/json"]["schema"])
    return client.request(method.upper(), path, params=query, json=sent)


def fill(server: RunningServer) -> None:
    for namespace, tenant in (OWN, OTHER):
        name = f"{namespace}.{tenant}.orders"
        server.topic(name)
        sent = {"topic": name, "payload": "secret", "correlation_id": "case-7"}
        assert server.client.post("/v1/bus/publish", json=sent).status_code == 200


def test_every_route_of_another_tenant_is_a_404(server: RunningServer) -> None:
    fill(server)
    client = server.connect(server.key(".".join(OWN), "admin"))
    before = server.call(server.hub.log.get_stream_stats("umbrella.lab.orders"))
    answers = {}
    for path, methods in API["paths"].items():
        for method, operation in methods.items():
            if "security" in operation and names_a_tenant(operation, path):
                answer = ask(client, method, path, operation)
                answers[method, path] = answer.status_code
                assert "secret" not in answer.text
    assert len(answers) >= 7
    assert {key: status for key, status in answers.items() if status != 404} == {}
    assert server.call(server.hub.log.get_stream_stats("umbrella.lab.orders")) == before


def test_the_same_requests_work_for_the_tenant_itself(server: RunningServer) -> None:
    """The matrix above would pass if every request were wrong; none of them is a 401, 403 or 404 for its owner."""
    fill(server)
    client = server.connect(server.key(".".join(OTHER), "admin"))
    for path in ("/v1/bus/publish", "/v1/bus/topics", "/v1/bus/events/{id}", "/v1/bus/trace/{correlation_id}"):
        for method, operation in API["paths"][path].items():
            answer = ask(client, method, path, operation)
            assert answer.status_code in {200, 201, 409}, (method, path, answer.text)


def test_what_names_no_tenant_is_about_the_own_one(server: RunningServer) -> None:
    fill(server)
    client = server.connect(server.key(".".join(OWN), "admin"))
    topics = client.get("/v1/bus/topics").json()["topics"]
    assert {one["tenant"] for one in topics} == {"prod"}
    traced = client.get("/v1/bus/trace/case-7").json()["events"]
    assert [one["event"]["topic"] for one in traced] == ["acme.prod.orders"]
    assert client.get("/v1/bus/trace/umbrella.lab.orders/0/0").status_code == 404
    numbers = client.get("/metrics").text
    assert 'tenant="acme.prod"' in numbers
    assert "umbrella" not in numbers
