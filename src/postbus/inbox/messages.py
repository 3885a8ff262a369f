"""Direct messages and timers: what reaches an inbox without a subscription."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from postbus.envelope import draft, parse_instant
from postbus.inbox.agents import MESSAGES, find_agent
from postbus.inbox.door import Match, put_items
from postbus.model import Conflict, Invalid, NotFound
from postbus.schedule import schedule
from postbus.topics import check_id

if TYPE_CHECKING:
    import apsw

    from postbus.inbox.signals import Signals
    from postbus.log.sqlite import SqliteLog, Transaction
    from postbus.model import Draft, Receipt

__all__ = ["Messages", "Timer", "Timers", "next_fire"]

TOPIC = "inbox.message"
EVERY_S_MIN = 60
US = 1_000_000
NEVER = "the timer would never fire: `until` is over before its first time"

TIMER = "SELECT timer, agent, settings, due_at_us, fired, created_at_us FROM timer_rows WHERE tenant = ? AND timer = ?"
TIMERS = """
    SELECT timer, agent, settings, due_at_us, fired, created_at_us FROM timer_rows
    WHERE tenant = ? AND (?2 IS NULL OR agent = ?2) ORDER BY timer
"""
DUE = """
    SELECT tenant, timer, agent, settings, due_at_us, created_at_us FROM timer_rows
    WHERE due_at_us <= ? ORDER BY due_at_us LIMIT 100
"""
NEXT_DUE = "SELECT min(due_at_us) FROM timer_rows WHERE due_at_us IS NOT NULL"
ADD = "INSERT INTO timer_rows VALUES (?, ?, ?, ?, ?, 0, ?)"
FIRED = "UPDATE timer_rows SET due_at_us = ?, fired = fired + 1 WHERE tenant = ? AND timer = ? AND due_at_us = ?"
FORGET = "DELETE FROM timer_rows WHERE tenant = ? AND timer = ?"
MOVE = "UPDATE timer_rows SET due_at_us = ? WHERE tenant = ? AND timer = ?"


class Messages:
    """Direct messages to agents."""

    def __init__(self, log: SqliteLog, signals: Signals) -> None:
        self._log = log
        self._signals = signals

    async def send(
        self, tenant: str, agent: str, message: Any, *, sender: str = "operator", **facts: Any
    ) -> tuple[str, Receipt]:
        """Put a message into an agent's inbox; return the item's id and the receipt of its event.

        Raises ``Invalid`` for a blank message, ``NotFound`` for an unknown agent.
        """
        if message is None or (isinstance(message, str) and not message.strip()):
            raise Invalid("a message is text that is not blank, or another JSON value")
        await self._log.store.read(lambda db: find_agent(db, tenant, agent))
        made = draft(TOPIC, sender, message, key=agent[:200], **facts)
        stream = await self.stream(tenant)
        number, receipt, sequence = await self._log.transact(
            lambda tx: put_message(tx, tenant, agent, stream, made), grows=True
        )
        self._signals.changed([number])
        return f"itm_{sequence:x}", receipt

    async def stream(self, tenant: str) -> str:
        """Return the stream of a tenant's direct messages; made when it is not there."""
        name = f"{tenant}.{MESSAGES}"
        await self._log.ensure_stream(name)
        return name


def put_message(tx: Transaction, tenant: str, agent: str, stream: str, made: Draft) -> tuple[int, Receipt, int]:
    """Append a message and its item; return the agent's number, the receipt and the item's sequence."""
    found = find_agent(tx.db, tenant, agent)
    receipt = tx.append(stream, [made])[0]
    stream_id = tx.stream(stream).stream_id
    put_items(tx, stream_id, receipt.partition, [Match(receipt.offset, found.no, (), "direct message")])
    query = 'SELECT sequence FROM inbox_rows WHERE stream_id = ? AND partition = ? AND "offset" = ? AND agent_no = ?'
    sequence = tx.db.execute(query, (stream_id, receipt.partition, receipt.offset, found.no)).get
    return found.no, receipt, int(sequence or 0)


class Timer(msgspec.Struct, frozen=True, kw_only=True):
    """A message to come: once ``at`` an instant, ``every`` so many seconds, or by ``cron`` in a ``zone``."""

    id: str
    agent: str
    message: Any
    at: str | None = None
    every: float | None = None
    cron: str | None = None
    zone: str = "UTC"
    until: str | None = None
    due_at_us: int | None = None
    fired: int = 0
    created_at_us: int = 0


