"""The schedules of a tenant: kept in the store, fired by whoever runs them, once per schedule and fire time.

A fire is an event, published under an identity made of schedule and fire time: who fires it twice, after a crash or
beside another process, publishes nothing new. What was fired but not handled yet when its schedule was cancelled is
passed over by the handlers.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from postbus.bus.context import current, lower
from postbus.kernel.identity import ambient_trust
from postbus.kernel.timing import SOURCE, ScheduleEntry, Timing, check_fire, make_timing, shown
from postbus.model import Conflict, IdempotencyConflict, Invalid, LimitExceeded, NotFound, PostbusError, Receipt, Trust
from postbus.topics import check_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from postbus.bus import Context, EventBus
    from postbus.log.sqlite import Transaction
    from postbus.model import Event

__all__ = ["Schedules"]

logger = logging.getLogger("postbus.kernel.scheduler")

LOOK_S = 60.0
AGAIN_S = 5.0
KEPT_S = 30 * 86_400
PRUNE_S = 3600.0
LIVE_MAX = 10_000
FIRES_KEPT = 1_000
DUE_MAX = 100
MARK = "schedule"

COLUMNS = """
    schedule, at_us, every_us, cron, zone, anchor_us, until_us, topic, payload, trust, made_by, correlation_id, user_id,
    session_id, state, error, next_us, last_us, fires, skipped, created_at_us
"""
FIND = f"SELECT {COLUMNS} FROM schedules WHERE tenant = ? AND schedule = ?"  # noqa: S608 - constants only
LIST = f"""
    SELECT {COLUMNS} FROM schedules WHERE tenant = ?1 AND (?2 OR state IN ('active', 'paused'))
    ORDER BY created_at_us, schedule
"""  # noqa: S608 - constants only
DUE = f"""
    SELECT {COLUMNS} FROM schedules WHERE tenant = ? AND state = 'active' AND next_us <= ? ORDER BY next_us LIMIT ?
"""  # noqa: S608 - constants only
NEXT = "SELECT min(next_us) FROM schedules WHERE tenant = ? AND state = 'active'"
LIVE = "SELECT count(*) FROM schedules WHERE tenant = ? AND state IN ('active', 'paused')"
STATE = "SELECT state FROM schedules WHERE tenant = ? AND schedule = ?"
SAVE = f"""
    INSERT OR REPLACE INTO schedules (tenant, {COLUMNS}, updated_at_us)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""  # noqa: S608 - constants only
# Only who knows where the schedule stands moves it on: somebody may have changed it, or fired it, meanwhile.
MOVE = """
    UPDATE schedules SET next_us = ?, state = ?, error = ?, last_us = IFNULL(?, last_us), fires = fires + ?,
           skipped = skipped + ?, updated_at_us = ?
    WHERE tenant = ? AND schedule = ? AND state = 'active' AND next_us = ?
"""
FIRED = "INSERT OR IGNORE INTO schedule_fires VALUES (?, ?, ?, ?, ?, ?)"
FORGET = """
    DELETE FROM schedule_fires WHERE tenant = ?1 AND schedule = ?2 AND fire_us <= (
        SELECT fire_us FROM schedule_fires WHERE tenant = ?1 AND schedule = ?2 ORDER BY fire_us DESC LIMIT 1 OFFSET ?3)
"""
# What ended long ago.
PRUNE = "DELETE FROM schedules WHERE tenant = ? AND state IN ('done', 'cancelled', 'failed') AND updated_at_us < ?"
PRUNE_FIRES = """
    DELETE FROM schedule_fires WHERE tenant = ?1 AND schedule NOT IN (SELECT schedule FROM schedules WHERE tenant = ?1)
"""
# The fires that some subscription has not finished with.
QUEUED = """
    SELECT count(*) FROM schedule_fires f JOIN stream_registry s ON s.name = f.stream
    JOIN events e ON e.stream_id = s.stream_id AND e.partition = f.partition AND e."offset" = f."offset"
    WHERE f.tenant = ? AND f.schedule = ? AND EXISTS (
        SELECT 1 FROM event_statuses t WHERE t.seq = e.seq AND t.status IN ('pending', 'processing'))
"""


