from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from postbus.model import Invalid, QuotaExceeded
from postbus.server.quotas import Quota, list_quotas, set_quota
from tests.server.conftest import RunningServer

TENANT, TOPIC = "agents.demo", "agents.demo.orders"
TIMEOUT_S = 60


def bound(server: RunningServer, tenant: str = TENANT, **facts: Any) -> None:
    server.call(set_quota(server.hub.log, tenant, Quota(**facts)))
    server.hub.quotas._read_at_s = float("-inf")


def publish(client: httpx2.Client, payload: object = 1, topic: str = TOPIC) -> httpx2.Response:
    return client.post("/v1/bus/publish", json={"topic": topic, "payload": payload})


def test_the_rate_of_publishing_is_bounded(server: RunningServer) -> None:
    server.topic(TOPIC)
    server.topic("agents.other.orders")
    bound(server, publish_per_s=1)
    answers = [publish(server.client) for _ in range(20)]
    refused = [one for one in answers if one.status_code == 429]
    assert answers[0].status_code == 200
    assert refused
    assert refused[0].json()["error"]["code"] == "quota_exceeded"
    assert int(refused[0].headers["retry-after"]) >= 1
    stored = server.call(server.hub.log.get_stream_stats(TOPIC)).count
    assert stored == len(answers) - len(refused)
    assert publish(server.client, topic="agents.other.orders").status_code == 200
    deadline = time.monotonic() + TIMEOUT_S
    while publish(server.client).status_code == 429:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_batch_larger_than_the_rate_goes_when_there_is_room_and_leaves_a_debt(server: RunningServer) -> None:
    server.topic(TOPIC)
    bound(server, publish_per_s=1)
    batch = {"events": [{"topic": TOPIC, "payload": 1}] * 50}
    assert server.client.post("/v1/bus/publish/batch", json=batch).status_code == 200
    assert publish(server.client).status_code == 429


def test_retained_bytes_are_bounded(server: RunningServer) -> None:
    server.topic(TOPIC)
    bound(server, retained_bytes=10_000)
    statuses = [publish(server.client, "x" * 1000).status_code for _ in range(20)]
    full = publish(server.client, "x" * 1000)
    assert statuses[0] == 200
    assert statuses[-1] == 507
    assert (full.status_code, full.json()["error"]["code"]) == (507, "tenant_full")
    assert int(full.headers["retry-after"]) >= 1
    assert server.call(server.hub.log.get_stream_stats(TOPIC)).bytes <= 10_000


def test_topics_are_bounded(server: RunningServer) -> None:
    bound(server, topics=2)
    made = [server.client.post("/v1/bus/topics", json={"topic": f"{TENANT}.t{n}"}).status_code for n in range(3)]
    assert made == [201, 201, 429]
    assert server.client.post("/v1/bus/topics", json={"topic": "agents.other.t"}).status_code == 201


def test_connections_and_subscriptions_are_bounded(server: RunningServer) -> None:
    bound(server, sse_connections=1, subscriptions=3)
    quotas = server.hub.quotas
    server.call(quotas.connect(TENANT))
    with pytest.raises(QuotaExceeded, match="SSE connections"):
        server.call(quotas.connect(TENANT))
    assert quotas.connections() == {TENANT: 1}
    quotas.disconnect(TENANT)
    server.call(quotas.connect(TENANT))
    server.call(quotas.subscriptions(TENANT, 2))
    with pytest.raises(QuotaExceeded, match="subscriptions"):
        server.call(quotas.subscriptions(TENANT, 3))


def test_everybody_has_the_quota_of_the_star(server: RunningServer) -> None:
    bound(server, "*", topics=1)
    bound(server, topics=2)
    made = [server.client.post("/v1/bus/topics", json={"topic": f"{TENANT}.t{n}"}).status_code for n in range(3)]
    assert made == [201, 201, 429]
    made = [server.client.post("/v1/bus/topics", json={"topic": f"a.b.t{n}"}).status_code for n in range(2)]
    assert made == [201, 429]


def test_quotas_are_kept_and_taken_away(start_server: Callable[..., RunningServer]) -> None:
    first = start_server()
    bound(first, topics=7, publish_per_s=None)
    first.stop()
    second = start_server()
    assert second.call(list_quotas(second.hub.log)) == {TENANT: Quota(topics=7)}
    second.call(set_quota(second.hub.log, TENANT, None))
    assert second.call(list_quotas(second.hub.log)) == {}


@pytest.mark.parametrize(("tenant", "facts"), [("a", {}), (TENANT, {"topics": -1}), (TENANT, {"publish_per_s": 0})])
def test_a_bad_quota_is_refused(server: RunningServer, tenant: str, facts: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        server.call(set_quota(server.hub.log, tenant, Quota(**facts)))
    assert server.call(list_quotas(server.hub.log)) == {}
