"""What store tests and fault campaigns share: facts to append, stores of every shape, and what a store holds."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from postbus.log.sqlite import SqliteLog
from postbus.model import Draft, Event, Start, StartPolicy, StreamSettings
from postbus.store import Folder
from postbus.store.database import PAGE_BYTES, connect
from postbus.store.records import EVENT_FIELDS

__all__ = [
    "EARLIEST",
    "JOURNAL",
    "ROOT",
    "build",
    "children",
    "dump",
    "every_event",
    "fact",
    "facts",
    "opened",
    "run_python",
    "varied",
]

ROOT = Path(__file__).parents[2]
JOURNAL = "local.default.journal"
WIDE = "local.default.wide"
AGAIN = "local.default.again"
EARLIEST = Start(policy=StartPolicy.EARLIEST)

# What a store is made of; two stores with the same answers hold the same.
HOLDINGS = {
    "by position": f"SELECT stream_id, {EVENT_FIELDS} FROM events INDEXED BY events_position "
    'ORDER BY stream_id, partition, "offset"',
    "by row": f'SELECT stream_id, {EVENT_FIELDS} FROM events NOT INDEXED ORDER BY stream_id, partition, "offset"',
    "rows": 'SELECT seq, stream_id, partition, "offset", chain FROM events NOT INDEXED ORDER BY seq',
    "streams": "SELECT stream_id, name, settings, epoch, created_at_us, deleted FROM stream_registry ORDER BY 1",
    "partitions": "SELECT stream_id, partition, first_offset, base_bytes, base_chain FROM partitions ORDER BY 1, 2",
    "identities": "SELECT * FROM identities ORDER BY stream_id, native_id, variant",
    "readers": "SELECT * FROM readers ORDER BY stream_id, consumer",
    "cursors": "SELECT * FROM cursors ORDER BY stream_id, consumer, partition",
    "topics": "SELECT * FROM topic_blocks ORDER BY topic, block",
    "correlations": "SELECT * FROM correlation_rows ORDER BY correlation_id, seq",
    "buckets": "SELECT * FROM time_buckets ORDER BY minute, stream_id, partition",
    "projected": "SELECT * FROM projection_place",
}


def fact(payload: object = 0, **fields: Any) -> Draft:
    """Return a draft; bytes are taken as the payload's JSON as it is."""
    raw = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
    return Draft(**{"topic": "orders.created", "source": "store", "payload_json": raw, **fields})


def facts(count: int, first: int = 0, **fields: Any) -> list[Draft]:
    """Return ``count`` drafts whose payloads are numbered from ``first``."""
    return [fact(number, **fields) for number in range(first, first + count)]


@contextlib.asynccontextmanager
async def opened(folder: Path, **options: Any) -> AsyncIterator[SqliteLog]:
    """Open a log for a block, with a journal in it."""
    log = SqliteLog.open(folder, **options)
    try:
        await log.ensure_stream(JOURNAL)
        yield log
    finally:
        await log.close()


async def every_event(log: SqliteLog, stream: str = JOURNAL, partition: int = 0) -> list[Event]:
    """Return everything a partition retains."""
    found: list[Event] = []
    offset = 0
    while page := await log.fetch(stream, partition, offset, 1000):
        found += page
        offset = page[-1].offset + 1
    return found


def dump(folder: Path) -> dict[str, list[Any]]:
    """Return everything a store holds, read past the log: events by both of their trees, and all small tables."""
    db = connect(Folder(folder), write=False)
    try:
        return {name: list(db.execute(query)) for name, query in HOLDINGS.items()}
    finally:
        db.close()


async def varied(log: SqliteLog, rows: int = 100) -> None:
    """Fill a log with something of every kind: partitions, identities, large payloads, trims, a stream made twice."""
    await log.ensure_stream(JOURNAL)
    await log.ensure_stream(WIDE, StreamSettings(partitions=3))
    await log.ensure_stream(AGAIN)
    await log.append(AGAIN, facts(rows // 2, correlation_id="before"))
    for number in range(rows):
        drafts = [
            fact({"n": number, "text": "x" * (number * 7 % 400)}, correlation_id=f"c{number % 7}"),
            fact(number, native_id=f"id-{number}", variant=str(number % 2), topic=f"topic.t{number % 5}", key="k"),
            fact({"late": number}, occurred_at_us=1_700_000_000_000_000 + (number * 37 % 50) * 60_000_000),
        ]
        await log.append(JOURNAL, drafts)
        await log.append(WIDE, [fact(number, key=f"key-{number % 11}", headers_json=b'{"h":"1"}', trust="untrusted")])
    await log.append(JOURNAL, [fact({"large": "y" * 30_000}, metadata_json=b'{"m":1}', delivery_handle_json=b"{}")])
    await log.ensure_consumer(JOURNAL, "reader", EARLIEST)
    await log.commit(JOURNAL, "reader", rows)
    await log.ensure_consumer(WIDE, "reader", EARLIEST)
    await log.commit(WIDE, "reader", 0, partition=1)
    await log.trim(JOURNAL, before=rows // 3)
    await log.delete_stream(AGAIN)
    await log.ensure_stream(AGAIN)
    await log.append(AGAIN, facts(rows // 4, correlation_id="after"))
    await log.projections.catch_up()


# --- processes --------------------------------------------------------------------------------------------------------


def run_python(module: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start a module of the tests in a process of its own, with its output in a pipe."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **{**pipes, **options})


@contextlib.contextmanager
def children(*processes: subprocess.Popen[str]) -> Any:
    """Make sure that no process outlives its test."""
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def build(folder: Path, *, checkpointed: bool, rows: int = 100) -> None:
    """Make a varied store in a process that is then killed, so that its WAL stays as it was.

    Room that was made behind its last frame is cut off, so that damage to it hits something.
    """
    arguments = [str(folder), str(int(checkpointed)), str(rows)]
    process = run_python("tests.faults.builder", *arguments, stderr=subprocess.PIPE)
    _, error = process.communicate(timeout=120)
    assert process.returncode == -9, error
    wal = Folder(folder).wal
    if wal.exists():
        frames = -(-(len(wal.read_bytes().rstrip(b"\0")) - 32) // (PAGE_BYTES + 24))
        os.truncate(wal, 32 + frames * (PAGE_BYTES + 24) if frames > 0 else 0)
