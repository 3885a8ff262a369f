"""The one door into inboxes: items, digests and cursors in one transaction, each event at most once per agent.

The live pump and the pipeline on Spark both come through here, in any order and as often as they like: an item that is
there, or was there once, is not made again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from postbus.log.cursors import Change
from postbus.model import Cursor, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from postbus.inbox.agents import Digest
    from postbus.log.cursors import Extents
    from postbus.log.sqlite import Transaction
    from postbus.model import Consumer

__all__ = ["DAY_US", "Delivered", "Match", "Move", "deliver", "put_items"]

DAY_US = 86_400 * 1_000_000

PRESENT = """
    SELECT "offset", agent_no, sequence, matched_by FROM inbox_rows
    WHERE stream_id = ? AND partition = ? AND "offset" >= ? AND "offset" <= ?
"""
SEEN = """
    SELECT "offset", agent_no FROM inbox_seen WHERE stream_id = ? AND partition = ? AND "offset" >= ? AND "offset" <= ?
"""
LAST = "SELECT last_sequence FROM agent_registry WHERE agent_no = ? AND removed_at_us IS NULL"
SAVE_LAST = "UPDATE agent_registry SET last_sequence = ? WHERE agent_no = ?"
ADD = """
    INSERT INTO inbox_rows
        (agent_no, sequence, stream_id, partition, "offset", matched_by, reason, entry, created_at_us)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
ALSO_MATCHED = "UPDATE inbox_rows SET matched_by = ? WHERE agent_no = ? AND sequence = ?"
OPEN_DIGEST = "SELECT entry, opened_at_us FROM inbox_digests WHERE agent_no = ? AND resource = ? AND NOT closed"
CLOSE_DIGEST = "UPDATE inbox_digests SET closed = 1 WHERE agent_no = ? AND entry = ?"
NEW_DIGEST = "INSERT INTO inbox_digests VALUES (?, ?, ?, ?, ?, ?, ?, 1, ?, 0, 0)"
GROW_DIGEST = """
    UPDATE inbox_digests SET since_us = IFNULL(since_us, ?), waiting = waiting + 1, last = ?
    WHERE agent_no = ? AND entry = ?
"""


class Match(NamedTuple):
    """An event that an agent is owed: where it is, who asked for it, and the resource its digest is about."""

    offset: int
    agent_no: int
    matched_by: tuple[str, ...]
    reason: str
    digest: Digest | None = None
    resource: str | None = None


class Move(NamedTuple):
    """A cursor to move: from where the mover believes it to be, to where it has read."""

    subscription: str
    expected: int
    following: int


class Delivered(NamedTuple):
    """What a delivery did: the agents that got items, and the subscriptions that were somewhere else than believed."""

    agents: set[int]
    displaced: list[str]


def deliver(
    tx: Transaction,
    stream: str,
    partition: int,
    matches: Sequence[Match],
    moves: Iterable[Move],
    *,
    epoch: int | None = None,
) -> Delivered:
    """Write the items of a range of one partition and move the cursors of those who read it.

    Raises ``NotFound`` when the stream is gone, or is no longer the one that was read.
    """
    kept = tx.stream(stream)
    if epoch not in (None, kept.stream.epoch):
        raise NotFound(f"stream {stream} was deleted and made again")
    agents = put_items(tx, kept.stream_id, partition, matches) if matches else set()
    displaced = [
        move.subscription
        for move in moves
        if not tx.move(stream, move.subscription, advanced, partition, move.expected, move.following)
    ]
    return Delivered(agents, displaced)


def put_items(tx: Transaction, stream_id: int, partition: int, matches: Sequence[Match]) -> set[int]:
    """Add items for matches in order of their offsets; return the agents that got any."""
    span = (stream_id, partition, matches[0].offset, matches[-1].offset)
    present = {(offset, agent): (sequence, text) for offset, agent, sequence, text in tx.db.execute(PRESENT, span)}
    seen = set(tx.db.execute(SEEN, span))
    last: dict[int, int] = {}
    rows: list[tuple[object, ...]] = []
    for match in matches:
        where = (match.offset, match.agent_no)
        if where in present:
            _also_matched(tx, match, *present[where])
            continue
        if where in seen:
            continue
        sequence = last.get(match.agent_no)
        if sequence is None:
            sequence = tx.db.execute(LAST, (match.agent_no,)).get
            if sequence is None:
                continue  # the agent was removed meanwhile
        sequence = last[match.agent_no] = sequence + 1
        entry = None if match.digest is None else _enter(tx, match, match.digest, sequence)
        text = msgspec.json.encode(match.matched_by).decode()
        rows.append((match.agent_no, sequence, *span[:2], match.offset, text, match.reason, entry, tx.now_us))
    tx.db.executemany(ADD, rows)
    tx.db.executemany(SAVE_LAST, [(sequence, agent) for agent, sequence in last.items()])
    return set(last)


def _also_matched(tx: Transaction, match: Match, sequence: int, text: str) -> None:
    known = msgspec.json.decode(text, type=tuple[str, ...])
    names = (*known, *(name for name in match.matched_by if name not in known))
    if names != known:
        tx.db.execute(ALSO_MATCHED, (msgspec.json.encode(names).decode(), match.agent_no, sequence))


def _enter(tx: Transaction, match: Match, digest: Digest, sequence: int) -> int | None:
    """Put an item into the open digest of its resource, or into a new one; None when it has no resource."""
    if match.resource is None:
        return None
    found = tx.db.execute(OPEN_DIGEST, (match.agent_no, match.resource)).get
    if found is not None:
        entry, opened = found
        if tx.now_us - opened < DAY_US:
            tx.db.execute(GROW_DIGEST, (tx.now_us, sequence, match.agent_no, entry))
            return int(entry)
        tx.db.execute(CLOSE_DIGEST, (match.agent_no, entry))
    window = int(digest.window_s * 1e6)
    facts = (match.agent_no, sequence, match.resource, window, digest.items, tx.now_us, tx.now_us, sequence)
    tx.db.execute(NEW_DIGEST, facts)
    return sequence


def advanced(
    old: Consumer | None, extents: Extents, now_us: int, _name: str, partition: int, expected: int, following: int
) -> Change:
    """Move a cursor forward if it is where its mover left it; otherwise somebody reset it, and it stays."""
    if old is None or old.epoch != extents.stream.epoch:
        return Change(old, False)
    cursor = old.cursors[partition]
    if not expected <= cursor.next_offset <= following:
        return Change(old, False)
    if cursor.next_offset == following:
        return Change(old, True)
    moved = Cursor(partition, following, following - 1, cursor.skipped)
    cursors = (*old.cursors[:partition], moved, *old.cursors[partition + 1 :])
    return Change(msgspec.structs.replace(old, cursors=cursors, updated_at_us=now_us), True, "commit")
