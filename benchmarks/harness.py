"""How benchmarks are run: contenders take turns (A B C A B C …), and what counts is medians and ratios of one run.

A *suite* is a module with a function ``races(options)``. A *race* is a list of contenders that take turns and the
measures that are read from it. A *measure* compares one number of one contender with a reference in the same race, or
stands alone.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

import apsw

__all__ = [
    "AsyncContender",
    "Contender",
    "Finding",
    "Measure",
    "Missing",
    "Options",
    "Race",
    "RaceResult",
    "Suite",
    "apsw_connection",
    "fsync_p50_us",
    "judge",
    "loops",
    "run_race",
    "scratch",
    "until_steady",
]

T = TypeVar("T")

WARM_PASSES_MAX: Final = 6
STOP_S: Final = 60.0
PAGE_BYTES: Final = 8192


@dataclass(frozen=True)
class Options:
    """What the command line says about how thorough to be. Sizes that depend on it are asked of ``pick``."""

    rounds: int
    quick: bool

    @property
    def round_s(self) -> float:
        """How long a timed part lasts where its length is free."""
        return self.pick(2.0, 0.25)

    @property
    def warm_bytes(self) -> int:
        """How much is written at least before anything is timed."""
        return self.pick(64 << 20, 2 << 20)

    def pick(self, thorough: T, quick: T) -> T:
        """Return the value for this run."""
        return quick if self.quick else thorough


class Missing(Exception):
    """A contender that is not installed; says how to install it."""


class Contender(ABC):
    """One who runs. ``open`` prepares and warms up in an empty folder; every ``run`` is one timed turn."""

    name: str

    @abstractmethod
    def open(self, folder: Path) -> None:
        """Get ready and reach a steady state; leaves nothing behind when it fails. Raises ``Missing``."""

    @abstractmethod
    def run(self) -> dict[str, float]:
        """Take one turn and return its numbers by metric. Ends what it began, so that the next turn is undisturbed."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; not called when ``open`` failed."""


