"""A pull subscription at work: events go to outside consumers under leases, and come back acked, nacked or not at all.

One write per call, shared with everybody else's in one commit: handing out moves how far the subscription has reached,
so that the attempt is on record before the consumer sees the event; an ack moves the cursor, or leaves a row where
something before it is still open. Leases themselves live in memory and on the monotonic clock: after the end of the
process they count as expired.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict
from typing import TYPE_CHECKING

from postbus.delivery.backoff import retry_delay_s
from postbus.delivery.burial import Doomed, bury_all, find_doomed
from postbus.delivery.claims import Claims
from postbus.delivery.leases import Book, Handed, Owed, PullSettings, by_book, find_leases, lease_id
from postbus.delivery.news import News
from postbus.delivery.picking import Picker
from postbus.delivery.table import FAILED, Row
from postbus.model import (
    Event,
    Invalid,
    LeaseLost,
    NotFound,
    OffsetOutOfRange,
    PostbusError,
    Receipt,
    event_id,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from postbus.clock import Clock
    from postbus.delivery.leases import Entry
    from postbus.delivery.picking import Pick
    from postbus.log.sqlite import SqliteLog

__all__ = ["Handed", "PullSettings", "Puller"]

logger = logging.getLogger("postbus.delivery")

RECENT_MAX = 10_000
PASSED_MAX = 1000
NOTICE_S = 1.0
RETRY_S = 0.5


class Puller:
    """Hands out the events of one subscription on one stream. All methods may be called concurrently."""

    def __init__(
        self,
        settings: PullSettings,
        log: SqliteLog,
        clock: Clock,
        owner: str,
        matches: Callable[[Event], bool] | None = None,
    ) -> None:
        self.settings = settings
        self.handed = self.acked = self.dead = 0
        self._log = log
        self._clock = clock
        self._claims = Claims(settings, log, clock, owner)
        self._picker = Picker(settings, log, clock, matches)
        self._news = News(log, clock, settings.stream)
        self._books: list[Book] | None = None
        self._opening = asyncio.Lock()
        self._refreshing = asyncio.Lock()
        self._burying = asyncio.Lock()
        self._ended: set[tuple[int, int]] = set()
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._rearm = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._wake_s = math.inf
        self._used_s = self._kept_s = 0.0
        self._seen = 0
        self._stopping = False

    # --- life ---

    async def stop(self) -> None:
        """Let those who wait go with nothing, and give the lanes back."""
        self._stopping = True
        self._news.tell()
        self._news.stop()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._release()

    def forget(self) -> None:
        """Read everything from disk again at the next use; who holds a lease has lost it."""
        self._books = None
        self._recent.clear()
        self._news.tell()

    def _forget(self, books: list[Book]) -> None:
        if self._books is books:
            self.forget()

    async def _release(self) -> None:
        books, self._books = self._books, None
        if books is not None:
            with contextlib.suppress(PostbusError):  # taken over or deleted; a lane's lease runs out by itself
                entries = [book.entry() for book in books if book.written != book.cursor]
                if entries:
                    await self._claims.write(entries)
                await self._claims.release()

    async def _open(self) -> list[Book] | None:
        """Return the books, taking the lanes when that was not done yet; None while another process has them."""
        self._used_s = self._clock.monotonic_s()
        books = self._books
        if books is None:
            async with self._opening:
                if self._books is None and not self._stopping:
                    self._seen = self._log.foreign_changes
                    self._kept_s = self._clock.monotonic_s()
                    self._books = await self._claims.take()
                books = self._books
        if books is not None and (self._watching is None or self._watching.done()):
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        return books

    async def _mine(self) -> list[Book]:
        books = await self._open()
        if books is None:
            raise LeaseLost(f"another process hands out the events of {self.settings.id} now")
        return books

    async def _book(self, partition: int) -> Book:
        books = await self._mine()
        if not 0 <= partition < len(books):
            raise NotFound(f"stream {self.settings.stream} has partitions 0..{len(books) - 1}, not {partition}")
        return books[partition]

    def held_by(self, holder: str) -> int:
        """Return how many events a holder has in its hands."""
        return sum(book.holders.get(holder, 0) for book in self._books or ())

    # --- handing out ---

    async def pull(
        self,
        limit: int = 100,
        wait_s: float = 0.0,
        *,
        holder: str | None = None,
        hold: bool = False,
        held_max: int | None = None,
    ) -> list[Handed]:
        """Hand out up to ``limit`` events, waiting for the first one for up to ``wait_s``.

        Events of one partition come by offset, partitions take turns. ``holder`` is the secret in the lease ids, a new
        one when not given, who gets nothing while it holds ``held_max`` events; ``hold`` leases also where handing
        out would be acking. Who is cancelled gives back what it would have got.
        """
        if self.stopped:
            raise NotFound(f"subscription {self.settings.id} is no longer served here")
        deadline_s = self._clock.monotonic_s() + wait_s
        holder = holder or self._clock.new_id()
        while True:
            news = self._news.now
            room = limit if held_max is None else min(limit, held_max - self.held_by(holder))
            found, more = await self._claim_safely(room, holder, hold=hold) if room > 0 else ([], False)
            left_s = deadline_s - self._clock.monotonic_s()
            if found or self._stopping or left_s <= 0:
                return found
            if not more:
                self._arm(self._clock.monotonic_s() + NOTICE_S)
                books = self._books
                await self._news.wait(news, books or [], left_s if books is not None else min(left_s, NOTICE_S))

    async def _claim_safely(self, limit: int, holder: str, *, hold: bool) -> tuple[list[Handed], bool]:
        claim = asyncio.get_running_loop().create_task(self._claim(limit, holder, hold=hold))
        try:
            return await asyncio.shield(claim)
        except asyncio.CancelledError:
            claim.add_done_callback(self._unclaimed)
            raise

    def _unclaimed(self, claim: asyncio.Task[tuple[list[Handed], bool]]) -> None:
        if not claim.cancelled() and claim.exception() is None:
            self.give_back([handed.lease_id for handed in claim.result()[0] if handed.lease_id is not None])

    def give_back(self, lease_ids: Iterable[str]) -> None:
        """Let go of leases whose events the consumer never saw; they are handed out again at once."""
        now_s = self._clock.monotonic_s()
        for book, offset, _ in find_leases(self._books or [], lease_ids, now_s)[0]:
            book.start(offset, now_s)
        self._arm(now_s)

    async def _claim(self, limit: int, holder: str, *, hold: bool) -> tuple[list[Handed], bool]:
        """Pick events and record that they are handed out; also say whether it is worth to look again at once."""
        books = await self._open()
        if books is None:
            return [], False
        leases = hold or not self.settings.auto
        try:
            picked, more = await self._picker.pick(books, limit, holder)
            if any(book.doomed for book in books):
                self._arm(-1.0)
            if self._books is not books:
                return [], True  # a reset or an error came between
            picked = [pick for pick in picked if pick.event.offset in pick.book.leased]  # not settled meanwhile
            entries = self._entries(books, picked, leases=leases)
            if entries:
                await self._claims.write(entries)
        except LeaseLost:
            self._forget(books)
            return [], True
        except BaseException:
            self._forget(books)
            raise
        until_s = self._clock.monotonic_s() + self.settings.ack_timeout_s
        for pick in picked:
            pick.book.start(pick.event.offset, until_s)
        if picked and leases:
            self._arm(until_s)
        self.handed += len(picked)
        if not leases:
            return [Handed(event, None, attempt) for _, event, attempt in picked], more
        return [
            Handed(event, lease_id(holder, event.partition, event.offset), attempt)
            for book, event, attempt in picked
            if event.offset in book.leased
        ], more

    def _entries(self, books: list[Book], picked: list[Pick], *, leases: bool) -> list[Entry]:
        """Return what to write for what was picked, and how far events that did not match were passed over."""
        mine: dict[int, list[tuple[int, int]]] = {}
        for book, event, attempt in picked:
            mine.setdefault(book.partition, []).append((event.offset, attempt))
        entries = []
        for book in books:
            own = mine.get(book.partition, [])
            if own and not leases:
                entries.append(book.settle([offset for offset, _ in own]))
            elif own or book.cursor - book.written >= PASSED_MAX:
                entries.append(book.entry([book.running(*one) for one in own if one[1] > 1 or one[0] in book.rows]))
        return entries

    async def resume(
        self, holder: str, previous: str | None, places: dict[int, int], lacks: set[tuple[int, int]], *, settle: bool
    ) -> None:
        """Go on for a reader that was cut off and has everything up to ``places`` that it was handed out.

        What ``previous`` holds beyond, or ``lacks``, is handed out again at once; what it has stays leased, now to
        ``holder``, or is settled. The same goes for what was handed out when the process ended.
        """
        books = await self._mine()
        now_s = self._clock.monotonic_s()
        until_s = now_s + self.settings.ack_timeout_s
        entries = []
        for book in books:
            lacking = {offset for partition, offset in lacks if partition == book.partition}
            has = places.get(book.partition, -1)
            settled = book.resume(holder, previous, has, lacking, now_s, until_s)
            if settle and settled:
                entries.append(book.settle(settled))
        if entries:
            await self._write(books, entries)
        self._arm(now_s)

    def cursor(self, partition: int) -> int:
        """Return the offset below which everything is settled, but for what was made due again."""
        return self._books[partition].cursor if self._books is not None and partition < len(self._books) else 0

    def handed_before(self, event: Event) -> bool:
        """Say whether an event was for this subscription and is settled."""
        books = self._books or []
        settled = event.partition < len(books) and books[event.partition].settled(event.offset)
        return settled and self._picker.wants(event)

    @property
    def stopped(self) -> bool:
        """Whether it hands out nothing any more."""
        return self._stopping

    # --- what consumers report ---

    async def ack(self, lease_ids: Iterable[str]) -> int:
        """Settle events by their leases and return how many; durable when it returns.

        Raises ``LeaseLost`` when one of them is no longer held, and settles none. Acking again what was acked under the
        same lease changes nothing.
        """
        books = await self._mine()
        held = self._held(lease_ids, again=True)
        entries = [book.settle(offsets) for book, offsets in by_book(held)]
        self._note_ended((book.partition, offset) for book, offset, _ in held)
        if entries:
            await self._write(books, entries)
        for _, _, name in held:
            self._recent[name] = None
        while len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)
        self.acked += len(held)
        self._news.tell()
        return len(held)

    async def settle(self, holder: str, events: list[Event]) -> int:
        """Ack what a holder was handed out, as far as it still holds it."""
        names = [lease_id(holder, event.partition, event.offset) for event in events]
        held, _ = find_leases(self._books or [], names, self._clock.monotonic_s())
        return await self.ack([name for *_, name in held]) if held else 0

    async def commit(self, partition: int, through: int) -> None:
        """Settle everything in a partition up to an offset, the last consumed one; lower than now changes nothing.

        Raises ``OffsetOutOfRange`` for an offset that is not there yet.
        """
        await self._book(partition)
        stats = await self._log.get_stream_stats(self.settings.stream)
        head = stats.partitions[partition].high_water_mark
        if not 0 <= through < head:
            message = f"offset {through} is outside 0..{head - 1} of {self.settings.stream}/{partition}"
            raise OffsetOutOfRange(message, hint="commit the last consumed offset, below the high water mark")
        book, books = await self._book(partition), await self._mine()
        leased = [offset for offset in book.leased if offset <= through]
        if through >= book.cursor or leased:
            self._note_ended((partition, offset) for offset in (*leased, *book.owed) if offset <= through)
            await self._write(books, [book.commit(through)])
            self.acked += len(leased)
            self._news.tell()

    async def nack(self, lease_ids: Iterable[str], delay_s: float | None = None, error: str | None = None) -> int:
        """Give events back to be handed out again after ``delay_s`` (by the retry policy when not given).

        What has used up its attempts becomes a dead letter. Raises ``LeaseLost`` as ``ack`` does.
        """
        books = await self._mine()
        held = self._held(lease_ids)
        entries = [
            book.entry([self._refused(book, one, delay_s, error) for one in many]) for book, many in by_book(held)
        ]
        if entries:
            await self._write(books, entries)
        with contextlib.suppress(PostbusError):  # it is on record; whoever watches tries again
            await self._bury_doomed(books)
        self._arm(-1.0 if any(book.doomed for book in books) else min(book.alarm_s for book in books))
        self._news.tell()
        return len(held)

    def _refused(self, book: Book, offset: int, delay_s: float | None, error: str | None) -> Row:
        lease = book.unlease(offset)
        policy, attempt = self.settings.retry, lease.attempt if lease is not None else 1
        row = book.running(offset, attempt)
        row.error = error
        if attempt >= policy.max_attempts:
            book.doomed[offset] = attempt
        else:
            wait_s = retry_delay_s(policy, attempt) if delay_s is None else delay_s
            self._claims.delayed(row, wait_s)
            book.owe(offset, Owed(attempt, self._clock.monotonic_s() + wait_s))
        return row

    async def extend(self, lease_ids: Iterable[str], by_s: float | None = None) -> int:
        """Let leases run anew, for the ack timeout or for ``by_s``; raises ``LeaseLost`` as ``ack`` does."""
        await self._mine()
        held = self._held(lease_ids)
        until_s = self._clock.monotonic_s() + (self.settings.ack_timeout_s if by_s is None else by_s)
        for book, offset, _ in held:
            book.start(offset, until_s)
        self._arm(until_s)
        return len(held)

    def _held(self, lease_ids: Iterable[str], *, again: bool = False) -> list[tuple[Book, int, str]]:
        held, stale = find_leases(self._books or [], lease_ids, self._clock.monotonic_s())
        if again:
            stale = [name for name in stale if name not in self._recent]
        if stale:
            message = f"{len(stale)} leases are no longer held, the first is {stale[0]}; nothing was changed"
            hint = "their events are handed out again; leave them out, and extend leases in time"
            raise LeaseLost(message, hint=hint, lease_ids=tuple(stale))
        return held

    async def _write(self, books: list[Book], entries: list[Entry]) -> None:
        try:
            await self._claims.write(entries)
        except asyncio.CancelledError:
            raise  # what was queued is committed all the same
        except BaseException:
            self._forget(books)  # what was changed in memory is not on disk
            raise

    def _note_ended(self, places: Iterable[tuple[int, int]]) -> None:
        if self._refreshing.locked():
            self._ended.update(places)

    # --- dead letters ---

    async def deadletter(
        self, partition: int, offset: int, reason: str, headers: dict[str, str] | None = None
    ) -> Receipt:
        """Give up on an event: append it to the dead-letter stream and settle it. Once per event.

        Raises ``Invalid`` when the subscription names no dead-letter stream, ``NotFound`` when the event is not there.
        """
        if self.settings.dead_letter_stream is None:
            message = f"subscription {self.settings.id} has no dead-letter topic"
            raise Invalid(message, hint="create it with dead_letter_topic")
        book = await self._book(partition)
        known = await self._claims.known(partition, offset)
        if known is not None and known.status == FAILED and known.dead_stream is not None:
            return Receipt(known.dead_stream, 0, known.dead_offset or 0, duplicate=True)
        row = known or Row(offset=offset)
        lease = book.leased.get(offset)
        row.attempt = max(row.attempt, lease.attempt if lease is not None else 0)
        event = await self._picker.find(partition, offset, row)
        if event is None:
            raise NotFound(f"there is no event {event_id(self.settings.stream, partition, offset)}")
        return (await self._bury(book, [Doomed(event, row, reason, reason)], headers))[0]

    async def _bury_doomed(self, books: list[Book]) -> None:
        async with self._burying:
            for book in books:
                letters = await find_doomed(self.settings, self._picker, book)
                if letters and self._books is books:
                    await self._bury(book, letters)

    async def _bury(self, book: Book, doomed: list[Doomed], headers: dict[str, str] | None = None) -> list[Receipt]:
        receipts = await bury_all(self.settings, self._log, self._claims, book.partition, doomed, headers)
        self._note_ended((book.partition, one.event.offset) for one in doomed)
        for one in doomed:
            book.bury(one.event.offset)
        self.dead += len(doomed)
        if book.cursor != book.written and self._books is not None and book in self._books:
            await self._write(self._books, [book.entry()])
        return receipts

    # --- time ---

    def _arm(self, at_s: float) -> None:
        if at_s < self._wake_s:
            self._rearm.set()

    async def _watch(self) -> None:
        """Take back what is not acked in time, bury what has used up its attempts, keep the lanes while in use."""
        while (books := self._books) is not None:
            self._rearm.clear()
            wait_s = RETRY_S
            try:
                wait_s = await self._look(books)
            except (LeaseLost, NotFound):  # taken over or deleted
                self._forget(books)
                continue
            except PostbusError as error:
                logger.warning("%s on %s: %s", self.settings.id, self.settings.stream, error)
            except Exception:
                logger.exception("watching %s on %s failed; it goes on", self.settings.id, self.settings.stream)
            self._wake_s = self._clock.monotonic_s() + wait_s
            await self._clock.wait(self._rearm, max(wait_s, 0.001))
            self._wake_s = math.inf  # from here on until it waits again, whatever comes up makes it look once more

    async def _look(self, books: list[Book]) -> float:
        """Do what is due; return how long nothing will be."""
        now_s, lease_s = self._clock.monotonic_s(), self.settings.lease_s
        for book in books:
            self._picker.tick(book)
        if any(book.doomed for book in books):
            await self._bury_doomed(books)
        if self._news.waiters and any(book.ready for book in books):
            self._news.tell()
        if self._log.foreign_changes != self._seen:
            await self.refresh()
        idle = not self._news.waiters and not any(book.leased for book in books)
        if idle and now_s - self._used_s >= lease_s:
            await self._release()
        elif now_s - self._kept_s >= lease_s / 3:
            self._kept_s = now_s
            await self._claims.write([book.entry() for book in books])
        pause_s = NOTICE_S if self._news.waiters else lease_s / 3
        return min(pause_s, *(book.alarm_s - self._clock.monotonic_s() for book in books))

    async def refresh(self) -> None:
        """Take over what somebody else made due again: replayed dead letters, an operator's re-queue, a reset."""
        async with self._refreshing:
            books = self._books
            if books is None:
                return
            self._seen = self._log.foreign_changes
            self._ended.clear()
            try:
                found = await self._claims.revived()
            except LeaseLost:
                self._forget(books)
                return
            for partition, row in found:
                if (partition, row.offset) not in self._ended:
                    books[partition].revive(row, self._clock.monotonic_s())
            self._arm(self._clock.monotonic_s())
            self._news.tell()
