"""The commands of an operator: stats and compact."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.filesize import decimal

from postbus.bus.housekeeping import keep_house
from postbus.bus.stats import bus_stats
from postbus.cli import output
from postbus.cli.bus import STATE_COLUMNS, state_facts, state_rows
from postbus.cli.options import (
    CLOCK,
    DATA,
    TENANT,
    ApiKey,
    Data,
    Json,
    Tenant,
    Url,
    age_of,
    connected,
    examples,
    opened_store,
)
from postbus.cli.output import count, short
from postbus.store.vacuum import vacuum as vacuum_store

if TYPE_CHECKING:
    from postbus.bus.housekeeping import Duty
    from postbus.bus.stats import BusStats
    from postbus.cli.remote import Counts

__all__ = ["commands"]

BARS = "▁▂▃▄▅▆▇█"

commands = typer.Typer()


# --- stats ------------------------------------------------------------------------------------------------------------


@commands.command(
    rich_help_panel="Bus",
    epilog=examples(
        """
        $ postbus stats
        $ postbus stats --json
        """
    ),
)
def stats(
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Count everything: events per stream and minute, statuses, subscriptions, dead letters, sizes.

    The rate counts what happened in each of the last 60 minutes, over the whole store. The WAL is the part of the store
    that is written but not merged into the file yet; the durability is that of what the command line, or the server,
    writes. What is about the whole store, a server only tells its operator.
    """

    async def run() -> BusStats | Counts:
        if url is not None:
            async with connected(url, api_key, tenant) as server:
                return await server.counts()
        async with opened_store(data) as log:
            return await bus_stats(log, CLOCK, tenant)

    found = asyncio.run(run())
    if json:
        output.document(_stats_facts(found))
        return
    events = sum(one.count for one in found.streams)
    statuses = found.statuses
    several = f", {statuses.uncounted:,} not counted" if statuses.uncounted else ""
    output.say(f"events         {events:,} in {count(len(found.streams), 'stream')}")
    if found.rates is not None:
        output.say(f"last hour      {sum(found.rates):,}, at most {max(found.rates):,} a minute")
        output.say(f"               {_spark(found.rates)}")
    output.say(
        f"statuses       {statuses.done:,} done, {statuses.pending:,} pending, {statuses.processing:,} processing, "
        f"{statuses.failed:,} failed{several}"
    )
    letters = ", ".join(f"{number:,} {state}" for state, number in found.dead_letters.items())
    output.say(f"dead letters   {letters}")
    if found.store_bytes is not None and found.wal_bytes is not None:
        sizes = f"{decimal(found.store_bytes)}, WAL {decimal(found.wal_bytes)}"
        output.say(f"store          {sizes}, durability {found.durability}")
    if found.streams:
        output.say("")
        rows = [(short(one.stream.name, tenant), one.count, decimal(one.bytes)) for one in found.streams]
        output.table(("STREAM", "EVENTS", "SIZE"), rows)
    if found.subscriptions:
        output.say("")
        output.table(STATE_COLUMNS, state_rows(found.subscriptions))


def _spark(rates: list[int]) -> str:
    top = max([*rates, 1])
    return "".join(BARS[-(-rate * (len(BARS) - 1) // top)] for rate in rates)


def _stats_facts(found: BusStats | Counts) -> dict[str, Any]:
    return {
        "streams": [{"name": one.stream.name, "count": one.count, "bytes": one.bytes} for one in found.streams],
        "statuses": found.statuses,
        "subscriptions": [state_facts(state) for state in found.subscriptions],
        "dead_letters": found.dead_letters,
        "rates": found.rates,
        "store_bytes": found.store_bytes,
        "wal_bytes": found.wal_bytes,
        "durability": found.durability,
    }


# --- compact ----------------------------------------------------------------------------------------------------------


@commands.command(
    rich_help_panel="Store",
    epilog=examples(
        """
        $ postbus compact --dry-run
        $ postbus compact --older-than 7d --vacuum
        $ postbus compact --failed-older-than 90d
        """
    ),
)
def compact(
    *,
    older_than: Annotated[
        str,
        typer.Option(metavar="AGE", help="Forget records beside the log that are older: finished deliveries and such."),
    ] = "30d",
    failed_older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Also put away open dead letters that are older. Default: they stay."),
    ] = None,
    vacuum: Annotated[
        bool, typer.Option("--vacuum", help="Then write the file anew, so that free space goes back to the disk.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be removed.")] = False,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Tidy the store: apply each stream's retention and forget what is kept for a while only.

    Removes events beyond the retention of their stream, records of finished deliveries and commits, results of side
    effects, dead letters that were replayed or purged. What is still to be delivered, retried or replayed stays, and so
    do open dead letters unless `--failed-older-than` says otherwise. Others may go on using the store meanwhile;
    `--vacuum` needs as much free space as the store holds and keeps other writers waiting.
    """
    age_s = age_of(older_than, "--older-than")
    failed_s = None if failed_older_than is None else age_of(failed_older_than, "--failed-older-than")
    if vacuum and dry_run:
        raise typer.BadParameter("a dry run changes nothing", param_hint="'--vacuum'")

    async def run() -> list[Duty]:
        async with opened_store(data) as log:
            with output.stages() as advance:
                return await keep_house(
                    log,
                    CLOCK,
                    older_than_s=age_s,
                    failed_older_than_s=failed_s,
                    dry_run=dry_run,
                    source="cli",
                    progress=advance,
                )

    duties = asyncio.run(run())
    sizes: tuple[int, int] | None = None
    if vacuum:
        with output.progress("vacuuming"):
            sizes = vacuum_store(data)
    _show_duties(duties, sizes, dry_run=dry_run, as_json=json)


def _show_duties(duties: list[Duty], sizes: tuple[int, int] | None, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        freed = None if sizes is None else {"bytes_before": sizes[0], "bytes_after": sizes[1]}
        output.document({"dry_run": dry_run, "duties": msgspec.to_builtins(duties), "vacuum": freed})
        return
    output.table(("WOULD REMOVE" if dry_run else "REMOVED", "WHAT"), [(duty.removed, duty.what) for duty in duties])
    for duty in duties:
        if duty.held_back_by:
            output.note(f"{duty.what} are held back by {', '.join(duty.held_back_by)}")
    if sizes is not None:
        output.say(f"vacuumed: {decimal(sizes[0])} before, {decimal(sizes[1])} now")
