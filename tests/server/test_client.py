"""The Python client against the real server, also when the line between them is bad."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

import postbus.model
from postbus.client import Client, SyncClient
from postbus.client.wire import refusal
from postbus.model import (
    Conflict,
    Forbidden,
    IdempotencyConflict,
    Invalid,
    InvalidPayload,
    LeaseLost,
    NotFound,
    PostbusError,
    QuotaExceeded,
    SchemaMismatch,
    StorageError,
    StorageFull,
    Unauthenticated,
    Unreachable,
)
from tests.server.conftest import RunningServer


@pytest_asyncio.fixture
async def bus(server: RunningServer) -> AsyncIterator[Client]:
    async with Client(server.url) as made:
        yield made


@pytest.fixture
def sync(server: RunningServer) -> Iterator[SyncClient]:
    with SyncClient(server.url) as made:
        yield made


# --- topics and publishing --------------------------------------------------------------------------------------------


async def test_topics_are_made_shown_listed_and_removed(bus: Client) -> None:
    made = await bus.create_topic("orders", partitions=3, labels={"team": "shop"}, retention={"age_s": 60})
    assert (made["topic"], made["partitions"]) == ("local.default.orders", 3)
    with pytest.raises(Conflict):
        await bus.create_topic("orders")
    assert (await bus.topic("local.default.orders"))["labels"] == {"team": "shop"}
    for number in range(120):  # more than one page
        await bus.create_topic(f"topic-{number:03}")
    names = [topic["name"] for topic in await bus.topics()]
    assert [name for name in names if name.startswith("topic-")] == [f"topic-{number:03}" for number in range(120)]
    await bus.delete_topic("orders")
    with pytest.raises(NotFound):
        await bus.topic("orders")
    with pytest.raises(NotFound):
        await bus.delete_topic("orders")


async def test_what_is_published_comes_back_as_it_was(bus: Client) -> None:
    await bus.create_topic("orders")
    at = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)
    receipt = await bus.publish(
        "orders",
        b'{"n":  1, "big": 123456789012345678901234567890}',
        source="shop:web",
        key="customer-9",
        headers={"region": "eu"},
        native_id="evt-1",
        variant="v2",
        metadata={"a": [1, None]},
        correlation_id="c-1",
        occurred_at=at,
        delivery_handle={"kind": "webhook", "url": "https://example.org"},
    )
    assert (receipt.stream, receipt.partition, receipt.offset, receipt.duplicate) == (
        "local.default.orders",
        0,
        0,
        False,
    )
    event = await bus.event(receipt.id)
    assert event.payload_json == b'{"n":  1, "big": 123456789012345678901234567890}'
    assert (event.source, event.key, event.headers) == ("shop:web", "customer-9", {"region": "eu"})
    assert (event.native_id, event.variant, event.metadata) == ("evt-1", "v2", {"a": [1, None]})
    assert (event.correlation_id, event.occurred_at) == ("c-1", at)
    assert event.delivery_handle == {"kind": "webhook", "url": "https://example.org"}
    assert event.created_at_us == receipt.created_at_us
    story = await bus.trace("c-1")
    assert [step["event"]["id"] for step in story["events"]] == [receipt.id]


async def test_every_event_gets_an_identity_of_its_own(bus: Client) -> None:
    await bus.create_topic("orders")
    first, second = [await bus.publish("orders", None) for _ in range(2)]
    assert (first.offset, second.offset, second.duplicate) == (0, 1, False)
    ids = [(await bus.event(receipt.id)).native_id for receipt in (first, second)]
    assert None not in ids
    assert len(set(ids)) == 2


async def test_a_batch_is_published_in_its_order(bus: Client) -> None:
    await bus.create_topic("orders")
    receipts = await bus.publish_batch([{"topic": "orders", "payload": number} for number in range(50)])
    assert [receipt.offset for receipt in receipts] == [*range(50)]
    with pytest.raises(NotFound):
        await bus.publish_batch([{"topic": "orders", "payload": 1}, {"topic": "nothing", "payload": 2}])
    assert (await bus.topic("orders"))["events"] == 50


async def test_refusals_come_back_as_the_errors_they_are(server: RunningServer, bus: Client) -> None:
    await bus.create_topic("orders")
    with pytest.raises(NotFound):
        await bus.publish("nothing", 1)
    with pytest.raises(InvalidPayload, match="duplicate key at byte 7"):
        await bus.publish("orders", b'{"a":1,"a":2}')
    with pytest.raises(InvalidPayload):
        await bus.publish("orders", b'1,"topic":"local.default.other"')
    with pytest.raises(Invalid):
        await bus.publish("orders", float("nan"))
    with pytest.raises(Invalid):
        await bus.publish("orders", 1, metadata={"bad": float("inf")})
    with pytest.raises(Invalid, match="postbus"):
        await bus.publish("orders", 1, headers={"postbus.x": "1"})
    with pytest.raises(Invalid, match="topic and a payload"):
        await bus.publish_batch([{"topic": "orders"}])
    await bus.publish("orders", 1, native_id="same")
    with pytest.raises(IdempotencyConflict) as conflict:
        await bus.publish("orders", 2, native_id="same")
    assert (conflict.value.stream, conflict.value.native_id) == ("local.default.orders", "same")
    assert conflict.value.offset == 0
    key = server.key("local.default", "subscribe")
    with pytest.raises(Unauthenticated):
        await bus.publish("orders", 1)
    async with Client(server.url, key=key) as reader:
        with pytest.raises(Forbidden):
            await reader.publish("orders", 1)
        assert (await reader.topic("orders"))["events"] == 1


def test_a_tenant_has_two_names() -> None:
    for bad in ("local", "a.b.c", ".b", "a."):
        with pytest.raises(Invalid, match=r"namespace\.tenant"):
            Client(tenant=bad)


@pytest.mark.parametrize(
    ("status", "body", "kind", "code"),
    [
        (400, b'{"error":{"code":"invalid_payload","message":"m","position":7}}', InvalidPayload, "invalid_payload"),
        (409, b'{"error":{"code":"lease_lost","message":"m","issues":["x"]}}', LeaseLost, "lease_lost"),
        (429, b'{"error":{"code":"quota_exceeded","message":"m","hint":"h"}}', QuotaExceeded, "quota_exceeded"),
        (507, b'{"error":{"code":"storage_full","message":"m"}}', StorageFull, "storage_full"),
        (400, b'{"error":{"code":"new_in_the_next_version","message":"m"}}', Invalid, "new_in_the_next_version"),
        (500, b'{"error":{"code":"internal","message":"m"}}', StorageError, "internal"),
        (502, b"<html>bad gateway</html>", Unreachable, "unreachable"),
        (200, b"\xff\xfe", Unreachable, "unreachable"),
    ],
)
def test_each_refusal_has_its_error(status: int, body: bytes, kind: type[PostbusError], code: str) -> None:
    error = refusal(status, body, "3")
    assert type(error) is kind
    assert error.code == code
    if isinstance(error, QuotaExceeded):
        assert (error.retry_after_s, error.hint) == (3.0, "h")
    if isinstance(error, LeaseLost):
        assert error.lease_ids == ("x",)


def test_every_kind_of_error_survives_the_way() -> None:
    kinds = [kind for kind in vars(postbus.model).values() if isinstance(kind, type) and issubclass(kind, PostbusError)]
    assert len(kinds) > 20
    for kind in kinds:
        body = msgspec.json.encode({"error": {"code": kind.code, "message": "m", "hint": "h", "issues": ["i"]}})
        error = refusal(500, body)
        assert type(error) is kind
        assert error.message == "m"


# --- pulling ----------------------------------------------------------------------------------------------------------


async def test_pull_ack_nack_and_lag(bus: Client) -> None:
    await bus.create_topic("orders")
    made = await bus.create_subscription(
        "worker", "orders", starting_offset="earliest", filter={"payload": {"n": [1, 2]}}
    )
    assert made["id"] == "worker"
    with pytest.raises(Conflict):
        await bus.create_subscription("worker", "orders")
    for number in range(4):
        await bus.publish("orders", {"n": number})
    [first, second] = await bus.pull("worker", limit=10)
    assert [one.event.payload["n"] for one in (first, second)] == [1, 2]
    assert first.event.attempt == 1
    assert (await bus.ack("worker", [first]))["acked"] == 1
    await bus.nack("worker", [second], delay_s=0, reason="later")
    [again] = await bus.pull("worker", wait_s=5)
    assert (again.event.offset, again.event.attempt) == (2, 2)
    with pytest.raises(LeaseLost):
        await bus.ack("worker", [second])
    await bus.extend("worker", [again], by_s=60)
    assert (await bus.ack_through("worker", 0, 3))["committed"] is True
    lag = await bus.lag("worker")
    assert (lag["total_lag"], lag["partitions"][0]["committed"]) == (0, 3)
    await bus.reset("worker", "earliest")
    assert (await bus.lag("worker"))["total_lag"] == 4
    assert [one["id"] for one in await bus.subscriptions(topic="orders")] == ["worker"]
    assert (await bus.subscription("worker"))["topic"] == "local.default.orders"
    await bus.delete_subscription("worker")
    with pytest.raises(NotFound):
        await bus.lag("worker")


async def test_dead_letters_are_shown_replayed_and_purged(bus: Client) -> None:
    await bus.create_topic("orders")
    await bus.create_topic("orders-dlq")
    await bus.create_subscription("worker", "orders", starting_offset="earliest", dead_letter_topic="orders-dlq")
    for number in range(3):
        await bus.publish("orders", number)
    for offset in (0, 1):
        placed = await bus.deadletter("worker", 0, offset, "poison", headers={"why": "test"})
        assert (placed["dlq_topic"], placed["offset"]) == ("local.default.orders-dlq", offset)
    assert (await bus.deadletter("worker", 0, 1, "poison"))["offset"] == 1
    letters = await bus.dead_letters(subscription="worker")
    assert [letter["reason"] for letter in letters] == ["poison", "poison"]
    assert (await bus.dead_letter(letters[0]["id"]))["payload"] == 0
    assert await bus.replay([letters[0]["id"]]) == 1
    [*_, replayed] = sorted(await bus.pull("worker", wait_s=5), key=lambda one: -one.event.offset)
    assert replayed.event.payload == 0
    assert await bus.purge(reason="poison") == 1
    assert await bus.dead_letters() == []
    assert {letter["state"] for letter in await bus.dead_letters(state="all")} == {"replayed", "purged"}


# --- schemas ----------------------------------------------------------------------------------------------------------


async def test_schemas_are_registered_bound_and_hold(bus: Client) -> None:
    await bus.create_topic("orders")
    await bus.publish("orders", {"n": "one"})
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    made = await bus.register_schema("order", schema)
    assert (made["subject"], made["version"]) == ("order", 1)
    assert (await bus.register_schema("order", {**schema, "title": "two"}))["version"] == 2
    assert [found["versions"] for found in await bus.schemas()] == [[1, 2]]
    assert (await bus.schema("order"))["version"] == 2
    assert (await bus.schema("order", 1))["schema"] == schema
    await bus.bind_schema("orders", "order", 1, dry_run=True)
    with pytest.raises(NotFound):
        await bus.binding("orders")
    await bus.bind_schema("orders", "order", 1, force=True)
    assert (await bus.binding("orders"))["version"] == 1
    with pytest.raises(SchemaMismatch) as refused:
        await bus.publish("orders", {"n": "one"})
    assert refused.value.issues
    with pytest.raises(Conflict):
        await bus.delete_schema("order", 1)
    await bus.unbind_schema("orders")
    await bus.publish("orders", {"n": "one"})
    await bus.delete_schema("order", 1)
    with pytest.raises(NotFound):
        await bus.schema("order", 1)


# --- without an event loop --------------------------------------------------------------------------------------------


def test_the_blocking_client_does_the_same(sync: SyncClient) -> None:
    sync.create_topic("orders")
    assert sync.publish("orders", {"n": 1}).offset == 0
    sync.create_subscription("worker", "orders", starting_offset="earliest")
    leased = sync.pull("worker", limit=5)
    assert [one.event.payload for one in leased] == [{"n": 1}]
    sync.ack("worker", leased)
    events = sync.subscribe("tail", "orders", start="earliest")
    assert next(events).payload == {"n": 1}
    events.close()  # type: ignore[attr-defined]  # it is a generator
    assert sync.lag("worker")["total_lag"] == 0
    with pytest.raises(NotFound):
        sync.topic("nothing")
    sync.close()
    sync.close()
    with pytest.raises(StorageError, match="closed"):
        sync.topics()


def test_every_call_of_the_client_has_a_blocking_twin() -> None:
    calls = {name for name, value in vars(Client).items() if callable(value) and not name.startswith("_")}
    assert calls <= set(vars(SyncClient))


# --- where it connects to ---------------------------------------------------------------------------------------------


async def test_a_server_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "bus.sock"
    command = [sys.executable, "-m", "postbus", "serve", "--data", str(tmp_path / "data"), "--unix", str(path)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        async with Client(f"unix:{path}") as bus:
            await bus.create_topic("orders")
            assert (await bus.publish("orders", 1)).offset == 0
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.parametrize("url", ["", "bus.example:7766", "ftp://bus.example", "http://", "http://a:b:c", "file:///etc"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(Invalid, match="no address"):
        Client(url)
