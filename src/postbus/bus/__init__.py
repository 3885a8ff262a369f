"""The event bus: publish, subscribe, dispatch, recover."""

from postbus.bus.bus import EventBus
from postbus.bus.context import Context

__all__ = ["Context", "EventBus"]
