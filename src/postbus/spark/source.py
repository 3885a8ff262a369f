"""The data source ``postbus``: read, follow and append to a log as Spark DataFrames.

The streaming offset is ``{"<stream>/<partition>": next_offset}``: half-open, and the same number as a cursor. Options
that make no sense are refused with one sentence. The parts that plan run on the driver, those that read in tasks.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow

from postbus.model import Invalid, OffsetOutOfRange
from postbus.spark.errors import with_hint
from postbus.spark.extent import Extent, extents, folder_of, full_name, reading, remote_of
from postbus.spark.reading import READERS, Condition, Range, glob_of, read_range
from postbus.spark.remote import remote_extents
from postbus.spark.schema import COLUMNS, EVENT_SCHEMA, chosen
from postbus.spark.sink import PostbusStreamWriter, PostbusWriter, WriteOptions
from postbus.topics import check_pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import Filter
    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.types import StructType

    from postbus.spark.schema import Column

__all__ = ["PostbusDataSource", "ReadOptions", "planned"]

EVENTS_PER_TASK = 100_000
EARLIEST, LATEST = "earliest", "latest"
READ_NAMES = (
    "data", "stream", "partition", "topic", "startingOffset", "endingOffset", "maxEventsPerTrigger", "eventsPerTask",
    "reader",
)  # fmt: skip
WRITE_NAMES = ("data", "stream", "checkpointLocation", "createStream")


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``spark.read`` and ``spark.readStream``, checked."""

    data: str
    stream: str = ">"
    partition: int | None = None
    topic: str | None = None
    starting: str | int | dict[str, int] = EARLIEST
    ending: str | int | dict[str, int] = LATEST
    per_trigger: int | None = None
    per_task: int = EVENTS_PER_TASK
    reader: str = "auto"

    @classmethod
    def of(cls, options: Mapping[str, str]) -> ReadOptions:
        """Return the options of a DataFrame reader; raises ``Invalid`` for what no reader understands."""
        given = _known(options, READ_NAMES)
        partition, topic = given.get("partition"), given.get("topic")
        reader = given.get("reader", "auto")
        if reader not in READERS:
            raise Invalid(f"the option reader is {reader!r}", hint=f"it is one of {', '.join(READERS)}")
        limit = given.get("maxeventspertrigger")
        return cls(
            data=_data(given),
            stream=full_name(given.get("stream", ">")),
            partition=None if partition is None else _number("partition", partition, 0),
            topic=None if topic is None else check_pattern(topic),
            starting=_offsets("startingOffset", given.get("startingoffset", EARLIEST)),
            ending=_offsets("endingOffset", given.get("endingoffset", LATEST)),
            per_trigger=None if limit is None else _number("maxEventsPerTrigger", limit, 1),
            per_task=_number("eventsPerTask", given.get("eventspertask", str(EVENTS_PER_TASK)), 1),
            reader=reader,
        )

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """What SQL can say of the topic; the rest is looked at afterwards."""
        return () if self.topic is None else (Condition("topic GLOB ?", glob_of(self.topic)),)

    def extents(self) -> list[Extent]:
        """Return what there is to read now."""
        remote = remote_of(self.data)
        if remote is not None:
            return remote_extents(remote, self.stream, self.partition)
        with reading(folder_of(self.data)) as db:
            return extents(db, self.stream, self.partition)


class PostbusDataSource(DataSource):
    """``spark.read.format("postbus")`` and its three siblings."""

    @classmethod
    def name(cls) -> str:
        """Return what ``format`` takes."""
        return "postbus"

    def schema(self) -> StructType:
        """Return all columns; ``.schema(…)`` chooses fewer, and only those are read."""
        return EVENT_SCHEMA

    @with_hint
    def reader(self, schema: StructType) -> PostbusReader:
        """Return the batch reader."""
        return PostbusReader(ReadOptions.of(self.options), chosen(schema))

    @with_hint
    def streamReader(self, schema: StructType) -> PostbusStreamReader:  # noqa: N802 - Spark's name
        """Return the streaming reader."""
        options = ReadOptions.of(self.options)
        if options.ending != LATEST:
            raise Invalid("a stream has no endingOffset", hint="leave it out, or use spark.read")
        return PostbusStreamReader(options, chosen(schema))

    @with_hint
    def writer(self, schema: StructType, overwrite: bool) -> PostbusWriter:  # noqa: FBT001 - Spark's signature
        """Return the batch writer."""
        if overwrite:
            raise Invalid("a log is only ever appended to", hint='use mode("append")')
        return PostbusWriter(_write_options(self.options), schema)

    @with_hint
    def streamWriter(self, schema: StructType, overwrite: bool) -> PostbusStreamWriter:  # noqa: FBT001, N802 - Spark's
        """Return the streaming writer."""
        if overwrite:
            raise Invalid("a log is only ever appended to", hint='use outputMode("append")')
        return PostbusStreamWriter(_write_options(self.options), schema)


