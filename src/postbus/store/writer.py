"""One writer with group commit: everything queued goes into one transaction and one fsync, then all waiters are told.

Callers submit items to *doors*. A door is one kind of write (append, move a cursor, …) that handles all queued items of
its kind together. Two drivers run the same batch code under one lock:

* while commits are fast and nobody else holds the write lock, the event loop commits its own batch at the end of the
  iteration in which it was queued; two thread hand-overs would cost more than such a commit does;
* otherwise (slow disk, large batch, another process writing) the writer thread does, so that the loop never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import random
import threading
import time
import types
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import apsw

from postbus.model import StorageError, StorageFailed, StorageFull, StoreBusy
from postbus.store.refusals import MISREAD, no_room, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from postbus.store.folder import Folder

__all__ = ["Call", "Door", "Writer"]

INLINE_S_MAX = 0.001
INLINE_WEIGHT_MAX = 256
ALONE_S = 0.001
BATCH_JOBS_MAX = 4096
BUSY_S_MAX = 30.0
FULL_RETRY_S = 0.2
FULL_BATCHES = 16
QUEUE_MAX = 100_000

# Count a transaction that changed something else than the log itself; the anchor remembers the number.
COUNT_CHANGE = """
    INSERT INTO store_facts VALUES ('changes', '1') ON CONFLICT (name) DO UPDATE SET value = value + 1 RETURNING value
"""


_OPEN: Any = object()
_DOOR, _ITEM = itemgetter(0), itemgetter(1)


class Door(Protocol):
    """One kind of write. All methods run under the writer's lock, on the loop or on the writer thread."""

    chained: bool
    """Whether the anchor's marks cover what it writes; what other doors change is counted in the anchor."""

    grows: bool
    """Whether it takes disk space; such doors are refused with ``StorageFull`` while the disk is full."""

    def run(self, db: apsw.Connection, items: list[Any]) -> list[Any]:
        """Write the items inside the open transaction; return one outcome each: a value, or an exception to raise.

        An item whose outcome is an exception must have written nothing.
        """

    def committed(self) -> None:
        """Publish what ``run`` staged; called after COMMIT and before any waiter is told."""

    def rolled_back(self) -> None:
        """Forget what ``run`` staged."""

    def others_wrote(self) -> None:
        """Forget what is cached from the database: another process has changed it."""


class Call:
    """A door for rare writes: each item is a function of the connection, run in a savepoint of its own."""

    chained = False

    def __init__(self, *, grows: bool) -> None:
        self.grows = grows

    def run(self, db: apsw.Connection, items: list[Callable[[apsw.Connection], Any]]) -> list[Any]:
        """Call each function; its exception undoes its own writes only."""
        outcomes: list[Any] = []
        for call in items:
            # Not apsw's own savepoint: on some errors SQLite ends the transaction, and leaving one would hide them.
            db.execute("SAVEPOINT item")
            try:
                outcomes.append(call(db))
            except apsw.Error:
                raise
            except Exception as error:  # noqa: BLE001 - handed to the caller that submitted it
                db.execute("ROLLBACK TO item")
                outcomes.append(error)
            db.execute("RELEASE item")
        return outcomes

    def committed(self) -> None:
        """Nothing is staged."""

    def rolled_back(self) -> None:
        """Nothing is staged."""

    def others_wrote(self) -> None:
        """Nothing is cached."""


# What came of one item, for a task that looks when its turn comes, and what wakes it when it has to wait for it. A bare
# list: one is made for every event that is appended.
_Turn = list[Any]
Job = tuple[Door, Any, "asyncio.Future[Any] | _Turn", asyncio.AbstractEventLoop]
"""A door, an item for it, who waits for the outcome, and on which loop."""


