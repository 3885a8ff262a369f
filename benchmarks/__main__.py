"""The command line: ``python -m benchmarks [NAMES…] [--rounds N] [--quick] [--out DIR] [--list]``."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks import bus_suite, inbox_suite, log_suite, remote_suite, server_suite, spark_suite
from benchmarks.harness import Options, Race, RaceResult, Suite, fsync_p50_us, run_race, scratch
from benchmarks.report import Report

SUITES = [
    Suite("log", "appending, reading and keeping events", log_suite.races),
    Suite("bus", "publishing, handling and acknowledging events", bus_suite.races),
    Suite("inbox", "matching subscriptions and filling inboxes", inbox_suite.races),
    Suite("server", "publishing, streaming and pulling over HTTP", server_suite.races),
    Suite("remote", "publishing, reading and handling on NATS and Kafka", remote_suite.races),
    Suite("spark", "reading, matching, archiving and reporting on Spark", spark_suite.races),
]

KEPT = Path(__file__).parent / "results"
NOT_KEPT = Path("build/benchmarks")


def choose(names: list[str], options: Options) -> list[tuple[str, Suite, list[Race]]]:
    """Return what to run as (name, suite, races): whole suites, or single races named ``suite.race``."""
    suites = {suite.name: suite for suite in SUITES}
    chosen = []
    for name in names or list(suites):
        suite_name, _, race_name = name.partition(".")
        suite = suites.get(suite_name)
        races = [race for race in suite.races(options) if race_name in ("", race.name)] if suite else []
        if suite is None or not races:
            raise SystemExit(f"there is no benchmark {name!r}; `python -m benchmarks --list` shows what there is")
        chosen.append((name, suite, races))
    return chosen


def show_list(console: Console, options: Options) -> None:
    """Print every suite with its races."""
    for suite in SUITES:
        console.print(f"[bold]{suite.name}[/bold]  {suite.about}")
        for race in suite.races(options):
            console.print(f"  {suite.name}.{race.name}  {race.about}", highlight=False)


def run(name: str, suite: Suite, races: list[Race], options: Options, console: Console, command: str) -> Report:
    """Run the races one after the other, each in a fresh folder, behind a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results: list[RaceResult] = []
    fsync_us: dict[str, float] = {}
    with scratch() as folder, Progress(*columns, console=console, transient=True) as progress:
        fsync_us["before"] = fsync_p50_us(folder)
        for race in races:
            bar = progress.add_task(race.name, total=len(race.contenders) * (1 + options.rounds))

            with scratch() as place:
                results.append(run_race(race, options, place, partial(_show, progress, bar, f"{name} · {race.name}")))
            progress.remove_task(bar)
        fsync_us["after"] = fsync_p50_us(folder)
    return Report(name, suite.about, command, options, results, fsync_us)


def _show(progress: Progress, bar: TaskID, where: str, step: str) -> None:
    progress.update(bar, description=f"{where} · {step}", advance=1)


def main() -> int:
    """Run what is asked for; 1 when a target is missed, except in a quick run, whose numbers mean nothing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of Postbus.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a suite or a race (suite.race); all suites if none")
    parser.add_argument("--rounds", type=int, help="how often each contender runs (7; quick: 2)")
    parser.add_argument("--quick", action="store_true", help="small and short, to see that it works")
    parser.add_argument("--out", type=Path, help=f"where results go (benchmarks/results; quick: {NOT_KEPT})")
    parser.add_argument("--list", action="store_true", help="show what there is and end")
    given = parser.parse_args()
    if given.rounds is not None and given.rounds < 1:
        parser.error("--rounds is at least 1")
    console = Console()
    options = Options(given.rounds or (2 if given.quick else 7), given.quick)
    if given.list:
        show_list(console, options)
        return 0
    out = given.out or (NOT_KEPT if given.quick else KEPT)
    command = shlex.join(["python", "-m", "benchmarks", *_repeatable(sys.argv[1:])])
    missed = 0
    for name, suite, races in choose(given.names, options):
        report = run(name, suite, races, options, console, command)
        console.print(report.table())
        for reason in report.missing():
            console.print(reason, highlight=False)
        console.print("kept in", ", ".join(str(_near(path)) for path in report.keep(out)), highlight=False)
        missed += report.missed()
    return int(bool(missed) and not options.quick)


def _repeatable(arguments: list[str]) -> list[str]:
    """Return the arguments without where results go, which is nobody else's path."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument == "--out":
            skip = not skip
        elif not argument.startswith("--out="):
            kept.append(argument)
    return kept


def _near(path: Path) -> Path:
    return path.resolve().relative_to(Path.cwd()) if path.resolve().is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    sys.exit(main())
