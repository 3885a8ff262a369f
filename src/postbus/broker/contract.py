"""What a broker and a remote are, and what passes through them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from postbus import strict_json
from postbus.envelope import draft
from postbus.topics import check_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from postbus.broker.listener import Listener
    from postbus.model import Draft, PostbusError, Receipt, SpoolEntry

__all__ = ["Broker", "Message", "Missed", "Remote", "message"]


class Message(msgspec.Struct, frozen=True, gc=False):
    """A live hint: what was published, and where an answer goes if one is expected."""

    topic: str
    payload_json: bytes
    headers_json: bytes | None = None
    reply: str | None = None

    @property
    def payload(self) -> Any:
        """The payload, decoded afresh; raises ``InvalidPayload`` when somebody sent what is not JSON."""
        strict_json.validate(self.payload_json)
        return msgspec.json.decode(self.payload_json)

    @property
    def headers(self) -> dict[str, str]:
        """The headers, decoded afresh; empty when none were given."""
        return {} if self.headers_json is None else msgspec.json.decode(self.headers_json, type=dict[str, str])


class Missed(msgspec.Struct, frozen=True, gc=False):
    """Said to a listener in the place of what it missed: read the log again. ``count`` is None when nobody knows."""

    count: int | None


def message(topic: str, payload: Any, headers: Mapping[str, str] | None = None, reply: str | None = None) -> Message:
    """Return a message whose every part is checked as in an event, or refuse it."""
    checked = draft(topic, "broker", payload, headers=headers)
    return Message(
        checked.topic, checked.payload_json, checked.headers_json, None if reply is None else check_topic(reply)
    )


class Broker(Protocol):
    """Live fan-out. At most once, in order for one publisher and one listener; nothing is kept for who is not there."""

    async def publish(
        self, topic: str, payload: Any, *, headers: Mapping[str, str] | None = None, reply: str | None = None
    ) -> None:
        """Hand a message to every listener whose pattern matches, once each. Never waits for one.

        Raises ``Invalid`` for a bad topic, payload or header, ``Unreachable`` when the broker is not there.
        """

    async def subscribe(self, pattern: str, *, slots: int = 256) -> Listener:
        """Return a listener that gets everything published from now on; close it to end it.

        It outlives outages: afterwards it goes on by itself and is told that it may have missed something. Raises
        ``Invalid`` for a bad pattern.
        """

    async def request(
        self, topic: str, payload: Any, *, timeout_s: float = 5.0, headers: Mapping[str, str] | None = None
    ) -> Message:
        """Publish with a topic for the answer, and return the first answer.

        Raises ``NoResponder`` at once when nobody listens, ``RequestTimeout`` when no answer came in time.
        """

    async def close(self) -> None:
        """End every listener. Idempotent."""


class Remote(Protocol):
    """A log or broker elsewhere that keeps what it acknowledges."""

    async def send(self, stream: str, identity: str, event: Draft) -> Receipt:
        """Return once the remote has the event; an identity that it has already is acknowledged and not kept twice.

        Raises ``Unreachable`` when it is not known to have arrived: an outage. Any other ``PostbusError`` is a refusal
        of this event.
        """

    async def send_many(self, entries: Sequence[SpoolEntry]) -> tuple[int, PostbusError | None]:
        """Send events in order; return how many of the first ones are acknowledged, and what stopped the next one.

        Nothing is kept behind a gap: once one is not taken, none of the later ones is, unless the remote had it
        already. The error is as in ``send``; None beside fewer than all means: go on with the rest.
        """

    async def known(self, entries: Sequence[SpoolEntry]) -> set[str]:
        """Return the identities among these that the remote has already, however long ago it took them."""

    def watch(self, came_up: Callable[[], None]) -> None:
        """Have this called whenever the remote can be reached again."""
