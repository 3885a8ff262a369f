"""The commands of the data pipeline on Spark."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from postbus.bus.search import EventQuery, find_events
from postbus.cli import output
from postbus.cli.options import CLOCK, DATA, TENANT, Data, Json, Tenant, age_of, examples, moment_of, opened_store
from postbus.cli.output import count
from postbus.cli.spark_bars import bar, session, spinner
from postbus.model import CorruptLog, Invalid
from postbus.schemas import Schemas
from postbus.spark.runs import TOPICS, recorded
from postbus.spark.session import LOCAL, Settings, require_pyspark
from postbus.topics import check_stream_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from postbus.spark.feed import Fed
    from postbus.spark.lake import Lake

__all__ = ["commands"]

LAKE = "./postbus-lake"
POLL_S = 10.0

commands = typer.Typer(
    no_args_is_help=True,
    help="Archive, ingest, replay, validate and report on Spark.",
    epilog=examples("$ postbus pipeline archive\n$ postbus pipeline status --json"),
)

LakeAt = Annotated[
    str, typer.Option("--lake", envvar="POSTBUS_LAKE", metavar="DIR_OR_URL", help="Where the archive is.")
]
Master = Annotated[
    str, typer.Option("--master", envvar="POSTBUS_SPARK_MASTER", metavar="URL", help="Which Spark runs it.")
]
Remote = Annotated[
    str | None,
    typer.Option(
        "--remote", envvar="POSTBUS_SPARK_REMOTE", metavar="URL", help="A Spark Connect server, as in sc://host."
    ),
]
Memory = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Memory of Spark's driver, as in 2g.")]
Ui = Annotated[bool, typer.Option("--ui", help="Switch Spark's own web page on, and print its address.")]
Streams = Annotated[
    str, typer.Option("--stream", metavar="NAME", help="One stream, or a pattern such as local.default.>.")
]
Since = Annotated[
    str | None, typer.Option("--since", metavar="WHEN", help="Appended since: an age like 10m, or an instant.")
]
Until = Annotated[
    str | None, typer.Option("--until", metavar="WHEN", help="Appended before: an age like 10m, or an instant.")
]


def _settings(master: str, remote: str | None, memory: str, *, ui: bool) -> Settings:
    require_pyspark()
    return Settings(master=master, remote=remote, memory=memory, ui=ui)


def _lake(path: str) -> Lake:
    from postbus.spark.lake import Lake  # noqa: PLC0415 - needs the extra

    return Lake(path)


def _into(name: str) -> str:
    return check_stream_name(name if "." in name else f"{TENANT}.{name}")


# --- archive ----------------------------------------------------------------------------------------------------------


@commands.command(
    epilog=examples(
        """
        $ postbus pipeline archive
        $ postbus pipeline archive --lake s3://bucket/lake --follow
        $ postbus pipeline archive --trim --older-than 30d
        """
    )
)
def archive(
    *,
    stream: Streams = ">",
    follow: Annotated[bool, typer.Option("--follow/--once", help="Go on with what comes, until interrupted.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, metavar="SECONDS", help="How often to look.")] = POLL_S,
    trim: Annotated[
        bool, typer.Option("--trim", help="Then trim from the log what the verified archive holds.")
    ] = False,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="With --trim: keep what is younger, as in 30d.")
    ] = None,
    accept_gaps: Annotated[
        bool, typer.Option("--accept-gaps", help="Go on although events were trimmed before they were archived.")
    ] = False,
    lake: LakeAt = LAKE,
    tenant: Tenant = TENANT,
    master: Master = LOCAL,
    remote: Remote = None,
    memory: Memory = "1g",
    ui: Ui = False,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Copy what is new in the log to the lake, as Parquet, exactly once.

    Goes on where the last run ended. `--trim` then checks every archived event against its hash chain, and removes from
    the log what the archive holds; subscriptions that still need an event keep it.
    """
    if older_than is not None and not trim:
        raise typer.BadParameter("it goes with --trim", param_hint="'--older-than'")
    age = None if older_than is None else age_of(older_than, "--older-than")
    settings = _settings(master, remote, memory, ui=ui)
    from postbus.spark.jobs.archive import backlog  # noqa: PLC0415 - needs the extra

    place = _lake(lake)
    waiting = backlog(data, place, stream=stream)
    if not waiting and not follow and not trim:
        if json:
            output.document({"batches": 0, "events": 0, "trimmed": []})
        else:
            output.say("nothing is new")
        return
    with session(settings) as spark:
        while True:
            if backlog(data, place, stream=stream) or (trim and not follow):
                asked = {"lake": place.url, "stream": stream, "trim": trim}
                found = asyncio.run(_archive(spark, data, place, stream, age, asked, tenant, accept_gaps=accept_gaps))
                _show_archived(found, as_json=json)
            if not follow:
                return
            asyncio.run(CLOCK.sleep(every))


