"""The blocking facade: the same bus for callers without an event loop, from any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from postbus import Event, Invalid, NotFound, PostbusError, RequestTimeout
from postbus.bus.context import CAUSATION
from postbus.sync import Bus


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("postbus-bus")}


def test_a_blocking_caller_publishes_and_plain_functions_handle(tmp_path: Path) -> None:
    got: list[Event] = []
    with Bus(tmp_path) as bus:
        bus.subscribe("a.*", got.append, "reader")
        receipt = bus.publish("a.b", "test", {"n": 1}, "chain", key="k")
        eventually(lambda: len(got) == 1)
    assert receipt.offset == 0
    assert (got[0].payload, got[0].correlation_id, got[0].key) == ({"n": 1}, "chain", "k")


def test_async_handlers_work_too(tmp_path: Path) -> None:
    got: list[Event] = []

    async def handle(event: Event) -> None:
        got.append(event)

    with Bus(tmp_path) as bus:
        bus.subscribe("a", handle, "reader")
        bus.publish("a", "test", 1)
        eventually(lambda: len(got) == 1)


def test_many_threads_publish_at_once(tmp_path: Path) -> None:
    got: list[int] = []
    lock = threading.Lock()

    def handle(event: Event) -> None:
        with lock:
            got.append(event.payload)

    with Bus(tmp_path) as bus, ThreadPoolExecutor(8) as pool:
        bus.subscribe("a", handle, "reader")
        receipts = list(pool.map(lambda number: bus.publish("a", "test", number), range(200)))
        eventually(lambda: len(got) == 200)
    assert sorted(receipt.offset for receipt in receipts) == [*range(200)]
    assert sorted(got) == [*range(200)]


def test_requests_from_many_threads_get_their_own_replies(tmp_path: Path) -> None:
    with Bus(tmp_path) as bus, ThreadPoolExecutor(8) as pool:
        bus.subscribe("double", lambda event: bus.reply(event, event.payload * 2), "doubler")
        replies = list(pool.map(lambda number: bus.request("double", number, 20), range(30)))
        with pytest.raises(RequestTimeout):
            bus.request("nobody", 1, 0.05)
    assert [reply.payload for reply in replies] == [2 * number for number in range(30)]


def test_what_a_plain_handler_publishes_derives_from_its_event(tmp_path: Path) -> None:
    got: list[Event] = []
    with Bus(tmp_path) as bus:
        bus.subscribe("a", lambda event: bus.publish("b", "test", event.payload), "first")
        bus.subscribe("b", got.append, "second")
        receipt = bus.publish("a", "test", 1)
        eventually(lambda: len(got) == 1)
    assert got[0].headers[CAUSATION] == receipt.id
    assert got[0].correlation_id == receipt.id


def test_errors_reach_the_caller(tmp_path: Path) -> None:
    with Bus(tmp_path) as bus:
        with pytest.raises(Invalid):
            bus.publish("a.*", "test", 1)
        with pytest.raises(Invalid):
            bus.subscribe("a", "no function", "reader")  # type: ignore[arg-type]  # that is the point
        with pytest.raises(NotFound):
            bus.unsubscribe("a", "reader")


def test_unsubscribe_keeps_the_place(tmp_path: Path) -> None:
    got: list[int] = []
    with Bus(tmp_path) as bus:
        bus.subscribe("a", lambda event: got.append(event.payload), "reader")
        bus.publish("a", "test", 1)
        eventually(lambda: got == [1])
        bus.unsubscribe("a", "reader")
        bus.publish("a", "test", 2)
        bus.subscribe("a", lambda event: got.append(event.payload), "reader")
        eventually(lambda: got == [1, 2])


def test_a_blocking_call_on_the_buss_own_loop_is_refused_instead_of_hanging(tmp_path: Path) -> None:
    errors: list[Exception] = []

    async def handle(event: Event) -> None:
        try:
            bus.publish("b", "test", event.payload)
        except Invalid as error:
            errors.append(error)

    with Bus(tmp_path) as bus:
        bus.subscribe("a", handle, "reader")
        bus.publish("a", "test", 1)
        eventually(lambda: len(errors) == 1)
    assert "own event loop" in str(errors[0])


def test_it_may_be_used_without_with_and_closed_twice(tmp_path: Path) -> None:
    bus = Bus(tmp_path)
    bus.publish("a", "test", 1)
    bus.close()
    bus.close()
    with pytest.raises(PostbusError, match="closed"):
        bus.publish("a", "test", 2)


def test_a_bus_that_cannot_be_made_or_started_leaves_no_thread(tmp_path: Path) -> None:
    with pytest.raises(Invalid):
        Bus(tmp_path, poll_interval=0)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(PostbusError), Bus(tmp_path / "file"):
        pass
    assert not threads()


def test_what_was_published_survives(tmp_path: Path) -> None:
    got: list[int] = []
    with Bus(tmp_path) as bus:
        bus.subscribe("a", lambda event: got.append(event.payload), "reader")
        bus.publish("a", "test", 1)
        eventually(lambda: got == [1])
    with Bus(tmp_path) as bus:
        bus.publish("a", "test", 2)
        bus.subscribe("a", lambda event: got.append(event.payload), "reader")
        eventually(lambda: got == [1, 2])
