"""An inbox as its agent sees it: items in a stable order, acks, receipts. No partition and no offset shows here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from postbus.inbox.agents import find_agent
from postbus.inbox.digests import is_digest, through_of
from postbus.model import Event, Invalid, NotFound, instant
from postbus.store.records import EVENT_FIELDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import apsw

    from postbus.inbox.signals import Signals
    from postbus.log.sqlite import SqliteLog, Transaction

__all__ = ["Item", "Items", "Receipts", "item_id", "item_json", "sequence_of"]

LIMIT_MAX = 1000
ITEMS_MAX = 10_000

ITEM = f"""
    SELECT i.sequence, i.matched_by, i.reason, i.entry, i.created_at_us, i.delivered_at_us, i.read_at_us, i.acked_at_us,
           s.name, i.partition AS partition, i."offset" AS "offset", e.seq IS NULL,
           {EVENT_FIELDS.replace('partition, "offset", ', "").replace("created_at_us", "e.created_at_us")}
    FROM inbox_rows i JOIN stream_registry s USING (stream_id)
    LEFT JOIN events e ON e.stream_id = i.stream_id AND e.partition = i.partition AND e."offset" = i."offset"
"""  # noqa: S608 - constants only
UNACKED = ITEM + "WHERE i.agent_no = ? AND i.sequence > ? AND i.acked_at_us IS NULL ORDER BY i.sequence LIMIT ?"
LOOSE = UNACKED.replace("ORDER BY", "AND i.entry IS NULL ORDER BY")
EVERY = ITEM + "WHERE i.agent_no = ? AND i.sequence > ? ORDER BY i.sequence LIMIT ?"
ONE = ITEM + "WHERE i.agent_no = ? AND i.sequence = ?"
FLOOR = "SELECT acked_floor, last_sequence FROM agent_registry WHERE agent_no = ?"
# Whether a sequence was ever given out; they are dense.
KNOWN = "SELECT ? BETWEEN 1 AND last_sequence FROM agent_registry WHERE agent_no = ?"
MARK_READ = """
    UPDATE inbox_rows SET read_at_us = ?, delivered_at_us = IFNULL(delivered_at_us, ?)
    WHERE agent_no = ? AND sequence = ? AND read_at_us IS NULL
"""
ACK_THROUGH = """
    UPDATE inbox_rows SET acked_at_us = ? WHERE agent_no = ? AND sequence > ? AND sequence <= ? AND acked_at_us IS NULL
"""
# Up to a digest's revision: what waits in another digest has not been shown yet.
ACK_SHOWN = """
    UPDATE inbox_rows SET acked_at_us = ? WHERE agent_no = ? AND sequence > ? AND sequence <= ? AND acked_at_us IS NULL
    AND (entry IS NULL OR sequence <= (SELECT max(through) FROM inbox_revisions r
                                       WHERE r.agent_no = inbox_rows.agent_no AND r.entry = inbox_rows.entry))
"""
ACK_ONE = "UPDATE inbox_rows SET acked_at_us = ? WHERE agent_no = ? AND sequence = ? AND acked_at_us IS NULL"
ACK_ENTRY = """
    UPDATE inbox_rows SET acked_at_us = ? WHERE agent_no = ? AND entry = ? AND sequence <= ? AND acked_at_us IS NULL
"""
RAISE_FLOOR = """
    UPDATE agent_registry SET acked_floor = IFNULL((SELECT min(sequence) - 1 FROM inbox_rows
        WHERE agent_no = ?1 AND sequence > acked_floor AND acked_at_us IS NULL), last_sequence)
    WHERE agent_no = ?1
"""
COUNT = "SELECT count(*) FROM inbox_rows WHERE agent_no = ? AND sequence > ? AND acked_at_us IS NULL"
OF_EVENT = """
    SELECT a.agent, i.sequence, i.created_at_us, i.delivered_at_us, i.read_at_us, i.acked_at_us,
           NOT EXISTS (SELECT 1 FROM events e
                       WHERE e.stream_id = i.stream_id AND e.partition = i.partition AND e."offset" = i."offset")
    FROM inbox_rows i JOIN agent_registry a USING (agent_no) JOIN stream_registry s USING (stream_id)
    WHERE s.name = ? AND i.partition = ? AND i."offset" = ? AND a.tenant = ? ORDER BY a.agent
"""
OF_SEEN = """
    SELECT a.agent, i.sequence FROM inbox_seen i JOIN agent_registry a USING (agent_no)
    JOIN stream_registry s USING (stream_id)
    WHERE s.name = ? AND i.partition = ? AND i."offset" = ? AND a.tenant = ? ORDER BY a.agent
