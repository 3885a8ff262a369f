"""Targets on disk: who may be woken now, on record before it is done, and what came of it.

Each change is one transaction, so that of several processes on one store exactly one makes a wake. A wake that was
begun and whose end nobody recorded counts as made for the length of a lease; if the agent has shown no sign by then, it
is made again under the same id.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from postbus.bus.registry import JOURNAL
from postbus.delivery.backoff import retry_delay_s
from postbus.delivery.table import alive
from postbus.envelope import draft
from postbus.inbox.targets import Target, decode_targets
from postbus.inbox.wakes.marks import (
    Mark,
    News,
    count_news,
    crossed,
    first_news,
    hand_out,
    has_answered,
    mark_at,
    news_above,
    unacked,
)
from postbus.inbox.wakes.records import Attempt, Avoided, Failure, Sight, State, TargetRow
from postbus.model import LeaseLost, NotFound, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

    import apsw

    from postbus.clock import Clock
    from postbus.log.sqlite import SqliteLog, Transaction

__all__ = ["WakeTable", "reachable"]

logger = logging.getLogger("postbus.inbox.wakes")

BACKOFF = RetryPolicy(backoff_s=5.0, backoff_s_max=300.0, jitter=0.2)
FAILURES_MAX = 12
RETRY_AFTER_S_MAX = 3600.0
CLAIM_S = 20.0
ITEMS_SENT_MAX = 20
KEPT_US = 30 * 86_400 * 1_000_000
OFFLINE = "system.agent.offline"
SOURCE = "postbus:wakes"

AGENT = """
    SELECT tenant, agent, settings, last_sequence, acked_floor, removed_at_us IS NOT NULL
    FROM agent_registry WHERE agent_no = ?
"""
# Agents that may have something new, or whose target is held by something that ends.
EVERYONE = """
    SELECT DISTINCT a.agent_no FROM agent_registry a JOIN json_each(a.settings, '$.targets') t
    LEFT JOIN wake_targets w ON w.agent_no = a.agent_no AND w.target = IFNULL(t.value ->> 'id', 'default')
    WHERE a.removed_at_us IS NULL AND a.last_sequence > 0 AND t.value ->> 'kind' <> 'pull'
      AND (w.target IS NULL OR w.announced < a.last_sequence OR w.hidden <> '[]'
           OR w.state NOT IN ('idle', 'offline'))
"""
ROW = """
    SELECT place, state, why, announced, hidden, short, failures, activation, answered, owner, token, boot, until_us,
           until_at_us
    FROM wake_targets WHERE agent_no = ? AND target = ?
"""
SAVE = "INSERT OR REPLACE INTO wake_targets VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
ACTIVATION = """
    SELECT outcome, through, hidden, attempts, created_at_us FROM activation_rows WHERE activation = ?
"""
BEGIN = "INSERT INTO activation_rows VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1, 'sending', NULL, ?, ?, NULL)"
AGAIN = """
    UPDATE activation_rows SET attempts = attempts + 1, outcome = 'sending', new_item_count = ?, sent_at_us = ?,
           ended_at_us = NULL
    WHERE activation = ?
"""
END = "UPDATE activation_rows SET outcome = ?, error = ?, ended_at_us = ? WHERE activation = ?"
PRUNE = "DELETE FROM activation_rows WHERE agent_no = ? AND target = ? AND created_at_us < ?"
COUNT = """
    INSERT INTO wake_counters VALUES (?, ?, ?, ?)
    ON CONFLICT (agent_no, target, name) DO UPDATE SET value = value + excluded.value
