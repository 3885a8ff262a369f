"""The lake: events as Parquet files in batches, and a manifest that says which batches there are.

``events/batch=N/tenant=…/stream=…/day=…/*.parquet`` holds batch N, ``_manifest/N.json`` makes it count: a batch without
its page is the left-over of a run that died, is read by nobody, and is removed by the next run. Paths may be local or
any file system that both Spark and Arrow know (``s3://``, ``hdfs://``, ``gs://``).
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from pyarrow import fs
from pyspark.sql import functions as fn
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from postbus.model import AlreadyServed, CorruptLog, Invalid, NotFound, StorageError
from postbus.spark.schema import EVENT_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Batch", "Lake", "Segment"]

PAGE_DIGITS = 8
PARTITIONED_BY = ("tenant", "stream", "day")


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A range of one partition in one batch: offsets ``first`` up to, not including, ``end``.

    ``before`` and ``after`` are the log's hash chain at its two ends, so that its events can be checked by themselves.
    """

    stream: str
    epoch: int
    partition: int
    first: int
    end: int
    before: str
    after: str

    @property
    def key(self) -> str:
        """The partition's name, as in ``Extent.key``."""
        name = f"{self.stream}/{self.partition}"
        return f"{name}@{self.epoch}" if self.epoch else name

    @property
    def count(self) -> int:
        """How many events that is; offsets are dense."""
        return self.end - self.first


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One page of the manifest."""

    number: int
    store_id: str
    created_at_us: int
    events: int
    segments: tuple[Segment, ...]


class Lake:
    """A lake at a path. Writing takes its lock; reading goes by the manifest and needs none."""

    def __init__(self, path: str) -> None:
        if not path:
            raise Invalid("the name of the lake is empty", hint="name a folder or a URL such as s3://bucket/lake")
        local = "://" not in path
        self.url = Path(path).absolute().as_uri() if local else path.rstrip("/")
        try:
            self._fs, self._root = fs.FileSystem.from_uri(self.url.replace("s3a://", "s3://", 1))
        except (OSError, ValueError) as error:
            raise Invalid(f"the lake {path} cannot be used: {error}") from error
        self._local = Path(self._root) if self.url.startswith("file:") else None

    # --- the manifest ---

    def batches(self) -> list[Batch]:
        """Return the pages of the manifest in order; raises ``CorruptLog`` when one is missing or cannot be read."""
        folder = fs.FileSelector(f"{self._root}/_manifest", allow_not_found=True)
        names = sorted(info.path for info in self._fs.get_file_info(folder) if info.path.endswith(".json"))
        found = [self._page(name) for name in names]
        for number, batch in enumerate(found, 1):
            if batch.number != number:
                raise CorruptLog(f"the manifest of {self.url} lacks page {number}", hint="restore the file")
        return found

    def _page(self, name: str) -> Batch:
        try:
            with self._fs.open_input_stream(name) as file:
                return msgspec.json.decode(file.read(), type=Batch)
        except (OSError, msgspec.DecodeError) as error:
            raise CorruptLog(f"the page {name} of the manifest cannot be read: {error}") from error

    def add(self, batch: Batch) -> None:
        """Write the page that makes a batch count: whole or not at all."""
        folder = f"{self._root}/_manifest"
        name = f"{folder}/{batch.number:0{PAGE_DIGITS}}.json"
        try:
            self._fs.create_dir(folder)
            with self._fs.open_output_stream(f"{name}.new") as file:
                file.write(msgspec.json.format(msgspec.json.encode(batch)))
            if self._local is not None:
                handle = os.open(f"{name}.new", os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
            self._fs.move(f"{name}.new", name)
        except OSError as error:
            raise StorageError(f"the manifest of {self.url} cannot be written: {error}") from error

    # --- the events ---

    def place(self, number: int) -> str:
        """Return where a batch's files are, as Spark writes it."""
        return f"{self.url}/events/batch={number}"

    def drop_unfinished(self, last: int) -> list[int]:
        """Remove the batches after ``last``, which no page names; return their numbers."""
        folder = fs.FileSelector(f"{self._root}/events", allow_not_found=True)
        dropped = []
        for info in self._fs.get_file_info(folder):
            number = info.base_name.removeprefix("batch=")
            if number.isdigit() and int(number) > last:
                self._fs.delete_dir(info.path)
                dropped.append(int(number))
        return dropped

    def frame(self, spark: SparkSession, batches: list[Batch] | None = None) -> DataFrame:
        """Return the events of the batches (by default all) with the columns of an event, ``tenant`` and ``batch``."""
        batches = self.batches() if batches is None else batches
        places = [self.place(batch.number) for batch in batches if batch.events]
        if not places:
            if not batches:
                raise NotFound(f"there is no archive in {self.url}", hint="`postbus pipeline archive` makes one")
            return _shown(spark.createDataFrame([], _stored()))
        stored = spark.read.schema(_stored()).option("basePath", f"{self.url}/events").parquet(*places)
        return _shown(stored)

    def read(self, path: str) -> bytes | None:
        """Return a file of the lake's, or None."""
        name = f"{self._root}/{path}"
        if self._fs.get_file_info(name).type != fs.FileType.File:
            return None
        with self._fs.open_input_stream(name) as file:
            return bytes(file.read())

    # --- one at a time ---

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lake for writing; a local lake refuses a second writer with ``AlreadyServed``."""
        if self._local is None:
            yield
            return
        try:
            self._local.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self._local / "_lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StorageError(f"the lake {self.url} cannot be written: {error.strerror}") from error
        try:
            _lock(handle, self.url)
            yield
        finally:
            os.close(handle)


def _lock(handle: int, url: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise AlreadyServed(f"another run writes to the lake {url}", hint="wait until it has ended") from None


def _stored() -> StructType:
    fields = [field for field in EVENT_SCHEMA if field.name != "id"]
    more = [StructField("batch", IntegerType()), StructField("tenant", StringType()), StructField("day", StringType())]
    return StructType([StructField(field.name, field.dataType) for field in fields] + more)


def _shown(stored: DataFrame) -> DataFrame:
    named = stored.withColumn("id", fn.concat_ws("/", "stream", "partition", "offset"))
    return named.select(*EVENT_SCHEMA.names, "tenant", "day", "batch")
