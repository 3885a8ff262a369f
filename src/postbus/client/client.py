"""``Client``: the HTTP API as Python calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from postbus.client.agents import Agents
from postbus.client.calls import ROOT, json_bytes, part
from postbus.client.deliveries import Deliveries
from postbus.client.inbox import Inbox
from postbus.client.sources import Sources
from postbus.client.timers import Timers
from postbus.client.wire import decode_event, decode_leased, decode_receipts
from postbus.model import IdempotencyConflict, Invalid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from datetime import datetime

    from postbus.client.wire import Leased
    from postbus.model import Event, Receipt

__all__ = ["Client"]


class Client(Agents, Inbox, Timers, Sources, Deliveries):
    """A client of one server. ``async with Client(url) as client:`` closes it at the end.

    ``url`` is like ``http://127.0.0.1:7766``, or ``unix:PATH`` for a server on a Unix socket.
    A topic is a full name (``namespace.tenant.name``) or the name of one of ``tenant``'s. Publishing is safe to repeat:
    every event gets a ``native_id`` unless it has one, and is sent again until the server answers or ``patience_s`` is
    over. Raises the server's refusals as the errors they are in ``postbus.model``, and ``Unreachable``.
    """

    # --- topics ---

    async def create_topic(
        self,
        topic: str,
        *,
        partitions: int = 1,
        retention: dict[str, Any] | None = None,
        retention_beats_consumers: bool = False,
        identity_window_s: float | None = None,
        labels: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Register a topic; raises ``Conflict`` when it exists."""
        body = {
            "topic": self._full(topic),
            "partitions": partitions,
            "retention": retention or {},
            "retention_beats_consumers": retention_beats_consumers,
            "identity_window_s": identity_window_s,
            "labels": labels or {},
        }
        return await self._json("POST", "/topics", body)

    async def topics(self, *, tenant: str | None = None) -> list[dict[str, Any]]:
        """Return all topics of a tenant that the key may see."""
        return await self._pages("/topics", "topics", self._whose(tenant))

    async def topic(self, topic: str) -> dict[str, Any]:
        """Return one topic with the extents of its partitions."""
        return await self._json("GET", self._topic(topic))

    async def delete_topic(self, topic: str) -> None:
        """Remove a topic with its events."""
        await self._send("DELETE", self._topic(topic), again=True)

    # --- publishing ---

    async def publish(
        self,
        topic: str,
        payload: Any,
        *,
        source: str | None = None,
        key: str | None = None,
        headers: dict[str, str] | None = None,
        native_id: str | None = None,
        variant: str = "",
        metadata: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        occurred_at: datetime | str | None = None,
        delivery_handle: dict[str, Any] | None = None,
    ) -> Receipt:
        """Publish an event and return once it is durable. ``payload`` is a JSON value, or bytes of JSON."""
        body = self._event(
            {
                "topic": topic,
                "payload": payload,
                "source": source,
                "key": key,
                "headers": headers,
                "native_id": native_id,
                "variant": variant,
                "metadata": metadata,
                "correlation_id": correlation_id,
                "occurred_at": occurred_at,
                "delivery_handle": delivery_handle,
            }
        )
        try:
            answer = await self._send("POST", "/publish", body, again=True)
        except IdempotencyConflict as error:
            error.stream, error.native_id, error.variant = body["topic"], body["native_id"], variant
            raise
        return decode_receipts(answer, many=False)[0]

    async def publish_batch(self, events: Sequence[dict[str, Any]]) -> list[Receipt]:
        """Publish events of one tenant together, all or none; each is a dict of what ``publish`` takes."""
        body = {"events": [self._event(event) for event in events]}
        return decode_receipts(await self._send("POST", "/publish/batch", body, again=True), many=True)

    def _event(self, fields: dict[str, Any]) -> dict[str, Any]:
        made = {name: value for name, value in fields.items() if value is not None}
        if "topic" not in made or "payload" not in fields:
            raise Invalid("an event needs a topic and a payload")
        made["payload"] = json_bytes(fields["payload"])
        for name in {"metadata", "delivery_handle"} & made.keys():
            made[name] = json_bytes(made[name])
        made["topic"] = self._full(str(made["topic"]))
        made.setdefault("native_id", self._clock.new_id())
        return made

    # --- subscriptions ---

    async def create_subscription(
        self,
        subscription: str,
        topic: str,
        *,
        starting_offset: str | int = "latest",
        ack_mode: str = "manual",
        dead_letter_topic: str | None = None,
        ack_timeout_ms: int = 30_000,
        max_attempts: int = 3,
        filter: dict[str, Any] | None = None,  # noqa: A002 - the word of the API
        labels: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Register a subscription whose events are pulled or streamed; raises ``Conflict`` when it exists."""
        body: dict[str, Any] = {
            "id": subscription,
            "topic": self._full(topic),
            **self._whose(None),
            "starting_offset": starting_offset,
            "ack_mode": ack_mode,
            "ack_timeout_ms": ack_timeout_ms,
            "max_attempts": max_attempts,
            "filter": filter or {},
            "labels": labels or {},
        }
        if dead_letter_topic is not None:
            body["dead_letter_topic"] = self._full(dead_letter_topic)
        return await self._json("POST", "/subscriptions", body)

    async def subscriptions(self, *, tenant: str | None = None, topic: str | None = None) -> list[dict[str, Any]]:
        """Return all subscriptions of a tenant that the key may see."""
        chosen = {**self._whose(tenant), "topic": None if topic is None else self._full(topic)}
        return await self._pages("/subscriptions", "subscriptions", chosen)

    async def subscription(self, subscription: str) -> dict[str, Any]:
        """Return one subscription."""
        return await self._json("GET", self._of(subscription))

    async def delete_subscription(self, subscription: str) -> None:
        """Remove a subscription with its place."""
        await self._send("DELETE", self._of(subscription), again=True)

    async def reset(self, subscription: str, to: str | int, *, partition: int | None = None) -> dict[str, Any]:
        """Move a subscription to ``earliest``, ``latest``, an offset or an instant, in one partition or in all."""
        body = {"to": to} | ({} if partition is None else {"partition": partition})
        return await self._json("POST", self._of(subscription, "reset"), body, again=True)

    async def lag(self, subscription: str) -> dict[str, Any]:
        """Return how far a subscription is behind, by partition and in all."""
        return await self._json("GET", self._of(subscription, "lag"))

    # --- consuming ---

    async def pull(self, subscription: str, *, limit: int = 100, wait_s: float = 0.0) -> list[Leased]:
        """Return events under leases; waits up to ``wait_s`` for the first one."""
        body = {"limit": limit, "wait_ms": round(wait_s * 1000)}
        path = self._of(subscription, "pull")
        return decode_leased(await self._send("POST", path, body, again=True, wait_s=wait_s))

    async def ack(self, subscription: str, leased: Iterable[Leased | str]) -> dict[str, Any]:
        """Say that events were handled; raises ``LeaseLost`` when a lease ran out before."""
        return await self._json("POST", self._of(subscription, "ack"), {"lease_ids": _ids(leased)}, again=True)

    async def ack_through(self, subscription: str, partition: int, offset: int) -> dict[str, Any]:
        """Say that everything of a partition up to and including an offset was handled."""
        body = {"partition": partition, "offset": offset}
        return await self._json("POST", self._of(subscription, "ack"), body, again=True)

    async def nack(
        self,
        subscription: str,
        leased: Iterable[Leased | str],
        *,
        delay_s: float | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        """Give events back, to be handed out again after ``delay_s`` or by the policy."""
        body: dict[str, Any] = {"lease_ids": _ids(leased)}
        if delay_s is not None:
            body["delay_ms"] = round(delay_s * 1000)
        if reason is not None:
            body["reason"] = reason
        return await self._json("POST", self._of(subscription, "nack"), body)

    async def extend(
        self, subscription: str, leased: Iterable[Leased | str], *, by_s: float | None = None
    ) -> dict[str, Any]:
        """Keep leases for longer, from now on for ``by_s`` or for the ack timeout."""
        body: dict[str, Any] = {"lease_ids": _ids(leased)}
        if by_s is not None:
            body["by_ms"] = round(by_s * 1000)
        return await self._json("POST", self._of(subscription, "extend"), body, again=True)

    async def deadletter(
        self, subscription: str, partition: int, offset: int, reason: str, *, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Move an event to the dead-letter topic of a subscription. Idempotent."""
        body: dict[str, Any] = {"partition": partition, "offset": offset, "reason": reason}
        if headers is not None:
            body["headers"] = headers
        return await self._json("POST", self._of(subscription, "deadletter"), body, again=True)

    def subscribe(
        self,
        subscription: str,
        topic: str | None = None,
        *,
        start: str | int | None = None,
        last_id: str | None = None,
    ) -> AsyncIterator[Event]:
        """Yield events as they come, for ever; a lost connection is made again and goes on where it was lost.

        A subscription that has committed goes on from there; ``start`` says where a new one begins.
        """
        namespace, tenant = self._tenant.split(".")
        query = {
            "topic": None if topic is None else self._full(topic),
            "from": start,
            "namespace": namespace,
            "tenant": tenant,
        }
        path = f"{ROOT}/subscribe/{part(subscription)}"
        return self._connection.stream(path, query, last_id, "bus.message", lambda data: (decode_event(data),))

    # --- dead letters ---

    async def dead_letters(
        self,
        *,
        tenant: str | None = None,
        subscription: str | None = None,
        topic: str | None = None,
        reason: str | None = None,
        state: str = "open",
    ) -> list[dict[str, Any]]:
        """Return dead letters, oldest first; ``topic`` is a pattern, ``state`` open, replayed, purged or all."""
        chosen = {"subscription": subscription, "topic": topic, "reason": reason, "state": state}
        return await self._pages("/dlq", "letters", {**self._whose(tenant), **chosen})

    async def dead_letter(self, letter: str) -> dict[str, Any]:
        """Return one dead letter."""
        return await self._json("GET", f"/dlq/{part(letter, slashes=True)}")

    async def replay(
        self,
        ids: Sequence[str] | None = None,
        *,
        subscription: str | None = None,
        topic: str | None = None,
        reason: str | None = None,
        per_second: float | None = None,
    ) -> int:
        """Deliver open dead letters again to whom they came from, by id or all that fit; return how many."""
        body = self._letters(ids, subscription, topic, reason)
        if per_second is not None:
            body["per_second"] = per_second
        return int((await self._json("POST", "/dlq/replay", body))["replayed"])

    async def purge(
        self,
        ids: Sequence[str] | None = None,
        *,
        subscription: str | None = None,
        topic: str | None = None,
        reason: str | None = None,
    ) -> int:
        """Put open dead letters away for good, on record, by id or all that fit; return how many."""
        body = {**self._letters(ids, subscription, topic, reason), "confirm": True}
        return int((await self._json("POST", "/dlq/purge", body))["purged"])

    def _letters(self, ids: Sequence[str] | None, *chosen: str | None) -> dict[str, Any]:
        found = dict(zip(("subscription", "topic", "reason"), chosen, strict=True))
        found_ids = {} if ids is None else {"ids": list(ids)}
        return {**self._whose(None), **found_ids, **{name: value for name, value in found.items() if value is not None}}

    # --- schemas ---

    async def register_schema(self, subject: str, schema: Any) -> dict[str, Any]:
        """Register the next version of a JSON Schema."""
        namespace, tenant = self._tenant.split(".")
        body = {"namespace": namespace, "tenant": tenant, "subject": subject, "schema": schema}
        return await self._json("POST", "/schemas", body)

    async def schemas(self, *, tenant: str | None = None) -> list[dict[str, Any]]:
        """Return the subjects of a tenant with their versions."""
        return await self._pages("/schemas", "subjects", self._whose(tenant))

    async def schema(self, subject: str, version: int | str = "latest") -> dict[str, Any]:
        """Return one version of a schema."""
        return await self._json("GET", self._schema(subject, version))

    async def delete_schema(self, subject: str, version: int) -> None:
        """Remove a version that no topic is bound to."""
        await self._send("DELETE", self._schema(subject, version), again=True)

    async def bind_schema(
        self, topic: str, subject: str, version: int | None = None, *, dry_run: bool = False, force: bool = False
    ) -> dict[str, Any]:
        """Have what is published on a topic checked, and say what would have been refused lately.

        ``dry_run``: only say it. ``force``: bind also when something would have been.
        """
        body: dict[str, Any] = {"subject": subject, "dry_run": dry_run, "force": force}
        if version is not None:
            body["version"] = version
        return await self._json("PUT", self._bound(topic), body, again=True)

    async def binding(self, topic: str) -> dict[str, Any]:
        """Return what a topic is bound to; raises ``NotFound`` when it takes any payload."""
        return await self._json("GET", self._bound(topic))

    async def unbind_schema(self, topic: str) -> None:
        """Have it checked no more."""
        await self._send("DELETE", self._bound(topic), again=True)

    # --- looking ---

    async def event(self, event_id: str) -> Event:
        """Return an event by its address."""
        return decode_event(await self._send("GET", f"/events/{part(event_id, slashes=True)}", again=True))

    async def trace(self, correlation_id: str, *, tenant: str | None = None) -> dict[str, Any]:
        """Return the events of a correlation, and which led to which."""
        return await self._json("GET", f"/trace/{part(correlation_id, slashes=True)}", query=self._whose(tenant))

    # --- how ---

    def _of(self, subscription: str, action: str = "") -> str:
        path = f"/subscriptions/{self._place}/{part(subscription)}"
        return f"{path}/{action}" if action else path

    def _schema(self, subject: str, version: int | str) -> str:
        return f"/schemas/{self._place}/{part(subject)}/{part(str(version))}"

    def _topic(self, topic: str) -> str:
        return f"/topics/{part(self._full(topic))}"

    def _bound(self, topic: str) -> str:
        return f"/topics/{'/'.join(map(part, self._full(topic).split('.')))}/schema"


def _ids(leased: Iterable[Leased | str]) -> list[str]:
    found = [one if isinstance(one, str) else one.lease_id for one in leased]
    return [one for one in found if one is not None]
