"""What replies may do: only an operator's word counts, never what a handle says of itself."""

from __future__ import annotations

import os

import msgspec

__all__ = ["ReplyRules"]

COMMANDS, PRIVATE, SECRET = "POSTBUS_REPLY_COMMANDS", "POSTBUS_REPLY_ALLOW_PRIVATE", "POSTBUS_REPLY_SECRET"


class ReplyRules(msgspec.Struct, frozen=True, kw_only=True):
    """``commands``: the programs that handles may name. ``allow_private``: webhooks may be inside the network.

    ``secret_env``: the environment variable with the secret that webhooks are signed with.
    """

    commands: frozenset[str] = frozenset()
    allow_private: bool = False
    secret_env: str = SECRET

    @classmethod
    def from_environment(cls) -> ReplyRules:
        """Read the rules from the environment: programs are separated by colons, like the folders of PATH."""
        names = frozenset(name for name in os.environ.get(COMMANDS, "").split(":") if name)
        return cls(commands=names, allow_private=os.environ.get(PRIVATE, "") in ("1", "true", "yes"))
