"""Tools to have something happen later, and the loop that makes it happen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from postbus.kernel import Extension, Invalid, NotFound, SystemTopics, ToolSpec

from .specs import TOOLS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.kernel import ExtensionContext, ToolCall

__all__ = ["Scheduler"]

ID_CHARS = 16


class Scheduler(Extension):
    """Schedules for agents, as tools, and for extensions that depend on it, as methods.

    Each takes what is to happen: ``text`` for the user, ``prompt`` for the orchestrator (``background=True``: without
    an answer to the user), or any ``topic`` and ``payload``. An overdue one-shot fires once after a restart; recurring
    ones go on with their next time.
    """

    async def initialize(self, context: ExtensionContext) -> None:
        """Take the context."""
        self._context = context

    async def run_background(self) -> None:
        """Fire what comes due."""
        await self._context.schedules.run()

    # --- for extensions ---

    async def schedule_once(
        self,
        *,
        delay_seconds: float | None = None,
        at_iso: str | None = None,
        made_by: str = "extension",
        whom: dict[str, str | None] | None = None,
        schedule_id: str | None = None,
        **what: Any,
    ) -> dict[str, Any]:
        """Have something happen once, after a delay or at an instant."""
        topic, payload = _fired(**what)
        entry = await self._context.schedules.create(
            topic, payload, made_by=made_by, schedule_id=schedule_id, delay_s=delay_seconds, at=at_iso, **(whom or {})
        )
        return entry.described()

    async def schedule_recurring(
        self,
        *,
        cron: str | None = None,
        every_seconds: float | None = None,
        zone: str = "UTC",
        until_iso: str | None = None,
        made_by: str = "extension",
        whom: dict[str, str | None] | None = None,
        schedule_id: str | None = None,
        **what: Any,
    ) -> dict[str, Any]:
        """Have something happen again and again, by cron in a time zone or every so many seconds."""
        topic, payload = _fired(**what)
        entry = await self._context.schedules.create(
            topic,
            payload,
            made_by=made_by,
            schedule_id=schedule_id,
            cron=cron,
            every_s=every_seconds,
            zone=zone,
            until=until_iso,
            **(whom or {}),
        )
        return entry.described()

    async def list(self, *, include_ended: bool = False) -> dict[str, Any]:
        """Return the schedules there are."""
        return {
            "schedules": [entry.described() for entry in await self._context.schedules.entries(ended=include_ended)]
        }

    async def cancel(self, schedule_id: str) -> dict[str, Any]:
        """End a schedule; what it fired and nobody has handled yet is not handled any more."""
        purged = await self._context.schedules.cancel(schedule_id)
        return {"schedule_id": schedule_id, "state": "cancelled", "purged": purged}

    async def update(
        self,
        schedule_id: str,
        *,
        delay_seconds: float | None = None,
        at_iso: str | None = None,
        cron: str | None = None,
        every_seconds: float | None = None,
        zone: str | None = None,
        until_iso: str | None = None,
        paused: bool | None = None,
        **what: Any,
    ) -> dict[str, Any]:
        """Change when a schedule fires, what it does, or whether it is paused."""
        topic, payload = _fired(**what) if what else (None, None)
        when = {"delay_s": delay_seconds, "at": at_iso, "cron": cron, "every_s": every_seconds, "zone": zone}
        entry = await self._context.schedules.update(
            schedule_id, topic=topic, payload=payload, paused=paused, until=until_iso, **when
        )
        return entry.described()

    # --- for agents ---

    def get_tools(self) -> Sequence[ToolSpec]:
        """See ``ToolProvider``."""
        return TOOLS

    async def call_tool(self, call: ToolCall) -> dict[str, Any]:
        """See ``ToolProvider``; called again after a crash, it makes no second schedule."""
        given = dict(call.arguments)
        if call.name in ("schedule_once", "schedule_recurring"):
            if call.channel_id is not None and ("text" in given or ("prompt" in given and not given.get("background"))):
                given.setdefault("channel_id", call.channel_id)
            given |= {
                "schedule_id": call.id[:ID_CHARS],
                "made_by": call.session_id or "tool",
                "whom": {"user_id": call.user_id, "session_id": call.session_id if call.user_id else None},
            }
        match call.name:
            case "schedule_once":
                return await self.schedule_once(**given)
            case "schedule_recurring":
                return await self.schedule_recurring(**given)
            case "schedule_list":
                return await self.list(**given)
            case "schedule_cancel":
                return await self.cancel(**given)
            case "schedule_update":
                return await self.update(**given)
        raise NotFound(f"there is no tool {call.name}")


def _fired(
    *,
    text: str | None = None,
    prompt: str | None = None,
    background: bool = False,
    channel_id: str | None = None,
    topic: str | None = None,
    payload: dict[str, Any] | None = None,
) -> tuple[str, dict[str, Any]]:
    """Return the topic and the payload of what is to happen."""
    if sum(one is not None for one in (text, prompt, topic)) != 1:
        raise Invalid("say what is to happen: exactly one of text, prompt and topic")
    if topic is not None:
        if channel_id is not None or background:
            raise Invalid("channel_id and background go with text and prompt; a topic has a payload")
        return topic, payload if payload is not None else {}
    if payload is not None:
        raise Invalid("a payload goes with a topic")
    channel = {} if channel_id is None else {"channel_id": channel_id}
    if text is not None:
        return SystemTopics.USER_NOTIFY, {"text": text, **channel}
    if background:
        return SystemTopics.AGENT_BACKGROUND, {"prompt": prompt}
    return SystemTopics.AGENT_TASK, {"prompt": prompt, **channel}
