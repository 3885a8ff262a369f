"""Options that the commands of the pipeline share, and how they become a session, a lake and events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from postbus.cli.host import CONFIG, Config
from postbus.cli.options import TENANT, examples
from postbus.spark.session import LOCAL, Settings, require_pyspark
from postbus.topics import check_stream_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from postbus.spark.lake import Lake

__all__ = [
    "LAKE",
    "LOCAL",
    "LakeAt",
    "Master",
    "Memory",
    "Remote",
    "Since",
    "Streams",
    "Ui",
    "Until",
    "commands",
    "events_of",
    "lake_at",
    "settings_of",
    "stream_of",
]

LAKE = "./postbus-lake"

# Each module of the pipeline adds its commands here.
commands = typer.Typer(
    no_args_is_help=True,
    epilog=examples("$ postbus pipeline archive\n$ postbus pipeline status --json"),
)

LakeAt = Annotated[
    str, typer.Option("--lake", envvar="POSTBUS_PIPELINE_LAKE", metavar="DIR_OR_URL", help="Where the archive is.")
]
Master = Annotated[
    str, typer.Option("--master", envvar="POSTBUS_PIPELINE_MASTER", metavar="URL", help="Which Spark runs it.")
]
Remote = Annotated[
    str | None,
    typer.Option(
        "--remote", envvar="POSTBUS_PIPELINE_REMOTE", metavar="URL", help="A Spark Connect server, as in sc://host."
    ),
]
Memory = Annotated[
    str,
    typer.Option(
        "--memory", envvar="POSTBUS_PIPELINE_MEMORY", metavar="SIZE", help="Memory of Spark's driver, as in 2g."
    ),
]
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


@commands.callback()
def _settings(context: typer.Context, *, config: Config = None) -> None:
    """Archive, ingest, replay, validate, report and fill inboxes on Spark.

    What neither the command line nor the environment says is looked for in the section `pipeline` of the settings file.
    """
    path = config if config is not None else CONFIG if CONFIG.is_file() else None
    if path is None:
        return
    from postbus.kernel.settings import read_settings  # noqa: PLC0415 - only with a file

    found = msgspec.structs.asdict(read_settings(path, environ={}).pipeline)
    given = {name: value for name, value in found.items() if value is not None}
    context.default_map = dict.fromkeys(getattr(context.command, "commands", ()), given)


def settings_of(master: str, remote: str | None, memory: str, *, ui: bool) -> Settings:
    """Return how the session is made; raises ``NotFound`` when PySpark is not installed."""
    require_pyspark()
    return Settings(master=master, remote=remote, memory=memory, ui=ui)


def lake_at(path: str) -> Lake:
    """Return the lake at a path."""
    from postbus.spark.lake import Lake  # noqa: PLC0415 - needs the extra

    return Lake(path)


def stream_of(name: str) -> str:
    """Return a stream's full name; a bare one is of the local tenant."""
    return check_stream_name(name if "." in name else f"{TENANT}.{name}")


def events_of(spark: SparkSession, data: str, stream: str, topic: str | None, lake: Lake | None) -> DataFrame:
    """Return the events of a log, or of a lake when there is one."""
    from postbus.spark.frames import events_in, refresh  # noqa: PLC0415 - needs the extra
    from postbus.spark.jobs.replay import Selection, selected  # noqa: PLC0415 - needs the extra

    if lake is not None:
        return selected(lake.frame(spark), Selection(stream=stream, topic=topic))
    refresh(data)
    return events_in(spark, data, stream=stream, topic=topic)
