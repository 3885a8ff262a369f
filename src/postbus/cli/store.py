"""The commands of the store: verify, salvage, backup, restore."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.filesize import decimal

from postbus.cli import output
from postbus.cli.options import DATA, Data, Json, examples, folder_of
from postbus.cli.output import count
from postbus.model import CorruptLog
from postbus.store import Folder, Report
from postbus.store import backup as copy_store
from postbus.store import restore as restore_store
from postbus.store import salvage as salvage_store
from postbus.store import verify as check_log
from postbus.store.backup import check_store, write_anchor
from postbus.store.database import connect

if TYPE_CHECKING:
    from postbus.store import Problem

__all__ = ["commands"]

SHOWN_MAX = 50

commands = typer.Typer()


# --- verify -----------------------------------------------------------------------------------------------------------


@commands.command(
    rich_help_panel="Store",
    epilog=examples(
        """
        $ postbus verify
        $ postbus verify --data /backups/monday --json
        $ postbus verify --accept
        """
    ),
)
def verify(
    *,
    accept: Annotated[
        bool, typer.Option("--accept", help="Write a new anchor when every event that is there holds.")
    ] = False,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Check that every acknowledged event is there, unaltered.

    Reads everything: pages, checksums, the chain of each partition, and the anchor. Damage is printed with the first
    bad offset of each partition, and the exit code is 3. Others may go on using the store.

    The anchor is the file that remembers how long the log was. When it is lost or damaged, or the log was shortened on
    purpose, `--accept` checks the events without it and then takes the log as it is.
    """
    with output.progress("verifying") as advance:
        report = check_store(folder_of(data), advance)
    accepted: list[Problem] = []
    if accept:
        report, accepted = _accept(folder_of(data), report)
    if json:
        facts = {"events": report.events, "partitions": report.partitions, "problems": report.problems}
        output.document({"ok": report.ok, **facts, "accepted": accepted})
    else:
        _show_report(report, accepted)
    if not report.ok:
        raise _damaged(report, accept=accept)


def _accept(data: str, report: Report) -> tuple[Report, list[Problem]]:
    """Look again without the anchor and write a new one if all is well; returns what is wrong and what was accepted."""
    folder = Folder(data)
    found = report.problems
    if not report.ok:
        db = connect(folder, write=False)
        try:
            with output.progress("verifying without the anchor") as advance:
                report = check_log(db, None, advance)
        finally:
            db.close()
    if report.ok:
        write_anchor(folder)
    return report, found if report.ok else []


def _show_report(report: Report, accepted: list[Problem]) -> None:
    if not report.ok:
        output.table(("STREAM", "PARTITION", "FIRST BAD", "WHAT"), _problem_rows(report))
        return
    for problem in accepted:
        output.say(f"accepted: {problem.what}")
    output.say(f"all is well: {_seen(report)}")


def _seen(report: Report) -> str:
    return f"{count(report.events, 'event')} in {count(report.partitions, 'partition')}"


def _problem_rows(report: Report) -> list[tuple[object, ...]]:
    shown = report.problems[:SHOWN_MAX]
    facts = [(problem.stream, problem.partition, problem.offset, problem.what) for problem in shown]
    hidden = len(report.problems) - len(shown)
    if hidden:
        facts.append((None, None, None, f"{hidden:,} more; --json shows all"))
    return [tuple("-" if fact is None else fact for fact in row) for row in facts]


def _damaged(report: Report, *, accept: bool) -> CorruptLog:
    first = next((problem for problem in report.problems if problem.offset is not None), report.problems[0])
    place = "" if first.offset is None else f" at {first.stream}/{first.partition}/{first.offset}"
    hint = "restore a backup with `postbus restore`, or copy every intact event with `postbus salvage`"
    if not accept:
        hint += "; if nothing but the anchor is wrong, `postbus verify --accept` takes the log as it is"
    return CorruptLog(
        f"damage found{place}: {first.what}",
        stream=first.stream,
        partition=first.partition,
        offset=first.offset,
        hint=hint,
    )


# --- salvage, backup, restore -----------------------------------------------------------------------------------------


@commands.command(rich_help_panel="Store", epilog=examples("$ postbus salvage ./postbus-data ./salvaged"))
def salvage(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="The data folder with the damaged store.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A new folder for what is intact.")],
    *,
    json: Json = False,
) -> None:
    """Copy every intact event of a damaged store to a new one.

    Events keep their offsets and the damaged store is only read. A lost offset gets a placeholder on the topic
    `postbus.lost`, so that the others keep their places.
    """
    with output.progress("salvaging") as advance:
        result = salvage_store(source, target, advance)
    if json:
        output.document({"source": str(source), "target": str(target), **msgspec.to_builtins(result)})
        return
    for remark in result.notes:
        output.note(remark)
    output.say(
        f"salvaged {count(result.events, 'event')} of {count(result.streams, 'stream')} "
        f"and {count(result.consumers, 'consumer')} to {target}; {count(result.lost, 'event')} lost"
    )


@commands.command(rich_help_panel="Store", epilog=examples("$ postbus backup /backups/monday"))
def backup(
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A new folder for the copy.")],
    *,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Copy the store to a new folder.

    Others may go on using it meanwhile; the copy is one consistent moment.
    """
    with output.progress("copying pages") as advance:
        copy_store(folder_of(data), target, advance)
    size = Folder(target).database.stat().st_size
    if json:
        output.document({"source": data, "target": str(target), "bytes": size})
    else:
        output.say(f"copied {decimal(size)} to {target}")


@commands.command(rich_help_panel="Store", epilog=examples("$ postbus restore /backups/monday --data ./postbus-data"))
def restore(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="The folder with the backup.")],
    *,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Verify a backup and copy it to the data folder.

    The data folder must not hold a store yet. A backup with damage is refused.
    """
    with output.progress("verifying the backup") as advance:
        report = restore_store(source, folder_of(data), advance)
    if json:
        output.document(
            {"source": str(source), "target": data, "events": report.events, "partitions": report.partitions}
        )
    else:
        output.say(f"restored {_seen(report)} to {data}")
