"""The commands of who reads the log: consumers and lag."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from postbus.cli import output
from postbus.cli.options import (
    DATA,
    TENANT,
    ApiKey,
    Data,
    Json,
    OptionalStream,
    Url,
    connected,
    examples,
    opened,
    start_of,
)
from postbus.log.cursors import no_consumer
from postbus.model import instant

if TYPE_CHECKING:
    from postbus.model import Consumer, ConsumerLag, Start

__all__ = ["commands"]

commands = typer.Typer()


# --- consumers --------------------------------------------------------------------------------------------------------


@commands.command(
    rich_help_panel="Log",
    epilog=examples(
        """
        $ postbus consumers
        $ postbus consumers orders --create kitchen --start latest
        $ postbus consumers orders --reset kitchen --start 2026-01-31T12:00:00Z
        $ postbus consumers orders --delete kitchen
        """
    ),
)
def consumers(
    stream: OptionalStream = None,
    *,
    create: Annotated[str | None, typer.Option(metavar="ID", help="Make this consumer of STREAM, or find it.")] = None,
    reset: Annotated[str | None, typer.Option(metavar="ID", help="Move this consumer to --start.")] = None,
    delete: Annotated[str | None, typer.Option(metavar="ID", help="Forget this consumer and its cursors.")] = None,
    start: Annotated[
        str | None,
        typer.Option(metavar="WHERE", help="earliest, latest, an offset, or an instant as in 2026-01-31T12:00:00Z."),
    ] = None,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """List the consumers; also make, move and delete them.

    For each partition: the next offset the consumer will read, the last one it committed (-1: never), and how many
    events retention removed before it read them. A new consumer starts at the latest event unless `--start`
    says otherwise.
    """
    chosen = [name for name in (create, reset, delete) if name is not None]
    if len(chosen) > 1 or (chosen and stream is None):
        raise typer.BadParameter("give a STREAM and one of --create, --reset, --delete", param_hint="'STREAM'")
    if (start is None and reset is not None) or (start is not None and create is None and reset is None):
        raise typer.BadParameter("it goes with --reset, where it is needed, and --create", param_hint="'--start'")
    where = None if start is None else start_of(start, "--start")

    async def run() -> list[Consumer]:
        async with opened(data) as log:
            if stream is None:
                return await log.consumers()
            await log.get_stream_stats(stream)  # refuses a stream that is not there
            if create is not None:
                return [await log.ensure_consumer(stream, create, where)]
            if reset is not None and where is not None:
                return [await log.reset(stream, reset, where)]
            if delete is not None and not await log.delete_consumer(stream, delete):
                raise no_consumer(stream, delete)
            return await log.consumers(stream)

    _show_consumers(asyncio.run(run()), as_json=json)


def _show_consumers(found: list[Consumer], *, as_json: bool) -> None:
    if as_json:
        output.document({"consumers": [_consumer_facts(consumer) for consumer in found]})
    elif found:
        rows = [
            (
                one.stream,
                one.id,
                _start_text(one.start),
                cursor.partition,
                cursor.next_offset,
                cursor.committed,
                cursor.skipped,
            )
            for one in found
            for cursor in one.cursors
        ]
        output.table(("STREAM", "CONSUMER", "START", "PARTITION", "NEXT", "COMMITTED", "MISSED"), rows)
    else:
        output.note("no consumers")


def _start_text(start: Start) -> str:
    if start.time_us is not None:
        return f"{instant(start.time_us):%Y-%m-%dT%H:%M:%SZ}"
    return str(start.policy if start.offset is None else start.offset)


def _consumer_facts(consumer: Consumer) -> dict[str, Any]:
    return {
        "id": consumer.id,
        "stream": consumer.stream,
        "start": {
            "policy": consumer.start.policy,
            "offset": consumer.start.offset,
            "time": None if consumer.start.time_us is None else instant(consumer.start.time_us),
        },
        "epoch": consumer.epoch,
        "cursors": consumer.cursors,
        "created_at": instant(consumer.created_at_us),
        "updated_at": instant(consumer.updated_at_us),
    }


# --- lag --------------------------------------------------------------------------------------------------------------


@commands.command(
    rich_help_panel="Log",
    epilog=examples(
        """
        $ postbus lag
        $ postbus lag orders kitchen --json
        """
    ),
)
def lag(
    stream: OptionalStream = None,
    consumer: Annotated[str | None, typer.Argument(metavar="CONSUMER", help="The consumer. Default: all.")] = None,
    *,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Print how far the consumers are behind.

    Lag is the number of events not yet committed: the next offset to be written minus the next one to be read. A server
    shows the subscriptions that are pulled or streamed.
    """

    async def run() -> list[ConsumerLag]:
        if url is not None:
            async with connected(url, api_key, TENANT if stream is None else stream.rpartition(".")[0]) as server:
                return await server.lags(stream, consumer)
        async with opened(data) as log:
            if stream is not None and consumer is not None:
                return [await log.get_consumer_lag(stream, consumer)]
            if stream is not None:
                await log.get_stream_stats(stream)  # refuses a stream that is not there
            return [await log.get_consumer_lag(one.stream, one.id) for one in await log.consumers(stream)]

    found = asyncio.run(run())
    if json:
        output.document({"consumers": [{**msgspec.to_builtins(one), "total_lag": one.total} for one in found]})
    elif found:
        rows = [
            (one.stream, one.consumer, part.partition, part.committed, part.high_water_mark, part.lag)
            for one in found
            for part in one.partitions
        ]
        output.table(("STREAM", "CONSUMER", "PARTITION", "COMMITTED", "NEXT", "LAG"), rows)
    else:
        output.note("no consumers")
