"""Timers: messages to agents that are to come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from postbus.client.calls import Calls, json_bytes, part

if TYPE_CHECKING:
    from datetime import datetime

__all__ = ["Timers"]


class Timers(Calls):
    """The calls about timers."""

    async def create_timer(
        self,
        timer: str,
        agent: str,
        message: Any,
        *,
        at: datetime | str | None = None,
        every_s: float | None = None,
        cron: str | None = None,
        zone: str = "UTC",
        until: datetime | str | None = None,
    ) -> dict[str, Any]:
        """Have a message sent to an agent: once ``at`` an instant, every so often, or by ``cron`` in a ``zone``."""
        when = {"at": at, "every": every_s, "cron": cron, "until": until}
        body = {
            "id": timer,
            "agent": agent,
            **self._whose(None),
            "message": json_bytes(message),
            "zone": zone,
            **{name: value for name, value in when.items() if value is not None},
        }
        return await self._json("POST", "/timers", body)

    async def timers(self, *, tenant: str | None = None, agent: str | None = None) -> list[dict[str, Any]]:
        """Return all timers of a tenant, or of one agent, that the key may see."""
        return await self._pages("/timers", "timers", {**self._whose(tenant), "agent": agent})

    async def timer(self, timer: str) -> dict[str, Any]:
        """Return one timer."""
        return await self._json("GET", self._timer(timer))

    async def delete_timer(self, timer: str) -> None:
        """Remove a timer."""
        await self._send("DELETE", self._timer(timer), again=True)

    async def pause_timer(self, timer: str) -> dict[str, Any]:
        """Let a timer rest."""
        return await self._json("POST", f"{self._timer(timer)}/pause", again=True)

    async def resume_timer(self, timer: str) -> dict[str, Any]:
        """Let a timer go on with its next time."""
        return await self._json("POST", f"{self._timer(timer)}/resume", again=True)

    def _timer(self, timer: str) -> str:
        return f"/timers/{self._place}/{part(timer)}"
