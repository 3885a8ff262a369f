"""Requests that survive lost connections, and streams that resume.

A request that may be sent twice without harm is sent again until it is answered; every other one only when it is
certain that the server did nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import httpx2
import msgspec

from postbus.client.wire import refusal, retry_after_s
from postbus.model import Invalid, NotFound, PostbusError, Unreachable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

    from postbus.clock import Clock

__all__ = ["Connection"]

T = TypeVar("T")

UNIX = "unix:"
BACKOFF_S = 0.05
BACKOFF_S_MAX = 2.0
STREAM_SILENCE_S = 45.0
# Refused by the server before it did anything; and in front of it, where nobody knows.
REFUSED = frozenset({429, 503})
UNCERTAIN = frozenset({500, 502, 504})
NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


class Connection:
    """Connections to one server. ``patience_s``: how long to go on trying."""

    def __init__(self, url: str, key: str | None, timeout_s: float, patience_s: float, clock: Clock) -> None:
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._clock = clock
        socket = url.removeprefix(UNIX) if url.startswith(UNIX) else None
        try:
            self._http = httpx2.AsyncClient(
                base_url=url if socket is None else "http://localhost",
                headers={} if key is None else {"authorization": f"Bearer {key}"},
                timeout=timeout_s,
                transport=httpx2.AsyncHTTPTransport(uds=socket),
                trust_env=socket is None,
            )
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise Invalid(f"{url!r} is no address of a server: {error}") from None
        if self._http.base_url.scheme not in ("http", "https") or not self._http.base_url.host:
            raise Invalid(f"{url!r} is no address of a server", hint="it is like http://host:7766 or unix:/run/postbus")

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        *,
        again: bool = False,
        wait_s: float = 0.0,
    ) -> bytes:
        """Return the answer's body; raises the error a refusal stands for, or ``Unreachable``.

        ``again``: sending it twice does no harm. ``wait_s``: how long the server may think besides.
        """
        content = None if body is None else _encode(body)
        _check(path)
        headers = {} if body is None else {"content-type": "application/json"}
        params = {name: value for name, value in (query or {}).items() if value is not None}
        trial = _Trial(self._clock, self._patience_s)
        while True:
            try:
                response = await self._http.request(
                    method, path, content=content, params=params, headers=headers, timeout=self._timeout_s + wait_s
                )
            except httpx2.TransportError as error:
                sent = not isinstance(error, NEVER_SENT)
                trial.uncertain = trial.uncertain or sent
                if sent and not again:
                    message = f"the connection was lost: {_words(error)}; it is not known whether it was done"
                    raise Unreachable(message) from error
                await trial.wait(Unreachable(f"the server cannot be reached: {_words(error)}"))
                continue
            if response.status_code < httpx2.codes.BAD_REQUEST:
                return response.content
            after = response.headers.get("retry-after")
            refused = refusal(response.status_code, response.content, after)
            if response.status_code in REFUSED or (again and response.status_code in UNCERTAIN):
                trial.uncertain = trial.uncertain or response.status_code in UNCERTAIN
                await trial.wait(refused, retry_after_s(after))
                continue
            if method == "DELETE" and trial.uncertain and isinstance(refused, NotFound):
                return b""  # the one whose answer was lost did it
            raise refused

    async def stream(
        self,
        path: str,
        query: Mapping[str, Any],
        last_id: str | None,
        kind: str,
        decode: Callable[[str], Iterable[T]],
    ) -> AsyncIterator[T]:
        """Yield what messages of a ``kind`` hold, for ever; a lost connection is made again where it was lost."""
        _check(path, last_id or "")
        params = {name: value for name, value in query.items() if value is not None}
        trial = _Trial(self._clock, self._patience_s)
        timeout = httpx2.Timeout(self._timeout_s, read=max(STREAM_SILENCE_S, self._timeout_s))
        told = False
        while True:
            headers = {"accept": "text/event-stream"} | ({} if last_id is None else {"last-event-id": last_id})
            why: PostbusError = Unreachable("the stream ended")
            try:
                async with self._http.stream("GET", path, params=params, headers=headers, timeout=timeout) as response:
                    if response.status_code >= httpx2.codes.BAD_REQUEST:
                        after = retry_after_s(response.headers.get("retry-after"))
                        why = refusal(response.status_code, await response.aread())
                        if response.status_code not in REFUSED | UNCERTAIN:
                            raise why
                        await trial.wait(why, after)
                        continue
                    if not told:
                        trial = _Trial(self._clock, self._patience_s)
                    async for message in httpx2.EventSource(response):
                        if message.event == "bus.error":
                            why, told = _told(message.data), True
                            break
                        last_id = message.id or last_id
                        if message.event == kind:
                            told, trial = False, _Trial(self._clock, self._patience_s)
                            for one in decode(message.data):
                                yield one
            except httpx2.TransportError as error:
                why = Unreachable(f"the server cannot be reached: {_words(error)}")
            await trial.wait(why)


class _Trial:
    """One thing that is tried again and again, with growing pauses, until patience runs out."""

    def __init__(self, clock: Clock, patience_s: float) -> None:
        self.uncertain = False
        self._clock = clock
        self._until_s = clock.monotonic_s() + patience_s
        self._pause_s = BACKOFF_S

    async def wait(self, why: PostbusError, asked_s: float | None = None) -> None:
        """Wait before the next try, at least as long as the server asked for; raises ``why`` when it is over."""
        jitter = int(self._clock.new_id()[:8], 16) / 0xFFFFFFFF
        pause = max(self._pause_s * (0.5 + jitter / 2), asked_s or 0.0)
        if self._clock.monotonic_s() + pause > self._until_s:
            raise why
        self._pause_s = min(2 * self._pause_s, BACKOFF_S_MAX)
        await self._clock.sleep(pause)


def _encode(body: Any) -> bytes:
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise Invalid(f"this cannot be sent as JSON: {error}") from None


def _check(path: str, last_id: str = "") -> None:
    """Refuse a path with a part that would lead elsewhere (no name is empty, a dot or two), and what is no header."""
    if not {"", ".", ".."}.isdisjoint(path[1:].split("/")):
        raise Invalid("a name is missing, or is no name", hint="a name holds A-Z a-z 0-9 . _ -")
    if not (last_id.isascii() and last_id.isprintable()):
        raise Invalid("that is no Last-Event-ID", hint="it is the id of the last message that came")


def _told(data: str) -> PostbusError:
    """Return what the server says before it closes a stream; what is for good it says again when asked again."""
    return refusal(503, b'{"error":%s}' % data.encode())


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
