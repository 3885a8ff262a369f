"""The terminal itself: lines in, text out, and a line that is typed unseen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Screen", "safe"]

LINE_BYTES_MAX = 256 * 1024
BLOCK = 65_536
CLEAR_LINE = "\r\x1b[K"

# Control characters but for line feed and tab, marks that turn the direction of text, and others that cannot be seen.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def safe(text: str) -> str:
    """Return text with everything that a terminal would obey, or not show, written as an escape."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class Screen:
    """Reads lines from one file and writes to another, which may be a terminal."""

    def __init__(self, input_fd: int, output_fd: int) -> None:
        self._in = input_fd
        self._out = output_fd
        self._rest = b""
        self._too_long = False
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._whole: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._secret: asyncio.Future[str | None] | None = None
        self.is_terminal = os.isatty(input_fd) and os.isatty(output_fd)

    # --- in ---

    def open(self) -> None:
        """Begin to read."""
        try:
            asyncio.get_running_loop().add_reader(self._in, self._read)
        except OSError:  # a file cannot be waited for, and need not be
            self._whole = asyncio.get_running_loop().create_task(self._read_file())

    def close(self) -> None:
        """Read no more."""
        if self._whole is not None:
            self._whole.cancel()
        with contextlib.suppress(OSError, ValueError):
            asyncio.get_running_loop().remove_reader(self._in)

    async def line(self) -> str | None:
        """Return the next line; None when there will be no more."""
        return await self._lines.get()

    def _read(self) -> None:
        try:
            block = os.read(self._in, BLOCK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # the terminal is gone
            block = b""
        self._take(block)
        if not block:
            self.close()

    async def _read_file(self) -> None:
        with contextlib.suppress(OSError):  # closed by whoever started us
            while block := await asyncio.to_thread(os.read, self._in, BLOCK):
                self._take(block)
        self._take(b"")

    def _take(self, block: bytes) -> None:
        if not block:
            if self._rest:
                self._put(self._rest)
            self._give(None)
            return
        *lines, self._rest = (self._rest + block).split(b"\n")
        for line in lines:
            self._put(line)
        if len(self._rest) > LINE_BYTES_MAX:
            self._rest, self._too_long = b"", True

    def _put(self, line: bytes) -> None:
        if self._too_long:  # the end of a line that was dropped
            self._too_long = False
            self._rest = b""
            return
        self._give(line.removesuffix(b"\r").decode(errors="replace"))

    def _give(self, line: str | None) -> None:
        if self._secret is not None and not self._secret.done():
            self._secret.set_result(line)
        if line is None or self._secret is None:
            self._lines.put_nowait(line)

    # --- unseen ---

    async def read_unseen(self, question: str) -> str | None:
        """Ask, and return the next line, which the terminal does not show; None when there is none."""
        secret: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._secret = secret
        try:
            with self._echo_off():
                await self.write(f"{question} ", fresh_line=True)
                return await secret
        finally:
            self._secret = None
            await self.write("\n")

    @contextlib.contextmanager
    def _echo_off(self) -> Iterator[None]:
        before = termios.tcgetattr(self._in)
        quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
        termios.tcsetattr(self._in, termios.TCSAFLUSH, quiet)  # what was typed before is no secret
        try:
            yield
        finally:
            termios.tcsetattr(self._in, termios.TCSADRAIN, before)

    # --- out ---

    async def write(self, text: str, *, fresh_line: bool = False) -> None:
        """Write text; raises ``OSError`` when it cannot."""
        if fresh_line and self.is_terminal:
            text = CLEAR_LINE + text
        async with self._writing:
            await asyncio.to_thread(self._write, text.encode(errors="backslashreplace"))

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._out, data) :]
            except BlockingIOError:  # somebody made it so
                select.select([], [self._out], [])
