"""The embedded log's doors to the writer: append events, move consumers, change streams.

A door stages what it did while the transaction runs and publishes it after the commit; a rolled back batch leaves no
trace in memory either.
"""

from __future__ import annotations

from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from postbus.log.cursors import no_stream
from postbus.log.heads import Head, Identity, choose_partition, found_of, resolve_identities
from postbus.log.sqlite.ledger import Kept, Ledger, View, save_consumer
from postbus.model import NotFound, PostbusError, Receipt
from postbus.store.anchor import Mark
from postbus.store.records import INSERT_COLUMNS, insert_statement, seal
from postbus.store.writer import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import apsw

    from postbus.log.cursors import Change
    from postbus.log.sqlite.published import Published
    from postbus.model import Consumer, Draft, Event
    from postbus.store import Store

__all__ = ["AppendDoor", "ConsumerDoor", "StreamDoor", "Transaction", "TransactionDoor"]

# One statement per step size: many rows in one step let go of the interpreter once instead of once per row.
_STEPS = (256, 64, 16, 4, 1)
_INSERTS = {rows: insert_statement(rows) for rows in _STEPS}
_WIDTH = len(INSERT_COLUMNS)
_STREAM, _DRAFTS, _NATIVE_ID = itemgetter(0), itemgetter(1), attrgetter("native_id")
_CREATED = attrgetter("created_at_us")

# Where an identity went first.
IDENTITY = """
    SELECT partition, "offset", created_at_us, content FROM identities
    WHERE stream_id = ? AND native_id = ? AND variant = ?
"""
SAVE_IDENTITY = "INSERT INTO identities VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
# The same for events that were accepted elsewhere.
NOTE_IDENTITY = "INSERT OR IGNORE INTO identities VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


class _Staged:
    """What a batch did to one partition."""

    __slots__ = ("facts", "head", "kept", "size")

    def __init__(self, kept: Kept, head: Head) -> None:
        self.kept = kept
        self.head = head
        self.size = head.size
        self.facts: list[tuple[Any, ...]] = []


