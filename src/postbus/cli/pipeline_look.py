"""The commands that look at history: validate and report."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postbus.cli import output
from postbus.cli.options import DATA, TENANT, Data, Json, Tenant, examples, moment_of, opened_store
from postbus.cli.output import count
from postbus.cli.pipeline_options import (
    LAKE,
    LOCAL,
    LakeAt,
    Master,
    Memory,
    Remote,
    Since,
    Streams,
    Ui,
    Until,
    commands,
    events_of,
    lake_at,
    settings_of,
)
from postbus.cli.spark_bars import session, spinner
from postbus.schemas import Schemas
from postbus.spark.runs import recorded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


__all__ = ["commands"]


@commands.command(
    epilog=examples(
        """
        $ postbus pipeline validate orders --schema order.json
        $ postbus pipeline validate orders --subject order --version 2 --out refused
        """
    )
)
def validate(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="One stream, or a pattern such as local.default.>.")],
    *,
    schema: Annotated[str | None, typer.Option("--schema", metavar="FILE", help="A JSON Schema in a file.")] = None,
    subject: Annotated[str | None, typer.Option("--subject", help="A schema of the registry.")] = None,
    version: Annotated[int | None, typer.Option("--version", min=1, help="Its version; the latest if none.")] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="DIR", help="A folder for the refused events.")] = None,
    topic: Annotated[str | None, typer.Option("--topic", metavar="PATTERN", help="Only these topics.")] = None,
    from_lake: Annotated[bool, typer.Option("--archived", help="Look at the lake instead of the log.")] = False,
    lake: LakeAt = LAKE,
    tenant: Tenant = TENANT,
    master: Master = LOCAL,
    remote: Remote = None,
    memory: Memory = "1g",
    ui: Ui = False,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Say which events of the history a schema would have refused, and why."""
    if (schema is None) == (subject is None):
        raise typer.BadParameter("give one of them", param_hint="'--schema' / '--subject'")
    document = Path(schema).read_bytes() if schema is not None else asyncio.run(_schema(data, tenant, subject, version))
    settings = settings_of(master, remote, memory, ui=ui)
    from postbus.schemas import Document  # noqa: PLC0415 - one use
    from postbus.spark.jobs.validate import Summary, validate  # noqa: PLC0415 - needs the extra

    Document(document)  # or it says what is wrong before Spark starts
    place = None if out is None else Path(out).absolute().as_uri()

    async def work(spark: SparkSession) -> Summary:
        asked = {"stream": stream, "schema": schema, "subject": subject, "version": version}
        async with recorded(data, "validate", asked, tenant=tenant) as found:
            events = events_of(spark, data, stream, topic, lake_at(lake) if from_lake else None)
            with spinner("validating"):
                done = validate(events, document, place)
            found.update(checked=done.checked, refused=done.refused)
            return done

    with session(settings) as spark:
        done = asyncio.run(work(spark))
    if json:
        output.document(done)
        return
    output.say(f"{count(done.refused, 'event')} of {done.checked:,} would have been refused")
    if done.issues:
        rows = [(each.events, each.pointer or "/", each.message, each.example) for each in done.issues]
        output.table(("EVENTS", "WHERE", "WHAT", "FOR EXAMPLE"), rows)


async def _schema(data: str, tenant: str, subject: str | None, version: int | None) -> bytes:
    async with opened_store(data) as log:
        return (await Schemas(log).show(tenant, subject or "", version)).document


@commands.command(
    epilog=examples(
        """
        $ postbus pipeline report
        $ postbus pipeline report --out monday --since 7d --title 'The week'
        """
    )
)
def report(
    *,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="The folder to write to.")] = "./postbus-report",
    stream: Streams = ">",
    since: Since = None,
    until: Until = None,
    title: Annotated[str, typer.Option("--title", help="What the page is called.")] = "Postbus report",
    from_lake: Annotated[bool, typer.Option("--archived", help="Look at the lake instead of the log.")] = False,
    lake: LakeAt = LAKE,
    tenant: Tenant = TENANT,
    master: Master = LOCAL,
    remote: Remote = None,
    memory: Memory = "1g",
    ui: Ui = False,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Write a page with rates, latencies, lag, failures, causal chains and usage, and the tables behind it."""
    span = (moment_of(since, "--since"), moment_of(until, "--until"))
    settings = settings_of(master, remote, memory, ui=ui)
    from postbus.spark.jobs.report import report  # noqa: PLC0415 - needs the extra

    async def work(spark: SparkSession) -> tuple[Any, Path]:
        async with recorded(data, "report", {"out": out, "stream": stream}, tenant=tenant) as found:
            place = lake_at(lake) if from_lake else None
            with spinner("reporting"):
                facts, page = report(
                    spark, data, out, lake=place, stream=stream, since_us=span[0], until_us=span[1], title=title
                )
            found.update(events=facts.events, page=str(page))
            return facts, page

    with session(settings) as spark:
        facts, page = asyncio.run(work(spark))
    if json:
        output.document({"page": str(page), "facts": facts})
    else:
        output.say(f"{count(facts.events, 'event')}; the page is {page}")
