"""Where a log is: a folder, memory, or a remote with the folder that keeps its copy. One grammar for every room."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

import msgspec

from postbus.clock import SystemClock
from postbus.log.security import OPTIONS, Security, hosts_of, security_of
from postbus.model import Invalid, NotFound

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from postbus.clock import Clock
    from postbus.log.upstream import Upstream

    Opener = Callable[[str, Clock, str], Awaitable[Upstream]]

__all__ = ["REMOTES", "Address", "Target", "open_upstream", "parse_address", "parse_remote"]

FOLDER = "./postbus-data"
PREFIX = "postbus"
COMMON = ("answer_s", "replicas", "sync", *OPTIONS)
PREFIX_RULE = re.compile("[A-Za-z0-9_-]{1,32}")
ANSWER_S = 5.0
NUMBER_MAX = 1e6
MEMORY = "memory:"
KINDS = "memory:, sqlite:///folder, a folder's path, nats://host:port?data=folder or kafka://host:port?data=folder"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A place to find a log. ``remote`` is what the folder follows, ``public`` the same without its password."""

    folder: str | None = None
    remote: str | None = None

    @property
    def public(self) -> str:
        """What may be shown and kept: no user, no password."""
        if self.remote is None:
            return self.folder or MEMORY
        parts = urlsplit(self.remote)
        return urlunsplit(parts._replace(netloc=hosts_of(parts.netloc)[1]))


def parse_address(text: str) -> Address:
    """Return where a log is: ``memory:``, a folder, ``sqlite:///folder``, or a remote with ``?data=folder``.

    Raises ``Invalid`` for what names no kind of log.
    """
    if text == MEMORY:
        return Address()
    scheme, separator, rest = text.partition("://")
    if not separator:
        return Address(folder=text)
    if scheme == "sqlite":
        return Address(folder=unquote(rest))
    if scheme not in REMOTES:
        raise Invalid(f"no log kind is called {scheme!r}", hint=f"use {KINDS}")
    try:
        parts = urlsplit(text)
        options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise Invalid(f"{scheme}:// address: {error}", hint=f"use {KINDS}") from None
    if not parts.netloc.rpartition("@")[2] or parts.fragment:
        raise Invalid(f"a {scheme}:// address names a host, and nothing behind a #", hint=f"use {KINDS}")
    folders = [value for name, value in options if name == "data"]
    if len(folders) > 1 or "" in folders:
        raise Invalid("data names one folder", hint=f"use {KINDS}")
    query = urlencode([pair for pair in options if pair[0] != "data"], quote_via=quote)
    return Address(folder=folders[0] if folders else FOLDER, remote=urlunsplit(parts._replace(query=query)))


async def open_upstream(url: str, clock: Clock, folder: str) -> Upstream:
    """Open the remote that a URL names; ``folder`` has room for what its kind keeps on the node.

    Needs no answer of the remote. Raises ``Invalid`` for options that the kind does not have.
    """
    return await REMOTES[url.partition("://")[0]](url, _RealTime(clock), folder)


class _RealTime(SystemClock):
    """The wall time of another clock; waiting takes real time, since a network does not wait for a test's clock."""

    def __init__(self, wall: Clock) -> None:
        self._wall = wall

    def now_us(self) -> int:
        return self._wall.now_us()


class Target(msgspec.Struct, frozen=True):
    """A remote's URL in parts: where it is, what our names there begin with, who we are there, and its options."""

    address: str
    prefix: str
    security: Security
    options: dict[str, str]

    def whole(self, name: str, default: int) -> int:
        """Return an option that is a whole number."""
        return int(self.number(name, default))

    def number(self, name: str, default: float) -> float:
        """Return an option that is a number above 0."""
        text = self.options.get(name, str(default))
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < NUMBER_MAX:
            raise Invalid(f"{name} is a number above 0, not {text!r}")
        return value

    @property
    def synced(self) -> bool:
        """Whether the remote was said to sync to disk before it acknowledges."""
        text = self.options.get("sync")
        if text not in (None, "always"):
            raise Invalid(f"sync is always, or left out, not {text!r}")
        return text is not None


def parse_remote(url: str) -> Target:
    """Return a remote's URL in parts; raises ``Invalid`` for options it does not have, and for a bad prefix."""
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    options = (*COMMON, "sasl") if parts.scheme == "kafka" else COMMON
    unknown = sorted(given.keys() - {*options})
    if unknown:
        known = ", ".join(sorted((*options, "data")))
        raise Invalid(f"a {parts.scheme}:// address has no option {unknown[0]!r}", hint=f"it has {known}")
    prefix = unquote(parts.path.strip("/")) or PREFIX
    if not PREFIX_RULE.fullmatch(prefix):
        raise Invalid(f"the prefix {prefix!r} is not made of 1 to 32 letters, digits, - and _")
    who, hosts = hosts_of(parts.netloc)
    return Target(hosts, prefix, security_of(who, given), given)


async def _nats(url: str, clock: Clock, _folder: str) -> Upstream:
    try:
        from postbus.log.jetstream import JetStream  # noqa: PLC0415 - needs the extra
    except ModuleNotFoundError as error:
        raise NotFound("nats-py is not installed", hint="pip install 'postbus[nats]'") from error
    target = parse_remote(url)
    return JetStream(
        f"nats://{target.address}",
        target.prefix,
        answer_s=target.number("answer_s", ANSWER_S),
        replicas=target.whole("replicas", 1),
        synced=target.synced,
        clock=clock,
        security=target.security,
    )


async def _kafka(url: str, clock: Clock, folder: str) -> Upstream:
    try:
        from postbus.log.kafka import Kafka  # noqa: PLC0415 - needs the extra
    except ModuleNotFoundError as error:
        raise NotFound("confluent-kafka is not installed", hint="pip install 'postbus[kafka]'") from error
    target = parse_remote(url)
    return Kafka(
        target.address,
        target.prefix,
        answer_s=target.number("answer_s", ANSWER_S),
        replicas=target.whole("replicas", 1),
        synced=target.synced,
        clock=clock,
        data=folder,
        config=target.security.kafka(),
    )


REMOTES: dict[str, Opener] = {"nats": _nats, "kafka": _kafka}
"""How each kind of remote is opened, by scheme."""
