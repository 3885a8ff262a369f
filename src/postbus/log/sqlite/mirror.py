"""The embedded log as a copy: its streams are made, grow and end elsewhere, and are written here as they are there.

Every step decides inside its transaction whether it is still news, so that several processes may keep one copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from postbus.log.cursors import no_stream
from postbus.log.sqlite.ledger import load_consumers, load_head, load_stream
from postbus.log.sqlite.log import NEXT_STREAM_ID, REGISTERED, STREAMS, SqliteLog
from postbus.log.sqlite.trim import MOVE_BEGINNING, clamp, remove
from postbus.model import Conflict
from postbus.store.anchor import Mark
from postbus.store.records import seal
from postbus.store.writer import INLINE_WEIGHT_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import apsw

    from postbus.log.sqlite.doors import Transaction
    from postbus.log.sqlite.ledger import Kept
    from postbus.model import Event, Gap, Stream
    from postbus.store import Store

__all__ = ["MirrorLog", "followed_url"]

# What a folder follows.
FACT = "SELECT value FROM store_facts WHERE name = 'upstream'"
SAVE_FACT = "INSERT OR REPLACE INTO store_facts VALUES ('upstream', ?)"


async def followed_url(store: Store) -> str | None:
    """Return what the folder of a store follows; None when it keeps a log of its own."""
    found: str | None = await store.read(lambda db: db.execute(FACT).get)
    return found


class MirrorLog(SqliteLog):
    """What a copy does to its folder; ``ReplicaLog`` says when."""

    async def _bind(self, url: str, own: Callable[[str], bool]) -> None:
        """Have the folder follow a remote; ``own`` says which streams are not followed.

        Raises ``Conflict`` when the folder has a log of its own already.
        """

        def write(db: apsw.Connection) -> None:
            if db.execute(FACT).get is None:
                names = [name for (name,) in db.execute(STREAMS) if not own(name)]
                if names:
                    raise Conflict(
                        f"{self.store.folder.path} has streams of its own and cannot follow {url}: {names[0]} is one",
                        hint="name an empty folder with ?data=, and bring the events over with `postbus copy`",
                    )
            db.execute(SAVE_FACT, (url,))

        if await followed_url(self.store) != url:
            await self.store.write(write)

    async def mirror_stream(self, stream: Stream, firsts: Sequence[int]) -> None:
        """Make a stream as it is elsewhere, unless a later life of it is known; an earlier life ends.

        Raises ``Conflict`` when the stream of this life was made at another time: it is another stream.
        """

        def write(db: apsw.Connection) -> None:
            kept, row = load_stream(db, stream.name), db.execute(REGISTERED, (stream.name,)).get
            if kept is not None and kept.stream.epoch == stream.epoch and kept.stream != stream:
                raise Conflict(
                    f"the copy of {stream.name} in {self.store.folder.path} is not of the stream that is there now",
                    hint="the folder followed another remote: name another folder, or the remote it belongs to",
                )
            if row is not None and row[1] >= stream.epoch:
                return
            if kept is not None:
                self._delete_stream(db, stream.name)
            stream_id = row[0] if row is not None else db.execute(NEXT_STREAM_ID).get
            self._write_stream(db, stream_id, stream, firsts)

        await self.store.submit(self._stream_door, write)

    async def _drop_stream(self, name: str, epoch: int) -> None:
        """End one life of a stream, if it has not ended."""

        def write(db: apsw.Connection) -> None:
            kept = load_stream(db, name)
            if kept is not None and kept.stream.epoch == epoch:
                self._delete_stream(db, name)

        await self.store.submit(self._stream_door, write)

    async def apply(self, stream: Stream, partition: int, events: Sequence[Event]) -> int:
        """Append what follows on the copy's head and return the new head; nothing when there is a gap before it.

        Raises ``NotFound`` when this life of the stream is over.
        """

        def write(tx: Transaction) -> int:
            _alive(tx.stream(stream.name), stream)
            head = tx.head(stream.name, partition)
            known = head - events[0].offset
            if known < 0:
                return head
            fresh = events[known:]
            if fresh:
                tx.adopt(stream.name, partition, fresh)
            return head + len(fresh)

        # On the writer's thread, however few they are: publishers to the remote need not wait for this disk.
        applied: int = await self.store.submit(self._transaction_doors[True], write, INLINE_WEIGHT_MAX + 1)
        return applied

    async def leap(self, stream: Stream, partition: int, first: int) -> list[Gap]:
        """Go on at ``first``: what lies before it is gone elsewhere, and goes here. Return who missed how much."""

        def write(db: apsw.Connection) -> list[Gap]:
            kept = load_stream(db, stream.name)
            if kept is None:
                raise no_stream(stream.name)
            _alive(kept, stream)
            head = load_head(db, kept, partition)
            if head.next_offset >= first:
                return []
            readers = load_consumers(db, kept)
            remove(db, kept, partition, head.next_offset)
            where = (kept.stream_id, partition)
            sealed = seal(*where, kept.slots[partition], first, head.size, head.chain)
            db.execute(MOVE_BEGINNING, (first, head.size, head.chain, sealed, *where))
            kept.firsts[partition] = first
            self._stream_door.marks[kept.slots[partition]] = Mark(*where, stream.epoch, first, head.chain)
            return clamp(db, kept, readers, self.store.clock.now_us())

        gaps: list[Gap] = await self.store.submit(self._stream_door, write)
        return gaps


def _alive(kept: Kept, stream: Stream) -> None:
    if kept.stream.epoch != stream.epoch:
        raise no_stream(f"{stream.name} of epoch {stream.epoch}")