"""


class _Agent(NamedTuple):
    tenant: str
    id: str
    settings: str
    last: int
    floor: int
    removed: int

    def target(self, name: str) -> Target | None:
        """Return the target of that id, if it is one that is woken."""
        return next((one for one in decode_targets(self.settings) if one.id == name and one.kind != "pull"), None)


class WakeTable:
    """Reads and writes targets for one process, ``owner``."""

    def __init__(self, log: SqliteLog, clock: Clock, owner: str) -> None:
        self._log = log
        self._clock = clock
        self._owner = owner

    # --- time that jumps of the wall clock do not touch ---

    def now_us(self) -> int:
        """Return monotonic time in microseconds."""
        return round(self._clock.monotonic_s() * 1e6)

    def until_us(self, row: TargetRow, target: Target) -> int:
        """Return until when a target is held, on the monotonic clock; 0 when nothing holds it.

        After a reboot the wall clock tells, unless it was set back so far that it cannot be right.
        """
        if row.state not in (State.SENDING, State.LEASED, State.RETRYING):
            return 0
        if row.boot == self._clock.boot_id():
            return 0 if row.state is State.SENDING and not alive(row.owner or "") else row.until_us
        if row.state is State.SENDING:
            return 0
        left = row.until_at_us - self._clock.now_us()
        return self.now_us() + left if 0 < left <= max(target.lease_s, RETRY_AFTER_S_MAX) * 1e6 else 0

    def _hold(self, row: TargetRow, state: State, seconds: float) -> None:
        row.state = state
        row.boot = self._clock.boot_id()
        row.until_us = self.now_us() + round(seconds * 1e6)
        row.until_at_us = self._clock.now_us() + round(seconds * 1e6)

    # --- looking ---

    async def everyone(self) -> list[int]:
        """Return the agents that are worth a look."""
        return await self._log.store.read(lambda db: [number for (number,) in db.execute(EVERYONE)])

    async def look(self, agents: Iterable[int]) -> list[Sight]:
        """Return how the targets of these agents stand."""
        numbers = list(agents)
        return await self._log.store.read(lambda db: [sight for number in numbers for sight in self._look(db, number)])

    def _look(self, db: apsw.Connection, agent_no: int) -> list[Sight]:
        agent = _agent(db, agent_no)
        if agent is None or agent.removed:
            return []
        sights = []
        for target in decode_targets(agent.settings):
            if target.kind == "pull":
                continue
            row = load(db, agent_no, target)
            news = 0
            told = row.mark.through >= agent.last and not row.mark.hidden
            held = row.state in (State.OFFLINE, State.SENDING)
            if not told and not held and not _still_short(db, agent_no, agent, target, row):
                news = count_news(db, agent_no, row.mark, agent.floor, target.buffer_items)
            sights.append(Sight(agent_no, target, row.state, self.until_us(row, target), news))
        return sights

    # --- a wake ---

    async def begin(self, agent_no: int, name: str) -> Attempt | None:
        """Put a wake on record if there is something to wake for right now; else note why not, and return None."""
        return await self._log.transact(lambda tx: self._begin(tx, agent_no, name), grows=True)

    def _begin(self, tx: Transaction, agent_no: int, name: str) -> Attempt | None:
        found = self._free(tx, agent_no, name)
        if found is None:
            return None
        agent, target, row = found
        before = _activation(tx, row)
        if before is not None and before.outcome == "unknown" and has_answered(tx.db, agent_no, row.mark, before.mark):
            _arrived(tx, agent_no, name, row, before.mark, "answered")
        news = news_above(tx.db, agent_no, row.mark, agent.floor)
        if not news.items:
            _nothing(tx, agent_no, name, row, agent)
        elif _short(tx.db, agent_no, agent, target):
            _too_few(tx, agent_no, name, row, agent)
        else:
            return self._record(tx, agent_no, agent, target, row, news)
        return None

    def _free(self, tx: Transaction, agent_no: int, name: str) -> tuple[_Agent, Target, TargetRow] | None:
        """Return a target that nothing holds; None when it is gone, offline, being woken, or to be left alone."""
        agent = _agent(tx.db, agent_no)
        if agent is not None and agent.removed:
            _removed(tx, agent_no, name, agent)
            return None
        target = agent.target(name) if agent is not None else None
        if agent is None or target is None:
            return None
        row = load(tx.db, agent_no, target)
        if row.state is State.OFFLINE or self.until_us(row, target) > self.now_us():
            return None
        if row.state is State.SENDING:
            self._presume(tx, agent_no, target, row)
            return None
        return agent, target, row

    def _record(
        self, tx: Transaction, agent_no: int, agent: _Agent, target: Target, row: TargetRow, news: News
    ) -> Attempt:
        """Write down that this wake is being made: again under its id if it announces nothing more than before."""
        before = _activation(tx, row)
        number, created = 1, tx.now_us
        if before is not None and not count_news(tx.db, agent_no, before.mark, agent.floor, 1):
            number, created = before.attempts + 1, before.created_at_us
            tx.db.execute(AGAIN, (news.items, tx.now_us, row.activation))
        else:
            if row.activation is not None:
                tx.db.execute(END, ("replaced", row.why, tx.now_us, row.activation))
            row.activation = self._clock.new_id()
            mark = mark_at(tx.db, agent_no, row.mark, agent.floor, agent.last)
            facts = (*news, mark.through, mark.hidden_json, tx.now_us, tx.now_us)
            tx.db.execute(BEGIN, (row.activation, agent_no, target.id, *facts))
        sequences: tuple[int, ...] = ()
        if target.mode == "activation_with_items":
            sequences = first_news(tx.db, agent_no, row.mark, agent.floor, ITEMS_SENT_MAX)
        self._hold(row, State.SENDING, target.timeout_s + CLAIM_S)
        row.owner, row.token, row.answered = self._owner, row.token + 1, 0
        save(tx, agent_no, target.id, row)
        assert row.activation is not None  # noqa: S101 - set above
        return Attempt(
            row.activation,
            row.token,
            agent_no,
            agent.tenant,
            agent.id,
            target,
            number,
            *news,
            sequences,
            created,
        )

    def _presume(self, tx: Transaction, agent_no: int, target: Target, row: TargetRow) -> None:
        """Whoever was making this wake is gone. It may have arrived: leave the agent alone for a lease."""
        self._hold(row, State.LEASED, target.lease_s)
        row.owner = None
        tx.db.execute(END, ("unknown", "the process that made it ended", tx.now_us, row.activation))
        if row.answered:
            row.state = State.IDLE
        save(tx, agent_no, target.id, row)

    async def arrived(self, attempt: Attempt) -> None:
        """Note that a wake arrived: its items are announced, the target is leased. Raises ``LeaseLost``."""

        def write(tx: Transaction) -> None:
            row, known = self._held(tx, attempt)
            answered, row.failures, row.why = row.answered, 0, None
            hand_out(tx.db, attempt.agent_no, row.mark, known.mark, tx.now_us)
            target = attempt.target
            _count(tx, attempt.agent_no, target.id, f"avoided.{Avoided.COALESCED}", attempt.new_item_count - 1)
            _arrived(tx, attempt.agent_no, target.id, row, known.mark, "woken")
            row.state = State.IDLE
            if not answered and target.lease_s > 0:
                self._hold(row, State.LEASED, target.lease_s)
            save(tx, attempt.agent_no, target.id, row)
            tx.db.execute(PRUNE, (attempt.agent_no, target.id, tx.now_us - KEPT_US))

        await self._log.transact(write)

    async def failed(self, attempt: Attempt, failure: Failure) -> None:
        """Note that a wake did not arrive: it is tried again, or the target goes offline. Raises ``LeaseLost``."""

        def write(tx: Transaction) -> str | None:
            row, _ = self._held(tx, attempt)
            row.owner, row.why, row.failures = None, failure.message, row.failures + 1
            tx.db.execute(END, ("failed", failure.message, tx.now_us, attempt.activation))
            _count(tx, attempt.agent_no, attempt.target.id, "failures", 1)
            gone = failure.permanent or row.failures >= FAILURES_MAX
            if gone:
                row.state = State.OFFLINE
            else:
                asked = min(failure.retry_after_s, RETRY_AFTER_S_MAX)
                self._hold(row, State.RETRYING, max(retry_delay_s(BACKOFF, row.failures), asked))
            save(tx, attempt.agent_no, attempt.target.id, row)
            if gone:
                _announce_offline(tx, attempt, row)
            return f"it failed {row.failures} times in a row; the last time: {failure.message}" if gone else None

        offline = await self._log.transact(write)
        if offline is not None:
            logger.error(
                "agent %s of %s is no longer woken at %s: %s", attempt.agent, attempt.tenant, attempt.target.id, offline
            )

    def _held(self, tx: Transaction, attempt: Attempt) -> tuple[TargetRow, _Activation]:
        row = load(tx.db, attempt.agent_no, attempt.target)
        known = _activation(tx, row)
        if known is None or (row.state, row.owner, row.token) != (State.SENDING, self._owner, attempt.token):
            raise LeaseLost(f"wake {attempt.activation} of {attempt.agent} was taken over by another process")
        return row, known


# --- rows -------------------------------------------------------------------------------------------------------------


class _Activation(NamedTuple):
    outcome: str
    mark: Mark
    attempts: int
    created_at_us: int


def _agent(db: apsw.Connection, agent_no: int) -> _Agent | None:
    row = db.execute(AGENT, (agent_no,)).fetchone()
    return None if row is None else _Agent(*row)


def load(db: apsw.Connection, agent_no: int, target: Target) -> TargetRow:
    """Return a target's row; one that has none, or was offline at another place, is idle."""
    found = db.execute(ROW, (agent_no, target.id)).fetchone()
    if found is None:
        return TargetRow(place=target.place, mark=Mark())
    place, state, why, announced, hidden, *rest = found
    mark = Mark(announced, msgspec.json.decode(hidden, type=tuple[int, ...]))
    names = TargetRow.__struct_fields__[4:]
    row = TargetRow(place=place, state=State(state), why=why, mark=mark, **dict(zip(names, rest, strict=True)))
    if place != target.place:
        row.place, row.failures, row.why = target.place, 0, None
        if row.state in (State.OFFLINE, State.RETRYING):
            row.state = State.IDLE
    return row


