"""The broker on NATS: listeners that heal by themselves, behind a circuit breaker."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import nats.errors

from postbus.broker.breaker import Breaker
from postbus.broker.contract import Message, message
from postbus.broker.listener import SLOTS, Listener
from postbus.broker.nats_link import NatsLink
from postbus.model import Invalid, LimitExceeded, NoResponder, RequestTimeout, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from postbus.clock import Clock

__all__ = ["FACTS", "NatsBroker", "check_size", "facts_header"]

T = TypeVar("T")

FACTS = "Postbus"  # the one header that carries what is not the payload, as JSON in ASCII
FRAME_BYTES = 256  # what the protocol adds to a message, generously
CLOSE_S = 1
FLUSH_S = 10


def facts_header(facts: Mapping[str, Any]) -> str:
    """Return facts as the value of a header: NATS takes any bytes there, its clients do not."""
    return json.dumps(facts, ensure_ascii=True, separators=(",", ":"))


def check_size(client: Client, payload: bytes, headers: Mapping[str, str]) -> None:
    """Refuse what the server would end the connection for."""
    size = len(payload) + sum(len(name) + len(value) + 4 for name, value in headers.items()) + FRAME_BYTES
    if size > client.max_payload:
        raise LimitExceeded(
            f"the event takes {size:,} bytes with its headers; the limit of the NATS server is {client.max_payload:,}",
            hint="raise max_payload in the server's configuration",
        )


class NatsBroker:
    """See ``Broker``. Connects in the background from ``start`` on and comes back after every outage."""

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self.link = NatsLink(url, clock)
        self.breaker = Breaker("nats", clock=self.link.clock, failures_max=1)
        self._listeners: dict[Listener, Subscription | None] = {}
        self._closed = False
        self.link.up.append(self._heal)
        self.link.down.append(self._lost)
        self.link.complaints.append(self._complained)

    async def start(self, *, wait_s: float = 0.0) -> None:
        """Begin to connect; with ``wait_s`` wait that long for it, and raise ``Unreachable`` when it takes longer."""
        await self.link.start()
        if wait_s:
            await self.link.ready(wait_s)

    # --- the contract ---

    async def publish(
        self, topic: str, payload: Any, *, headers: Mapping[str, str] | None = None, reply: str | None = None
    ) -> None:
        """See ``Broker.publish``."""
        made = message(topic, payload, headers, reply)

        async def send(client: Client) -> None:
            given = _headers(made)
            check_size(client, made.payload_json, given)
            await client.publish(made.topic, made.payload_json, reply=made.reply or "", headers=given or None)

        await self._guarded(send)

    async def subscribe(self, pattern: str, *, slots: int = SLOTS) -> Listener:
        """See ``Broker.subscribe``."""
        listener = Listener(pattern, slots, self._forget)
        if self._closed:
            raise Unreachable("the broker is closed")
        self._listeners[listener] = None
        if self.link.connected:
            try:
                await self._call(lambda client: self._attach(client, listener))
            except Unreachable:  # it is attached when the connection is back
                listener.tell(None)
        return listener

    async def request(
        self, topic: str, payload: Any, *, timeout_s: float = 5.0, headers: Mapping[str, str] | None = None
    ) -> Message:
        """See ``Broker.request``."""
        made = message(topic, payload, headers)

        async def ask(client: Client) -> Message:
            given = _headers(made)
            check_size(client, made.payload_json, given)
            try:
                return _received(
                    await client.request(made.topic, made.payload_json, timeout=timeout_s, headers=given or None)
                )
            except nats.errors.NoRespondersError:
                raise NoResponder(f"nobody listens on {topic}") from None
            except nats.errors.TimeoutError:
                raise RequestTimeout(f"no answer on {topic} within {timeout_s:g} s") from None

        return await self._guarded(ask)

    async def close(self) -> None:
        """See ``Broker.close``."""
        self._closed = True
        if self.link.connected:
            with contextlib.suppress(Unreachable, nats.errors.Error):
                await self.link.call(lambda client: _flushed(client, CLOSE_S))
        for listener in list(self._listeners):
            listener.end()
        self._listeners.clear()
        await self.link.close()

    async def _guarded(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        if self._closed:
            raise Unreachable("the broker is closed")
        return await self.breaker.run(lambda: self._call(work))

    async def _call(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        try:
            return await self.link.call(work)
        except (nats.errors.Error, TimeoutError) as error:
            raise Unreachable(f"NATS does not take it now: {str(error) or type(error).__name__}") from error

    # --- listeners ---

    async def _attach(self, client: Client, listener: Listener) -> None:
        async def take(got: Msg) -> None:
            listener.offer(_received(got))

        self._listeners[listener] = await client.subscribe(listener.pattern, cb=take)
        await _flushed(client)  # the server knows of it before anybody is told that it listens

    async def _heal(self, client: Client) -> None:
        for listener in list(self._listeners):
            await self._attach(client, listener)
        self.breaker.hint()

    def _lost(self) -> None:
        for listener in self._listeners:
            self._listeners[listener] = None
            listener.tell(None)

    def _complained(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            for listener, subscription in self._listeners.items():
                if subscription is not None and subscription is error.sub:
                    listener.tell(None)

    async def _forget(self, listener: Listener) -> None:
        subscription = self._listeners.pop(listener, None)
        if subscription is not None and self.link.connected:
            with contextlib.suppress(Unreachable, nats.errors.Error):  # it ended with its connection
                await self.link.call(lambda _: subscription.unsubscribe())


async def _flushed(client: Client, timeout_s: int = FLUSH_S) -> None:
    """Wait until the server has dealt with everything that was sent so far.

    The client puts the question of its own flush before what it has not written yet. The second one comes after it.
    """
    await client.flush(timeout_s)
    await client.flush(timeout_s)


def _headers(made: Message) -> dict[str, str]:
    return {FACTS: facts_header({"headers": made.headers})} if made.headers_json else {}


def _received(got: Msg) -> Message:
    headers = None
    found = (got.headers or {}).get(FACTS)
    if found is not None:
        try:
            facts = msgspec.json.decode(found.encode(), type=dict[str, Any])
            headers = msgspec.json.encode(msgspec.convert(facts.get("headers") or {}, dict[str, str]))
        except (msgspec.DecodeError, Invalid):  # somebody else's header of that name
            headers = None
    return Message(got.subject, got.data, None if headers == b"{}" else headers, got.reply or None)
