"""Sources: what feeds the log from outside."""

from __future__ import annotations

from typing import Any

from postbus.client.calls import Calls, part

__all__ = ["Sources"]


class Sources(Calls):
    """The calls about sources. Signed webhooks come from elsewhere, by ``/sources/…/hook``."""

    async def create_source(self, source: str, kind: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
        """Register a source; its events go to the topic of its name unless its settings name another."""
        body = {"id": source, "kind": kind, "settings": settings or {}, **self._whose(None)}
        return await self._json("POST", "/sources", body)

    async def sources(self, *, tenant: str | None = None) -> list[dict[str, Any]]:
        """Return the sources of a tenant that the key may see."""
        found: list[dict[str, Any]] = (await self._json("GET", "/sources", query=self._whose(tenant)))["sources"]
        return found

    async def source(self, source: str) -> dict[str, Any]:
        """Return one source and how it fares."""
        return await self._json("GET", self._source(source))

    async def delete_source(self, source: str) -> None:
        """Forget a source; its topic and events stay."""
        await self._send("DELETE", self._source(source), again=True)

    async def pause_source(self, source: str) -> dict[str, Any]:
        """Stop a source where it is."""
        return await self._json("POST", f"{self._source(source)}/pause", again=True)

    async def resume_source(self, source: str) -> dict[str, Any]:
        """Let a source go on."""
        return await self._json("POST", f"{self._source(source)}/resume", again=True)

    async def poll_source(self, source: str, *, wait_s: float = 60.0) -> dict[str, Any]:
        """Look at a source once, now, which may take ``wait_s``; return what is new, and what went wrong."""
        return await self._json("POST", f"{self._source(source)}/poll", wait_s=wait_s)

    def _source(self, source: str) -> str:
        return f"/sources/{self._place}/{part(source)}"
