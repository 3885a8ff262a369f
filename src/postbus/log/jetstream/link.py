"""One connection to a NATS server that comes back by itself, and the questions that are asked on it.

Every connection is a new client, nothing survives an old one, and whoever waits for an answer is told at once when it
cannot come. One subscription takes all answers, also those that consist of many messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

import msgspec
import nats.errors

from postbus.clock import SystemClock
from postbus.log.jetstream.connection import RETRY_S, RETRY_S_MAX, Connection
from postbus.model import PostbusError, Refused, StorageFull, Unreachable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from types import TracebackType

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from postbus.log.jetstream.connection import Servers

__all__ = ["ApiError", "Link", "NoStream", "acked", "parsed"]

logger = logging.getLogger("postbus.log")

AGAIN_S = 1.0
STATUS = "Status"
ELECTED = "$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED.*"  # only clusters say it
NO_RESPONDERS = "503"
OUTAGE_FROM = 500  # of JetStream's codes: the server cannot, which is no fault of the request
NOT_CLUSTERED = 10074
FULL = (10023, 10028, 10047, 10077)  # resources, memory, storage, "maximum bytes exceeded"


class NoStream(PostbusError):
    """Nobody listens on the subject: no JetStream stream has it, or not any more."""


class ApiError(PostbusError):
    """JetStream answered with an error."""

    def __init__(self, code: int, number: int, description: str) -> None:
        super().__init__(f"JetStream: {description}")
        self.http_code = code
        self.number = number

    def told(self) -> PostbusError:
        """Return it as what a caller of the log can act on."""
        if self.number in FULL:
            return StorageFull(self.message, hint="give JetStream more room, or trim streams")
        if self.http_code >= OUTAGE_FROM and self.number != NOT_CLUSTERED:
            return Unreachable(self.message)
        return Refused(self.message)


class _Ack(msgspec.Struct):
    seq: int = 0
    error: dict[str, Any] | None = None


_decode_ack = msgspec.json.Decoder(_Ack).decode


def acked(raw: bytes) -> int:
    """Return the sequence that an acknowledgement names; raises ``ApiError`` when it is none."""
    try:
        found = _decode_ack(raw)
    except msgspec.MsgspecError:
        return int(parsed(raw).get("seq", 0))
    if found.error is not None or not found.seq:
        raise _api_error(found.error or {})
    return found.seq


def parsed(raw: bytes) -> dict[str, Any]:
    """Return an answer of JetStream; raises ``ApiError`` when it is one."""
    try:
        found: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.MsgspecError:
        raise Unreachable("something else answered in the place of JetStream") from None
    if found.get("error"):
        raise _api_error(found["error"])
    return found


def _api_error(error: dict[str, Any]) -> ApiError:
    return ApiError(error.get("code", OUTAGE_FROM), error.get("err_code", 0), error.get("description", "refused"))


class _Bound:
    """See ``Link.bounded``; written out because every append passes here."""

    __slots__ = ("_answer_s", "_limit")

    def __init__(self, answer_s: float) -> None:
        self._answer_s = answer_s
        self._limit = asyncio.timeout(answer_s)

    async def __aenter__(self) -> asyncio.Timeout:
        return await self._limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            raise Unreachable(f"NATS did not answer within {self._answer_s:g} s") from None
        if isinstance(error, ApiError):
            raise error.told() from None
        if isinstance(error, NoStream):
            raise Unreachable("JetStream is not ready") from None
        if isinstance(error, (nats.errors.Error, OSError)):
            raise Unreachable(f"NATS cannot be reached: {error}") from error


class Link:
    """Connects when first used, and stays connected until ``close``."""

    def __init__(self, servers: Servers, answer_s: float) -> None:
        self._servers = servers
        self.url = servers.url
        self.answer_s = answer_s
        self.up: list[Callable[[], None]] = []
        self.asked = 0
        self._error = "not connected yet"
        self._clock = SystemClock()
        self._client: Client | None = None
        self._inbox = ""
        self._waiting: dict[str, tuple[asyncio.Future[Msg | None], list[Msg] | None]] = {}
        self._tried = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False

    def bounded(self) -> _Bound:
        """Let nothing inside take longer than ``answer_s``, and turn what goes wrong with NATS into our own errors."""
        return _Bound(self.answer_s)

    def more_time(self, limit: asyncio.Timeout) -> None:
        """Begin ``answer_s`` again, because the server has just answered a part."""
        limit.reschedule(asyncio.get_running_loop().time() + self.answer_s)

    async def client(self) -> Client:
        """Return the connected client; waits only for the very first attempt to connect."""
        if self._client is not None and self._client.is_connected:
            return self._client
        if self._closed:
            raise Unreachable("this log is closed")
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep())
        await self._tried.wait()
        if self._client is None or not self._client.is_connected:
            raise Unreachable(f"NATS cannot be reached: {self._error}")
        return self._client

    async def ask(self, subject: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Msg:
        """Send a message and return the answer. Raises ``NoStream`` when nobody listens."""
        return await self._asked(subject, body, headers, None)

    async def ask_many(self, subject: str, body: bytes) -> tuple[list[Msg], Msg]:
        """Send a message and return all answers up to the one with a status, and that one."""
        answers: list[Msg] = []
        return answers, await self._asked(subject, body, None, answers)

    async def ask_each(
        self, messages: Sequence[tuple[str, bytes, dict[str, str]]], wait_s: float | None = None
    ) -> list[Msg | NoStream]:
        """Send messages in order, all at once, and return the answer to each; none within ``wait_s`` is like nobody."""
        client = await self.client()
        open_ = [self._question(None) for _ in messages]
        answers: list[Msg | NoStream] = []
        try:
            for (subject, body, headers), (reply, _) in zip(messages, open_, strict=True):
                await client.publish(subject, body, reply, headers)
            if wait_s is not None:
                await asyncio.wait([answer for _, answer in open_], timeout=wait_s)
            for _, answer in open_:
                try:
                    if wait_s is not None and not answer.done():
                        raise NoStream("no answer")  # noqa: TRY301 - as if nobody had listened
                    answers.append(_checked(await answer))
                except NoStream as error:
                    answers.append(error)
        finally:
            for reply, _ in open_:
                self._waiting.pop(reply, None)
        return answers

    async def _asked(self, subject: str, body: bytes, headers: dict[str, str] | None, many: list[Msg] | None) -> Msg:
        client = await self.client()
        reply, answer = self._question(many)
        try:
            await client.publish(subject, body, reply, headers)
            return _checked(await answer)
        finally:
            self._waiting.pop(reply, None)

    def _question(self, many: list[Msg] | None) -> tuple[str, asyncio.Future[Msg | None]]:
        self.asked += 1
        reply = f"{self._inbox}.{self.asked}"
        answer: asyncio.Future[Msg | None] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = answer, many
        return reply, answer

    async def tell(self, subject: str, body: bytes, headers: dict[str, str]) -> None:
        """Send a message that nobody answers."""
        await (await self.client()).publish(subject, body, "", headers)

    async def api(self, operation: str, body: object = None, *, again: bool = True) -> dict[str, Any]:
        """Ask JetStream itself; raises ``ApiError``.

        A cluster does not answer for a stream that has no leader yet: ``again`` asks until it does.
        """
        request = b"" if body is None else msgspec.json.encode(body)
        while True:
            try:
                async with asyncio.timeout(AGAIN_S if again else None):
                    answer = await self.ask(f"$JS.API.{operation}", request)
            except TimeoutError:
                continue
            except NoStream:
                raise Unreachable(
                    "the NATS server has no JetStream", hint="enable jetstream in its configuration"
                ) from None
            return parsed(answer.data)

    @contextlib.asynccontextmanager
    async def heard(self, subject: str) -> AsyncIterator[asyncio.Future[Msg | None]]:
        """Subscribe to the next message on a subject: the future is it, or None when the connection was lost."""
        heard: asyncio.Future[Msg | None] = asyncio.get_running_loop().create_future()

        async def hear(message: Msg) -> None:
            if not heard.done():
                heard.set_result(message)

        async with self.bounded():
            subscription = await (await self.client()).subscribe(subject, cb=hear)
        key = f"heard.{id(heard)}"
        self._waiting[key] = heard, None
        try:
            yield heard
        finally:
            self._waiting.pop(key, None)
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    async def close(self) -> None:
        """Disconnect for good. Idempotent."""
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None

    # --- the connection -----------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        delay = RETRY_S
        while True:
            connection = Connection(self._servers, self._complained)
            try:
                # without a limit a send to a server that hangs does not wait, where it could not be cancelled
                await connection.connect(self._open, pending_size=0)
                delay = RETRY_S
                self._client = connection.client
                self._tried.set()
                for told in self.up:
                    told()
                await connection.ended(self._clock)
                self._error = "the connection was lost"
                logger.warning("%s: the connection was lost", self.url)
            except (OSError, nats.errors.Error) as error:  # a timeout is an OSError
                self._error = str(error) or type(error).__name__
            finally:
                self._client = None
                self._tried.set()
                for answer, _ in list(self._waiting.values()):
                    if not answer.done():
                        answer.set_result(None)
                await connection.close()
            await self._clock.sleep(delay)
            delay = min(delay * 2, RETRY_S_MAX)

    async def _open(self, client: Client) -> None:
        self._inbox = client.new_inbox()
        await client.subscribe(f"{self._inbox}.*", cb=self._answered, pending_msgs_limit=0, pending_bytes_limit=0)
        await client.subscribe(ELECTED, cb=self._elected)

    async def _elected(self, _message: Msg) -> None:
        """Be told that the servers have agreed on who leads a stream: what could not be sent may go now."""
        for told in self.up:
            told()

    def _complained(self, error: Exception) -> None:
        logger.debug("%s: %s", self.url, error)

    async def _answered(self, message: Msg) -> None:
        waiting = self._waiting.get(message.subject)
        if waiting is None:
            return
        answer, many = waiting
        if many is not None and not (message.headers and STATUS in message.headers):
            many.append(message)
        elif not answer.done():
            answer.set_result(message)


def _checked(found: Msg | None) -> Msg:
    if found is None:
        raise Unreachable("the connection to NATS was lost meanwhile")
    if found.headers and found.headers.get(STATUS) == NO_RESPONDERS:
        raise NoStream("no JetStream stream has this subject")
    return found
