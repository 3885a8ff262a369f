"""The growing end of a partition: how a draft becomes the next event, for logs that assign offsets themselves."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from postbus.model import IdempotencyConflict
from postbus.store.records import content_digest, encode, genesis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from postbus.model import Draft, Event, Stream

__all__ = ["Head", "Identity", "choose_partition", "empty_head", "resolve_identities"]

Facts = tuple[Any, ...]


class Identity(NamedTuple):
    """Who was here: where the first event with an identity went, and what it contained."""

    partition: int
    offset: int
    created_at_us: int
    content: bytes


class Head:
    """The end of one partition. ``take`` moves it; copies are cheap, so that a batch can be undone."""

    __slots__ = ("chain", "latest", "next_offset", "partition", "size")

    def __init__(self, partition: int, next_offset: int, chain: bytes, size: int, latest: int | None) -> None:
        self.partition = partition
        self.next_offset = next_offset
        self.chain = chain
        self.size = size
        self.latest = latest

    def copy(self) -> Head:
        """Return an independent head at the same place."""
        return Head(self.partition, self.next_offset, self.chain, self.size, self.latest)

    def take(
        self,
        drafts: Iterable[Draft | Event],
        now_us: int,
        stream_id: int,
        values: list[Any],
        facts: list[Facts],
    ) -> None:
        """Give drafts the next offsets, link them to the chain, and add to ``values`` and ``facts``.

        Facts are in the order of ``Event`` after ``stream``; rows in the order of ``INSERT_COLUMNS``. One long loop
        over local names, because every appended event passes here.
        """
        partition, offset, chain, size, latest = self.partition, self.next_offset, self.chain, self.size, self.latest
        for draft in drafts:
            occurred = draft.occurred_at_us
            if occurred is None:
                occurred = now_us
            trust = draft.trust
            made = (
                partition, offset, draft.topic, draft.source, draft.variant, draft.key, draft.payload_json,
                draft.metadata_json, draft.headers_json, draft.correlation_id, draft.native_id,
                draft.delivery_handle_json, occurred, now_us, trust,
            )  # fmt: skip
            encoded = encode(made)
            offset += 1
            chain = sha256(chain + encoded).digest()
            size += len(encoded)
            before = latest
            if latest is None or occurred >= latest:
                latest, before = occurred, None
            facts.append(made)
            values += (stream_id, *made)
            values[-3] = None if occurred == now_us else occurred
            if trust == "trusted":
                values[-1] = None
            values += (before, size, crc32(encoded, stream_id), chain)
        self.next_offset, self.chain, self.size, self.latest = offset, chain, size, latest


def empty_head(stream: Stream, partition: int) -> Head:
    """Return the head of a partition nothing was ever appended to."""
    return Head(partition, 0, genesis(stream.name, stream.epoch, partition), 0, None)


def choose_partition(draft: Draft, partitions: int, turn: int) -> int:
    """Return the partition of a draft: by its key, or in turn."""
    if partitions == 1:
        return 0
    if draft.key is None:
        return turn % partitions
    return crc32(draft.key.encode()) % partitions


def digest_of(draft: Draft) -> bytes:
    """Return the digest of what makes two drafts the same event."""
    return _digest(draft, draft.occurred_at_us)


def found_of(event: Event) -> bytes:
    """Return the digest of an event's draft; an event does not tell when its draft named the instant it was made."""
    return _digest(event, None if event.occurred_at_us == event.created_at_us else event.occurred_at_us)


def same_content(draft: Draft, known: Identity) -> bool:
    """Say whether a draft is the event that has its identity in a copy."""
    if digest_of(draft) == known.content:
        return True
    return draft.occurred_at_us == known.created_at_us and _digest(draft, None) == known.content


def _digest(fact: Draft | Event, occurred_at_us: int | None) -> bytes:
    return content_digest(
        (
            fact.topic,
            fact.source,
            fact.key,
            fact.payload_json,
            fact.metadata_json,
            fact.headers_json,
            fact.delivery_handle_json,
            occurred_at_us,
        )
    )


def resolve_identities(
    stream: str, drafts: Sequence[Draft], lookup: Callable[[str, str], Identity | None]
) -> tuple[list[Identity | int | None], dict[int, bytes]]:
    """Decide for each draft of one call whether it is new, before any of them gets an offset.

    Returns per draft None (new), the identity it repeats, or the index of the draft of this call it repeats; and the
    content digest of each new draft that has an identity. Raises ``IdempotencyConflict`` for other content.
    """
    verdicts: list[Identity | int | None] = []
    digests: dict[int, bytes] = {}
    mine: dict[tuple[str, str], int] = {}
    for index, draft in enumerate(drafts):
        if draft.native_id is None:
            verdicts.append(None)
            continue
        digest = digest_of(draft)
        name = (draft.native_id, draft.variant)
        earlier = mine.get(name)
        known = None if earlier is not None else lookup(*name)
        content = digests[earlier] if earlier is not None else known and known.content
        if content is None:
            mine[name] = index
            digests[index] = digest
            verdicts.append(None)
        elif content == digest:
            verdicts.append(earlier if earlier is not None else known)
        else:
            where = f"offset {known.offset}" if known else "the same call"
            message = f"{stream} has native_id {name[0]!r} variant {name[1]!r} with other content at {where}"
            raise IdempotencyConflict(
                message, stream=stream, native_id=name[0], variant=name[1], offset=known.offset if known else -1
            )
    return verdicts, digests
