"""Finding, while reading, the events that came second in a race for their identity; see ``records``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postbus.log.kafka.reading import Trimmed
from postbus.log.kafka.records import REPEAT, events_of, looked_of, note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.log.kafka.reading import Entry, Reader
    from postbus.log.kafka.records import Looked
    from postbus.model import Event

__all__ = ["Repeats"]

REMEMBERED_MAX = 100_000


class _Seen:
    """The identities of a partition from ``first`` up to ``following``, each with its latest offset."""

    __slots__ = ("first", "following", "names")

    def __init__(self, first: int) -> None:
        self.first = self.following = first
        self.names: dict[tuple[str, str], int] = {}

    def repeated(self, event: Event, looked: Looked) -> int | None:
        """Return the offset of the event that this one repeats; if there is none, it is one that others may repeat."""
        name = (event.native_id or "", event.variant)
        earlier = self.names.get(name, -1)
        if event.offset > looked.expected and earlier >= looked.after:
            return earlier
        self.names[name] = event.offset
        return None


class Repeats:
    """Turns records into events; remembers what it has lately seen of each partition, so that it rarely looks back."""

    def __init__(self, scout: Reader) -> None:
        self._scout = scout
        self._seen: dict[tuple[str, int], _Seen] = {}

    def forget(self, topic: str, partition: int) -> None:
        """Let go of what was seen of a partition."""
        self._seen.pop((topic, partition), None)

    async def events(
        self, stream: str, topic: str, partition: int, first: int, entries: Sequence[Entry]
    ) -> list[Event]:
        """Return the records from an offset on as events, with a note in the place of each repeat."""
        seen = self._seen.get((topic, partition))
        if seen is None or seen.following != first or len(seen.names) > REMEMBERED_MAX:
            seen = self._seen[topic, partition] = _Seen(first)
        made = events_of(stream, partition, first, entries)
        for index in [at for at, event in enumerate(made) if event.native_id is not None]:
            event = made[index]
            if (message := entries[index]) is not None:
                looked = looked_of(message, event.offset)
                if event.offset > looked.expected and looked.after < seen.first:
                    await self._look_back(stream, topic, partition, looked.after, seen)
                earlier = seen.repeated(event, looked)
                if earlier is not None:
                    made[index] = _note(event, earlier)
        seen.following = first + len(made)
        return made

    async def _look_back(self, stream: str, topic: str, partition: int, after: int, seen: _Seen) -> None:
        older = _Seen(after)
        try:
            entries = await self._scout.read(topic, partition, after, seen.first)
            for event, message in zip(events_of(stream, partition, after, entries), entries, strict=True):
                if event.native_id is not None and message is not None:
                    older.repeated(event, looked_of(message, event.offset))
        except Trimmed:  # who was first is not there any more
            return
        finally:
            self._scout.forget(topic, partition)
        seen.names = {**older.names, **seen.names}
        seen.first = after


def _note(event: Event, earlier: int) -> Event:
    why: dict[str, object] = {"repeats": earlier, "native_id": event.native_id, "variant": event.variant}
    return note(event.stream, event.partition, event.offset, REPEAT, why, event.created_at_us)