def save(tx: Transaction, agent_no: int, name: str, row: TargetRow) -> None:
    """Write a target's row."""
    values: tuple[Any, ...] = (
        agent_no, name, row.place, row.state, row.why, row.mark.through, row.mark.hidden_json, row.short, row.failures,
        row.activation, row.answered, row.owner, row.token, row.boot, row.until_us, row.until_at_us,
    )  # fmt: skip
    tx.db.execute(SAVE, values)


def reachable(db: apsw.Connection, agent_no: int, targets: tuple[Target, ...]) -> bool:
    """Say whether an agent has a target that is not offline; one that pulls always has."""
    return any(target.kind == "pull" or load(db, agent_no, target).state is not State.OFFLINE for target in targets)


def _activation(tx: Transaction, row: TargetRow) -> _Activation | None:
    found = tx.db.execute(ACTIVATION, (row.activation,)).fetchone() if row.activation is not None else None
    if found is None:
        return None
    outcome, through, hidden, attempts, created = found
    return _Activation(outcome, Mark(through, msgspec.json.decode(hidden, type=tuple[int, ...])), attempts, created)


def _count(tx: Transaction, agent_no: int, name: str, counter: str, number: int) -> None:
    if number:
        tx.db.execute(COUNT, (agent_no, name, counter, number))


