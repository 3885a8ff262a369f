"""Extension: the tools of MCP servers."""
