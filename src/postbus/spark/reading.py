"""Reading a range of offsets as Arrow batches: by ADBC where it is installed, else row by row.

A range is read in short snapshots, one after the other, so that it never keeps the bus from tidying its files. Each
snapshot also looks where the partition begins: what retention has removed meanwhile is refused, never skipped.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import quote

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from postbus.model import NotFound, OffsetOutOfRange, PostbusError, StorageError
from postbus.spark.errors import with_hint
from postbus.spark.extent import folder_of, remote_of
from postbus.spark.remote import remote_tables
from postbus.spark.schema import COLUMNS
from postbus.store.database import connect
from postbus.topics import matches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from postbus.spark.extent import Extent
    from postbus.spark.schema import Column
    from postbus.store.folder import Folder

__all__ = ["READERS", "Condition", "Range", "glob_of", "matching", "read_range", "shaped"]

READERS = ("auto", "adbc", "rows")
STEP = 20_000

# Where a partition begins, and whether it is still the one that was planned.
BEGINNING = """
    SELECT p.first_offset, s.epoch FROM partitions p JOIN stream_registry s USING (stream_id)
    WHERE p.stream_id = ? AND p.partition = ? AND NOT s.deleted
"""


class Condition(NamedTuple):
    """A condition in SQL over one event's columns, with the value it binds."""

    sql: str
    value: str | int


class Range(msgspec.Struct, frozen=True):
    """Offsets ``start`` up to, not including, ``end`` of one partition."""

    extent: Extent
    start: int
    end: int


class _Reader(Protocol):
    """A connection for the time of one range."""

    def snapshot(
        self, beginning: tuple[str, tuple[Any, ...]], rows: tuple[str, tuple[Any, ...]]
    ) -> tuple[Any, pa.Table]:
        """Answer both queries from one state of the database: the first row of one, and all rows of the other."""

    def close(self) -> None:
        """Let go."""


def read_range(
    data: str,
    wanted: Range,
    columns: list[Column],
    conditions: tuple[Condition, ...] = (),
    *,
    topic: str | None = None,
    reader: str = "auto",
) -> Iterator[pa.RecordBatch]:
    """Yield the events of a range in order, only the wanted columns of those that meet all conditions.

    A remote is read itself, and takes no other conditions than the topic.
    """
    remote = remote_of(data)
    if remote is not None:
        yield from _read_remote(remote, wanted, columns, topic)
        return
    folder = folder_of(data)
    names = [column.name for column in columns]
    needed = ["offset"] if topic is None else ["offset", "topic"]
    read = [COLUMNS[name] for name in dict.fromkeys([*names, *needed]) if COLUMNS[name].expression is not None]
    with closing(_opened(folder, read, reader)) as opened:
        for start in range(wanted.start, wanted.end, STEP):
            end = min(start + STEP, wanted.end)
            table = _step(opened, wanted.extent, start, end, read, conditions)
            if topic is not None:
                table = table.filter(matching(table.column("topic"), topic))
            yield from shaped(table, wanted.extent, columns).to_batches()


def _read_remote(url: str, wanted: Range, columns: list[Column], topic: str | None) -> Iterator[pa.RecordBatch]:
    for page in remote_tables(url, wanted.extent, wanted.start, wanted.end):
        table = page if topic is None else page.filter(matching(page.column("topic"), topic))
        yield from shaped(table, wanted.extent, columns).to_batches()


@with_hint
def _step(
    opened: _Reader, extent: Extent, start: int, end: int, read: list[Column], conditions: tuple[Condition, ...]
) -> pa.Table:
    where = "".join(f" AND {condition.sql}" for condition in conditions)
    names = ", ".join(f'{column.expression} AS "{column.name}"' for column in read)
    rows = (
        f'SELECT {names} FROM events WHERE stream_id = ? AND partition = ? AND "offset" >= ? AND "offset" < ?{where} '  # noqa: S608 - constants only
        'ORDER BY "offset"'
    )
    values = (extent.stream_id, extent.partition, start, end, *(condition.value for condition in conditions))
    beginning, table = opened.snapshot((BEGINNING, (extent.stream_id, extent.partition)), (rows, values))
    if beginning is None or beginning[1] != extent.epoch:
        raise NotFound(f"the stream {extent.stream} was deleted while it was read", hint="start anew")
    if beginning[0] > start:
        message = (
            f"retention has removed {extent.stream}/{extent.partition}/{start} before it was read; "
            f"the first event there is now {beginning[0]}"
        )
        raise OffsetOutOfRange(message, hint="start anew with startingOffset=earliest, or read the archive")
    if not conditions and table.num_rows != end - start:
        raise StorageError(f"{extent.stream}/{extent.partition} lacks events between {start} and {end}")
    return table


