"""Inboxes: items read, waited for, watched and acked; messages to agents, and how far they have come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from postbus.client.calls import ROOT, Calls, json_bytes, part
from postbus.client.wire import decode_entries, decode_item, decode_items

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from postbus.client.wire import Item

__all__ = ["Inbox"]


class Inbox(Calls):
    """The calls about inboxes. An item or a digest is named by its id; an item may be given itself."""

    async def read_inbox(
        self, agent: str, *, after: Item | str | None = None, limit: int = 100, include_acked: bool = False
    ) -> list[Item]:
        """Return items in their order, those not acked unless asked otherwise."""
        query = {"after": _id(after), "limit": limit, "include_acked": include_acked}
        return decode_items(await self._send("GET", self._inbox(agent), query=query, again=True))

    async def item(self, agent: str, item: str) -> Item:
        """Return one item."""
        return decode_item(await self._send("GET", self._inbox(agent, f"items/{part(item)}"), again=True))

    async def inbox_entries(self, agent: str, *, limit: int = 100) -> tuple[list[dict[str, Any]], list[Item]]:
        """Return the digests that are not acked, and the items in none."""
        path = self._inbox(agent, "entries")
        return decode_entries(await self._send("GET", path, query={"limit": limit}, again=True))

    async def flush_inbox(self, agent: str) -> tuple[list[dict[str, Any]], list[Item]]:
        """Show what waits in digests now; return what ``inbox_entries`` does."""
        return decode_entries(await self._send("POST", self._inbox(agent, "flush"), again=True))

    async def wait_inbox(
        self, agent: str, *, wait_s: float = 30.0, after: Item | str | None = None, limit: int = 100
    ) -> list[Item]:
        """Return items that are not acked as soon as there are any; none when the time is over first."""
        query = {"timeout_ms": round(wait_s * 1000), "after": _id(after), "limit": limit}
        path = self._inbox(agent, "wait")
        return decode_items(await self._send("GET", path, query=query, again=True, wait_s=wait_s))

    def watch_inbox(self, agent: str, *, after: Item | str | None = None) -> AsyncIterator[Item]:
        """Yield the unacked items there are, then new ones as they come, for ever, each once.

        A lost connection is made again and goes on after the last item. Raises ``NotFound`` once the agent is removed.
        """
        path = ROOT + self._inbox(agent, "watch")
        return self._connection.stream(path, {"after": _id(after)}, None, "inbox.items", decode_items)

    async def ack_inbox(
        self,
        agent: str,
        *,
        through: Item | str | None = None,
        items: Iterable[Item | str] | None = None,
        everything: bool = False,
    ) -> int:
        """Ack up to an item or digest, some of them, or everything, exactly one of these; return how many became acked.

        An ack whose answer was lost is sent again, and then counts what was left. ``everything`` is not: it would take
        with it what has come since.
        """
        body: dict[str, Any] = {}
        if through is not None:
            body["through"] = _id(through)
        if items is not None:
            body["items"] = [_id(one) for one in items]
        if everything:
            body["all"] = True
        path = self._inbox(agent, "ack")
        return int((await self._json("POST", path, body, again=not everything))["acked"])

    async def send_message(self, agent: str, message: Any, *, sender: str | None = None) -> dict[str, Any]:
        """Put a message into an inbox: text, or another JSON value; return its ``item`` and its ``event``.

        Nothing would know a second one from the first, so it is not sent again when it may have arrived.
        """
        body = {"message": json_bytes(message)} | ({} if sender is None else {"sender": sender})
        return await self._json("POST", self._inbox(agent, "messages"), body)

    async def receipts(self, event_id: str) -> list[dict[str, Any]]:
        """Return how far an event has come in each inbox it went to."""
        found: list[dict[str, Any]] = (await self._json("GET", f"/receipts/{part(event_id, slashes=True)}"))["receipts"]
        return found

    def _inbox(self, agent: str, action: str = "") -> str:
        path = f"/agents/{self._place}/{part(agent)}/inbox"
        return f"{path}/{action}" if action else path


def _id(item: Item | str | None) -> str | None:
    return item if item is None or isinstance(item, str) else item.id