def _move(tx: Transaction, agent_no: int, name: str, row: TargetRow, mark: Mark) -> int:
    """Move the mark, count what it passes, and return how many items that were."""
    items, events = crossed(tx.db, agent_no, row.mark, mark)
    _count(tx, agent_no, name, "items", items)
    _count(tx, agent_no, name, "events", events)
    row.mark = mark
    return items


def _arrived(tx: Transaction, agent_no: int, name: str, row: TargetRow, mark: Mark, outcome: str) -> None:
    _count(tx, agent_no, name, "wakes", 1)
    _move(tx, agent_no, name, row, mark)
    tx.db.execute(END, (outcome, None, tx.now_us, row.activation))
    row.activation, row.owner, row.answered = None, None, 0


def _nothing(tx: Transaction, agent_no: int, name: str, row: TargetRow, agent: _Agent) -> None:
    """There is nothing to wake for: what came has been acked, or the lease ended and nothing came."""
    expired = row.state is State.LEASED
    passed = _move(tx, agent_no, name, row, mark_at(tx.db, agent_no, row.mark, agent.floor, agent.last))
    if passed:
        _count(tx, agent_no, name, f"avoided.{Avoided.ACKED}", 1)
    elif expired:
        _count(tx, agent_no, name, f"avoided.{Avoided.NOTHING_NEW}", 1)
    if row.activation is not None:
        tx.db.execute(END, ("avoided", row.why, tx.now_us, row.activation))
    row.state, row.activation = State.IDLE, None
    save(tx, agent_no, name, row)


def _short(db: apsw.Connection, agent_no: int, agent: _Agent, target: Target) -> bool:
    least = target.min_unacked
    return least > 1 and unacked(db, agent_no, agent.floor, least) < least


def _still_short(db: apsw.Connection, agent_no: int, agent: _Agent, target: Target, row: TargetRow) -> bool:
    """Say whether there were too few items when this was last noted, and still are."""
    return row.short == agent.last and _short(db, agent_no, agent, target)


def _too_few(tx: Transaction, agent_no: int, name: str, row: TargetRow, agent: _Agent) -> None:
    if row.short < agent.last:
        _count(tx, agent_no, name, f"avoided.{Avoided.MIN_UNACKED}", 1)
    row.short, row.state = agent.last, State.IDLE
    save(tx, agent_no, name, row)


def _removed(tx: Transaction, agent_no: int, name: str, agent: _Agent) -> None:
    found = next((one for one in decode_targets(agent.settings) if one.id == name), None)
    if found is None:
        return
    row = load(tx.db, agent_no, found)
    if row.state is not State.REMOVED:
        if row.mark.through < agent.last:
            _count(tx, agent_no, name, f"avoided.{Avoided.REMOVED}", 1)
        row.state = State.REMOVED
        save(tx, agent_no, name, row)


def _announce_offline(tx: Transaction, attempt: Attempt, row: TargetRow) -> None:
    journal = f"{attempt.tenant}.{JOURNAL}"
    try:
        tx.stream(journal)
    except NotFound:
        return
    facts = {"agent": attempt.agent, "target": attempt.target.id, "why": row.why, "failures": row.failures}
    tx.append(journal, [draft(OFFLINE, SOURCE, facts)])
