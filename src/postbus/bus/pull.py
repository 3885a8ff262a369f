"""Pull subscriptions: durable readers of one stream whose events go to outside consumers under leases.

They are kept with all other subscriptions, marked by their target, so that statuses, dead letters and statistics hold
for them too. Each one that is in use has a ``Puller``.
"""

from __future__ import annotations

import asyncio
import contextlib
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from postbus.bus.places import DISPATCH
from postbus.bus.registry import FORGET, OF_STREAMS, Registered, globs
from postbus.bus.settings import check_numbers, parse_start
from postbus.delivery.dead import SUFFIX, DeadEntry, DeadLetters
from postbus.delivery.leases import PullSettings
from postbus.delivery.pull import Handed, Puller
from postbus.delivery.table import new_owner
from postbus.envelope import check_labels, draft
from postbus.filters import compile_filter
from postbus.log.cursors import Change, ensured, no_stream, place
from postbus.log.sqlite.ledger import View, load_stream
from postbus.model import Conflict, Invalid, NotFound, RetryPolicy, Start, StartPolicy
from postbus.topics import check_id, check_stream_name

if TYPE_CHECKING:
    from collections.abc import Callable

    import apsw

    from postbus.clock import Clock
    from postbus.log.sqlite import SqliteLog, Transaction
    from postbus.model import Consumer, ConsumerLag, Event, Receipt

__all__ = [
    "AckMode",
    "DeadEntry",
    "DeadLetters",
    "Handed",
    "PullDesk",
    "PullSubscription",
    "Puller",
    "check_own",
    "parse_place",
    "starts",
]

ACK_TIMEOUT_MS_MAX = 86_400_000
ATTEMPTS_MAX = 1000
CROSS_TENANT = "cross-tenant topic subscription not allowed"

ONE = "SELECT settings, created_at_us FROM subscription_registry WHERE tenant = ? AND subscription = ?"
ALL = """
    SELECT tenant, settings, created_at_us FROM subscription_registry
    WHERE (?1 IS NULL OR tenant = ?1) AND json_extract(settings, '$.target') = 'pull' ORDER BY tenant, subscription
"""
COUNT = "SELECT count(*) FROM subscription_registry WHERE tenant = ?"
SAVE = "INSERT INTO subscription_registry VALUES (?, ?, ?, ?)"
SAVE_GLOB = "INSERT INTO subscription_globs VALUES (?, ?, ?, ?)"


class AckMode(StrEnum):
    """``manual``: an event is done once it is acked. ``auto_on_delivery``: once it was handed out."""

    MANUAL = "manual"
    AUTO_ON_DELIVERY = "auto_on_delivery"


class PullSubscription(Registered, frozen=True, kw_only=True):
    """A pull subscription as it is kept. Its only pattern is the name of its stream."""

    target: str = "pull"
    start: Start = Start()
    ack_mode: AckMode = AckMode.MANUAL
    ack_timeout_ms: int = 30_000
    filter: dict[str, Any] = msgspec.field(default_factory=dict)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    tenant: str = ""
    created_at_us: int = 0

    @property
    def topic(self) -> str:
        """The stream it reads."""
        return self.patterns[0]


