"""Agents and their subscriptions as data. A subscription's id is the id of its reader in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from postbus.bus.places import DISPATCH
from postbus.bus.registry import JOURNAL, Registered, globs, whole
from postbus.envelope import parse_instant
from postbus.filters import compile_filter
from postbus.inbox.targets import Target, check_targets
from postbus.log.cursors import Change, check_start, ensured
from postbus.log.sqlite.rewind import rewind
from postbus.model import Conflict, Invalid, NotFound, Start, StartPolicy
from postbus.topics import check_id, check_pattern, check_stream_name

if TYPE_CHECKING:
    import apsw

    from postbus.log.sqlite import SqliteLog, Transaction
    from postbus.model import Consumer

__all__ = ["Agent", "Agents", "Cleanup", "Digest", "InboxSubscription", "beginning", "end", "reads"]

EARLIEST = Start(policy=StartPolicy.EARLIEST)
STREAMS_MAX = 64
ENGINES = ("live", "spark")
GRAVES = "-dlq"
MESSAGES = "inbox-messages"
"""The leaf of the stream that keeps a tenant's direct messages."""
# Streams that only their own full name asks for.
PRIVATE = (GRAVES, f".{MESSAGES}")

AGENT = """
    SELECT agent_no, tenant, agent, settings, created_at_us FROM agent_registry
    WHERE tenant = ? AND agent = ? AND removed_at_us IS NULL
"""
AGENTS = """
    SELECT agent_no, tenant, agent, settings, created_at_us FROM agent_registry
    WHERE (?1 IS NULL OR tenant = ?1) AND removed_at_us IS NULL ORDER BY tenant, agent
"""
ADD_AGENT = "INSERT INTO agent_registry (tenant, agent, settings, created_at_us) VALUES (?, ?, ?, ?)"
RETARGET = "UPDATE agent_registry SET settings = ? WHERE agent_no = ?"
REMOVE_AGENT = "UPDATE agent_registry SET removed_at_us = ? WHERE agent_no = ?"
EMPTY = tuple(
    f"DELETE FROM {table} WHERE agent_no = ?"  # noqa: S608 - from the list below
    for table in ("inbox_rows", "inbox_seen", "inbox_digests", "inbox_revisions")
)
FORGET_TIMERS = "DELETE FROM timer_rows WHERE tenant = ? AND agent = ?"
ANY = "SELECT settings FROM subscription_registry WHERE tenant = ? AND subscription = ?"
ALL = """
    SELECT tenant, settings, created_at_us FROM subscription_registry
    WHERE (?1 IS NULL OR tenant = ?1) AND json_extract(settings, '$.target') = 'inbox' ORDER BY tenant, subscription
"""
ONE = """
    SELECT tenant, settings, created_at_us FROM subscription_registry
    WHERE tenant = ? AND subscription = ? AND json_extract(settings, '$.target') = 'inbox'
"""
ENDED = """
    SELECT tenant, subscription FROM subscription_registry
    WHERE json_extract(settings, '$.target') = 'inbox' AND json_extract(settings, '$.ends_at_us') <= ?
"""
SAVE = "INSERT INTO subscription_registry VALUES (?, ?, ?, ?)"
SAVE_GLOB = "INSERT INTO subscription_globs VALUES (?, ?, ?, ?)"
FORGET = (
    "DELETE FROM subscription_registry WHERE tenant = ? AND subscription = ?",
    "DELETE FROM subscription_globs WHERE tenant = ? AND subscription = ?",
)
FORGET_DELIVERIES = """
    DELETE FROM delivery_rows WHERE consumer = ?
    AND stream_id IN (SELECT stream_id FROM stream_registry WHERE name GLOB ? || '.*')
"""
END = """
    UPDATE subscription_registry SET settings = json_set(settings, '$.ends_at_us', ?)
    WHERE tenant = ? AND subscription = ? AND json_extract(settings, '$.ends_at_us') IS NULL
"""
ENGINE = """
    UPDATE subscription_registry SET settings = json_set(settings, '$.engine', ?) WHERE tenant = ? AND subscription = ?
"""
# Who serves the subscriptions of a tenant that do not say it.
TENANT_ENGINE = "SELECT value FROM store_facts WHERE name = 'engine ' || ?"
SAVE_TENANT_ENGINE = "INSERT OR REPLACE INTO store_facts VALUES ('engine ' || ?, ?)"
STREAMS = "SELECT name FROM stream_registry WHERE name GLOB ? || '.*' AND NOT deleted ORDER BY name"
READ_BY = """
    SELECT s.name FROM readers r JOIN stream_registry s USING (stream_id)
    WHERE r.consumer = ? AND s.name GLOB ? || '.*' AND NOT s.deleted ORDER BY s.name
"""


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    """An agent: it has one inbox, and targets at which it is woken."""

    no: int
    tenant: str
    id: str
    targets: tuple[Target, ...]
    created_at_us: int


