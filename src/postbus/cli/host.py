"""The command that runs extensions on a bus, and what the other commands about extensions share with it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from postbus import __version__
from postbus.cli import output
from postbus.cli.options import Json, examples, folder_of
from postbus.cli.output import count
from postbus.cli.serve import log_to_stderr
from postbus.model import Invalid, PostbusError

if TYPE_CHECKING:
    from postbus.kernel import Kernel, KernelReport, Settings

__all__ = ["Config", "Extensions", "HostData", "With", "commands", "extension_folders", "host_settings"]

CONFIG = Path("config/settings.yaml")
EXTENSIONS = Path("extensions")
TERMINAL = "terminal"
TOGETHER_S = 0.5

logger = logging.getLogger("postbus.kernel")
commands = typer.Typer()

Extensions = Annotated[
    list[Path] | None,
    typer.Option(
        "--extensions", metavar="DIR", help="A folder of extensions; repeatable. Default: ./extensions if it is there."
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="POSTBUS_CONFIG",
        metavar="FILE",
        help="The settings file. Default: ./config/settings.yaml if it is there.",
    ),
]
With = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="NAME", help="An extension that comes with Postbus, as in echo; repeatable."),
]
HostData = Annotated[
    str | None,
    typer.Option(
        "--data",
        envvar="POSTBUS_DATA",
        metavar="DIR",
        help="The data folder. Default: event_bus.db_path in the settings.",
    ),
]


def host_settings(config: Path | None, shipped: list[str] | None, data: str | None) -> Settings:
    """Return the settings: the file, the environment over it, the command line over both."""
    from postbus.kernel import read_settings  # noqa: PLC0415 - only commands about extensions need it

    path = config if config is not None else CONFIG if CONFIG.is_file() else None
    settings = read_settings(path)
    if shipped:
        names = list(dict.fromkeys((*settings.kernel.shipped, *shipped)))
        kernel = msgspec.structs.replace(settings.kernel, shipped=names)
        settings = msgspec.structs.replace(settings, kernel=kernel)
    if data is not None:
        if not data:
            raise Invalid("the name of the data folder is empty")
        bus = msgspec.structs.replace(settings.event_bus, db_path=data)
        settings = msgspec.structs.replace(settings, event_bus=bus)
    return settings


def extension_folders(given: list[Path] | None) -> list[Path]:
    """Return the folders to look in."""
    if given:
        return given
    return [EXTENSIONS] if EXTENSIONS.is_dir() else []


@commands.command(
    rich_help_panel="Extensions",
    epilog=examples(
        """
        $ postbus host --with terminal --with echo
        $ postbus host --extensions ./extensions --config config/settings.yaml
        """
    ),
)
def host(
    *,
    extensions: Extensions = None,
    config: Config = None,
    shipped: With = None,
    data: HostData = None,
    json: Json = False,
) -> None:
    """Run extensions on a bus, until SIGTERM or Ctrl-C.

    An extension that cannot be loaded is in error, with the reason in `postbus doctor`; the others run. SIGHUP loads
    those anew whose files have changed; their events wait meanwhile and nothing is lost. At the end handlers that run
    are finished. A second signal ends at once.

    Logs go to stderr: as JSON when that is no terminal, and as plain warnings when it is.
    """
    folders, settings = extension_folders(extensions), host_settings(config, shipped, data)
    if not folders and not settings.kernel.shipped:
        message = "there are no extensions to run"
        raise Invalid(message, hint="name a folder with --extensions, or try --with terminal --with echo")
    log_to_stderr(access=False)
    if sys.stderr.isatty():
        _speak_plainly()
    asyncio.run(_host(folders, settings, as_json=json))


def _speak_plainly() -> None:
    """Log what a person at the terminal has to know, in sentences; `POSTBUS_DEBUG` shows where errors came from."""
    root = logging.getLogger("postbus")
    root.setLevel(logging.WARNING)
    if os.environ.get("POSTBUS_DEBUG"):
        return

    def without_trace(record: logging.LogRecord) -> bool:
        record.exc_info = record.exc_text = None
        return True

    for handler in root.handlers:
        handler.addFilter(without_trace)


async def _host(folders: list[Path], settings: Settings, *, as_json: bool) -> None:
    from postbus.kernel import Kernel, make_bus  # noqa: PLC0415 - as above
    from postbus.kernel.lock import host_lock  # noqa: PLC0415

    told, changed = _signals()
    with host_lock(Path(folder_of(settings.event_bus.db_path)) / "kernel"):
        bus = make_bus(settings)
        try:
            kernel = Kernel(bus, folders, settings)
            async with kernel:
                _announce(kernel.report(), settings, as_json=as_json)
                await _until_told(kernel, told, changed)
        finally:
            await bus.stop()
    logger.info("stopped")


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Return what is set when the host is told to stop, and to look for changes."""
    loop, told, changed = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    told_at = 0.0

    def tell() -> None:
        nonlocal told_at
        if not told.is_set():
            told_at = loop.time()
            told.set()
            changed.set()
        elif loop.time() - told_at > TOGETHER_S:  # a terminal that goes away may say so in several ways
            os._exit(130)  # asked twice: what is acknowledged is on disk, the rest is not waited for

    terminals = [handle for handle in range(3) if os.isatty(handle)]

    def hang_up() -> None:
        """Look for changes; but if the terminal is gone, whoever sat there has left."""
        if all(os.isatty(handle) for handle in terminals):
            changed.set()
        else:
            tell()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, tell)
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    return told, changed


async def _until_told(kernel: Kernel, told: asyncio.Event, changed: asyncio.Event) -> None:
    stamps = _stamps(kernel)
    while True:
        await changed.wait()
        changed.clear()
        if told.is_set():
            return
        fresh = _stamps(kernel)
        for name in [name for name, stamp in fresh.items() if stamp != stamps.get(name)]:
            try:
                status = await kernel.reload(name)
                logger.info("extension %s was loaded anew: %s", name, status.state)
            except PostbusError as error:
                logger.error("extension %s goes on as it was: %s", name, error.message)  # noqa: TRY400 - the sentence says it all
        stamps = fresh


def _stamps(kernel: Kernel) -> dict[str, Any]:
    """Return, by extension, what changes when one of its files does."""
    return {status.id: _stamp(Path(status.folder)) for status in kernel.report().extensions}


def _stamp(folder: Path) -> frozenset[tuple[str, int, int]]:
    found = set()
    for path in folder.rglob("*"):
        if path.suffix in (".py", ".yaml") and path.is_file():
            facts = path.stat()
            found.add((str(path), facts.st_mtime_ns, facts.st_size))
    return frozenset(found)


def _announce(report: KernelReport, settings: Settings, *, as_json: bool) -> None:
    failed = [status for status in report.extensions if status.state == "error"]
    if as_json:
        states = {status.id: status.state for status in report.extensions}
        facts = {"pid": report.pid, "data": settings.event_bus.db_path, "version": __version__, "extensions": states}
        output.document(facts | {"orchestrator": report.orchestrator, "channels": report.channels})
        return
    running = count(sum(status.state == "running" for status in report.extensions), "extension")
    if TERMINAL not in report.channels or not sys.stdout.isatty():  # a chat has begun there
        output.say(f"Postbus {__version__} runs {running} on {settings.event_bus.db_path}; Ctrl-C stops it")
    if failed:
        names = ", ".join(status.id for status in failed)
        output.note(f"not running: {names}; `postbus doctor` says why")
    if report.orchestrator is None:
        output.note("no agent answers users: load one with integration_mode: orchestrator, or --with echo")
