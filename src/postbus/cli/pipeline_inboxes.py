"""The commands of the pipeline that fill inboxes on Spark."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from postbus.cli import output
from postbus.cli.options import CLOCK, DATA, TENANT, Data, Json, Tenant, examples, opened_store
from postbus.cli.output import count
from postbus.cli.pipeline import Master, Memory, Remote, Ui, commands
from postbus.cli.spark_bars import bar, session
from postbus.inbox import Inboxes
from postbus.spark.runs import recorded
from postbus.spark.session import LOCAL, Settings, require_pyspark

if TYPE_CHECKING:
    from postbus.spark.jobs.materialize import Materialized

__all__ = ["commands"]

Subscriptions = Annotated[
    list[str], typer.Argument(metavar="SUBSCRIPTION…", help="Inbox subscriptions of the tenant, by id.")
]


@commands.command(
    epilog=examples(
        """
        $ postbus pipeline run
        $ postbus pipeline run --follow
        $ postbus pipeline run --tenant acme.eu orders
        """
    )
)
def run(
    subscriptions: Annotated[
        list[str] | None, typer.Argument(metavar="SUBSCRIPTION…", help="Only these of the tenant; all if none.")
    ] = None,
    *,
    follow: Annotated[bool, typer.Option("--follow/--once", help="Go on with what comes, until interrupted.")] = False,
    everyone: Annotated[bool, typer.Option("--all-tenants", help="Serve the subscriptions of all tenants.")] = False,
    tenant: Tenant = TENANT,
    master: Master = LOCAL,
    remote: Remote = None,
    memory: Memory = "1g",
    ui: Ui = False,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Fill the inboxes of subscriptions whose engine is `spark`.

    Goes on from their cursors; run again it adds nothing. A bus may serve the other subscriptions at the same time.
    """
    if subscriptions and everyone:
        raise typer.BadParameter("subscriptions are named within a tenant", param_hint="'--all-tenants'")
    require_pyspark()
    from postbus.spark.jobs.materialize import backlog, materialize  # noqa: PLC0415 - needs the extra

    whose = None if everyone else tenant
    names = subscriptions or None
    if not asyncio.run(backlog(data, tenant=whose, subscriptions=names)) and not follow:
        _show({"events": 0, "matches": 0, "jobs": 0, "filter_errors": {}}, "nothing is new", as_json=json)
        return

    async def work(spark: Any) -> Materialized:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        if follow:
            loop.add_signal_handler(signal.SIGINT, _interrupted, loop, stop)
        asked = {"tenant": whose, "subscriptions": names, "follow": follow}
        async with recorded(data, "run", asked, tenant=tenant) as found:
            with bar("filling inboxes", "events") as advance:
                done = await materialize(
                    spark, data, follow=follow, tenant=whose, subscriptions=names, stop=stop, progress=advance
                )
            found.update(msgspec.to_builtins(done))
            return done

    with session(Settings(master=master, remote=remote, memory=memory, ui=ui)) as spark:
        done = asyncio.run(work(spark))
    _show(msgspec.to_builtins(done), _read(done), as_json=json)


def _interrupted(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """End after the job under way; whoever interrupts again does not want to wait."""
    loop.remove_signal_handler(signal.SIGINT)
    stop.set()


@commands.command(
    epilog=examples(
        """
        $ postbus agents subscribe ann 'order.*' --id late --start earliest --engine spark
        $ postbus pipeline backfill late
        """
    )
)
def backfill(
    subscriptions: Subscriptions,
    *,
    tenant: Tenant = TENANT,
    master: Master = LOCAL,
    remote: Remote = None,
    memory: Memory = "1g",
    ui: Ui = False,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Serve subscriptions on Spark until they have caught up with the log, then hand them to the live bus.

    For a new subscription that starts with a long history. Interrupted, it leaves them to Spark: run it again.
    """
    require_pyspark()
    asyncio.run(_known(data, tenant, subscriptions))
    from postbus.spark.jobs.materialize import backfill  # noqa: PLC0415 - needs the extra

    async def work(spark: Any) -> Materialized:
        async with recorded(data, "backfill", {"subscriptions": subscriptions}, tenant=tenant) as found:
            with bar("filling inboxes", "events") as advance:
                done = await backfill(spark, data, tenant, subscriptions, progress=advance)
            found.update(msgspec.to_builtins(done))
            return done

    with session(Settings(master=master, remote=remote, memory=memory, ui=ui)) as spark:
        done = asyncio.run(work(spark))
    _show(msgspec.to_builtins(done), f"{_read(done)}; the live bus goes on from there", as_json=json)


@commands.command(
    "hand-over",
    epilog=examples(
        """
        $ postbus pipeline hand-over orders --to spark
        $ postbus pipeline hand-over --all --to spark
        """
    ),
)
def hand_over(
    subscriptions: Annotated[
        list[str] | None, typer.Argument(metavar="SUBSCRIPTION…", help="Inbox subscriptions of the tenant.")
    ] = None,
    *,
    everyone: Annotated[
        bool, typer.Option("--all", help="All subscriptions of the tenant, and those that come and do not say.")
    ] = False,
    to: Annotated[Literal["live", "spark"], typer.Option("--to", help="Who fills the inbox from now on.")],
    tenant: Tenant = TENANT,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Have subscriptions served by the live bus, or by Spark, from where they are. Nothing is lost or given twice."""
    names = subscriptions or []
    if bool(names) is everyone:
        raise typer.BadParameter("name subscriptions, or say --all", param_hint="'SUBSCRIPTION…'")

    async def work() -> list[str]:
        await _known(data, tenant, names)
        async with opened_store(data) as log:
            inboxes = Inboxes(log, CLOCK)
            if everyone:
                return await inboxes.hand_over_all(tenant, to)
            for name in names:
                await inboxes.hand_over(tenant, name, to)
            return names

    changed = asyncio.run(work())
    who = f"everything of {tenant}" if everyone else ", ".join(names)
    told = f"{who}: {'Spark' if to == 'spark' else 'the live bus'} from now on"
    _show({"subscriptions": changed, "engine": to}, told, as_json=json)


async def _known(data: str, tenant: str, subscriptions: list[str]) -> None:
    """Raise ``NotFound`` for a subscription that there is not, before anything is changed."""
    async with opened_store(data) as log:
        inboxes = Inboxes(log, CLOCK)
        for name in subscriptions:
            await inboxes.agents.subscription(tenant, name)


def _read(done: Materialized) -> str:
    told = f"read {count(done.events, 'event')}, {count(done.matches, 'item')} for inboxes"
    if done.filter_errors:
        failed = ", ".join(f"{name} {number:,}" for name, number in sorted(done.filter_errors.items()))
        told += f"; events for which a filter had no value: {failed}"
    return told


def _show(facts: dict[str, object], told: str, *, as_json: bool) -> None:
    if as_json:
        output.document(facts)
    else:
        output.say(told)
