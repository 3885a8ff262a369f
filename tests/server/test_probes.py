from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable

import httpx2
import pytest

from postbus.model import Start, StartPolicy
from tests.server.conftest import RunningServer

TOPIC = "agents.demo.orders"


def samples(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_the_probes_answer(client: httpx2.Client) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}


def test_a_server_whose_store_failed_is_not_ready(server: RunningServer) -> None:
    server.topic(TOPIC)
    server.hub.log.store.writer.fail(OSError("the disk is on fire at /some/where"))
    assert server.client.get("/healthz").status_code == 200
    for answer in (
        server.client.get("/readyz"),
        server.client.post("/v1/bus/publish", json={"topic": TOPIC, "payload": 1}),
    ):
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert "/" not in answer.json()["error"]["message"]
    assert server.client.get(f"/v1/bus/topics/{TOPIC}").status_code == 200


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_the_metrics_count_what_happens(server: RunningServer) -> None:
    server.topic(TOPIC)
    for number in range(3):
        body = {"topic": TOPIC, "payload": 0, "native_id": "same" if number < 2 else "other"}
        assert server.client.post("/v1/bus/publish", json=body).status_code == 200
    server.call(server.hub.log.ensure_consumer(TOPIC, "late", Start(policy=StartPolicy.EARLIEST)))
    server.call(server.hub.log.ensure_consumer(TOPIC, "done", Start(policy=StartPolicy.LATEST)))
    assert server.client.get("/nothing").status_code == 404
    answer = server.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = samples(answer.text)
    assert found['postbus_published_events_total{tenant="agents.demo"}'] == 2
    assert found['postbus_duplicate_events_total{tenant="agents.demo"}'] == 1
    assert found["postbus_commit_seconds_count"] == 3
    assert found['postbus_http_requests_total{method="POST",route="/v1/bus/publish",status="200"}'] == 3
    where = f'tenant="agents.demo",topic="{TOPIC}"'
    assert found[f'postbus_subscription_lag{{subscription="late",{where}}}'] == 2
    assert found[f'postbus_subscription_lag{{subscription="done",{where}}}'] == 0
    assert found[f'postbus_subscription_oldest_unacked_seconds{{subscription="late",{where}}}'] > 0
    assert found[f'postbus_subscription_oldest_unacked_seconds{{subscription="done",{where}}}'] == 0
    assert found["postbus_store_bytes"] > 0
    assert not any("_dispatch" in name or "_created" in name for name in found)


def test_with_keys_metrics_show_the_own_tenant_or_everything_to_the_operator(server: RunningServer) -> None:
    for tenant in ("acme.prod", "umbrella.lab"):
        server.topic(f"{tenant}.orders")
        assert (
            server.client.post("/v1/bus/publish", json={"topic": f"{tenant}.orders", "payload": 1}).status_code == 200
        )
    own = server.connect(server.key("acme.prod", "ack")).get("/metrics").text
    assert 'tenant="acme.prod"' in own
    assert all('tenant="acme.prod"' in name for name in samples(own))
    everything = server.connect(server.key(None, "admin")).get("/metrics").text
    assert {'tenant="acme.prod"', 'tenant="umbrella.lab"'} <= set(re.findall(r'tenant="[a-z.]+"', everything))
    assert server.client.get("/metrics").status_code == 401


# --- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_work_offline_and_run_only_what_they_came_with(client: httpx2.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.headers["content-type"].startswith("text/html")
    assert not re.findall(r'(?:src|href)="(?!/)', answer.text)
    assert not re.findall(r"https?://", answer.text)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    for kind, inside in re.findall(r"<(script|style)>(.*?)</\1>", answer.text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_the_openapi_document_names_every_route(client: httpx2.Client) -> None:
    api = client.get("/openapi.json").json()
    assert api["openapi"] == "3.1.0"
    assert set(api["paths"]["/v1/bus/topics/{topic}"]) == {"get", "delete"}
    references = set(re.findall(r'"#/components/schemas/(\w+)"', client.get("/openapi.json").text))
    assert references <= set(api["components"]["schemas"])
    for methods in api["paths"].values():
        for operation in methods.values():
            assert operation["summary"]
            assert "400" in operation["responses"]


def test_every_restart_counts_from_zero(start_server: Callable[..., RunningServer]) -> None:
    first = start_server()
    first.client.get("/healthz")
    first.stop()
    found = samples(start_server().client.get("/metrics").text)
    assert 'postbus_http_requests_total{method="GET",route="/healthz",status="200"}' not in found