class Writer:
    """Owns the write connection. ``put`` and ``submit`` may be called from any event loop."""

    def __init__(self, db: apsw.Connection, folder: Folder, counted: Callable[[int], None]) -> None:
        self._db = db
        self._folder = folder
        self._counted = counted
        self._queue: deque[Job] = deque()
        self._lock = threading.Lock()
        self._signal: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._doors: list[Door] = []
        self._scheduled = self._called = False
        self._heavy = False
        self._patient = True
        self._waited_since = 0.0
        self._contended = False
        self._commit_s = 0.0
        self._jobs, self._ran_s = 0, 0.0
        self._refusal: StorageError | None = None
        self._closed = False
        self._full = False
        self._full_checked_s = 0.0
        self._full_batches = 0
        self._version = self._data_version()
        self._own_version = -1
        db.set_busy_handler(self._busy)
        self._thread = threading.Thread(target=self._main, name="postbus-writer", daemon=True)
        self._thread.start()

    def add_door(self, door: Door) -> None:
        """Tell the door from now on when other processes wrote."""
        self._doors.append(door)

    @property
    def crowded(self) -> bool:
        """Whether so many items wait that callers should wait first."""
        return len(self._queue) >= QUEUE_MAX

    @property
    def failed(self) -> bool:
        """Whether a write failed in a way that leaves the disk's state unknown."""
        return isinstance(self._refusal, StorageFailed)

    @property
    def full(self) -> bool:
        """Whether the disk was full at the last try."""
        return self._full

    async def put(self, door: Door, item: object, weight: int = 1) -> Any:
        """Queue an item and return its outcome after the commit that holds it. A cancelled wait does not undo it.

        Lets all others that are ready queue theirs first; then whoever comes back first commits for everyone, and the
        others find their outcomes there, without a future each. Who comes alone, as the one before, commits first and
        lets the others have their turn after that.
        """
        if self._refusal is not None:
            raise self._refusal
        loop = asyncio.get_running_loop()
        turn: _Turn = [_OPEN, None]
        self._queue.append((door, item, turn, loop))
        if weight > INLINE_WEIGHT_MAX:
            self._heavy = True
        if self._jobs == 1 == len(self._queue) and time.monotonic() - self._ran_s > ALONE_S:
            self._flush(loop)
        try:
            await _pass()
        except BaseException:
            if turn[0] is _OPEN:
                self._schedule(loop)
            raise
        if turn[0] is _OPEN:
            self._flush(loop)
            if turn[0] is _OPEN:
                turn[1] = loop.create_future()
                await turn[1]
        outcome = turn[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def submit(self, door: Door, item: object, weight: int = 1) -> asyncio.Future[Any]:
        """Queue an item; the future resolves after the commit that holds it. A cancelled wait does not undo it."""
        if self._refusal is not None:
            raise self._refusal
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._queue.append((door, item, future, loop))
        if weight > INLINE_WEIGHT_MAX:
            self._heavy = True
        self._schedule(loop)
        return future

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._flush, loop)

    def notice(self) -> None:
        """Look whether another process has written, and tell the doors; never waits."""
        if self._closed:
            raise StorageError("the store is closed")
        if not self._lock.acquire(blocking=False):
            return  # a batch is running and looks by itself
        try:
            self._patient = False
            with contextlib.suppress(apsw.Error):  # reading and writing find out by themselves
                self._look()
        finally:
            self._lock.release()

    def kick(self) -> None:
        """Have the thread look at the queue: the loop that promised to flush may be gone."""
        if self._queue:
            self._scheduled = False
            self._call_thread()

    def fail(self, error: BaseException) -> None:
        """Refuse all further writes: what the disk holds is no longer known."""
        if not self.failed:
            self._refusal = StorageFailed(
                f"a write to the store failed ({error}); it is read-only until it is reopened and verified",
                hint="close it, run `postbus verify`, then open it again",
            )

    def close(self) -> None:
        """Commit what is queued, refuse what comes later, and stop the thread."""
        self._refusal = self._refusal or StorageError("the store is closed")
        self._closed = True
        self._signal.put(False)
        self._thread.join()

    # --- drivers ---

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        self._scheduled = False
        inline = not self._heavy and self._commit_s < INLINE_S_MAX and not self._contended
        if inline and self._lock.acquire(blocking=False):
            try:
                self._patient = False
                self._run(loop)
            finally:
                self._lock.release()
        if self._queue:
            self._call_thread()

    def _call_thread(self) -> None:
        """Have the thread look at the queue, once however many ask before it does."""
        if not self._called:
            self._called = True
            self._signal.put(True)

    def _main(self) -> None:
        while True:
            go_on = self._signal.get()
            self._called = False  # before looking: whoever queues after the look calls again
            while self._queue:
                with self._lock:
                    self._patient = True
                    self._run(None)
                if self._contended:  # let the other process in: the lock is not fair by itself
                    time.sleep(random.uniform(0.0002, 0.001))  # noqa: S311 - jitter
            if not go_on:
                return

    def _busy(self, tries: int) -> bool:
        if not self._patient:
            return False
        if tries == 0:
            self._waited_since = time.monotonic()
        if time.monotonic() - self._waited_since > BUSY_S_MAX:
            return False
        time.sleep(random.uniform(0.0001, min(0.0005 * (tries + 1), 0.005)))  # noqa: S311 - jitter
        return True

    # --- one batch ---

    def _run(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Take what is queued through one transaction; with ``loop`` this is that loop's own thread."""
        jobs = self._queue
        batch = [jobs.popleft() for _ in range(min(len(jobs), BATCH_JOBS_MAX))]
        if not batch:
            return
        self._heavy = False
        self._jobs, self._ran_s = len(batch), time.monotonic()
        if self._refusal is not None and self.failed:
            self._settle([(job, self._refusal) for job in batch], loop)
            return
        if self._full:
            batch = self._without_growth(batch, loop)
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except apsw.BusyError:
            if self._patient:
                text = f"another process held the store's write lock for {BUSY_S_MAX:.0f} s"
                self._settle([(job, StoreBusy(text)) for job in batch], loop)
            else:
                jobs.extendleft(reversed(batch))
            return
        except apsw.Error as error:
            self._settle(self._after_failure(batch, error, loop), loop)
            return
        self._settle(self._transact(batch, loop), loop)
        if self._full:
            self._full_batches += 1
            if self._full_batches % FULL_BATCHES == 0:
                self._empty_wal()

    def _empty_wal(self) -> None:
        """Copy the WAL to the database, so that on a full disk it starts over: what room is left must do for long."""
        try:
            self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except (apsw.BusyError, apsw.FullError):
            pass
        except apsw.Error as error:
            self.fail(error)

    def _transact(
        self,
        batch: list[Job],
        loop: asyncio.AbstractEventLoop | None,
    ) -> list[tuple[Any, Any]]:
        groups: dict[Door, list[Any]]
        if len(batch) == 1 or len(set(map(_DOOR, batch))) == 1:
            groups = {batch[0][0]: batch}
        else:
            groups = {}
            for job in batch:
                groups.setdefault(job[0], []).append(job)
        settled: list[tuple[Any, Any]] = []
        changes, db = 0, self._db
        try:
            if db.data_version() == self._own_version:  # nobody has committed since this writer did
                self._contended = False
            else:
                self._look()
            for door, group in groups.items():
                before = 0 if door.chained else db.total_changes()
                settled += zip(group, door.run(db, list(map(_ITEM, group))), strict=True)
                if not door.chained and not changes and db.total_changes() != before:
                    changes = int(db.execute(COUNT_CHANGE).get)
            started = time.perf_counter()
            db.execute("COMMIT")
            self._commit_s += 0.2 * (time.perf_counter() - started - self._commit_s)
            self._own_version = db.data_version()
        except Exception as error:  # noqa: BLE001 - every kind is sorted out below, nothing is swallowed
            self._roll_back(groups)
            return self._after_failure(batch, error, loop)
        if changes:
            self._counted(changes)
        for door in groups:
            door.committed()
        return settled

    def _after_failure(self, batch: list[Any], error: Exception, loop: asyncio.AbstractEventLoop | None) -> list[Any]:
        if no_room(error):
            spent = self._full  # the reserve was given back before
            self._folder.release_reserve()
            self._full = True
            self._full_checked_s = time.monotonic()
            smaller = self._without_growth(batch, loop)
            if spent and len(smaller) == len(batch):  # even the acknowledgements do not fit
                return [(job, _full()) for job in batch]
            return self._again(smaller, loop)
        blameless = isinstance(error, apsw.Error) and not isinstance(error, (apsw.ConstraintError, apsw.SQLError))
        if blameless or self._db.in_transaction:
            self._refuse_batch(batch, error, loop)
            return []
        if len(batch) == 1:
            if isinstance(error, (apsw.Error, *MISREAD)):
                return [(batch[0], _because(refusal(self._folder, error, "could not do that"), error))]
            return [(batch[0], error)]
        settled: list[Any] = []
        for job in batch:  # one of them is at fault; the others must not pay for it
            settled += self._again([job], loop)
        return settled

    def _again(self, batch: list[Any], loop: asyncio.AbstractEventLoop | None) -> list[Any]:
        if not batch:
            return []
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except apsw.BusyError as error:
            return [(job, StoreBusy(str(error))) for job in batch]
        except apsw.Error as error:
            if no_room(error):
                return [(job, _full()) for job in batch]
            self._refuse_batch(batch, error, loop)
            return []
        return self._transact(batch, loop)

    def _without_growth(self, batch: list[Any], loop: asyncio.AbstractEventLoop | None) -> list[Any]:
        """Refuse what takes space while the disk is full; let it pass again once the reserve can be held."""
        if time.monotonic() - self._full_checked_s > FULL_RETRY_S:
            self._full_checked_s = time.monotonic()
            if self._folder.hold_reserve():
                self._full = False
                return batch
        self._settle([(job, _full()) for job in batch if job[0].grows], loop)
        return [job for job in batch if not job[0].grows]

    def _refuse_batch(self, batch: list[Any], error: BaseException, loop: asyncio.AbstractEventLoop | None) -> None:
        self.fail(error)
        self._settle([(job, self._refusal) for job in batch], loop)

    def _roll_back(self, groups: dict[Door, list[Any]]) -> None:
        if self._db.in_transaction:
            with contextlib.suppress(apsw.Error):
                self._db.execute("ROLLBACK")
        for door in groups:
            door.rolled_back()

    def _look(self) -> None:
        version = self._data_version()
        self._contended = version != self._version
        if self._contended:
            self._version = version
            for door in self._doors:
                door.others_wrote()

    def _data_version(self) -> int:
        return int(self._db.execute("PRAGMA data_version").get)

    # --- telling the waiters ---

    @staticmethod
    def _settle(pairs: list[tuple[Any, Any]], here: asyncio.AbstractEventLoop | None) -> None:
        elsewhere: dict[asyncio.AbstractEventLoop, list[tuple[Any, Any]]] = {}
        for job, outcome in pairs:
            _, _, waiter, loop = job
            if loop is not here:
                elsewhere.setdefault(loop, []).append((job, outcome))
            elif type(waiter) is list and waiter[1] is None:
                waiter[0] = outcome
            else:
                _tell(waiter, outcome)
        for loop, theirs in elsewhere.items():
            with contextlib.suppress(RuntimeError):  # that loop was closed; nobody waits there
                loop.call_soon_threadsafe(_tell_all, theirs)


@types.coroutine
def _pass() -> Generator[None, None, None]:
    """Let every other task that is ready go first."""
    yield


def _tell(waiter: asyncio.Future[Any] | _Turn, outcome: object) -> None:
    if isinstance(waiter, list):
        waiter[0] = outcome
        if waiter[1] is not None and not waiter[1].done():
            waiter[1].set_result(None)
    elif waiter.done():
        return
    elif isinstance(outcome, BaseException):
        waiter.set_exception(outcome)
    else:
        waiter.set_result(outcome)


def _tell_all(pairs: list[tuple[Any, Any]]) -> None:
    for job, outcome in pairs:
        _tell(job[2], outcome)


def _because(refused: StorageError, error: Exception) -> StorageError:
    refused.__cause__ = error
    return refused


def _full() -> StorageFull:
    return StorageFull(
        "the disk is full: nothing was appended",
        hint="free some space; reads and acknowledgements go on, appends resume by themselves",
    )
