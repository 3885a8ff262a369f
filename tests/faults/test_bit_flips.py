"""Flipped bits, wiped sectors, cut-off files: each is noticed or provably harmless; salvage loses only what was hit."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from postbus.log import SqliteLog
from postbus.model import CorruptLog, Start, StartPolicy
from postbus.store import salvage
from postbus.store.backup import check_store
from tests.faults.campaign import FULL, dice
from tests.faults.damage import FILES, Damage, Held, copy, held, judge, throw
from tests.faults.scene import JOURNAL, build, fact, opened

DAMAGES = 5000 if FULL else 60
SALVAGES = 1000 if FULL else 12


@pytest.fixture(scope="module", params=[True, False], ids=["checkpointed", "in the WAL"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose process was killed: nearly all of it in the database, or nearly all of it in the WAL."""
    folder = tmp_path_factory.mktemp("flips") / "base"
    build(folder, checkpointed=request.param, rows=100 if request.param else 40)
    return folder


async def wholly(base: Path, ground: Path) -> Held:
    return await held(copy(base, ground / "whole"))


async def test_damage_is_noticed_or_harmless(base: Path, ground: Path) -> None:
    rolls = dice("bit flips")
    whole = await wholly(base, ground)
    sizes = {name: (base / name).stat().st_size for name in FILES}
    verdicts: Counter[tuple[str, str]] = Counter()
    for number in range(DAMAGES):
        damage = throw(rolls, sizes)
        folder = copy(base, ground / str(number))
        damage.apply(folder)
        try:
            verdicts[damage.file, await judge(folder, whole)] += 1
        except Exception as error:
            raise AssertionError(f"{damage} was not noticed") from error
        shutil.rmtree(folder)
    print(dict(verdicts))  # noqa: T201 - what the campaign did
    assert verdicts["postbus.db", "verify"] + verdicts["postbus.db-wal", "verify"] > DAMAGES // 10


async def test_salvage_of_damage_keeps_the_rest(base: Path, ground: Path) -> None:
    rolls = dice("salvage")
    whole = await wholly(base, ground)
    sizes = {name: (base / name).stat().st_size for name in FILES}
    original = {(row[0], row[1], row[2]): row for row in whole.rows["by row"]}
    first = {(row[0], row[1]): row[2] for row in whole.rows["partitions"]}
    epochs = {row[0]: row[3] for row in whole.rows["streams"]}
    worst = 0
    for number in range(SALVAGES):
        damage = throw(rolls, sizes)
        folder = copy(base, ground / str(number))
        damage.apply(folder)
        result = salvage(folder, ground / f"{number} saved")
        assert check_store(ground / f"{number} saved").ok, damage
        saved = await held(ground / f"{number} saved")
        lost = 0
        # When the damage hit a trim or the making of a stream, what it removed may come back.
        older = {row[0] for row in saved.rows["streams"] if row[3] < epochs[row[0]]}
        for row in saved.rows["by row"]:
            if row[3] == "postbus.lost":
                lost += 1
            elif row[2] >= first[row[0], row[1]] and row[0] not in older:
                assert row == original[row[0], row[1], row[2]], f"{damage}: another event at an address"
        missing = original.keys() - {(row[0], row[1], row[2]) for row in saved.rows["by row"]}
        assert lost == result.lost
        if damage.kind != "truncate":  # a file that is cut off takes everything behind the cut along
            worst = max(worst, lost + len(missing))
        shutil.rmtree(folder)
        shutil.rmtree(ground / f"{number} saved")
    print(f"at most {worst} of {len(original)} events lost to one flip")  # noqa: T201 - what the campaign did
    assert worst < len(original) // 4


@pytest.mark.parametrize("kind", ["bit", "truncate"])
async def test_damage_at_the_ends_of_files_is_noticed_or_harmless(base: Path, ground: Path, kind: str) -> None:
    whole = await wholly(base, ground)
    for name in FILES:
        size = (base / name).stat().st_size
        for at in {0, 1, 17, 18, 63, 100, size - 1, size - 33, size - 8192}:
            if 0 <= at < size:
                folder = copy(base, ground / f"{name} {at}")
                damage = Damage(name, kind, at, 0)
                damage.apply(folder)
                assert await judge(folder, whole), damage
                shutil.rmtree(folder)


async def test_a_lost_wal_is_noticed(base: Path, ground: Path) -> None:
    folder = copy(base, ground / "copy")
    (folder / "postbus.db-wal").unlink()
    assert await judge(folder, await wholly(base, ground)) == "verify"


async def test_an_undamaged_copy_is_harmless(base: Path, ground: Path) -> None:
    whole = await wholly(base, ground)
    assert await judge(copy(base, ground / "copy"), whole) == "harmless"
    async with opened(ground / "copy") as log:
        await log.append(JOURNAL, [fact("and on")])


@pytest.mark.parametrize("column", ["latest_at_us", "bytes_through"])
async def test_a_number_that_became_something_else_is_damage(base: Path, ground: Path, column: str) -> None:
    folder = copy(base, ground / "other")
    with closing(apsw.Connection(str(folder / "postbus.db"))) as db:
        db.execute(f"UPDATE events SET {column} = x'00'")
    log = SqliteLog.open(folder)
    at_time = Start(policy=StartPolicy.AT_TIME, time_us=1_700_000_900_000_000)
    uses = [
        log.ensure_consumer(JOURNAL, "new", at_time),
        log.append(JOURNAL, [fact("new")]),
        log.commit(JOURNAL, "reader", 70),
        log.get_stream_stats(JOURNAL),
    ]
    refused = [each for each in await asyncio.gather(*uses, return_exceptions=True) if isinstance(each, Exception)]
    assert refused
    assert all(isinstance(each, CorruptLog) for each in refused), refused
    await log.close()
