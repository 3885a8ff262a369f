"""Counting: how far each subscription is, how many events are in which status, how much the store holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from postbus.bus.registry import Registered, Registry
from postbus.bus.search import UNSETTLED
from postbus.delivery.table import alive
from postbus.model import StreamStats
from postbus.topics import matches

if TYPE_CHECKING:
    import apsw

    from postbus.clock import Clock
    from postbus.log.sqlite import SqliteLog

__all__ = ["BusStats", "Statuses", "SubscriptionState", "bus_stats", "subscription_states"]

AHEAD_MAX = 10_000
COUNTED_MAX = 20_000
MINUTE_US = 60_000_000
MINUTES = 60

# The places of a subscription: how far it is behind in each partition, who works there, what he may have started.
PLACES = """
    SELECT c.stream_id, c.partition, c.next_offset, IFNULL(l.reach, 0), l.owner, l.boot, l.until_us, p.first_offset,
           (SELECT max(e."offset") FROM events e WHERE e.stream_id = c.stream_id AND e.partition = c.partition)
    FROM cursors c JOIN stream_registry s ON s.stream_id = c.stream_id AND s.name GLOB ? || '.*' AND NOT s.deleted
    JOIN partitions p ON p.stream_id = c.stream_id AND p.partition = c.partition
    LEFT JOIN lanes l ON l.stream_id = c.stream_id AND l.consumer = c.consumer AND l.partition = c.partition
    WHERE c.consumer = ?
"""
ROWS = """
    SELECT d.status, count(*) FROM delivery_rows d JOIN stream_registry s USING (stream_id)
    WHERE s.name GLOB ? || '.*' AND d.consumer = ? GROUP BY d.status
"""
# What a subscription has not passed in one partition, and has no row of its own.
AHEAD = f"""
    SELECT e."offset", e.topic FROM events e WHERE e.stream_id = ?1 AND e.partition = ?2 AND e."offset" >= ?3
    AND NOT EXISTS (SELECT 1 FROM delivery_rows d WHERE d.stream_id = ?1 AND d.partition = ?2
                    AND d."offset" = e."offset" AND d.consumer = ?4)
    ORDER BY e."offset" LIMIT {AHEAD_MAX}
"""  # noqa: S608 - a constant
OPEN = f"""
    SELECT u.seq FROM ({UNSETTLED}) u JOIN events e USING (seq)
    JOIN stream_registry s ON s.stream_id = e.stream_id AND s.name GLOB ? || '.*'
"""  # noqa: S608 - constants only
STATUSES = "SELECT status, count(*) FROM event_journal WHERE id IN (SELECT value FROM json_each(?)) GROUP BY status"
DEAD = "SELECT state, count(*) FROM dead_letters WHERE id GLOB ? || '.*' GROUP BY state"


class SubscriptionState(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription and where it is.

    ``lag``: events it has not passed yet, whatever their topic. ``pending``: those that match and were not handed to a
    handler, counted among the next 10,000 of each partition. ``running``: handed to a handler. ``waiting``: for a
    retry. ``dead``: given up on, with an open dead letter. ``owners``: the processes that work on it now, by pid.
    """

    registered: Registered
    lag: int
    pending: int
    waiting: int
    running: int
    dead: int
    owners: tuple[int, ...]


class Statuses(msgspec.Struct, frozen=True, kw_only=True):
    """How many events are in which status; ``uncounted`` may be anything: more than 20,000 were open at once."""

    pending: int
    processing: int
    done: int
    failed: int
    uncounted: int


class BusStats(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's counts, and the sizes of the store it is in. ``rates``: events per minute, the current one last."""

    streams: list[StreamStats]
    statuses: Statuses
    subscriptions: list[SubscriptionState]
    dead_letters: dict[str, int]
    rates: list[int]
    store_bytes: int
    wal_bytes: int
    durability: str


async def subscription_states(log: SqliteLog, clock: Clock, tenant: str) -> list[SubscriptionState]:
    """Return every subscription of a tenant, by id."""
    registered = await Registry(log, tenant).all()
    return await log.store.read(lambda db: [_state(db, clock, tenant, one) for one in registered])


async def bus_stats(log: SqliteLog, clock: Clock, tenant: str) -> BusStats:
    """Return the counts of a tenant; brings the projections up to date first."""
    await log.projections.catch_up()
    names = [stream.name for stream in await log.streams() if stream.name.startswith(f"{tenant}.")]
    streams = [await log.get_stream_stats(name) for name in names]
    events = sum(stats.count for stats in streams if not stats.stream.name.endswith("-dlq"))
    dead = await log.store.read(lambda db: dict(db.execute(DEAD, (tenant,))))
    database = log.store.folder.database
    wal = database.with_name(f"{database.name}-wal")
    return BusStats(
        streams=streams,
        statuses=await log.store.read(lambda db: _statuses(db, tenant, events)),
        subscriptions=await subscription_states(log, clock, tenant),
        dead_letters={state: dead.get(state, 0) for state in ("open", "replayed", "purged")},
        rates=await _rates(log, clock.now_us()),
        store_bytes=database.stat().st_size,
        wal_bytes=wal.stat().st_size if wal.exists() else 0,
        durability=log.store.durability.value,
    )


def _statuses(db: apsw.Connection, tenant: str, events: int) -> Statuses:
    numbers = [number for (number,) in db.execute(OPEN, (tenant,))]
    counts = dict(db.execute(STATUSES, (msgspec.json.encode(numbers[:COUNTED_MAX]).decode(),)))
    others = {status: counts.get(status, 0) for status in ("pending", "processing", "failed")}
    uncounted = max(len(numbers) - COUNTED_MAX, 0)
    return Statuses(**others, done=max(events - sum(others.values()) - uncounted, 0), uncounted=uncounted)


async def _rates(log: SqliteLog, now_us: int) -> list[int]:
    minute = now_us // MINUTE_US
    found = dict(await log.projections.rates((minute - MINUTES + 1) * MINUTE_US, now_us))
    return [found.get(one, 0) for one in range(minute - MINUTES + 1, minute + 1)]


def _state(db: apsw.Connection, clock: Clock, tenant: str, registered: Registered) -> SubscriptionState:
    rows = dict(db.execute(ROWS, (tenant, registered.id)))
    lag, pending, running = 0, 0, rows.get("processing", 0)
    owners: set[int] = set()
    for stream_id, partition, following, reach, owner, boot, until_us, first, last in list(
        db.execute(PLACES, (tenant, registered.id))
    ):
        lag += max((first if last is None else last + 1) - following, 0)
        works = owner is not None and _works(clock, owner, boot, until_us)
        if works:
            owners.add(int(owner.partition(".")[0]))
        for offset, topic in db.execute(AHEAD, (stream_id, partition, following, registered.id)):
            if any(matches(pattern, topic) for pattern in registered.patterns):
                started = works and offset < reach
                running, pending = running + started, pending + (not started)
    return SubscriptionState(
        registered=registered,
        lag=lag,
        pending=pending,
        waiting=rows.get("waiting", 0),
        running=running,
        dead=rows.get("failed", 0),
        owners=tuple(sorted(owners)),
    )


def _works(clock: Clock, owner: str, boot: str, until_us: int) -> bool:
    """Say whether the owner of a lane is there: its lease runs, and so does the process that took it."""
    return boot == clock.boot_id() and until_us > clock.monotonic_s() * 1e6 and alive(owner)
