"""What outside consumers hold of one partition: leases, what is owed again, and what is settled; in memory only.

Everything below ``cursor`` is settled, but for what was made due again later. Everything in [cursor, reach) was handed
out at least once, did not match, or is settled. An event with no row on disk was handed out once.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from postbus.delivery.table import DONE, PROCESSING, Row
from postbus.model import Invalid, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from postbus.model import Event

__all__ = [
    "WINDOW_MAX",
    "Book",
    "Entry",
    "Handed",
    "Lease",
    "Owed",
    "PullSettings",
    "by_book",
    "find_leases",
    "lease_id",
]

WINDOW_MAX = 10_000
"""How far hand-outs may be ahead of the first event that is not settled."""


def lease_id(holder: str, partition: int, offset: int) -> str:
    """Return the id of a lease: only who was given the holder's secret can name it."""
    return f"{holder}.{partition}.{offset}"


class PullSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a pull subscription works. ``auto``: handing out is acking."""

    id: str
    stream: str
    auto: bool = False
    ack_timeout_s: float = 30.0
    retry: RetryPolicy = RetryPolicy()
    dead_letter_stream: str | None = None
    lease_s: float = 30.0


class Handed(NamedTuple):
    """An event in a consumer's hands; without a lease when handing out was acking."""

    event: Event
    lease_id: str | None
    attempt: int


class Lease:
    """One event in a consumer's hands."""

    __slots__ = ("attempt", "holder", "until_s")

    def __init__(self, holder: str, attempt: int, until_s: float = math.inf) -> None:
        self.holder = holder
        self.attempt = attempt
        self.until_s = until_s


class Owed(NamedTuple):
    """One event that is to be handed out again. ``orphan``: who had it lost it because the process ended."""

    attempt: int
    due_s: float
    orphan: bool = False


class Entry(NamedTuple):
    """What changes on disk for one partition: the cursor (None: it stays), the reach, rows to write and to remove."""

    partition: int
    cursor: int | None
    reach: int
    save: list[Row]
    drop: list[int]