class Schedules:
    """What happens at set times. ``run`` fires it; everything else works whether that runs or not."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus
        self._clock = bus.clock
        self._changed = asyncio.Event()

    def wire(self) -> None:
        """Have handlers pass over fires of schedules that were cancelled."""
        self._bus.middleware(self._pass_over)

    async def start(self) -> None:
        """See ``KernelPart.start``; the scheduler extension runs it."""

    async def stop(self) -> None:
        """See ``KernelPart.stop``."""

    # --- for users ---

    async def create(
        self,
        topic: str,
        payload: dict[str, Any],
        *,
        made_by: str,
        schedule_id: str | None = None,
        user_id: str | None = None,
        session_id: str | None = None,
        **when: Any,
    ) -> ScheduleEntry:
        """Keep a schedule and return it; see ``make_timing`` for when. One that exists under that id is returned as is.

        It inherits the correlation of the event being handled, and its trust. Raises ``Invalid``, ``Forbidden``,
        ``LimitExceeded``; nothing is kept then.
        """
        name = check_id(schedule_id or self._clock.new_id(), "schedule_id")
        log, now_us = await self._bus.open(), self._clock.now_us()
        if (known := await self._find(name)) is not None:
            return known
        timing, delivery = make_timing(now_us, **when), current.get()
        entry = ScheduleEntry(
            id=name,
            timing=timing,
            topic=topic,
            payload=check_fire(topic, payload),
            trust=ambient_trust().value,
            made_by=made_by,
            correlation_id=None if delivery is None else delivery.event.correlation_id or delivery.event.id,
            user_id=user_id,
            session_id=session_id,
            state="active",
            error=None,
            next_us=timing.at_us if timing.at_us is not None else timing.after(now_us),
            last_us=None,
            fires=0,
            skipped=0,
            created_at_us=now_us,
        )

        def write(tx: Transaction) -> ScheduleEntry:
            found = tx.db.execute(FIND, (self._bus.tenant, name)).fetchone()
            if found is not None:
                return _entry(found)
            if int(tx.db.execute(LIVE, (self._bus.tenant,)).get) >= LIVE_MAX:
                raise LimitExceeded(f"there are {LIVE_MAX} schedules already", hint="cancel some")
            self._save(tx, entry)
            return entry

        kept = await log.transact(write, grows=True)
        self._changed.set()
        return kept

    async def get(self, schedule_id: str) -> ScheduleEntry:
        """Return a schedule; raises ``NotFound``."""
        found = await self._find(schedule_id)
        if found is None:
            raise _unknown(schedule_id)
        return found

    async def entries(self, *, ended: bool = False) -> list[ScheduleEntry]:
        """Return the schedules that are active or paused, oldest first; all of them with ``ended``."""
        log, tenant = await self._bus.open(), self._bus.tenant
        return await log.store.read(lambda db: [_entry(row) for row in db.execute(LIST, (tenant, ended))])

    async def cancel(self, schedule_id: str) -> int:
        """End a schedule for good; return how many of its fires were waiting for a handler and will not be handled.

        What a handler works on at this moment is not stopped. Cancelling again changes nothing. Raises ``NotFound``.
        """
        log, tenant = await self._bus.open(), self._bus.tenant

        def write(tx: Transaction) -> int:
            entry = self._known(tx, schedule_id)
            if entry.state == "cancelled":
                return 0
            self._save(tx, msgspec.structs.replace(entry, state="cancelled", next_us=None))
            return int(tx.db.execute(QUEUED, (tenant, schedule_id)).get)

        queued = await log.transact(write)
        self._changed.set()
        return queued

    async def update(
        self,
        schedule_id: str,
        *,
        topic: str | None = None,
        payload: dict[str, Any] | None = None,
        paused: bool | None = None,
        until: str | None = None,
        **when: Any,
    ) -> ScheduleEntry:
        """Change when a schedule fires, what it publishes, or whether it is paused, and return it.

        A one-shot that came due while it was paused fires once when it goes on; a recurring one goes on with its next
        time. What an untrusted event changes becomes untrusted. Raises ``NotFound``, ``Conflict`` when it has ended,
        and as ``create``.
        """
        log, trust = await self._bus.open(), ambient_trust()
        when = {name: value for name, value in when.items() if value is not None}

        def write(tx: Transaction) -> ScheduleEntry:
            entry = self._known(tx, schedule_id)
            if entry.state not in ("active", "paused"):
                raise Conflict(f"the schedule {schedule_id} is {entry.state}", hint="make a new one")
            entry = self._timed(entry, when, until)
            if topic is not None or payload is not None:
                fired = topic or entry.topic
                said = msgspec.json.decode(entry.payload) if payload is None else payload
                entry = msgspec.structs.replace(entry, topic=fired, payload=check_fire(fired, said))
            if paused is not None:
                entry = self._paused(entry, paused=paused)
            entry = msgspec.structs.replace(entry, trust=lower(trust, entry.trust).value, error=None)
            self._save(tx, entry)
            return entry

        changed = await log.transact(write, grows=True)
        self._changed.set()
        return changed

    def _timed(self, entry: ScheduleEntry, when: dict[str, Any], until: str | None) -> ScheduleEntry:
        now_us = self._clock.now_us()
        if not when and until is None:
            return entry
        if not when:
            if not entry.timing.recurring:
                raise Invalid("what happens once has no until")
            old = entry.timing
            if old.cron is not None:
                when = {"cron": old.cron, "zone": old.zone}
            else:
                when = {"every_s": (old.every_us or 0) / 1e6}
            timing = msgspec.structs.replace(make_timing(now_us, until=until, **when), anchor_us=old.anchor_us)
        else:
            timing = make_timing(now_us, until=until, **when)
        following = timing.at_us if timing.at_us is not None else timing.after(now_us)
        if following is None:
            raise Invalid(f"this never comes before {until}")
        return msgspec.structs.replace(entry, timing=timing, next_us=following)

    def _paused(self, entry: ScheduleEntry, *, paused: bool) -> ScheduleEntry:
        if paused:
            return msgspec.structs.replace(entry, state="paused")
        if entry.state == "active" or not entry.timing.recurring:
            return msgspec.structs.replace(entry, state="active")
        following = entry.timing.after(self._clock.now_us())
        state = "active" if following is not None else "done"
        return msgspec.structs.replace(entry, state=state, next_us=following)

    # --- firing ---

    async def run(self) -> None:
        """Fire what comes due, until cancelled. What recurs and came due while nothing ran is passed over."""
        current.set(None)  # whoever started this is not the cause of what fires
        await self._patiently(self._catch_up)
        pruned_s = self._clock.monotonic_s()
        while True:
            self._changed.clear()
            wait_s = await self._patiently(self._fire_due)
            if wait_s > 0:
                await self._clock.wait(self._changed, wait_s)
            if self._clock.monotonic_s() - pruned_s >= PRUNE_S:
                pruned_s = self._clock.monotonic_s()
                await self._patiently(self._prune)

    async def _patiently(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Do it; when the store cannot take it now, try again in a moment."""
        while True:
            try:
                return await work()
            except PostbusError as error:
                logger.warning("schedules cannot be fired now: %s", error.message)
                await self._clock.sleep(AGAIN_S)

    async def _catch_up(self) -> None:
        now_us = self._clock.now_us()
        await self._prune()
        while recurring := [entry for entry in await self._due(now_us, LIVE_MAX) if entry.timing.recurring]:
            for entry in recurring:
                await self._move(entry, entry.timing.after(now_us), skipped=1)

    async def _prune(self) -> None:
        log, tenant = await self._bus.open(), self._bus.tenant
        old_us = self._clock.now_us() - KEPT_S * 1_000_000
        if await log.transact(lambda tx: tx.run(PRUNE, (tenant, old_us))):
            await log.transact(lambda tx: tx.run(PRUNE_FIRES, (tenant,)))

    async def _fire_due(self) -> float:
        """Fire everything that is due; return how long to wait for the next."""
        now_us = self._clock.now_us()
        due = await self._due(now_us, DUE_MAX)
        for entry in due:
            await self._fire(entry, now_us)
        if due:
            return 0.0
        log, tenant = await self._bus.open(), self._bus.tenant
        following = await log.store.read(lambda db: db.execute(NEXT, (tenant,)).get)
        return LOOK_S if following is None else min(max((following - now_us) / 1e6, 0.001), LOOK_S)

    async def _fire(self, entry: ScheduleEntry, now_us: int) -> None:
        """Fire one schedule. Of a recurring one that is late only the last time counts, if it is not long ago."""
        assert entry.next_us is not None  # noqa: S101 - it is due
        timing, fire_us, skipped = entry.timing, entry.next_us, 0
        if timing.recurring and now_us - fire_us >= timing.late_us():
            recent = timing.after(now_us - timing.late_us())
            if recent is None or recent > now_us:
                await self._move(entry, recent, skipped=1)
                return
            fire_us, skipped = recent, 1
        following = timing.after(fire_us) if timing.recurring else None
        try:
            receipt = await self._publish(entry, fire_us)
        except (Invalid, Conflict, NotFound) as error:
            logger.error("the schedule %s cannot fire: %s", entry.id, error.message)  # noqa: TRY400 - its sentence says it all
            await self._move(entry, following, skipped=skipped, error=error.message)
            return
        await self._move(entry, following, skipped=skipped, fired=(fire_us, receipt))

    async def _publish(self, entry: ScheduleEntry, fire_us: int) -> Receipt:
        whom = {"user_id": entry.user_id, "session_id": entry.session_id}
        mark = {"id": entry.id, "fire_at": shown(fire_us), "made_by": entry.made_by}
        try:
            return await self._bus.publish(
                entry.topic,
                SOURCE,
                entry.payload,
                None if entry.timing.recurring else entry.correlation_id,
                native_id=f"schedule:{entry.id}:{fire_us}",
                metadata={MARK: mark, **{name: value for name, value in whom.items() if value is not None}},
                occurred_at=shown(fire_us),
                trust=Trust(entry.trust),
            )
        except IdempotencyConflict as known:  # fired before a crash, and changed since
            return Receipt(stream=known.stream, partition=0, offset=known.offset, duplicate=True)

    async def _move(
        self,
        entry: ScheduleEntry,
        following: int | None,
        *,
        skipped: int = 0,
        fired: tuple[int, Receipt] | None = None,
        error: str | None = None,
    ) -> None:
        log, tenant = await self._bus.open(), self._bus.tenant
        state = "active" if following is not None else "done" if error is None else "failed"

        def write(tx: Transaction) -> None:
            last_us = None if fired is None else fired[0]
            moved = (following, state, error, last_us, int(fired is not None), skipped, tx.now_us)
            tx.db.execute(MOVE, (*moved, tenant, entry.id, entry.next_us))
            if fired is not None:
                receipt = fired[1]
                where = (receipt.stream, receipt.partition, receipt.offset)
                tx.db.execute(FIRED, (tenant, entry.id, fired[0], *where))
                tx.db.execute(FORGET, (tenant, entry.id, FIRES_KEPT))

        await log.transact(write)

    async def _pass_over(self, event: Event, context: Context, call_next: Callable[[], Awaitable[Any]]) -> Any:
        """Around every handler: a fire of a schedule that was cancelled is not handled."""
        if event.source != SOURCE or event.metadata_json is None:
            return await call_next()
        mark = event.metadata.get(MARK)
        name = mark.get("id") if isinstance(mark, dict) else None
        if isinstance(name, str):
            log, tenant = await self._bus.open(), self._bus.tenant
            state = await log.store.read(lambda db: db.execute(STATE, (tenant, name)).get)
            if state == "cancelled":
                logger.info("%s passed over %s: its schedule was cancelled", context.subscription, event.id)
                return None
        return await call_next()

    # --- rows ---

    async def _find(self, schedule_id: str) -> ScheduleEntry | None:
        log, where = await self._bus.open(), (self._bus.tenant, schedule_id)
        found = await log.store.read(lambda db: db.execute(FIND, where).fetchone())
        return None if found is None else _entry(found)

    async def _due(self, now_us: int, limit: int) -> list[ScheduleEntry]:
        log, where = await self._bus.open(), (self._bus.tenant, now_us, limit)
        return await log.store.read(lambda db: [_entry(row) for row in db.execute(DUE, where)])

    def _known(self, tx: Transaction, schedule_id: str) -> ScheduleEntry:
        found = tx.db.execute(FIND, (self._bus.tenant, schedule_id)).fetchone()
        if found is None:
            raise _unknown(schedule_id)
        return _entry(found)

    def _save(self, tx: Transaction, entry: ScheduleEntry) -> None:
        timing = entry.timing
        when = (timing.at_us, timing.every_us, timing.cron, timing.zone, timing.anchor_us, timing.until_us)
        what = (entry.topic, entry.payload, entry.trust, entry.made_by, entry.correlation_id)
        whom = (entry.user_id, entry.session_id)
        progress = (entry.state, entry.error, entry.next_us, entry.last_us, entry.fires, entry.skipped)
        row = (self._bus.tenant, entry.id, *when, *what, *whom, *progress, entry.created_at_us, tx.now_us)
        tx.db.execute(SAVE, row)


def _entry(row: tuple[Any, ...]) -> ScheduleEntry:
    name, at_us, every_us, cron, zone, anchor_us, until_us, topic, payload, trust, made_by, *rest = row
    correlation_id, user_id, session_id, state, error, next_us, last_us, fires, skipped, created_at_us = rest
    return ScheduleEntry(
        id=name,
        timing=Timing(at_us=at_us, every_us=every_us, cron=cron, zone=zone, anchor_us=anchor_us, until_us=until_us),
        topic=topic,
        payload=payload,
        trust=trust,
        made_by=made_by,
        correlation_id=correlation_id,
        user_id=user_id,
        session_id=session_id,
        state=state,
        error=error,
        next_us=next_us,
        last_us=last_us,
        fires=fires,
        skipped=skipped,
        created_at_us=created_at_us,
    )


def _unknown(schedule_id: str) -> NotFound:
    return NotFound(f"there is no schedule {schedule_id}", hint="schedule_list names those there are")
