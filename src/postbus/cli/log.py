"""The commands of the log: append, read, streams."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.filesize import decimal

from postbus.cli import lines, output
from postbus.cli.options import (
    DATA,
    SOURCE,
    ApiKey,
    Data,
    Json,
    OccurredAt,
    OptionalStream,
    Source,
    StreamName,
    Url,
    connected,
    examples,
    headers_of,
    reached,
    start_of,
)
from postbus.envelope import draft
from postbus.log import SqliteLog
from postbus.log.cursors import check_partition, no_consumer
from postbus.model import Start, StartPolicy, StreamSettings, instant

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from postbus.cli.remote import Remote
    from postbus.log import Log
    from postbus.model import Draft, Event, Receipt, StreamStats

__all__ = ["commands"]

PAGE = 100
FOLLOW_S = 3600.0
FOLLOW_PATIENCE_S = 600.0
STDIN_BYTES_MAX = 64 * 1024 * 1024
EARLIEST = Start(policy=StartPolicy.EARLIEST)

commands = typer.Typer()


# --- append -----------------------------------------------------------------------------------------------------------


@commands.command(
    rich_help_panel="Log",
    epilog=examples(
        """
        $ postbus append orders '{"item": "tea"}' --key table-4
        $ postbus append orders '{"item": "tea"}' --native-id order-17
        $ postbus append orders - < order.json
        $ postbus append orders --file orders.jsonl --native-id monday
        """
    ),
)
def append(
    stream: StreamName,
    payload: Annotated[
        str | None, typer.Argument(metavar="JSON", help="The payload, kept byte for byte; - reads it from stdin.")
    ] = None,
    *,
    topic: Annotated[str | None, typer.Option(help="The event's topic. Default: the stream's last token.")] = None,
    source: Source = None,
    key: Annotated[str | None, typer.Option(help="Events with the same key stay in order, in one partition.")] = None,
    native_id: Annotated[
        str | None,
        typer.Option(help="The producer's own id: appending it again changes nothing. With --file: ID:LINE for each."),
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Which variant of the native id this is.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header; may be repeated.")] = None,
    metadata: Annotated[str | None, typer.Option(metavar="JSON", help="Facts about the event, a JSON object.")] = None,
    correlation_id: Annotated[str | None, typer.Option(help="What joins events of one conversation.")] = None,
    occurred_at: OccurredAt = None,
    file: Annotated[
        typer.FileBinaryRead | None,
        typer.Option(metavar="PATH", help="Append one event for each line, a JSON value; - is stdin."),
    ] = None,
    no_create: Annotated[
        bool, typer.Option("--no-create", help="Refuse a stream that is missing instead of making it.")
    ] = False,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Append an event to a stream; it is durable when the command returns.

    The stream is made when it is missing, with one partition; `postbus streams NAME --create` makes one with more.

    With `--file`, lines are appended in chunks of at most 1000, as they arrive; empty lines are passed over. A bad line
    is refused with its number and nothing of its chunk is appended; the hint says how far the file is appended. With
    `--native-id` too, the whole file can be appended again once it is mended: what is there already stays as it is.

    A server only takes streams that are there (see `postbus topics`), and their full name is the events' topic.
    """
    if (payload is None) == (file is None):
        raise typer.BadParameter("give the JSON value or --file PATH, one of the two", param_hint="'JSON'")
    if url is not None and topic not in (None, stream):
        raise typer.BadParameter("behind a server the topic is the stream's full name", param_hint="'--topic'")
    create = url is None and not no_create

    reach = partial(reached, data, url, api_key, stream.rpartition(".")[0], create=create)

    def make(raw: bytes, line: int | None = None) -> Draft:
        return draft(
            topic or stream.rpartition(".")[2],
            source or SOURCE,
            raw,
            variant=variant or "",
            key=key,
            metadata=None if metadata is None else os.fsencode(metadata),
            headers=headers_of(header or []),
            correlation_id=correlation_id,
            native_id=native_id if native_id is None or line is None else f"{native_id}:{line}",
            occurred_at=occurred_at,
        )

    if file is not None:
        _show_lines(lines.append(file, stream, make, reach, create=create), as_json=json)
    elif payload is not None:
        raw = sys.stdin.buffer.read(STDIN_BYTES_MAX) if payload == "-" else os.fsencode(payload)
        receipt = asyncio.run(_append(reach(), stream, make(raw), create=create))
        output.receipt(receipt, "appended", as_json=json)


