from __future__ import annotations

import hashlib
from typing import Any

import httpx2
import pytest

from postbus.clock import SystemClock
from postbus.log import SqliteLog
from postbus.model import Invalid, NotFound
from postbus.server.keys import Grant, Scope, create_key, list_keys, revoke_key, rotate_key
from postbus.testing import FakeClock
from tests.server.conftest import RunningServer

ACME, TOPIC = "acme.prod", "acme.prod.orders"
PUBLISH = {"topic": TOPIC, "payload": 1}


@pytest.fixture(autouse=True)
def topic(server: RunningServer) -> None:
    server.topic(TOPIC)
    server.topic("acme.prod.other")
    server.topic("umbrella.lab.orders")


def status(client: httpx2.Client, method: str, path: str, body: Any = None) -> int:
    return int(client.request(method, path, json=body).status_code)


def code(answer: httpx2.Response) -> str:
    return str(answer.json()["error"]["code"])


# --- who may call -----------------------------------------------------------------------------------------------------


def test_a_key_is_needed_as_soon_as_one_exists(server: RunningServer) -> None:
    assert status(server.client, "POST", "/v1/bus/publish", PUBLISH) == 200
    key = server.key(ACME, "publish")
    refused = server.client.post("/v1/bus/publish", json=PUBLISH)
    assert (refused.status_code, code(refused)) == (401, "unauthenticated")
    assert refused.headers["www-authenticate"].startswith("Bearer")
    assert status(server.connect(key), "POST", "/v1/bus/publish", PUBLISH) == 200


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer nonsense",
        "Basic cGI6cGI=",
        "Bearer pb_000000000000_" + "0" * 32,
        "Bearer \xff",
        "Bearer pb_{id}_" + "0" * 32,
        "Bearer pb_{id}_{secret}0",
        "Bearer PB_{id}_{secret}",
    ],
)
@pytest.mark.parametrize("keys", [True, False])
def test_a_wrong_key_is_refused(server: RunningServer, header: str, keys: bool) -> None:
    if keys:
        _, id_, secret = server.key(ACME, "admin").split("_")
        header = header.format(id=id_, secret=secret)
    headers = {b"authorization": header.encode("latin-1")}
    answer = server.client.get("/v1/bus/topics", headers=headers)
    assert (answer.status_code, code(answer)) == (401, "unauthenticated")


def test_probes_and_pages_need_no_key(server: RunningServer) -> None:
    server.key(ACME, "admin")
    for path in ("/healthz", "/readyz", "/openapi.json", "/docs", "/"):
        assert server.client.get(path).status_code == 200
    assert server.client.get("/metrics").status_code == 401


def test_only_a_hash_is_kept(server: RunningServer) -> None:
    key = server.key(ACME, "admin")
    secret = key.rpartition("_")[2]
    rows = server.call(server.hub.log.store.read(lambda db: list(db.execute("SELECT * FROM api_keys"))))
    assert hashlib.sha256(secret.encode()).digest() in rows[0]
    assert secret not in str(rows)
    server.stop()
    assert all(secret.encode() not in path.read_bytes() for path in server.data.iterdir())


# --- what it may do ---------------------------------------------------------------------------------------------------

ROUTES = {
    "publish": ("POST", "/v1/bus/publish", PUBLISH),
    "subscribe": ("GET", f"/v1/bus/topics/{TOPIC}", None),
    "admin": ("POST", "/v1/bus/topics", {"topic": "acme.prod.new"}),
}


@pytest.mark.parametrize("scope", [*Scope])
@pytest.mark.parametrize("needed", [*ROUTES])
def test_scopes_are_held_apart_and_admin_has_all(server: RunningServer, scope: Scope, needed: str) -> None:
    answer = server.connect(server.key(ACME, scope)).request(*ROUTES[needed][:2], json=ROUTES[needed][2])
    if scope in (needed, "admin"):
        assert answer.status_code in {200, 201}
    else:
        assert (answer.status_code, code(answer)) == (403, "forbidden")
        assert needed in answer.json()["error"]["message"]


