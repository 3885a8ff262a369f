"""Appending events that have an identity: everybody who waits shares one look at the end of the log."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import KafkaError

from postbus.log.heads import Identity, resolve_identities
from postbus.log.kafka import names
from postbus.log.kafka.extents import offsets
from postbus.log.kafka.identities import Identities
from postbus.log.kafka.index import Row
from postbus.log.kafka.link import END
from postbus.log.kafka.records import Looked, record_of
from postbus.model import Draft, Durability, IdempotencyConflict, NotFound, PostbusError, Receipt

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from postbus.log.kafka.index import Index
    from postbus.log.kafka.link import Link
    from postbus.log.kafka.posting import Record
    from postbus.model import Stream

__all__ = ["Call", "Line"]


class Call:
    """One append: what was given, and the receipts it gets."""

    def __init__(self, drafts: Sequence[Draft], ids: Sequence[str], now_us: int, partition: int | None = None) -> None:
        self.drafts = drafts
        self.partition = partition
        self.ids = ids
        self.now_us = now_us
        self.answer: asyncio.Future[list[Receipt]] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()

    def fail(self, error: Exception) -> None:
        """Answer with an error, unless nobody waits any more."""
        if not self.answer.done():
            self.answer.set_exception(error)

    @property
    def names(self) -> set[tuple[str, str]]:
        """Its identities."""
        return {(draft.native_id, draft.variant) for draft in self.drafts if draft.native_id is not None}


class _New(NamedTuple):
    call: Call
    at: int
    partition: int
    digest: bytes


class Line:
    """The appends of one stream that have identities, in rounds."""

    def __init__(
        self,
        link: Link,
        identities: Identities,
        prefix: str,
        stream: Stream,
        place: Callable[[Draft], int],
        refusal: Callable[[KafkaError], Awaitable[PostbusError]],
    ) -> None:
        self._link = link
        self._identities = identities
        self._stream = stream
        self._topic = names.topic_of(prefix, stream)
        self._place = place
        self._refusal = refusal
        self._waiting: list[Call] = []
        self._open: dict[Call, None] = {}
        self._task: asyncio.Task[None] | None = None
        self.durability = Durability.RELAXED

    async def append(self, call: Call) -> list[Receipt]:
        """Wait for the receipts. Raises ``Unreachable`` when that takes too long."""
        self._waiting.append(call)
        self._open[call] = None
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())
        return await call.answer

    async def settled(self, ids: Sequence[str]) -> None:
        """Wait until no append with these ids goes on any more. Raises ``Unreachable``."""
        for call in list(self._open):
            if not set(ids).isdisjoint(call.ids) and not await self._link.clock.wait(call.ended, self._link.answer_s):
                raise self._link.lost()

    async def _work(self) -> None:
        while self._waiting:
            calls, taken = [], set[tuple[str, str]]()
            for call in self._waiting:
                if call.names & taken:  # has to see what became of the one before it
                    break
                taken |= call.names
                calls.append(call)
            del self._waiting[: len(calls)]
            try:
                async with self._identities.lock(self._topic):
                    await self._round(calls)
            except Exception as error:  # noqa: BLE001 - the callers get it
                for call in calls:
                    call.fail(error)
            finally:
                for call in calls:
                    del self._open[call]
                    call.ended.set()

    async def _round(self, calls: list[Call]) -> None:
        partitions = range(self._stream.settings.partitions)
        ends = await offsets(self._link, self._topic, partitions, END)
        if ends is None:
            raise NotFound(f"there is no stream {self._stream.name} with epoch {self._stream.epoch}")
        await self._identities.catch_up(self._stream, ends)
        index = await self._identities.index()
        verdicts: dict[Call, list[Identity | int | None]] = {}
        new: list[_New] = []
        for call in calls:
            if call.answer.done():  # nobody waits for it any more
                continue
            try:
                verdict, digests = resolve_identities(self._stream.name, call.drafts, self._lookup(index, call.now_us))
            except IdempotencyConflict as error:
                call.fail(error)
                continue
            verdicts[call] = verdict
            new += (
                _New(call, at, self._place(draft) if call.partition is None else call.partition, digests.get(at, b""))
                for at, (draft, known) in enumerate(zip(call.drafts, verdict, strict=True))
                if known is None
            )
        sending = await self._link.send(self._records(new, ends), [one.call.ids[one.at] for one in new])
        places: dict[tuple[Call, int], int] = {}
        for one, said in zip(new, sending.outcomes, strict=True):
            if isinstance(said, KafkaError):
                one.call.fail(await self._refusal(said))
            else:
                places[one.call, one.at] = said
        await self._learn(index, new, places, ends)
        for call, verdict in verdicts.items():
            if not call.answer.done():
                self._answer(index, call, verdict, {one.at: one for one in new if one.call is call}, places)

    def _records(self, new: list[_New], ends: list[int]) -> list[Record]:
        records, expected = [], list(ends)
        for call, at, partition, _ in new:
            draft = call.drafts[at]
            looked = None if draft.native_id is None else Looked(ends[partition], expected[partition])
            expected[partition] += 1
            records.append(record_of(self._topic, partition, draft, call.ids[at], call.now_us, looked))
        return records

    async def _learn(self, index: Index, new: list[_New], places: dict[tuple[Call, int], int], ends: list[int]) -> None:
        """Take our own events into the index: as they were sent when nothing came between, else by reading."""
        for partition, end in enumerate(ends):
            mine = [(one, places[one.call, one.at]) for one in new if one.partition == partition]
            mine = [(one, offset) for one, offset in mine if offset >= 0]
            if not mine:
                continue
            last = max(offset for _, offset in mine)
            if [offset for _, offset in mine] == list(range(end, last + 1)):
                rows = [
                    Row(
                        draft.native_id,
                        draft.variant,
                        Identity(partition, offset, one.call.now_us, one.digest),
                        last + 1,
                    )
                    for one, offset in mine
                    if (draft := one.call.drafts[one.at]).native_id is not None
                ]
                index.add(self._topic, partition, last + 1, rows)
            else:
                upto = [last + 1 if other == partition else 0 for other in range(len(ends))]
                await self._identities.catch_up(self._stream, upto)

    def _lookup(self, index: Index, now_us: int) -> Callable[[str, str], Identity | None]:
        window = self._stream.settings.identity_window_s

        def lookup(native_id: str, variant: str) -> Identity | None:
            known = index.get(self._topic, native_id, variant)
            if known is not None and window is not None and known.created_at_us < now_us - window * 1_000_000:
                return None
            return known

        return lookup

    def _answer(
        self,
        index: Index,
        call: Call,
        verdict: list[Identity | int | None],
        new: dict[int, _New],
        places: dict[tuple[Call, int], int],
    ) -> None:
        receipts: list[Receipt] = []
        for at, (draft, known) in enumerate(zip(call.drafts, verdict, strict=True)):
            if isinstance(known, Identity):
                receipts.append(self._duplicate(known))
            elif known is not None:
                first = receipts[known]
                receipts.append(
                    Receipt(first.stream, first.partition, first.offset, True, first.durability, first.created_at_us)
                )
            else:
                one, offset = new[at], places[call, at]
                found = None if draft.native_id is None else index.get(self._topic, draft.native_id, draft.variant)
                if found is None or (found.partition, found.offset) == (one.partition, offset):
                    receipts.append(
                        Receipt(self._stream.name, one.partition, offset, False, self.durability, call.now_us)
                    )
                elif found.content == one.digest:  # somebody else was first by a moment
                    receipts.append(self._duplicate(found))
                else:
                    call.fail(_conflict(self._stream.name, draft, found))
                    return
        call.answer.set_result(receipts)

    def _duplicate(self, known: Identity) -> Receipt:
        return Receipt(self._stream.name, known.partition, known.offset, True, self.durability, known.created_at_us)


def _conflict(stream: str, draft: Draft, found: Identity) -> IdempotencyConflict:
    native_id = draft.native_id or ""
    return IdempotencyConflict(
        f"{stream} has native_id {native_id!r} variant {draft.variant!r} with other content at offset {found.offset}",
        stream=stream,
        native_id=native_id,
        variant=draft.variant,
        offset=found.offset,
    )