class Book:
    """The leases of one partition. ``rows`` are those on disk that are not dead; ``lock`` is for who hands out."""

    def __init__(self, partition: int, cursor: int, reach: int) -> None:
        self.partition = partition
        self.cursor = self.written = cursor
        self.reach = max(reach, cursor)
        self.lock = asyncio.Lock()
        self.done: set[int] = set()
        self.leased: dict[int, Lease] = {}
        self.owed: dict[int, Owed] = {}
        self.doomed: dict[int, int] = {}
        self.rows: dict[int, Row] = {}
        self.holders: dict[str, int] = {}
        self._alarms: list[tuple[float, int]] = []
        self._ready: list[int] = []

    # --- handing out ---

    @property
    def full(self) -> bool:
        """Whether so much is in the consumers' hands that nothing new is handed out."""
        return self.reach - self.cursor >= WINDOW_MAX

    @property
    def ready(self) -> bool:
        """Whether something is due again."""
        return bool(self._ready)

    def owe(self, offset: int, owed: Owed) -> None:
        """Hand an event out again once it is due."""
        self.owed[offset] = owed
        heapq.heappush(self._alarms, (owed.due_s, offset))

    def take_ready(self, limit: int) -> list[tuple[int, Owed]]:
        """Take what is due again, by offset."""
        taken: list[tuple[int, Owed]] = []
        while self._ready and len(taken) < limit:
            offset = heapq.heappop(self._ready)
            owed = self.owed.pop(offset, None)
            if owed is not None:
                taken.append((offset, owed))
        return taken

    def lease(self, offset: int, holder: str, attempt: int) -> None:
        """Put an event into a holder's hands; the time runs from ``start`` on."""
        self.leased[offset] = Lease(holder, attempt)
        self.holders[holder] = self.holders.get(holder, 0) + 1

    def start(self, offset: int, until_s: float) -> None:
        """Let the time of a lease run, or run anew."""
        lease = self.leased.get(offset)
        if lease is not None:
            lease.until_s = until_s
            heapq.heappush(self._alarms, (until_s, offset))

    def unlease(self, offset: int) -> Lease | None:
        """Take an event out of its holder's hands."""
        lease = self.leased.pop(offset, None)
        if lease is not None:
            left = self.holders[lease.holder] - 1
            if left:
                self.holders[lease.holder] = left
            else:
                del self.holders[lease.holder]
        return lease

    def running(self, offset: int, attempt: int) -> Row:
        """Return the row of an event that is in somebody's hands for more than the first time."""
        row = self.rows.setdefault(offset, Row(offset=offset))
        row.status, row.attempt = PROCESSING, attempt
        return row

    def resume(
        self, holder: str, previous: str | None, has: int, lacks: set[int], now_s: float, until_s: float
    ) -> list[int]:
        """Let ``holder`` go on for ``previous``, who has what it was handed out up to ``has``, but for what it lacks.

        Return what it has.
        """
        kept = []
        for offset in [one for one, lease in self.leased.items() if lease.holder == previous]:
            if offset > has or offset in lacks:
                self.start(offset, now_s)
            else:
                self.lease(offset, holder, self._dropped(offset))
                kept.append(offset)
        for offset in [one for one, owed in self.owed.items() if owed.orphan and one <= has]:
            self.lease(offset, holder, self.owed.pop(offset).attempt)
            kept.append(offset)
        for offset in kept:
            self.start(offset, until_s)
        return kept

    def _dropped(self, offset: int) -> int:
        lease = self.unlease(offset)
        return lease.attempt if lease is not None else 1

    # --- time ---

    @property
    def alarm_s(self) -> float:
        """When to look next."""
        return self._alarms[0][0] if self._alarms else math.inf

    def tick(self, now_s: float, attempts_max: int) -> None:
        """Take back leases whose time is over, and see what is due; who has used up its attempts is doomed."""
        while self._alarms and self._alarms[0][0] <= now_s:
            _, offset = heapq.heappop(self._alarms)
            lease = self.leased.get(offset)
            if lease is not None:
                if lease.until_s <= now_s:
                    self.unlease(offset)
                    self._again(offset, lease.attempt, now_s, attempts_max)
                continue
            owed = self.owed.get(offset)
            if owed is not None and owed.due_s <= now_s:
                self._again(offset, owed.attempt, now_s, attempts_max, orphan=owed.orphan)

    def _again(self, offset: int, attempt: int, now_s: float, attempts_max: int, *, orphan: bool = False) -> None:
        if attempt >= attempts_max:
            self.owed.pop(offset, None)
            self.doomed[offset] = attempt
            return
        self.owed[offset] = Owed(attempt, now_s, orphan)
        heapq.heappush(self._ready, offset)

    # --- settling ---

    def settled(self, offset: int) -> bool:
        """Say whether an event is over."""
        open_ = offset in self.leased or offset in self.owed or offset in self.doomed
        return not open_ and (offset < self.cursor or offset in self.done)

    def pass_over(self, offset: int) -> None:
        """Settle an event that nobody is to get."""
        if offset >= self.cursor:
            self.done.add(offset)
            self._advance()

    def settle(self, offsets: Iterable[int]) -> Entry:
        """Settle events; return what to write."""
        save: list[Row] = []
        drop: list[int] = []
        for offset in offsets:
            self.unlease(offset)
            self.owed.pop(offset, None)
            self.doomed.pop(offset, None)
            if offset >= self.cursor:
                self.done.add(offset)
                save.append(Row(offset=offset, status=DONE))
            elif offset in self.rows:
                drop.append(offset)
        self._advance()
        save = [row for row in save if row.offset >= self.cursor]
        self.rows.update((row.offset, row) for row in save)
        return self.entry(save, drop)

    def bury(self, offset: int) -> None:
        """Settle an event that has become a dead letter; its row stays."""
        self.unlease(offset)
        self.owed.pop(offset, None)
        self.doomed.pop(offset, None)
        self.rows.pop(offset, None)
        self.pass_over(offset)

    def revive(self, row: Row, now_s: float) -> None:
        """Hand an event out again that was dead; nothing happens when it is known already."""
        offset = row.offset
        if any(offset in known for known in (self.leased, self.owed, self.doomed, self.rows)):
            return
        self.done.discard(offset)
        self.rows[offset] = row
        if offset < self.reach:
            self.owe(offset, Owed(0, now_s))

    def commit(self, through: int) -> Entry:
        """Settle everything up to an offset, and what is leased below the cursor; return what to write."""
        offsets = [offset for offset in self.leased if offset <= through]
        offsets += [offset for offset in (*self.owed, *self.doomed) if self.cursor <= offset <= through]
        entry = self.settle(offsets)
        if through >= self.cursor:
            self.done = {offset for offset in self.done if offset > through}
            self.cursor = through + 1
            self.reach = max(self.reach, self.cursor)
            self._advance()
            kept = [row for row in entry.save if row.offset >= self.cursor]
            entry = self.entry(kept, entry.drop)
        return entry

    def jump(self, first: int) -> None:
        """Go on at the first retained event: everything before it is gone, but for what has a copy elsewhere."""
        for offset in [one for one in self.leased if one < first]:
            self.unlease(offset)
        for offset in [one for one in self.owed if one < first and not self._copied(one)]:
            del self.owed[offset]
        self.done = {offset for offset in self.done if offset >= first}
        self.cursor = max(self.cursor, first)
        self.reach = max(self.reach, first)
        self._advance()

    def _copied(self, offset: int) -> bool:
        row = self.rows.get(offset)
        return row is not None and row.dead_stream is not None

    def _advance(self) -> None:
        while self.cursor in self.done:
            self.done.remove(self.cursor)
            self.cursor += 1
        self.reach = max(self.reach, self.cursor)

    def entry(self, save: list[Row] | None = None, drop: list[int] | None = None) -> Entry:
        """Return what to write; rows that the cursor has passed and that wait for nothing are removed."""
        gone = set(drop or ())
        moved = self.written != self.cursor
        if moved:
            gone |= {offset for offset, row in self.rows.items() if offset < self.cursor and self._over(offset, row)}
        for offset in gone:
            self.rows.pop(offset, None)
        self.written = self.cursor
        return Entry(self.partition, self.cursor if moved else None, self.reach, save or [], sorted(gone))

    def _over(self, offset: int, row: Row) -> bool:
        return row.status == DONE or not (offset in self.leased or offset in self.owed or offset in self.doomed)


