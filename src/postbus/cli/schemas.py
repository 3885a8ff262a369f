"""The commands of the schemas: add, list, show, delete, bind, unbind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from postbus.cli import output
from postbus.cli.options import (
    DATA,
    TENANT,
    ApiKey,
    Data,
    Json,
    StreamName,
    Tenant,
    Url,
    connected,
    examples,
    opened_store,
)
from postbus.cli.output import count, safe, short
from postbus.model import NotFound, instant
from postbus.schemas import BindReport, Schemas, SchemaVersion
from postbus.schemas.document import BYTES_MAX
from postbus.schemas.registry import SAMPLE, SAMPLE_MAX
from postbus.strict_json import parse

if TYPE_CHECKING:
    from postbus.cli.remote import Remote

__all__ = ["commands"]

REFUSED = 5  # as the conflict that the same call without --dry-run ends in

commands = typer.Typer(
    no_args_is_help=True,
    epilog=examples(
        """
        $ postbus schemas add order --file order.json
        $ postbus schemas bind orders order --dry-run
        $ postbus schemas bind orders order
        $ postbus schemas list --json
        """
    ),
)

Subject = Annotated[str, typer.Argument(metavar="SUBJECT", help="The name that the versions of a schema share.")]


@commands.callback()
def schemas() -> None:
    """JSON Schemas: what the payloads of a stream must match.

    A schema is kept as a version of its subject and never changed. A stream that is bound to a version refuses payloads
    that do not match it, wherever they are published.
    """


class _Shown(msgspec.Struct):
    """A version as a server shows it."""

    namespace: str
    tenant: str
    subject: str
    version: int
    created_at: datetime
    schema: msgspec.Raw


def _version(answer: bytes) -> SchemaVersion:
    found = msgspec.json.decode(answer, type=_Shown)
    moment = round(found.created_at.timestamp() * 1e6)
    return SchemaVersion(f"{found.namespace}.{found.tenant}", found.subject, found.version, bytes(found.schema), moment)


def _path(tenant: str, subject: str) -> str:
    return f"/schemas/{tenant.replace('.', '/')}/{quote(subject, safe='')}"


def _binding(stream: str) -> str:
    return f"/topics/{stream.replace('.', '/')}/schema"


async def _remote_subjects(server: Remote) -> list[dict[str, Any]]:
    subjects = await server.schemas()
    bound: dict[str, dict[str, int]] = {}
    for topic in await server.topics():
        with contextlib.suppress(NotFound):
            found = await server.json("GET", _binding(topic["topic"]))
            bound.setdefault(found["subject"], {})[found["topic"]] = found["version"]
    return [
        {"subject": one["subject"], "versions": one["versions"], "bound": bound.get(one["subject"], {})}
        for one in subjects
    ]


def _facts(found: SchemaVersion) -> dict[str, Any]:
    return {
        "tenant": found.tenant,
        "subject": found.subject,
        "version": found.version,
        "created_at": instant(found.created_at_us),
        "schema": msgspec.Raw(found.document),
    }


@commands.command(
    epilog=examples(
        """
        $ postbus schemas add order '{"type": "object", "required": ["total"]}'
        $ postbus schemas add order --file order.json
        """
    )
)
def add(
    subject: Subject,
    schema: Annotated[
        str | None, typer.Argument(metavar="JSON", help="The JSON Schema; - reads it from stdin.")
    ] = None,
    *,
    file: Annotated[str | None, typer.Option(metavar="PATH", help="Read the JSON Schema from a file.")] = None,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Keep a JSON Schema (draft 2020-12) as the next version of its subject."""
    if (schema is None) == (file is None):
        raise typer.BadParameter("give either the schema or --file", param_hint="'JSON'")
    raw = _read(file) if schema is None else os.fsencode(schema) if schema != "-" else _read(None)

    async def run() -> SchemaVersion:
        if url is not None:
            parse(raw, max_bytes=BYTES_MAX)  # or the server would complain about the request, not about the schema
            async with connected(url, api_key, tenant) as server:
                body = {**server.whose(), "subject": subject, "schema": msgspec.Raw(raw)}
                return _version(await server.raw("POST", "/schemas", body))
        async with opened_store(data) as log:
            return await Schemas(log).add(tenant, subject, raw)

    made = asyncio.run(run())
    if json:
        output.document(_facts(made))
    else:
        print(f"{made.subject} version {made.version}")


def _read(path: str | None) -> bytes:
    if path is None:
        return sys.stdin.buffer.read(BYTES_MAX + 1)
    with Path(path).open("rb") as file:
        return file.read(BYTES_MAX + 1)