class Timers:
    """The timers of all tenants. Each fire is one message, however often the process dies around it."""

    def __init__(self, log: SqliteLog, messages: Messages, signals: Signals) -> None:
        self._log = log
        self._messages = messages
        self._signals = signals

    async def add(self, tenant: str, timer: Timer) -> Timer:
        """Add a timer; raises ``Invalid``, ``NotFound`` for an unknown agent, ``Conflict`` for an id that is taken."""
        check_id(timer.id, "timer")
        now = self._log.store.clock.now_us()
        due = _check(timer, now)
        draft(TOPIC, "timer", timer.message, key=timer.agent[:200])
        kept = msgspec.structs.replace(timer, due_at_us=None, fired=0, created_at_us=0)
        text = msgspec.json.encode(kept).decode()

        def write(tx: Transaction) -> Timer:
            find_agent(tx.db, tenant, timer.agent)
            if tx.db.execute(TIMER, (tenant, timer.id)).fetchone() is not None:
                raise Conflict(f"{tenant} has a timer {timer.id}", hint="use another id, or remove that one first")
            tx.db.execute(ADD, (tenant, timer.id, timer.agent, text, due, tx.now_us))
            return _timer(tx.db.execute(TIMER, (tenant, timer.id)).fetchone())

        return await self._log.transact(write, grows=True)

    async def all(self, tenant: str, agent: str | None = None) -> list[Timer]:
        """Return the timers of a tenant, or of one agent, by id."""
        return await self._log.store.read(lambda db: [_timer(row) for row in db.execute(TIMERS, (tenant, agent))])

    async def get(self, tenant: str, name: str) -> Timer:
        """Return a timer; raises ``NotFound``."""
        return await self._log.store.read(lambda db: _find(db, tenant, name))

    async def remove(self, tenant: str, name: str) -> None:
        """Remove a timer; raises ``NotFound``."""
        if not await self._log.transact(lambda tx: tx.run(FORGET, (tenant, name))):
            raise _no_timer(tenant, name)

    async def pause(self, tenant: str, name: str, *, resume: bool = False) -> Timer:
        """Let a timer rest, or go on with its next time from now."""

        def write(tx: Transaction) -> Timer:
            found = _find(tx.db, tenant, name)
            due = _resumed(found, tx.now_us) if resume else None
            tx.db.execute(MOVE, (due, tenant, name))
            return _find(tx.db, tenant, name)

        return await self._log.transact(write)

    async def next_due_us(self) -> int | None:
        """Return when the next timer comes due; None when none waits."""
        return await self._log.store.read(lambda db: db.execute(NEXT_DUE).get)

    async def fire_due(self) -> int:
        """Send the messages of timers whose time has come; return how many.

        A timer that was due several times while nothing ran fires once and goes on with its next time from now.
        """
        now = self._log.store.clock.now_us()
        fired = 0
        for row in await self._log.store.read(lambda db: list(db.execute(DUE, (now,)))):
            number = await self._fire(now, *row)
            if number is not None:
                fired += 1
                self._signals.changed([number])
        return fired

    async def _fire(
        self, now: int, tenant: str, name: str, agent: str, settings: str, at_us: int, created_at_us: int
    ) -> int | None:
        """Send one message; return the agent's number, or None when another process has sent it."""
        timer = msgspec.json.decode(settings, type=Timer)
        stream = await self._messages.stream(tenant)
        following = next_fire(timer, max(now, at_us), at_us)
        made = draft(
            TOPIC,
            f"timer.{name}"[:200],
            timer.message,
            key=agent[:200],
            native_id=f"timer:{name}:{created_at_us}:{at_us}",
            occurred_at=datetime.fromtimestamp(at_us / US, UTC),
        )

        def write(tx: Transaction) -> int | None:
            if not tx.run(FIRED, (following, tenant, name, at_us)):
                return None
            return put_message(tx, tenant, agent, stream, made)[0]

        return await self._log.transact(write, grows=True)


def next_fire(timer: Timer, after_us: int, base_us: int) -> int | None:
    """Return the first time after an instant at which a timer fires; an interval never drifts from its base."""
    due = schedule(timer.at, timer.every, timer.cron, timer.zone, base_us)(after_us)
    if due is not None and timer.until is not None and due > parse_instant(timer.until):
        return None
    return due


def _resumed(timer: Timer, now_us: int) -> int | None:
    """Return when a timer goes on; one that was to fire once, and has not, is not forgotten."""
    if timer.at is not None and not timer.fired:
        return parse_instant(timer.at)
    return next_fire(timer, now_us, timer.created_at_us)


def _check(timer: Timer, now_us: int) -> int:
    if timer.message is None or (isinstance(timer.message, str) and not timer.message.strip()):
        raise Invalid("a timer's message is text that is not blank, or another JSON value")
    if (timer.at is not None) + (timer.every is not None) + (timer.cron is not None) != 1:
        raise Invalid("a timer has exactly one of `at`, `every` and `cron`")
    if timer.until is not None:
        parse_instant(timer.until)
    if timer.at is not None:
        moment = parse_instant(timer.at)  # an instant that is over fires at once
        if timer.until is not None and moment > parse_instant(timer.until):
            raise Invalid(NEVER)
        return moment
    if timer.every is not None and not EVERY_S_MIN <= timer.every <= timedelta(days=3660).total_seconds():
        raise Invalid(f"`every` is at least {EVERY_S_MIN} seconds, not {timer.every:g}")
    due = next_fire(timer, now_us, now_us)
    if due is None:
        raise Invalid(NEVER)
    return due


def _timer(row: Any) -> Timer:
    _, _, settings, due, fired, created = row
    found = msgspec.json.decode(settings, type=Timer)
    return msgspec.structs.replace(found, due_at_us=due, fired=fired, created_at_us=created)


def _find(db: apsw.Connection, tenant: str, name: str) -> Timer:
    row = db.execute(TIMER, (tenant, name)).fetchone()
    if row is None:
        raise _no_timer(tenant, name)
    return _timer(row)


def _no_timer(tenant: str, name: str) -> NotFound:
    return NotFound(f"there is no timer {name} of {tenant}", hint="list them with `postbus timers list`")
