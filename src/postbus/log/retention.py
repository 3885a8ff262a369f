"""Retention, written once for every kind of log: how far a partition's beginning may move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from postbus.model import OffsetOutOfRange

if TYPE_CHECKING:
    from postbus.model import Stream

__all__ = ["Retained", "retention_target"]


class Retained(Protocol):
    """What retention asks of a stream's partitions."""

    stream: Stream

    def first(self, partition: int) -> int:
        """Return the first retained offset."""

    def head(self, partition: int) -> int:
        """Return the next offset to be written."""

    def size_through(self, partition: int, offset: int) -> int:
        """Return the bytes of all events ever appended up to and including ``offset``."""

    def first_created_since(self, partition: int, time_us: int) -> int:
        """Return the first retained offset appended at or after the instant; the head if there is none."""


def retention_target(retained: Retained, partition: int, before: int | None, now_us: int) -> int:
    """Return the first offset to keep: ``before`` when given, else what the stream's settings ask for."""
    first, head = retained.first(partition), retained.head(partition)
    if before is not None:
        if not 0 <= before <= head:
            raise OffsetOutOfRange(f"cannot trim before {before}: {retained.stream.name}/{partition} has 0..{head}")
        return max(before, first)
    limits = retained.stream.settings.retention
    target = first
    if limits.count is not None:
        target = max(target, head - limits.count)
    if limits.bytes is not None and head > first:
        target = max(target, _fitting(retained, partition, limits.bytes))
    if limits.age_s is not None:
        target = max(target, retained.first_created_since(partition, now_us - int(limits.age_s * 1e6)))
    return target


def _fitting(retained: Retained, partition: int, size_max: int) -> int:
    """Return the first offset from which the rest fits into ``size_max`` bytes, by bisection over running sizes."""
    low, high = retained.first(partition), retained.head(partition)
    total = retained.size_through(partition, high - 1)
    while low < high:
        middle = (low + high) // 2
        if total - retained.size_through(partition, middle - 1) <= size_max:
            high = middle
        else:
            low = middle + 1
    return low
