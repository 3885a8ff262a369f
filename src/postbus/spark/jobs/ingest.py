"""Ingest: dumps (JSON lines, CSV, Parquet) become events, once each, in the order of the files and their rows.

Input: files. Output: events in one stream, and a page of rows that could not become one, with the reason. Idempotent: a
row without a ``native_id`` gets one from its file, its place and its content, so that running again adds nothing.

A row with a field ``payload`` is an event, with the fields of an event. Any other row is a payload as it is, and takes
topic and source from the call.
"""

from __future__ import annotations

import csv
import hashlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from postbus import strict_json
from postbus.envelope import draft
from postbus.model import Draft, Invalid, NotFound, PostbusError, Trust
from postbus.spark.feed import PAGE, PAGE_SCHEMA, Fed, Page, Refused, feed
from postbus.topics import check_stream_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession

__all__ = ["KINDS", "Split", "checked", "ingest", "splits"]

KINDS = {"jsonl": (".jsonl", ".ndjson", ".json"), "csv": (".csv",), "parquet": (".parquet",)}
SPLIT_BYTES = 32 * 1024 * 1024
BLOCK_BYTES = 1024 * 1024
ROW_BYTES_MAX = 8 * 1024 * 1024
SHOWN_CHARS = 2_000
TEXTS = ("topic", "source", "variant", "key", "correlation_id", "native_id", "occurred_at", "trust")
VALUES = ("payload", "metadata", "headers", "delivery_handle")
IGNORED = frozenset({"id", "stream", "partition", "offset", "created_at", "status", "attempt"})


class Split(msgspec.Struct, frozen=True):
    """A part of one file that a task reads: rows that begin at bytes ``start`` up to ``end`` (JSON lines), or all."""

    url: str
    kind: str
    start: int
    end: int


class Defaults(msgspec.Struct, frozen=True):
    """What a row takes that does not say it."""

    topic: str | None
    source: str | None


# --- what there is to read --------------------------------------------------------------------------------------------


def splits(paths: list[str], kind: str | None = None) -> list[Split]:
    """Return the parts of all files, by name; a folder stands for the files in it.

    Raises ``NotFound`` for a path without files, ``Invalid`` for a file whose kind nobody knows.
    """
    found: list[Split] = []
    for path in paths:
        url = Path(path).absolute().as_uri() if "://" not in path else path.replace("s3a://", "s3://", 1)
        system, root = fs.FileSystem.from_uri(url)
        info = system.get_file_info(root)
        if info.type == fs.FileType.NotFound:
            raise NotFound(f"there is no file {path}")
        infos = [info] if info.type == fs.FileType.File else system.get_file_info(fs.FileSelector(root, recursive=True))
        files = sorted((each for each in infos if _is_data(each, root)), key=lambda each: each.path)
        if not files:
            raise NotFound(f"there are no files in {path}")
        for file in files:
            found += _split(url.removesuffix(root) + file.path, file, kind or _kind(file.path))
    return found


def _is_data(info: fs.FileInfo, root: str) -> bool:
    hidden = any(part.startswith(("_", ".")) for part in Path(info.path).relative_to(root).parts)
    return bool(info.type == fs.FileType.File) and not hidden


def _kind(path: str) -> str:
    name = path.lower().removesuffix(".gz")
    for kind, endings in KINDS.items():
        if name.endswith(endings):
            return kind
    hint = "name it *.jsonl, *.csv or *.parquet (also with .gz), or give --format"
    raise Invalid(f"{path} is no kind of file that can be ingested", hint=hint)


def _split(url: str, info: fs.FileInfo, kind: str) -> list[Split]:
    if kind != "jsonl" or url.endswith(".gz"):
        return [Split(url, kind, 0, info.size)]
    return [Split(url, kind, start, min(start + SPLIT_BYTES, info.size)) for start in range(0, info.size, SPLIT_BYTES)]


# --- rows of a file ---------------------------------------------------------------------------------------------------


def _rows(split: Split) -> Iterator[tuple[int, bytes, Any]]:
    """Yield (place, raw, fields) of each row; the fields of a JSON line are read later, with its errors."""
    system, path = fs.FileSystem.from_uri(split.url)
    if split.kind == "parquet":
        with system.open_input_file(path) as file:
            number = 0
            for batch in pq.ParquetFile(file).iter_batches(batch_size=PAGE):
                for fields in batch.to_pylist():
                    yield number, msgspec.json.encode(fields, enc_hook=str), fields
                    number += 1
    elif split.kind == "csv":
        with (
            system.open_input_stream(path, compression="detect") as stream,
            io.TextIOWrapper(stream, "utf-8-sig") as text,
        ):
            for number, fields in enumerate(csv.DictReader(text, strict=True)):
                yield number, msgspec.json.encode(fields, enc_hook=str), fields
    else:
        yield from ((place, line, None) for place, line in _lines(system, path, split) if line.strip())