class AppendDoor:
    """Appends. An item is (stream name, drafts); its outcome the receipts, or the reason why nothing was appended."""

    chained = True
    grows = True

    def __init__(self, store: Store, ledger: Ledger, published: Published) -> None:
        self._store = store
        self._durability = store.durability
        self._ledger = ledger
        self._published = published
        self._staged: dict[tuple[int, int], _Staged] = {}
        self._identities: dict[tuple[int, str, str], Identity] = {}
        self._unsaved: list[tuple[Any, ...]] = []
        self._rows = 0

    def run(self, db: apsw.Connection, items: list[tuple[str, Sequence[Draft]]]) -> list[Any]:
        """See ``Door.run``."""
        now = self._store.clock.now_us()
        values: list[Any] = []
        outcomes: list[Any] = []
        for name, run in _by_stream(items):
            try:
                kept = self.stream(db, name)
            except NotFound as error:
                outcomes += [error] * len(run)
                continue
            if len(kept.firsts) == 1 and set(map(_NATIVE_ID, chain.from_iterable(run))) == {None}:
                outcomes += self._append_plain(db, kept, run, now, values)
                continue
            for drafts in run:
                try:
                    outcomes.append(self._append(db, kept, drafts, now, values))
                except PostbusError as error:
                    outcomes.append(error)
        self._insert(db, values)
        return outcomes

    def _append_plain(
        self, db: apsw.Connection, kept: Kept, run: list[Sequence[Draft]], now_us: int, values: list[Any]
    ) -> list[list[Receipt]]:
        """Append many calls' drafts at once: the common case, one partition and no identities."""
        staged = self._staged_partition(db, kept, 0)
        name, offset, durability = kept.stream.name, staged.head.next_offset, self._durability
        staged.head.take(chain.from_iterable(run), now_us, kept.stream_id, values, staged.facts)
        if staged.head.next_offset - offset == len(run) and all(run):
            end = staged.head.next_offset
            return [[Receipt(name, 0, n, False, durability, now_us)] for n in range(offset, end)]
        outcomes: list[list[Receipt]] = []
        for drafts in run:
            end = offset + len(drafts)
            outcomes.append([Receipt(name, 0, n, False, durability, now_us) for n in range(offset, end)])
            offset = end
        return outcomes

    def stage(self, db: apsw.Connection, name: str, drafts: Sequence[Draft], now_us: int) -> list[Receipt]:
        """Append inside another door's item."""
        values: list[Any] = []
        receipts = self._append(db, self.stream(db, name), drafts, now_us, values)
        self._insert(db, values)
        return receipts

    def adopt(self, db: apsw.Connection, kept: Kept, partition: int, events: Sequence[Event]) -> None:
        """Append events that got their offsets and times elsewhere; the first one follows on the partition's head."""
        staged = self._staged_partition(db, kept, partition)
        values: list[Any] = []
        for created_at_us, run in groupby(events, _CREATED):
            staged.head.take(run, created_at_us, kept.stream_id, values, staged.facts)
        self._insert(db, values)
        named = [
            (
                kept.stream_id,
                event.native_id,
                event.variant,
                partition,
                event.offset,
                event.created_at_us,
                found_of(event),
            )
            for event in events
            if event.native_id is not None
        ]
        db.executemany(NOTE_IDENTITY, [(*row, seal(*row)) for row in named])

    def identity(self, db: apsw.Connection, kept: Kept, native_id: str, variant: str) -> Identity | None:
        """Return where an identity went first; None when it is new."""
        row = db.execute(IDENTITY, (kept.stream_id, native_id, variant)).get
        return None if row is None else Identity(*row)

    def stream(self, db: apsw.Connection, name: str) -> Kept:
        """Return a stream; raises ``NotFound``."""
        kept = self._ledger.stream(db, name)
        if kept is None:
            raise no_stream(name)
        return kept

    def head(self, db: apsw.Connection, kept: Kept, partition: int) -> int:
        """Return the next offset to be written, counting what this batch has staged."""
        staged = self._staged.get((kept.stream_id, partition))
        return (staged.head if staged is not None else self._ledger.head(db, kept, partition)).next_offset

    def _append(
        self, db: apsw.Connection, kept: Kept, drafts: Sequence[Draft], now_us: int, values: list[Any]
    ) -> list[Receipt]:
        if any(draft.native_id is not None for draft in drafts):
            return self._append_identified(db, kept, drafts, now_us, values)
        return [self._put(db, kept, draft, now_us, values) for draft in drafts]

    def _append_identified(
        self, db: apsw.Connection, kept: Kept, drafts: Sequence[Draft], now_us: int, values: list[Any]
    ) -> list[Receipt]:
        name, durability = kept.stream.name, self._durability

        def lookup(native_id: str, variant: str) -> Identity | None:
            key = (kept.stream_id, native_id, variant)
            staged = self._identities.get(key)
            if staged is not None:
                return staged
            return self.identity(db, kept, native_id, variant)

        verdicts, digests = resolve_identities(name, drafts, lookup)
        receipts: list[Receipt] = []
        for index, (draft, verdict) in enumerate(zip(drafts, verdicts, strict=True)):
            if verdict is None:
                receipt = self._put(db, kept, draft, now_us, values)
                receipts.append(receipt)
                if draft.native_id is not None:
                    found = Identity(receipt.partition, receipt.offset, now_us, digests[index])
                    key = (kept.stream_id, draft.native_id, draft.variant)
                    self._identities[key] = found
                    self._unsaved.append((*key, *found))
            else:
                first = verdict if isinstance(verdict, Identity) else receipts[verdict]
                receipts.append(Receipt(name, first.partition, first.offset, True, durability, first.created_at_us))
        return receipts

    def _put(self, db: apsw.Connection, kept: Kept, draft: Draft, now_us: int, values: list[Any]) -> Receipt:
        partition = choose_partition(draft, len(kept.firsts), kept.turn)
        kept.turn += 1
        staged = self._staged_partition(db, kept, partition)
        offset = staged.head.next_offset
        staged.head.take([draft], now_us, kept.stream_id, values, staged.facts)
        return Receipt(kept.stream.name, partition, offset, False, self._durability, now_us)

    def _staged_partition(self, db: apsw.Connection, kept: Kept, partition: int) -> _Staged:
        key = (kept.stream_id, partition)
        staged = self._staged.get(key)
        if staged is None:
            staged = self._staged[key] = _Staged(kept, self._ledger.head(db, kept, partition).copy())
        return staged

    def _insert(self, db: apsw.Connection, values: list[Any]) -> None:
        rows, done = len(values) // _WIDTH, 0
        if 0 < rows == self._rows <= _STEPS[0]:  # as many as the last time: worth a statement of its own
            db.execute(_INSERTS.get(rows) or _INSERTS.setdefault(rows, insert_statement(rows)), values)
        elif rows in _INSERTS:
            db.execute(_INSERTS[rows], values)
        else:
            for step in _STEPS:
                while rows - done >= step:
                    db.execute(_INSERTS[step], values[done * _WIDTH : (done + step) * _WIDTH])
                    done += step
        self._rows = rows
        if self._unsaved:
            db.executemany(SAVE_IDENTITY, [(*row, seal(*row)) for row in self._unsaved])
            self._unsaved = []

    def committed(self) -> None:
        """See ``Door.committed``."""
        for staged in self._staged.values():
            kept, head = staged.kept, staged.head
            self._ledger.put_head(kept, head)
            mark = Mark(kept.stream_id, head.partition, kept.stream.epoch, head.next_offset, head.chain)
            self._store.note(kept.slots[head.partition], mark)
            self._published.appended(kept, head, staged.facts, head.size - staged.size)
        self._clear()

    def rolled_back(self) -> None:
        """See ``Door.rolled_back``; heads read inside the undone transaction may be wrong, so all are read again."""
        self._ledger.forget()
        self._clear()

    def others_wrote(self) -> None:
        """See ``Door.others_wrote``."""
        self._ledger.forget()
        self._published.forget()

    def _clear(self) -> None:
        self._staged = {}
        self._identities = {}
        self._unsaved = []


