"""The commands that append in bulk: ingest and replay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from postbus.cli import output
from postbus.cli.options import DATA, TENANT, Data, Json, Tenant, examples, folder_of, moment_of
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
    lake_at,
    settings_of,
    stream_of,
)
from postbus.cli.spark_bars import bar, session
from postbus.model import Invalid
from postbus.spark.runs import recorded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from postbus.spark.feed import Fed

__all__ = ["commands"]


@commands.command(
    epilog=examples(
        """
        $ postbus pipeline ingest dump.jsonl --into orders
        $ postbus pipeline ingest cities.csv --into cities --topic city.seen --source import
        """
    )
)
def ingest(
    files: Annotated[list[str], typer.Argument(metavar="FILE…", help="Files or folders: *.jsonl, *.csv, *.parquet.")],
    *,
    into: Annotated[str, typer.Option("--into", metavar="STREAM", help="The stream; made when it is not there.")],
    topic: Annotated[str | None, typer.Option("--topic", help="The topic of rows that name none.")] = None,
    source: Annotated[str | None, typer.Option("--source", help="The source of rows that name none.")] = None,
    kind: Annotated[str | None, typer.Option("--format", help="jsonl, csv or parquet, whatever the name says.")] = None,
    quarantine: Annotated[
        str | None, typer.Option("--quarantine", metavar="FILE", help="Where refused rows go, as JSON lines.")
    ] = None,
    tenant: Tenant = TENANT,
    master: Master = LOCAL,
    remote: Remote = None,
    memory: Memory = "1g",
    ui: Ui = False,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Append dumps to a stream: every row once, in order, however often it is run.

    A row with a field `payload` is an event, with the fields of an event; any other row is a payload as it is. A row
    that cannot become an event is kept aside with the reason, by default in `DATA/quarantine/`.
    """
    stream = stream_of(into)
    if kind not in {None, "jsonl", "csv", "parquet"}:
        raise typer.BadParameter(f"{kind!r} is not jsonl, csv or parquet", param_hint="'--format'")
    aside = quarantine or str(Path(folder_of(data)) / "quarantine" / f"{into}.jsonl")
    settings = settings_of(master, remote, memory, ui=ui)
    from postbus.spark.jobs.ingest import ingest, splits  # noqa: PLC0415 - needs the extra

    splits(files, kind)  # or it says what is wrong before Spark starts

    async def work(spark: SparkSession) -> Fed:
        asked = {"files": files, "into": stream}
        async with recorded(data, "ingest", asked, tenant=tenant) as found:
            with bar("ingesting", "bytes") as advance:
                fed = await ingest(
                    spark,
                    files,
                    data,
                    stream,
                    topic=topic,
                    source=source,
                    kind=kind,
                    quarantine=aside,
                    progress=advance,
                )
            found.update(msgspec.to_builtins(fed))
            return fed

    with session(settings) as spark:
        fed = asyncio.run(work(spark))
    _show_fed(fed, stream, aside if fed.refused else None, as_json=json)


@commands.command(
    epilog=examples(
        """
        $ postbus pipeline replay --into orders-again --stream orders --since 7d
        $ postbus pipeline replay --into hot --topic 'order.*' --filter '{"expr": "payload.total > 100"}' --rate 500
        """
    )
)
def replay(
    *,
    into: Annotated[str, typer.Option("--into", metavar="STREAM", help="The stream; made when it is not there.")],
    stream: Streams = ">",
    partition: Annotated[int | None, typer.Option("--partition", min=0, help="One partition of it.")] = None,
    first: Annotated[int | None, typer.Option("--from", min=0, metavar="OFFSET", help="The first offset.")] = None,
    end: Annotated[
        int | None, typer.Option("--to", min=0, metavar="OFFSET", help="The offset before which to end.")
    ] = None,
    topic: Annotated[str | None, typer.Option("--topic", metavar="PATTERN", help="Only these topics.")] = None,
    filter_: Annotated[
        str | None, typer.Option("--filter", metavar="JSON", help="Only what this filter matches.")
    ] = None,
    since: Since = None,
    until: Until = None,
    rate: Annotated[float | None, typer.Option("--rate", metavar="N", help="At most so many events a second.")] = None,
    lake: LakeAt = LAKE,
    tenant: Tenant = TENANT,
    master: Master = LOCAL,
    remote: Remote = None,
    memory: Memory = "1g",
    ui: Ui = False,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Append archived events to a stream again, also those that the log has let go.

    The order of each partition is kept, and running again adds nothing. The stream is another one than they came from.
    """
    target = stream_of(into)
    from postbus.filters import compile_filter  # noqa: PLC0415 - one use

    wanted: dict[str, Any] = {"stream": stream, "partition": partition, "first": first, "end": end, "topic": topic}
    wanted |= {"since_us": moment_of(since, "--since"), "until_us": moment_of(until, "--until")}
    if filter_ is not None:
        try:
            wanted["filter"] = compile_filter(msgspec.json.decode(filter_)).spec
        except msgspec.DecodeError as error:
            raise Invalid(f"the filter is not JSON: {error}") from error
    settings = settings_of(master, remote, memory, ui=ui)
    from postbus.spark.jobs.replay import Selection, replay  # noqa: PLC0415 - needs the extra

    place = lake_at(lake)

    async def work(spark: SparkSession) -> Fed:
        asked = {"lake": place.url, "into": target, **{name: value for name, value in wanted.items() if value}}
        async with recorded(data, "replay", asked, tenant=tenant) as found:
            with bar("replaying", "events") as advance:
                fed = await replay(spark, place, data, target, wanted=Selection(**wanted), rate=rate, progress=advance)
            found.update(msgspec.to_builtins(fed))
            return fed

    with session(settings) as spark:
        fed = asyncio.run(work(spark))
    _show_fed(fed, target, None, as_json=json)


def _show_fed(fed: Fed, stream: str, aside: str | None, *, as_json: bool) -> None:
    if as_json:
        output.document({"stream": stream, **msgspec.to_builtins(fed), "quarantine": aside})
        return
    there = f", {count(fed.duplicates, 'event')} there already" if fed.duplicates else ""
    output.say(f"appended {count(fed.appended, 'event')} to {stream}{there}")
    if fed.refused:
        output.say(f"refused {count(fed.refused, 'row')}" + (f"; they and why are in {aside}" if aside else ""))
