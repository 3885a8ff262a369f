"""Digests: the items of a burst on one resource, shown as one entry with revisions.

What comes in is in the inbox at once; it shows in the digest, and counts as news for a wake, when the window is over,
when there are enough items, when the digest is a day old, or when somebody asks. Each showing is a revision. Acking a
revision acks what it showed and nothing that came later, also after newer revisions.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from postbus.inbox.agents import find_agent
from postbus.inbox.door import DAY_US
from postbus.model import NotFound

if TYPE_CHECKING:
    import apsw

    from postbus.log.sqlite import SqliteLog, Transaction

__all__ = ["DigestEntry", "Digests", "is_digest", "through_of"]

ID = re.compile("dig_([0-9a-f]{1,15})_([0-9a-f]{1,15})")

DUE = """
    SELECT agent_no, entry, revision, last, opened_at_us FROM inbox_digests WHERE since_us IS NOT NULL
    AND (since_us + window_us <= ?1 OR waiting >= items_max OR opened_at_us + ?2 <= ?1)
"""
NEXT_DUE = """
    SELECT min(CASE WHEN waiting >= items_max THEN 0 ELSE min(since_us + window_us, opened_at_us + ?) END)
    FROM inbox_digests WHERE since_us IS NOT NULL
"""
MINE = """
    SELECT agent_no, entry, revision, last, opened_at_us FROM inbox_digests
    WHERE agent_no = ? AND since_us IS NOT NULL
"""
SHOW = """
    UPDATE inbox_digests SET revision = revision + 1, since_us = NULL, waiting = 0, closed = ?
    WHERE agent_no = ? AND entry = ?
"""
REVISE = "INSERT INTO inbox_revisions VALUES (?, ?, ?, ?, ?)"
REVISION = "SELECT through FROM inbox_revisions WHERE agent_no = ? AND entry = ? AND revision = ?"
ENTRIES = """
    SELECT d.entry, d.resource, d.revision, r.through, r.at_us FROM inbox_digests d
    JOIN inbox_revisions r ON r.agent_no = d.agent_no AND r.entry = d.entry AND r.revision = d.revision
    WHERE d.agent_no = ? ORDER BY d.entry
"""
MEMBERS = """
    SELECT i.sequence, e.topic FROM inbox_rows i
    LEFT JOIN events e ON e.stream_id = i.stream_id AND e.partition = i.partition AND e."offset" = i."offset"
    WHERE i.agent_no = ? AND i.sequence >= ? AND i.sequence <= ? AND i.entry = ? AND i.acked_at_us IS NULL
    ORDER BY i.sequence
"""


class DigestEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A digest as its newest revision shows it: what is still unacked of it."""

    id: str
    resource: str
    revision: int
    count: int
    item_ids: tuple[str, ...]
    summary: str
    at_us: int


class Digests:
    """The digests of all inboxes."""

    def __init__(self, log: SqliteLog) -> None:
        self._log = log

    async def flush_due(self) -> set[int]:
        """Make a revision of every digest whose time has come; return the agents that have news by it."""
        now = self._log.store.clock.now_us()
        if not await self._log.store.read(lambda db: db.execute(DUE, (now, DAY_US)).fetchone()):
            return set()
        return await self._log.transact(lambda tx: _show(tx, list(tx.db.execute(DUE, (tx.now_us, DAY_US)))))

    async def flush(self, tenant: str, agent: str) -> set[int]:
        """Make a revision of every digest of an agent that has something to show, now."""
        return await self._log.transact(
            lambda tx: _show(tx, list(tx.db.execute(MINE, (find_agent(tx.db, tenant, agent).no,))))
        )

    async def next_due_us(self) -> int | None:
        """Return when the next digest comes due; None when none waits."""
        return await self._log.store.read(lambda db: db.execute(NEXT_DUE, (DAY_US,)).get)

    async def entries(self, tenant: str, agent: str) -> list[DigestEntry]:
        """Return the digests that show something unacked, oldest first."""

        def look(db: apsw.Connection) -> list[DigestEntry]:
            number = find_agent(db, tenant, agent).no
            found: list[DigestEntry] = []
            for entry, resource, revision, through, at_us in list(db.execute(ENTRIES, (number,))):
                rows = list(db.execute(MEMBERS, (number, entry, through, entry)))
                if rows:
                    found.append(_entry(entry, resource, revision, at_us, rows))
            return found

        return await self._log.store.read(look)


def _show(tx: Transaction, due: list[tuple[int, int, int, int, int]]) -> set[int]:
    for agent_no, entry, revision, last, opened in due:
        tx.db.execute(SHOW, (int(opened + DAY_US <= tx.now_us), agent_no, entry))
        tx.db.execute(REVISE, (agent_no, entry, revision + 1, last, tx.now_us))
    return {row[0] for row in due}


def _entry(entry: int, resource: str, revision: int, at_us: int, rows: list[tuple[int, str | None]]) -> DigestEntry:
    topics: dict[str, int] = {}
    for _, topic in rows:
        topics[topic or "expired"] = topics.get(topic or "expired", 0) + 1
    shown = ", ".join(f"{count} x {topic}" for topic, count in sorted(topics.items(), key=lambda pair: -pair[1])[:5])
    return DigestEntry(
        id=f"dig_{entry:x}_{revision:x}",
        resource=resource,
        revision=revision,
        count=len(rows),
        item_ids=tuple(f"itm_{sequence:x}" for sequence, _ in rows),
        summary=f"{len(rows)} on {resource}: {shown}",
        at_us=at_us,
    )


def is_digest(name: str) -> bool:
    """Say whether an id is meant for a digest's revision."""
    return name.startswith("dig_")


def through_of(db: apsw.Connection, agent_no: int, name: str) -> tuple[int, int] | None:
    """Return (entry, last sequence it shows) of a digest revision's id, None for other ids; raises ``NotFound``."""
    if not is_digest(name):
        return None
    found = ID.fullmatch(name)
    entry, revision = (int(part, 16) for part in found.groups()) if found else (0, 0)
    through = db.execute(REVISION, (agent_no, entry, revision)).get
    if through is None:
        raise NotFound(f"there is no digest {name[:80]!r}")
    return entry, int(through)
