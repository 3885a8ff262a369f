"""A client of the chat completions API that many model servers speak: streamed answers, tool calls, retries."""

from __future__ import annotations

import asyncio
import logging
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec

from postbus.model import Invalid, Refused, Unreachable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from postbus.clock import Clock

__all__ = ["Answer", "Completions", "ToolRequest"]

logger = logging.getLogger("postbus.kernel")

BYTES_MAX = 8 << 20
LINE_BYTES_MAX = 1 << 20
CALLS_MAX = 128
BACKOFF_S, BACKOFF_S_MAX = 0.5, 20.0
RETRY_AFTER_S_MAX = 60.0
PASSING = (408, 409, 425, 429)
FIRST_ERROR, FIRST_SERVER_ERROR = 400, 500
SHOWN_CHARS = 300
DONE = "[DONE]"


class ToolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A tool the model wants to be called; ``arguments`` is the JSON text it wrote, which may be wrong."""

    id: str
    name: str
    arguments: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a model, whole."""

    text: str = ""
    calls: tuple[ToolRequest, ...] = ()
    finish: str | None = None
    usage: dict[str, Any] | None = None


class _Passing(Exception):
    """What may work when it is tried again."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after_s = after_s


class Completions:
    """One server. Raises ``Unreachable`` when it does not answer in the end, ``Refused`` when it says no."""

    def __init__(
        self,
        base_url: str,
        clock: Clock,
        *,
        timeout_s: float = 120.0,
        attempts: int = 4,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = _checked(base_url)
        self._clock = clock
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._client = httpx2.AsyncClient(
            timeout=timeout_s, follow_redirects=False, trust_env=False, transport=transport
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def ask(
        self, body: dict[str, Any], key: str | None, on_text: Callable[[str], Awaitable[None]] | None = None
    ) -> Answer:
        """Send a request and return the answer; pieces of its text go to ``on_text`` as they come, if it is streamed.

        What passes (no connection, a broken stream, 429, 5xx) is tried again, as late as the server asks for.
        """
        for attempt in range(1, self._attempts + 1):
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._once(body, key, on_text)
            except TimeoutError:
                passing = _Passing(f"no whole answer in {self._timeout_s:g} s")
            except httpx2.TransportError as error:
                passing = _Passing(str(error) or type(error).__name__)
            except _Passing as error:
                passing = error
            if attempt == self._attempts:
                break
            wait_s = passing.after_s if passing.after_s is not None else BACKOFF_S * 2 ** (attempt - 1)
            logger.warning("the model server failed (%s), attempt %d of %d", passing.reason, attempt, self._attempts)
            await self._clock.sleep(min(wait_s, BACKOFF_S_MAX if passing.after_s is None else RETRY_AFTER_S_MAX))
        message = f"the model server at {self._url.host} does not answer: {passing.reason}"
        raise Unreachable(message, retry_after_s=passing.after_s)

    async def _once(
        self, body: dict[str, Any], key: str | None, on_text: Callable[[str], Awaitable[None]] | None
    ) -> Answer:
        headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        content = msgspec.json.encode(body)
        async with self._client.stream("POST", self._url, content=content, headers=headers) as response:
            if response.status_code >= FIRST_ERROR:
                await self._refuse(response)
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                return await _read_stream(_lines(response), on_text)
            answer = _whole(await _body(response))
        if on_text is not None and answer.text:
            await on_text(answer.text)
        return answer

    async def _refuse(self, response: httpx2.Response) -> None:
        said = _complaint(await _body(response))
        reason = f"HTTP {response.status_code}{f': {said}' if said else ''}"
        if response.status_code in PASSING or response.status_code >= FIRST_SERVER_ERROR:
            raise _Passing(reason, self._retry_after_s(response.headers.get("retry-after")))
        raise Refused(f"the model server refused the request: {reason}", hint=_hint(response.status_code))

    def _retry_after_s(self, text: str | None) -> float | None:
        if text is None:
            return None
        try:
            return max(0.0, float(text))
        except ValueError:
            pass
        try:
            return max(0.0, parsedate_to_datetime(text).timestamp() - self._clock.now_us() / 1e6)
        except ValueError:
            return None


def _checked(base_url: str) -> httpx2.URL:
    try:
        url = httpx2.URL(f"{base_url.rstrip('/')}/chat/completions")
    except httpx2.InvalidURL as error:
        raise Invalid(f"{base_url!r} is no base URL: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise Invalid(f"{base_url!r} is no base URL", hint="it looks like https://models.example/v1")
    return url


def _hint(status: int) -> str | None:
    hints = {401: "check the API key", 403: "check the API key", 404: "check base_url and the name of the model"}
    return hints.get(status)


# --- reading ----------------------------------------------------------------------------------------------------------


async def _body(response: httpx2.Response) -> bytes:
    body = b""
    async for block in response.aiter_bytes():
        body += block
        if len(body) > BYTES_MAX:
            raise Refused(f"the model server's answer is longer than {BYTES_MAX} bytes")
    return body


async def _lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """Yield the lines of a stream: by line feeds only, since a text may hold other line breaks."""
    rest, total = b"", 0
    async for block in response.aiter_bytes():
        total += len(block)
        *lines, rest = (rest + block).split(b"\n")
        if total > BYTES_MAX or len(rest) > LINE_BYTES_MAX:
            raise Refused("the model server's answer is too long")
        for line in lines:
            yield line.removesuffix(b"\r")
    if rest:
        yield rest


async def _read_stream(lines: AsyncIterator[bytes], on_text: Callable[[str], Awaitable[None]] | None) -> Answer:
    made, ended = _Making(), False
    async for line in lines:
        field, _, value = line.partition(b":")
        data = value.strip()
        if field != b"data" or not data:
            continue
        if data == DONE.encode():
            ended = True
            break
        text = made.add(_decoded(data))
        if text and on_text is not None:
            await on_text(text)
    if not ended and made.finish is None:
        raise _Passing("the stream broke off")
    return made.answer()


class _Making:
    """An answer that comes in pieces."""

    def __init__(self) -> None:
        self.finish: str | None = None
        self._text: list[str] = []
        self._calls: dict[int, list[str]] = {}
        self._usage: dict[str, Any] | None = None

    def add(self, chunk: dict[str, Any]) -> str:
        """Take a piece and return the text in it."""
        if chunk.get("error"):
            raise _Passing(_complaint(msgspec.json.encode(chunk)) or "it sent an error")
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        choice = _first(chunk)
        self.finish = choice.get("finish_reason") or self.finish
        delta = choice.get("delta") or choice.get("message") or {}
        for call in delta.get("tool_calls") or ():
            self._add_call(call)
        text = delta.get("content")
        if not isinstance(text, str):
            return ""
        self._text.append(text)
        return text

    def _add_call(self, call: dict[str, Any]) -> None:
        index = call.get("index")
        if not isinstance(index, int):  # some servers do not count: a new id is a new call
            index = len(self._calls) if call.get("id") or not self._calls else len(self._calls) - 1
        if index not in self._calls and len(self._calls) >= CALLS_MAX:
            raise Refused(f"the model asked for more than {CALLS_MAX} tools at once")
        parts = self._calls.setdefault(index, ["", "", ""])
        function = call.get("function") or {}
        parts[0] = parts[0] or str(call.get("id") or "")
        parts[1] += str(function.get("name") or "")
        arguments = function.get("arguments")
        parts[2] += arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()

    def answer(self) -> Answer:
        """Return it whole."""
        calls = tuple(
            ToolRequest(id=call_id or f"call_{index}", name=name, arguments=arguments or "{}")
            for index, (call_id, name, arguments) in sorted(self._calls.items())
        )
        return Answer(text="".join(self._text), calls=calls, finish=self.finish, usage=self._usage)


def _whole(body: bytes) -> Answer:
    made = _Making()
    made.add(_decoded(body))
    return made.answer()


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError:
        raise _Passing("what it sent is no JSON") from None
    if not isinstance(found, dict):
        raise _Passing("what it sent is no JSON object")
    return found


def _first(chunk: dict[str, Any]) -> dict[str, Any]:
    choices = chunk.get("choices")
    found = choices[0] if isinstance(choices, list) and choices else {}
    return found if isinstance(found, dict) else {}


def _complaint(body: bytes) -> str:
    """Return what an error says about itself, short."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return " ".join(body.decode(errors="replace").split())[:SHOWN_CHARS]
    error = found.get("error", found) if isinstance(found, dict) else found
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:SHOWN_CHARS]
