"""What an owner sees of the targets of an agent, and what an operator may do about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postbus.inbox.agents import find_agent
from postbus.inbox.wakes.marks import news_above
from postbus.inbox.wakes.records import Counters, State, TargetState
from postbus.inbox.wakes.table import load, save
from postbus.model import NotFound

if TYPE_CHECKING:
    import apsw

    from postbus.inbox.agents import Agent
    from postbus.inbox.wakes.table import WakeTable
    from postbus.log.sqlite import Transaction

__all__ = ["counters_of", "revive_target", "states_of"]

FLOOR = "SELECT acked_floor FROM agent_registry WHERE agent_no = ?"
COUNTERS = "SELECT name, value FROM wake_counters WHERE agent_no = ? AND target = ? ORDER BY name"
AVOIDED = "avoided."


def states_of(db: apsw.Connection, agent: Agent, table: WakeTable) -> list[TargetState]:
    """Return how each target of an agent stands."""
    floor = db.execute(FLOOR, (agent.no,)).get
    found = []
    for target in agent.targets:
        row = load(db, agent.no, target)
        news = news_above(db, agent.no, row.mark, floor).items
        pulls = target.kind == "pull"
        held = table.until_us(row, target) > table.now_us()
        found.append(
            TargetState(
                target=target.id,
                kind=target.kind,
                state=State.PULL if pulls else row.state,
                new_items=0 if pulls else news,
                failures=row.failures,
                why=row.why,
                until_at_us=row.until_at_us if held else None,
            )
        )
    return found


def counters_of(db: apsw.Connection, agent: Agent) -> dict[str, Counters]:
    """Return the counters of each target of an agent."""
    found = {}
    for target in agent.targets:
        values: dict[str, int] = dict(db.execute(COUNTERS, (agent.no, target.id)))
        avoided = {name.removeprefix(AVOIDED): value for name, value in values.items() if name.startswith(AVOIDED)}
        plain = {name: value for name, value in values.items() if not name.startswith(AVOIDED)}
        found[target.id] = Counters(avoided=avoided, **plain)
    return found


def revive_target(tx: Transaction, tenant: str, agent: str, name: str) -> tuple[int, bool]:
    """Put an offline target back to work; return the agent's number and whether it was offline."""
    found = find_agent(tx.db, tenant, agent)
    target = next((one for one in found.targets if one.id == name), None)
    if target is None:
        raise NotFound(f"agent {agent} has no target {name}")
    row = load(tx.db, found.no, target)
    if row.state is not State.OFFLINE:
        return found.no, False
    row.state, row.failures, row.why, row.activation = State.IDLE, 0, None, None
    save(tx, found.no, name, row)
    return found.no, True
