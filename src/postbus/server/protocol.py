"""HTTP on a connection, with what uvicorn leaves out: deadlines for a request, and a size for its head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from postbus.server.errors import ErrorBody, Problem

if TYPE_CHECKING:
    import asyncio

__all__ = ["HeadProtocol"]

HEAD_S_MAX = 10.0
BODY_S_MAX = 30.0
HEAD_BYTES_MAX = 32 * 1024
EARLY_BYTES_MAX = 1 << 20
HEADERS_MAX = 100
TOO_LARGE = (431, "too_large", "the head of the request is too large")
TOO_SLOW = (408, "request_timeout", "the request did not arrive in time")
REASONS = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class HeadProtocol(HttpToolsProtocol):
    """A request's head must arrive whole within a time and a size, its body within a time, however they are dripped.

    The bounds of a head also hold for what is left of a body after its request was answered. Only a request that has
    begun is answered; everything else is closed without a word that could be taken for the answer to something.
    """

    head_s_max = HEAD_S_MAX
    body_s_max = BODY_S_MAX

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._body_deadline: asyncio.TimerHandle | None = None
        self._in_head = False
        self._head_bytes = 0
        self._waiting_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._stop_waiting()
        if self._body_deadline is not None:
            self._body_deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what arrives until a head is whole; a byte after a response begins the wait for the next one."""
        if self.transport.is_closing():
            return
        cycle: Any = self.cycle
        if self._deadline is None and (cycle is None or cycle.response_complete):
            self._wait()
        self._waiting_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._waits:
            if self._waiting_bytes > HEAD_BYTES_MAX:
                self._refuse(TOO_LARGE)
        elif self.cycle.more_body:
            if self._body_deadline is None:
                self._body_deadline = self.loop.call_later(self.body_s_max, self._cut_body)
        elif self._waiting_bytes > EARLY_BYTES_MAX:
            self.transport.close()  # a head that never ends, behind a request that is still being answered

    def on_message_begin(self) -> None:
        """Begin to count the next head."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        """Count the request's line."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the headers."""
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """The head is whole, unless it was refused already."""
        self._stop_waiting()
        self._in_head = False
        if not self.transport.is_closing():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, unless the head was refused."""
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """What arrives from now on belongs to the next request."""
        self._waiting_bytes = 0
        if self._body_deadline is not None:
            self._body_deadline.cancel()
            self._body_deadline = None
        if not self.transport.is_closing():
            super().on_message_complete()

    @property
    def _waits(self) -> bool:
        return self._deadline is not None

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES_MAX or len(self.headers) > HEADERS_MAX:
            self._refuse(TOO_LARGE)

    def _wait(self) -> None:
        self._waiting_bytes = 0
        self._deadline = self.loop.call_later(self.head_s_max, self._refuse, TOO_SLOW)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cut_body(self) -> None:
        if self.cycle.more_body and not self.transport.is_closing():
            if not self.cycle.response_started:
                self._say(TOO_SLOW)
            self.transport.close()

    def _refuse(self, why: tuple[int, str, str]) -> None:
        self._stop_waiting()
        if not self.transport.is_closing():
            if self._in_head:
                self._say(why)
            self.transport.close()

    def _say(self, why: tuple[int, str, str]) -> None:
        status, code, message = why
        body = msgspec.json.encode(ErrorBody(Problem(code, message)))
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % (status, REASONS[status], len(body)) + body)
