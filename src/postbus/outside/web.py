"""HTTP to addresses that users gave.

A name is resolved once, every address it has must be public (unless private ones are allowed), and the connection goes
to exactly such an address, so that a name cannot be turned to another place between the check and the call. Redirects
are not followed, proxies of the environment are not used, and answers are bounded in time and size.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
import zlib
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING

import httpx2
import msgspec

from postbus.model import Invalid, LimitExceeded, Unreachable

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Answer", "check_url", "is_public", "rate_limit_s", "refused", "request", "retry_after_s"]

URL_CHARS_MAX = 2_000
BYTES_MAX = 8 << 20
TIMEOUT_S = 30.0
NAT64 = ipaddress.ip_network("64:ff9b::/96")
PROTOCOL_ASSIGNMENTS = ipaddress.ip_network("192.0.0.0/24")
HOST = re.compile(rb"[A-Za-z0-9._:-]{1,253}")
PORTS = {"http": 80, "https": 443}
GZIP = 16 + zlib.MAX_WBITS
RETRY_AFTER_S_MAX = 86_400
SHOWN_BYTES = 300
FIRST_SERVER_ERROR = 500
FORBIDDEN, TOO_MANY = 403, 429
PASSING = (408, 425, TOO_MANY)
RATE_S = 60.0
HINT = "say allow_private when it is meant to be inside your network"


class Answer(msgspec.Struct, frozen=True):
    """What came back, whatever its status. Names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


def is_public(address: str) -> bool:
    """Say whether an IP address is one of the open internet, also behind the ways to write an IPv4 as an IPv6."""
    found: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found in NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is None:
            return found.is_global and not found.is_multicast and not found.is_site_local
        found = inner
    return found.is_global and not found.is_multicast and found not in PROTOCOL_ASSIGNMENTS


def check_url(url: str, *, allow_private: bool = False) -> httpx2.URL:
    """Return the parsed address, or refuse it: only http and https, no user in it, no private address as its host."""
    if len(url) > URL_CHARS_MAX:
        raise LimitExceeded(f"the URL has {len(url)} characters; the limit is {URL_CHARS_MAX}")
    try:
        found = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise Invalid(f"{url!r} is no URL: {error}") from None
    if found.scheme not in PORTS or not found.host:
        raise Invalid(f"{url!r} is no http or https URL", hint="as in https://example.com/path")
    if not HOST.fullmatch(found.raw_host):
        raise Invalid(f"{found.host[:60]!r} is no name of a host")
    if found.userinfo:
        raise Invalid("the URL holds a user name or password", hint="name an environment variable instead")
    if not allow_private:
        try:
            public = is_public(found.host)
        except ValueError:  # a name, which is judged when it is resolved
            public = found.host != "localhost" and not found.host.endswith(".localhost")
        if not public:
            raise Invalid(f"{found.host} is a private address", hint=HINT)
    return found


async def request(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    allow_private: bool = False,
    timeout_s: float = TIMEOUT_S,
    bytes_max: int = BYTES_MAX,
) -> Answer:
    """Make one request and return its answer, whatever its status.

    Raises ``Invalid`` for an address that may not be called and ``Unreachable`` when no whole answer came in time.
    """
    target = check_url(url, allow_private=allow_private)
    shown = f"{target.scheme}://{target.netloc.decode('ascii', 'replace')}"
    try:
        async with asyncio.timeout(timeout_s):
            addresses = await _resolve(target, allow_private=allow_private)
            for number, address in enumerate(addresses):
                try:
                    return await _send(method, target, address, headers or {}, body, timeout_s, bytes_max)
                except httpx2.ConnectError:
                    if number + 1 == len(addresses):
                        raise
            raise Unreachable(f"{shown} has no address")
    except TimeoutError:
        raise Unreachable(f"{shown} did not answer within {timeout_s:g} s") from None
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        why = str(error) or type(error).__name__
        raise Unreachable(f"{shown} cannot be reached: {why}") from error