class _Task(InputPartition):
    """One task's range. Carries plain values, as Spark pickles it."""

    def __init__(self, wanted: Range) -> None:
        super().__init__((wanted.extent, wanted.start, wanted.end))

    @property
    def range(self) -> Range:
        """The range again."""
        return Range(*self.value)


def _tasks(ranges: Iterable[Range], per_task: int) -> list[InputPartition]:
    return [
        _Task(Range(whole.extent, start, min(start + per_task, whole.end)))
        for whole in ranges
        for start in range(whole.start, whole.end, per_task)
    ]


# --- batch ------------------------------------------------------------------------------------------------------------


class PostbusReader(DataSourceReader):
    """A batch: what is between two offsets of each partition when it is planned."""

    def __init__(self, options: ReadOptions, columns: list[Column]) -> None:
        self._options = options
        self._columns = columns
        self._conditions: list[Condition] = []
        self._streams: set[str] | None = None
        self._partitions: set[int] | None = None

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802 - Spark's name
        """Take what can be asked of the log itself, and give the rest back to Spark."""
        for each in filters:
            if not self._take(each):
                yield each

    def _take(self, wanted: Any) -> bool:
        name = wanted.attribute[0] if getattr(wanted, "attribute", ()) and len(wanted.attribute) == 1 else ""
        if name in {"stream", "partition"} and isinstance(wanted, EqualTo | In):
            values = set(wanted.value) if isinstance(wanted, In) else {wanted.value}
            known = self._streams if name == "stream" else self._partitions
            kept = values if known is None else known & values
            setattr(self, f"_{name}s", kept)
            return True
        condition = None if remote_of(self._options.data) else _condition(name, wanted)
        if condition is None:
            return False
        self._conditions.append(condition)
        return True

    @with_hint
    def partitions(self) -> Sequence[InputPartition]:
        """Plan the ranges; raises for an offset that is not there."""
        return _tasks(planned(self._options, self._wanted), self._options.per_task)

    def _wanted(self, extent: Extent) -> bool:
        in_streams = self._streams is None or extent.stream in self._streams
        return in_streams and (self._partitions is None or extent.partition in self._partitions)

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """Read one task's range; there is none when nothing was planned, and Spark asks all the same."""
        if not isinstance(partition, _Task):
            return iter(())
        return read_range(
            self._options.data,
            partition.range,
            self._columns,
            (*self._options.conditions, *self._conditions),
            topic=self._options.topic,
            reader=self._options.reader,
        )


_OPERATORS: dict[type, str] = {
    EqualTo: "=", GreaterThan: ">", GreaterThanOrEqual: ">=", LessThan: "<", LessThanOrEqual: "<=",
}  # fmt: skip
_ORDERED = {"offset", "occurred_at", "created_at"}
_EQUAL = {"topic", "source", "variant", "key", "correlation_id", "native_id"}


