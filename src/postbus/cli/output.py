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

from postbus.model import Invalid, PostbusError, instant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.console import Console

    from postbus.model import Event, Receipt

__all__ = [
    "ago",
    "complain",
    "confirm",
    "count",
    "document",
    "draw",
    "events",
    "milliseconds",
    "note",
    "progress",
    "receipt",
    "safe",
    "say",
    "short",
    "stages",
    "table",
]

WIDE = 1_000_000
SHOWN_CHARS_MAX = 2_000
CUT_CHARS_MIN = 8
# What the bus writes into every event that derives from another; `postbus trace` shows what it says.
DERIVATION = ("postbus.causation_id", "postbus.hops")
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
    """Return a number with its noun, as in ``1 event`` and ``1,000 batches``."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def short(address: str, tenant: str) -> str:
    """Return an address as people read it: without the tenant they are looking at."""
    return address.removeprefix(f"{tenant}.")


def ago(seconds: float) -> str:
    """Return an age in its largest unit."""
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


def milliseconds(microseconds: int) -> str:
    """Return a duration with a unit that fits it."""
    ms = microseconds / 1000
    if ms < 1000:  # noqa: PLR2004 - a second
        return f"{ms:.0f} ms" if ms >= 10 or ms == 0 else f"{ms:.1f} ms"  # noqa: PLR2004 - three figures are enough
    return f"{ms / 1000:.1f} s" if ms < 60_000 else ago(ms / 1000)  # noqa: PLR2004 - a minute


# --- stdout -----------------------------------------------------------------------------------------------------------


def document(value: Any) -> None:
    """Print one JSON document on one line."""
    _write(msgspec.json.encode(value) + b"\n")


def say(text: str) -> None:
    """Print one line for people."""
    _write_text(safe(text) + "\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, cut: bool = False) -> None:
    """Print rows under their columns: numbers to the right, nothing cut off, folded only to fit a terminal.

    With ``cut`` a terminal shows the last column cut short, so that each row stays on one line if the others let it.
    """
    from rich.table import Table  # noqa: PLC0415 - see above
    from rich.text import Text  # noqa: PLC0415

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    rows = list(rows)
    texts = [[safe(str(cell)) for cell in row] for row in rows]
    widths = [max([len(column), *(len(row[index]) for row in texts)]) for index, column in enumerate(columns)]
    cut = cut and sys.stdout.isatty()
    fits = sum(widths[:-1]) + 2 * len(widths) + CUT_CHARS_MIN <= _console().width
    for index, column in enumerate(columns):
        numbers = all(isinstance(row[index], int) for row in rows)
        last = index == len(columns) - 1
        drawn.add_column(
            column,
            justify="right" if numbers else "left",
            no_wrap=numbers or (cut and fits and not last),
            overflow="fold",
            max_width=CUT_CHARS_MIN if cut and last and not fits else None,
        )
    for row in texts:
        *others, end = (Text(cell) for cell in row)
        if cut:
            end.no_wrap, end.overflow = True, "ellipsis"
        drawn.add_row(*others, end)
    draw(drawn)


def draw(drawn: object) -> None:
    """Print something that Rich can draw; its texts must be safe already."""
    console = _console()
    with console.capture() as captured:
        console.print(drawn)
    _write_text("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def _console() -> Console:
    from rich.console import Console  # noqa: PLC0415 - see above

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDE, highlight=False)


def receipt(got: Receipt, verb: str, *, as_json: bool) -> None:
    """Print what a publisher got back."""
    if as_json:
        facts = msgspec.to_builtins(got)
        del facts["created_at_us"]
        document({"id": got.id, **facts, "created_at": instant(got.created_at_us)})
    else:
        say(f"already there: {got.id}" if got.duplicate else f"{verb} {got.id}")


def events(page: Sequence[Event], *, as_json: bool, name: Callable[[Event], str] | None = None) -> None:
    """Print events, one per line; on a terminal in colour, and a very long payload cut short.

    ``name`` gives what each line begins with: by default the place in the stream.
    """
    if as_json:
        # A line break inside valid JSON is only ever white space between tokens.
        _write(b"".join(event.to_json().replace(b"\n", b" ").replace(b"\r", b" ") + b"\n" for event in page))
    elif sys.stdout.isatty():
        from rich.text import Text  # noqa: PLC0415 - see above

        console = _console()
        with console.capture() as captured:
            for event in page:
                console.print(Text.assemble(*_parts(event, name, SHOWN_CHARS_MAX)), soft_wrap=True)
        _write_text(captured.get())
    else:
        _write_text("".join("".join(text for text, _ in _parts(event, name)) + "\n" for event in page))


def _parts(
    event: Event, name: Callable[[Event], str] | None, payload_chars_max: int | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the texts of an event's line, each with its style."""
    happened = event.occurred_at
    yield f"{event.partition}/{event.offset}" if name is None else name(event), "bold"
    yield f"  {happened:%Y-%m-%dT%H:%M:%S}.{happened.microsecond // 1000:03}Z", "dim"
    yield f"  {event.topic}", "cyan"
    facts = {
        "variant": event.variant or None,
        "source": event.source,
        "key": event.key,
        "native_id": event.native_id,
        "correlation_id": event.correlation_id,
        "metadata": event.metadata_json,
        "headers": _given_headers(event.headers_json),
    }
    for fact, value in facts.items():
        if value is not None:
            yield f"  {fact}=", "dim"
            yield safe(value if isinstance(value, str) else _on_one_line(value)), ""
    payload = safe(_on_one_line(event.payload_json))
    if payload_chars_max is not None and len(payload) > payload_chars_max:
        payload = f"{payload[:payload_chars_max]}… ({len(event.payload_json):,} bytes; --json shows all)"
    yield f"  {payload}", ""


def _given_headers(raw: bytes | None) -> bytes | None:
    if raw is None or not any(name.encode() in raw for name in DERIVATION):
        return raw
    given = {name: value for name, value in msgspec.json.decode(raw).items() if name not in DERIVATION}
    return msgspec.json.encode(given) if given else None


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


def confirm(question: str) -> None:
    """Ask on the terminal; raises ``Invalid`` where there is none to ask on, and ends the command on a no."""
    if not sys.stdin.isatty():
        raise Invalid("this needs a yes, and there is no terminal to ask on", hint="give --yes to do it unasked")
    if not typer.confirm(safe(question), err=True):
        note("nothing was changed")
        raise typer.Exit(1)


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
    with stages() as advance:
        advance(label, 0, 0)
        yield lambda done, total: advance(label, done, total)


@contextlib.contextmanager
def stages(*, pace: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Show bars for one stage after the other, as ``progress`` does; gives the function (stage, done, in all).

    ``pace`` adds how many are done a second, and how long the rest will take.
    """
    if not sys.stderr.isatty():
        yield lambda _stage, _done, _total: None
        return
    from rich.console import Console  # noqa: PLC0415 - see above
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        Progress,
        ProgressColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()]
    if pace:
        columns += [TextColumn("{task.fields[rate]}"), TimeRemainingColumn()]
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None, rate="")

        def advance(stage: str, done: int, total: int) -> None:
            known = bars.tasks[0]
            if known.description != stage:
                bars.reset(task, description=stage)
            rate = f"{known.speed:,.0f}/s" if known.speed else ""
            bars.update(task, description=stage, completed=done, total=total or None, rate=rate)

        yield advance
