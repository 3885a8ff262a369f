"""A remote that is kept in memory and can be away, refuse, and lose its answers; and what relays are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from postbus.envelope import draft
from postbus.model import Draft, LimitExceeded, PostbusError, Receipt, SpoolEntry, Unreachable

__all__ = ["STREAM", "MemoryRemote", "numbered"]

STREAM = "local.default.orders"


def numbered(number: int, topic: str = "orders.paid") -> Draft:
    return draft(topic, "shop", number)


class MemoryRemote:
    """See ``Remote``. Takes an event, and then may lose the answer."""

    def __init__(self) -> None:
        self.kept: list[Draft] = []
        self.identities: dict[str, int] = {}
        self.away = False
        self.answers_lost = 0
        self.refuses: Callable[[Draft], bool] = lambda _: False
        self.sent = 0
        self.asked = 0
        self._watchers: list[Callable[[], None]] = []

    def watch(self, came_up: Callable[[], None]) -> None:
        self._watchers.append(came_up)

    def come_back(self) -> None:
        self.away = False
        for told in self._watchers:
            told()

    async def send(self, stream: str, identity: str, event: Draft) -> Receipt:
        self.sent += 1
        if self.away:
            raise Unreachable("away")
        if self.refuses(event):
            raise LimitExceeded("too large for this remote")
        duplicate = identity in self.identities
        if not duplicate:
            self.identities[identity] = len(self.kept)
            self.kept.append(event)
        if self.answers_lost:
            self.answers_lost -= 1
            raise Unreachable("no answer")
        return Receipt(stream, 0, self.identities[identity], duplicate)

    async def send_many(self, entries: Sequence[SpoolEntry]) -> tuple[int, PostbusError | None]:
        for number, entry in enumerate(entries):
            try:
                await self.send(entry.stream, entry.identity, entry.draft)
            except PostbusError as error:
                return number, error
        return len(entries), None

    async def known(self, entries: Sequence[SpoolEntry]) -> set[str]:
        self.asked += 1
        if self.away:
            raise Unreachable("away")
        return {entry.identity for entry in entries} & set(self.identities)

    @property
    def payloads(self) -> list[int]:
        return [int(event.payload_json) for event in self.kept]