def find_leases(
    books: list[Book], lease_ids: Iterable[str], now_s: float
) -> tuple[list[tuple[Book, int, str]], list[str]]:
    """Return the leases that are held, each once, and the ids of those that are not; raises ``Invalid``."""
    held: list[tuple[Book, int, str]] = []
    stale: list[str] = []
    for name in dict.fromkeys(lease_ids):
        parsed = _parse(name)
        if parsed is None:
            raise Invalid(f"{name[:80]!r} is no lease id")
        holder, partition, offset = parsed
        book = books[partition] if partition < len(books) else None
        lease = book.leased.get(offset) if book is not None else None
        if book is None or lease is None or lease.holder != holder or lease.until_s <= now_s:
            stale.append(name)
        else:
            held.append((book, offset, name))
    return held, stale


def _parse(text: str) -> tuple[str, int, int] | None:
    """Return holder, partition and offset; None when the text is no lease id."""
    holder, *numbers = text.rsplit(".", 2)
    if len(numbers) != 2 or not all(one.isascii() and one.isdigit() and len(one) < 20 for one in numbers):  # noqa: PLR2004 - partition and offset, below 2**63
        return None
    return holder, int(numbers[0]), int(numbers[1])


def by_book(held: list[tuple[Book, int, str]]) -> list[tuple[Book, list[int]]]:
    """Return leases as offsets per book."""
    grouped: dict[int, tuple[Book, list[int]]] = {}
    for book, offset, _ in held:
        grouped.setdefault(book.partition, (book, []))[1].append(offset)
    return list(grouped.values())