async def _append(
    opening: AbstractAsyncContextManager[SqliteLog | Remote], stream: str, event: Draft, *, create: bool
) -> Receipt:
    async with opening as log:
        if create:
            await log.ensure_stream(stream)
        return (await log.append(stream, [event]))[0]


def _show_lines(done: lines.Appended, *, as_json: bool) -> None:
    if as_json:
        output.document(done)
        return
    twice = f"; {done.duplicates:,} already there" if done.duplicates else ""
    output.say(f"appended {output.count(done.appended, 'event')} to {done.stream}{twice}")


# --- read -------------------------------------------------------------------------------------------------------------


@commands.command(
    rich_help_panel="Log",
    epilog=examples(
        """
        $ postbus read orders
        $ postbus read orders --from 100 --limit 10 --json
        $ postbus read orders --from latest --follow
        $ postbus read orders --consumer kitchen --commit
        """
    ),
)
def read(
    stream: StreamName,
    *,
    from_: Annotated[
        str | None,
        typer.Option("--from", metavar="OFFSET", help="Start here: an offset, earliest or latest. Default: earliest."),
    ] = None,
    partition: Annotated[
        int | None, typer.Option(help="Only this partition. Default: all, one after the other.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after that many events. Default: at the end.")] = None,
    consumer: Annotated[str | None, typer.Option(metavar="ID", help="Start at this consumer's cursor.")] = None,
    commit: Annotated[
        bool,
        typer.Option("--commit", help="Move the consumer past what was printed; make it, at the start, when missing."),
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new events as they come.")] = False,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Print the events of a stream, one per line.

    Without `--commit` nothing changes, so reading again gives the same events. With it, events are committed only after
    they were written to stdout: when the reader of a pipe goes away, what it did not take is read again next time.
    """
    if consumer is not None and from_ is not None:
        message = "a consumer starts at its cursor; move that with `postbus consumers STREAM --reset ID --start …`"
        raise typer.BadParameter(message, param_hint="'--from'")
    if commit and consumer is None:
        raise typer.BadParameter("it needs --consumer ID", param_hint="'--commit'")
    start = start_of(from_ or "earliest", "--from", times=False)

    async def run() -> None:
        async with reached(data, url, api_key, stream.rpartition(".")[0]) as log:
            stats = await log.get_stream_stats(stream)
            at = await _beginnings(log, stats, partition, start, consumer, commit=commit)
            ends = None if follow else {part.partition: part.high_water_mark for part in stats.partitions}
            count = 0
            there = url is not None and follow
            pages = _streamed(url or "", api_key, stream, at, limit) if there else _pages(log, stream, at, ends, limit)
            async for page in pages:
                output.events(page, as_json=json)
                count += len(page)
                if commit and consumer is not None:
                    await log.commit(stream, consumer, page[-1].offset, page[-1].partition)
            if not json:
                _note_end(count, limit, at, ends)

    asyncio.run(run())


async def _beginnings(
    log: SqliteLog | Remote,
    stats: StreamStats,
    partition: int | None,
    start: Start,
    consumer: str | None,
    *,
    commit: bool,
) -> dict[int, int]:
    """Return where to begin in each partition that is read."""
    stream = stats.stream.name
    parts = stats.partitions if partition is None else [stats.partitions[check_partition(stats.stream, partition)]]
    if consumer is not None:
        found = await log.get_consumer(stream, consumer)
        if found is None and not commit:
            raise no_consumer(stream, consumer)
        found = found or await log.ensure_consumer(stream, consumer, EARLIEST)
        return {part.partition: found.cursors[part.partition].next_offset for part in parts}
    if start.policy is StartPolicy.LATEST:
        return {part.partition: part.high_water_mark for part in parts}
    wanted = start.offset or 0
    return {part.partition: wanted if wanted < 0 else max(wanted, part.first_offset) for part in parts}


async def _pages(
    log: SqliteLog | Remote, stream: str, at: dict[int, int], ends: dict[int, int] | None, limit: int | None
) -> AsyncIterator[list[Event]]:
    """Yield events from the offsets ``at`` on, moving them along: up to ``ends``, or for ever."""
    left = sys.maxsize if limit is None else limit
    while True:
        idle = True
        for partition in sorted(at):
            while size := min(PAGE, left, PAGE if ends is None else max(ends[partition] - at[partition], 0)):
                events = await log.fetch(stream, partition, at[partition], size)
                if not events:
                    break
                at[partition] = events[-1].offset + 1
                left -= len(events)
                idle = False
                yield events
                if ends is None:
                    break  # a busy partition must not keep the others waiting
        if left == 0 or (idle and ends is not None):
            return
        if idle:
            assert isinstance(log, SqliteLog)  # noqa: S101 - a server's events are followed as it sends them
            await _any_news(log, stream, at)


async def _streamed(
    url: str, api_key: str | None, stream: str, at: dict[int, int], limit: int | None
) -> AsyncIterator[list[Event]]:
    """Yield events from the offsets ``at`` on, as a server sends them; waits for one that is away for a while."""
    left = sys.maxsize if limit is None else limit
    async with connected(url, api_key, stream.rpartition(".")[0], patience_s=FOLLOW_PATIENCE_S) as server:
        async for events in server.follow(stream, at):
            yield events
            left -= len(events)
            if left <= 0:
                return


async def _any_news(log: Log, stream: str, at: dict[int, int]) -> None:
    waits = [asyncio.ensure_future(log.wait(stream, partition, offset, FOLLOW_S)) for partition, offset in at.items()]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in done:
            wait.result()
    finally:
        for wait in waits:
            wait.cancel()


def _note_end(count: int, limit: int | None, at: dict[int, int], ends: dict[int, int] | None) -> None:
    if ends is None:
        return
    more = sum(max(ends[partition] - offset, 0) for partition, offset in at.items())
    if more and count == limit:
        output.note(f"{more:,} more after --limit {limit}")
    elif count == 0:
        output.note("no events there")


# --- streams ----------------------------------------------------------------------------------------------------------


@commands.command(
    rich_help_panel="Log",
    epilog=examples(
        """
        $ postbus streams
        $ postbus streams orders --create --partitions 4
        """
    ),
)
def streams(
    stream: OptionalStream = None,
    *,
    create: Annotated[bool, typer.Option("--create", help="Make STREAM first, if it is missing.")] = False,
    partitions: Annotated[int | None, typer.Option(min=1, help="With --create: how many. Default: 1.")] = None,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """List the streams.

    For each partition: the first offset that is kept, the next one to be written, and how much there is.
    """
    if create and stream is None:
        raise typer.BadParameter("it needs a STREAM", param_hint="'--create'")
    if partitions is not None and not create:
        raise typer.BadParameter("it goes with --create; a stream keeps its partitions", param_hint="'--partitions'")

    async def run() -> list[StreamStats]:
        async with reached(data, url, api_key, create=create) as log:
            if create and stream is not None:
                settings = None if partitions is None else StreamSettings(partitions=partitions)
                await log.ensure_stream(stream, settings)
            names = [known.name for known in await log.streams()] if stream is None else [stream]
            return [await log.get_stream_stats(name) for name in names]

    found = asyncio.run(run())
    if json:
        output.document({"streams": [_stream_facts(stats) for stats in found]})
    elif found:
        rows = [
            (
                stats.stream.name,
                part.partition,
                part.first_offset,
                part.high_water_mark,
                part.count,
                decimal(part.bytes),
            )
            for stats in found
            for part in stats.partitions
        ]
        output.table(("STREAM", "PARTITION", "FIRST", "NEXT", "EVENTS", "SIZE"), rows)
    else:
        output.note("no streams yet; append makes them")


def _stream_facts(stats: StreamStats) -> dict[str, Any]:
    return {
        "name": stats.stream.name,
        "epoch": stats.stream.epoch,
        "created_at": instant(stats.stream.created_at_us),
        "settings": stats.stream.settings,
        "partitions": [{**msgspec.to_builtins(part), "count": part.count} for part in stats.partitions],
        "count": stats.count,
        "bytes": stats.bytes,
    }