class Digest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How bursts on one resource are put together. ``by`` is what names the resource, e.g. ``metadata.resource``."""

    by: str = "metadata.resource"
    window_s: float = 30.0
    items: int = 20


class Cleanup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a subscription ends by itself: at an instant, or ``grace_s`` after an event that matches ``on_terminal``."""

    at: str | None = None
    on_terminal: dict[str, Any] | None = None
    grace_s: float = 0.0


class InboxSubscription(Registered, frozen=True, kw_only=True):
    """A subscription whose matches go to an agent's inbox. ``ends_at_us`` is set once its end is known."""

    target: str = "inbox"
    agent: str
    streams: tuple[str, ...] = ()
    filter: dict[str, Any] = msgspec.field(default_factory=dict)
    start: Start = Start()
    digest: Digest | None = None
    cleanup: Cleanup | None = None
    engine: Literal["live", "spark"] = "live"
    ends_at_us: int | None = None
    tenant: str = ""
    created_at_us: int = 0

    @property
    def pattern(self) -> str:
        """The topics it asks for."""
        return self.patterns[0]


class Agents:
    """The agents and inbox subscriptions on one log."""

    def __init__(self, log: SqliteLog) -> None:
        self._log = log

    # --- agents ---

    async def create(self, tenant: str, agent: str, targets: tuple[Target, ...]) -> Agent:
        """Register an agent; raises ``Conflict`` when there is one of that id."""
        check_id(agent, "agent")
        check_stream_name(f"{tenant}.{JOURNAL}")
        settings = msgspec.json.encode({"targets": check_targets(targets)}).decode()
        await self._log.ensure_stream(f"{tenant}.{JOURNAL}")

        def write(tx: Transaction) -> Agent:
            if tx.db.execute(AGENT, (tenant, agent)).get is not None:
                raise Conflict(f"{tenant} has an agent {agent}", hint="use another id, or change its targets")
            tx.db.execute(ADD_AGENT, (tenant, agent, settings, tx.now_us))
            return find_agent(tx.db, tenant, agent)

        return await self._log.transact(write, grows=True)

    async def retarget(self, tenant: str, agent: str, targets: tuple[Target, ...]) -> Agent:
        """Replace an agent's targets."""
        settings = msgspec.json.encode({"targets": check_targets(targets)}).decode()

        def write(tx: Transaction) -> Agent:
            tx.db.execute(RETARGET, (settings, find_agent(tx.db, tenant, agent).no))
            return find_agent(tx.db, tenant, agent)

        return await self._log.transact(write)

    async def get(self, tenant: str, agent: str) -> Agent:
        """Return an agent; raises ``NotFound``."""
        return await self._log.store.read(lambda db: find_agent(db, tenant, agent))

    async def all(self, tenant: str | None = None) -> list[Agent]:
        """Return the agents of a tenant, or of all, by id."""
        return await self._log.store.read(lambda db: [_agent(*row) for row in db.execute(AGENTS, (tenant,))])

    async def remove(self, tenant: str, agent: str) -> None:
        """Remove an agent with its inbox, subscriptions and timers. Raises ``NotFound``."""

        def write(tx: Transaction) -> None:
            found = find_agent(tx.db, tenant, agent)
            for row in list(tx.db.execute(ALL, (tenant,))):
                subscription = _decode(*row)
                if subscription.agent == agent:
                    _forget(tx, tenant, subscription.id)
            for statement in EMPTY:
                tx.db.execute(statement, (found.no,))
            tx.db.execute(FORGET_TIMERS, (tenant, agent))
            tx.db.execute(REMOVE_AGENT, (tx.now_us, found.no))

        await self._log.transact(write)

    # --- subscriptions ---

    async def subscribe(
        self,
        tenant: str,
        agent: str,
        pattern: str,
        *,
        id: str | None = None,  # noqa: A002 - the word of the model
        streams: tuple[str, ...] = (),
        filter: dict[str, Any] | None = None,  # noqa: A002 - the word of the model
        start: Start | None = None,
        digest: Digest | None = None,
        cleanup: Cleanup | None = None,
        engine: Literal["live", "spark"] | None = None,
    ) -> tuple[InboxSubscription, list[Consumer]]:
        """Register a subscription and pin its start; returns it with its places.

        Without an ``engine`` it gets the tenant's, which is ``live`` unless ``hand_over_all`` said otherwise.
        Raises ``Invalid`` for a bad argument, ``NotFound`` for an unknown agent or stream, ``Conflict`` for an id that
        is taken.
        """
        name = id if id is not None else f"{agent[:80]}.{self._log.store.clock.new_id()[:12]}"
        check_id(name, "id")
        check_pattern(pattern)
        compile_filter(filter or {})
        if name == DISPATCH:
            raise Invalid(f"{DISPATCH} is the bus's own reader")
        if len(streams) > STREAMS_MAX or any(not each.startswith(f"{tenant}.") for each in streams):
            raise Invalid(f"`streams` names at most {STREAMS_MAX} streams of {tenant}")
        asked = InboxSubscription(
            id=name,
            patterns=(pattern,),
            agent=agent,
            streams=streams,
            filter=filter or {},
            start=check_start(start or Start()),
            digest=_check_digest(digest),
            cleanup=_check_cleanup(cleanup),
            engine=engine or "live",
            ends_at_us=parse_instant(cleanup.at) if cleanup is not None and cleanup.at is not None else None,
        )

        def write(tx: Transaction) -> tuple[InboxSubscription, list[Consumer]]:
            find_agent(tx.db, tenant, agent)
            made = asked if engine else msgspec.structs.replace(asked, engine=tenant_engine(tx.db, tenant))
            if tx.db.execute(ANY, (tenant, name)).get is not None:
                raise Conflict(f"{tenant} has a subscription {name}", hint="use another id, or delete that one first")
            for each in streams:
                tx.stream(each)
            found = [stream for (stream,) in list(tx.db.execute(STREAMS, (tenant,))) if reads(made, stream)]
            if made.start.policy is StartPolicy.AT_OFFSET and len(found) != 1:
                raise Invalid(
                    "start at_offset needs a subscription that reads exactly one stream", hint="name it in `streams`"
                )
            places = [tx.move(stream, name, ensured, made.start) for stream in found]
            text = msgspec.json.encode(made).decode()
            tx.db.execute(SAVE, (tenant, name, text, tx.now_us))
            for pair in globs(pattern):
                tx.db.execute(SAVE_GLOB, (tenant, name, *pair))
            return msgspec.structs.replace(made, tenant=tenant, created_at_us=tx.now_us), places

        return await self._log.transact(write, grows=True)

    async def subscription(self, tenant: str, name: str) -> InboxSubscription:
        """Return a subscription; raises ``NotFound``."""
        row = await self._log.store.read(lambda db: db.execute(ONE, (tenant, name)).fetchone())
        if row is None:
            raise _no_subscription(tenant, name)
        return _decode(*row)

    async def ended(self, now_us: int) -> list[tuple[str, str]]:
        """Return tenant and id of the inbox subscriptions whose end has come."""
        return await self._log.store.read(lambda db: list(db.execute(ENDED, (now_us,))))

    async def subscriptions(self, tenant: str | None = None) -> list[InboxSubscription]:
        """Return the inbox subscriptions of a tenant, or of all, by id."""
        return await self._log.store.read(lambda db: [_decode(*row) for row in db.execute(ALL, (tenant,))])

    async def places(self, tenant: str, name: str) -> list[str]:
        """Return the streams a subscription reads."""
        return await self._log.store.read(lambda db: [each for (each,) in db.execute(READ_BY, (name, tenant))])

    async def unsubscribe(self, tenant: str, name: str) -> None:
        """Forget a subscription and its places; its items stay. Raises ``NotFound``."""
        await self.subscription(tenant, name)
        await self._log.transact(lambda tx: _forget(tx, tenant, name))

    async def hand_over(self, tenant: str, name: str, engine: Literal["live", "spark"]) -> InboxSubscription:
        """Have a subscription served by another engine from where it stands; nothing is lost or given twice.

        Raises ``NotFound``, or ``Invalid`` for an engine that there is not.
        """
        _check_engine(engine)
        await self.subscription(tenant, name)
        await self._log.transact(lambda tx: tx.run(ENGINE, (engine, tenant, name)))
        return await self.subscription(tenant, name)

    async def hand_over_all(self, tenant: str, engine: Literal["live", "spark"]) -> list[str]:
        """Have all subscriptions of a tenant, and those that come, served by an engine; return whose has changed."""
        _check_engine(engine)

        def write(tx: Transaction) -> list[str]:
            tx.db.execute(SAVE_TENANT_ENGINE, (tenant, engine))
            found = [_decode(*row) for row in list(tx.db.execute(ALL, (tenant,)))]
            names = [one.id for one in found if one.engine != engine]
            for name in names:
                tx.run(ENGINE, (engine, tenant, name))
            return names

        return await self._log.transact(write)

    async def reset(self, tenant: str, name: str, start: Start) -> list[Consumer]:
        """Move a subscription in every stream it reads; items it has been given once are never given again."""
        await self.subscription(tenant, name)
        start = check_start(start)

        def write(tx: Transaction) -> list[Consumer]:
            names = [each for (each,) in list(tx.db.execute(READ_BY, (name, tenant)))]
            return [rewind(tx, each, name, start, None) for each in names]

        return await self._log.transact(write)


