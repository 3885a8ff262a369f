"""The remote half of a log: what JetStream or Kafka has to do so that a node can keep a copy and publish into it.

The remote keeps the events and gives them their offsets; a node keeps a copy of them in its embedded store, beside the
cursors, deliveries and inboxes that belong to the node. So everything above the log works on one kind of log only, and
a remote needs no more than these methods. Offsets are 0-based and dense per (stream, partition).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from postbus.model import Draft, Event, Receipt, Stream, StreamSettings

__all__ = ["Upstream"]


class Upstream(Protocol):
    """A remote log. All methods may be called concurrently, and reconnect by themselves.

    Every method raises ``Unreachable`` when the remote does not answer within ``answer_s``; it never blocks longer.
    """

    url: str
    answer_s: float

    async def ensure_stream(self, name: str, settings: StreamSettings | None = None) -> Stream:
        """Return the stream as the remote has it, made with the settings (or the defaults) if it was not there.

        One of many concurrent callers on any machine makes it. A stream made again after ``delete_stream`` has the
        next epoch.
        """

    async def streams(self) -> list[Stream]:
        """Return all streams, by name."""

    async def delete_stream(self, name: str) -> None:
        """Remove a stream, its events and its identities; its epoch stays remembered. Raises ``NotFound``."""

    async def append(
        self,
        stream: Stream,
        drafts: Sequence[Draft],
        ids: Sequence[str],
        now_us: int,
        partition: int | None = None,
    ) -> list[Receipt]:
        """Append events in order and return their receipts once the remote has acknowledged all of them.

        Identities hold as in ``Log.append``, without a limit of time and also after a trim; ``now_us`` becomes the
        events' ``created_at``. ``ids`` has one text per draft that travels with the event and is unique to this
        attempt to publish: after ``Unreachable`` nobody knows which of the events are there, ``find`` says it.
        All go to ``partition`` when it is given, whatever their keys: for copies of another log.
        Raises ``IdempotencyConflict``, ``NotFound`` (also when the epoch is another by now), ``StorageFull``,
        ``Refused`` for what the remote will never take.
        """

    async def find(self, stream: Stream, ids: Sequence[str], since: Sequence[int]) -> dict[str, tuple[int, int]]:
        """Return (partition, offset) of those ids that are in the stream at or after ``since``, one offset a partition.

        What is not in the answer is not there, and will not come any more.
        """

    async def fetch(self, stream: Stream, partition: int, offset: int, limit: int) -> list[Event]:
        """Return up to ``limit`` events from ``offset`` on, or from the first retained one; changes nothing."""

    async def extents(self, stream: Stream) -> list[tuple[int, int]]:
        """Return (first retained offset, next offset to be written) of each partition."""

    async def wait(self, stream: Stream, partition: int, offset: int, timeout_s: float) -> bool:
        """Wait until the partition's next offset is above ``offset``; False when the time is over first.

        Wakes when the remote says so, not by polling.
        """

    async def trim(self, stream: Stream, partition: int, before: int) -> None:
        """Remove the events below ``before``; their identities stay remembered."""

    def watch(self, came_up: Callable[[], None]) -> None:
        """Call back whenever the remote is reachable again."""

    async def close(self) -> None:
        """Let go of all connections. Idempotent."""
