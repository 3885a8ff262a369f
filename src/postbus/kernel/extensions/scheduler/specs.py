"""The scheduler's tools, as agents see them."""

from __future__ import annotations

from typing import Any

from postbus.kernel import ToolSpec

__all__ = ["TOOLS"]

_ONCE = {
    "delay_seconds": {"type": "number", "minimum": 0, "description": "So many seconds from now."},
    "at_iso": {"type": "string", "description": "An instant with its zone, as 2027-01-31T09:00:00+01:00."},
}
_RECURRING = {
    "cron": {"type": "string", "description": "Five fields: minute hour day month weekday."},
    "every_seconds": {"type": "number", "minimum": 1, "description": "So many seconds apart, from now on."},
    "zone": {"type": "string", "description": "The time zone of cron, as Europe/Amsterdam. Default: UTC."},
    "until_iso": {"type": "string", "description": "The last instant it may fire at, with its zone."},
}
_WHAT = {
    "text": {"type": "string", "minLength": 1, "description": "A message for the user: a reminder."},
    "prompt": {"type": "string", "minLength": 1, "description": "A task for the agent; the user gets its answer."},
    "background": {"type": "boolean", "description": "With prompt: the user gets no answer."},
    "channel_id": {"type": "string", "description": "Where the user is told. Default: where this was asked."},
    "topic": {"type": "string", "description": "An event to publish instead."},
    "payload": {"type": "object", "description": "With topic: what the event says."},
}
_ID = {"schedule_id": {"type": "string", "minLength": 1}}


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TOOLS = (
    ToolSpec(
        name="schedule_once",
        description="Have something happen once: one of delay_seconds and at_iso, and one of text, prompt, topic.",
        parameters=_object(**_ONCE, **_WHAT),
    ),
    ToolSpec(
        name="schedule_recurring",
        description="Have something happen again and again: one of cron and every_seconds, and of text, prompt, topic.",
        parameters=_object(**_RECURRING, **_WHAT),
    ),
    ToolSpec(
        name="schedule_list",
        description="List the schedules there are.",
        parameters=_object(include_ended={"type": "boolean", "description": "Also those that are over."}),
    ),
    ToolSpec(
        name="schedule_cancel",
        description="End a schedule for good; what it fired but nobody has handled yet is dropped too.",
        parameters=_object("schedule_id", **_ID),
    ),
    ToolSpec(
        name="schedule_update",
        description="Change when a schedule fires, what it does, or whether it is paused.",
        parameters=_object("schedule_id", **_ID, **_ONCE, **_RECURRING, **_WHAT, paused={"type": "boolean"}),
    ),
)
