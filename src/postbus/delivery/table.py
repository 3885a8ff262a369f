"""What became of events, on disk: leases on lanes, and a row for each event that is not simply done.

A *lane* is one subscription's way through one partition. One process at a time works on a lane, under a lease with a
fencing token: it may start every event in [cursor, reach), so that an attempt is on record before a handler runs
without a write per event. After a crash whoever takes the lane over turns what was in that range into rows, and those
are then tried one at a time with a write before each, so that only an event that kills the process collects attempts.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from postbus.delivery.gate import Gate
from postbus.log.cursors import committed, no_consumer
from postbus.model import DeliveryStatus, IdempotencyConflict, LeaseLost, Receipt

if TYPE_CHECKING:
    from collections.abc import Callable

    import apsw

    from postbus.clock import Clock
    from postbus.log.sqlite import SqliteLog, Transaction
    from postbus.model import Draft

__all__ = ["DeliveryTable", "LaneKey", "LaneState", "Row", "Settlement"]

WAITING = "waiting"
DONE, FAILED, PROCESSING = DeliveryStatus.DONE.value, DeliveryStatus.FAILED.value, DeliveryStatus.PROCESSING.value

ACQUITTALS_MAX = 3

LANE = "SELECT owner, token, boot, until_us, reach FROM lanes WHERE stream_id = ? AND consumer = ? AND partition = ?"
TAKE_LANE = "INSERT OR REPLACE INTO lanes VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
# Keeps a lease that is still ours; changes nothing when somebody has taken it over.
KEEP_LANE = """
    UPDATE lanes SET until_us = ?, reach = ?
    WHERE stream_id = ? AND consumer = ? AND partition = ? AND owner = ? AND token = ?
"""
FREE_LANE = """
    UPDATE lanes SET owner = NULL, reach = 0
    WHERE stream_id = ? AND consumer = ? AND partition = ? AND owner = ? AND token = ?
"""
FREE_DEAD = """
    UPDATE lanes SET owner = NULL, reach = 0, token = token + 1 WHERE stream_id = ? AND consumer = ? AND partition = ?
"""
# Lanes somebody holds; those of a consumer that was deleted meanwhile have no cursor and nothing to recover. What
# outside consumers hold (see claims.py) ends with its lease.
OWNED_LANES = """
    SELECT stream_id, consumer, partition, owner, boot, reach
    FROM lanes JOIN cursors USING (stream_id, consumer, partition) WHERE owner IS NOT NULL AND owner NOT GLOB '*.pull'
"""
ROWS = """
    SELECT "offset", status, attempt, alone, replays, key, boot, due_us, due_at_us, error, dead_stream, dead_offset
    FROM delivery_rows WHERE stream_id = ? AND consumer = ? AND partition = ? AND status IN ('waiting', 'processing')
    ORDER BY "offset"
"""
SAVE_ROW = "INSERT OR REPLACE INTO delivery_rows VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
# Everything that has a row from the cursor on, whatever became of it.
KNOWN = """
    SELECT "offset" FROM delivery_rows WHERE stream_id = ? AND consumer = ? AND partition = ? AND "offset" >= ?
"""
# What a dead process was trying one at a time, the last that it began last.
SUSPECTS = """
    SELECT d.stream_id, d.partition, d."offset", d.consumer, d.alone
    FROM delivery_rows d JOIN lanes l USING (stream_id, consumer, partition)
    WHERE l.owner = ? AND d.alone > 0 AND d.status = 'processing' ORDER BY d.updated_at_us
"""
# Acquit one and count it; below 0 until its lane is taken over, so that it is done once.
ACQUIT = """
    UPDATE delivery_rows SET alone = -alone - 1
    WHERE stream_id = ? AND partition = ? AND "offset" = ? AND consumer = ?
"""
ACQUITTED = """
    SELECT "offset", -alone FROM delivery_rows WHERE stream_id = ? AND consumer = ? AND partition = ? AND alone < 0
"""
LETTER = """
    SELECT dead_stream, dead_offset FROM delivery_rows
    WHERE stream_id = ? AND partition = ? AND "offset" = ? AND consumer = ? AND status = 'failed'