def _by_stream(items: list[tuple[str, Sequence[Draft]]]) -> Iterable[tuple[str, list[Sequence[Draft]]]]:
    """Return the items' drafts with those of consecutive items of one stream together."""
    if len(items) == 1:
        return [(items[0][0], [items[0][1]])]
    if len(set(map(_STREAM, items))) == 1:
        return [(items[0][0], list(map(_DRAFTS, items)))]
    return [(name, list(map(_DRAFTS, group))) for name, group in groupby(items, _STREAM)]


class ConsumerDoor:
    """Moves consumers. An item is (stream name, consumer id, rule, arguments); its outcome the rule's answer."""

    chained = False
    grows = False

    def __init__(self, store: Store, ledger: Ledger, published: Published) -> None:
        self._store = store
        self._ledger = ledger
        self._published = published
        self._staged: dict[tuple[str, str], tuple[Kept, Consumer | None]] = {}

    def run(
        self, db: apsw.Connection, items: list[tuple[str, str, Callable[..., Change], tuple[Any, ...]]]
    ) -> list[Any]:
        """See ``Door.run``."""
        outcomes: list[Any] = []
        for stream, name, rule, args in items:
            try:
                outcomes.append(self.stage(db, stream, name, rule, args))
            except PostbusError as error:
                outcomes.append(error)
        return outcomes

    def stage(
        self, db: apsw.Connection, stream: str, name: str, rule: Callable[..., Change], args: tuple[Any, ...]
    ) -> Any:
        """Apply one rule inside the open transaction; raises what the rule raises, before anything is written."""
        kept = self._ledger.stream(db, stream)
        if kept is None:
            raise no_stream(stream)
        staged = self._staged.get((stream, name))
        old = staged[1] if staged is not None else self._ledger.consumer(db, kept, name)
        now = self._store.clock.now_us()
        change = rule(old, View(db, kept, {}), now, name, *args)
        if change.consumer is not old:
            save_consumer(db, kept, old, change.consumer, change.kind, now)
            self._staged[stream, name] = (kept, change.consumer)
        return change.answer

    def committed(self) -> None:
        """See ``Door.committed``."""
        for (stream, name), (kept, consumer) in self._staged.items():
            self._ledger.put_consumer(kept, name, consumer)
            self._published.moved(stream, name, consumer)
        self._staged = {}

    def rolled_back(self) -> None:
        """See ``Door.rolled_back``."""
        self._ledger.forget()
        self._staged = {}

    def others_wrote(self) -> None:
        """See ``Door.others_wrote``; the append door drops what both share."""


