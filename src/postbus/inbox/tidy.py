"""What ends by itself: acked items after a day, subscriptions at their end. What was removed is remembered."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from postbus.inbox.door import DAY_US
from postbus.model import NotFound

if TYPE_CHECKING:
    from postbus.inbox.agents import Agents
    from postbus.log.sqlite import SqliteLog, Transaction

__all__ = ["Tidy"]

CHUNK = 1000

OVER = "SELECT agent_no, sequence FROM inbox_rows WHERE acked_at_us < ? LIMIT ?"
REMEMBER = """
    INSERT OR IGNORE INTO inbox_seen SELECT stream_id, partition, "offset", agent_no, sequence FROM inbox_rows
    WHERE agent_no = ? AND sequence = ?
"""
REMOVE = "DELETE FROM inbox_rows WHERE agent_no = ? AND sequence = ?"
# Digests whose items are all gone, and revisions of digests that are.
FORGET_DIGESTS = """
    DELETE FROM inbox_digests AS d WHERE since_us IS NULL AND opened_at_us < ? AND NOT EXISTS (
        SELECT 1 FROM inbox_rows i WHERE i.agent_no = d.agent_no AND i.sequence BETWEEN d.entry AND d.last
        AND i.entry = d.entry)
"""
FORGET_REVISIONS = """
    DELETE FROM inbox_revisions AS r WHERE NOT EXISTS (
        SELECT 1 FROM inbox_digests d WHERE d.agent_no = r.agent_no AND d.entry = r.entry)
"""


class Tidy:
    """Removes what is over, in small transactions."""

    def __init__(self, log: SqliteLog, agents: Agents, *, keep_us: int = DAY_US) -> None:
        self._log = log
        self._agents = agents
        self._keep_us = keep_us

    async def collect(self) -> int:
        """Remove items that were acked a day ago; return how many. A reset never brings them back."""
        removed = 0
        while True:
            step = await self._log.transact(self._step)
            removed += step
            if step < CHUNK:
                return removed

    def _step(self, tx: Transaction) -> int:
        before = tx.now_us - self._keep_us
        rows = list(tx.db.execute(OVER, (before, CHUNK)))
        tx.db.executemany(REMEMBER, rows)
        tx.db.executemany(REMOVE, rows)
        if len(rows) < CHUNK:
            tx.db.execute(FORGET_DIGESTS, (before,))
            tx.db.execute(FORGET_REVISIONS)
        return len(rows)

    async def end_subscriptions(self) -> int:
        """Remove subscriptions whose end has come; return how many. Their items stay."""
        over = await self._agents.ended(self._log.store.clock.now_us())
        for tenant, name in over:
            with contextlib.suppress(NotFound):  # another process was first
                await self._agents.unsubscribe(tenant, name)
        return len(over)
