"""A JetStream stream as the remote behind the spool: acknowledged, and known by its identity."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import nats.errors
import nats.js.errors
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, Header, StreamConfig

from postbus.broker.nats import FACTS, check_size, facts_header
from postbus.broker.nats_link import NatsLink
from postbus.model import Durability, PostbusError, Receipt, Refused, Unreachable, instant

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from nats.aio.client import Client
    from nats.js import JetStreamContext
    from nats.js.api import PubAck

    from postbus.model import Draft, SpoolEntry

__all__ = ["NatsRemote"]

T = TypeVar("T")

ACK_S = 2.0
MANY_ACKS_S = 10.0
CLOCK_SKEW = timedelta(minutes=2)
SUBJECTS_MAX = 50
PAGE = 500
OUTAGE_FROM = 500  # of JetStream's codes: the server cannot, which is no fault of the event

WRONG_LAST_MSG_ID = 10070


class _Behind(PostbusError):
    """The event before this one was not taken, or somebody else's came between."""


class NatsRemote:
    """See ``Remote``. An event goes to the subject that is its topic; a JetStream stream has to keep that subject."""

    def __init__(self, link: NatsLink, *, stream: str = "POSTBUS") -> None:
        self._link = link
        self._stream = stream

    async def ensure(self, subjects: Sequence[str]) -> None:
        """Make the JetStream stream when it is missing, for these subjects; one that is there stays as it is."""

        async def make(client: Client) -> None:
            stream = client.jetstream(timeout=ACK_S)
            try:
                await stream.stream_info(self._stream)
            except nats.js.errors.NotFoundError:
                await stream.add_stream(StreamConfig(name=self._stream, subjects=list(subjects)))

        await self._asked(make)

    def watch(self, came_up: Callable[[], None]) -> None:
        """See ``Remote.watch``."""

        async def tell(_: Client) -> None:
            came_up()

        self._link.up.append(tell)

    async def send(self, stream: str, identity: str, event: Draft) -> Receipt:
        """See ``Remote.send``."""
        return await self._publish(stream, identity, event, {}, ACK_S)

    async def send_many(self, entries: Sequence[SpoolEntry]) -> tuple[int, PostbusError | None]:
        """See ``Remote.send_many``: all are on their way at once, but none is taken unless it follows its precursor."""
        before = [{}, *({Header.EXPECTED_LAST_MSG_ID.value: entry.identity} for entry in entries[:-1])]
        outcomes = await asyncio.gather(
            *(
                self._publish(entry.stream, entry.identity, entry.draft, headers, MANY_ACKS_S)
                for entry, headers in zip(entries, before, strict=True)
            ),
            return_exceptions=True,
        )
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, _Behind):
                return number, None
            if isinstance(outcome, PostbusError):
                return number, outcome
            if isinstance(outcome, BaseException):
                raise outcome
        return len(entries), None

    async def _publish(
        self, stream: str, identity: str, event: Draft, expected: dict[str, str], timeout_s: float
    ) -> Receipt:
        headers = {Header.MSG_ID.value: identity, FACTS: facts_header(_facts(stream, event)), **expected}

        async def publish(client: Client) -> PubAck:
            check_size(client, event.payload_json, headers)
            return await client.jetstream(timeout=timeout_s).publish(
                event.topic, event.payload_json, stream=self._stream, headers=dict(headers)
            )

        try:
            ack = await self._asked(publish)
        except nats.js.errors.NoStreamResponseError:
            await self._blame(event.topic)
            raise Unreachable(f"JetStream does not answer on {event.topic}") from None
        return Receipt(
            stream, 0, ack.seq - 1, bool(ack.duplicate), Durability.FULL, created_at_us=self._link.clock.now_us()
        )

    async def _blame(self, topic: str) -> None:
        """Refuse an event that no stream takes, if JetStream itself answers and says so."""

        async def covers(client: Client) -> str:
            return await client.jetstream(timeout=ACK_S).find_stream_name_by_subject(topic)

        try:
            await self._asked(covers)
        except nats.js.errors.NotFoundError:
            raise Refused(
                f"no JetStream stream keeps the subject {topic}", hint=f"add it to the stream {self._stream}"
            ) from None

    async def known(self, entries: Sequence[SpoolEntry]) -> set[str]:
        """See ``Remote.known``: reads the headers of what was stored since the oldest of them was spooled."""
        wanted = {entry.identity for entry in entries}
        if not wanted:
            return set()
        since = instant(min(entry.enqueued_at_us for entry in entries)) - CLOCK_SKEW

        topics = sorted({entry.draft.topic for entry in entries})

        async def look(client: Client) -> set[str]:
            return await _stored(client.jetstream(timeout=ACK_S), self._stream, wanted, topics, since)

        try:
            return await self._asked(look)
        except nats.js.errors.NotFoundError:
            return set()  # there is no stream, so it has nothing

    async def _asked(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        try:
            return await self._link.call(work)
        except TimeoutError:
            raise Unreachable(f"NATS did not acknowledge within {ACK_S:g} s") from None
        except (nats.js.errors.NotFoundError, nats.js.errors.NoStreamResponseError):
            raise
        except nats.js.errors.APIError as error:
            if error.err_code == WRONG_LAST_MSG_ID:
                raise _Behind("another event came between") from error
            if (error.code or OUTAGE_FROM) >= OUTAGE_FROM:
                raise Unreachable(f"JetStream cannot take it now: {error.description}") from error
            raise Refused(f"JetStream refused it: {error.description}") from error
        except nats.errors.Error as error:
            raise Unreachable(f"NATS cannot take it now: {error}") from error


async def _stored(
    stream: JetStreamContext, name: str, wanted: set[str], topics: list[str], since: datetime
) -> set[str]:
    """Return which of these identities a stream holds."""
    config = ConsumerConfig(
        filter_subjects=topics if len(topics) <= SUBJECTS_MAX else None,
        deliver_policy=DeliverPolicy.BY_START_TIME,
        opt_start_time=since.astimezone(UTC),
        ack_policy=AckPolicy.NONE,
        headers_only=True,
        mem_storage=True,
        inactive_threshold=30.0,
    )
    reader = await stream.pull_subscribe("", stream=name, config=config)
    found: set[str] = set()
    try:
        left = (await reader.consumer_info()).num_pending or 0
        while left > 0 and found != wanted:
            page = await reader.fetch(min(left, PAGE), timeout=ACK_S)
            left -= len(page)
            found |= wanted & {(got.headers or {}).get(Header.MSG_ID.value, "") for got in page}
        return found
    finally:
        info = await reader.consumer_info()
        await stream.delete_consumer(name, info.name)
        await reader.unsubscribe()


def _facts(stream: str, event: Draft) -> dict[str, Any]:
    """Return what an event has beside topic and payload."""
    facts: dict[str, Any] = {
        "stream": stream,
        "source": event.source,
        "variant": event.variant,
        "key": event.key,
        "correlation_id": event.correlation_id,
        "native_id": event.native_id,
        "occurred_at_us": event.occurred_at_us,
        "trust": event.trust,
    }
    for name, raw in (
        ("metadata", event.metadata_json),
        ("headers", event.headers_json),
        ("delivery_handle", event.delivery_handle_json),
    ):
        if raw is not None:
            facts[name] = msgspec.json.decode(raw)
    return {name: value for name, value in facts.items() if value not in (None, "")}
