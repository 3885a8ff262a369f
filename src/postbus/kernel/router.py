"""``MessageRouter``: the immediate path, in memory: hooks around messages, and the channels to the user.

Nothing here is durable. What must not be lost is published on the bus, whose handlers then come here.
"""

from __future__ import annotations

import inspect
import logging
import re
from typing import TYPE_CHECKING, Any

from postbus.kernel.contract import OutgoingMessage, StreamingChannel
from postbus.kernel.topics import SystemTopics
from postbus.model import Conflict, IdempotencyConflict, Invalid, NotFound, Receipt, Trust

if TYPE_CHECKING:
    from collections.abc import Callable

    from postbus.bus import EventBus
    from postbus.kernel.contract import ChannelProvider

__all__ = ["HOOKS", "MessageRouter", "check_hook"]

logger = logging.getLogger("postbus.kernel")

NAME = re.compile("[A-Za-z0-9_-]{1,80}")


class HOOKS:
    """The moments a hook can be called at."""

    USER_MESSAGE = "user_message"
    AGENT_RESPONSE = "agent_response"


def check_hook(event: str) -> str:
    """Refuse a hook that does not exist."""
    if event not in (HOOKS.USER_MESSAGE, HOOKS.AGENT_RESPONSE):
        message = f"there is no hook {event!r}: there are user_message and agent_response"
        raise Invalid(message, hint="topics of the bus are subscribed to with subscribe_event")
    return event


class MessageRouter:
    """Hooks and channels of one kernel."""

    def __init__(self, bus: EventBus, default_channel: str | None = None) -> None:
        self._bus = bus
        self._default = default_channel
        self._hooks: dict[str, list[Callable[..., Any]]] = {}
        self._channels: dict[str, ChannelProvider] = {}
        self.active_channel: str | None = None

    # --- hooks ---

    def subscribe(self, event: str, handler: Callable[..., Any]) -> None:
        """Call a function, plain or async, with a dict at each such moment, in the order of registration."""
        if not callable(handler):
            raise Invalid(f"a hook is a function, not {type(handler).__name__}")
        self._hooks.setdefault(check_hook(event), []).append(handler)

    def unsubscribe(self, event: str, handler: Callable[..., Any]) -> None:
        """Call it no more; raises ``NotFound`` when it is not registered."""
        hooks = self._hooks.get(check_hook(event), [])
        if handler not in hooks:
            raise NotFound(f"this function is no hook of {event}")
        hooks.remove(handler)

    async def fire(self, event: str, payload: dict[str, Any]) -> None:
        """Call the hooks of a moment one after the other, each with a copy; one that fails is logged, no more."""
        for hook in list(self._hooks.get(check_hook(event), ())):
            try:
                result = hook(dict(payload))
                if inspect.isawaitable(result):
                    await result
            except Exception:
                logger.exception("a hook of %s failed: %r", event, hook)

    # --- channels ---

    @property
    def channels(self) -> dict[str, ChannelProvider]:
        """The channels by name, in the order they were attached."""
        return dict(self._channels)

    def attach(self, channel: ChannelProvider) -> None:
        """Add a channel; raises ``Invalid``, and ``Conflict`` when there is one of that name."""
        if channel.channel_id in self._channels:
            raise Conflict(f"there is a channel {channel.channel_id} already")
        name: Any = channel.channel_id
        if not isinstance(name, str) or not NAME.fullmatch(name):
            message = f"{name!r} is no name of a channel"
            raise Invalid(message, hint="letters, digits, _ and -, at most 80")
        self._channels[channel.channel_id] = channel

    def detach(self, channel_id: str) -> None:
        """Remove a channel, if it is there."""
        self._channels.pop(channel_id, None)

    def choose(self, channel_id: str | None = None) -> ChannelProvider:
        """Return the channel of that name; else the one last spoken on, the default one, or the first there is.

        Raises ``NotFound`` when there is none; what waits for one is tried again later.
        """
        if channel_id is not None:
            found = self._channels.get(channel_id)
            if found is None:
                raise NotFound(f"there is no channel {channel_id}", hint="`postbus doctor` shows what was loaded")
            return found
        for name in (self.active_channel, self._default, next(iter(self._channels), None)):
            if name is not None and name in self._channels:
                return self._channels[name]
        raise NotFound("there is no channel to the user", hint="load an extension that provides one")

    async def deliver(self, message: OutgoingMessage) -> None:
        """Hand a message to its channel now; raises what the channel raises."""
        await self.choose(message.channel_id).send(message)

    async def stream(self, channel_id: str | None, session_id: str, text: str) -> None:
        """Show a piece of an answer where the channel can do that; a failure is logged only."""
        try:
            channel = self.choose(channel_id)
            if isinstance(channel, StreamingChannel):
                await channel.send_delta(session_id, text)
        except Exception:
            logger.exception("a piece of an answer could not be shown")

    # --- durable ---

    async def notify_user(
        self,
        text: str,
        channel_id: str | None = None,
        *,
        source: str = "kernel",
        native_id: str | None = None,
        trust: Trust = Trust.TRUSTED,
        **fields: Any,
    ) -> Receipt:
        """Publish ``system.user.notify``; the kernel's handler delivers it. With a ``native_id`` it is said once."""
        payload = {"text": text} if channel_id is None else {"text": text, "channel_id": channel_id}
        try:
            return await self._bus.publish(
                SystemTopics.USER_NOTIFY, source, payload, native_id=native_id, trust=trust, **fields
            )
        except IdempotencyConflict as known:  # said before a crash, in other words: the first ones count
            return Receipt(stream=known.stream, partition=0, offset=known.offset, duplicate=True)
