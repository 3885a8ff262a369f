"""What agents and tools did, as events under the correlation id of what set them off; ``postbus trace`` shows them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from postbus import strict_json
from postbus.model import PostbusError

if TYPE_CHECKING:
    from postbus.bus import EventBus

__all__ = ["Trace"]

logger = logging.getLogger("postbus.kernel")

TEXT_CHARS_MAX = 8_192


class Trace:
    """Writes the record. A record that cannot be written stops no work."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus

    async def record(self, topic: str, facts: dict[str, Any], correlation_id: str | None) -> None:
        """Publish what happened; long texts are cut."""
        try:
            short = {name: _cut(value) for name, value in facts.items() if value is not None}
            await self._bus.publish(topic, "kernel", short, correlation_id)
        except PostbusError as error:
            logger.warning("%s could not be recorded: %s", topic, error.message)


def _cut(value: Any) -> Any:
    text = value if isinstance(value, str) else strict_json.encode(value).decode()
    if len(text) <= TEXT_CHARS_MAX:
        return value
    return f"{text[:TEXT_CHARS_MAX]}… ({len(text)} characters)"