def matching(topics: pa.ChunkedArray, pattern: str) -> pa.ChunkedArray:
    """Say of each topic whether a pattern stands for it."""
    distinct = topics.unique()
    return pc.is_in(
        topics, distinct.filter(pa.array([matches(pattern, each.as_py()) for each in distinct], pa.bool_()))
    )


def shaped(table: pa.Table, extent: Extent, columns: list[Column]) -> pa.Table:
    """Return the table with exactly the wanted columns, in their types."""
    count = table.num_rows
    arrays: list[Any] = []
    for column in columns:
        match column.name:
            case "stream":
                arrays.append(pa.repeat(pa.scalar(extent.stream), count))
            case "partition":
                arrays.append(pa.repeat(pa.scalar(extent.partition, pa.int32()), count))
            case "id":
                prefix = pa.scalar(f"{extent.stream}/{extent.partition}/")
                offsets = pc.cast(table.column("offset"), pa.string())
                arrays.append(pc.binary_join_element_wise(prefix, offsets, ""))
            case name:
                arrays.append(pc.cast(table.column(name), column.kind))
    return pa.table(arrays, schema=pa.schema([pa.field(each.name, each.kind, each.nullable) for each in columns]))


def glob_of(pattern: str) -> str:
    """Return a GLOB that every topic of a pattern matches; it may match more."""
    return pattern.removesuffix(">") + "*" if pattern.endswith(">") else pattern


# --- the two ways to read ---------------------------------------------------------------------------------------------


@with_hint
def _opened(folder: Folder, read: list[Column], reader: str) -> _Reader:
    if reader != "rows":
        try:
            return _AdbcReader(folder, read)
        except ModuleNotFoundError:
            if reader == "adbc":
                raise NotFound("adbc-driver-sqlite is not installed", hint="pip install 'postbus[spark]'") from None
    return _RowReader(folder, read)


class _AdbcReader:
    """Arrow straight from SQLite.

    The driver guesses a column's type from its first rows, so that the first row is one of ours, with a value in every
    column, and is cut off again.
    """

    def __init__(self, folder: Folder, read: list[Column]) -> None:
        import adbc_driver_sqlite.dbapi as adbc  # noqa: PLC0415 - not installed everywhere

        self._errors = adbc.Error
        self._folder = folder
        self._schema = pa.schema([(column.name, column.stored) for column in read])
        samples = {pa.string(): "''", pa.binary(): "x''", pa.int64(): "0"}
        self._typed = "SELECT " + ", ".join(samples[column.stored] for column in read)
        self._connection = self._guarded(adbc.connect, f"file:{quote(str(folder.database.absolute()))}?mode=ro")
        self._cursor = self._connection.cursor(adbc_stmt_kwargs={"adbc.sqlite.query.batch_rows": str(STEP + 1)})

    def snapshot(
        self, beginning: tuple[str, tuple[Any, ...]], rows: tuple[str, tuple[Any, ...]]
    ) -> tuple[Any, pa.Table]:
        """See ``_Reader.snapshot``; the driver begins a transaction by itself and ``commit`` ends it."""
        self._guarded(self._cursor.execute, *beginning)
        first = self._cursor.fetchone()
        query, values = rows
        self._guarded(self._cursor.execute, f"{self._typed} UNION ALL SELECT * FROM ({query})", values)  # noqa: S608 - constants only
        table = self._guarded(self._cursor.fetch_arrow_table).slice(1)
        self._connection.commit()
        return first, table.rename_columns(self._schema.names).cast(self._schema)

    def close(self) -> None:
        """Let go."""
        self._cursor.close()
        self._connection.close()

    def _guarded(self, call: Any, *values: Any) -> Any:
        try:
            return call(*values)
        except self._errors as error:
            raise StorageError(f"the store in {self._folder.path} could not be read: {error}") from error


class _RowReader:
    """Rows fetched one by one and put into Arrow here."""

    def __init__(self, folder: Folder, read: list[Column]) -> None:
        self._schema = pa.schema([(column.name, column.stored) for column in read])
        self._folder = folder
        self._db = connect(folder, write=False)

    def snapshot(
        self, beginning: tuple[str, tuple[Any, ...]], rows: tuple[str, tuple[Any, ...]]
    ) -> tuple[Any, pa.Table]:
        """See ``_Reader.snapshot``."""
        try:
            with self._db:
                first = self._db.execute(*beginning).fetchone()
                fetched = self._db.execute(*rows).fetchall()
        except PostbusError:
            raise
        except Exception as error:
            raise StorageError(f"the store in {self._folder.path} could not be read: {error}") from error
        arrays = zip(*fetched, strict=True) if fetched else ((),) * len(self._schema)
        columns = [pa.array(values, kind) for values, kind in zip(arrays, self._schema.types, strict=True)]
        return first, pa.table(columns, schema=self._schema)

    def close(self) -> None:
        """Let go."""
        self._db.close()