"""
IN_RANGE = """
    SELECT "offset", topic, key FROM events WHERE stream_id = ? AND partition = ? AND "offset" >= ? AND "offset" < ?
    ORDER BY "offset"
"""


class LaneKey(NamedTuple):
    """Which lane: the subscription, and where it reads."""

    subscription: str
    stream: str
    partition: int


class Row(msgspec.Struct, kw_only=True):
    """One event that is not simply done, for one subscription.

    ``alone``: it was in flight when a process died and is tried with nothing beside it; one more for each acquittal.
    """

    offset: int
    status: str = WAITING
    attempt: int = 0
    alone: int = 0
    replays: int = 0
    key: str | None = None
    boot: str = ""
    due_us: int = 0
    due_at_us: int = 0
    error: str | None = None
    dead_stream: str | None = None
    dead_offset: int | None = None


class LaneState(NamedTuple):
    """A lane as its new owner finds it; it may start what lies in [next_offset, reach)."""

    token: int
    next_offset: int
    reach: int
    rows: list[Row]
    recovered: int


class Settlement(NamedTuple):
    """What a lane wants written: its cursor, its reach, rows that changed, and what is dead."""

    next_offset: int
    reach: int
    rows: list[Row]
    dead: list[tuple[Row, str, Draft]]


class DeliveryTable:
    """Writes and reads deliveries. Each method is one transaction."""

    def __init__(self, log: SqliteLog, clock: Clock, owner: str, lease_s: float) -> None:
        self._log = log
        self._clock = clock
        self._owner = owner
        self._lease_us = int(lease_s * 1e6)
        self.gate = Gate(clock)

    # --- time that jumps of the wall clock do not touch ---

    def due_in_us(self, row: Row) -> int:
        """Return how long a row still waits; a wait that began before a reboot goes on by the wall clock."""
        if row.boot == self._clock.boot_id() or not row.boot:
            return row.due_us - self._now()
        return row.due_at_us - self._clock.now_us()

    def delayed(self, row: Row, delay_s: float) -> None:
        """Make a row wait from now."""
        delay = int(delay_s * 1e6)
        row.status = WAITING
        row.boot = self._clock.boot_id()
        row.due_us = self._now() + delay
        row.due_at_us = self._clock.now_us() + delay

    def _now(self) -> int:
        return int(self._clock.monotonic_s() * 1e6)

    # --- leases ---

    async def acquire(self, key: LaneKey, window: int, match: Callable[[str], bool]) -> LaneState | None:
        """Take the lane's lease; None while another live process has it.

        While something waits to be tried alone nothing else may be started, so the lane then reaches no further.
        """

        def take(tx: Transaction) -> LaneState | None:
            where = (tx.stream(key.stream).stream_id, key.subscription, key.partition)
            found = tx.db.execute(LANE, where).get
            token, recovered = 1, 0
            if found is not None:
                owner, token, boot, until, reach = found
                if owner not in (None, self._owner) and self._lives(owner, boot, until):
                    return None
                token += 1
                if owner is not None:
                    if not alive(owner):
                        _judge(tx, owner)
                    recovered = _recover(tx, key, _in_flight(tx, key, reach, match), blamed=False)
            following = _cursor(tx, key)
            rows = _rows(tx.db, where)
            reach = following if any(row.alone for row in rows) else following + window
            until = self._now() + self._lease_us
            tx.db.execute(TAKE_LANE, (*where, self._owner, token, self._clock.boot_id(), until, reach))
            return LaneState(token, following, reach, rows, recovered)

        return await self._log.transact(take)

    def _lives(self, owner: str, boot: str, until_us: int) -> bool:
        return boot == self._clock.boot_id() and until_us > self._now() and alive(owner)

    async def release(self, key: LaneKey, token: int) -> None:
        """Give a lane back; what is still marked as running waits for the next owner. A lost lease is no error."""

        def free(tx: Transaction) -> None:
            where = (tx.stream(key.stream).stream_id, key.subscription, key.partition)
            tx.db.execute(FREE_LANE, (*where, self._owner, token))

        await self._log.transact(free)

    async def recover(self, tenant: str, match: Callable[[str, str], Callable[[str], bool]]) -> int:
        """Free every lane of a dead process and return how many events were in flight there.

        ``match`` says by subscription and stream which topics count.
        """

        def free(tx: Transaction) -> int:
            names = dict(tx.db.execute("SELECT stream_id, name FROM stream_registry WHERE NOT deleted"))
            lanes: dict[str, list[tuple[LaneKey, _InFlight]]] = {}
            for stream_id, consumer, partition, owner, boot, reach in list(tx.db.execute(OWNED_LANES)):
                name = names.get(stream_id, "")
                if not name.startswith(f"{tenant}.") or (boot == self._clock.boot_id() and alive(owner)):
                    continue
                key = LaneKey(consumer, name, partition)
                lanes.setdefault(owner, []).append((key, _in_flight(tx, key, reach, match(consumer, name))))
            recovered = 0
            for owner, theirs in lanes.items():
                _judge(tx, owner)
                # When one event was in flight it is the one that did it; of several, nobody knows which.
                blamed = sum(len(flight.found) + len(flight.running) for _, flight in theirs) == 1
                for key, flight in theirs:
                    recovered += _recover(tx, key, flight, blamed=blamed)
                    tx.db.execute(FREE_DEAD, (tx.stream(key.stream).stream_id, key.subscription, key.partition))
            return recovered

        return await self._log.transact(free)

    # --- settling ---

    async def settle(self, key: LaneKey, token: int, settlement: Settlement) -> list[Receipt]:
        """Write everything a lane has to say in one transaction; raises ``LeaseLost`` when it is no longer ours.

        Dead letters are appended to their streams in the same transaction; their receipts are returned in order.
        """

        def write(tx: Transaction) -> list[Receipt]:
            stream_id = tx.stream(key.stream).stream_id
            until = self._now() + self._lease_us
            tx.db.execute(
                KEEP_LANE,
                (until, settlement.reach, stream_id, key.subscription, key.partition, self._owner, token),
            )
            if tx.db.changes() != 1:
                message = f"another process has taken over {key.subscription} on {key.stream}/{key.partition}"
                raise LeaseLost(message)
            receipts: list[Receipt] = []
            for row, stream, draft in settlement.dead:
                receipt = _bury(tx, key, row, stream, draft)
                receipts.append(receipt)
                row.status, row.alone = FAILED, 0
                row.dead_stream, row.dead_offset = receipt.stream, receipt.offset
                _save(tx, key, stream_id, row)
            for row in settlement.rows:
                _save(tx, key, stream_id, row)
            if settlement.next_offset > 0:
                tx.move(key.stream, key.subscription, committed, key.partition, settlement.next_offset - 1)
            return receipts

        return await self._log.transact(write, grows=bool(settlement.dead))

    async def look(self, key: LaneKey) -> tuple[int | None, list[Row]]:
        """Return the token under which the lane is worked on, and the rows that wait or run, by offset."""

        def look(db: apsw.Connection) -> tuple[int | None, list[Row]]:
            stream_id = db.execute("SELECT stream_id FROM stream_registry WHERE name = ?", (key.stream,)).get
            where = (stream_id, key.subscription, key.partition)
            lane = db.execute(LANE, where).get
            return (lane[1] if lane is not None else None), _rows(db, where)

        return await self._log.store.read(look)


class _InFlight(NamedTuple):
    """What a dead owner may have started: events without a row, rows that ran, and where the range ends."""

    found: list[tuple[int, str | None]]
    running: list[Row]
    end: int


def _in_flight(tx: Transaction, key: LaneKey, reach: int, match: Callable[[str], bool]) -> _InFlight:
    stream_id = tx.stream(key.stream).stream_id
    where = (stream_id, key.subscription, key.partition)
    start = _cursor(tx, key)
    end = min(reach, tx.head(key.stream, key.partition))
    known = {offset for (offset,) in tx.db.execute(KNOWN, (*where, start))}
    found = [
        (offset, event_key)
        for offset, topic, event_key in tx.db.execute(IN_RANGE, (stream_id, key.partition, start, end))
        if offset not in known and match(topic)
    ]
    return _InFlight(found, [row for row in _rows(tx.db, where) if row.status == PROCESSING], end)


def _judge(tx: Transaction, owner: str) -> None:
    """Of several that a dead process was trying, blame the one it began last: the others had run for a while.

    A slow killer would be acquitted again and again in favour of whatever came after it, so that has an end.
    """
    for *where, alone in list(tx.db.execute(SUSPECTS, (owner,)))[:-1]:
        if alone <= ACQUITTALS_MAX:
            tx.db.execute(ACQUIT, where)


def _recover(tx: Transaction, key: LaneKey, flight: _InFlight, *, blamed: bool) -> int:
    """Turn what a dead owner may have started into rows that are tried one at a time; return how many."""
    stream_id = tx.stream(key.stream).stream_id
    acquitted = dict(tx.db.execute(ACQUITTED, (stream_id, key.subscription, key.partition)))
    for row in flight.running:
        if row.offset in acquitted or not (row.alone or blamed):
            row.attempt = max(
                row.attempt - 1, 0
            )  # it failed that often before; this time it need not have been the one
        row.status, row.alone = WAITING, acquitted.get(row.offset, max(row.alone, 1))
        _save(tx, key, stream_id, row)
    for offset, event_key in flight.found:
        _save(tx, key, stream_id, Row(offset=offset, attempt=int(blamed), alone=1, key=event_key))
    if flight.end > _cursor(tx, key):
        tx.move(key.stream, key.subscription, committed, key.partition, flight.end - 1)
    return len(flight.found) + len(flight.running)


def _bury(tx: Transaction, key: LaneKey, row: Row, stream: str, draft: Draft) -> Receipt:
    """Append a dead letter, unless the one that this event has for the subscription is still open."""
    where = (tx.stream(key.stream).stream_id, key.partition, row.offset, key.subscription)
    letter = tx.db.execute(LETTER, where).fetchone()
    if letter is not None and letter[0] is not None:
        return Receipt(letter[0], 0, letter[1], duplicate=True)
    for death in count(row.replays):  # an earlier life of the subscription may have left letters of its own
        try:
            receipt = tx.append(stream, [msgspec.structs.replace(draft, native_id=f"{draft.native_id}:{death}")])[0]
        except IdempotencyConflict:
            continue
        if not receipt.duplicate:
            return receipt
    raise AssertionError  # pragma: no cover - the numbers do not end


def _cursor(tx: Transaction, key: LaneKey) -> int:
    query = "SELECT next_offset FROM cursors WHERE stream_id = ? AND consumer = ? AND partition = ?"
    found = tx.db.execute(query, (tx.stream(key.stream).stream_id, key.subscription, key.partition)).get
    if found is None:
        raise no_consumer(key.stream, key.subscription)
    return int(found)


def _rows(db: apsw.Connection, where: tuple[int, str, int]) -> list[Row]:
    names = Row.__struct_fields__
    return [Row(**dict(zip(names, values, strict=True))) for values in db.execute(ROWS, where)]


def _save(tx: Transaction, key: LaneKey, stream_id: int, row: Row) -> None:
    values: tuple[Any, ...] = (
        stream_id, key.partition, row.offset, key.subscription, row.status, row.attempt, row.alone, row.replays,
        row.key, row.boot, row.due_us, row.due_at_us, row.error, row.dead_stream, row.dead_offset, tx.now_us,
    )  # fmt: skip
    tx.db.execute(SAVE_ROW, values)


def alive(owner: str) -> bool:
    """Say whether the process that calls itself ``pid.start.space.random`` may still run on this machine.

    A pid means nothing in another container; of a process there only its lease tells.
    """
    pid, start, space = (*owner.split("."), "", "")[:3]
    if space != _pid_space():
        return space.isdigit()
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, OverflowError, ValueError):
        return False
    return started_at(int(pid)) in ("", start)


def _pid_space() -> str:
    """Return the number of this process's pid namespace, or 0 where there are none."""
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return "0"


def started_at(pid: int) -> str:
    """Return when a process started, in the kernel's ticks: a pid alone may belong to another process by now.

    A process that has ended and was not waited for yet gives a dash, where there is nothing to read an empty string.
    """
    try:
        facts = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        return "-" if facts[0] in ("Z", "X") else facts[19]
    except (OSError, IndexError):
        return ""


def new_owner(clock: Clock) -> str:
    """Return a name for this process that nobody else ever has."""
    return f"{os.getpid()}.{started_at(os.getpid())}.{_pid_space()}.{clock.new_id()[:12]}"
