"""The kinds of source by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from postbus.model import Invalid
from postbus.sources.bus import BusSettings, BusSource
from postbus.sources.command import CommandSettings, CommandSource
from postbus.sources.contract import Common, read_settings
from postbus.sources.feed import FeedSettings, FeedSource
from postbus.sources.file import FileSettings, FileSource
from postbus.sources.github import GithubSettings, GithubSource
from postbus.sources.timer import TimerSettings, TimerSource
from postbus.sources.webhook import WebhookSettings, WebhookSource

if TYPE_CHECKING:
    from postbus.clock import Clock
    from postbus.model import Source

__all__ = ["KINDS", "Kind", "check_kind", "make"]


class Kind(msgspec.Struct, frozen=True):
    """A kind of source: its settings, and what is made from them."""

    settings: type[Common]
    adapter: Any


KINDS: dict[str, Kind] = {
    "github": Kind(GithubSettings, GithubSource),
    "webhook": Kind(WebhookSettings, WebhookSource),
    "feed": Kind(FeedSettings, FeedSource),
    "file": Kind(FileSettings, FileSource),
    "command": Kind(CommandSettings, CommandSource),
    "timer": Kind(TimerSettings, TimerSource),
    "bus": Kind(BusSettings, BusSource),
}


def check_kind(kind: str, settings: Any) -> Common:
    """Return the settings of a kind of source, or refuse what no such source can have."""
    found = KINDS.get(kind)
    if found is None:
        raise Invalid(f"there is no kind of source {kind!r}", hint=f"one of {', '.join(sorted(KINDS))}")
    checked = read_settings(found.settings, settings)
    found.adapter.check(checked)
    return checked


def make(source: Source, clock: Clock) -> Any:
    """Return the adapter of a source: a ``Poller``, a ``Receiver``, or both."""
    found = KINDS.get(source.kind)
    if found is None:
        raise Invalid(f"this postbus knows no kind of source {source.kind!r}")
    return found.adapter(source, read_settings(found.settings, source.settings), clock)
