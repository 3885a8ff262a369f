"""Handlers: what they may look like, what they are given, how several of one subscriber and middleware run."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import pytest
from pydantic import BaseModel

from postbus import Context, Event, Invalid, Reject, Retry, RetryPolicy
from postbus.bus.binding import name_of
from postbus.model import Conflict
from postbus.testing import BusKit
from tests.handlers import Gate, Recorder, eventually, fails

if TYPE_CHECKING:
    from decimal import Decimal

    from postbus import Event as OnlyForTypeCheckers

ONCE = RetryPolicy(max_attempts=1)


class OrderStruct(msgspec.Struct):
    id: int
    lines: list[str] = []


@dataclass
class OrderData:
    id: int
    lines: list[str]


class OrderDict(TypedDict):
    id: int
    lines: list[str]


class OrderModel(BaseModel):
    id: int
    lines: list[str]


ORDER = {"id": 7, "lines": ["tea"]}


# --- payload types ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (dict, ORDER),
        (dict[str, Any], ORDER),
        (OrderStruct, OrderStruct(7, ["tea"])),
        (OrderData, OrderData(7, ["tea"])),
        (OrderDict, ORDER),
        (OrderModel, OrderModel(id=7, lines=["tea"])),
    ],
)
async def test_on_takes_the_payload_type_from_the_annotation(kind: Any, expected: Any) -> None:
    got: list[Any] = []

    async def handle(order: Any) -> None:
        got.append(order)

    handle.__annotations__["order"] = kind
    async with BusKit() as kit:
        kit.bus.on("order.*")(handle)
        await kit.publish("order.created", ORDER)
        await kit.settle()
    assert got == [expected]
    assert type(got[0]) is type(expected)


@pytest.mark.parametrize("kind", [dict, OrderStruct, OrderData, OrderDict, OrderModel, int])
async def test_a_payload_of_another_type_is_rejected_at_once(kind: Any) -> None:
    got: list[Any] = []

    async def handle(order: Any) -> None:
        got.append(order)

    handle.__annotations__["order"] = kind
    async with BusKit() as kit:
        kit.bus.on("order.*", subscriber_id="strict")(handle)
        await kit.publish("order.created", ["not", "an", "order"])
        await kit.settle()
        [letter] = await kit.dead()
    assert got == []
    assert (letter.reason, letter.attempts, letter.subscription) == ("rejected", 1, "strict")
    assert letter.error.startswith("the payload is no ")


async def test_annotations_that_are_strings_are_resolved() -> None:
    got: list[Any] = []

    async def handle(order: OrderStruct, ctx: Context) -> None:
        got.append((order, ctx.event.topic, ctx.subscription, ctx.attempt))

    async with BusKit() as kit:
        kit.bus.on("order.*", subscriber_id="reader")(handle)
        await kit.publish("order.created", ORDER)
        await kit.settle()
    assert got == [(OrderStruct(7, ["tea"]), "order.created", "reader", 1)]


async def test_a_type_of_the_enclosing_function_is_found_when_the_handler_uses_it() -> None:
    class Local(msgspec.Struct):
        id: int

    got: list[Any] = []

    async def handle(order: Local) -> None:
        assert isinstance(order, Local)
        got.append(order.id)

    async with BusKit() as kit:
        kit.bus.on("a")(handle)
        await kit.publish("a", {"id": 1})
        await kit.settle()
    assert got == [1]


async def test_names_that_only_type_checkers_know_may_stand_beside_the_first_parameter() -> None:
    got: list[Any] = []

    async def handle(order: OrderStruct, ctx: OnlyForTypeCheckers) -> Decimal | None:
        got.append((order, ctx))
        return None

    async def plain(event: Any) -> None:
        got.append(event)

    plain.__annotations__["event"] = "postbus.Event"

    async with BusKit() as kit:
        kit.bus.on("a", subscriber_id="x")(handle)
        kit.bus.on("b", subscriber_id="y")(plain)
        await kit.publish("a", ORDER)
        await kit.settle()
        await kit.publish("b", ORDER)
        await kit.settle()
    assert isinstance(got[0][1], Context)
    assert isinstance(got[1], Event)


async def test_without_an_annotation_the_handler_gets_the_event() -> None:
    got: list[Any] = []

    async def handle(anything):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - that is the point
        got.append(anything)

    async with BusKit() as kit:
        kit.bus.on("a")(handle)
        await kit.publish("a", 1)
        await kit.settle()
    assert isinstance(got[0], Event)


async def test_on_names_the_subscription_after_the_handler() -> None:
    async with BusKit() as kit:

        @kit.bus.on("a")
        async def größe(_event: Event) -> None:  # noqa: PLC2401 - that is the point
            """Nothing to do."""

        await kit.publish("a", 1)
        await kit.settle()
        [registered] = await kit.bus.subscriptions()
    assert registered.id == name_of(größe)
    assert registered.id.isascii()
    assert registered.id.endswith("gr--e")


# --- signatures -------------------------------------------------------------------------------------------------------


async def test_methods_objects_and_partials_are_handlers_too() -> None:
    got: list[str] = []

    class Service:
        async def method(self, event: Event) -> None:
            got.append(f"method {event.payload}")

        async def __call__(self, event: Event, ctx: Context) -> None:
            got.append(f"object {event.payload} {ctx.subscription}")

    async def long(name: str, event: Event) -> None:
        got.append(f"{name} {event.payload}")

    async with BusKit() as kit:
        kit.bus.subscribe("a", Service().method, "a")
        kit.bus.subscribe("a", Service(), "b")
        kit.bus.subscribe("a", functools.partial(long, "partial"), "c")
        await kit.publish("a", 1)
        await kit.settle()
    assert sorted(got) == ["method 1", "object 1 b", "partial 1"]


def _nothing() -> None:
    """Take nothing."""


def _three(event: Event, ctx: Context, more: int) -> None:
    """Take too much."""


def _keyword(event: Event, *, more: int) -> None:
    """Want what nobody gives."""


def _unknown(event: NoSuchType) -> None:  # type: ignore[name-defined]  # noqa: F821 - that is the point
    """Want what nobody knows."""


def _impossible(event: threading.Thread) -> None:
    """Want what no payload can be."""


@pytest.mark.parametrize("handler", [None, "text", _nothing, _three, _keyword, _unknown, _impossible, dict])
async def test_a_handler_that_cannot_be_called_is_refused(handler: Any) -> None:
    async with BusKit() as kit:
        with pytest.raises(Invalid):
            kit.bus.subscribe("a", handler, "reader")
        await kit.publish("a", 1)
        await kit.settle()
        assert await kit.bus.subscriptions() == []


# --- plain functions --------------------------------------------------------------------------------------------------


async def test_a_plain_function_runs_on_a_thread() -> None:
    got: list[Any] = []

    def handle(event: Event) -> None:
        got.append((event.payload, threading.current_thread() is threading.main_thread()))

    async with BusKit() as kit:
        kit.bus.subscribe("a", handle, "plain")
        await kit.publish("a", 1)
        await eventually(lambda: got)
    assert got == [(1, False)]


async def test_a_plain_function_that_returns_a_coroutine_has_it_awaited() -> None:
    got = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("a", lambda event: got(event), "plain")  # noqa: PLW0108 - a plain function is wanted
        await kit.publish("a", 1)
        await eventually(lambda: got.events)


async def test_a_plain_function_that_fails_is_retried() -> None:
    got: list[int] = []

    def handle(event: Event) -> None:
        got.append(event.attempt)
        if event.attempt == 1:
            raise ValueError("not yet")

    async with BusKit() as kit:
        kit.bus.subscribe("a", handle, "plain")
        await kit.publish("a", 1)
        await eventually(lambda: got == [1])
        await kit.until(lambda: got == [1, 2])


async def test_plain_functions_that_hang_take_no_thread_from_others() -> None:
    over, got = threading.Event(), list[int]()

    def hang(_event: Event) -> None:
        over.wait(60)

    async with BusKit() as kit:
        kit.bus.subscribe("hang", hang, "hangs", concurrency=40)
        kit.bus.subscribe("go", lambda event: got.append(event.payload), "goes")
        for number in range(40):
            await kit.publish("hang", number)
        await kit.settle()
        await kit.publish("go", 1)
        await eventually(lambda: got == [1])
        over.set()


async def test_a_slow_plain_function_does_not_hold_up_the_loop() -> None:
    over, done = threading.Event(), list[int]()

    def slow(event: Event) -> None:
        over.wait(60)
        done.append(event.payload)

    quick = Recorder()
    async with BusKit() as kit:
        kit.bus.subscribe("slow", slow, "slow")
        kit.bus.subscribe("quick", quick, "quick")
        await kit.publish("slow", 1)
        await kit.publish("quick", 1)
        await eventually(lambda: quick.events)
        assert done == []
        over.set()
        await eventually(lambda: done)


# --- several handlers of one subscriber -------------------------------------------------------------------------------


async def test_handlers_of_one_id_run_one_after_the_other_in_the_order_they_were_registered() -> None:
    got: list[str] = []
    gate = Gate()

    async def first(event: Event) -> None:
        await gate(event)
        got.append("first")

    async with BusKit() as kit:
        kit.bus.subscribe("a.>", first, "one")
        kit.bus.subscribe("a.b", lambda _: got.append("second"), "one")
        kit.bus.subscribe("a.*", lambda _: got.append("third"), "one")
        await kit.publish("a.b", 1)
        await kit.settle()
        assert got == []
        gate.open.set()
        await eventually(lambda: len(got) == 3)
    assert got == ["first", "second", "third"]


async def test_when_one_handler_raises_the_rest_still_run_and_errors_are_joined() -> None:
    last = Recorder()

    async def first(_event: Event) -> None:
        raise ValueError("one")

    async def second(_event: Event) -> None:
        raise KeyError("two")

    async with BusKit() as kit:
        for handler in (first, second, last):
            kit.bus.subscribe("a", handler, "one", retry=ONCE)
        await kit.publish("a", 1)
        await kit.settle()
        [letter] = await kit.dead()
    assert len(last.events) == 1
    assert letter.error == "ValueError: one; KeyError: 'two'"
    assert letter.reason == "max_attempts"


@pytest.mark.parametrize(("error", "reason"), [(Reject("no"), "rejected"), (Retry(5), None)])
async def test_a_verdict_of_one_handler_counts_for_all_of_its_id(error: Exception, reason: str | None) -> None:
    other = Recorder(fails(9))
    async with BusKit() as kit:
        kit.bus.subscribe("a", other, "one")
        kit.bus.subscribe("a", Recorder(fails(1, error)), "one")
        await kit.publish("a", 1)
        await kit.settle()
        assert [letter.reason for letter in await kit.dead()] == ([reason] if reason else [])
        await kit.advance(4)
        assert len(other.events) == 1
        await kit.advance(2)
        assert len(other.events) == (1 if reason else 2)


async def test_one_id_has_one_set_of_settings() -> None:
    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(), "one", concurrency=2)
        with pytest.raises(Conflict):
            kit.bus.subscribe("b", Recorder(), "one", concurrency=3)


# --- middleware -------------------------------------------------------------------------------------------------------


async def test_the_first_middleware_is_outermost() -> None:
    got: list[str] = []

    def around(name: str) -> Any:
        async def call(event: Event, ctx: Context, call_next: Any) -> Any:
            got.append(f"{name} before {event.payload} {ctx.subscription}")
            result = await call_next()
            got.append(f"{name} after")
            return result

        return call

    async with BusKit() as kit:
        kit.bus.middleware(around("outer"))
        kit.bus.middleware(around("inner"))

        async def handle(_event: Event) -> None:
            got.append("handler")

        kit.bus.subscribe("a", handle, "one")
        await kit.publish("a", 1)
        await kit.settle()
    assert got == ["outer before 1 one", "inner before 1 one", "handler", "inner after", "outer after"]


async def test_middleware_sees_failures_and_may_fail_itself() -> None:
    seen: list[str] = []

    async def watch(_event: Event, _ctx: Context, call_next: Any) -> Any:
        try:
            return await call_next()
        except ValueError as error:
            seen.append(str(error))
            raise Reject("middleware says no") from error

    async with BusKit() as kit:
        kit.bus.middleware(watch)
        kit.bus.subscribe("a", Recorder(fails(9, ValueError("broken"))), "one")
        await kit.publish("a", 1)
        await kit.settle()
        [letter] = await kit.dead()
    assert seen == ["broken"]
    assert (letter.reason, letter.error) == ("rejected", "middleware says no")


async def test_middleware_added_while_running_wraps_every_handler() -> None:
    got: list[str] = []

    async def around(event: Event, ctx: Context, call_next: Any) -> Any:
        got.append(f"{ctx.subscription} {event.payload}")
        return await call_next()

    async with BusKit() as kit:
        kit.bus.subscribe("a", Recorder(), "one")
        await kit.publish("a", 1)
        await kit.advance(2)
        kit.bus.middleware(around)
        kit.bus.subscribe("a", Recorder(), "two")
        await kit.publish("a", 2)
        await kit.settle()
    assert sorted(got) == ["one 2", "two 2"]
