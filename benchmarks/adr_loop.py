"""The event bus as ADR 004 writes it: one table that is journal and queue, claim ten, mark each.

Where the ADR leaves a choice it is made in its favour: the database is called on the loop's own thread, which is the
fastest way to write it; payloads stay JSON text instead of being decoded for the handler; and after a full batch the
loop claims again at once instead of waiting for the next ``publish`` to wake it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import apsw

from benchmarks.handling import Handling, Loop
from benchmarks.harness import Options, until_steady
from benchmarks.load import PAYLOAD_BYTES, PAYLOADS

__all__ = ["AdrHandling"]

SCHEMA = """
    CREATE TABLE IF NOT EXISTS event_journal (
        id              INTEGER PRIMARY KEY AUTOINCREMENT,
        correlation_id  TEXT,
        topic           TEXT    NOT NULL,
        source          TEXT    NOT NULL,
        payload         TEXT    NOT NULL,
        status          TEXT    NOT NULL DEFAULT 'pending',
        created_at      REAL    NOT NULL,
        processed_at    REAL,
        error           TEXT
    );
    CREATE INDEX IF NOT EXISTS idx_ej_topic_status ON event_journal(topic, status);
    CREATE INDEX IF NOT EXISTS idx_ej_status_created ON event_journal(status, created_at);
    CREATE INDEX IF NOT EXISTS idx_ej_correlation ON event_journal(correlation_id);
"""
BATCH = 10
CLAIM = f"""
    UPDATE event_journal SET status = 'processing'
    WHERE id IN (SELECT id FROM event_journal WHERE status = 'pending' ORDER BY created_at LIMIT {BATCH})
"""
CLAIMED = """
    SELECT id, topic, source, payload, created_at, correlation_id, status FROM event_journal WHERE status = 'processing'
"""
INSERT = "INSERT INTO event_journal (correlation_id, topic, source, payload, created_at) VALUES (?, ?, ?, ?, ?)"
OLD = "INSERT INTO event_journal (topic, source, payload, status, created_at, processed_at) VALUES (?, ?, ?, ?, ?, ?)"
MARK = "UPDATE event_journal SET status = ?, processed_at = ?, error = ? WHERE id = ?"
TOPIC = "bench.orders.created"
SOURCE = "bench:load"


@dataclass(frozen=True)
class Event:
    """What a handler receives."""

    id: int
    topic: str
    source: str
    payload: str
    created_at: float
    correlation_id: str | None = None
    status: str = "pending"


class AdrBus:
    """The ADR's ``EventBus``."""

    def __init__(self, path: Path, synchronous: str, poll_interval: float = 5.0) -> None:
        self.db = apsw.Connection(str(path))
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute(f"PRAGMA synchronous={synchronous}")
        self.db.execute(SCHEMA)
        self._poll_interval = poll_interval
        self._handlers: dict[str, list[Callable[[Event], Awaitable[None]]]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def publish(self, topic: str, source: str, payload: str, correlation_id: str | None = None) -> int:
        """Write the event to the journal and wake the loop; let others have a turn, as whatever awaits does."""
        self.db.execute(INSERT, (correlation_id, topic, source, payload, time.time()))
        number = self.db.last_insert_rowid()
        self._wake.set()
        await asyncio.sleep(0)
        return number

    def subscribe(self, topic: str, handler: Callable[[Event], Awaitable[None]]) -> None:
        """Register a handler in memory."""
        self._handlers.setdefault(topic, []).append(handler)

    def start(self) -> None:
        """Start the dispatch loop."""
        self._task = asyncio.get_running_loop().create_task(self._loop())

    async def stop(self) -> None:
        """End the dispatch loop and close."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.db.close()

    async def _loop(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), timeout=self._poll_interval)
            events = self._claim()
            if len(events) < BATCH:
                self._wake.clear()
            await asyncio.gather(*(self._deliver(event) for event in events))
            await asyncio.sleep(0)

    def _claim(self) -> list[Event]:
        self.db.execute("BEGIN IMMEDIATE")
        self.db.execute(CLAIM)
        events = [Event(*row) for row in self.db.execute(CLAIMED)]
        self.db.execute("COMMIT")
        return events

    async def _deliver(self, event: Event) -> None:
        errors: list[str] = []
        for handler in self._handlers.get(event.topic, []):
            try:
                await handler(event)
            except Exception as error:  # noqa: BLE001 - the remaining handlers still run
                errors.append(str(error))
        status, text = ("failed", "; ".join(errors)) if errors else ("done", None)
        self.db.execute(MARK, (status, time.time(), text, event.id))


class AdrHandling(Handling):
    """The ADR's bus with one handler."""

    def __init__(self, name: str, options: Options, synchronous: str, loop: Loop = None) -> None:
        super().__init__(name, options, loop)
        self._synchronous = synchronous
        self._bus: AdrBus | None = None
        self._texts = {payload: payload.decode() for payload in PAYLOADS}

    def open(self, folder: Path) -> None:
        """See ``Contender.open``."""
        super().open(folder)
        try:
            until_steady(folder / "journal.db-wal", self._write, self._options.warm_bytes)
            self.do(self.warm())
        except BaseException:
            self.close()
            raise

    async def start(self, folder: Path) -> None:
        """See ``Contender.open``."""
        self._bus = AdrBus(folder / "journal.db", self._synchronous)
        self._bus.subscribe(TOPIC, self._handle)
        self._bus.start()

    async def stop(self) -> None:
        """See ``Contender.close``."""
        if self._bus is not None:
            await self._bus.stop()

    async def publish(self, number: int) -> None:
        """See ``Handling.publish``."""
        del number
        await self.bus.publish(TOPIC, SOURCE, self._texts[self.payload()])

    async def nothing_left(self) -> bool:
        """See ``Handling.nothing_left``."""
        left = self.bus.db.execute("SELECT 1 FROM event_journal WHERE status IN ('pending', 'processing') LIMIT 1")
        return not list(left)

    @property
    def bus(self) -> AdrBus:
        """The open bus."""
        assert self._bus is not None
        return self._bus

    async def _handle(self, _event: Event) -> None:
        self.note()

    def _write(self, size: int) -> None:
        """Write events that are done already."""
        now = time.time()
        rows = [(TOPIC, SOURCE, text, "done", now, now) for text in self._texts.values()]
        for _ in range(size // PAYLOAD_BYTES // len(rows) + 1):
            self.bus.db.execute("BEGIN IMMEDIATE")
            self.bus.db.executemany(OLD, rows)
            self.bus.db.execute("COMMIT")
