"""The outer edge: which hosts and origins may ask, and how a body comes in."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from postbus.model import Invalid
from postbus.server.errors import Refusal

if TYPE_CHECKING:
    from starlette.types import Receive
    from starlette.types import Scope as Wire

__all__ = ["Edge", "read_body", "read_headers"]

HOST_CHARS_MAX = 300
HOST = re.compile(rb"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::([0-9]{1,5}))?")
ORIGIN = re.compile(rb"https?://([^/\s]{1,300})")
CLOSE = {"connection": "close"}


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """What the edge lets in: names of this server beyond addresses and ``localhost``, and origins beyond its own.

    An attacker's page reaches a local server under a *name* that it made point here (DNS rebinding), never under a bare
    address; so addresses are always fine and names must be known.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()

    def check(self, headers: dict[bytes, bytes]) -> None:
        """Refuse a request that was sent to another name, or by a page of another origin."""
        host = headers.get(b"host")
        known = None if host is None or len(host) > HOST_CHARS_MAX else _known(host, self.hosts)
        if host is None or known is None:
            raise Refusal(400, "bad_host", "the Host header is missing or malformed")
        if not known:
            hint = "use an address or localhost, or start the server with --allow-host"
            raise Refusal(403, "forbidden_host", "this server does not go by that name", hint=hint)
        origin = headers.get(b"origin")
        if origin is None or origin.decode("latin-1").lower() in self.origins:
            return
        sent_by = ORIGIN.fullmatch(origin)
        if sent_by is None or sent_by[1].lower() != host.lower():
            hint = "start the server with --allow-origin to let that page in"
            raise Refusal(403, "forbidden_origin", "requests from pages of another origin are refused", hint=hint)


@lru_cache(1024)
def _known(host: bytes, hosts: frozenset[str]) -> bool | None:
    """Say whether this server goes by the name in a Host header; None when it is malformed."""
    found = HOST.fullmatch(host)
    if found is None:
        return None
    name = found[1].decode().lower()
    if name == "localhost" or name in hosts:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def read_headers(wire: Wire) -> dict[bytes, bytes]:
    """Return the headers by lower-case name; refuses those given twice that must not be."""
    headers: dict[bytes, bytes] = {}
    for name, value in wire["headers"]:
        if name in headers and name in _ONCE:
            raise Refusal(400, "bad_request", f"the header {name.decode()} is given twice", headers=CLOSE)
        headers[name] = value
    return headers


_ONCE = frozenset({b"host", b"origin", b"authorization", b"content-type", b"content-length", b"transfer-encoding"})


async def read_body(receive: Receive, headers: dict[bytes, bytes], bytes_max: int) -> bytes:
    """Return the body; refuses other types than JSON, and more than ``bytes_max``. Its deadline is the protocol's."""
    kind = headers.get(b"content-type", b"").split(b";", 1)[0].strip().lower()
    if kind != b"application/json":
        hint = "send Content-Type: application/json"
        raise Refusal(415, "unsupported_media_type", "the body must be JSON and say so", hint=hint, headers=CLOSE)
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > bytes_max:
        raise _too_large(bytes_max)
    message = await receive()
    body: bytes = message.get("body", b"")
    if not message.get("more_body"):
        if message["type"] == "http.disconnect":
            raise Invalid("the client went away")
        if len(body) > bytes_max:
            raise _too_large(bytes_max)
        return body
    chunks, size = [body], len(body)
    while message.get("more_body"):
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Invalid("the client went away")
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > bytes_max:
            raise _too_large(bytes_max)
    return b"".join(chunks)


def _too_large(bytes_max: int) -> Refusal:
    message = f"the body has more than the {bytes_max} bytes that this route takes"
    return Refusal(413, "too_large", message, headers=CLOSE)