async def _archive(
    spark: SparkSession,
    data: str,
    lake: Lake,
    stream: str,
    age: float | None,
    asked: dict[str, Any],
    tenant: str,
    *,
    accept_gaps: bool,
) -> dict[str, Any]:
    from postbus.spark.jobs.archive import archive  # noqa: PLC0415 - needs the extra
    from postbus.spark.jobs.retention import trim_archived  # noqa: PLC0415

    async with recorded(data, "archive", asked, tenant=tenant) as found:
        with bar("archiving", "events") as advance:
            done = archive(spark, data, lake, stream=stream, accept_gaps=accept_gaps, progress=advance)
        found.update(batches=done.batches, events=done.events, dropped=done.dropped, trimmed=[])
        if asked["trim"]:
            with bar("trimming", "partitions") as advance:
                trimmed = await trim_archived(spark, data, lake, stream=stream, older_than_s=age, progress=advance)
            found["trimmed"] = msgspec.to_builtins(trimmed)
        return found


def _show_archived(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.document(found)
        return
    output.say(
        f"archived {count(found['events'], 'event')} in {count(found['batches'], 'batch')}".replace("batchs", "batches")
    )
    for part in found["trimmed"]:
        held = f", held back by {', '.join(part['held_back_by'])}" if part["held_back_by"] else ""
        output.say(f"trimmed {count(part['removed'], 'event')} of {part['key']}, which begins at {part['first']}{held}")


@commands.command(
    epilog=examples(
        """
        $ postbus pipeline verify
        $ postbus pipeline verify --lake s3://bucket/lake --no-log
        """
    )
)
def verify(
    *,
    log: Annotated[bool, typer.Option("--log/--no-log", help="Compare with the log as far as that reaches.")] = True,
    lake: LakeAt = LAKE,
    master: Master = LOCAL,
    remote: Remote = None,
    memory: Memory = "1g",
    ui: Ui = False,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Check that the lake holds every archived event, unaltered.

    Computes the hash chain of every event in the lake anew, and compares it with the manifest and with the log. What is
    wrong is listed, and the exit code is 3.
    """
    settings = _settings(master, remote, memory, ui=ui)
    from postbus.spark.jobs.verify import verify_lake  # noqa: PLC0415 - needs the extra

    with session(settings) as spark, spinner("verifying the lake"):
        report = verify_lake(spark, _lake(lake), data if log else None)
    if json:
        output.document({"ok": report.ok, **msgspec.to_builtins(report)})
    elif report.ok:
        said = f"all is well: {count(report.events, 'event')} in {report.batches:,} batches"
        output.say(f"{said}, {count(report.compared, 'range')} compared with the log")
    else:
        output.table(("BATCH", "PARTITION", "WHAT"), [(each.batch, each.key, each.what) for each in report.problems])
    if not report.ok:
        first = report.problems[0]
        raise CorruptLog(f"the lake is damaged: batch {first.batch}, {first.key}: {first.what}")


# --- ingest and replay ------------------------------------------------------------------------------------------------


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
    stream = _into(into)
    if kind not in {None, "jsonl", "csv", "parquet"}:
        raise typer.BadParameter(f"{kind!r} is not jsonl, csv or parquet", param_hint="'--format'")
    aside = quarantine or str(Path(data) / "quarantine" / f"{into}.jsonl")
    settings = _settings(master, remote, memory, ui=ui)
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
    target = _into(into)
    from postbus.filters import compile_filter  # noqa: PLC0415 - one use

    wanted: dict[str, Any] = {"stream": stream, "partition": partition, "first": first, "end": end, "topic": topic}
    wanted |= {"since_us": moment_of(since, "--since"), "until_us": moment_of(until, "--until")}
    if filter_ is not None:
        try:
            wanted["filter"] = compile_filter(msgspec.json.decode(filter_)).spec
        except msgspec.DecodeError as error:
            raise Invalid(f"the filter is not JSON: {error}") from error
    settings = _settings(master, remote, memory, ui=ui)
    from postbus.spark.jobs.replay import Selection, replay  # noqa: PLC0415 - needs the extra

    place = _lake(lake)

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


# --- validate, report, status -----------------------------------------------------------------------------------------


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
    settings = _settings(master, remote, memory, ui=ui)
    from postbus.schemas import Document  # noqa: PLC0415 - one use
    from postbus.spark.jobs.validate import Summary, validate  # noqa: PLC0415 - needs the extra

    Document(document)  # or it says what is wrong before Spark starts
    place = None if out is None else Path(out).absolute().as_uri()

    async def work(spark: SparkSession) -> Summary:
        asked = {"stream": stream, "schema": schema, "subject": subject, "version": version}
        async with recorded(data, "validate", asked, tenant=tenant) as found:
            events = _events(spark, data, stream, topic, _lake(lake) if from_lake else None)
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


def _events(spark: SparkSession, data: str, stream: str, topic: str | None, lake: Lake | None) -> DataFrame:
    from postbus.spark.extent import located  # noqa: PLC0415 - one use
    from postbus.spark.jobs.replay import Selection, selected  # noqa: PLC0415 - needs the extra

    if lake is not None:
        return selected(lake.frame(spark), Selection(stream=stream, topic=topic))
    reader = spark.read.format("postbus").option("data", located(data)).option("stream", stream)
    return (reader if topic is None else reader.option("topic", topic)).load()


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
    settings = _settings(master, remote, memory, ui=ui)
    from postbus.spark.jobs.report import report  # noqa: PLC0415 - needs the extra

    async def work(spark: SparkSession) -> tuple[Any, Path]:
        async with recorded(data, "report", {"out": out, "stream": stream}, tenant=tenant) as found:
            place = _lake(lake) if from_lake else None
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


@commands.command(epilog=examples("$ postbus pipeline status\n$ postbus pipeline status --json"))
def status(
    *,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="How many runs to show.")] = 10,
    lake: LakeAt = LAKE,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Show how far the archive is behind the log, and the latest runs."""
    require_pyspark()
    from postbus.spark.jobs.archive import standing  # noqa: PLC0415 - needs the extra

    runs = asyncio.run(_runs(data, tenant, limit))
    parts = standing(data, _lake(lake))
    if json:
        output.document({"partitions": parts, "runs": runs})
        return
    rows = [
        (part.key, part.first, part.head, part.archived, part.head - max(part.archived, part.first)) for part in parts
    ]
    output.table(("PARTITION", "FIRST", "NEXT", "ARCHIVED TO", "WAITING"), rows)
    if runs:
        output.say("")
        shown = [(run["at"][:19], run["job"], run["state"], _told(run)) for run in runs]
        output.table(("WHEN", "JOB", "STATE", "WHAT"), shown, cut=True)


def _told(run: dict[str, Any]) -> str:
    facts = run.get("result") or {"error": run["error"]} if run.get("error") else run.get("result") or {}
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value not in ([], None))


async def _runs(data: str, tenant: str, limit: int) -> list[dict[str, Any]]:
    async with opened_store(data) as log:
        found = await find_events(log, EventQuery(tenant=tenant, topic=TOPICS, limit=2 * limit))
    latest: dict[str, dict[str, Any]] = {}
    for each in found:
        event = each.event
        facts = {"at": event.created_at.isoformat(), "state": event.topic.rpartition(".")[2], **event.payload}
        latest.pop(facts["run"], None)
        latest[facts["run"]] = facts
    return list(latest.values())[-limit:][::-1]
