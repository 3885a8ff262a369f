"""Where an agent is woken: what may be said of a target, and what is refused."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

import msgspec

from postbus.model import Invalid
from postbus.outside import check_url
from postbus.topics import check_id

__all__ = ["Target", "check_targets", "decode_targets"]

TARGETS_MAX = 8
ARGUMENTS_MAX = 64
ARGUMENT_CHARS_MAX = 4096


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One way to wake an agent. ``pull``: it asks by itself and is never woken.

    A wake waits for ``buffer_s`` after the first new item, or for ``buffer_items`` of them; after it the target is left
    alone for ``lease_s`` or until the agent acks.
    """

    kind: Literal["pull", "webhook", "command", "tmux"]
    id: str = "default"
    url: str | None = None
    secret_env: str | None = None
    argv: tuple[str, ...] | None = None
    pane: str | None = None
    mode: Literal["activation_only", "activation_with_items"] = "activation_only"
    buffer_s: float = 3.0
    buffer_items: int = 20
    lease_s: float = 600.0
    min_unacked: int = 1
    timeout_s: float = 10.0
    allow_private: bool = False

    @property
    def place(self) -> str:
        """Where it is: a target that was offline is tried again when this changes."""
        return msgspec.json.encode((self.kind, self.url, self.argv, self.pane, self.secret_env)).decode()


LIMITS = {
    "buffer_s": (0.0, 3600.0),
    "buffer_items": (1, 10_000),
    "lease_s": (0.0, 86_400.0),
    "min_unacked": (1, 10_000),
    "timeout_s": (0.1, 600.0),
}
NEEDS = {"pull": None, "webhook": "url", "command": "argv", "tmux": "pane"}
PANE = re.compile(r"[A-Za-z0-9_.:%@$=+][A-Za-z0-9_.:%@$=+-]{0,119}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,119}")


def check_targets(targets: tuple[Target, ...]) -> tuple[Target, ...]:
    """Refuse targets that could never work."""
    if not 1 <= len(targets) <= TARGETS_MAX:
        raise Invalid(f"an agent has 1 to {TARGETS_MAX} targets, not {len(targets)}", hint='the simplest is "pull"')
    for target in targets:
        check_id(target.id, "target")
        _check_place(target)
        for name, (least, most) in LIMITS.items():
            if not least <= getattr(target, name) <= most:
                raise Invalid(f"{name} of target {target.id} is {least:g} to {most:g}, not {getattr(target, name):g}")
    names = [target.id for target in targets]
    if len(set(names)) != len(names):
        raise Invalid("two targets have one id", hint="give each its own `id`")
    return targets


@lru_cache(maxsize=4096)
def decode_targets(settings: str) -> tuple[Target, ...]:
    """Return the targets in an agent's settings as they are kept."""
    return msgspec.json.decode(settings, type=_Settings).targets


class _Settings(msgspec.Struct, frozen=True):
    targets: tuple[Target, ...]


def _check_place(target: Target) -> None:
    needed = NEEDS[target.kind]
    for name in ("url", "argv", "pane"):
        given = getattr(target, name) is not None
        if given != (name == needed):
            raise Invalid(f"a {target.kind} target {'needs' if name == needed else 'takes no'} `{name}`")
    if target.url is not None:
        check_url(target.url, allow_private=target.allow_private)
    if target.secret_env is not None and (target.kind != "webhook" or not VARIABLE.fullmatch(target.secret_env)):
        raise Invalid("`secret_env` names the environment variable that holds a webhook's secret")
    if target.argv is not None:
        _check_arguments(target.argv)
    if target.pane is not None:
        if not PANE.fullmatch(target.pane):
            raise Invalid(f"{target.pane[:80]!r} is no tmux pane", hint="as in work:0.1 or %3")
        if target.mode != "activation_only":
            raise Invalid("a tmux target takes no items: what others wrote is never typed into a terminal")


def _check_arguments(argv: tuple[str, ...]) -> None:
    if not 1 <= len(argv) <= ARGUMENTS_MAX or not argv[0]:
        raise Invalid(f"`argv` holds a program and at most {ARGUMENTS_MAX - 1} arguments")
    if any("\0" in part or len(part) > ARGUMENT_CHARS_MAX for part in argv):
        raise Invalid(f"an argument has at most {ARGUMENT_CHARS_MAX} characters and no NUL in it")
