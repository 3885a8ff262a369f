"""A server as the commands see it: the client, whose answers become the records that a data folder gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from postbus.bus.pull import parse_place
from postbus.bus.requeue import parse_address
from postbus.bus.search import Found, FoundPage
from postbus.bus.stats import Statuses, SubscriptionState
from postbus.bus.trace import Step, Trace, TracedDelivery, trees
from postbus.cli.options import SOURCE
from postbus.client import Client
from postbus.client.wire import decode_event
from postbus.delivery.dead import DeadEntry
from postbus.envelope import parse_instant
from postbus.model import (
    Conflict,
    Consumer,
    ConsumerLag,
    Cursor,
    DeliveryStatus,
    Event,
    Forbidden,
    NotFound,
    PartitionLag,
    PartitionStats,
    Retention,
    Stream,
    StreamSettings,
    StreamStats,
    instant,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from postbus.bus.search import EventQuery
    from postbus.model import Draft, Receipt, Start

__all__ = ["Counts", "Remote"]

PAGE_MAX = 1_000
IDS_MAX = 500
WAIT_S = 20.0


# --- what travels -----------------------------------------------------------------------------------------------------


class _Topic(msgspec.Struct):
    topic: str
    partitions: int
    retention: Retention
    retention_beats_consumers: bool
    identity_window_s: float | None
    labels: dict[str, str]
    epoch: int
    created_at: str
    extents: tuple[PartitionStats, ...]

    def stats(self) -> StreamStats:
        settings = StreamSettings(
            partitions=self.partitions,
            retention=self.retention,
            retention_beats_consumers=self.retention_beats_consumers,
            identity_window_s=self.identity_window_s,
            labels=self.labels,
        )
        return StreamStats(Stream(self.topic, settings, self.epoch, parse_instant(self.created_at)), self.extents)


class _Found(msgspec.Struct):
    event: msgspec.Raw
    journal_id: int
    status: DeliveryStatus
    error: str | None
    processed_at: str | None


class _FoundPage(msgspec.Struct):
    events: list[_Found]
    older: int | None
    end: int


class _Read(msgspec.Struct):
    events: list[msgspec.Raw]


class _Traced(msgspec.Struct):
    event: msgspec.Raw
    journal_id: int
    status: DeliveryStatus
    after_us: int
    caused_by: str | None
    deliveries: list[TracedDelivery]


class _Trace(msgspec.Struct):
    correlation_id: str
    events: list[_Traced]
    left_out: int


class _Letter(msgspec.Struct):
    id: str
    subscription: str
    topic: str
    origin: str
    reason: str
    attempts: int
    error: str
    created_at: str
    state: str
    payload: msgspec.Raw

    def entry(self) -> DeadEntry:
        return DeadEntry(
            self.id,
            self.subscription,
            self.topic,
            *parse_address(self.origin),
            self.reason,
            self.attempts,
            self.error,
            bytes(self.payload).decode(),
            parse_instant(self.created_at) / 1e6,
            self.state,
        )


class _Letters(msgspec.Struct):
    letters: list[_Letter]
    next: str | None = None


class _States(msgspec.Struct):
    subscriptions: list[SubscriptionState]


class _Counts(msgspec.Struct):
    topics: list[_Topic]
    statuses: Statuses
    subscriptions: list[SubscriptionState]
    dead_letters: dict[str, int]
    rates: list[int] | None
    store_bytes: int | None
    wal_bytes: int | None
    durability: str


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """``BusStats`` of a server; None is what it only tells its operator."""

    streams: list[StreamStats]
    statuses: Statuses
    subscriptions: list[SubscriptionState]
    dead_letters: dict[str, int]
    rates: list[int] | None
    store_bytes: int | None
    wal_bytes: int | None
    durability: str


# --- the server -------------------------------------------------------------------------------------------------------


class Remote(Client):
    """A client with the calls of the command line: those of a log, and those of an operator."""

    async def raw(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: dict[str, Any] | None = None,
        *,
        again: bool = False,
        wait_s: float = 0.0,
    ) -> bytes:
        """Return the answer of any route, whose path is below ``/v1/bus``. ``again``: it may be sent twice."""
        return await self._send(method, path, body, query, again=again or method == "GET", wait_s=wait_s)

    async def json(
        self, method: str, path: str, body: Any = None, query: dict[str, Any] | None = None, *, again: bool = False
    ) -> Any:
        """Return the answer of any route as values; None when there is nothing to say."""
        found = await self.raw(method, path, body, query, again=again)
        return msgspec.json.decode(found) if found else None

    def whose(self) -> dict[str, str]:
        """Return the tenant as queries and bodies name it."""
        return self._whose(None)

    # --- the log ---

    async def streams(self) -> list[Stream]:
        """Return every topic that the caller may see, of all tenants if it is the operator."""
        pages = await self._pages("/topics", "topics", {"limit": PAGE_MAX})
        return [topic.stats().stream for topic in msgspec.convert(pages, list[_Topic])]

    async def get_stream_stats(self, stream: str) -> StreamStats:
        """See ``Log.get_stream_stats``."""
        return msgspec.convert(await self.topic(stream), _Topic).stats()

    async def create_stream(self, stream: str, settings: StreamSettings) -> Stream:
        """Register a topic; raises ``Conflict`` when it exists."""
        made = await self.create_topic(
            stream,
            partitions=settings.partitions,
            retention=msgspec.to_builtins(settings.retention),
            retention_beats_consumers=settings.retention_beats_consumers,
            identity_window_s=settings.identity_window_s,
            labels=settings.labels,
        )
        return msgspec.convert(made, _Topic).stats().stream

    async def ensure_stream(self, stream: str, settings: StreamSettings | None = None) -> Stream:
        """See ``Log.ensure_stream``."""
        try:
            return await self.create_stream(stream, settings or StreamSettings())
        except Conflict:
            found = (await self.get_stream_stats(stream)).stream
            if settings in (None, found.settings):
                return found
            raise

    async def delete_stream(self, stream: str) -> None:
        """Remove a topic with its events."""
        await self.delete_topic(stream)

    async def append(self, stream: str, drafts: Sequence[Draft]) -> list[Receipt]:
        """Publish events to a registered topic, all or none; the topic of each is that topic.

        The source that the command line gives is left out, because a key may be bound to another one.
        """
        return await self.publish_batch([_fields(stream, draft) for draft in drafts]) if drafts else []

    async def fetch(self, stream: str, partition: int, offset: int, limit: int = 100) -> list[Event]:
        """See ``Log.fetch``; may give fewer than there are."""
        query = {"partition": partition, "offset": offset, "limit": min(limit, PAGE_MAX)}
        found = await self.raw("GET", f"/topics/{quote(stream, safe='')}/events", query=query)
        return [decode_event(bytes(raw)) for raw in msgspec.json.decode(found, type=_Read).events]

    async def follow(self, stream: str, at: dict[int, int]) -> AsyncIterator[list[Event]]:
        """Yield events of the partitions in ``at``, from those offsets on, for ever."""
        heads = {part.partition: part.high_water_mark for part in (await self.get_stream_stats(stream)).partitions}
        places = ",".join(f"{partition}:{following - 1}" for partition, following in (heads | at).items())
        async for event in self.subscribe(f"cli-{self._clock.new_id()}", stream, last_id=places):
            if event.partition in at:
                yield [event]

    async def get_consumer(self, stream: str, consumer: str) -> Consumer | None:
        """Return a subscription of a topic as the consumer it is, or None."""
        try:
            found = await self.subscription(consumer)
        except NotFound:
            return None
        return _consumer(found) if found["topic"] == stream else None

    async def ensure_consumer(self, stream: str, consumer: str, start: Start) -> Consumer:
        """Make a subscription of a topic."""
        return _consumer(await self.create_subscription(consumer, stream, starting_offset=start.policy.value))

    async def commit(self, _: str, consumer: str, through: int, partition: int = 0) -> None:
        """Acknowledge everything of a partition up to and including an offset."""
        await self.ack_through(consumer, partition, through)

    async def lags(self, stream: str | None, consumer: str | None) -> list[ConsumerLag]:
        """Return how far the subscriptions of a topic, or one of them, are behind; of all topics if none is named."""
        epochs: dict[str, int] = {}
        if stream is not None:
            epochs[stream] = (await self.get_stream_stats(stream)).stream.epoch
        if consumer is not None:
            known = [await self.subscription(consumer)]
        else:
            known = await self._pages("/subscriptions", "subscriptions", {"topic": stream, "limit": PAGE_MAX})
        found = []
        for one in sorted(known, key=lambda one: (one["topic"], one["id"])):
            if one["topic"] not in epochs:
                epochs[one["topic"]] = (await self.get_stream_stats(one["topic"])).stream.epoch
            lag = await self.json("GET", f"/subscriptions/{one['namespace']}/{one['tenant']}/{quote(one['id'])}/lag")
            parts = msgspec.convert(lag["partitions"], tuple[PartitionLag, ...])
            found.append(ConsumerLag(one["id"], one["topic"], epochs[one["topic"]], parts))
        return found

    # --- events ---

    async def find(self, query: EventQuery) -> FoundPage:
        """Return the latest events that fit, as many as the query asks for; asks for page after page."""
        found: list[Found] = []
        before, end = query.before, None
        while True:
            limit = min(query.limit - len(found), PAGE_MAX)
            page = await self._find(query, {"before": before, "limit": limit})
            found[:0] = page.events
            before, end = page.older, page.end if end is None else end
            if before is None or len(found) >= query.limit:
                return FoundPage(found, before, end)

    async def news(self, query: EventQuery, after: int) -> AsyncIterator[list[Event]]:
        """Yield events that fit as they come, from a number on, for ever."""
        while True:
            page = await self._find(query, {"after": after, "limit": PAGE_MAX, "wait_ms": int(WAIT_S * 1000)})
            after = page.end
            if page.events:
                yield [found.event for found in page.events]

    async def _find(self, query: EventQuery, more: dict[str, Any]) -> FoundPage:
        asked = {
            **self.whose(),
            "topic": query.topic,
            "correlation_id": query.correlation_id,
            "since": None if query.since_us is None else instant(query.since_us).isoformat(),
            "until": None if query.until_us is None else instant(query.until_us).isoformat(),
            "status": query.status,
            **more,
        }
        raw = await self.raw("GET", "/events", query=asked, wait_s=WAIT_S)
        page = msgspec.json.decode(raw, type=_FoundPage)
        return FoundPage([_found(one) for one in page.events], page.older, page.end)

    async def story(self, correlation_id: str) -> Trace:
        """Return the trace of a correlation."""
        raw = await self.raw("GET", f"/trace/{quote(correlation_id)}", query=self.whose())
        found = msgspec.json.decode(raw, type=_Trace)
        steps = [
            Step(
                event=decode_event(bytes(one.event)),
                journal_id=one.journal_id,
                status=one.status,
                after_us=one.after_us,
                caused_by=one.caused_by,
                deliveries=one.deliveries,
            )
            for one in found.events
        ]
        return Trace(
            correlation_id=found.correlation_id,
            roots=trees(steps),
            events=len(steps) + found.left_out,
            left_out=found.left_out,
        )

    # --- subscriptions and counts ---

    async def states(self) -> list[SubscriptionState]:
        """Return every subscription of the tenant, by id."""
        raw = await self.raw("GET", "/stats/subscriptions", query=self.whose())
        return msgspec.json.decode(raw, type=_States).subscriptions

    async def forget(self, subscription: str) -> None:
        """Forget a subscription that is pulled or streamed; those of a program's handlers are out of reach."""
        try:
            await self.delete_subscription(subscription)
        except NotFound:
            message = f"the handlers of {subscription} are in a program, not behind the server"
            raise Conflict(message, hint="delete it on the server's machine with --data") from None

    async def counts(self) -> Counts:
        """Return the counts of the tenant."""
        found = msgspec.json.decode(await self.raw("GET", "/stats", query=self.whose()), type=_Counts)
        return Counts(
            streams=[topic.stats() for topic in found.topics],
            statuses=found.statuses,
            subscriptions=found.subscriptions,
            dead_letters=found.dead_letters,
            rates=found.rates,
            store_bytes=found.store_bytes,
            wal_bytes=found.wal_bytes,
            durability=found.durability,
        )

    # --- dead letters ---

    async def find_letters(
        self, *, subscription: str | None, topic: str | None, reason: str | None, state: str | None, limit: int | None
    ) -> list[DeadEntry]:
        """Return dead letters that fit, oldest first; ``state`` None means all."""
        query = {"subscription": subscription, "topic": topic, "reason": reason, "state": state or "all"}
        found: list[DeadEntry] = []
        after: str | None = None
        while True:
            asked = {**self.whose(), **query, "after": after, "limit": PAGE_MAX}
            page = msgspec.json.decode(await self.raw("GET", "/dlq", query=asked), type=_Letters)
            found += [letter.entry() for letter in page.letters]
            after = page.next
            if after is None:
                return sorted(found, key=lambda entry: entry.created_at)[:limit]

    async def letter(self, letter: str) -> DeadEntry:
        """Return one dead letter."""
        return msgspec.json.decode(await self.raw("GET", f"/dlq/{quote(letter)}"), type=_Letter).entry()

    async def letter_event(self, entry: DeadEntry) -> Event | None:
        """Return the event that a dead letter is kept as; None when it is gone, or not for this caller."""
        try:
            return await self.event(entry.id)
        except (NotFound, Forbidden):
            return None

    async def replay_letters(self, entries: list[DeadEntry], per_second: float | None) -> int:
        """Deliver dead letters again, at most that many a second; return how many."""
        count, step = 0, IDS_MAX if per_second is None else 1
        for first in range(0, len(entries), step):
            done = await self.replay([entry.id for entry in entries[first : first + step]])
            count += done
            if per_second is not None and first + step < len(entries):
                await self._clock.sleep(done / per_second)
        return count

    async def purge_letters(self, entries: list[DeadEntry]) -> int:
        """Put dead letters away for good; return how many."""
        count = 0
        for first in range(0, len(entries), IDS_MAX):
            count += await self.purge([entry.id for entry in entries[first : first + IDS_MAX]])
        return count


def _fields(stream: str, draft: Draft) -> dict[str, Any]:
    """Return a draft as the client takes it."""
    return {
        "topic": stream,
        "source": None if draft.source == SOURCE else draft.source,
        "payload": draft.payload_json,
        "variant": draft.variant,
        "key": draft.key,
        "metadata": draft.metadata_json,
        "headers": None if draft.headers_json is None else msgspec.json.decode(draft.headers_json),
        "correlation_id": draft.correlation_id,
        "native_id": draft.native_id,
        "occurred_at": None if draft.occurred_at_us is None else instant(draft.occurred_at_us).isoformat(),
    }


def _found(one: _Found) -> Found:
    processed = None if one.processed_at is None else parse_instant(one.processed_at)
    return Found(one.journal_id, decode_event(bytes(one.event)), one.status, one.error, processed)


def _consumer(found: dict[str, Any]) -> Consumer:
    made = parse_instant(found["created_at"])
    cursors = msgspec.convert(found["partitions"], tuple[Cursor, ...])
    return Consumer(found["id"], found["topic"], parse_place(found["starting_offset"]), 0, cursors, made, made)
