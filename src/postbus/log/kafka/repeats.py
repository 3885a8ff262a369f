"""Finding, while reading, the events that came second in a race for their identity; see ``records``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postbus.log.kafka.reading import Trimmed
from postbus.log.kafka.records import REPEAT, event_of, looked_of, note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.log.kafka.reading import Entry, Reader
    from postbus.model import Event

__all__ = ["Repeats"]

REMEMBERED_MAX = 100_000


class _Seen:
    """The identities of a partition from ``first`` up to ``following``, each with its latest offset."""

    __slots__ = ("first", "following", "names")

    def __init__(self, first: int) -> None:
        self.first = self.following = first
        self.names: dict[tuple[str, str], int] = {}

    def add(self, event: Event) -> None:
        if event.native_id is not None:
            self.names[event.native_id, event.variant] = event.offset


class Repeats:
    """Turns records into events; remembers what it has lately seen of each partition, so that it rarely looks back."""

    def __init__(self, scout: Reader) -> None:
        self._scout = scout
        self._seen: dict[tuple[str, int], _Seen] = {}

    def forget(self, topic: str, partition: int) -> None:
        """Let go of what was seen of a partition."""
        self._seen.pop((topic, partition), None)

    async def events(self, stream: str, topic: str, partition: int, entries: Sequence[Entry]) -> list[Event]:
        """Return records as events, with a note in the place of each repeat."""
        seen = self._seen.get((topic, partition))
        first = entries[0][0]
        if seen is None or seen.following != first or len(seen.names) > REMEMBERED_MAX:
            seen = self._seen[topic, partition] = _Seen(first)
        made = []
        for offset, message in entries:
            event = event_of(stream, partition, offset, message)
            if event.native_id is not None and message is not None:
                looked = looked_of(message, offset)
                if offset > looked.expected:
                    event = await self._judged(event, topic, looked.after, seen)
                seen.add(event)
            made.append(event)
            seen.following = offset + 1
        return made

    async def _judged(self, event: Event, topic: str, after: int, seen: _Seen) -> Event:
        if after < seen.first:
            await self._look_back(event.stream, topic, event.partition, after, seen)
        earlier = seen.names.get((event.native_id or "", event.variant), -1)
        if earlier < after:
            return event
        why: dict[str, object] = {"repeats": earlier, "native_id": event.native_id, "variant": event.variant}
        return note(event.stream, event.partition, event.offset, REPEAT, why, event.created_at_us)

    async def _look_back(self, stream: str, topic: str, partition: int, after: int, seen: _Seen) -> None:
        older = _Seen(after)
        try:
            for offset, message in await self._scout.read(topic, partition, after, seen.first):
                older.add(event_of(stream, partition, offset, message))
        except Trimmed:  # who was first is not there any more
            return
        finally:
            self._scout.forget(topic, partition)
        seen.names = {**older.names, **seen.names}
        seen.first = after
