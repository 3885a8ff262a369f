"""The commands of the topics: create, list, show, delete."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.filesize import decimal

from postbus.cli import output
from postbus.cli.options import DATA, ApiKey, Data, Json, StreamName, Url, Yes, age_of, examples, pairs_of, reached
from postbus.cli.output import count
from postbus.model import Conflict, Retention, StreamSettings, instant

if TYPE_CHECKING:
    from postbus.model import StreamStats

__all__ = ["commands"]

JOURNAL = ".journal"
AGES = (("d", 86_400), ("h", 3600), ("m", 60))

commands = typer.Typer(
    no_args_is_help=True,
    epilog=examples(
        """
        $ postbus topics create orders --partitions 4 --keep-age 7d
        $ postbus topics list
        $ postbus topics show orders
        $ postbus topics delete orders
        """
    ),
)


@commands.callback()
def topics() -> None:
    """Registered topics: each is a stream of its own, and what a server lets others publish to."""


# --- create -----------------------------------------------------------------------------------------------------------


@commands.command(
    epilog=examples(
        """
        $ postbus topics create orders
        $ postbus topics create acme.prod.orders --partitions 4 --keep-age 7d --label team=shop
        $ postbus topics create orders --keep-count 100000 --url http://127.0.0.1:7766
        """
    )
)
def create(
    topic: StreamName,
    *,
    partitions: Annotated[int, typer.Option(min=1, help="How many; a topic keeps them.")] = 1,
    keep_age: Annotated[
        str | None, typer.Option(metavar="AGE", help="Remove events that are older, as in 12h, 7d. Default: never.")
    ] = None,
    keep_bytes: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Remove the oldest of a partition beyond that many bytes.")
    ] = None,
    keep_count: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Remove the oldest of a partition beyond that many events.")
    ] = None,
    beats_consumers: Annotated[
        bool, typer.Option("--beats-consumers", help="Remove them even if some subscription has not read them yet.")
    ] = False,
    identity_window: Annotated[
        str | None, typer.Option(metavar="AGE", help="How long native ids are remembered. Default: for ever.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A label; may be repeated.")] = None,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Register a topic; refused when it exists."""
    age_s = None if keep_age is None else age_of(keep_age, "--keep-age")
    settings = StreamSettings(
        partitions=partitions,
        retention=Retention(age_s=age_s, bytes=keep_bytes, count=keep_count),
        retention_beats_consumers=beats_consumers,
        identity_window_s=None if identity_window is None else age_of(identity_window, "--identity-window"),
        labels=pairs_of(label or [], "--label"),
    )

    async def run() -> StreamStats:
        async with reached(data, url, api_key, create=True) as log:
            await log.create_stream(topic, settings)
            return await log.get_stream_stats(topic)

    made = asyncio.run(run())
    if json:
        output.document(_facts(made))
    else:
        output.say(f"created {topic}")


# --- list and show ----------------------------------------------------------------------------------------------------


@commands.command(
    "list",
    epilog=examples(
        """
        $ postbus topics list
        $ postbus topics list --url http://127.0.0.1:7766 --json
        """
    ),
)
def list_(*, data: Data = DATA, url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """List the topics, of all tenants; a server only shows those that the key may see."""

    async def run() -> list[StreamStats]:
        async with reached(data, url, api_key) as log:
            return [await log.get_stream_stats(stream.name) for stream in await log.streams()]

    found = asyncio.run(run())
    if json:
        output.document({"topics": [_facts(stats) for stats in found]})
    elif found:
        rows = [
            (
                stats.stream.name,
                stats.stream.settings.partitions,
                stats.count,
                decimal(stats.bytes),
                _kept(stats.stream.settings.retention),
                _labels(stats.stream.settings.labels),
            )
            for stats in found
        ]
        output.table(("TOPIC", "PARTITIONS", "EVENTS", "SIZE", "KEPT", "LABELS"), rows)
    else:
        output.note("no topics yet; `postbus topics create NAME` makes one")


@commands.command(epilog=examples("$ postbus topics show orders"))
def show(topic: StreamName, *, data: Data = DATA, url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """Show a topic: its settings, and what each partition holds."""

    async def run() -> StreamStats:
        async with reached(data, url, api_key) as log:
            return await log.get_stream_stats(topic)

    found = asyncio.run(run())
    if json:
        output.document(_facts(found))
        return
    settings = found.stream.settings
    window = settings.identity_window_s
    facts = {
        "topic": found.stream.name,
        "created": f"{instant(found.stream.created_at_us):%Y-%m-%dT%H:%M:%SZ}",
        "events": f"{found.count:,}, {decimal(found.bytes)}",
        "kept": _kept(settings.retention),
        "unread": "removed too" if settings.retention_beats_consumers else "kept until it is read",
        "identities": "for ever" if window is None else _age(window),
        "labels": _labels(settings.labels),
    }
    for name, value in facts.items():
        output.say(f"{name:<11} {value}")
    output.say("")
    rows = [(part.partition, part.first_offset, part.high_water_mark, part.count) for part in found.partitions]
    output.table(("PARTITION", "FIRST", "NEXT", "EVENTS"), rows)


def _kept(retention: Retention) -> str:
    bounds = [
        None if retention.age_s is None else _age(retention.age_s),
        None if retention.bytes is None else decimal(retention.bytes),
        None if retention.count is None else count(retention.count, "event"),
    ]
    return ", ".join(bound for bound in bounds if bound is not None) or "for ever"


def _age(seconds: float) -> str:
    """Return an age as it may be given."""
    unit, size = next((pair for pair in AGES if seconds % pair[1] == 0), ("s", 1))
    return f"{seconds / size:g}{unit}"


def _labels(labels: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(labels.items())) or "-"


def _facts(stats: StreamStats) -> dict[str, Any]:
    stream = stats.stream
    return {
        "topic": stream.name,
        **msgspec.to_builtins(stream.settings),
        "epoch": stream.epoch,
        "created_at": instant(stream.created_at_us),
        "events": stats.count,
        "bytes": stats.bytes,
        "extents": stats.partitions,
    }


# --- delete -----------------------------------------------------------------------------------------------------------


@commands.command(
    epilog=examples(
        """
        $ postbus topics delete orders
        $ postbus topics delete orders --yes
        """
    )
)
def delete(
    topic: StreamName,
    *,
    yes: Yes = False,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Remove a topic with its events. Asks first."""
    if topic.endswith(JOURNAL):
        raise Conflict("a tenant's journal cannot be removed")

    async def look() -> StreamStats:
        async with reached(data, url, api_key) as log:
            return await log.get_stream_stats(topic)

    found = asyncio.run(look())
    if not yes:
        output.confirm(f"Remove the topic {topic} with its {count(found.count, 'event')} for good?")

    async def run() -> None:
        async with reached(data, url, api_key) as log:
            await log.delete_stream(topic)

    asyncio.run(run())
    if json:
        output.document({"deleted": _facts(found)})
    else:
        output.say(f"deleted {topic}")
