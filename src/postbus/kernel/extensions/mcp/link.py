"""The link to one MCP server: kept up in a task of its own, made again when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import re
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from postbus.kernel import Invalid, NotFound, PostbusError, ToolSpec, Unreachable, check_tool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from postbus.kernel import ExtensionContext

try:
    mcp: Any = importlib.import_module("mcp")
    stdio: Any = importlib.import_module("mcp.client.stdio")
except ModuleNotFoundError as error:
    raise Invalid("the package mcp is not installed", hint="pip install 'postbus[mcp]'") from error

__all__ = ["Link", "ServerConfig"]

LOOK_S = 30.0
RETRY_S, RETRY_S_MAX = 1.0, 60.0
PAGES_MAX = 100
CONNECTION_CLOSED = -32000
NAME_CHARS_MAX = 64
NOT_IN_NAMES = re.compile("[^A-Za-z0-9_-]")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server: a program that speaks MCP on its standard input and output, or a URL.

    ``approval``: ``ask`` a human before each call, or ``never``; ``unasked`` names tools that need no asking. ``tools``
    names those that are offered, all by default. ``secret_env``: variables whose values are secrets in the vault; one
    that is not there is asked for on the channel ``ask_on``.
    """

    command: Annotated[str, Meta(min_length=1)] | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    secret_env: dict[str, str] = {}
    ask_on: str | None = None
    cwd: str | None = None
    url: Annotated[str, Meta(pattern="^https?://")] | None = None
    approval: Annotated[str, Meta(pattern="^(ask|never)$")] = "ask"
    unasked: list[str] = []
    tools: list[str] | None = None
    timeout_s: Annotated[float, Meta(gt=0)] = 60.0


class ToolFailed(PostbusError):
    """The tool itself says that it failed."""

    code = "tool_failed"


class Link:
    """A server by its alias. Its tools are there while it is."""

    def __init__(self, alias: str, config: ServerConfig, context: ExtensionContext) -> None:
        if (config.command is None) == (config.url is None):
            raise Invalid(f"server {alias} needs a command or a url, one of the two")
        self.alias = alias
        self.tools: dict[str, ToolSpec] = {}
        self.problem: str | None = "not connected yet"
        self.tried = asyncio.Event()
        self._config = config
        self._context = context
        self._client: Any = None
        self._asked: set[str] = set()
        self._names: dict[str, str] = {}
        self._lost = asyncio.Event()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to connect."""
        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # what it would say is said here, in a line
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """End the link and the server's process."""
        self._stopping.set()
        self._lost.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool and return what it gives, a JSON value; raises ``Unreachable``, ``ToolFailed``."""
        client, tool = self._client, self._names.get(name, name)
        if client is None:
            raise Unreachable(f"the MCP server {self.alias} is not there: {self.problem}")
        try:
            async with asyncio.timeout(self._config.timeout_s):
                result = await client.call_tool(tool, arguments)
        except TimeoutError:
            raise Unreachable(f"{tool} of {self.alias} took longer than {self._config.timeout_s:g} s") from None
        except mcp.MCPError as error:
            if error.error.code != CONNECTION_CLOSED:
                raise ToolFailed(f"{tool} of {self.alias} failed: {error.error.message}") from None
            self._client, self.tools, self.problem = None, {}, "the connection was lost"
            self._lost.set()
            raise Unreachable(f"the MCP server {self.alias} ended during the call of {tool}") from None
        if result.is_error:
            raise ToolFailed(f"{tool} of {self.alias} failed: {_text(result.content)}")
        return result.structured_content if result.structured_content is not None else _text(result.content)

    # --- the link ---

    async def _run(self) -> None:
        wait_s = RETRY_S
        while not self._stopping.is_set():
            self._lost.clear()
            try:
                async with self._connected() as client:
                    wait_s = RETRY_S
                    await self._watch(client)
            except Exception as error:  # noqa: BLE001 - whatever it is: it is said, and tried again
                self.problem = _reason(error)
                self._context.logger.warning("MCP server %s: %s", self.alias, self.problem)
            finally:
                self._client, self.tools = None, {}
                self.tried.set()
            await self._context.clock.wait(self._stopping, wait_s)
            wait_s = min(2 * wait_s, RETRY_S_MAX)

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        config, options = self._config, {"cache": None, "read_timeout_seconds": self._config.timeout_s}
        if config.url is not None:
            async with mcp.Client(config.url, **options) as client:
                yield client
            return
        secrets = {name: await self._secret(secret) for name, secret in config.secret_env.items()}
        wanted = mcp.StdioServerParameters(
            command=config.command, args=config.args, env={**config.env, **secrets}, cwd=config.cwd
        )
        with (self._context.data_dir / f"{self.alias}.log").open("w", encoding="utf-8") as errors:
            async with mcp.Client(stdio.stdio_client(wanted, errlog=errors), **options) as client:
                yield client

    async def _secret(self, name: str) -> str:
        """Return a secret; the user is asked for one that is not there, and the link waits."""
        try:
            return await self._context.secret(name)
        except NotFound:
            channel = self._config.ask_on
            if channel is not None and name not in self._asked:
                self._asked.add(name)
                await self._context.request_secret(name, f"Secret {name} for the MCP server {self.alias}", channel)
            raise

    async def _watch(self, client: Any) -> None:
        """List the tools now and then, which also shows that the server is there."""
        while not self._lost.is_set():
            self.tools = await self._list(client)
            self._client, self.problem = client, None
            self.tried.set()
            await self._context.clock.wait(self._lost, LOOK_S)
        if not self._stopping.is_set():
            self.problem = "the connection was lost"

    async def _list(self, client: Any) -> dict[str, ToolSpec]:
        found: dict[str, ToolSpec] = {}
        config, cursor = self._config, None
        for _ in range(PAGES_MAX):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                if config.tools is None or tool.name in config.tools:
                    self._add(found, tool)
            cursor = page.next_cursor
            if cursor is None:
                break
        return found

    def _add(self, found: dict[str, ToolSpec], tool: Any) -> None:
        name = NOT_IN_NAMES.sub("_", f"{self.alias}__{tool.name}")[:NAME_CHARS_MAX]
        spec = ToolSpec(
            name=name,
            description=tool.description or "",
            # Servers name drafts that differ in nothing they use.
            parameters={name: value for name, value in tool.input_schema.items() if name != "$schema"},
            needs_approval=self._config.approval == "ask" and tool.name not in self._config.unasked,
            server_alias=self.alias,
        )
        try:
            check_tool(spec)
        except Invalid as error:
            self._context.logger.warning("MCP server %s: %s is left out: %s", self.alias, tool.name, error.message)
        else:
            found[name] = spec
            self._names[name] = tool.name


def _text(content: list[Any]) -> str:
    """Return the texts of a result; of pictures and the like only that they were there."""
    parts = [block.text if block.type == "text" else f"({block.type})" for block in content]
    return "\n".join(parts)


def _reason(error: BaseException) -> str:
    """Return what went wrong, out of the groups that tasks put around it."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if isinstance(error, PostbusError):
        return error.message
    if isinstance(error, FileNotFoundError):
        return "there is no such program or folder"
    if isinstance(error, mcp.MCPError):
        return str(error.error.message)
    return f"{type(error).__name__}: {error}".rstrip(": ")
