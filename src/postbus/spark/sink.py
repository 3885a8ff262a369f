"""Appending rows to a log from Spark tasks: at least once by Spark, exactly once by the native id of every row.

Each task appends on its own, so that the order is kept within a task only. A row without a native id is refused:
nothing would tell it from itself when Spark runs the task again.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from postbus.envelope import draft
from postbus.log import open_log
from postbus.model import Invalid, PostbusError, Trust, instant
from postbus.spark.errors import with_hint
from postbus.spark.extent import remote_of
from postbus.spark.remote import RemoteStream, opened_remote
from postbus.spark.schema import COLUMNS, chosen
from postbus.topics import check_stream_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from postbus.model import Draft, Receipt

__all__ = ["PostbusStreamWriter", "PostbusWriter", "WriteOptions", "draft_of"]

BATCH = 1_000
REQUIRED = ("topic", "source", "payload", "native_id")
# What the log itself gives an event.
GIVEN = ("id", "stream", "partition", "offset", "created_at")


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where rows go. ``create``: make the stream, with one partition, when it is not there."""

    data: str
    stream: str
    create: bool


class Appended(WriterCommitMessage):
    """What one task did."""

    def __init__(self, rows: int, duplicates: int) -> None:
        self.rows = rows
        self.duplicates = duplicates


def draft_of(row: dict[str, Any], *, system_headers: dict[str, str] | None = None) -> Draft:
    """Return one row as a checked event; raises what ``envelope.draft`` raises."""
    raw = {name: row.get(name) for name in ("payload", "metadata", "headers", "delivery_handle")}
    occurred = row.get("occurred_at")
    headers = None if raw["headers"] is None else _headers(raw["headers"])
    return draft(
        row["topic"],
        row["source"],
        _bytes(raw["payload"]),
        variant=row.get("variant") or "",
        key=row.get("key"),
        metadata=_bytes(raw["metadata"]),
        headers=headers,
        correlation_id=row.get("correlation_id"),
        native_id=row.get("native_id"),
        delivery_handle=_bytes(raw["delivery_handle"]),
        occurred_at=instant(occurred) if isinstance(occurred, int) else occurred,
        trust=row.get("trust") or Trust.TRUSTED,
        system_headers=system_headers,
    )


def _bytes(text: Any) -> bytes | None:
    return None if text is None else text.encode() if isinstance(text, str) else bytes(text)


def _headers(text: str) -> dict[str, str]:
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise Invalid(f"headers: {error}", hint="headers are a JSON object of strings") from None


class _Appender:
    """What batch and streaming writers share; Spark pickles it into every task."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_stream_name(options.stream)
        chosen(schema)
        names = set(schema.names)
        for name in REQUIRED:
            if name not in names:
                hint = f"rows need {', '.join(REQUIRED)}; they may have the other columns of an event"
                raise Invalid(f"the rows to append have no column {name!r}", hint=hint)
        self._options = options
        self._names = [name for name in COLUMNS if name in names and name not in GIVEN]

    @with_hint
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Appended:
        """Append one task's rows and say how many they were."""
        return asyncio.run(self._append(iterator))

    async def _append(self, batches: Iterator[pa.RecordBatch]) -> Appended:
        rows = duplicates = 0
        async with self._opened() as append:
            for batch in batches:
                page = batch.select(self._names).to_pylist()
                for start in range(0, len(page), BATCH):
                    drafts = [self._draft(row) for row in page[start : start + BATCH]]
                    receipts = await append(drafts)
                    rows += len(receipts)
                    duplicates += sum(receipt.duplicate for receipt in receipts)
        return Appended(rows, duplicates)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Callable[[list[Draft]], Awaitable[list[Receipt]]]]:
        """Give what appends to the stream: to the log in a folder, or to a remote itself."""
        options = self._options
        remote = remote_of(options.data)
        if remote is not None:
            async with opened_remote(remote) as upstream:
                yield (await RemoteStream.of(upstream, options.stream, create=options.create)).append
            return
        log = await open_log(options.data, create=options.create)
        try:
            if options.create:
                await log.ensure_stream(options.stream)
            yield partial(log.append, options.stream)
        finally:
            await log.close()

    @staticmethod
    def _draft(row: dict[str, Any]) -> Draft:
        if row["native_id"] is None:
            raise Invalid("a row has no native_id", hint="it is what makes appending it twice harmless")
        try:
            return draft_of(row)
        except PostbusError as error:
            raise Invalid(f"the row with native_id {row['native_id']!r} is refused: {error.message}") from error


class PostbusWriter(_Appender, DataSourceArrowWriter):
    """``df.write.format("postbus")``."""


class PostbusStreamWriter(_Appender, DataSourceStreamArrowWriter):
    """``df.writeStream.format("postbus")``."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Nothing is left to do: every task has appended for good."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """What was appended stays; running the batch again adds only what is missing."""
