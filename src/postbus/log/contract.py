"""The log contract: what every kind of log promises, whatever it is kept on.

Offsets are 0-based, dense and never reused, per (stream, partition); they are the only order there is. Ranges are
half-open. A consumer is a durable reader of one stream with one cursor per partition; ``consumer == subscription id``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.model import (
        CommitResult,
        Consumer,
        ConsumerLag,
        Draft,
        Event,
        ReadResult,
        Receipt,
        Start,
        Stream,
        StreamSettings,
        StreamStats,
        TrimResult,
    )

__all__ = ["Log"]


class Log(Protocol):
    """An append-only log with per-consumer cursors. All methods are safe to call concurrently.

    What another process has committed is seen within milliseconds; what this one has committed, at once.
    """

    async def ensure_stream(self, name: str, settings: StreamSettings | None = None) -> Stream:
        """Get or create the stream ``namespace.tenant.name``; durable when it returns.

        Idempotent and safe under concurrent callers. ``settings=None`` accepts whatever the stream has (and creates it
        with the defaults). Raises ``Invalid`` for a bad name or bad settings, ``Conflict`` when it exists with other
        settings.
        """

    async def streams(self) -> list[Stream]:
        """Return all streams, by name."""

    async def delete_stream(self, name: str) -> None:
        """Remove a stream with its events and identities; a stream made again under the name has the next epoch.

        Its consumers stay, with their cursors back at 0 and lag 0. Raises ``NotFound``.
        """

    async def append(self, stream: str, drafts: Sequence[Draft]) -> list[Receipt]:
        """Append events; one receipt each, in order; durable when it returns, and not appended at all if it raises.

        The identity of a draft with a ``native_id`` is (stream, native_id, variant): the same identity with the same
        content gives the first offset with ``duplicate=True`` and writes nothing; with other content it raises
        ``IdempotencyConflict``. Content is topic, source, key, payload, metadata, headers, delivery handle and an
        explicit ``occurred_at``. Drafts with the same key go to the same partition. Raises ``NotFound`` for an unknown
        stream, ``StorageFull``, ``StorageFailed``, ``Backpressure``.
        """

    async def fetch(self, stream: str, partition: int, offset: int, limit: int = 100) -> list[Event]:
        """Return up to ``limit`` events from ``offset`` on, without a consumer; changes nothing.

        An offset below the first retained one starts at the first retained one; at or beyond the end gives nothing.
        Raises ``NotFound`` for an unknown stream or partition, ``OffsetOutOfRange`` for a negative offset.
        """

    async def wait(self, stream: str, partition: int, offset: int, timeout_s: float) -> bool:
        """Wait until the partition's high water mark is above ``offset``; False when the time is over first.

        Wakes on commits of this process at once and of other processes within some milliseconds.
        """

    async def ensure_consumer(self, stream: str, consumer: str, start: Start | None = None) -> Consumer:
        """Get or create a consumer, its cursors pinned by the start policy (default ``latest``) and returned.

        Idempotent and safe under concurrent callers. ``start=None`` accepts an existing consumer as it is. Raises
        ``NotFound`` for an unknown stream, ``Conflict`` when it exists with another start, ``OffsetOutOfRange`` for an
        ``at_offset`` outside 0..high water mark, ``Invalid`` for a bad id or start. An ``at_offset`` below the first
        retained event begins there.
        """

    async def get_consumer(self, stream: str, consumer: str) -> Consumer | None:
        """Return the consumer, or None; also when there is no such stream."""

    async def consumers(self, stream: str | None = None) -> list[Consumer]:
        """Return all consumers (of one stream), by stream and id."""

    async def read(self, stream: str, consumer: str, limit: int = 100, partition: int = 0) -> ReadResult:
        """Return the events at the consumer's cursor; changes nothing, so reading again gives the same events.

        Raises ``NotFound`` for an unknown stream, consumer or partition, ``Invalid`` for a limit below 1.
        """

    async def commit(self, stream: str, consumer: str, through: int, partition: int = 0) -> CommitResult:
        """Record that everything up to and including offset ``through`` is consumed; moves this consumer only.

        Durable when it returns. Lower than now: nothing happens and ``moved`` is False. Negative or at or beyond the
        high water mark: ``OffsetOutOfRange``. Each move leaves a row in the audit.
        """

    async def reset(self, stream: str, consumer: str, start: Start, partition: int | None = None) -> Consumer:
        """Move the consumer's cursors (or one partition's) to a start policy; the only way back.

        Its committed offset becomes the one before its new place; the start it was created with stays what it was.
        Raises as ``ensure_consumer`` does, also when one partition of several would be out of range; nothing is
        changed then.
        """

    async def delete_consumer(self, stream: str, consumer: str) -> bool:
        """Forget a consumer and its cursors; False when there was none. Raises ``NotFound`` for an unknown stream."""

    async def get_stream_stats(self, stream: str) -> StreamStats:
        """Return the extent of each partition; O(1) in the number of events. Raises ``NotFound``."""

    async def get_consumer_lag(self, stream: str, consumer: str) -> ConsumerLag:
        """Return how far the consumer is behind, per partition; O(1) in the number of events. Raises ``NotFound``."""

    async def trim(self, stream: str, before: int | None = None, partition: int | None = None) -> TrimResult:
        """Remove the oldest events: below ``before`` in ``partition`` (or in all), or by the stream's retention.

        Never passes a consumer's cursor unless the stream says ``retention_beats_consumers``; a cursor that is
        passed is moved to the first retained offset and reported as a gap. Identities stay remembered. Raises
        ``NotFound``, and ``OffsetOutOfRange`` for a ``before`` beyond the high water mark.
        """

    async def close(self) -> None:
        """Finish what is queued and let go of all resources. Idempotent."""
