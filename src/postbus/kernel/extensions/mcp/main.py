"""The tools of MCP servers, for every agent; a human allows each call unless the config says otherwise."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import msgspec

from postbus.kernel import Extension, Health, Invalid, NotFound, read_config

from .link import Link, ServerConfig

if TYPE_CHECKING:
    from postbus.kernel import ExtensionContext, ToolCall, ToolSpec

__all__ = ["McpTools"]

ALIAS = re.compile("[A-Za-z0-9-]{1,30}")
CONNECT_S = 30.0


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The servers by alias; a tool is called ``<alias>__<its name>``."""

    servers: dict[str, ServerConfig] = {}


class McpTools(Extension):
    """What all servers offer."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    async def initialize(self, context: ExtensionContext) -> None:
        """Connect to every server. One that is not there is tried again later; the others are used."""
        config = read_config(context.config, Config)
        for alias in config.servers:
            if not ALIAS.fullmatch(alias):
                raise Invalid(f"{alias!r} is no alias of a server", hint="letters, digits and -, at most 30")
        self._links = {alias: Link(alias, server, context) for alias, server in config.servers.items()}
        for link in self._links.values():
            link.open()
        await asyncio.gather(*(context.clock.wait(link.tried, CONNECT_S) for link in self._links.values()))

    async def destroy(self) -> None:
        """End the servers."""
        await asyncio.gather(*(link.close() for link in self._links.values()))

    async def health(self) -> Health:
        """Say which servers are not there."""
        missing = [f"{link.alias}: {link.problem}" for link in self._links.values() if link.problem is not None]
        return Health(ok=not missing, detail="; ".join(missing) or f"{len(self._links)} connected")

    def get_tools(self) -> list[ToolSpec]:
        """Return the tools of the servers that are there."""
        return [tool for link in self._links.values() for tool in link.tools.values()]

    async def call_tool(self, call: ToolCall) -> Any:
        """Call a tool on its server."""
        link = self._links.get(call.server_alias)
        if link is None:
            raise NotFound(f"there is no MCP server {call.server_alias}")
        return await link.call(call.name, call.arguments)