class AsyncContender(Contender):
    """A contender with an event loop of its own, which stands still while others run."""

    def __init__(self, name: str, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
        self.name = name
        self._runner = asyncio.Runner(loop_factory=loop_factory)

    def open(self, folder: Path) -> None:
        """See ``Contender.open``."""
        try:
            self.do(self.start(folder))
        except BaseException:
            self.close()
            raise

    def run(self) -> dict[str, float]:
        """See ``Contender.run``."""
        return self.do(self.turn())

    def close(self) -> None:
        """See ``Contender.close``; one that does not end by itself is left alone, and that is said."""
        try:
            self.do(asyncio.wait_for(self.stop(), STOP_S))
        except TimeoutError:
            sys.stderr.write(f"{self.name} did not stop within {STOP_S:g} s\n")
        finally:
            self._runner.close()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this contender's loop."""
        return self._runner.run(work)

    @abstractmethod
    async def start(self, folder: Path) -> None:
        """See ``Contender.open``."""

    @abstractmethod
    async def turn(self) -> dict[str, float]:
        """See ``Contender.run``."""

    @abstractmethod
    async def stop(self) -> None:
        """See ``Contender.close``; called also when ``start`` failed half-way."""


@dataclass(frozen=True)
class Measure:
    """One line of the report.

    With a ``reference`` the value judged is ours divided by the reference, otherwise ours alone. ``at_least`` or
    ``at_most`` is the target; without either the line is there for scale.
    """

    title: str
    metric: str
    ours: str
    reference: str | None = None
    unit: str = "events/s"
    at_least: float | None = None
    at_most: float | None = None


@dataclass
class Race:
    """Contenders that take turns, and what is read from it."""

    name: str
    about: str
    contenders: list[Contender]
    measures: list[Measure]


@dataclass(frozen=True)
class Suite:
    """A named function that returns races."""

    name: str
    about: str
    races: Callable[[Options], list[Race]]


@dataclass
class RaceResult:
    """Every number of every turn: ``rounds[contender][metric]`` has one entry per round."""

    race: Race
    rounds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """A measure with its numbers. ``met`` is None where there is no target or a contender is missing."""

    measure: Measure
    ours: float | None
    reference: float | None
    ratio_of_medians: float | None
    median_of_ratios: float | None
    met: bool | None


def judge(measure: Measure, result: RaceResult) -> Finding:
    """Read a measure from a race. A ratio meets its target only if both ways to take it do."""
    ours = result.rounds.get(measure.ours, {}).get(measure.metric)
    theirs = result.rounds.get(measure.reference, {}).get(measure.metric) if measure.reference else None
    if not ours or (measure.reference and not theirs):
        middle = statistics.median(ours) if ours else None
        return Finding(measure, middle, statistics.median(theirs) if theirs else None, None, None, None)
    middle = statistics.median(ours)
    if not theirs:
        return Finding(measure, middle, None, None, None, _meets(measure, [middle]))
    reference = statistics.median(theirs)
    ratio = middle / reference
    by_round = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
    return Finding(measure, middle, reference, ratio, by_round, _meets(measure, [ratio, by_round]))


def _meets(measure: Measure, values: list[float]) -> bool | None:
    if measure.at_least is not None:
        return min(values) >= measure.at_least
    if measure.at_most is not None:
        return max(values) <= measure.at_most
    return None


def run_race(race: Race, options: Options, folder: Path, tell: Callable[[str], None]) -> RaceResult:
    """Open all contenders, let them take turns, close them. ``tell`` is called before every step."""
    result = RaceResult(race)
    ready: list[Contender] = []
    try:
        for contender in race.contenders:
            tell(f"{contender.name}: get ready")
            place = folder / f"{len(ready)}-{len(result.missing)}"
            place.mkdir(parents=True)
            try:
                contender.open(place)
            except Missing as reason:
                result.missing[contender.name] = str(reason)
            else:
                ready.append(contender)
        for number in range(options.rounds):
            for contender in ready:
                tell(f"{contender.name}: round {number + 1} of {options.rounds}")
                gc.collect()
                gc.freeze()  # nobody pays for what the others, and the harness, have in memory
                try:
                    numbers = contender.run()
                finally:
                    gc.unfreeze()
                for metric, value in numbers.items():
                    result.rounds.setdefault(contender.name, {}).setdefault(metric, []).append(value)
    finally:
        for contender in ready:
            contender.close()
    return result


def loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop] | None]:
    """Return the event loops there are by label: always asyncio's own, and uvloop's where it is installed."""
    found: dict[str, Callable[[], asyncio.AbstractEventLoop] | None] = {"asyncio": None}
    try:
        import uvloop  # noqa: PLC0415 - optional
    except ImportError:
        return found
    return found | {"uvloop": uvloop.new_event_loop}


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a fresh folder on the filesystem of the working directory, gone afterwards."""
    base = Path("build")
    base.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="bench-", dir=base, ignore_cleanup_errors=True) as name:
        yield Path(name)


def apsw_connection(path: Path) -> apsw.Connection:
    """Open a bare database as the reference: WAL, FULL, our page size, everything else as SQLite has it."""
    db = apsw.Connection(str(path))
    db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA wal_autocheckpoint = 1000")
    return db


def until_steady(wal: Path, write: Callable[[int], None], at_least: int) -> None:
    """Write until a WAL no longer grows: an fsync of a growing file costs more than one of a file that is reused.

    ``write`` is given a number of bytes to write about.
    """
    before = -1
    for _ in range(WARM_PASSES_MAX):
        write(max(at_least, 2 * before))
        size = wal.stat().st_size
        if size == before:
            return
        before = size


def fsync_p50_us(folder: Path, times: int = 200) -> float:
    """Return the median time of overwriting and syncing 4 KiB of an existing file: what one commit cannot go below."""
    path = folder / "fsync-probe"
    path.write_bytes(bytes(1 << 20))
    taken = []
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
        for number in range(times):
            started = time.perf_counter()
            os.pwrite(handle, bytes(4096), (number % 256) * 4096)
            os.fdatasync(handle)
            taken.append(time.perf_counter() - started)
    finally:
        os.close(handle)
        path.unlink()
    return statistics.median(taken) * 1e6
