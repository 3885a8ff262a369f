"""Feeding a log from the driver: pages of checked events that tasks have made, appended in order, once each.

Tasks read, check and encode, the driver appends: the order is kept, a rate can be held, and the log may be a folder
that only the driver's machine has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from postbus.clock import SystemClock
from postbus.log import open_log
from postbus.model import Draft, IdempotencyConflict, Receipt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from postbus.clock import Clock
    from postbus.log import Log

__all__ = ["PAGE", "PAGE_SCHEMA", "Fed", "Page", "Refused", "feed"]

PAGE = 1_000
PAGE_SCHEMA = "page binary"


class Refused(msgspec.Struct, frozen=True):
    """A row that did not become an event: where it stood, why not, and the row itself."""

    place: str
    reason: str
    row: str


class Page(msgspec.Struct, frozen=True):
    """What a task hands to the driver: events and where each came from, rows it refused, how much work that was."""

    drafts: list[Draft]
    places: list[str]
    refused: list[Refused]
    work: int


class Fed(msgspec.Struct, kw_only=True):
    """What was appended, what was there already, and what was refused."""

    appended: int = 0
    duplicates: int = 0
    refused: int = 0


async def feed(
    pages: Iterable[Any],
    data: str,
    stream: str,
    *,
    create: bool = True,
    rate: float | None = None,
    refuse: Callable[[list[Refused]], None] = lambda _rows: None,
    progress: Callable[[int], None] = lambda _work: None,
    clock: Clock | None = None,
) -> Fed:
    """Append the pages in their order, at most ``rate`` events a second; ``refuse`` gets what did not become an event.

    ``progress`` gets the work done so far. Safe to run again after any failure: every event has its identity.
    """
    clock = clock or SystemClock()
    decoder = msgspec.msgpack.Decoder(Page)
    fed, work = Fed(), 0
    log = await open_log(data, clock, create=create)
    try:
        if create:
            await log.ensure_stream(stream)
        began = clock.monotonic_s()
        for row in pages:
            page = decoder.decode(bytes(row.page))
            refused = list(page.refused)
            size = PAGE if rate is None else max(1, min(PAGE, int(rate / 10)))
            for start in range(0, len(page.drafts), size):
                some = slice(start, start + size)
                receipts, conflicts = await _append(log, stream, page.drafts[some], page.places[some])
                refused += conflicts
                again = sum(receipt.duplicate for receipt in receipts)
                fed.duplicates += again
                fed.appended += len(receipts) - again
                if rate is not None:
                    await clock.sleep(max(0.0, began + fed.appended / rate - clock.monotonic_s()))
            if refused:
                fed.refused += len(refused)
                refuse(refused)
            work += page.work
            progress(work)
    finally:
        await log.close()
    return fed


async def _append(log: Log, stream: str, drafts: list[Draft], places: list[str]) -> tuple[list[Receipt], list[Refused]]:
    """Append a page; if an identity in it is taken by other content, append the others one by one."""
    try:
        return await log.append(stream, drafts), []
    except IdempotencyConflict:
        receipts: list[Receipt] = []
        refused = []
        for draft, place in zip(drafts, places, strict=True):
            try:
                receipts += await log.append(stream, [draft])
            except IdempotencyConflict as error:
                refused.append(Refused(place, error.message, draft.payload_json.decode()))
        return receipts, refused
