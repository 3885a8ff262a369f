"""Inboxes to test on: set up in a folder, filled by Spark or by the live pump, and looked at row by row."""

from __future__ import annotations

from typing import Any, Literal

from postbus.clock import SystemClock
from postbus.inbox import Inboxes, Target
from postbus.log import SqliteLog
from postbus.model import Start, StartPolicy
from tests.spark.office import Office

__all__ = ["EARLIEST", "TENANT", "Mail"]

TENANT = "local.default"
PULL = (Target(kind="pull"),)
EARLIEST = Start(policy=StartPolicy.EARLIEST)

# Everything that an inbox holds except when it happened; and every cursor.
ITEMS = """
    SELECT a.tenant, a.agent, i.sequence, s.name, i.partition, i."offset", i.matched_by, i.reason, i.entry,
           a.last_sequence
    FROM inbox_rows i JOIN agent_registry a USING (agent_no) JOIN stream_registry s USING (stream_id)
    ORDER BY a.tenant, a.agent, i.sequence
"""
DIGESTS = """
    SELECT a.tenant, a.agent, d.entry, d.resource, d.window_us, d.items_max, d.since_us IS NULL, d.waiting, d.last,
           d.revision, d.closed
    FROM inbox_digests d JOIN agent_registry a USING (agent_no) ORDER BY a.tenant, a.agent, d.entry
"""
CURSORS = """
    SELECT s.name, c.consumer, c.partition, c.next_offset, c.committed FROM cursors c
    JOIN stream_registry s USING (stream_id) ORDER BY 1, 2, 3
"""
ENDS = """
    SELECT tenant, subscription, json_extract(settings, '$.ends_at_us') IS NOT NULL
    FROM subscription_registry ORDER BY 1, 2
"""


class Mail(Office):
    """An office whose store has agents and inbox subscriptions."""

    def agent(self, name: str = "ann", tenant: str = TENANT) -> None:
        self.run(lambda log: Inboxes(log, SystemClock()).create_agent(tenant, name, PULL))

    def subscribe(self, pattern: str, name: str, agent: str = "ann", tenant: str = TENANT, **more: Any) -> None:
        settings: dict[str, Any] = {"engine": "spark", "start": EARLIEST} | more
        self.run(lambda log: Inboxes(log, SystemClock()).subscribe(tenant, agent, pattern, id=name, **settings))

    def hand_over(self, name: str, engine: Literal["live", "spark"], tenant: str = TENANT) -> None:
        self.run(lambda log: Inboxes(log, SystemClock()).hand_over(tenant, name, engine))

    def inbox(self, agent: str = "ann", tenant: str = TENANT) -> list[int]:
        """The offsets of an agent's items, in order."""
        return [row[5] for row in self.query(ITEMS) if row[:2] == (tenant, agent)]

    def place(self, name: str, stream: str = f"{TENANT}.journal", partition: int = 0) -> int:
        """Where a subscription stands."""
        ((place, *_),) = [row[3:] for row in self.query(CURSORS) if row[:3] == (stream, name, partition)]
        return int(place)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        async def look(log: SqliteLog) -> list[tuple[Any, ...]]:
            return await log.store.read(lambda db: list(db.execute(statement)))

        return self.run(look)

    def all(self) -> dict[str, list[tuple[Any, ...]]]:
        """Every item, digest, cursor and end, as the database has them."""
        return {
            name: self.query(statement)
            for name, statement in (("items", ITEMS), ("digests", DIGESTS), ("cursors", CURSORS), ("ends", ENDS))
        }

    def pump(self) -> None:
        """Have the live pump serve what is there."""

        async def work(log: SqliteLog) -> None:
            inboxes = Inboxes(log, SystemClock())
            assert await inboxes.pump.catch_up()
            await inboxes.pump.stop()

        self.run(work)
