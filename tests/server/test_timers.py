"""``/timers`` over a real socket."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.server.conftest import RunningServer
from tests.server.test_agents import ANN, ann, wait

__all__ = ["ann"]

BASE = "/v1/bus/timers"
OWN = {"namespace": "acme", "tenant": "prod", "agent": "ann"}
TICK = {"id": "tick", "message": "stand up", "every": 3600} | OWN
PATH = f"{BASE}/acme/prod/tick"

pytestmark = pytest.mark.usefixtures("ann")


def test_a_timer_that_is_due_sends_its_message(client: httpx2.Client) -> None:
    made = client.post(BASE, json={"id": "now", "message": {"do": "it"}, "at": "2020-01-01T00:00:00Z"} | OWN)
    assert made.status_code == 201, made.text
    assert made.json()["due_at"] == "2020-01-01T00:00:00Z"
    assert wait(client, 1) == [{"do": "it"}]
    (item,) = client.get(f"{ANN}/inbox").json()["items"]
    assert (item["source"], item["occurred_at"]) == ("timer.now", "2020-01-01T00:00:00Z")
    shown = client.get(f"{BASE}/acme/prod/now").json()
    assert (shown["fired"], shown["due_at"]) == (1, None)


def test_timers_are_listed_paused_resumed_and_removed(client: httpx2.Client) -> None:
    assert client.post(BASE, json=TICK).status_code == 201
    assert client.post(BASE, json=TICK).status_code == 409
    cron = {"id": "daily", "message": 1, "cron": "0 9 * * 1-5", "zone": "Europe/Amsterdam"} | OWN
    assert client.post(BASE, json=cron).status_code == 201
    listed = client.get(BASE, params={"namespace": "acme", "tenant": "prod", "limit": 1}).json()
    assert ([timer["id"] for timer in listed["timers"]], listed["next"]) == (["daily"], "daily")
    rest = client.get(BASE, params={"namespace": "acme", "tenant": "prod", "after": "daily"}).json()
    assert ([timer["id"] for timer in rest["timers"]], rest["next"]) == (["tick"], None)
    assert client.get(BASE).json()["timers"] == [], "the local tenant has none"
    assert client.post(f"{PATH}/pause").json()["due_at"] is None
    assert client.post(f"{PATH}/resume").json()["due_at"] is not None
    assert client.delete(PATH).status_code == 204
    for answer in (client.get(PATH), client.delete(PATH), client.post(f"{PATH}/pause"), client.post(f"{PATH}/resume")):
        assert answer.status_code == 404


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"every": 59}, 400),
        ({"every": None}, 400),
        ({"cron": "* * * * *"}, 400),
        ({"every": None, "cron": "never"}, 400),
        ({"every": None, "cron": "* * * * *", "zone": "Mars"}, 400),
        ({"every": None, "at": "soon"}, 400),
        ({"message": " "}, 400),
        ({"id": "no spaces"}, 400),
        ({"agent": "no spaces"}, 400),
        ({"agent": "nobody"}, 404),
    ],
)
def test_a_timer_that_cannot_be_is_refused(client: httpx2.Client, change: dict[str, Any], status: int) -> None:
    assert client.post(BASE, json=TICK | change).status_code == status
    assert client.get(BASE, params={"namespace": "acme", "tenant": "prod"}).json()["timers"] == []


def test_a_key_sees_the_timers_of_inboxes_it_may_send_to(client: httpx2.Client, server: RunningServer) -> None:
    client.post(BASE, json=TICK)
    may = server.connect(server.key("acme.prod", ("publish", "acme.prod.inbox.ann")))
    may_not = server.connect(server.key("acme.prod", ("publish", "acme.prod.inbox.bob")))
    other = server.connect(server.key("other.tenant", "admin"))
    assert may.get(PATH).status_code == 200
    assert may_not.get(PATH).status_code == other.get(PATH).status_code == 404
    assert [len(one.get(BASE).json()["timers"]) for one in (may, may_not, other)] == [1, 0, 0]
    assert may_not.post(BASE, json=TICK | {"id": "t2"}).status_code == 403
    assert may_not.delete(PATH).status_code == 404
    assert may.delete(PATH).status_code == 204
