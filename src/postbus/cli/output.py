"""What commands print: lines and tables for people, JSON for programs, progress and complaints on stderr.

Texts of events come from anywhere, so nothing in them reaches a terminal that it would obey instead of show. Rich is
imported where it draws, because most commands that programs run do not need it and it takes as long as the command.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from postbus.model import PostbusError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from postbus.model import Event

__all__ = ["complain", "count", "document", "events", "note", "progress", "safe", "say", "table"]

WIDE = 1_000_000
SHOWN_CHARS_MAX = 2_000
PIPE_CLOSED = 141

# Control characters, marks that turn the direction of text, and other marks that cannot be seen.
_OBEYED = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
_LINE_BREAK = re.compile(rb"[\r\n]+[ \t]*")


def safe(text: str) -> str:
    """Return text with everything that a terminal would obey, or not show, written as an escape."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def count(number: int, noun: str) -> str:
    """Return a number with its noun, as in ``1 event`` and ``1,000 events``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# --- stdout -----------------------------------------------------------------------------------------------------------


def document(value: Any) -> None:
    """Print one JSON document on one line."""
    _write(msgspec.json.encode(value) + b"\n")


def say(text: str) -> None:
    """Print one line for people."""
    _write_text(safe(text) + "\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under their columns: numbers to the right, nothing cut off, folded only to fit a terminal."""
    from rich.console import Console  # noqa: PLC0415 - see above
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    rows = list(rows)
    for index, column in enumerate(columns):
        numbers = all(isinstance(row[index], int) for row in rows)
        drawn.add_column(column, justify="right" if numbers else "left", no_wrap=numbers, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(safe(str(cell))) for cell in row))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDE, highlight=False)
    with console.capture() as captured:
        console.print(drawn)
    _write_text("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def events(page: Sequence[Event], *, as_json: bool) -> None:
    """Print events, one per line; on a terminal in colour, and a very long payload cut short."""
    if as_json:
        # A line break inside valid JSON is only ever white space between tokens.
        _write(b"".join(event.to_json().replace(b"\n", b" ").replace(b"\r", b" ") + b"\n" for event in page))
    elif sys.stdout.isatty():
        from rich.console import Console  # noqa: PLC0415 - see above
        from rich.text import Text  # noqa: PLC0415

        console = Console(file=sys.stdout, highlight=False)
        with console.capture() as captured:
            for event in page:
                console.print(Text.assemble(*_parts(event, SHOWN_CHARS_MAX)), soft_wrap=True)
        _write_text(captured.get())
    else:
        _write_text("".join("".join(text for text, _ in _parts(event)) + "\n" for event in page))


def _parts(event: Event, payload_chars_max: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield the texts of an event's line, each with its style."""
    happened = event.occurred_at
    yield f"{event.partition}/{event.offset}", "bold"
    yield f"  {happened:%Y-%m-%dT%H:%M:%S}.{happened.microsecond // 1000:03}Z", "dim"
    yield f"  {event.topic}", "cyan"
    facts = {
        "variant": event.variant or None,
        "source": event.source,
        "key": event.key,
        "native_id": event.native_id,
        "correlation_id": event.correlation_id,
        "metadata": event.metadata_json,
        "headers": event.headers_json,
    }
    for name, value in facts.items():
        if value is not None:
            yield f"  {name}=", "dim"
            yield safe(value if isinstance(value, str) else _on_one_line(value)), ""
    payload = safe(_on_one_line(event.payload_json))
    if payload_chars_max is not None and len(payload) > payload_chars_max:
        payload = f"{payload[:payload_chars_max]}… ({len(event.payload_json):,} bytes; --json shows all)"
    yield f"  {payload}", ""


def _on_one_line(raw: bytes) -> str:
    return _LINE_BREAK.sub(b" ", raw).decode()


def _write_text(text: str) -> None:
    _write(text.encode(sys.stdout.encoding or "utf-8", "backslashreplace"))


def _write(data: bytes) -> None:
    """Write and flush, so that what follows (a commit) can rely on it; a reader that went away ends the command."""
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter fails again when it ends
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(PIPE_CLOSED) from None
        raise PostbusError(f"the output cannot be written: {error.strerror}") from error


# --- stderr -----------------------------------------------------------------------------------------------------------


def note(text: str) -> None:
    """Say something beside the result."""
    typer.secho(safe(text), err=True, dim=True)


def complain(error: PostbusError, *, as_json: bool) -> None:
    """Print an error: a line and perhaps a hint for people, or one JSON document for programs."""
    if as_json:
        more = {name: value for name, value in vars(error).items() if value is not None and name != "__notes__"}
        facts = {"code": error.code, "message": error.message, "hint": error.hint} | more
        shown = {name: _utf8(value) if isinstance(value, str) else value for name, value in facts.items()}
        typer.echo(msgspec.json.encode({"error": shown}, enc_hook=str), err=True)
        return
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {safe(error.message)}", err=True)
    if error.hint:
        typer.echo(f"{typer.style('hint:', fg='yellow')} {safe(error.hint)}", err=True)


def _utf8(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


@contextlib.contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr, if that is a terminal; gives the function that moves it: (done, in all)."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console  # noqa: PLC0415 - see above
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total or None)