def _condition(name: str, wanted: Any) -> Condition | None:
    """Return a filter of Spark's as SQL, or None when it is left to Spark."""
    operator = _OPERATORS.get(type(wanted))
    if operator is None or name not in (_ORDERED if operator != "=" else _ORDERED | _EQUAL):
        return None
    value = wanted.value
    if isinstance(value, datetime):
        passed = value.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
        value = (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds
    if not isinstance(value, int | str) or isinstance(value, bool):
        return None
    return Condition(f"{COLUMNS[name].expression} {operator} ?", value)


def planned(options: ReadOptions, wanted: Callable[[Extent], bool] = lambda _extent: True) -> list[Range]:
    """Return the ranges that a batch reads of the wanted partitions; raises for an offset that is not there."""
    asked = [each for each in (options.starting, options.ending) if isinstance(each, dict)]
    return [
        Range(
            extent,
            _place(extent, "startingOffset", options.starting),
            _place(extent, "endingOffset", options.ending),
        )
        for extent in _named(options, options.extents())
        if wanted(extent)
        and all(extent.key in each for each in asked)  # offsets by name are also the choice of what to read
    ]


def _named(options: ReadOptions, found: list[Extent]) -> list[Extent]:
    """Return what was found; raises ``Invalid`` when the options name something that is not there."""
    if not found and not {"*", ">"} & set(options.stream.split(".")):
        part = "" if options.partition is None else f"/{options.partition}"
        raise Invalid(f"there is no stream {options.stream}{part} in the log", hint="`postbus streams` lists them")
    keys = {extent.key for extent in found}
    for option, value in (("startingOffset", options.starting), ("endingOffset", options.ending)):
        if isinstance(value, dict):
            for key in value.keys() - keys:
                raise Invalid(f"{option} names {key}, which is not there", hint=f"there is {', '.join(sorted(keys))}")
    return found


def _place(extent: Extent, option: str, asked: str | int | dict[str, int]) -> int:
    if isinstance(asked, dict):
        asked = asked.get(extent.key, EARLIEST if option == "startingOffset" else LATEST)
    if asked == EARLIEST:
        return extent.first
    if asked == LATEST:
        return extent.head
    assert isinstance(asked, int)  # noqa: S101 - checked in ReadOptions.of
    if not extent.first <= asked <= extent.head:
        message = f"{option} is {asked}, and {extent.stream}/{extent.partition} holds {extent.first} to {extent.head}"
        raise OffsetOutOfRange(message, hint=f"{option} is earliest, latest, or an offset in that range")
    return asked


# --- streaming --------------------------------------------------------------------------------------------------------


class PostbusStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream: from the starting offset on, in micro-batches that can be read again as often as needed."""

    def __init__(self, options: ReadOptions, columns: list[Column]) -> None:
        self._options = options
        self._columns = columns
        self._until: dict[str, int] | None = None

    @with_hint
    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Return where a query without a checkpoint begins."""
        found = _named(self._options, self._options.extents())
        return {extent.key: _place(extent, "startingOffset", self._options.starting) for extent in found}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return what ``maxEventsPerTrigger`` asks for."""
        limit = self._options.per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    @with_hint
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end: what comes later is left to the next run."""
        self._until = self._heads()

    @with_hint
    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Return how far the next micro-batch goes; partitions share a limit as evenly as their backlogs allow."""
        heads = self._heads() if self._until is None else self._until
        backlog = {key: head - start.get(key, 0) for key, head in heads.items()}
        for key, waiting in backlog.items():
            if waiting < 0:
                message = f"{key} ends at {heads[key]}, and the checkpoint has read it up to {start[key]}"
                raise OffsetOutOfRange(
                    message, hint="the log is another one or was restored: start with a new checkpoint"
                )
        if isinstance(limit, ReadMaxRows):
            backlog = _shared(backlog, limit.max_rows)
        ends = {key: start.get(key, 0) + waiting for key, waiting in backlog.items()}
        return {key: end for key, end in ends.items() if key in start or end > 0}

    @with_hint
    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Return the ends of the log, from which Spark's progress shows the lag."""
        return self._heads()

    @with_hint
    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Plan the ranges of one micro-batch; a partition that is new since the last one is read from its beginning."""
        known = {extent.key: extent for extent in self._options.extents()}
        ranges = []
        for key, stop in end.items():
            begin = start.get(key, 0)
            if begin < stop:
                if key not in known:
                    raise Invalid(f"{key} is gone from the log before it was read", hint="start with a new checkpoint")
                ranges.append(Range(known[key], begin, stop))
        return _tasks(ranges, self._options.per_task)

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """Read one task's range; there is none when nothing was planned, and Spark asks all the same."""
        if not isinstance(partition, _Task):
            return iter(())
        options = self._options
        return read_range(
            options.data,
            partition.range,
            self._columns,
            options.conditions,
            topic=options.topic,
            reader=options.reader,
        )

    def _heads(self) -> dict[str, int]:
        return {extent.key: extent.head for extent in self._options.extents()}


def _shared(backlog: dict[str, int], limit: int) -> dict[str, int]:
    left, shares = limit, {}
    for index, (key, waiting) in enumerate(sorted(backlog.items(), key=lambda each: each[1])):
        shares[key] = min(waiting, left // (len(backlog) - index))
        left -= shares[key]
    return shares


# --- options ----------------------------------------------------------------------------------------------------------


def _known(options: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """Return the options by their names in lower case; raises ``Invalid`` for one that is not among the names."""
    given = {name.lower(): value for name, value in options.items()}
    if "path" in given:
        given.setdefault("data", given.pop("path"))
    for name in given.keys() - {name.lower() for name in names}:
        raise Invalid(f"there is no option {name!r}", hint=f"the options are {', '.join(names)}")
    return given


def _data(given: dict[str, str]) -> str:
    data = given.get("data", "")
    if not data:
        raise Invalid('the option "data" is missing', hint='name the data folder: .option("data", "./postbus-data")')
    if remote_of(data) is None:
        folder_of(data)
    return data


def _number(option: str, text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise Invalid(f"the option {option} is {text!r}", hint=f"it is a whole number of at least {least}")
    return number


def _offsets(option: str, text: str) -> str | int | dict[str, int]:
    if text in {EARLIEST, LATEST}:
        return text
    try:
        return msgspec.json.decode(text, type=int | dict[str, int])
    except msgspec.DecodeError:
        hint = 'it is earliest, latest, an offset, or JSON such as {"local.default.orders/0": 17}'
        raise Invalid(f"the option {option} is {text!r}", hint=hint) from None


def _write_options(options: Mapping[str, str]) -> WriteOptions:
    given = _known(options, WRITE_NAMES)
    data = given.get("data", "")
    if not data:
        raise Invalid('the option "data" is missing', hint='name the data folder: .option("data", "./postbus-data")')
    if "stream" not in given:
        raise Invalid('the option "stream" is missing', hint='name the stream: .option("stream", "orders")')
    create = given.get("createstream", "false").lower()
    if create not in {"true", "false"}:
        raise Invalid(f"the option createStream is {create!r}", hint="it is true or false")
    if create == "false" and remote_of(data) is None:
        folder_of(data)
    return WriteOptions(data=data, stream=full_name(given["stream"]), create=create == "true")
