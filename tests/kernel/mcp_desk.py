"""A real MCP server on standard input and output, or on the port it is given, to test those who call its tools."""

from __future__ import annotations

import importlib
import os
import sys


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def refuse(why: str) -> str:
    """Fail."""
    raise ValueError(why)


def leave() -> str:
    """End the server in the middle of a call."""
    os._exit(3)


def variable(name: str) -> str:
    """Say what a variable of the environment is."""
    return os.environ.get(name, "")


def main() -> None:
    server = importlib.import_module("mcp.server.mcpserver").MCPServer("desk")
    for tool in (add, refuse, leave, variable):
        server.add_tool(tool)
    sys.stderr.write("the desk is open\n")
    sys.stderr.flush()
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")


if __name__ == "__main__":
    main()
