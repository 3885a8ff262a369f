"""Errors across Spark: ours travel through a worker and a JVM as text, and come back as one sentence."""

from __future__ import annotations

import functools
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from postbus import model
from postbus.model import NotFound, OffsetOutOfRange, PostbusError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["ours", "told", "with_hint"]

LOOK = "its log is spark.log in the cache folder"

P = ParamSpec("P")
T = TypeVar("T")

# What Spark's own Kafka source says when a record was removed, or a topic, before it was read.
_TRIMMED = re.compile(r"KafkaIllegalStateException|KAFKA_DATA_LOSS|Some data may have been lost")
_DELETED = re.compile(r"UnknownTopicOrPartition|does not host this topic-partition")

_OURS = re.compile(r"postbus\.model\.(\w+): ([^\n]+)(?:\nhint: ([^\n]+))?")


def with_hint(call: Callable[P, T]) -> Callable[P, T]:
    """Make what a method raises carry its hint as a note, which is all of it that Spark passes on."""

    @functools.wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except PostbusError as error:
            _note(error)
            raise

    return wrapped


def _note(error: PostbusError) -> None:
    note = f"hint: {error.hint}"
    if error.hint and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def ours(error: BaseException) -> PostbusError | None:
    """Return the error of ours that Spark has wrapped or that its Kafka source means, or None."""
    said = str(error)
    found = _OURS.search(said)
    if found is None:
        if _TRIMMED.search(said):
            message = "retention has removed events of the log on Kafka before they were read"
            return OffsetOutOfRange(message, hint="start anew with startingOffset=earliest, or read the archive")
        if _DELETED.search(said):
            return NotFound("a stream on Kafka was deleted while it was read", hint="start anew")
        return None
    kind = getattr(model, found[1], PostbusError)
    made: PostbusError = PostbusError.__new__(kind)
    PostbusError.__init__(made, found[2].strip(), hint=found[3])
    return made


@contextmanager
def told() -> Iterator[None]:
    """Turn what Spark raises into an error of ours: the one it wraps, or one that says what Spark says first."""
    from py4j.protocol import Py4JError, Py4JJavaError  # noqa: PLC0415 - the base package works without it
    from pyspark.errors import PySparkException  # noqa: PLC0415

    try:
        yield
    except (Py4JError, ConnectionError) as error:
        if isinstance(error, Py4JJavaError):
            known = ours(error)
            if known is not None:
                raise known from error
            first = str(error.java_exception).strip().partition("\n")[0]
            raise PostbusError(f"Spark says: {first}", hint=LOOK) from error
        raise PostbusError("Spark has died", hint=f"run it again: it goes on where it was; {LOOK}") from error
    except PySparkException as error:
        known = ours(error)
        if known is not None:
            raise known from error
        first = str(error).strip().partition("\n")[0]
        raise PostbusError(f"Spark says: {first}", hint=LOOK) from error
