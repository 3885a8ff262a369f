"""Appending to JetStream: one message with an acknowledgement, or a batch that the server takes as a whole."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from zlib import crc32

import msgspec

from postbus.log.heads import Identity, choose_partition, digest_of, resolve_identities
from postbus.log.jetstream.identities import Identities, conflict
from postbus.log.jetstream.link import ApiError, NoStream, acked
from postbus.log.jetstream.names import identity_hash
from postbus.log.jetstream.registry import EXPECTED, WRONG_LAST
from postbus.log.wire import HEADER, pack
from postbus.model import Durability, LimitExceeded, PostbusError, Receipt, Unreachable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from postbus.clock import Clock
    from postbus.log.jetstream.gates import Gate, Gates
    from postbus.log.jetstream.link import Link
    from postbus.log.jetstream.names import Names
    from postbus.model import Draft, Stream

__all__ = ["BATCH_MAX", "Appending"]

BATCH_MAX = 1000  # the server's own limit
BATCH_FROM = 400  # a batch costs the server some 10 ms; one by one costs it a sync for each, where it does sync
BATCH_FROM_SYNCED = 10
BATCH_BYTES = 16 << 20
BATCHES_AT_ONCE = 16  # of the 50 that the server takes for one stream from all clients
BATCH_ID, BATCH_SEQUENCE, BATCH_COMMIT = "Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit"
TRY_AGAIN = (*WRONG_LAST, 10176, 10210, 10158)  # a batch was abandoned, too many batches, the same message on its way
FRAME_BYTES = 512  # what the headers of a batch and of an expectation take at most
AGAIN_S = 0.02
UNANSWERED_S = 1.0
MESSAGE_ID = "Nats-Msg-Id"  # makes it safe to send again for two minutes


class _Item(msgspec.Struct, gc=False):
    index: int
    draft: Draft
    append_id: str
    subject: str
    headers: dict[str, str]
    body: bytes


class Appending:
    """Appends, and knows what it takes to find out whether an event was here before."""

    def __init__(self, link: Link, names: Names, gates: Gates, clock: Clock, durability: Durability) -> None:
        self._link = link
        self._names = names
        self._gates = gates
        self._clock = clock
        self._durability = durability
        self._turn = 0
        self._batch_from = BATCH_FROM_SYNCED if durability is Durability.FULL else BATCH_FROM
        self._batches = asyncio.Semaphore(BATCHES_AT_ONCE)

    async def append(
        self,
        stream: Stream,
        drafts: Sequence[Draft],
        ids: Sequence[str],
        now_us: int,
        limit: asyncio.Timeout,
        forced: int | None = None,
    ) -> list[Receipt]:
        """See ``Upstream.append``; what is refused leaves nothing, unless somebody else appends it at the same time."""
        if len(drafts) == 1:
            return [await self._append_one(stream, drafts[0], ids[0], now_us, forced)]
        verdicts, _ = resolve_identities(stream.name, drafts, _nobody)
        groups: dict[int, list[_Item]] = {}
        bytes_max = (await self._link.client()).max_payload - FRAME_BYTES
        for index, draft in enumerate(drafts):
            if verdicts[index] is None:
                partition = self._partition(draft, stream.settings.partitions) if forced is None else forced
                groups.setdefault(partition, []).append(_item(index, draft, ids[index], now_us, bytes_max))
        receipts: dict[int, Receipt] = {}
        gates: dict[int, Gate] = {}
        for partition, items in groups.items():
            gate = gates[partition] = await self._gates.get(stream, partition)
            left = await self._without_moved(stream, partition, gate, items, receipts)
            # Conflicts have to be found before anything is written.
            groups[partition] = await self._without_present(stream, partition, left, receipts)
        for partition, items in groups.items():
            for chunk in _chunks(items):
                await self._put(stream, partition, gates[partition], chunk, receipts, now_us)
                self._link.more_time(limit)
        for index, verdict in enumerate(verdicts):
            if isinstance(verdict, int):
                receipts[index] = msgspec.structs.replace(receipts[verdict], duplicate=True)
        return [receipts[index] for index in range(len(drafts))]

    async def _append_one(
        self, stream: Stream, draft: Draft, append_id: str, now_us: int, forced: int | None
    ) -> Receipt:
        item = _item(0, draft, append_id, now_us, (await self._link.client()).max_payload - FRAME_BYTES)
        partition = self._partition(draft, stream.settings.partitions) if forced is None else forced
        gate = await self._gates.get(stream, partition)
        receipts: dict[int, Receipt] = {}
        items = await self._without_moved(stream, partition, gate, [item], receipts)
        await self._put(stream, partition, gate, items, receipts, now_us)
        return receipts[0]

    def _partition(self, draft: Draft, partitions: int) -> int:
        """Return the partition; without a key an identity has one too, so that it is met again."""
        if partitions > 1 and draft.key is None and draft.native_id is not None:
            return crc32(f"{draft.native_id}\0{draft.variant}".encode()) % partitions
        self._turn += 1
        return choose_partition(draft, partitions, self._turn)

    async def _put(
        self, stream: Stream, partition: int, gate: Gate, items: list[_Item], receipts: dict[int, Receipt], now_us: int
    ) -> None:
        """Append items to a partition, without those that turn out to be there."""
        while items:
            outcomes = await self._send(gate, items)
            left: list[_Item] = []
            for item, outcome in zip(items, outcomes, strict=True):
                if isinstance(outcome, int):
                    receipts[item.index] = Receipt(
                        stream.name, partition, outcome - 1, durability=self._durability, created_at_us=now_us
                    )
                elif isinstance(outcome, NoStream) or outcome.number in TRY_AGAIN:
                    left.append(item)
                elif _any_stored(outcomes, receipts):
                    raise Unreachable(f"a part of the events was not taken: {outcome.message}")
                else:
                    raise outcome
            if not left:
                return
            items = await self._without_present(stream, partition, left, receipts)
            if len(items) == len(left):
                self._gates.forget(stream, partition)
                await asyncio.sleep(AGAIN_S)
            gate = await self._gates.get(stream, partition)
            items = await self._without_moved(stream, partition, gate, items, receipts)

    async def _send(self, gate: Gate, items: list[_Item]) -> Sequence[int | NoStream | ApiError]:
        """Send items; returns for each its sequence, or why it was not taken."""
        if self._names.replicas > 1:
            # A cluster drops what comes with a pass that was just changed, and does not say so.
            for item in items:
                item.headers[MESSAGE_ID] = item.append_id
        elif len(items) >= self._batch_from:
            async with self._batches:
                return await self._send_batch(gate, items)
        elif len(items) == 1:
            (item,) = items
            try:
                return [acked((await self._link.ask(f"{gate.put}.{item.subject}", item.body, item.headers)).data)]
            except (NoStream, ApiError) as error:
                return [error]
        messages = [(f"{gate.put}.{item.subject}", item.body, item.headers) for item in items]
        answers = await self._link.ask_each(messages, UNANSWERED_S if self._names.replicas > 1 else None)
        outcomes: list[int | NoStream | ApiError] = []
        for answer in answers:
            try:
                outcomes.append(answer if isinstance(answer, NoStream) else acked(answer.data))
            except ApiError as error:
                outcomes.append(error)
        return outcomes

    async def _send_batch(self, gate: Gate, items: list[_Item]) -> Sequence[int | NoStream | ApiError]:
        """Send items as one batch: the server stores it as a whole, with one sync, or refuses it as a whole."""
        batch = self._clock.new_id()
        messages = [
            (f"{gate.put}.{item.subject}", item.body, {**item.headers, BATCH_ID: batch, BATCH_SEQUENCE: str(number)})
            for number, item in enumerate(items, start=1)
        ]
        for message in messages[:-1]:
            await self._link.tell(*message)
        subject, body, headers = messages[-1]
        try:
            answer = await self._link.ask(subject, body, {**headers, BATCH_COMMIT: "1"})
            last = acked(answer.data)
        except (NoStream, ApiError) as error:
            return [error] * len(items)
        return range(last - len(items) + 1, last + 1)

    # --- who was here -------------------------------------------------------------------------------------------------

    async def _without_moved(
        self, stream: Stream, partition: int, gate: Gate, items: list[_Item], receipts: dict[int, Receipt]
    ) -> list[_Item]:
        """Leave out what was trimmed; must be asked again whenever the gate has changed."""
        identified = [item for item in items if item.draft.native_id is not None]
        if not identified or not (gate.moved or stream.settings.partitions > 1):
            return items
        identities = Identities(self._link, self._names, stream)
        drafts = [item.draft for item in identified]
        try:
            if stream.settings.partitions > 1:
                found = await identities.claim(partition, drafts)
            else:
                found = await identities.moved(drafts)
        except NoStream:
            self._gates.forget(stream, partition)
            await self._gates.info(stream, partition)  # the stream may have been deleted
            raise
        return self._settled(stream, items, identified, found, receipts)

    async def _without_present(
        self, stream: Stream, partition: int, items: list[_Item], receipts: dict[int, Receipt]
    ) -> list[_Item]:
        """Leave out what is in the partition."""
        identified = [item for item in items if item.draft.native_id is not None]
        if not identified:
            return items
        identities = Identities(self._link, self._names, stream)
        found = await identities.present(partition, [item.draft for item in identified])
        return self._settled(stream, items, identified, found, receipts)

    def _settled(
        self,
        stream: Stream,
        items: list[_Item],
        identified: list[_Item],
        found: list[Identity | None],
        receipts: dict[int, Receipt],
    ) -> list[_Item]:
        known: set[int] = set()
        for item, identity in zip(identified, found, strict=True):
            if identity is None:
                continue
            if identity.content != digest_of(item.draft):
                raise conflict(stream.name, item.draft, identity.offset)
            known.add(item.index)
            receipts[item.index] = Receipt(
                stream.name,
                identity.partition,
                identity.offset,
                duplicate=True,
                durability=self._durability,
                created_at_us=identity.created_at_us,
            )
        return [item for item in items if item.index not in known] if known else items


def _any_stored(outcomes: Sequence[int | PostbusError], receipts: dict[int, Receipt]) -> bool:
    """Say whether a call has written something already."""
    return any(isinstance(one, int) for one in outcomes) or not all(one.duplicate for one in receipts.values())


def _nobody(_native_id: str, _variant: str) -> None:
    return None


def _item(index: int, draft: Draft, append_id: str, now_us: int, bytes_max: int) -> _Item:
    header, body = pack(draft, append_id, now_us)
    size = len(header) + len(body)
    if size > bytes_max:
        raise LimitExceeded(
            f"the event takes {size:,} bytes with its headers; the NATS server's max_payload leaves {bytes_max:,}",
            hint="raise max_payload in the server's configuration",
        )
    headers = {HEADER: header.decode("ascii")}
    if draft.native_id is None:
        return _Item(index, draft, append_id, "plain", headers, body)
    headers[EXPECTED] = "0"
    return _Item(index, draft, append_id, f"id.{identity_hash(draft.native_id, draft.variant)}", headers, body)


def _chunks(items: list[_Item]) -> Iterator[list[_Item]]:
    chunk: list[_Item] = []
    size = 0
    for item in items:
        size += len(item.body)
        if chunk and (len(chunk) >= BATCH_MAX or size > BATCH_BYTES):
            yield chunk
            chunk, size = [], len(item.body)
        chunk.append(item)
    if chunk:
        yield chunk
