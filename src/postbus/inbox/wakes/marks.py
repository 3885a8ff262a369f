"""What is new for a target: what its inbox holds above the mark up to which it has been told.

An item of a digest is news once a revision shows it. Until then it may lie below the mark without having been
announced; the mark names those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    import apsw

__all__ = ["Mark", "News", "count_news", "crossed", "hand_out", "has_answered", "mark_at", "news_above", "unacked"]

SHOWN = """(i.entry IS NULL OR i.sequence <= (SELECT r.through FROM inbox_revisions r
    WHERE r.agent_no = ?1 AND r.entry = i.entry ORDER BY r.revision DESC LIMIT 1))"""
# Unacked items above the mark; and, where it names any, those below it.
PLAIN = """
    (SELECT sequence, entry FROM inbox_rows
     WHERE agent_no = ?1 AND sequence > max(?2, ?4) AND acked_at_us IS NULL AND ?3 IS NOT NULL) i
"""
NAMED = """
    (SELECT sequence, entry FROM inbox_rows WHERE agent_no = ?1 AND sequence > max(?2, ?4) AND acked_at_us IS NULL
     UNION ALL
     SELECT sequence, entry FROM inbox_rows
     WHERE agent_no = ?1 AND sequence IN (SELECT value FROM json_each(?3)) AND acked_at_us IS NULL) i
"""
ABOVE = (PLAIN, NAMED)  # by whether the mark names any: asking for none costs more than all the rest
NEWS = [f"SELECT count(*), min(i.sequence), max(i.sequence) FROM {above} WHERE {SHOWN}" for above in ABOVE]  # noqa: S608 - constants only
SOME = [f"SELECT i.sequence FROM {above} WHERE {SHOWN} ORDER BY i.sequence LIMIT ?5" for above in ABOVE]  # noqa: S608 - constants only
COUNT = [f"SELECT count(*) FROM (SELECT 1 FROM {above} WHERE {SHOWN} LIMIT ?5)" for above in ABOVE]  # noqa: S608 - constants only
HIDDEN = [
    f"SELECT i.sequence FROM {above} WHERE i.entry IS NOT NULL AND {SHOWN} IS NOT 1 ORDER BY 1"  # noqa: S608 - constants only
    for above in ABOVE
]
UNACKED = f"""
    SELECT count(*) FROM (SELECT 1 FROM inbox_rows i WHERE i.agent_no = ?1 AND i.sequence > ?2 AND i.acked_at_us IS NULL
                          AND {SHOWN} LIMIT ?3)
"""  # noqa: S608 - constants only
# What a mark passes when it moves from (?2, ?3) to (?4, ?5); ?6 is below all of it.
CROSSED = """
    agent_no = ?1 AND sequence > ?6 AND sequence <= ?4
    AND (sequence > ?2 OR sequence IN (SELECT value FROM json_each(?3)))
    AND sequence NOT IN (SELECT value FROM json_each(?5))
"""
PASSED = f"SELECT count(*), IFNULL(sum(max(json_array_length(matched_by), 1)), 0) FROM inbox_rows WHERE {CROSSED}"  # noqa: S608 - constants only
HAND_OUT = f"""
    UPDATE inbox_rows SET delivered_at_us = ?7 WHERE delivered_at_us IS NULL AND acked_at_us IS NULL AND {CROSSED}
"""  # noqa: S608 - constants only
ANSWERED = f"""
    SELECT EXISTS (SELECT 1 FROM inbox_rows WHERE (read_at_us IS NOT NULL OR acked_at_us IS NOT NULL) AND {CROSSED})
"""  # noqa: S608 - constants only


class Mark(NamedTuple):
    """Up to where a target has been told, but for the ``hidden`` sequences below."""

    through: int = 0
    hidden: tuple[int, ...] = ()

    @property
    def hidden_json(self) -> str:
        """The hidden sequences as they are kept."""
        return msgspec.json.encode(self.hidden).decode() if self.hidden else "[]"


class News(NamedTuple):
    """How many items are new, and the first and the last of them."""

    items: int
    first: int
    last: int


def news_above(db: apsw.Connection, agent_no: int, mark: Mark, floor: int) -> News:
    """Return what is new; everything up to ``floor`` is known to be acked."""
    row: Any = db.execute(NEWS[bool(mark.hidden)], _above(agent_no, mark, floor)).fetchone()
    return News(row[0], row[1] or 0, row[2] or 0)


def count_news(db: apsw.Connection, agent_no: int, mark: Mark, floor: int, limit: int) -> int:
    """Return how many items are new, counting no further than ``limit``."""
    return int(db.execute(COUNT[bool(mark.hidden)], (*_above(agent_no, mark, floor), limit)).get)


def first_news(db: apsw.Connection, agent_no: int, mark: Mark, floor: int, limit: int) -> tuple[int, ...]:
    """Return the sequences of the first new items."""
    return tuple(
        sequence for (sequence,) in db.execute(SOME[bool(mark.hidden)], (*_above(agent_no, mark, floor), limit))
    )


def mark_at(db: apsw.Connection, agent_no: int, mark: Mark, floor: int, through: int) -> Mark:
    """Return the mark that covers everything a digest does not hide right now."""
    hidden = tuple(sequence for (sequence,) in db.execute(HIDDEN[bool(mark.hidden)], _above(agent_no, mark, floor)))
    return Mark(through, hidden)


def unacked(db: apsw.Connection, agent_no: int, floor: int, limit: int) -> int:
    """Return how many unacked items the inbox shows, counting no further than ``limit``."""
    return int(db.execute(UNACKED, (agent_no, floor, limit)).get)


def crossed(db: apsw.Connection, agent_no: int, old: Mark, new: Mark) -> tuple[int, int]:
    """Return how many items lie between two marks, and how many matches of subscriptions they stand for."""
    row: Any = db.execute(PASSED, _between(agent_no, old, new)).fetchone()
    return row[0], row[1]


def hand_out(db: apsw.Connection, agent_no: int, old: Mark, new: Mark, now_us: int) -> None:
    """Note that the items between two marks have been announced."""
    db.execute(HAND_OUT, (*_between(agent_no, old, new), now_us))


def has_answered(db: apsw.Connection, agent_no: int, old: Mark, new: Mark) -> bool:
    """Say whether the agent has read or acked any item between two marks."""
    return bool(db.execute(ANSWERED, _between(agent_no, old, new)).get)


def _above(agent_no: int, mark: Mark, floor: int) -> tuple[Any, ...]:
    return agent_no, mark.through, mark.hidden_json, floor


def _between(agent_no: int, old: Mark, new: Mark) -> tuple[Any, ...]:
    lowest = min((old.through, *(sequence - 1 for sequence in old.hidden)))
    return agent_no, old.through, old.hidden_json, new.through, new.hidden_json, lowest
