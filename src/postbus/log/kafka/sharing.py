"""A reader that several use at once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from postbus.log.kafka.reading import Reader

if TYPE_CHECKING:
    from postbus.log.kafka.link import Link
    from postbus.log.kafka.reading import Entry

__all__ = ["SharedReader"]


class SharedReader(Reader):
    """Keeps a partition that one lets go of while somebody else reads it; to him Kafka would seem to be away."""

    def __init__(self, link: Link, long_poll_ms: int) -> None:
        super().__init__(link, long_poll_ms)
        self._reading: Counter[tuple[str, int]] = Counter()
        self._let_go: set[tuple[str, int]] = set()

    async def read(self, topic: str, partition: int, offset: int, end: int) -> list[Entry]:
        """See ``Reader.read``."""
        key = (topic, partition)
        self._reading[key] += 1
        try:
            return await super().read(topic, partition, offset, end)
        finally:
            self._reading[key] -= 1
            if not self._reading[key]:
                del self._reading[key]
                if key in self._let_go:
                    self.end(*key)

    def forget(self, topic: str, partition: int) -> None:
        """Stop reading a partition, as soon as nobody reads it."""
        if (topic, partition) in self._reading:
            self._let_go.add((topic, partition))
        else:
            self.end(topic, partition)

    def end(self, topic: str, partition: int) -> None:
        """Stop reading a partition now: it is gone, and nobody shall wait for it."""
        self._let_go.discard((topic, partition))
        super().forget(topic, partition)