def parse_place(value: str | int | Start | None) -> Start:
    """Return where to start: ``latest``, ``earliest``, an offset, or an instant; nothing means ``latest``."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value[:19])
    if isinstance(value, int):
        return Start(policy=StartPolicy.AT_OFFSET, offset=value)
    return parse_start(value) or Start()


async def starts(log: SqliteLog, stream: str, start: Start) -> dict[int, int]:
    """Return the offset at which a start policy begins in each partition; raises ``NotFound``, ``OffsetOutOfRange``."""

    def look(db: apsw.Connection) -> dict[int, int]:
        kept = load_stream(db, stream)
        if kept is None:
            raise no_stream(stream)
        view = View(db, kept, {})
        return {partition: place(start, view, partition) for partition in range(kept.stream.settings.partitions)}

    return await log.store.read(look)


class PullDesk:
    """The pull subscriptions of all tenants on one log."""

    def __init__(self, log: SqliteLog, clock: Clock, *, lease_s: float = 30.0) -> None:
        self._log = log
        self._clock = clock
        self._lease_s = lease_s
        self._owner = new_owner(clock)
        self._known: dict[tuple[str, str], PullSubscription] = {}
        self._pullers: dict[tuple[str, str], tuple[PullSubscription, Puller]] = {}
        self._seen = log.foreign_changes
        self._changing = asyncio.Lock()

    # --- subscriptions ---

    async def create(
        self,
        tenant: str,
        name: str,
        topic: str,
        *,
        start: str | int | Start | None = None,
        ack_mode: AckMode | str = AckMode.MANUAL,
        dead_letter_topic: str | None = None,
        ack_timeout_ms: int = 30_000,
        max_attempts: int = 3,
        filter: dict[str, Any] | None = None,  # noqa: A002 - the word of the model
        labels: dict[str, str] | None = None,
    ) -> PullSubscription:
        """Register a subscription and give it its place.

        Raises ``Invalid`` for a bad argument, ``NotFound`` for a topic that is not registered, ``Conflict`` when the
        tenant has a subscription of that id, ``OffsetOutOfRange``.
        """
        check_id(name, "id")
        if name == DISPATCH:
            raise Invalid(f"{DISPATCH} is the bus's own reader")
        check_own(tenant, topic, dead_letter_topic)
        check_numbers(whole=True, ack_timeout_ms=ack_timeout_ms, max_attempts=max_attempts)
        if ack_timeout_ms > ACK_TIMEOUT_MS_MAX or max_attempts > ATTEMPTS_MAX:
            raise Invalid(f"ack_timeout_ms is at most {ACK_TIMEOUT_MS_MAX}, max_attempts at most {ATTEMPTS_MAX}")
        if ack_mode not in {*AckMode}:
            raise Invalid(f"ack_mode is 'manual' or 'auto_on_delivery', not {ack_mode!r}")
        _matcher(filter or {})
        made = PullSubscription(
            id=name,
            patterns=(topic,),
            retry=RetryPolicy(max_attempts=max_attempts),
            dead_letter_stream=dead_letter_topic,
            start=parse_place(start),
            ack_mode=AckMode(ack_mode),
            ack_timeout_ms=ack_timeout_ms,
            filter=filter or {},
            labels=check_labels(labels or {}),
        )
        await self._check_registered(topic, dead_letter_topic)
        created_us = await self._log.transact(lambda tx: _register(tx, tenant, made))
        return msgspec.structs.replace(made, tenant=tenant, created_at_us=created_us)

    async def _check_registered(self, topic: str, dead_letter_topic: str | None) -> None:
        for stream in (topic, dead_letter_topic):
            if stream is not None and not await self._log.has_stream(stream):
                raise NotFound(f"topic {stream} is not registered", hint="register it with POST /v1/bus/topics")
        if dead_letter_topic is not None:
            stats = await self._log.get_stream_stats(dead_letter_topic)
            if len(stats.partitions) != 1:
                raise Invalid(f"{dead_letter_topic} takes no dead letters: it has {len(stats.partitions)} partitions")

    async def get(self, tenant: str, name: str) -> PullSubscription:
        """Return a subscription; raises ``NotFound``. From memory unless something changed."""
        self._log.store.writer.notice()
        if self._log.foreign_changes != self._seen:
            self._seen = self._log.foreign_changes
            self._known.clear()
        found = self._known.get((tenant, name))
        if found is None:
            row = await self._log.store.read(lambda db: db.execute(ONE, (tenant, name)).get)
            found = _decode(tenant, *row) if row is not None else None
            if found is None:
                raise NotFound(f"there is no subscription {name} of {tenant}")
            self._known[tenant, name] = found
        return found

    async def list(self, tenant: str | None = None) -> list[PullSubscription]:
        """Return the subscriptions of a tenant, or of all, by id."""

        def look(db: apsw.Connection) -> list[PullSubscription]:
            found = [_decode(*row) for row in db.execute(ALL, (tenant,))]
            return [one for one in found if one is not None]

        return await self._log.store.read(look)

    async def count(self, tenant: str) -> int:
        """Return how many subscriptions a tenant has, of whatever kind."""
        count: int = await self._log.store.read(lambda db: db.execute(COUNT, (tenant,)).get)
        return count

    async def delete(self, tenant: str, name: str) -> None:
        """Forget a subscription, its place and its deliveries; dead letters stay. Raises ``NotFound``."""
        found = await self.get(tenant, name)
        async with self._changing:
            _, puller = self._pullers.pop((tenant, name), (None, None))
            if puller is not None:
                await puller.stop()
            self._known.pop((tenant, name), None)
            if not await self._log.transact(lambda tx: _unregister(tx, found)):
                raise NotFound(f"there is no subscription {name} of {tenant}")

    async def lag(self, tenant: str, name: str) -> ConsumerLag:
        """Return how far a subscription is behind; O(1)."""
        return await self._log.get_consumer_lag((await self.get(tenant, name)).topic, name)

    async def reset(self, tenant: str, name: str, start: str | int | Start, partition: int | None = None) -> Consumer:
        """Move a subscription, back or forth; leases on what it had handed out are lost."""
        found = await self.get(tenant, name)
        moved = await self._log.reset(found.topic, name, parse_place(start), partition)
        _, puller = self._pullers.get((tenant, name), (None, None))
        if puller is not None:
            puller.forget()
        return moved

    # --- at work ---

    async def puller(self, tenant: str, name: str) -> Puller:
        """Return what hands out the events of a subscription; raises ``NotFound``."""
        found = await self.get(tenant, name)
        known, puller = self._pullers.get((tenant, name), (None, None))
        if puller is not None and known == found:
            return puller
        async with self._changing:
            known, puller = self._pullers.get((tenant, name), (None, None))
            if puller is not None and known != found:
                await puller.stop()  # deleted and made again by another process
                puller = None
            if puller is None:
                settings = _settings(found, self._lease_s)
                puller = Puller(settings, self._log, self._clock, self._owner, _matcher(found.filter))
                self._pullers[tenant, name] = (found, puller)
            return puller

    async def deadletter(
        self, tenant: str, name: str, partition: int, offset: int, reason: str, headers: dict[str, str] | None = None
    ) -> Receipt:
        """Give up on an event by hand; see ``Puller.deadletter``. Raises ``Invalid`` for reserved headers."""
        if not reason.strip():
            raise Invalid("the reason is missing", hint="say why the event is given up on")
        draft("a", "pull", b"null", headers={"reason": reason})
        checked = draft("a", "pull", b"null", headers=headers or {}).headers_json
        puller = await self.puller(tenant, name)
        given = msgspec.json.decode(checked) if checked else None
        return await puller.deadletter(partition, offset, reason, given)

    async def refresh(self, tenant: str) -> None:
        """Look at once for what was made due again: replayed dead letters, an operator's re-queue."""
        await asyncio.gather(*(puller.refresh() for key, (_, puller) in self._pullers.items() if key[0] == tenant))

    async def stop(self) -> None:
        """Let go of everything that is handed out here. Idempotent."""
        pullers, self._pullers = list(self._pullers.values()), {}
        await asyncio.gather(*(puller.stop() for _, puller in pullers))