def reads(subscription: InboxSubscription, stream: str) -> bool:
    """Say whether a subscription reads a stream of its tenant."""
    if subscription.streams:
        return stream in subscription.streams
    if stream.endswith(PRIVATE):
        return subscription.pattern == stream
    return stream.endswith(f".{JOURNAL}") or whole(subscription.pattern, stream)


def beginning(tx: Transaction, subscription: InboxSubscription, stream: str) -> Consumer:
    """Give a subscription its place in a stream that was made after it: at its beginning.

    Raises ``NotFound`` when the subscription or the stream is gone.
    """
    if tx.db.execute(ANY, (subscription.tenant, subscription.id)).get is None:
        raise _no_subscription(subscription.tenant, subscription.id)
    found = tx.move(stream, subscription.id, lambda old, *_: Change(old, old))
    made: Consumer = found or tx.move(stream, subscription.id, ensured, EARLIEST)
    return made


def end(tx: Transaction, subscription: InboxSubscription) -> None:
    """A subscription has seen its last event: it ends after its grace. The first such event decides."""
    if subscription.cleanup is not None:
        at_us = tx.now_us + int(subscription.cleanup.grace_s * 1e6)
        tx.db.execute(END, (at_us, subscription.tenant, subscription.id))


def find_agent(db: apsw.Connection, tenant: str, agent: str) -> Agent:
    """Return an agent; raises ``NotFound``."""
    row = db.execute(AGENT, (tenant, agent)).get
    if row is None:
        raise NotFound(f"there is no agent {agent} of {tenant}", hint="list them with `postbus agents list`")
    return _agent(*row)


