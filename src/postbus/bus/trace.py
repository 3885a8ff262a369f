"""The story of a correlation: which event led to which, how long each step took, and what became of it where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from postbus.bus.context import CAUSATION
from postbus.bus.requeue import parse_address
from postbus.model import DeliveryStatus, Event, Invalid, NotFound, event_id

if TYPE_CHECKING:
    import apsw

    from postbus.log.sqlite import SqliteLog

__all__ = ["Step", "Trace", "TracedDelivery", "trace", "trees"]

STEPS_MAX = 5_000

NUMBER = """
    SELECT e.seq, e.stream_id FROM events e JOIN stream_registry s USING (stream_id)
    WHERE s.name = ? AND e.partition = ? AND e."offset" = ?
"""
STATUS = "SELECT status FROM event_journal WHERE id = ?"
DELIVERIES = """
    SELECT t.consumer, t.status, IFNULL(d.attempt, t.status = 'done'), IFNULL(d.replays, 0), t.error, t.processed_at_us,
           d.dead_stream, d.dead_offset
    FROM event_statuses t LEFT JOIN delivery_rows d USING (stream_id, partition, "offset", consumer)
    WHERE t.stream_id = ? AND t.partition = ? AND t."offset" = ? ORDER BY t.consumer
"""


class TracedDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one event for one subscription. ``took_us`` runs from the append to the end of its handling."""

    subscription: str
    status: DeliveryStatus
    attempts: int
    replays: int
    error: str | None
    took_us: int | None
    dead_letter: str | None


class Step(msgspec.Struct, kw_only=True):
    """One event of a trace. ``after_us`` is the time since the first event of the trace was appended."""

    event: Event
    journal_id: int
    status: DeliveryStatus
    after_us: int
    caused_by: str | None
    deliveries: list[TracedDelivery]
    children: list[Step] = []


class Trace(msgspec.Struct, kw_only=True):
    """The events of one correlation as trees: each step below the event whose handler published it."""

    correlation_id: str
    roots: list[Step]
    events: int
    left_out: int

    @property
    def took_us(self) -> int:
        """From the first event's append until the last step was appended or handled."""
        ends = [step.after_us + (d.took_us or 0) for step in self.steps() for d in (*step.deliveries, None) if d]
        return max([*ends, *(step.after_us for step in self.steps())], default=0)

    def steps(self) -> list[Step]:
        """Return all steps, parents before their children."""
        found: list[Step] = []
        waiting = self.roots[::-1]
        while waiting:
            step = waiting.pop()
            found.append(step)
            waiting += step.children[::-1]
        return found


async def trace(log: SqliteLog, name: str, tenant: str) -> Trace:
    """Return the trace of a correlation id, or of an event's address; raises ``NotFound`` when nothing has it.

    An event without a correlation gives its address as the correlation to what derives from it, so it is the root of
    that trace. Dead letters are no steps of their own: they are named where the event died.
    """
    correlation_id = name
    start = await _at(log, name)
    if start is not None and start.correlation_id is not None:
        correlation_id = start.correlation_id
        start = await _at(log, correlation_id)
    found = await log.projections.by_correlation(correlation_id)
    events = [e for e in found if e.stream.startswith(f"{tenant}.") and not e.stream.endswith("-dlq")]
    if start is not None and start.stream.startswith(f"{tenant}.") and start.id not in {event.id for event in events}:
        events.insert(0, start)
    if not events:
        message = f"no event has the correlation {name}"
        raise NotFound(message, hint="give a correlation id or an event's address; see `postbus events`")
    chosen = events[:STEPS_MAX]
    first_us = min(event.created_at_us for event in chosen)
    steps = await log.store.read(lambda db: [_step(db, event, first_us) for event in chosen])
    return Trace(
        correlation_id=correlation_id,
        roots=trees([step for step in steps if step is not None]),
        events=len(events),
        left_out=len(events) - len(chosen),
    )


async def _at(log: SqliteLog, address: str) -> Event | None:
    """Return the event at an address, or None when the text is no address or nothing is there."""
    try:
        stream, partition, offset = parse_address(address)
        found = await log.fetch(stream, partition, offset, 1)
    except (Invalid, NotFound):
        return None
    return found[0] if found and found[0].offset == offset else None


def _step(db: apsw.Connection, event: Event, first_us: int) -> Step | None:
    row = db.execute(NUMBER, (event.stream, event.partition, event.offset)).get
    if row is None:
        return None  # removed by retention since it was found
    seq, stream_id = row
    deliveries = [
        TracedDelivery(
            subscription=subscription,
            status=DeliveryStatus(status),
            attempts=attempts,
            replays=replays,
            error=error,
            took_us=None if processed_us is None else max(processed_us - event.created_at_us, 0),
            dead_letter=None if dead_stream is None else event_id(dead_stream, 0, dead_offset),
        )
        for subscription, status, attempts, replays, error, processed_us, dead_stream, dead_offset in db.execute(
            DELIVERIES, (stream_id, event.partition, event.offset)
        )
    ]
    return Step(
        event=event,
        journal_id=seq,
        status=DeliveryStatus(db.execute(STATUS, (seq,)).get),
        after_us=event.created_at_us - first_us,
        caused_by=event.headers.get(CAUSATION),
        deliveries=deliveries,
    )


def trees(steps: list[Step]) -> list[Step]:
    """Hang each step below the one that caused it; a cause that is not there makes it a root."""
    known: dict[str, Step] = {}
    roots: list[Step] = []
    for step in steps:  # in arrival order: a cause comes before what it caused
        parent = known.get(step.caused_by or "")
        (roots if parent is None else parent.children).append(step)
        known[step.event.id] = step
    return roots