def test_a_scope_may_be_bound_to_topics(server: RunningServer) -> None:
    client = server.connect(server.key(ACME, ("publish", TOPIC), ("ack", "acme.prod.*")))
    assert status(client, "POST", "/v1/bus/publish", PUBLISH) == 200
    assert status(client, "POST", "/v1/bus/publish", PUBLISH | {"topic": "acme.prod.other"}) == 403
    both = {"events": [PUBLISH, PUBLISH | {"topic": "acme.prod.other"}]}
    assert status(client, "POST", "/v1/bus/publish/batch", both) == 403


def test_a_list_only_shows_what_the_key_may_read(server: RunningServer) -> None:
    client = server.connect(server.key(ACME, ("subscribe", TOPIC)))
    assert [one["topic"] for one in client.get("/v1/bus/topics").json()["topics"]] == [TOPIC]
    assert status(client, "GET", "/v1/bus/topics/acme.prod.other") == 403
    for name in ("acme.prod.orders", "acme.prod.other"):
        body = {"topic": name, "payload": 1, "correlation_id": "c"}
        assert status(server.connect(server.key(ACME, "publish")), "POST", "/v1/bus/publish", body) == 200
    traced = client.get("/v1/bus/trace/c").json()["events"]
    assert [one["event"]["topic"] for one in traced] == [TOPIC]


def test_a_key_bound_to_a_source_publishes_as_that(server: RunningServer) -> None:
    client = server.connect(server.key(ACME, "admin", source="shop"))
    sent = client.post("/v1/bus/publish", json=PUBLISH).json()
    shown = client.get(f"/v1/bus/events/{sent['id']}").json()
    assert (shown["source"], shown["trust"]) == ("shop", "untrusted")
    other = client.post("/v1/bus/publish", json=PUBLISH | {"source": "bank"})
    assert other.status_code == 400
    assert status(client, "POST", "/v1/bus/publish", PUBLISH | {"source": "shop"}) == 200


def test_a_trusted_key_publishes_trusted_text(server: RunningServer) -> None:
    client = server.connect(server.key(ACME, "admin", trusted=True))
    sent = client.post("/v1/bus/publish", json=PUBLISH).json()
    assert client.get(f"/v1/bus/events/{sent['id']}").json()["trust"] == "trusted"


def test_a_key_of_the_operator_sees_every_tenant(server: RunningServer) -> None:
    client = server.connect(server.key(None, "admin"))
    for name in (TOPIC, "umbrella.lab.orders"):
        assert status(client, "POST", "/v1/bus/publish", {"topic": name, "payload": 1}) == 200
    assert len(client.get("/v1/bus/topics").json()["topics"]) >= 3


# --- how it ends ------------------------------------------------------------------------------------------------------


def test_a_revoked_key_ends_at_the_next_request(server: RunningServer) -> None:
    client = server.connect(server.key(ACME, "admin"))
    assert status(client, "GET", "/v1/bus/topics") == 200
    key = server.call(list_keys(server.hub.log))[0]
    assert server.call(revoke_key(server.hub.log, server.hub.clock, key.id)) is True
    answer = client.get("/v1/bus/topics")
    assert (answer.status_code, answer.json()["error"]["message"]) == (401, "this key was revoked")
    assert server.call(revoke_key(server.hub.log, server.hub.clock, key.id)) is False
    # The last key is gone, but the server does not open up again.
    assert status(server.client, "GET", "/v1/bus/topics") == 401


async def test_another_process_may_revoke_it(server: RunningServer) -> None:
    client = server.connect(server.key(ACME, "admin"))
    log, clock = SqliteLog.open(server.data), SystemClock()
    try:
        for _ in range(20):
            key, text = await create_key(log, clock, tenant=ACME, grants=[Grant(Scope.ADMIN)])
            client.headers["authorization"] = f"Bearer {text}"
            assert status(client, "POST", "/v1/bus/publish", PUBLISH) == 200
            await revoke_key(log, clock, key.id)
            assert status(client, "POST", "/v1/bus/publish", PUBLISH) == 401
    finally:
        await log.close()


