"""Options and arguments that commands share, and how their texts become values."""

from __future__ import annotations

import inspect
import re
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from postbus.bus import EventBus
from postbus.bus.opening import open_node
from postbus.cli import output
from postbus.clock import SystemClock
from postbus.envelope import parse_instant
from postbus.log import ReplicaLog
from postbus.log.address import parse_address
from postbus.model import Invalid, Start, StartPolicy, Unreachable
from postbus.topics import check_stream_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from postbus.cli.remote import Remote
    from postbus.log import Log, SqliteLog
    from postbus.log.address import Address

__all__ = [
    "CLOCK",
    "DATA",
    "SOURCE",
    "TENANT",
    "ApiKey",
    "Data",
    "Json",
    "OccurredAt",
    "OptionalStream",
    "Source",
    "StreamName",
    "Tenant",
    "Url",
    "Yes",
    "address_of",
    "age_of",
    "connected",
    "examples",
    "folder_of",
    "headers_of",
    "moment_of",
    "opened",
    "opened_bus",
    "opened_store",
    "pairs_of",
    "reached",
    "shown_place",
    "start_of",
]

DATA = "./postbus-data"
SOURCE = "cli"
TENANT = "local.default"
LOCAL = f"{TENANT}."
OFFSET = re.compile("-?[0-9]{1,18}")
AGE = re.compile("([0-9]{1,9}(?:[.][0-9]{1,3})?)(s|m|h|d|w)")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
PATIENCE_S = 1.0
CATCH_UP_S = 600.0
CLOCK = SystemClock()


def _full_name(name: str | None) -> str | None:
    """Return a stream's full name; a bare name is one of the local tenant."""
    if name is None:
        return None
    return check_stream_name(name if "." in name else LOCAL + name)


def _folder(context: typer.Context, path: str) -> str:
    if not path:
        raise typer.BadParameter("the name of the folder is empty")
    _one_place(context)
    return path


def _server(context: typer.Context, url: str | None) -> str | None:
    _one_place(context)
    return None if _typed(context, "data") else url


def _one_place(context: typer.Context) -> None:
    """Refuse both places on the command line; whichever of the two is looked at last finds the other."""
    if _typed(context, "data") and _typed(context, "url"):
        raise typer.BadParameter("give --url or --data, one of the two", param_hint="'--url'")


def _typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _tenant(name: str) -> str:
    check_stream_name(f"{name}.journal")
    return name


