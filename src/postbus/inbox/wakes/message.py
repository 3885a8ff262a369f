"""What a woken agent is told: one JSON object, the same for every kind of target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from postbus.inbox.items import item_id, item_json
from postbus.model import NotFound, instant

if TYPE_CHECKING:
    from postbus.inbox.items import Items
    from postbus.inbox.wakes.records import Attempt

__all__ = ["message"]

KIND = "inbox.activation"
ITEMS_BYTES_MAX = 262_144


async def message(items: Items, attempt: Attempt) -> bytes:
    """Return the activation as JSON; with the first new items, as far as they fit, where the target asks for them."""
    data: dict[str, Any] = {
        "activation": attempt.activation,
        "tenant": attempt.tenant,
        "agent": attempt.agent,
        "target": attempt.target.id,
        "attempt": attempt.number,
        "new_item_count": attempt.new_item_count,
        "first_item": item_id(attempt.first),
        "last_item": item_id(attempt.last),
    }
    if attempt.target.mode == "activation_with_items":
        found = await _items(items, attempt)
        data |= {"items": found, "items_left_out": attempt.new_item_count - len(found)}
    return msgspec.json.encode({"type": KIND, "timestamp": instant(attempt.created_at_us), "data": data})


async def _items(items: Items, attempt: Attempt) -> list[msgspec.Raw]:
    found: list[msgspec.Raw] = []
    size = 0
    for sequence in attempt.sequences:
        try:
            text = item_json(await items.get(attempt.tenant, attempt.agent, item_id(sequence)))
        except NotFound:
            continue
        size += len(text)
        if size > ITEMS_BYTES_MAX:
            break
        found.append(msgspec.Raw(text))
    return found