def test_a_key_expires(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(server.hub.clock.now_us())
    monkeypatch.setattr(server.hub.keys, "_clock", clock)
    client = server.connect(server.key(ACME, "admin", expires_at_us=clock.now_us() + 3_600_000_000))
    clock.advance(3599)
    assert client.get("/v1/bus/topics").status_code == 200
    clock.advance(1)
    answer = client.get("/v1/bus/topics")
    assert (answer.status_code, answer.json()["error"]["message"]) == (401, "this key has expired")


def test_a_rotated_key_is_replaced_at_once_or_after_a_grace(server: RunningServer) -> None:
    log, clock = server.hub.log, server.hub.clock
    first = server.key(ACME, ("publish", TOPIC), source="shop")
    key, second = server.call(rotate_key(log, clock, first.split("_")[1]))
    assert status(server.connect(first), "POST", "/v1/bus/publish", PUBLISH) == 401
    assert status(server.connect(second), "POST", "/v1/bus/publish", PUBLISH) == 200
    assert status(server.connect(second), "GET", "/v1/bus/topics") == 403
    assert (key.source, key.grants) == ("shop", (Grant(Scope.PUBLISH, TOPIC),))
    _, third = server.call(rotate_key(log, clock, key.id, 60.0))
    for text in (second, third):
        assert status(server.connect(text), "POST", "/v1/bus/publish", PUBLISH) == 200
    with pytest.raises(Invalid, match="revoked"):
        server.call(rotate_key(log, clock, first.split("_")[1]))
    with pytest.raises(NotFound, match="no key"):
        server.call(rotate_key(log, clock, "0" * 12))


@pytest.mark.parametrize(
    "facts",
    [
        {"grants": []},
        {"grants": [Grant(Scope.ACK, "a..b")]},
        {"tenant": "acme"},
        {"tenant": "acme.prod.x"},
        {"source": "no spaces"},
        {"expires_at_us": 1},
        {"name": "two\nlines"},
    ],
)
def test_a_bad_key_is_not_made(server: RunningServer, facts: dict[str, Any]) -> None:
    asked = {"tenant": ACME, "grants": [Grant(Scope.ADMIN)]} | facts
    with pytest.raises(Invalid):
        server.call(create_key(server.hub.log, server.hub.clock, **asked))
    assert server.call(list_keys(server.hub.log)) == []


# --- the order of the checks ------------------------------------------------------------------------------------------

NONSENSE = b'{"topic": '


def test_the_checks_come_in_their_order(server: RunningServer) -> None:
    weak = server.connect(server.key(ACME, "ack"))
    strong = server.connect(server.key(ACME, "admin"))
    json = {"content-type": "application/json"}

    def ask(client: httpx2.Client, body: Any) -> int:
        if isinstance(body, bytes):
            return int(client.post("/v1/bus/publish", content=body, headers=json).status_code)
        return status(client, "POST", "/v1/bus/publish", body)

    foreign = "umbrella.lab.orders"
    # Each body breaks its own rule and every later one.
    assert ask(server.client, NONSENSE) == 400
    assert ask(server.client, {"topic": "bad", "key": 1}) == 401
    assert ask(weak, {"topic": "bad", "key": 1}) == 400
    assert ask(weak, {"topic": foreign, "key": 1}) == 404
    assert ask(weak, {"topic": "acme.prod.missing", "key": 1}) == 403
    assert ask(strong, {"topic": "acme.prod.missing", "key": 1, "payload": 1}) == 400
    assert ask(strong, {"topic": "acme.prod.missing", "payload": 1}) == 404
    assert ask(strong, PUBLISH | {"native_id": "n"}) == 200
    assert ask(strong, PUBLISH | {"native_id": "n", "payload": 2}) == 409
