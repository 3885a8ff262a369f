"""Lines of JSON as events: what the kinds ``file`` and ``command`` have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postbus import strict_json
from postbus.model import Invalid
from postbus.sources.contract import bad, made

if TYPE_CHECKING:
    from postbus.model import Draft, Source
    from postbus.sources.contract import Common

__all__ = ["event_of"]


def event_of(source: Source, common: Common, topic: str, line: bytes, place: str, id_field: str | None) -> Draft | None:
    """Return the event of a line, None for an empty one; a line that is no JSON becomes an event about that.

    ``place`` names the line and is its native id, unless ``id_field`` (a path with dots) leads to text or a number.
    """
    line = line.strip(b" \t\r\n")
    if not line:
        return None
    try:
        value = strict_json.parse(line)
    except Invalid as error:
        return bad(source, place, error.message, line.decode(errors="replace"))
    native_id = place
    if id_field is not None:
        for name in id_field.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            native_id = f"id:{value}"
    return made(source, common, topic, line, native_id=native_id)