def _agent(number: int, tenant: str, agent: str, settings: str, created_at_us: int) -> Agent:
    targets = msgspec.json.decode(settings, type=dict[str, tuple[Target, ...]])["targets"]
    return Agent(no=number, tenant=tenant, id=agent, targets=targets, created_at_us=created_at_us)


def _decode(tenant: str, text: str, created_at_us: int) -> InboxSubscription:
    found = msgspec.json.decode(text, type=InboxSubscription)
    return msgspec.structs.replace(found, tenant=tenant, created_at_us=created_at_us)


def _forget(tx: Transaction, tenant: str, name: str) -> None:
    for (stream,) in list(tx.db.execute(READ_BY, (name, tenant))):
        tx.move(stream, name, lambda old, *_: Change(None, old is not None))
    for statement in FORGET:
        tx.db.execute(statement, (tenant, name))
    tx.db.execute(FORGET_DELIVERIES, (name, tenant))


def tenant_engine(db: apsw.Connection, tenant: str) -> Literal["live", "spark"]:
    """Return who serves the subscriptions of a tenant that do not say it."""
    return "spark" if db.execute(TENANT_ENGINE, (tenant,)).get == "spark" else "live"


def _check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise Invalid(f"no engine is called {engine!r}", hint=f"use one of {', '.join(ENGINES)}")


def _check_digest(digest: Digest | None) -> Digest | None:
    if digest is not None:
        if not digest.by or digest.by.split(".", 1)[0] not in {
            "metadata",
            "payload",
            "key",
            "source",
            "variant",
            "topic",
        }:
            raise Invalid(
                f"digest `by` is key, source, variant, topic, or a path in metadata or payload, not {digest.by!r}"
            )
        if not 0 <= digest.window_s <= 86_400 or not 1 <= digest.items <= 1000:  # noqa: PLR2004 - said in the sentence
            raise Invalid("a digest's window is 0 to 86400 seconds, and it shows after 1 to 1000 items")
    return digest


def _check_cleanup(cleanup: Cleanup | None) -> Cleanup | None:
    if cleanup is not None:
        if (cleanup.at is None) == (cleanup.on_terminal is None):
            raise Invalid("cleanup has either `at` or `on_terminal`")
        if cleanup.at is not None:
            parse_instant(cleanup.at)
        if cleanup.on_terminal is not None:
            compile_filter(cleanup.on_terminal)
        if not 0 <= cleanup.grace_s <= 366 * 86_400:
            raise Invalid("grace_s is 0 seconds to a year")
    return cleanup


def _no_subscription(tenant: str, name: str) -> NotFound:
    return NotFound(f"there is no inbox subscription {name} of {tenant}")