async def _resolve(target: httpx2.URL, *, allow_private: bool) -> list[str]:
    port = target.port or PORTS[target.scheme]
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(target.host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    private = [address for address in addresses if not is_public(address)]
    if private and not allow_private:
        raise Invalid(f"{target.host} is at the private address {private[0]}", hint=HINT)
    return addresses


async def _send(
    method: str,
    target: httpx2.URL,
    address: str,
    headers: Mapping[str, str],
    body: bytes | None,
    timeout_s: float,
    bytes_max: int,
) -> Answer:
    sent = {
        "user-agent": "postbus",
        "accept-encoding": "gzip",
        **{name.lower(): value for name, value in headers.items()},
        "host": target.netloc.decode("ascii"),
    }
    # The name is still the one the certificate must be for.
    extensions = {"sni_hostname": target.raw_host.decode("ascii")}
    client = httpx2.AsyncClient(verify=_trusted(), trust_env=False, follow_redirects=False, timeout=timeout_s)
    async with (
        client,
        client.stream(
            method, target.copy_with(host=address), headers=sent, content=body, extensions=extensions
        ) as response,
    ):
        content = await _read(response, bytes_max)
        return Answer(response.status_code, {name.lower(): value for name, value in response.headers.items()}, content)


async def _read(response: httpx2.Response, bytes_max: int) -> bytes:
    """Read and unpack an answer; a small one that unpacks to a large one is not unpacked further than the limit."""
    coding = response.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "gzip", "x-gzip"):
        raise Unreachable(f"the answer is packed as {coding[:40]!r}, which was not asked for")
    unpacking = None if coding == "identity" else zlib.decompressobj(GZIP)
    content = bytearray()
    async for block in response.aiter_raw():
        if unpacking is None:
            content += block
        else:
            try:
                content += unpacking.decompress(block, bytes_max + 1 - len(content))
            except zlib.error as error:
                raise Unreachable(f"the answer cannot be unpacked: {error}") from None
        if len(content) > bytes_max:
            raise Unreachable(f"the answer is larger than {bytes_max} bytes")
    if unpacking is not None and content and not unpacking.eof:
        raise Unreachable("the answer ends in the middle")
    return bytes(content)


@cache
def _trusted() -> ssl.SSLContext:
    return httpx2.create_ssl_context(trust_env=False)


def refused(answer: Answer, who: str, now_us: int) -> Unreachable:
    """Return what a status that is no success means: whether and when to ask again."""
    status = answer.status
    text = answer.body[:SHOWN_BYTES].decode(errors="replace").strip()
    moved = f", moved to {answer.headers['location'][:200]}" if "location" in answer.headers else ""
    return Unreachable(
        f"{who} answered {status}{moved}{': ' + text if text else ''}",
        retry_after_s=retry_after_s(answer, now_us),
        permanent=status not in PASSING and status < FIRST_SERVER_ERROR,
    )


def rate_limit_s(answer: Answer, now_us: int) -> float | None:
    """Return how long to wait when an answer says that too many were asked for, None when it does not."""
    left, reset = _digits(answer.headers.get("x-ratelimit-remaining")), _digits(answer.headers.get("x-ratelimit-reset"))
    slow = left == 0 or "retry-after" in answer.headers or b"rate limit" in answer.body.lower()
    if answer.status != TOO_MANY and not (answer.status == FORBIDDEN and slow):
        return None
    asked_s = retry_after_s(answer, now_us)
    if asked_s is None and left == 0 and reset is not None:
        asked_s = min(max(reset - now_us / 1e6, 1.0), float(RETRY_AFTER_S_MAX))
    return asked_s or RATE_S


def _digits(text: str | None) -> int | None:
    return int(text[:12]) if text is not None and text.isascii() and text.isdigit() else None


def retry_after_s(answer: Answer, now_us: int) -> float | None:
    """Return how long the far side wants to be left alone: seconds, or until an instant."""
    text = answer.headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(min(int(text[:9]), RETRY_AFTER_S_MAX))
    try:
        left_s = parsedate_to_datetime(text).timestamp() - now_us / 1e6
    except (ValueError, OverflowError):
        return None
    return min(max(left_s, 0.0), float(RETRY_AFTER_S_MAX))
