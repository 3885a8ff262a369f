"""Who was here, for what the message in a partition cannot say.

The identity of an event is in its subject, and the server refuses a second message on it. Beside that, a JetStream
stream keeps identities whose events were trimmed, and for streams with several partitions which of them an identity
belongs to.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from postbus.log.heads import Identity, digest_of
from postbus.log.jetstream.link import ApiError, NoStream, parsed
from postbus.log.jetstream.names import identity_hash
from postbus.log.jetstream.reading import SEQUENCE, page, sequence_of
from postbus.log.jetstream.registry import EXPECTED, WRONG_LAST, last_message
from postbus.log.wire import HEADER, unpack
from postbus.model import IdempotencyConflict

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from nats.aio.msg import Msg

    from postbus.log.jetstream.link import Link
    from postbus.log.jetstream.names import Names
    from postbus.model import Draft, Stream

__all__ = ["Identities", "conflict"]

AT_ONCE = 256
SUBJECTS = 500


class _Moved(msgspec.Struct, array_like=True, frozen=True):
    """Where an identity belongs; the rest is known once its event was trimmed."""

    partition: int
    offset: int | None = None
    created_at_us: int = 0
    content: str = ""


class Identities:
    """The identities of one stream."""

    def __init__(self, link: Link, names: Names, stream: Stream) -> None:
        self._link = link
        self._names = names
        self._stream = stream

    async def claim(self, partition: int, drafts: Sequence[Draft]) -> list[Identity | None]:
        """Say where identities belong before their events are appended; returns the ones whose events were trimmed.

        Raises ``IdempotencyConflict`` for one that belongs to another partition: its key was another.
        """
        body = msgspec.json.encode(_Moved(partition))
        return await self._each(drafts, lambda draft: self._claim(partition, draft, body))

    async def moved(self, drafts: Sequence[Draft]) -> list[Identity | None]:
        """Return the identities whose events were trimmed."""
        return await self._each(drafts, self._look)

    async def present(self, partition: int, drafts: Sequence[Draft]) -> list[Identity | None]:
        """Return the identities whose events are in the partition."""
        kept = self._names.kept(self._stream, partition)
        subjects = [f"{kept}.id.{_hash(draft)}" for draft in drafts]
        found: dict[str, Identity] = {}
        for start in range(0, len(subjects), SUBJECTS):
            request = {"multi_last": subjects[start : start + SUBJECTS], "batch": SUBJECTS}
            name = self._names.partition(self._stream, partition)
            try:
                messages, _ = await self._link.ask_many(f"$JS.API.DIRECT.GET.{name}", msgspec.json.encode(request))
            except NoStream:
                continue
            for message in messages:
                headers = message.headers or {}
                found[headers.get("Nats-Subject", "")] = _identity(partition, message)
        return [found.get(subject) for subject in subjects]

    async def move(self, partition: int, before: int, went_on: Callable[[], None]) -> bool:
        """Keep the identities of events below an offset, because they will be trimmed; False when there are none."""
        name, sequence, more, any_moved = self._names.partition(self._stream, partition), 1, 1, False
        while more and sequence <= before:
            messages, more = await page(self._link, name, sequence, before - sequence + 1)
            for message in messages:
                sequence = sequence_of(message, sequence) + 1
            kept = [one for message in messages if (one := self._record(partition, message)) is not None]
            any_moved = any_moved or bool(kept)
            for start in range(0, len(kept), AT_ONCE):
                for answer in await asyncio.gather(*(self._link.ask(*one) for one in kept[start : start + AT_ONCE])):
                    parsed(answer.data)
                went_on()
        return any_moved

    def _record(self, partition: int, message: Msg) -> tuple[str, bytes] | None:
        header = (message.headers or {}).get(HEADER)
        carried = unpack(header.encode(), message.data) if header else None
        if carried is None or carried.draft.native_id is None:
            return None
        identity = _identity(partition, message)
        record = _Moved(partition, identity.offset, identity.created_at_us, identity.content.hex())
        return self._names.identity(self._stream, _hash(carried.draft)), msgspec.json.encode(record)

    async def _claim(self, partition: int, draft: Draft, body: bytes) -> Identity | None:
        try:
            answer = await self._link.ask(self._names.identity(self._stream, _hash(draft)), body, {EXPECTED: "0"})
            parsed(answer.data)
        except ApiError as error:
            if error.number not in WRONG_LAST:
                raise
        else:
            return None
        record = await self._get(draft)
        if record is None:
            return None
        if record.offset is not None:
            return _as_identity(record)
        if record.partition != partition:
            (there,) = await self.present(record.partition, [draft])
            raise conflict(self._stream.name, draft, there.offset if there else -1)
        return None

    async def _look(self, draft: Draft) -> Identity | None:
        record = await self._get(draft)
        return None if record is None or record.offset is None else _as_identity(record)

    async def _each(
        self, drafts: Sequence[Draft], one: Callable[[Draft], Coroutine[Any, Any, Identity | None]]
    ) -> list[Identity | None]:
        found: list[Identity | None] = []
        for start in range(0, len(drafts), AT_ONCE):
            found += await asyncio.gather(*(one(draft) for draft in drafts[start : start + AT_ONCE]))
        return found

    async def _get(self, draft: Draft) -> _Moved | None:
        subject = self._names.identity(self._stream, _hash(draft))
        found = await last_message(self._link, self._names.identities(self._stream), subject)
        return None if found is None else msgspec.json.decode(found[2], type=_Moved)


def conflict(stream: str, draft: Draft, offset: int) -> IdempotencyConflict:
    """Return the refusal of an identity that is there with other content."""
    native_id, variant = draft.native_id or "", draft.variant
    where = f"offset {offset}" if offset >= 0 else "another partition"
    return IdempotencyConflict(
        f"{stream} has native_id {native_id!r} variant {variant!r} with other content at {where}",
        stream=stream,
        native_id=native_id,
        variant=variant,
        offset=offset,
    )


def _hash(draft: Draft) -> str:
    return identity_hash(draft.native_id or "", draft.variant)


def _as_identity(record: _Moved) -> Identity:
    return Identity(record.partition, record.offset or 0, record.created_at_us, bytes.fromhex(record.content))


def _identity(partition: int, message: Msg) -> Identity:
    """Return who a stored message is; one of somebody else on our subject is like nobody's content."""
    headers = message.headers or {}
    carried = unpack(headers.get(HEADER, "").encode(), message.data)
    offset = int(headers.get(SEQUENCE, "0")) - 1
    if carried is None:
        return Identity(partition, offset, 0, b"")
    return Identity(partition, offset, carried.created_at_us, digest_of(carried.draft))
