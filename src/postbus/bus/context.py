"""What a handler may do besides looking at its event: publish what follows from it, reply, run a side effect once."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from postbus import strict_json
from postbus.model import Invalid, LoopDetected, Trust

if TYPE_CHECKING:
    from collections.abc import Callable

    from postbus.bus.bus import EventBus
    from postbus.log.sqlite import SqliteLog, Transaction
    from postbus.model import Event, Receipt

__all__ = ["CAUSATION", "HOPS", "Context", "current", "derivation", "lower"]

CAUSATION = "postbus.causation_id"
HOPS = "postbus.hops"
KEY_CHARS_MAX = 200

current: ContextVar[Context | None] = ContextVar("postbus_delivery", default=None)
"""The delivery whose handler is running, if one is: what it publishes derives from its event."""

BEGUN = """
    SELECT result FROM once_results
    WHERE stream_id = ? AND partition = ? AND "offset" = ? AND consumer = ? AND key = ?
"""
BEGIN = "INSERT INTO once_results VALUES (?, ?, ?, ?, ?, NULL, ?)"
END = """
    UPDATE once_results SET result = ?
    WHERE stream_id = ? AND partition = ? AND "offset" = ? AND consumer = ? AND key = ?
"""
UNDO = 'DELETE FROM once_results WHERE stream_id = ? AND partition = ? AND "offset" = ? AND consumer = ? AND key = ?'


class Context:
    """One delivery: its event, its attempt, and the bus it came from."""

    __slots__ = ("_log", "bus", "event", "subscription")

    def __init__(self, bus: EventBus, log: SqliteLog, event: Event, subscription: str) -> None:
        self.bus = bus
        self.event = event
        self.subscription = subscription
        self._log = log

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return self.event.attempt

    async def publish(self, topic: str, payload: Any, **fields: Any) -> Receipt:
        """Publish an event that derives from this one; the source is the subscription unless given."""
        source = fields.pop("source", self.subscription)
        return await self.bus.publish(topic, source, payload, **fields)

    async def reply(self, payload: Any) -> Receipt:
        """Answer the request this event is."""
        return await self.bus.reply(self.event, payload)

    async def once(self, key: str, effect: Callable[[], Any]) -> Any:
        """Run a side effect at most once per key for this event and subscription, over all attempts.

        Returns its result (a JSON value), also on later attempts, which do not run it again. An effect that raises has
        not happened and may be tried again. If the process ends, or the handler is cancelled, between the effect's
        start and the record of its end, later attempts return None without running it: at most once, not at least
        once. Raises ``Invalid`` for a bad key, and for a result that is no JSON value: the effect has happened then.
        """
        if not 1 <= len(key) <= KEY_CHARS_MAX:
            raise Invalid(f"the key of a side effect has 1 to {KEY_CHARS_MAX} characters, not {len(key)}")
        event = self.event

        def begin(tx: Transaction) -> tuple[bool, bytes | None]:
            where = self._where(tx, key)
            found = tx.db.execute(BEGUN, where).fetchone()
            if found is None:
                tx.db.execute(BEGIN, (*where, tx.now_us))
            return found is not None, found[0] if found else None

        known, result = await self._log.transact(begin)
        if known:
            return None if result is None else strict_json.parse(result)
        try:
            value = effect()
            if inspect.isawaitable(value):
                value = await value
        except Exception:
            await self._log.transact(lambda tx: tx.run(UNDO, self._where(tx, key)))
            raise
        try:
            encoded = strict_json.encode(value)
        except Invalid as error:
            message = f"the side effect {key} of {event.id} has run, but its result is no JSON value: {error.message}"
            raise Invalid(message, hint="return a JSON value, or nothing") from error
        await self._log.transact(lambda tx: tx.run(END, (encoded, *self._where(tx, key))))
        return value

    def _where(self, tx: Transaction, key: str) -> tuple[Any, ...]:
        event = self.event
        return (tx.stream(event.stream).stream_id, event.partition, event.offset, self.subscription, key)


def derivation(context: Context, max_hops: int) -> tuple[str, dict[str, str]]:
    """Return the correlation and the headers of an event that derives from the one being handled.

    Raises ``LoopDetected`` when the chain is longer than ``max_hops``.
    """
    event = context.event
    hops = int(event.headers.get(HOPS, "0")) + 1 if event.headers_json else 1
    if hops > max_hops:
        message = f"event {event.id} derives from {hops - 1} others, more than max_hops={max_hops}"
        raise LoopDetected(message, hint="two subscriptions may be answering each other")
    return event.correlation_id or event.id, {CAUSATION: event.id, HOPS: str(hops)}


def lower(trust: Trust, inherited: str) -> Trust:
    """Return the trust of an event that derives from another: nothing becomes more trusted by being passed on."""
    return Trust.UNTRUSTED if inherited == Trust.UNTRUSTED.value else trust