Data = Annotated[
    str,
    typer.Option(
        "--data",
        envvar="POSTBUS_DATA",
        metavar="DIR",
        callback=_folder,
        help="The data folder, or a remote log with the folder of its copy: nats://HOST:PORT?data=DIR.",
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="POSTBUS_URL",
        metavar="URL",
        callback=_server,
        help="A server instead of a data folder, as in http://127.0.0.1:7766 or unix:PATH; --data beats the variable.",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="POSTBUS_KEY",
        metavar="KEY",
        help="The key for the server. Here other users of this machine can see it: prefer the variable.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
Tenant = Annotated[
    str,
    typer.Option("--tenant", metavar="NAME", callback=_tenant, help="Whose journal and streams, as in local.default."),
]
OccurredAt = Annotated[
    str | None,
    typer.Option(
        "--occurred-at", metavar="INSTANT", help="When it happened, as in 2026-01-31T12:00:00Z. Default: now."
    ),
]
Source = Annotated[
    str | None,
    typer.Option(
        "--source", help=f"What produced the event, as in github:owner/repo. Default: {SOURCE}, or what a server says."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")]
_STREAM_HELP = "The stream: namespace.tenant.name, or just NAME for local.default.NAME."
StreamName = Annotated[str, typer.Argument(metavar="STREAM", callback=_full_name, help=_STREAM_HELP)]
OptionalStream = Annotated[
    str | None, typer.Argument(metavar="STREAM", callback=_full_name, help=f"{_STREAM_HELP} Default: all.")
]


def start_of(text: str, option: str, *, times: bool = True) -> Start:
    """Return a start policy from its text: ``earliest``, ``latest``, an offset, or (with ``times``) an instant."""
    if text in (StartPolicy.EARLIEST, StartPolicy.LATEST):
        return Start(policy=StartPolicy(text))
    if OFFSET.fullmatch(text):
        return Start(policy=StartPolicy.AT_OFFSET, offset=int(text))
    if times:
        return Start(policy=StartPolicy.AT_TIME, time_us=parse_instant(text))
    raise typer.BadParameter(f"{text!r} is not an offset, earliest or latest", param_hint=f"'{option}'")


def age_of(text: str, option: str) -> float:
    """Return seconds from a text like ``90s``, ``10m``, ``2h``, ``3d`` or ``1w``."""
    found = AGE.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no age like 90s, 10m, 2h, 3d or 1w", param_hint=f"'{option}'")
    return float(found[1]) * UNITS_S[found[2]]


def moment_of(text: str | None, option: str) -> int | None:
    """Return microseconds since 1970 from an instant, or from an age that is counted back from now."""
    if text is None:
        return None
    if AGE.fullmatch(text):
        return CLOCK.now_us() - int(age_of(text, option) * 1e6)
    try:
        return parse_instant(text)
    except Invalid as error:
        message = f"{text!r} is neither an age like 10m nor an instant like 2026-01-31T12:00:00Z"
        raise typer.BadParameter(message, param_hint=f"'{option}'") from error


def address_of(text: str, tenant: str) -> str:
    """Return the full address of an event or dead letter; a bare stream name is one of the tenant's."""
    stream, slash, rest = text.partition("/")
    return f"{tenant}.{stream}{slash}{rest}" if slash and "." not in stream else text


def headers_of(pairs: list[str]) -> dict[str, str] | None:
    """Return headers from texts ``NAME=VALUE``."""
    return pairs_of(pairs, "--header") or None


def pairs_of(pairs: list[str], option: str) -> dict[str, str]:
    """Return names and values from texts ``NAME=VALUE``."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint=f"'{option}'")
        if name in found:
            raise typer.BadParameter(f"{name!r} is given twice", param_hint=f"'{option}'")
        found[name] = value
    return found


@asynccontextmanager
async def opened(data: str, *, create: bool = False) -> AsyncIterator[Log]:
    """Open the log in the data folder, and close it at the end."""
    async with opened_store(data, create=create) as log:
        yield log


@asynccontextmanager
async def opened_store(data: str, *, create: bool = False) -> AsyncIterator[SqliteLog]:
    """Open the log in the data folder with what is kept beside it, and close it at the end."""
    address = _place(data)
    log = await open_node(address, create=create or address.remote is not None, catch_up_s=CATCH_UP_S)
    if isinstance(log, ReplicaLog) and log.away is not None:
        output.note(f"the remote does not answer, so this is about the copy: {log.away}")
    log.projections.start()
    try:
        yield log
    finally:
        await log.close()


def folder_of(data: str) -> str:
    """Return the data folder: what was named, or what keeps the copy of the remote that was named."""
    return _place(data).folder or data


def shown_place(data: str) -> str:
    """Return the place as it may be shown: a remote without its password."""
    return _place(data).public


def _place(data: str) -> Address:
    address = parse_address(data)
    if address.folder is None:
        raise Invalid("memory: ends with the command", hint="name a folder with --data")
    return address


@asynccontextmanager
async def opened_bus(data: str, tenant: str, *, create: bool = False) -> AsyncIterator[EventBus]:
    """Open a bus in the data folder that runs no handlers, and close it at the end."""
    if not create:
        async with opened(data):
            pass  # it is there and can be used, or this has said what is wrong
    place = _place(data)
    bus = EventBus(Path(data).absolute() if place.remote is None else data, tenant=tenant)  # noqa: ASYNC240 - joins names
    try:
        yield bus
    finally:
        await bus.stop()


@asynccontextmanager
async def connected(
    url: str, api_key: str | None, tenant: str = TENANT, *, patience_s: float = PATIENCE_S
) -> AsyncIterator[Remote]:
    """Open a server for the commands of one tenant, and close it at the end."""
    from postbus.cli.remote import Remote  # noqa: PLC0415 - takes as long as a command on a folder

    async with Remote(url, key=api_key, tenant=tenant, patience_s=patience_s) as server:
        try:
            yield server
        except Unreachable as error:
            error.hint = error.hint or f"is a server running at {url}?"
            raise
        except msgspec.MsgspecError as error:
            message = f"what answered at {url} is no Postbus server, or one of another version"
            raise Unreachable(message) from error


@asynccontextmanager
async def reached(
    data: str, url: str | None, api_key: str | None, tenant: str = TENANT, *, create: bool = False
) -> AsyncIterator[SqliteLog | Remote]:
    """Open the log in the data folder, or the one behind a server if there is a URL; and close it at the end."""
    if url is not None:
        async with connected(url, api_key, tenant) as server:
            yield server
    else:
        async with opened_store(data, create=create) as log:
            yield log


def examples(text: str) -> str:
    """Return example lines as an epilog in Markdown."""
    return f"Examples:\n\n```console\n{inspect.cleandoc(text)}\n```"
