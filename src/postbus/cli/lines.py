"""Appending one event for each line of a file or a pipe."""

from __future__ import annotations

import asyncio
import os
import stat
from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from postbus.cli.output import progress
from postbus.model import PostbusError
from postbus.strict_json import BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from postbus.cli.remote import Remote
    from postbus.log import SqliteLog
    from postbus.model import Draft

__all__ = ["Appended", "append"]

BLOCK_BYTES = 256 * 1024
CHUNK_LINES = 1000
# Longer than any line that can be accepted, white space around it included.
LINE_BYTES_MAX = BYTES_MAX + 64 * 1024


class Appended(msgspec.Struct):
    """What became of the lines of one file."""

    stream: str
    lines: int = 0
    appended: int = 0
    duplicates: int = 0


def append(
    file: BinaryIO,
    stream: str,
    make: Callable[[bytes, int], Draft],
    reach: Callable[[], AbstractAsyncContextManager[SqliteLog | Remote]],
    *,
    create: bool,
) -> Appended:
    """Append an event for each line, chunk by chunk; a chunk is appended as a whole or not at all.

    Nothing is opened or made before the first chunk is found good. Raises what ``make`` and the log raise, with the
    line's number in the message and in the hint how far the file is appended.
    """
    done = Appended(stream)
    size = _size(file)
    # Reading happens between the loop's runs, where an interrupt ends even a wait for input at once.
    with asyncio.Runner() as runner, ExitStack() as stack, progress("appending") as advance:
        log: SqliteLog | Remote | None = None
        for chunk, position in _chunks(file):
            try:
                drafts = [_numbered(make, raw, done.lines + index) for index, raw in enumerate(chunk, 1) if raw]
                if log is None:
                    log = _open(runner, stack, reach(), stream, create=create)
                receipts = runner.run(log.append(stream, drafts))
            except PostbusError as error:
                error.hint = "; ".join(filter(None, (error.hint, _so_far(done))))
                vars(error).update(appended_lines=done.lines)
                raise
            done.lines += len(chunk)
            done.appended += sum(not receipt.duplicate for receipt in receipts)
            done.duplicates += sum(receipt.duplicate for receipt in receipts)
            advance(position, size)
    return done


def _open(
    runner: asyncio.Runner,
    stack: ExitStack,
    opening: AbstractAsyncContextManager[SqliteLog | Remote],
    stream: str,
    *,
    create: bool,
) -> SqliteLog | Remote:
    log = runner.run(opening.__aenter__())
    stack.callback(lambda: runner.run(opening.__aexit__(None, None, None)))
    if create:
        runner.run(log.ensure_stream(stream))
    return log


def _numbered(make: Callable[[bytes, int], Draft], raw: bytes, number: int) -> Draft:
    try:
        return make(raw, number)
    except PostbusError as error:
        error.message = f"line {number}: {error.message}"
        vars(error).update(line=number)
        raise


def _so_far(done: Appended) -> str:
    if not done.lines:
        return "nothing was appended"
    return f"lines 1 to {done.lines} are appended, nothing after them: go on from line {done.lines + 1}"


def _chunks(file: BinaryIO) -> Iterator[tuple[list[bytes], int]]:
    """Yield lists of lines without the white space around them, each with the bytes read so far.

    What a pipe gives is passed on at once; a chunk waits for nothing but the end of its last line.
    """
    rest, position = b"", 0
    while block := os.read(file.fileno(), BLOCK_BYTES):
        position += len(block)
        *whole, rest = (rest + block).split(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            whole.append(rest)  # to be refused: no need to wait for its end
        for first in range(0, len(whole), CHUNK_LINES):
            yield [line.strip() for line in whole[first : first + CHUNK_LINES]], position
    if rest.strip():
        yield [rest.strip()], position


def _size(file: BinaryIO) -> int:
    found = os.fstat(file.fileno())
    return found.st_size if stat.S_ISREG(found.st_mode) else 0