class Transaction:
    """One caller's part of a transaction: SQL of its own, appends and cursor moves, all or nothing.

    Handed to the functions given to ``SqliteLog.transact``; not to be kept.
    """

    def __init__(self, db: apsw.Connection, now_us: int, appends: AppendDoor, consumers: ConsumerDoor) -> None:
        self.db = db
        self.now_us = now_us
        self._appends = appends
        self._consumers = consumers

    def run(self, statement: str, values: tuple[Any, ...]) -> int:
        """Run one statement and return how many rows it changed."""
        self.db.execute(statement, values)
        return self.db.changes()

    def stream(self, name: str) -> Kept:
        """Return a stream as this transaction sees it; raises ``NotFound``."""
        return self._appends.stream(self.db, name)

    def head(self, name: str, partition: int) -> int:
        """Return the next offset to be written as this transaction sees it."""
        return self._appends.head(self.db, self.stream(name), partition)

    def identity(self, name: str, native_id: str, variant: str) -> Identity | None:
        """Return where an identity of a stream went first; None when it is new there."""
        return self._appends.identity(self.db, self.stream(name), native_id, variant)

    def adopt(self, name: str, partition: int, events: Sequence[Event]) -> None:
        """Append events that got their offsets and times elsewhere; the first one follows on the partition's head."""
        self._appends.adopt(self.db, self.stream(name), partition, events)

    def append(self, name: str, drafts: Sequence[Draft]) -> list[Receipt]:
        """Append events as ``Log.append`` does."""
        return self._appends.stage(self.db, name, drafts, self.now_us)

    def move(self, stream: str, consumer: str, rule: Callable[..., Change], *args: object) -> Any:
        """Apply a rule of ``cursors`` to a consumer and return its answer."""
        return self._consumers.stage(self.db, stream, consumer, rule, args)


class TransactionDoor:
    """Functions of a ``Transaction``. A function that raises undoes everything it did, and only that."""

    chained = False

    def __init__(
        self,
        store: Store,
        appends: AppendDoor,
        consumers: ConsumerDoor,
        *,
        grows: bool,
        make: Callable[[apsw.Connection, int, AppendDoor, ConsumerDoor], Transaction] = Transaction,
    ) -> None:
        self.grows = grows
        self._make = make
        self._store = store
        self._appends = appends
        self._consumers = consumers

    def run(self, db: apsw.Connection, items: list[Callable[[Transaction], Any]]) -> list[Any]:
        """See ``Door.run``; an error after a write fails the batch, and the writer then runs its items one by one."""
        now = self._store.clock.now_us()
        outcomes: list[Any] = []
        for call in items:
            before = db.total_changes()
            try:
                outcomes.append(call(self._make(db, now, self._appends, self._consumers)))
            except PostbusError as error:
                if db.total_changes() != before:
                    raise
                outcomes.append(error)
        return outcomes

    def committed(self) -> None:
        """See ``Door.committed``."""
        self._appends.committed()
        self._consumers.committed()

    def rolled_back(self) -> None:
        """See ``Door.rolled_back``."""
        self._appends.rolled_back()
        self._consumers.rolled_back()

    def others_wrote(self) -> None:
        """See ``Door.others_wrote``; the append door drops what all share."""


class StreamDoor(Call):
    """Rare changes to streams (make, delete, trim): after each, everything known is read again."""

    def __init__(self, store: Store, ledger: Ledger, published: Published) -> None:
        super().__init__(grows=False)
        self._store = store
        self._ledger = ledger
        self._published = published
        self.marks: dict[int, Mark] = {}

    def run(self, db: apsw.Connection, items: list[Any]) -> list[Any]:
        """See ``Door.run``; doors that run later in this transaction must see what changed."""
        outcomes = super().run(db, items)
        self._ledger.forget()
        return outcomes

    def committed(self) -> None:
        """See ``Door.committed``; new partitions are anchored only now that they exist."""
        for slot, mark in self.marks.items():
            self._store.note(slot, mark)
        self.marks = {}
        self._published.forget()

    def rolled_back(self) -> None:
        """See ``Door.rolled_back``."""
        self.marks = {}
        self._ledger.forget()
