"""An agent that needs no model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from postbus.kernel import AgentResponse, Extension, read_config

if TYPE_CHECKING:
    from postbus.kernel import AgentInvocationContext, ExtensionContext

__all__ = ["Echo"]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands before the echo."""

    prefix: str = ""


class Echo(Extension):
    """Answers with what it was told."""

    def __init__(self) -> None:
        self._config = Config()

    async def initialize(self, context: ExtensionContext) -> None:
        """Take the config."""
        self._config = read_config(context.config, Config)

    async def invoke(self, task: str, context: AgentInvocationContext) -> AgentResponse:
        """Say it back, word for word."""
        answer = f"{self._config.prefix}{task}"
        await context.delta(answer)
        return AgentResponse(text=answer)
