"""An event as filters see it: decoded when first asked for, once for all filters that look at it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from postbus.model import Event

__all__ = ["STEPS_MAX", "Fault", "View"]

STEPS_MAX: Final = 1_000_000  # about a quarter of a second

_READ: dict[str, Callable[[Event], Any]] = {
    "payload": lambda event: event.payload,
    "metadata": lambda event: event.metadata,
    "headers": lambda event: event.headers,
    "variant": lambda event: event.variant,
    "source": lambda event: event.source,
    "key": lambda event: event.key,
    "occurred_at": lambda event: event.occurred_at,
}


class Fault(Exception):
    """An expression has no value for this event. Never leaves the room."""


class View:
    """The variables of an expression over one event. Not to be shared between threads, nothing in it to be changed."""

    payload: Any
    metadata: dict[str, Any]
    headers: dict[str, str]
    topic: str
    variant: str
    source: str
    key: str | None
    occurred_at: datetime

    def __init__(self, event: Event) -> None:
        self.event = event
        self.topic = event.topic
        self.steps = STEPS_MAX
        self.locals: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Decode on the first access; later ones find the attribute and do not come here."""
        try:
            read = _READ[name]
        except KeyError:
            raise AttributeError(name) from None
        value = read(self.event)
        self.__dict__[name] = value
        return value

    def spend(self, steps: int) -> None:
        """Count work that grows with the data; raises ``Fault`` when one filter has taken too much of it."""
        self.steps -= steps
        if self.steps < 0:
            raise Fault("the filter takes too long for this event")
