"""``/agents/…/inbox`` over a real socket: read, acked, waited for, watched; messages and receipts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from tests.server.conftest import RunningServer
from tests.server.test_agents import ANN, BASE, SUBS, TOPIC, ann, publish, wait

__all__ = ["ann"]

INBOX = f"{ANN}/inbox"
PATIENCE_S = 60


@pytest.fixture
def five(ann: httpx2.Client) -> httpx2.Client:
    """Items 0 to 4 of a subscription ``orders``."""
    assert ann.post(SUBS, json={"id": "orders", "topic": TOPIC}).status_code == 201
    publish(ann, *range(5))
    assert wait(ann, 5) == [0, 1, 2, 3, 4]
    return ann


def items(client: httpx2.Client, **query: Any) -> list[dict[str, Any]]:
    answer = client.get(INBOX, params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


def payloads(client: httpx2.Client, **query: Any) -> list[Any]:
    return [item["payload"] for item in items(client, **query)]


def ack(client: httpx2.Client, **form: Any) -> int:
    answer = client.post(f"{INBOX}/ack", json=form)
    assert answer.status_code == 200, answer.text
    count: int = answer.json()["acked"]
    return count


# --- read and ack -----------------------------------------------------------------------------------------------------


def test_an_item_as_it_is_shown(ann: httpx2.Client) -> None:
    ann.post(SUBS, json={"id": "orders", "topic": TOPIC})
    event = {
        "topic": TOPIC,
        "payload": {"n": 1.50},
        "metadata": {"m": 1},
        "headers": {"h": "1"},
        "key": "k",
        "source": "shop",
        "correlation_id": "c",
        "delivery_handle": {"kind": "webhook", "url": "https://example.com"},
    }
    assert ann.post("/v1/bus/publish", content=json.dumps(event), headers=JSON).status_code == 200
    wait(ann, 1)
    (item,) = items(ann)
    assert item.pop("occurred_at").endswith("Z")
    assert item == {
        "id": "itm_1",
        "sequence": 1,
        "topic": TOPIC,
        "variant": "",
        "payload": {"n": 1.5},
        "metadata": {"m": 1},
        "headers": {"h": "1"},
        "source": "shop",
        "key": "k",
        "correlation_id": "c",
        "delivery_handle": {"kind": "webhook", "url": "https://example.com"},
        "trust": "trusted",
        "expired": False,
        "matched_by": ["orders"],
        "match_reason": f"topic {TOPIC} matches {TOPIC}",
        "acked_at": None,
    }
    assert ann.get(f"{INBOX}/items/itm_1").json()["payload"] == {"n": 1.5}
    assert ann.get(f"{INBOX}/items/itm_2").status_code == 404


JSON = {"content-type": "application/json"}


def test_items_in_order_by_pages(five: httpx2.Client) -> None:
    assert payloads(five) == [0, 1, 2, 3, 4]
    first = items(five, limit=2)
    assert payloads(five, after=first[-1]["id"], limit=2) == [2, 3]
    assert ack(five, through=first[-1]["id"]) == 2
    assert payloads(five) == [2, 3, 4]
    assert payloads(five, include_acked=True) == [0, 1, 2, 3, 4]
    assert [item["acked_at"] is None for item in items(five, include_acked=True)] == [False, False, True, True, True]


@pytest.mark.parametrize("after", ["itm_63", "never", ""])
def test_after_what_never_was_is_not_found(five: httpx2.Client, after: str) -> None:
    assert five.get(INBOX, params={"after": after}).status_code == 404


def test_the_three_forms_of_ack(five: httpx2.Client) -> None:
    names = [item["id"] for item in items(five)]
    assert ack(five, items=[names[1], names[1]]) == 1
    assert ack(five, through=names[2]) == 2
    assert ack(five, through=names[2]) == 0
    assert ack(five, all=True) == 2
    assert ack(five, all=True) == 0


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({}, 400),
        ({"all": False}, 400),
        ({"all": True, "through": "itm_1"}, 400),
        ({"through": "itm_1", "items": ["itm_1"]}, 400),
        ({"through": "itm_1", "all": False}, 400),
        ({"items": "itm_1"}, 400),
        ({"everything": True}, 400),
        ({"through": "itm_63"}, 404),
        ({"items": ["itm_1", "itm_63"]}, 404),
    ],
)
def test_an_ack_that_cannot_be_is_refused_and_acks_nothing(
    five: httpx2.Client, form: dict[str, Any], status: int
) -> None:
    assert five.post(f"{INBOX}/ack", json=form).status_code == status
    assert payloads(five) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 1001}, {"limit": "x"}, {"include_acked": "maybe"}, {"x": 1}])
def test_a_bad_query_is_refused(five: httpx2.Client, query: dict[str, Any]) -> None:
    assert five.get(INBOX, params=query).status_code == 400


def test_an_unknown_agent_is_not_found_everywhere(client: httpx2.Client) -> None:
    path = f"{BASE}/local/default/nobody/inbox"
    for end in ("", "/wait", "/watch", "/entries", "/items/itm_1"):
        assert client.get(f"{path}{end}").status_code == 404
    assert client.post(f"{path}/ack", json={"all": True}).status_code == 404
    assert client.post(f"{path}/messages", json={"message": "x"}).status_code == 404
    assert client.post(f"{path}/flush").status_code == 404
    assert client.get(f"{BASE}/local/default/no%20spaces/inbox").status_code == 400


# --- messages and receipts --------------------------------------------------------------------------------------------


def test_a_message_and_its_receipts(ann: httpx2.Client) -> None:
    sent = ann.post(f"{INBOX}/messages", json={"message": "look at this", "sender": "bob"})
    assert sent.status_code == 201
    address = sent.json()["event"]

    def state() -> str:
        (receipt,) = ann.get(f"/v1/bus/receipts/{address}").json()["receipts"]
        assert (receipt["agent"], receipt["item"]) == ("ann", sent.json()["item"])
        return str(receipt["state"])

    assert state() == "accepted"
    (item,) = items(ann)
    assert (item["payload"], item["source"], item["topic"]) == ("look at this", "bob", "inbox.message")
    assert state() == "read"
    ack(ann, items=[item["id"]])
    assert state() == "acked"


@pytest.mark.parametrize(
    "body", [{"message": " "}, {"message": ""}, {"message": None}, {}, {"message": "x", "to": "y"}]
)
def test_a_blank_message_is_refused(ann: httpx2.Client, body: dict[str, Any]) -> None:
    assert ann.post(f"{INBOX}/messages", json=body).status_code == 400
    assert items(ann) == []


@pytest.mark.usefixtures("ann")
def test_a_key_bound_to_a_source_sends_as_that(server: RunningServer) -> None:
    key = server.connect(server.key("acme.prod", "publish", "subscribe", source="robot"))
    assert key.post(f"{INBOX}/messages", json={"message": 1, "sender": "boss"}).status_code == 400
    assert key.post(f"{INBOX}/messages", json={"message": 1}).status_code == 201
    (item,) = key.get(INBOX).json()["items"]
    assert (item["source"], item["trust"]) == ("robot", "untrusted")


@pytest.mark.parametrize(
    ("address", "status"),
    [(f"{TOPIC}/0/0", 200), (f"{TOPIC}/0/99", 200), ("acme.prod.none/0/0", 404), ("nonsense", 400), ("a/b/c", 400)],
)
def test_receipts_of_an_address(five: httpx2.Client, address: str, status: int) -> None:
    answer = five.get(f"/v1/bus/receipts/{address}")
    assert answer.status_code == status
    if status == 200:
        assert len(answer.json()["receipts"]) == (1 if address.endswith("/0/0") else 0)


# --- digests ----------------------------------------------------------------------------------------------------------


def test_digests_are_shown_flushed_and_acked(ann: httpx2.Client) -> None:
    ann.post(SUBS, json={"id": "orders", "topic": TOPIC, "digest": {"by": "payload.on"}})
    publish(ann, {"on": "x", "n": 1}, {"on": "x", "n": 2}, {"n": 3})
    wait(ann, 3)
    assert ann.get(f"{INBOX}/entries").json()["digests"] == []
    entries = ann.post(f"{INBOX}/flush").json()
    (digest,) = entries["digests"]
    assert (digest["resource"], digest["count"], digest["revision"]) == ("x", 2, 1)
    assert digest["item_ids"] == ["itm_1", "itm_2"]
    assert [item["payload"] for item in entries["items"]] == [{"n": 3}]
    publish(ann, {"on": "x", "n": 4})
    wait(ann, 4)
    assert ack(ann, items=[digest["id"]]) == 2
    assert payloads(ann) == [{"n": 3}, {"on": "x", "n": 4}]


# --- waiting and watching ---------------------------------------------------------------------------------------------


def test_waiting_returns_as_soon_as_something_comes(ann: httpx2.Client, server: RunningServer) -> None:
    found: list[Any] = []
    other = server.connect()

    def waiter() -> None:
        found.extend(other.get(f"{INBOX}/wait", params={"timeout_ms": 60_000}).json()["items"])

    thread = threading.Thread(target=waiter)
    thread.start()
    ann.post(f"{INBOX}/messages", json={"message": "hello"})
    thread.join(PATIENCE_S)
    assert [item["payload"] for item in found] == ["hello"]


def test_waiting_in_vain(ann: httpx2.Client) -> None:
    assert ann.get(f"{INBOX}/wait", params={"timeout_ms": 1}).json() == {"items": []}
    assert ann.get(f"{INBOX}/wait", params={"timeout_ms": 60_001}).status_code == 400
    assert ann.get(f"{INBOX}/wait", params={"timeout_ms": 1, "after": "itm_9"}).status_code == 404


class Watcher:
    """Reads an SSE stream on a thread."""

    def __init__(self, client: httpx2.Client, **options: Any) -> None:
        self.frames: list[dict[str, str]] = []
        self.comments: list[str] = []
        self.headers: dict[str, str] = {}
        self._client, self._options = client, options
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._client.stream("GET", f"{INBOX}/watch", **self._options) as answer:
            self.headers = dict(answer.headers)
            frame: dict[str, str] = {}
            for line in answer.iter_lines():
                if not line:
                    if "event" in frame:
                        self.frames.append(frame)
                    frame = {}
                elif line.startswith(":"):
                    self.comments.append(line)
                else:
                    name, _, value = line.partition(": ")
                    frame[name] = value
                if self._stop.is_set():
                    return

    @property
    def seen(self) -> list[Any]:
        found = [frame for frame in self.frames if frame["event"] == "inbox.items"]
        return [item["payload"] for frame in found for item in json.loads(frame["data"])["items"]]

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, (self.frames, self.comments)
            time.sleep(0.01)

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def watch(server: RunningServer) -> Iterator[Callable[..., Watcher]]:
    server.hub.readers.keep_alive_s = 0.05
    made: list[Watcher] = []

    def start(**options: Any) -> Watcher:
        made.append(Watcher(server.connect(), **options))
        return made[-1]

    yield start
    for watcher in made:
        watcher.stop()
        watcher.join()


def test_watching_shows_what_is_there_and_then_what_comes(five: httpx2.Client, watch: Callable[..., Watcher]) -> None:
    ack(five, through="itm_3")
    watcher = watch()
    watcher.until(lambda: watcher.seen == [3, 4])
    publish(five, 5, 6)
    watcher.until(lambda: len(watcher.seen) == 4)
    assert watcher.seen == [3, 4, 5, 6]
    assert watcher.headers["content-type"].startswith("text/event-stream")
    assert watcher.headers["cache-control"] == "no-store"
    assert watcher.frames[-1]["id"] == "itm_7"


def test_a_watcher_comes_back_where_it_was(five: httpx2.Client, watch: Callable[..., Watcher]) -> None:
    by_header = watch(headers={"last-event-id": "itm_2"})
    by_query = watch(params={"after": "itm_4"})
    by_header.until(lambda: by_header.seen == [2, 3, 4])
    by_query.until(lambda: by_query.seen == [4])
    assert five.get(f"{INBOX}/watch", params={"after": "itm_99"}).status_code == 404


def test_a_quiet_watch_is_kept_alive(ann: httpx2.Client, watch: Callable[..., Watcher]) -> None:
    watcher = watch()
    watcher.until(lambda: watcher.comments.count(": keep-alive") >= 2)
    ann.post(f"{INBOX}/messages", json={"message": {"text": "two\nlines"}})
    watcher.until(lambda: watcher.seen == [{"text": "two\nlines"}])


def test_a_watch_ends_with_its_agent(ann: httpx2.Client, watch: Callable[..., Watcher]) -> None:
    watcher = watch()
    watcher.until(lambda: bool(watcher.comments))
    ann.delete(ANN)
    watcher.join()
    assert watcher.frames[-1]["event"] == "bus.error"
    assert json.loads(watcher.frames[-1]["data"])["code"] == "not_found"


@pytest.mark.usefixtures("ann")
def test_a_watch_and_a_wait_end_with_the_server(server: RunningServer, watch: Callable[..., Watcher]) -> None:
    watcher = watch()
    watcher.until(lambda: bool(watcher.comments))
    answers: list[Any] = []
    other = server.connect()
    waiting = threading.Thread(
        target=lambda: answers.append(other.get(f"{INBOX}/wait", params={"timeout_ms": 60_000}).json())
    )
    waiting.start()
    watcher.until(lambda: server.at_work("Inboxes.wait") == 1)
    server._loop.call_soon_threadsafe(server.hub.stopping.set)
    watcher.join()
    waiting.join(PATIENCE_S)
    assert json.loads(watcher.frames[-1]["data"])["code"] == "stopping"
    assert answers == [{"items": []}]


def test_watching_counts_as_a_connection(
    five: httpx2.Client, server: RunningServer, watch: Callable[..., Watcher]
) -> None:
    from postbus.server.quotas import Quota, set_quota  # noqa: PLC0415 - kept beside its use

    server.call(set_quota(server.hub.log, "acme.prod", Quota(sse_connections=1)))
    server.hub.quotas._read_at_s = -1e9
    watcher = watch()
    watcher.until(lambda: watcher.seen == [0, 1, 2, 3, 4])
    assert five.get(f"{INBOX}/watch").status_code == 429
    watcher.stop()
    watcher.join()
    watcher.until(lambda: server.hub.quotas.connections()["acme.prod"] == 0)


def test_items_survive_a_restart(
    five: httpx2.Client, server: RunningServer, start_server: Callable[..., RunningServer]
) -> None:
    ack(five, items=["itm_2"])
    server.stop()
    again = start_server().client
    assert payloads(again) == [0, 2, 3, 4]
    publish(again, 5)
    assert wait(again, 5) == [0, 2, 3, 4, 5]
