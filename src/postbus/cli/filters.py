"""The command that says why a filter matches an event or not."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from postbus import strict_json
from postbus.bus.requeue import parse_address
from postbus.cli import output
from postbus.cli.options import CLOCK, DATA, TENANT, Data, Json, Tenant, address_of, examples, opened
from postbus.cli.output import safe
from postbus.envelope import draft
from postbus.filters import compile_filter
from postbus.model import Event, Invalid, NotFound

__all__ = ["commands"]

BYTES_MAX = 2 << 20
FIELDS = ("topic", "source", "payload", "variant", "key", "metadata", "headers", "occurred_at")
NO_MATCH = 1

commands = typer.Typer(
    no_args_is_help=True,
    epilog=examples(
        """
        $ postbus filter test '{"expr": "payload.total > 10"}' --id journal/0/17
        $ postbus filter test '{"payload": {"total": 40}}' --event event.json --json
        """
    ),
)


@commands.callback()
def filter_() -> None:
    """Content filters: which events a subscription gets."""


@commands.command(
    "test",
    epilog=examples(
        """
        $ postbus filter test '{"payload": {"total": 40}}' --id journal/0/17
        $ postbus filter test '{"expr": "payload.total > 10"}' --event event.json
        $ postbus read orders --json | head -1 | postbus filter test '{"expr": "size(payload.items) > 1"}' --event -
        """
    ),
)
def try_(
    spec: Annotated[str, typer.Argument(metavar="FILTER", help="The filter as JSON; - reads it from stdin.")],
    *,
    event: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The event as JSON: its payload, and what else is to be tested; - is stdin."),
    ] = None,
    address: Annotated[str | None, typer.Option("--id", metavar="ID", help="An event of the log by its id.")] = None,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Say whether a filter matches an event, and why: one line for each thing it asks.

    The exit code is 1 when it does not match.
    """
    if (event is None) == (address is None):
        raise typer.BadParameter("give exactly one of --event and --id", param_hint="'--event'")
    if spec == event == "-":
        raise typer.BadParameter("only one of FILTER and --event can be stdin", param_hint="'--event'")
    compiled = compile_filter(strict_json.parse(_read(spec) if spec == "-" else os.fsencode(spec)))
    if event is not None:
        given = _event(strict_json.parse(_read(event), max_bytes=BYTES_MAX))
    else:
        given = asyncio.run(_fetch(data, address_of(address or "", tenant)))
    found = compiled.explain(given)
    if json:
        output.document({"matches": found.matches, "reasons": [msgspec.structs.asdict(each) for each in found.reasons]})
    else:
        print("match" if found.matches else "no match")
        for reason in found.reasons:
            print(f"  {'✓' if reason.holds else '✗'} {reason.part}: {safe(reason.wanted)}  → {safe(reason.found)}")
    if not found.matches:
        raise typer.Exit(NO_MATCH)


def _read(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read(BYTES_MAX)
    with Path(path).open("rb") as file:
        return file.read(BYTES_MAX)


def _event(given: Any) -> Event:
    """Make an event of what a file says; fields of no interest to filters may be there."""
    if not isinstance(given, dict) or "payload" not in given:
        raise Invalid("the event must be a JSON object with a payload", hint='as in {"topic": "a.b", "payload": {}}')
    facts = {"topic": "test", "source": "test"} | {name: given[name] for name in FIELDS if name in given}
    headers = facts.pop("headers", None) or {}
    if not isinstance(headers, dict):
        raise Invalid("the headers must be a JSON object")
    own = {name: value for name, value in headers.items() if name.startswith("postbus.")}
    others = {name: value for name, value in headers.items() if name not in own}
    made = draft(**facts, headers=others, system_headers=own)
    return Event(
        "test",
        0,
        0,
        made.topic,
        made.source,
        made.variant,
        made.key,
        made.payload_json,
        made.metadata_json,
        made.headers_json,
        None,
        None,
        None,
        CLOCK.now_us() if made.occurred_at_us is None else made.occurred_at_us,
        0,
    )


async def _fetch(data: str, address: str) -> Event:
    stream, partition, offset = parse_address(address)
    async with opened(data) as log:
        for event in await log.fetch(stream, partition, offset, 1):
            if event.offset == offset:
                return event
    raise NotFound(f"there is no event {address}")
