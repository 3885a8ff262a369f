"""Deliveries: replies that go back where events came from."""

from __future__ import annotations

from typing import Any

from postbus.client.calls import Calls, json_bytes, part
from postbus.client.wire import Item
from postbus.model import Invalid

__all__ = ["Deliveries"]

To = Item | dict[str, Any] | str


class Deliveries(Calls):
    """The calls about replies. They go ``to`` where an item came from, a delivery handle, or an event by its id.

    A reply is accepted once under a ``key``; without one each call makes its own.
    """

    async def send_reply(self, to: To, payload: Any, *, key: str | None = None) -> dict[str, Any]:
        """Have a reply carried: text for people, or any JSON. It is durable when this returns."""
        return await self._accepted("send", to, key, {"payload": json_bytes(payload)})

    async def invoke_action(
        self, to: To, action: str, arguments: dict[str, Any] | None = None, *, key: str | None = None
    ) -> dict[str, Any]:
        """Have something else done than a reply, like closing an issue. It is durable when this returns."""
        return await self._accepted("invoke", to, key, {"action": action, "arguments": json_bytes(arguments or {})})

    async def actions(self, to: To) -> list[dict[str, Any]]:
        """Return what can be done; the first is what sending a reply does."""
        body = {**_to(to), **self._whose(None)}
        found: list[dict[str, Any]] = (await self._json("POST", "/deliveries/actions", body, again=True))["actions"]
        return found

    async def deliveries(self, *, tenant: str | None = None, state: str | None = None) -> list[dict[str, Any]]:
        """Return all replies, newest first; ``state`` is accepted, sent or failed."""
        return await self._pages("/deliveries", "deliveries", {**self._whose(tenant), "state": state})

    async def delivery(self, delivery: str) -> dict[str, Any]:
        """Return a reply and what became of it."""
        return await self._json("GET", f"/deliveries/{part(delivery)}", query=self._whose(None))

    async def delivery_attempts(self, delivery: str) -> list[dict[str, Any]]:
        """Return every try of a reply, oldest first."""
        found = await self._json("GET", f"/deliveries/{part(delivery)}/attempts", query=self._whose(None))
        attempts: list[dict[str, Any]] = found["attempts"]
        return attempts

    async def retry_delivery(self, delivery: str) -> dict[str, Any]:
        """Try a failed reply again; raises ``Conflict`` when it did not fail."""
        return await self._json("POST", f"/deliveries/{part(delivery)}/retry", query=self._whose(None))

    async def _accepted(self, verb: str, to: To, key: str | None, what: dict[str, Any]) -> dict[str, Any]:
        named = self._clock.new_id() if key is None else key
        body = {**what, **_to(to), "key": named, **self._whose(None)}
        return await self._json("POST", f"/deliveries/{verb}", body, again=True)


def _to(to: To) -> dict[str, Any]:
    if isinstance(to, str):
        return {"event": to}
    handle = to.delivery_handle if isinstance(to, Item) else to
    if handle is None:
        raise Invalid("the item has no delivery handle: nobody waits for a reply where it came from")
    return {"handle": handle}