def _lines(system: fs.FileSystem, path: str, split: Split) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin inside the split, with the byte where each begins."""
    whole = split.start == 0
    opened = system.open_input_stream(path, compression="detect") if whole else system.open_input_file(path)
    with opened as file:
        place, rest = split.start, b""
        if not whole:  # the line that reaches into the split belongs to the one before
            place -= 1
            file.seek(place)
        skipping = not whole
        limit = None if path.endswith(".gz") else split.end
        while block := file.read(BLOCK_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            if len(rest) > ROW_BYTES_MAX:
                raise Invalid(f"{path} has a line of more than {ROW_BYTES_MAX} bytes at byte {place}")
            for line in lines:
                if limit is not None and place >= limit:
                    return
                if not skipping:
                    yield place, line
                skipping = False
                place += len(line) + 1
        if rest and not skipping and (limit is None or place < limit):
            yield place, rest


# --- checking ---------------------------------------------------------------------------------------------------------


def checked(spark: SparkSession, parts: list[Split], defaults: Defaults) -> DataFrame:
    """Return pages of checked events in the order of the parts, one task per part."""
    numbers = spark.range(0, len(parts), 1, len(parts))
    return numbers.mapInArrow(
        lambda batches: (
            pa.RecordBatch.from_pylist([{"page": page}], schema=pa.schema([("page", pa.binary())]))
            for batch in batches
            for number in batch.column("id").to_pylist()
            for page in _pages(parts[number], defaults)
        ),
        PAGE_SCHEMA,
    )


def _pages(split: Split, defaults: Defaults) -> Iterator[bytes]:
    name = split.url.rpartition("/")[2]
    encode = msgspec.msgpack.Encoder().encode
    drafts: list[Draft] = []
    places: list[str] = []
    refused: list[Refused] = []
    done = split.start
    left = split.end - split.start
    try:
        for place, raw, fields in _rows(split):
            where = f"{name}:{place}"
            try:
                drafts.append(_draft(raw, fields, where, defaults))
                places.append(where)
            except PostbusError as error:
                refused.append(Refused(where, error.message, raw.decode("utf-8", "backslashreplace")[:SHOWN_CHARS]))
            if len(drafts) + len(refused) >= PAGE:
                work = max(0, place - done) if split.kind == "jsonl" else 0
                yield encode(Page(drafts, places, refused, min(work, left)))
                done, left = place, left - min(work, left)
                drafts, places, refused = [], [], []
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        refused.append(Refused(name, f"the rest of the file cannot be read: {error}", ""))
    yield encode(Page(drafts, places, refused, left))


def _draft(raw: bytes, fields: Any, where: str, defaults: Defaults) -> Draft:
    if fields is None:
        strict_json.validate(raw, max_bytes=ROW_BYTES_MAX)
        line = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]) if raw.lstrip().startswith(b"{") else {}
        if "payload" not in line:
            return _event({"payload": raw.strip()}, raw, where, defaults)
        fields = {name: _value(name, value) for name, value in line.items()}
    elif "payload" not in fields:
        return _event({"payload": raw}, raw, where, defaults)
    else:
        fields = {name: None if value in {"", None} and name not in VALUES else value for name, value in fields.items()}
        fields |= {name: fields[name].encode() for name in VALUES if isinstance(fields.get(name), str) and fields[name]}
    return _event(fields, raw, where, defaults)


def _value(name: str, value: msgspec.Raw) -> Any:
    if bytes(value) == b"null" and name != "payload":
        return None
    return msgspec.json.decode(value) if name in TEXTS else bytes(value)


def _event(fields: dict[str, Any], raw: bytes, where: str, defaults: Defaults) -> Draft:
    for name in fields.keys() - {*TEXTS, *VALUES} - IGNORED:
        raise Invalid(f"an event has no field {name!r}")
    given = {name: value for name, value in fields.items() if value not in (None, "", b"") and name not in IGNORED}
    for name in ("topic", "source"):
        value = given.pop(name, None) or getattr(defaults, name)
        if value is None:
            raise Invalid(f"the row has no {name}", hint=f"give one for all rows with --{name}")
        given[name] = value
    if "native_id" not in given:
        given["native_id"] = "ingest:" + hashlib.sha256(where.encode() + b"\n" + raw).hexdigest()[:32]
    headers = given.get("headers")
    if headers is not None:
        given["headers"] = _headers(headers)
    if "payload" not in given:
        raise Invalid("the row has an empty payload")
    return draft(given.pop("topic"), given.pop("source"), given.pop("payload"), **_trusted(given))


def _headers(value: Any) -> Any:
    try:
        return msgspec.json.decode(value) if isinstance(value, bytes) else value
    except msgspec.DecodeError as error:
        raise Invalid(f"headers: {error}") from None


def _trusted(given: dict[str, Any]) -> dict[str, Any]:
    if "trust" in given and given["trust"] not in list(Trust):
        raise Invalid(f"trust is {given['trust']!r}", hint="it is trusted or untrusted")
    return given


# --- the runner -------------------------------------------------------------------------------------------------------


async def ingest(
    spark: SparkSession,
    paths: list[str],
    data: str,
    stream: str,
    *,
    topic: str | None = None,
    source: str | None = None,
    kind: str | None = None,
    quarantine: str | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Fed:
    """Ingest files into a stream, made when it is not there; rows that are refused go to ``quarantine``, a JSONL file.

    Nothing is written when the arguments are wrong.
    """
    check_stream_name(stream)
    defaults = Defaults(topic, source)
    if topic is not None or source is not None:
        draft(topic or "a", source or "a", None)
    parts = splits(paths, kind)
    total = sum(part.end - part.start for part in parts)
    progress(0, total)
    if not parts:
        return Fed()
    kept = _Quarantine(quarantine)
    pages = checked(spark, parts, defaults).toLocalIterator(prefetchPartitions=True)
    try:
        return await feed(pages, data, stream, refuse=kept.add, progress=lambda done: progress(done, total))
    finally:
        kept.close()


class _Quarantine:
    """The file of refused rows; made anew by each run, and not at all when there are none."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._file: io.BufferedWriter | None = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def add(self, rows: list[Refused]) -> None:
        """Write rows down."""
        if self._path is None:
            return
        if self._file is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = self._path.open("wb")
        self._file.writelines(msgspec.json.encode(row) + b"\n" for row in rows)

    def close(self) -> None:
        """Finish the file."""
        if self._file is not None:
            self._file.close()
