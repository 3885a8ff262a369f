"""What event loops may know of the embedded log without asking the database: extents, consumers, recent events.

Written by whoever commits, read by the loops. A value read from the database is kept only if nothing was published in
the meantime, so that an old value never replaces a new one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from postbus.log.tail import ANY, Tails, Waiters

if TYPE_CHECKING:
    from postbus.log.heads import Head
    from postbus.log.sqlite.ledger import Kept
    from postbus.model import Consumer, Stream

__all__ = ["Extent", "Published"]

Extent = tuple[int, int, int, bytes]
"""First retained offset, high water mark, bytes retained, chain."""


class Published:
    """Committed facts in memory. ``generation`` changes whenever something here changes."""

    def __init__(self) -> None:
        self.generation = 0
        self.changes = 0
        self.names: set[str] | None = None
        self.streams: dict[str, Stream] = {}
        self.extents: dict[tuple[str, int], Extent] = {}
        self.consumers: dict[tuple[str, str], Consumer] = {}
        self.tails = Tails()
        self.waiters = Waiters()

    def appended(self, kept: Kept, head: Head, facts: list[tuple[Any, ...]], size: int) -> None:
        """Publish what was appended to a partition, and wake who waits for it."""
        self.generation += 1
        key = (kept.stream.name, head.partition)
        self.tails.extend(key, facts, size)
        base = kept.base_bytes[head.partition]
        self.extents[key] = (kept.firsts[head.partition], head.next_offset, head.size - base, head.chain)
        self.waiters.wake(key, lone=len(facts) == 1)
        self.waiters.wake(ANY)

    def moved(self, stream: str, name: str, consumer: Consumer | None) -> None:
        """Publish where a consumer stands now."""
        self.generation += 1
        if consumer is None:
            self.consumers.pop((stream, name), None)
        else:
            self.consumers[stream, name] = consumer

    def forget(self) -> None:
        """Drop everything: it changed in another way than through the doors. Waiters look again."""
        self.generation += 1
        self.changes += 1
        self.names = None
        self.streams = {}
        self.extents = {}
        self.consumers = {}
        self.tails.forget()
        self.waiters.wake_all()
