"""Agents: who has an inbox, where it is woken, and what it is subscribed to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from postbus.client.calls import Calls, part

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

__all__ = ["Agents"]

WORDS = ("earliest", "latest")


class Agents(Calls):
    """The calls about agents. An agent is one of the client's tenant."""

    async def create_agent(self, agent: str, *, targets: Sequence[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Make an agent with an empty inbox, which pulls unless ``targets`` say how it is woken."""
        body: dict[str, Any] = {"id": agent, **self._whose(None)}
        if targets is not None:
            body["targets"] = list(targets)
        return await self._json("POST", "/agents", body)

    async def agents(self, *, tenant: str | None = None) -> list[dict[str, Any]]:
        """Return all agents of a tenant whose inboxes the key may see."""
        return await self._pages("/agents", "agents", self._whose(tenant))

    async def agent(self, agent: str) -> dict[str, Any]:
        """Return one agent with how many items wait in its inbox."""
        return await self._json("GET", self._agent(agent))

    async def delete_agent(self, agent: str) -> None:
        """Remove an agent with its inbox, subscriptions and timers."""
        await self._send("DELETE", self._agent(agent), again=True)

    # --- targets ---

    async def set_targets(self, agent: str, targets: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Replace where an agent is woken."""
        return await self._json("PUT", f"{self._agent(agent)}/targets", {"targets": list(targets)}, again=True)

    async def targets(self, agent: str) -> list[dict[str, Any]]:
        """Return how an agent's targets stand, with what they have cost and saved."""
        found: list[dict[str, Any]] = (await self._json("GET", f"{self._agent(agent)}/targets"))["targets"]
        return found

    async def revive_target(self, agent: str, target: str = "default") -> bool:
        """Put a target that is offline back to work; return whether it was offline when the answer was made."""
        path = f"{self._agent(agent)}/targets/{part(target)}/revive"
        return bool((await self._json("POST", path, again=True))["revived"])

    # --- subscriptions ---

    async def subscribe_agent(
        self,
        agent: str,
        topic: str | None = None,
        *,
        pattern: str | None = None,
        subscription: str | None = None,
        filter: dict[str, Any] | None = None,  # noqa: A002 - the word of the API
        start: str | int | datetime = "latest",
        digest: dict[str, Any] | None = None,
        cleanup: dict[str, Any] | None = None,
        engine: str | None = None,
    ) -> dict[str, Any]:
        """Have matching events of a topic, or of topics like ``pattern``, go to an agent's inbox.

        ``start`` is ``earliest``, ``latest``, an offset or an instant; it is pinned now. ``subscription`` is its id,
        which the server gives unless you do.
        """
        given = {
            "id": subscription,
            "topic": None if topic is None else self._full(topic),
            "pattern": pattern,
            "filter": filter,
            "digest": digest,
            "cleanup": cleanup,
            "engine": engine,
        }
        body = {name: value for name, value in given.items() if value is not None}
        path = f"{self._agent(agent)}/subscriptions"
        return await self._json("POST", path, {**body, "start": _start(start)})

    async def agent_subscriptions(self, agent: str) -> list[dict[str, Any]]:
        """Return the subscriptions of an agent with their places, by id."""
        found = await self._json("GET", f"{self._agent(agent)}/subscriptions")
        subscriptions: list[dict[str, Any]] = found["subscriptions"]
        return subscriptions

    async def unsubscribe_agent(self, agent: str, subscription: str) -> None:
        """End a subscription of an agent; its items stay."""
        await self._send("DELETE", self._subscription(agent, subscription), again=True)

    async def reset_agent(self, agent: str, subscription: str, to: str | int | datetime) -> dict[str, Any]:
        """Move a subscription in all that it reads; what an inbox was given once is never given again."""
        path = f"{self._subscription(agent, subscription)}/reset"
        return await self._json("POST", path, {"start": _start(to)}, again=True)

    async def agent_lag(self, agent: str, subscription: str) -> dict[str, Any]:
        """Return how many events a subscription has not looked at, by topic and in all."""
        return await self._json("GET", f"{self._subscription(agent, subscription)}/lag")

    def _agent(self, agent: str) -> str:
        return f"/agents/{self._place}/{part(agent)}"

    def _subscription(self, agent: str, subscription: str) -> str:
        return f"{self._agent(agent)}/subscriptions/{part(subscription)}"


def _start(where: str | int | datetime) -> dict[str, Any]:
    if isinstance(where, int):
        return {"policy": "at_offset", "offset": where}
    return {"policy": where} if where in WORDS else {"policy": "at_time", "time": where}