"""


class Item(NamedTuple):
    """One event owed to an agent. ``event`` is None when retention removed it before it was acked."""

    sequence: int
    matched_by: tuple[str, ...]
    match_reason: str
    entry: int | None
    created_at_us: int
    delivered_at_us: int | None
    read_at_us: int | None
    acked_at_us: int | None
    event: Event | None

    @property
    def id(self) -> str:
        """What the item is called in its inbox."""
        return item_id(self.sequence)


class Receipts(msgspec.Struct, frozen=True, kw_only=True):
    """How far an event has come in one inbox: accepted, delivered, read, acked or expired."""

    agent: str
    item: str
    state: str
    accepted_at_us: int | None
    delivered_at_us: int | None = None
    read_at_us: int | None = None
    acked_at_us: int | None = None


def item_id(sequence: int) -> str:
    """Return the name of an item."""
    return f"itm_{sequence:x}"


def sequence_of(item: str) -> int:
    """Return an item's place in its inbox; raises ``NotFound`` for what is no item's id."""
    digits = item.removeprefix("itm_")
    if digits == item or not digits or len(digits) > 15 or digits.strip("0123456789abcdef"):  # noqa: PLR2004 - fits SQL
        raise NotFound(f"there is no item {item[:80]!r}", hint="use the `id` of an item or of a digest")
    return int(digits, 16)


class Items:
    """Reading and acking. Neither moves a cursor, and no cursor waits for either."""

    def __init__(self, log: SqliteLog, signals: Signals) -> None:
        self._log = log
        self._signals = signals

    async def read(
        self,
        tenant: str,
        agent: str,
        *,
        after: str | None = None,
        limit: int = 100,
        include_acked: bool = False,
        loose: bool = False,
        mark: bool = True,
    ) -> list[Item]:
        """Return items in order, those not acked unless asked otherwise; ``mark`` them read.

        ``after`` is an item's id; raises ``NotFound`` for one that never was. ``loose`` leaves out what is in a digest.
        """
        if not 1 <= limit <= LIMIT_MAX:
            raise Invalid(f"limit is 1 to {LIMIT_MAX}, not {limit}")
        place = sequence_of(after) if after is not None else 0

        def look(db: apsw.Connection) -> tuple[int, list[Item]]:
            found = find_agent(db, tenant, agent)
            if after is not None and not db.execute(KNOWN, (place, found.no)).get:
                raise NotFound(f"the inbox of {agent} has no item {after}")
            start = place if include_acked else max(place, _floor(db, found.no)[0])
            query = EVERY if include_acked else LOOSE if loose else UNACKED
            return found.no, [_item(row) for row in db.execute(query, (found.no, start, limit))]

        number, items = await self._log.store.read(look)
        unread = [item.sequence for item in items if item.read_at_us is None]
        if mark and unread:
            await self._log.transact(lambda tx: _mark_read(tx, number, unread))
        return items

    async def get(self, tenant: str, agent: str, item: str) -> Item:
        """Return one item; raises ``NotFound``."""
        sequence = sequence_of(item)

        def look(db: apsw.Connection) -> Item:
            row = db.execute(ONE, (find_agent(db, tenant, agent).no, sequence)).fetchone()
            if row is None:
                raise NotFound(f"the inbox of {agent} has no item {item}")
            return _item(row)

        return await self._log.store.read(look)

    async def unacked(self, tenant: str, agent: str) -> int:
        """Return how many items are not acked."""

        def look(db: apsw.Connection) -> int:
            number = find_agent(db, tenant, agent).no
            return int(db.execute(COUNT, (number, _floor(db, number)[0])).get)

        return await self._log.store.read(look)

    async def ack(
        self,
        tenant: str,
        agent: str,
        *,
        through: str | None = None,
        items: Sequence[str] | None = None,
        everything: bool = False,
    ) -> int:
        """Ack up to an item, some items, or all there are; return how many became acked. Exactly one form.

        Items and digests are named by their ids. ``through`` touches nothing that came later. Raises ``NotFound`` for
        an id that never was, and then acks nothing.
        """
        if (through is not None) + (items is not None) + bool(everything) != 1:
            raise Invalid("an ack has exactly one of `through`, `items` and `all`")
        if items is not None and len(items) > ITEMS_MAX:
            raise Invalid(f"at most {ITEMS_MAX} items are acked at once")

        def write(tx: Transaction) -> tuple[int, int]:
            number = find_agent(tx.db, tenant, agent).no
            floor, last = _floor(tx.db, number)
            if items is not None:
                count = _ack_some(tx, number, agent, items)
            else:
                end = last if through is None else _place(tx, number, agent, through)
                statement = ACK_SHOWN if through is not None and is_digest(through) else ACK_THROUGH
                count = tx.run(statement, (tx.now_us, number, floor, end))
            if count:
                tx.db.execute(RAISE_FLOOR, (number,))
            return number, count

        number, count = await self._log.transact(write)
        if count:
            self._signals.changed([number])
        return count

    async def receipts(self, tenant: str, event: str) -> list[Receipts]:
        """Return how far an event has come in each inbox it went to; ``event`` is its address."""
        stream, _, numbers = event.partition("/")
        partition, _, offset = numbers.partition("/")
        if not (partition.isdecimal() and offset.isdecimal() and len(numbers) < 40):  # noqa: PLR2004 - two numbers
            raise Invalid(f"{event!r} is no event's address")
        where = (stream, int(partition), int(offset), tenant)

        def look(db: apsw.Connection) -> list[Receipts]:
            found = [_receipt(*row) for row in db.execute(OF_EVENT, where)]
            gone = [
                Receipts(agent=agent, item=item_id(sequence), state="acked", accepted_at_us=None)
                for agent, sequence in db.execute(OF_SEEN, where)
            ]
            return sorted(found + gone, key=lambda one: one.agent)

        return await self._log.store.read(look)


def _floor(db: apsw.Connection, number: int) -> tuple[int, int]:
    """Return (up to where everything is acked, the newest sequence)."""
    floor, last = db.execute(FLOOR, (number,)).get
    return int(floor), int(last)


def _item(row: tuple[Any, ...]) -> Item:
    sequence, matched_by, reason, entry, created, delivered, read, acked, stream, partition, offset, gone, *facts = row
    event = None if gone else Event(stream, partition, offset, *facts)
    names = msgspec.json.decode(matched_by, type=tuple[str, ...])
    return Item(sequence, names, reason, entry, created, delivered, read, acked, event)


def _receipt(
    agent: str,
    sequence: int,
    accepted: int,
    delivered: int | None,
    read: int | None,
    acked: int | None,
    gone: int,
) -> Receipts:
    state = "accepted"
    for name, moment in (("delivered", delivered), ("read", read), ("acked", acked)):
        state = state if moment is None else name
    if gone and acked is None:
        state = "expired"
    return Receipts(
        agent=agent,
        item=item_id(sequence),
        state=state,
        accepted_at_us=accepted,
        delivered_at_us=delivered,
        read_at_us=read,
        acked_at_us=acked,
    )


def _mark_read(tx: Transaction, number: int, sequences: list[int]) -> None:
    tx.db.executemany(MARK_READ, [(tx.now_us, tx.now_us, number, sequence) for sequence in sequences])


def _place(tx: Transaction, number: int, agent: str, name: str) -> int:
    """Return the sequence that an item's or a digest revision's id stands for."""
    found = through_of(tx.db, number, name)
    sequence = found[1] if found is not None else sequence_of(name)
    if found is None and not tx.db.execute(KNOWN, (sequence, number)).get:
        raise NotFound(f"the inbox of {agent} has no item {name}")
    return sequence


def _ack_some(tx: Transaction, number: int, agent: str, names: Sequence[str]) -> int:
    places: list[tuple[int | None, int]] = []
    for name in names:
        found = through_of(tx.db, number, name)
        places.append(found if found is not None else (None, _place(tx, number, agent, name)))
    count = 0
    for entry, sequence in places:
        if entry is None:
            count += tx.run(ACK_ONE, (tx.now_us, number, sequence))
        else:
            count += tx.run(ACK_ENTRY, (tx.now_us, number, entry, sequence))
    return count


def item_json(item: Item) -> bytes:
    """Return an item as one JSON object; the payload's bytes are passed through untouched."""
    event = item.event
    facts: dict[str, Any] = {"id": item.id, "sequence": item.sequence}
    if event is not None:
        facts |= {
            "topic": event.topic,
            "variant": event.variant,
            "payload": msgspec.Raw(event.payload_json),
            "metadata": msgspec.Raw(event.metadata_json or b"{}"),
            "headers": msgspec.Raw(event.headers_json or b"{}"),
            "source": event.source,
            "key": event.key,
            "correlation_id": event.correlation_id,
            "occurred_at": event.occurred_at,
            "delivery_handle": msgspec.Raw(event.delivery_handle_json or b"null"),
            "trust": event.trust,
        }
    facts |= {
        "expired": event is None,
        "matched_by": item.matched_by,
        "match_reason": item.match_reason,
        "acked_at": _moment(item.acked_at_us),
    }
    return msgspec.json.encode(facts)


def _moment(instant_us: int | None) -> Any:
    return None if instant_us is None else instant(instant_us)
