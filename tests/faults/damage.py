"""Damage to the files of a store, and the judgement: was it noticed, or does the store still hold the same?"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postbus.log.sqlite import SqliteLog
from postbus.model import Event, PostbusError, Start, StartPolicy, StorageError
from postbus.store.backup import check_store
from tests.faults.scene import AGAIN, JOURNAL, WIDE, dump, every_event, fact

__all__ = ["Damage", "Held", "copy", "held", "judge", "throw"]

FILES = ("postbus.db", "postbus.db-wal", "anchor")
SECTOR = 512


@dataclass(frozen=True)
class Damage:
    """One thing done to one file; prints as what it takes to do it again."""

    file: str
    kind: str
    at: int
    value: int = 0

    def apply(self, folder: Path) -> None:
        path = folder / self.file
        data = bytearray(path.read_bytes())
        if self.kind == "bit":
            data[self.at] ^= 1 << self.value
        elif self.kind == "byte":
            data[self.at] ^= self.value
        elif self.kind == "sector":
            data[self.at : self.at + SECTOR] = bytes(len(data[self.at : self.at + SECTOR]))
        elif self.kind == "truncate":
            del data[self.at :]
        path.write_bytes(data)


@dataclass(frozen=True)
class Held:
    """What a store answers: all its rows, and its look-ups."""

    rows: dict[str, list[Any]]
    look_ups: dict[str, list[Event]]


def throw(dice: random.Random, sizes: dict[str, int]) -> Damage:
    """Return some damage; half of it in the database, a third in the WAL."""
    file = dice.choices(FILES, weights=(50, 35, 15))[0]
    kind = dice.choices(("bit", "byte", "sector", "truncate"), weights=(60, 15, 10, 15))[0]
    at = dice.randrange(sizes[file])
    if kind == "sector":
        at -= at % SECTOR
    value = dice.randrange(8) if kind == "bit" else dice.randrange(1, 256)
    return Damage(file, kind, at, value)


def copy(folder: Path, target: Path) -> Path:
    """Copy the files that make up a store; its reserve of disk space is not needed."""
    target.mkdir(mode=0o700)
    for name in FILES:
        if (folder / name).exists():
            shutil.copy2(folder / name, target / name)
    return target


async def held(folder: Path) -> Held:
    """Return what a store holds and answers; changes nothing that counts."""
    rows = dump(folder)
    log = SqliteLog.open(folder)
    try:
        look_ups = {f"topic {pattern}": await log.projections.by_topic(pattern, 10_000) for pattern in ("topic.*", ">")}
        for name in ("before", "after", "recent", "unprojected", *(f"c{number}" for number in range(7))):
            look_ups[f"correlation {name}"] = await log.projections.by_correlation(name)
        for minute in range(-2, 60, 7):
            since = 1_700_000_000_000_000 + minute * 60_000_000
            look_ups[f"minute {minute}"] = await log.projections.between(since, since + 420_000_000, 10_000)
    finally:
        await log.close()
    return Held(rows, look_ups)


async def judge(folder: Path, whole: Held) -> str:
    """Return how damage was noticed (``verify``, ``open``), or ``harmless`` when everything is still there.

    Anything else fails: an error that is not typed, or a store that says it is well and holds something else.
    """
    noticed = _noticed(lambda: check_store(folder).ok)
    refused = await _refused(folder)
    if noticed and not refused:
        await _use(folder)
    if noticed or refused:
        return noticed or refused
    found = await held(folder)
    for name, rows in whole.rows.items():
        assert found.rows[name] == rows, f"{name} changed and nobody noticed"
    for name, events in whole.look_ups.items():
        assert found.look_ups[name] == events, f"the look-up by {name} changed and nobody noticed"
    log = SqliteLog.open(folder)
    await log.append(JOURNAL, [fact("goes on")])
    await log.close()
    assert check_store(folder).ok, "verification fails after the next append"
    return "harmless"


def _noticed(check: Callable[[], bool]) -> str:
    try:
        return "" if check() else "verify"
    except StorageError:
        return "verify"


async def _use(folder: Path) -> None:
    """Use a damaged store that opens; whatever it meets is reported as a typed error."""
    log = SqliteLog.open(folder)
    uses: list[Awaitable[object]] = []
    for stream in (JOURNAL, WIDE, AGAIN):
        uses += [
            every_event(log, stream),
            log.append(stream, [fact(number, native_id=f"id-{number}", variant="0") for number in range(100)]),
            log.append(stream, [fact("new")]),
            log.get_stream_stats(stream),
            log.ensure_consumer(stream, "new", Start(policy=StartPolicy.AT_TIME, time_us=1_700_000_900_000_000)),
            log.read(stream, "reader"),
            log.commit(stream, "reader", 70),
            log.trim(stream, before=40),
        ]
    uses += [log.projections.by_topic(">", 10_000), log.projections.catch_up(), log.consumers(), log.close()]
    for use in uses:
        with contextlib.suppress(PostbusError):
            await asyncio.wait_for(use, 60)


async def _refused(folder: Path) -> str:
    try:
        log = SqliteLog.open(folder)
    except StorageError:
        return "open"
    await log.close()
    return ""