def check_own(tenant: str, topic: str, dead_letter_topic: str | None) -> None:
    """Refuse topics that are not of the tenant, and a dead-letter topic that is none."""
    for stream in (topic, dead_letter_topic):
        if stream is not None and not check_stream_name(stream).startswith(f"{tenant}."):
            raise Invalid(CROSS_TENANT)
    if dead_letter_topic is not None and (not dead_letter_topic.endswith(SUFFIX) or dead_letter_topic == topic):
        raise Invalid(f"a dead-letter topic has a name of its own that ends in {SUFFIX}, not {dead_letter_topic}")


def _settings(found: PullSubscription, lease_s: float) -> PullSettings:
    return PullSettings(
        id=found.id,
        stream=found.topic,
        auto=found.ack_mode is AckMode.AUTO_ON_DELIVERY,
        ack_timeout_s=found.ack_timeout_ms / 1000,
        retry=found.retry,
        dead_letter_stream=found.dead_letter_stream,
        lease_s=lease_s,
    )


def _matcher(spec: dict[str, Any]) -> Callable[[Event], bool] | None:
    if not spec:
        return None
    return compile_filter(spec).matches


def _decode(tenant: str, text: str, created_at_us: int) -> PullSubscription | None:
    """Return a subscription as it was saved; None when its events go elsewhere."""
    if msgspec.json.decode(text).get("target") != "pull":
        return None
    found = msgspec.json.decode(text, type=PullSubscription)
    return msgspec.structs.replace(found, tenant=tenant, created_at_us=created_at_us)


def _register(tx: Transaction, tenant: str, made: PullSubscription) -> int:
    if tx.db.execute(ONE, (tenant, made.id)).get is not None:
        raise Conflict(f"{tenant} has a subscription {made.id}", hint="use another id, or delete that one first")
    tx.move(made.topic, made.id, ensured, made.start)
    tx.db.execute(SAVE, (tenant, made.id, msgspec.json.encode(made).decode(), tx.now_us))
    for pair in globs(made.topic):
        tx.db.execute(SAVE_GLOB, (tenant, made.id, *pair))
    return tx.now_us


def _unregister(tx: Transaction, found: PullSubscription) -> bool:
    where = (found.tenant, found.id)
    known = bool(tx.run(FORGET[0], where))
    tx.run(FORGET[1], where)
    for table in ("lanes", "delivery_rows", "once_results"):
        tx.run(OF_STREAMS.format(table=table), (found.id, found.tenant))
    with contextlib.suppress(NotFound):  # its stream was removed
        tx.move(found.topic, found.id, lambda *_: Change(None, None))
    return known
