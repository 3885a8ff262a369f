"""The whole way: a comment on GitHub comes in, an agent finds it in its inbox and answers it where it came from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.conftest import RunningServer
from tests.sources import github_server as gh
from tests.sources.conftest import Call, Reply, Web

AGENT = "/v1/bus/agents/local/default/ann"
AT = "2026-03-02T10:00:00Z"
WAIT_S = 60.0


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    yield server
    server.stop()


def wait(value: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := value()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)
    return found


def test_a_mention_reaches_an_agent_and_its_answer_becomes_a_comment(
    server: RunningServer, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GH_TOKEN", "t0ken")
    github = gh.Github(web)
    github.comments = [gh.comment(1, 7, AT, body="hey @ann"), gh.comment(2, 8, AT, body="nobody")]
    posted: list[Any] = []

    def answer(call: Call) -> Reply | None:
        if call.method != "POST":
            return None
        posted.append((call.path, json.loads(call.body)["body"], call.headers["authorization"]))
        return 201, {}, b'{"id": 99, "html_url": "https://github.com/c/99"}'

    github.refuse = answer
    client = server.client
    settings = {
        "repo": gh.REPO,
        "base_url": web.url,
        "allow_private": True,
        "token_env": "GH_TOKEN",
        "watch": ["comments"],
        "since": "2026-03-01T00:00:00Z",
    }
    assert (
        client.post("/v1/bus/sources", json={"id": "hello", "kind": "github", "settings": settings}).status_code == 201
    )
    assert client.post("/v1/bus/agents", json={"id": "ann"}).status_code == 201
    wanted = {
        "topic": "local.default.hello",
        "filter": {"metadata": {"mentions": "ann"}},
        "start": {"policy": "earliest"},
    }
    assert client.post(f"{AGENT}/subscriptions", json=wanted).status_code == 201
    (item,) = wait(lambda: client.get(f"{AGENT}/inbox").json()["items"])
    assert (item["topic"], item["metadata"]["number"], item["trust"]) == ("github.issue_comment", 7, "untrusted")
    body = {"handle": item["delivery_handle"], "payload": "On it.", "key": item["id"]}
    sent = client.post("/v1/bus/deliveries/send", json=body).json()
    assert client.post("/v1/bus/deliveries/send", json=body).json()["id"] == sent["id"]
    done = wait(lambda: _sent(client.get(f"/v1/bus/deliveries/{sent['id']}").json()))
    assert done["result"] == {"id": 99, "html_url": "https://github.com/c/99"}
    ((path, text, token),) = posted
    assert (path, token) == (f"/repos/{gh.REPO}/issues/7/comments", "Bearer t0ken")
    assert text.startswith("On it.\n")
    assert client.post(f"{AGENT}/inbox/ack", json={"items": [item["id"]]}).json() == {"acked": 1}


def _sent(reply: Any) -> Any:
    return reply if reply["state"] == "sent" else None
