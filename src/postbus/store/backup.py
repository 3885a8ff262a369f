"""Online backup and restore: a copy of a store that opens like the original."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import apsw

from postbus.model import Conflict, CorruptLog, NotFound
from postbus.store.anchor import Anchor, Anchored, Mark
from postbus.store.database import connect
from postbus.store.folder import Folder
from postbus.store.refusals import refusal
from postbus.store.verify import Problem, Report, check_heads, verify

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["backup", "check_store", "read_anchor", "restore", "write_anchor"]

PAGES_A_STEP = 512

# The end of every partition: its last event, or what its beginning says when it holds none.
HEADS = """
    SELECT p.slot, p.stream_id, p.partition, s.epoch, p.first_offset, p.base_chain,
           (SELECT max("offset") FROM events e WHERE e.stream_id = p.stream_id AND e.partition = p.partition)
    FROM partitions p JOIN stream_registry s USING (stream_id)
"""
CHAIN_AT = 'SELECT chain FROM events WHERE stream_id = ? AND partition = ? AND "offset" = ?'


def backup(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Copy a store to a new folder while others go on using it; the copy is one consistent moment.

    Raises ``NotFound`` when there is no store, ``Conflict`` when the target holds one,
    ``CorruptLog`` when the store is altered or shorter than it was. A failed copy is removed.
    """
    have, want = Folder(source), Folder(target)
    _check_folders(have, want)
    existed = want.path.exists()
    want.create()
    try:
        _copy(have, want, progress)
    except BaseException as error:
        for path in (want.database, want.anchor, *want.path.glob("postbus.db-*")):
            path.unlink(missing_ok=True)
        if not existed:
            shutil.rmtree(want.path, ignore_errors=True)
        if isinstance(error, (apsw.Error, OSError)):
            raise refusal(have, error, f"could not be copied to {want.path}") from error
        raise


def restore(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Report:
    """Verify a backup completely, then copy it to a new folder.

    Raises ``NotFound``, ``Conflict`` for a target that already holds a store, and ``CorruptLog`` for a bad backup.
    """
    _check_folders(Folder(source), Folder(target))
    report = check_store(source, progress)
    if not report.ok:
        first = report.problems[0]
        message = f"the backup in {source} is damaged: {first.what}"
        hint = "use an older backup, or copy what is intact with `postbus salvage`"
        raise CorruptLog(message, stream=first.stream, partition=first.partition, offset=first.offset, hint=hint)
    backup(source, target, progress)
    return report


def check_store(
    path: str | os.PathLike[str], progress: Callable[[int, int], None] = lambda _done, _total: None
) -> Report:
    """Verify the store in a folder without opening it for writing; see ``verify``."""
    folder = Folder(path)
    if not folder.exists():
        raise NotFound(f"there is no store in {folder.path}", hint="name the data folder with --data or POSTBUS_DATA")
    problems = Report()
    anchored: Anchored | None = None
    try:  # before the snapshot, so that nothing in it is newer than what is read
        anchored = read_anchor(folder)
    except CorruptLog as error:
        problems.problems = verify_problem(error)
    try:
        db = connect(folder, write=False)
    except CorruptLog as error:
        return Report(problems=verify_problem(error))
    try:
        db.execute("BEGIN")
        report = verify(db, anchored, progress)
        report.problems += problems.problems
        return report
    finally:
        db.close()


def verify_problem(error: CorruptLog) -> list[Problem]:
    """Return a refusal as a report's problem."""
    return [Problem(error.message, error.stream, error.partition, error.offset)]


def read_anchor(folder: Folder) -> Anchored:
    """Read the anchor of a folder, whosever it is; raises ``CorruptLog`` when it is missing or damaged."""
    anchor = Anchor(folder.anchor, "")
    try:
        anchor.open(create=False, any_store=True)
        return anchor.state()
    finally:
        anchor.close()


def write_anchor(folder: Folder) -> None:
    """Make the anchor anew from what the log holds; for copies, and for a log that was verified."""
    db = connect(folder, write=False)
    try:
        db.execute("BEGIN")
        facts = dict(db.execute("SELECT name, value FROM store_facts"))
        if folder.anchor.exists():
            os.truncate(folder.anchor, 0)  # in place: other processes may have it open
        anchor = Anchor(folder.anchor, facts["store_id"])
        anchor.open(create=True)
        for slot, stream_id, partition, epoch, first, base, last in list(db.execute(HEADS)):
            chain = base if last is None else db.execute(CHAIN_AT, (stream_id, partition, last)).get
            anchor.note(slot, Mark(stream_id, partition, epoch, first if last is None else last + 1, chain))
        anchor.count(int(facts.get("changes", 0)))
        anchor.close()
    except apsw.Error as error:
        raise refusal(folder, error, "could not be read") from error
    finally:
        db.close()


def _check_folders(have: Folder, want: Folder) -> None:
    if not have.exists():
        raise NotFound(f"there is no store in {have.path}")
    if want.exists():
        raise Conflict(f"there is already a store in {want.path}", hint="name a new or empty folder")


def _copy(have: Folder, want: Folder, progress: Callable[[int, int], None]) -> None:
    anchored = read_anchor(have)  # before the snapshot, so that nothing in it is newer than what is copied
    source = connect(have, write=False)
    copy = apsw.Connection(str(want.database))
    try:
        # One read transaction over all steps: without it SQLite would start over whenever somebody commits in between.
        source.execute("BEGIN; SELECT count(*) FROM sqlite_schema")
        check_heads(source, anchored)
        with copy.backup("main", source, "main") as job:
            while not job.done:
                job.step(PAGES_A_STEP)
                progress(job.page_count - job.remaining, job.page_count)
    finally:
        copy.close()
        source.close()
    write_anchor(want)
