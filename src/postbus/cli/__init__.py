"""The command line: every verb is one or two calls of the library.

``app`` is the Typer application, ``main`` runs it and turns every error into one line and an exit code.
"""

from __future__ import annotations

import io
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main

from postbus import __version__
from postbus.cli import (
    agents,
    bus,
    consumers,
    copy,
    deliveries,
    demo,
    dlq,
    doctor,
    filters,
    host,
    inbox,
    keys,
    log,
    pipeline_inboxes,
    quota,
    scaffold,
    schemas,
    serve,
    sources,
    spool,
    store,
    timers,
    topics,
    trace,
    upkeep,
)
from postbus.cli.options import examples
from postbus.cli.output import complain
from postbus.model import Conflict, CorruptLog, Invalid, NotFound, PostbusError, StorageError, Unreachable

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["app", "main"]

# The first kind of error that fits decides; everything else is 1.
EXIT_CODES: tuple[tuple[type[PostbusError], int], ...] = (
    (CorruptLog, 3),
    (StorageError, 6),
    (NotFound, 4),
    (Conflict, 5),
    (Invalid, 2),
    (Unreachable, 7),
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"postbus {__version__}")
        raise typer.Exit


@app.callback(
    epilog=examples(
        """
        $ postbus demo
        $ postbus publish order.paid '{"item": "tea", "count": 2}'
        $ postbus tail 'order.*' --follow
        $ postbus stats
        """
    )
)
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The durable event bus with inboxes for AI agents.

    Everything is kept in one data folder: `--data DIR`, or `POSTBUS_DATA`, or `./postbus-data`. Most commands also work
    on a server: `--url URL`, or `POSTBUS_URL`, with its key in `POSTBUS_KEY`. With `--json` a command prints one JSON
    document on stdout (`read` and `tail`: one on each line) and an error as JSON on stderr.

    Exit codes: 0 done, 1 refused, 2 wrong usage or a bad value, 3 the log is damaged, 4 not found, 5 conflict, 6 the
    store cannot be used (full, failed, busy), 7 the server cannot be reached, 130 interrupted, 141 nobody reads the
    output. `POSTBUS_DEBUG=1` shows where an unexpected error came from.
    """


app.add_typer(demo.commands)
app.add_typer(bus.commands)
app.add_typer(trace.commands)
app.add_typer(dlq.commands, name="dlq", rich_help_panel="Bus")
app.add_typer(spool.commands, name="spool", rich_help_panel="Bus")
app.add_typer(filters.commands, name="filter", rich_help_panel="Bus")
app.add_typer(schemas.commands, name="schemas", rich_help_panel="Bus")
app.add_typer(agents.commands, name="agents", rich_help_panel="Inboxes")
app.add_typer(inbox.commands, name="inbox", rich_help_panel="Inboxes")
app.add_typer(timers.commands, name="timers", rich_help_panel="Inboxes")
app.add_typer(sources.commands, name="sources", rich_help_panel="Inboxes")
app.add_typer(deliveries.commands, name="deliveries", rich_help_panel="Inboxes")
app.add_typer(host.commands)
app.add_typer(doctor.commands)
app.add_typer(scaffold.commands)
app.add_typer(serve.commands)
app.add_typer(topics.commands, name="topics", rich_help_panel="Server")
app.add_typer(keys.commands, name="keys", rich_help_panel="Server")
app.add_typer(quota.commands, name="quota", rich_help_panel="Server")
app.add_typer(log.commands)
app.add_typer(consumers.commands)
app.add_typer(store.commands)
app.add_typer(copy.commands)
app.add_typer(upkeep.commands)
app.add_typer(pipeline_inboxes.commands, name="pipeline", rich_help_panel="Pipeline")


@cache
def _command() -> Any:
    """Return the whole command line, made once: that takes longer than most commands."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never raises for what a user can cause."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for as long as the process lives
    for stream in (sys.stdout, sys.stderr):  # what the terminal's character set lacks is shown as an escape
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _command().main(words, prog_name="postbus", standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:  # noqa: BLE001 - this is where everything ends up
        return _refuse(error, as_json="--json" in words)
    return code if isinstance(code, int) else 0


def _refuse(error: Exception, *, as_json: bool) -> int:
    """Say what went wrong in one line and return the exit code."""
    if isinstance(error, PostbusError):
        complain(error, as_json=as_json)
        return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), 1)
    if isinstance(error, typer.TyperException):
        if error.format_message():  # or it was no word at all, and the help is printed already
            complain(_usage(error), as_json=as_json)
        return error.exit_code
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return _refuse(StorageError(f"{where}{error.strerror}"), as_json=as_json)
    if os.environ.get("POSTBUS_DEBUG"):
        raise error
    name = type(error).__name__
    hint = "this should not happen: set POSTBUS_DEBUG=1 to see where it came from, and report it"
    complain(PostbusError(f"unexpected {name}: {error}", hint=hint), as_json=as_json)
    return 1


def _usage(error: typer.TyperException) -> Invalid:
    message = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    if context is None:
        return Invalid(message, hint="see `postbus --help`")
    early = context.parent is None and message.startswith("No such option")
    hint = f"see `{context.command_path} --help`"
    if not early and message.startswith("No such option: --url"):
        hint = "this works on a data folder only: run it on the server's machine with --data"
    return Invalid(message, hint=f"options follow the command they are for; {hint}" if early else hint)
