"""Options and arguments that commands share, and how their texts become values."""

from __future__ import annotations

import inspect
import os
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from postbus.envelope import parse_instant
from postbus.log import open_log
from postbus.model import Start, StartPolicy
from postbus.topics import check_stream_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from postbus.log import Log

__all__ = ["DATA", "Data", "Json", "OptionalStream", "StreamName", "examples", "headers_of", "opened", "start_of"]

DATA = "./postbus-data"
LOCAL = "local.default."
OFFSET = re.compile("-?[0-9]{1,18}")


def _full_name(name: str | None) -> str | None:
    """Return a stream's full name; a bare name is one of the local tenant."""
    if name is None:
        return None
    return check_stream_name(name if "." in name else LOCAL + name)


def _folder(path: str) -> str:
    if not path:
        raise typer.BadParameter("the name of the folder is empty")
    return path


Data = Annotated[
    str,
    typer.Option("--data", envvar="POSTBUS_DATA", metavar="DIR", callback=_folder, help="The data folder."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
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


def headers_of(pairs: list[str]) -> dict[str, str] | None:
    """Return headers from texts ``NAME=VALUE``."""
    headers: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint="'--header'")
        if name in headers:
            raise typer.BadParameter(f"{name!r} is given twice", param_hint="'--header'")
        headers[name] = value
    return headers or None


@asynccontextmanager
async def opened(data: str, *, create: bool = False) -> AsyncIterator[Log]:
    """Open the log in the data folder, and close it at the end."""
    log = await open_log(f"sqlite://{quote(os.fsencode(data))}", create=create)
    try:
        yield log
    finally:
        await log.close()


def examples(text: str) -> str:
    """Return example lines as an epilog in Markdown."""
    return f"Examples:\n\n```console\n{inspect.cleandoc(text)}\n```"
