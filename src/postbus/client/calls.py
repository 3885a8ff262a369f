"""What every call needs: the connection, whose names are meant, and how answers are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import msgspec

from postbus import strict_json
from postbus.client.connection import Connection
from postbus.clock import SystemClock
from postbus.model import Invalid

if TYPE_CHECKING:
    from types import TracebackType

    from postbus.clock import Clock

__all__ = ["ROOT", "Calls", "json_bytes", "part"]

ROOT = "/v1/bus"


class Calls:
    """A server, and the tenant whose names may be given without it."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:7766",
        *,
        key: str | None = None,
        tenant: str = "local.default",
        timeout_s: float = 30.0,
        patience_s: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        if tenant.count(".") != 1 or not all(tenant.split(".")):
            raise Invalid(f"a tenant is called namespace.tenant, not {tenant!r}")
        self._tenant = tenant
        self._place = "/".join(map(part, tenant.split(".")))
        self._clock = clock or SystemClock()
        self._connection = Connection(url, key, timeout_s, patience_s, self._clock)

    async def __aenter__(self) -> Self:
        """Nothing is connected before the first call."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        await self._connection.close()

    async def _send(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: dict[str, Any] | None = None,
        *,
        again: bool = False,
        wait_s: float = 0.0,
    ) -> bytes:
        return await self._connection.request(method, ROOT + path, body, query, again=again, wait_s=wait_s)

    async def _json(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: dict[str, Any] | None = None,
        *,
        again: bool = False,
        wait_s: float = 0.0,
    ) -> dict[str, Any]:
        raw = await self._send(method, path, body, query, again=again or method == "GET", wait_s=wait_s)
        found: dict[str, Any] = msgspec.json.decode(raw) if raw else {}
        return found

    async def _pages(self, path: str, name: str, query: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        after: Any = None
        while True:
            page = await self._json("GET", path, query={**query, "after": after})
            found += page[name]
            after = page.get("next")
            if after is None:
                return found

    def _full(self, topic: str) -> str:
        return topic if "." in topic else f"{self._tenant}.{topic}"

    def _whose(self, tenant: str | None) -> dict[str, Any]:
        namespace, _, name = (tenant or self._tenant).partition(".")
        return {"namespace": namespace, "tenant": name}


def part(name: str, *, slashes: bool = False) -> str:
    """Return a name as a part of a path; with ``slashes``, as several. Others have none: they would lead elsewhere."""
    if "/" in name and not slashes:
        raise Invalid(f"{name[:100]!r} is no name", hint="a name holds A-Z a-z 0-9 . _ -")
    try:
        return quote(name, safe="/" if slashes else "")
    except UnicodeEncodeError:
        raise Invalid(f"{name[:100]!r} is no name") from None


def json_bytes(value: Any) -> msgspec.Raw:
    """Return a JSON value as bytes; bytes are JSON already, and are kept as they are."""
    if not isinstance(value, bytes):
        return msgspec.Raw(strict_json.encode(value))
    strict_json.validate(value)
    return msgspec.Raw(value)