@commands.command(
    "list",
    epilog=examples(
        """
        $ postbus schemas list
        $ postbus schemas list --json
        """
    ),
)
def list_(
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """List the subjects with their versions and the streams that are bound to them."""

    async def run() -> list[dict[str, Any]]:
        if url is not None:
            async with connected(url, api_key, tenant) as server:
                return await _remote_subjects(server)
        async with opened_store(data) as log:
            known = Schemas(log)
            bound = await known.bindings()
            rows = []
            for subject, versions in groupby(await known.find(tenant), lambda found: found.subject):
                own = [each for each in bound.values() if (each.tenant, each.subject) == (tenant, subject)]
                numbers = [found.version for found in versions]
                streams = {each.stream: each.version for each in own}
                rows.append({"subject": subject, "versions": numbers, "bound": streams})
            return rows

    found = asyncio.run(run())
    if json:
        output.document({"subjects": found})
    elif found:
        rows = [
            (
                each["subject"],
                ", ".join(map(str, each["versions"])),
                ", ".join(f"{short(name, tenant)} ({version})" for name, version in each["bound"].items()),
            )
            for each in found
        ]
        output.table(("SUBJECT", "VERSIONS", "BOUND"), rows)
    else:
        output.note("no schemas")


@commands.command(
    epilog=examples(
        """
        $ postbus schemas show order
        $ postbus schemas show order --version 2
        """
    )
)
def show(
    subject: Subject,
    *,
    version: Annotated[int | None, typer.Option(min=1, help="Which version. Default: the latest.")] = None,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Show a schema as it was given."""

    async def run() -> SchemaVersion:
        if url is not None:
            async with connected(url, api_key, tenant) as server:
                path = f"{_path(tenant, subject)}/{version or 'latest'}"
                return _version(await server.raw("GET", path))
        async with opened_store(data) as log:
            return await Schemas(log).show(tenant, subject, version)

    found = asyncio.run(run())
    if json:
        output.document(_facts(found))
    else:
        output.note(f"{found.subject} version {found.version}")
        print("\n".join(safe(line) for line in found.document.decode().splitlines()))


@commands.command(
    epilog=examples(
        """
        $ postbus schemas delete order 1
        """
    )
)
def delete(
    subject: Subject,
    version: Annotated[
        int, typer.Argument(metavar="VERSION", min=1, help="The version; its number is not used again.")
    ],
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Remove a version that no stream is bound to."""

    async def run() -> None:
        if url is not None:
            async with connected(url, api_key, tenant) as server:
                await server.raw("DELETE", f"{_path(tenant, subject)}/{version}")
            return
        async with opened_store(data) as log:
            await Schemas(log).delete(tenant, subject, version)

    asyncio.run(run())
    if json:
        output.document({"subject": subject, "version": version, "deleted": True})
    else:
        output.note(f"{subject} version {version} is removed")


@commands.command(
    epilog=examples(
        """
        $ postbus schemas bind orders order --dry-run
        $ postbus schemas bind orders order --version 2
        """
    )
)
def bind(
    stream: StreamName,
    subject: Subject,
    *,
    version: Annotated[int | None, typer.Option(min=1, help="Which version. Default: the latest.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show which events would have been refused.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Bind it even if events that are there do not match.")] = False,
    sample: Annotated[
        int, typer.Option(min=0, max=SAMPLE_MAX, help="How many of the latest events of each partition to check.")
    ] = SAMPLE,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Let a stream take only payloads that match a schema; its latest events are checked first.

    The exit code is 5 when events that are there do not match, also with `--dry-run`.
    """

    async def run() -> BindReport:
        if url is not None:
            body = {"subject": subject, "dry_run": dry_run, "force": force, "sample": sample}
            async with connected(url, api_key) as server:
                answer = await server.raw(
                    "PUT", _binding(stream), body if version is None else {**body, "version": version}
                )
            return msgspec.json.decode(answer, type=BindReport)
        async with opened_store(data) as log:
            return await Schemas(log).bind(stream, subject, version, dry_run=dry_run, force=force, sample=sample)

    report = asyncio.run(run())
    if json:
        output.document(msgspec.to_builtins(report))
    else:
        for each in report.refused:
            issue = each.issues[0]
            print(f"{each.id}  {safe(issue.pointer) or 'top'}: {safe(issue.message)}")
        of = f"{report.refused_count:,} of the latest {count(report.checked, 'event')}"
        name = f"{report.subject} version {report.version}"
        output.note(f"{of} would be refused by {name}" if dry_run else f"{report.stream} is bound to {name}")
    if dry_run and report.refused_count:
        raise typer.Exit(REFUSED)


@commands.command(
    epilog=examples(
        """
        $ postbus schemas unbind orders
        """
    )
)
def unbind(
    stream: StreamName, *, data: Data = DATA, url: Url = None, api_key: ApiKey = None, json: Json = False
) -> None:
    """Let a stream take any payload again."""

    async def run() -> None:
        if url is not None:
            async with connected(url, api_key) as server:
                await server.raw("DELETE", _binding(stream))
            return
        async with opened_store(data) as log:
            await Schemas(log).unbind(stream)

    asyncio.run(run())
    if json:
        output.document({"stream": stream, "bound": False})
    else:
        output.note(f"{stream} takes any payload")
