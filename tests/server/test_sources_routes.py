from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from standardwebhooks import Webhook

from tests.server.conftest import RunningServer

SOURCES = "/v1/bus/sources"
MINE = f"{SOURCES}/acme/prod"
SECRET = "whsec_c2VjcmV0IHNlY3JldCBzZWNyZXQ="  # noqa: S105 - of this test only
WAIT_S = 60.0


def new(client: httpx2.Client, name: str, kind: str, settings: dict[str, Any], code: int = 201) -> Any:
    body = {"id": name, "kind": kind, "settings": settings, "namespace": "acme", "tenant": "prod"}
    answer = client.post(SOURCES, json=body)
    assert answer.status_code == code, answer.text
    return answer.json()


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def payloads(client: httpx2.Client, topic: str) -> list[Any]:
    found = client.get(f"/v1/bus/topics/{topic}/events").json()
    return [event["payload"] for event in found.get("events", [])]


def test_a_source_runs_in_the_server_from_when_it_is_made(client: httpx2.Client, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    made = new(client, "jobs", "file", {"path": str(path), "interval_s": 0.05})
    assert (made["state"], made["topic"], made["namespace"]) == ("running", "acme.prod.jobs", "acme")
    path.write_text("1\n")
    wait(lambda: payloads(client, "acme.prod.jobs") == [1])
    assert client.post(f"{MINE}/jobs/pause").json()["state"] == "paused"
    path.write_text("1\n2\n")
    polled = client.post(f"{MINE}/jobs/poll").json()
    assert polled == {"events": ["acme.prod.jobs/0/1"], "duplicates": 0, "error": None, "more": False}
    assert client.post(f"{MINE}/jobs/resume").json()["state"] == "running"
    listed = client.get(SOURCES, params={"namespace": "acme", "tenant": "prod"}).json()["sources"]
    assert [(one["id"], one["events"]) for one in listed] == [("jobs", 2)]
    assert client.delete(f"{MINE}/jobs").status_code == 204
    assert client.get(f"{MINE}/jobs").status_code == 404
    assert payloads(client, "acme.prod.jobs") == [1, 2]


def test_sources_go_on_after_a_restart(
    server: RunningServer, start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    path = tmp_path / "lines"
    path.write_text("1\n")
    new(server.client, "jobs", "file", {"path": str(path), "interval_s": 0.05})
    wait(lambda: payloads(server.client, "acme.prod.jobs") == [1])
    server.stop()
    path.write_text("1\n2\n")
    again = start_server()
    wait(lambda: payloads(again.client, "acme.prod.jobs") == [1, 2])


@pytest.mark.parametrize(
    ("name", "kind", "settings", "code"),
    [
        ("x", "teapot", {}, 400),
        ("x", "timer", {}, 400),
        ("x y", "timer", {"every_s": 60}, 400),
        ("x", "feed", {"url": "http://127.0.0.1/"}, 400),
        ("x", "timer", {"every_s": 60, "stream": "acme.prod.missing"}, 404),
        ("taken", "timer", {"every_s": 60}, 409),
    ],
)
def test_what_cannot_be_is_refused(
    client: httpx2.Client, name: str, kind: str, settings: dict[str, Any], code: int
) -> None:
    new(client, "taken", "timer", {"every_s": 3600})
    new(client, name, kind, settings, code)
    assert len(client.get(SOURCES, params={"namespace": "acme", "tenant": "prod"}).json()["sources"]) == 1


def test_a_signed_webhook_needs_no_key_and_comes_once(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    new(server.client, "hook", "webhook", {"secret_env": "HOOK_SECRET"})
    server.key("acme.prod", "admin")  # from now on callers need a key, but not this one
    body = b'{"type": "paid",   "n": 1}'
    now = datetime.now(UTC).replace(microsecond=0)
    headers = {
        "content-type": "application/json",
        "webhook-id": "m1",
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(SECRET).sign("m1", now, body.decode()),
    }
    first = server.client.post(f"{MINE}/hook/hook", content=body, headers=headers)
    again = server.client.post(f"{MINE}/hook/hook", content=body, headers=headers)
    assert (first.status_code, first.json()["events"]) == (200, ["acme.prod.hook/0/0"])
    assert again.json() == {"events": [], "duplicates": 1, "error": None, "more": False}
    forged = server.client.post(f"{MINE}/hook/hook", content=body + b" ", headers=headers)
    assert forged.status_code == 401
    assert server.client.post(f"{MINE}/other/hook", content=body, headers=headers).status_code == 404
    monkeypatch.delenv("HOOK_SECRET")
    unready = server.client.post(f"{MINE}/hook/hook", content=body, headers=headers | {"webhook-id": "m2"})
    assert (unready.status_code, "HOOK_SECRET" in unready.text) == (503, False)
    assert server.client.get(f"{MINE}/hook").status_code == 401


def test_a_tenants_key_sees_only_its_own_and_may_not_touch_the_machine(server: RunningServer) -> None:
    operator = server.connect(server.key(None, "admin"))
    mine = server.connect(server.key("acme.prod", "admin"))
    other = server.connect(server.key("other.prod", "admin"))
    reader = server.connect(server.key("acme.prod", "subscribe"))
    for kind, settings in (
        ("file", {"path": "/etc/passwd"}),
        ("command", {"argv": ["id"]}),
        ("github", {"repo": "a/b"}),
        ("webhook", {"secret_env": "HOME"}),
        ("feed", {"url": "http://127.0.0.1/", "allow_private": True}),
    ):
        new(mine, "x", kind, settings, 403)
    new(mine, "tick", "timer", {"every_s": 3600})
    new(other, "tock", "timer", {"every_s": 3600}, 404)
    assert other.get(f"{MINE}/tick").status_code == 404
    assert other.get(SOURCES).json() == {"sources": []}
    assert reader.get(f"{MINE}/tick").status_code == 200
    assert reader.delete(f"{MINE}/tick").status_code == 403
    new(operator, "files", "file", {"path": "/nonexistent"})
    assert [one["id"] for one in mine.get(SOURCES).json()["sources"]] == ["files", "tick"]


# --- deliveries -------------------------------------------------------------------------------------------------------

DELIVERIES = "/v1/bus/deliveries"
BUS = {"kind": "bus", "topic": "answers.mine"}


def test_a_reply_is_sent_through_a_handle_or_an_event(server: RunningServer, client: httpx2.Client) -> None:
    server.topic("local.default.asked")
    body = {"topic": "local.default.asked", "payload": 1, "delivery_handle": BUS}
    asked = client.post("/v1/bus/publish", json=body).json()["id"]
    sent = client.post(f"{DELIVERIES}/send", json={"event": asked, "payload": {"ok": True}, "key": "k"})
    assert (sent.status_code, sent.json()["state"]) == (201, "sent")
    again = client.post(f"{DELIVERIES}/send", json={"handle": BUS, "payload": {"ok": True}, "key": "k"})
    assert again.json()["id"] == sent.json()["id"]
    assert client.post(f"{DELIVERIES}/send", json={"handle": BUS, "payload": 2, "key": "k"}).status_code == 409
    answer = client.get(f"/v1/bus/events/{sent.json()['result']['event']}").json()
    assert (answer["topic"], answer["payload"]) == ("answers.mine", {"ok": True})
    actions = client.post(f"{DELIVERIES}/actions", json={"event": asked}).json()["actions"]
    assert [action["name"] for action in actions] == ["publish"]
    invoked = client.post(
        f"{DELIVERIES}/invoke", json={"handle": BUS, "action": "publish", "arguments": {"payload": 3}}
    )
    assert invoked.status_code == 201
    page = client.get(DELIVERIES, params={"limit": 1}).json()
    rest = client.get(DELIVERIES, params={"after": page["next"]}).json()
    assert [one["id"] for one in (*page["deliveries"], *rest["deliveries"])] == [
        invoked.json()["id"],
        sent.json()["id"],
    ]


def test_the_server_carries_replies_and_gives_up_on_record(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POSTBUS_REPLY_COMMANDS", f"{sys.executable}:/bin/false")
    server = start_server()
    out = tmp_path / "out"
    text = f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"
    handle = {"kind": "command", "argv": [sys.executable, "-c", text]}
    sent = server.client.post(f"{DELIVERIES}/send", json={"handle": handle, "payload": [1]}).json()
    wait(lambda: server.client.get(f"{DELIVERIES}/{sent['id']}").json()["state"] == "sent")
    assert json.loads(out.read_text()) == [1]
    tries = server.client.get(f"{DELIVERIES}/{sent['id']}/attempts").json()["attempts"]
    assert [(one["attempt"], one["error"]) for one in tries] == [(1, None)]
    assert server.client.post(f"{DELIVERIES}/{sent['id']}/retry").status_code == 409
    late = server.client.post(
        f"{DELIVERIES}/send", json={"handle": {"kind": "command", "argv": ["/bin/false"]}, "payload": 1}
    )
    wait(lambda: server.client.get(f"{DELIVERIES}/{late.json()['id']}").json()["attempts"] == 1)
    waiting = server.client.get(f"{DELIVERIES}/{late.json()['id']}").json()
    assert waiting["state"] == "accepted"
    server.stop()
    assert start_server().client.get(f"{DELIVERIES}/{late.json()['id']}").json()["id"] == late.json()["id"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"payload": 1}, 400),
        ({"payload": 1, "handle": BUS, "event": "local.default.journal/0/0"}, 400),
        ({"payload": 1, "handle": {"kind": "pigeon"}}, 400),
        ({"payload": 1, "handle": {"kind": "command", "argv": ["/bin/sh"]}}, 400),
        ({"payload": 1, "handle": {"kind": "webhook", "url": "http://127.0.0.1:1/"}}, 400),
        ({"payload": 1, "handle": {"kind": "bus", "topic": "system.user.notify"}}, 400),
        ({"payload": 1, "event": "no address"}, 400),
        ({"payload": 1, "event": "local.default.journal/0/99"}, 404),
        ({"payload": 1, "handle": BUS, "more": 1}, 400),
    ],
)
def test_a_bad_reply_is_refused(client: httpx2.Client, body: dict[str, Any], code: int) -> None:
    answer = client.post(f"{DELIVERIES}/send", json=body)
    assert answer.status_code == code, answer.text
    assert client.get(DELIVERIES).json()["deliveries"] == []


def test_replies_of_another_tenant_are_not_there(server: RunningServer) -> None:
    operator = server.connect(server.key(None, "admin"))
    mine = server.connect(server.key("acme.prod", "publish"))
    other = server.connect(server.key("other.prod", "admin"))
    reader = server.connect(server.key("acme.prod", "subscribe"))
    narrow = server.connect(server.key("acme.prod", ("publish", "acme.prod.replies")))
    sent = mine.post(f"{DELIVERIES}/send", json={"handle": BUS, "payload": 1}).json()
    assert sent["tenant"] == "prod"
    for client, code in ((mine, 200), (other, 404), (reader, 403)):
        assert client.get(f"{DELIVERIES}/{sent['id']}").status_code == code
    found = operator.get(f"{DELIVERIES}/{sent['id']}", params={"namespace": "acme", "tenant": "prod"})
    assert found.status_code == 200
    assert other.get(DELIVERIES).json()["deliveries"] == []
    assert other.post(f"{DELIVERIES}/send", json={"event": sent["event"], "payload": 1}).status_code == 404
    assert mine.post(f"{DELIVERIES}/send", json={"event": sent["event"], "payload": 1}).status_code == 404
    assert narrow.post(f"{DELIVERIES}/send", json={"handle": BUS, "payload": 1}).status_code == 403
