"""The commands of the archive: archive, verify, status."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from postbus.bus.search import EventQuery, find_events
from postbus.cli import output
from postbus.cli.options import CLOCK, DATA, TENANT, Data, Json, Tenant, age_of, examples, opened_store
from postbus.cli.output import count
from postbus.cli.pipeline_options import (
    LAKE,
    LOCAL,
    LakeAt,
    Master,
    Memory,
    Remote,
    Streams,
    Ui,
    commands,
    lake_at,
    settings_of,
)
from postbus.cli.spark_bars import bar, session, spinner
from postbus.model import CorruptLog
from postbus.spark.runs import TOPICS, recorded
from postbus.spark.session import require_pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from postbus.spark.lake import Lake

__all__ = ["commands"]

POLL_S = 10.0


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
    settings = settings_of(master, remote, memory, ui=ui)
    from postbus.spark.jobs.archive import backlog  # noqa: PLC0415 - needs the extra

    place = lake_at(lake)
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
    output.say(f"archived {count(found['events'], 'event')} in {count(found['batches'], 'batch')}")
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
    settings = settings_of(master, remote, memory, ui=ui)
    from postbus.spark.jobs.verify import archived, verify_lake  # noqa: PLC0415 - needs the extra

    place = lake_at(lake)
    archived(place)  # else Spark need not start
    with session(settings) as spark, spinner("verifying the lake"):
        report = verify_lake(spark, place, data if log else None)
    if json:
        output.document({"ok": report.ok, **msgspec.to_builtins(report)})
    elif report.ok:
        said = f"all is well: {count(report.events, 'event')} in {count(report.batches, 'batch')}"
        output.say(f"{said}, {count(report.compared, 'range')} compared with the log")
    else:
        output.table(("BATCH", "PARTITION", "WHAT"), [(each.batch, each.key, each.what) for each in report.problems])
    if not report.ok:
        first = report.problems[0]
        raise CorruptLog(f"the lake is damaged: batch {first.batch}, {first.key}: {first.what}")


# --- status ---


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
    parts = standing(data, lake_at(lake))
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
