"""From the broker into the log: what is said on some subjects is kept, so that handlers and inboxes get it for sure."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Self

from postbus.broker.contract import Message
from postbus.broker.subjects import TASKFLOW_RESUME
from postbus.envelope import draft
from postbus.model import Draft, PostbusError, Trust
from postbus.topics import check_stream_name

if TYPE_CHECKING:
    from postbus.broker.contract import Broker
    from postbus.broker.listener import Listener
    from postbus.log import Log

__all__ = ["Bridge"]

logger = logging.getLogger("postbus.broker")

SOURCE = "broker"
NATIVE_ID, CORRELATION_ID = "native_id", "correlation_id"


class Bridge:
    """Appends every message on a pattern to the tenant's journal, as an untrusted event on the message's topic.

    The headers ``native_id`` and ``correlation_id`` become the event's own. A request is answered with ``{"id": …}``
    once the event is kept, or with ``{"error": …}``; who only publishes is told nothing, as ever on a broker.
    """

    def __init__(
        self, broker: Broker, log: Log, *, pattern: str = TASKFLOW_RESUME, tenant: str = "local.default"
    ) -> None:
        self._broker = broker
        self._log = log
        self._pattern = pattern
        self._journal = check_stream_name(f"{tenant}.journal")
        self._listener: Listener | None = None
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._log.ensure_stream(self._journal)
        self._listener = await self._broker.subscribe(self._pattern)
        self._reader = asyncio.get_running_loop().create_task(self._read(self._listener))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listener is not None and self._reader is not None:
            await self._listener.close()
            await self._reader  # what has arrived is kept first

    async def _read(self, listener: Listener) -> None:
        async for got in listener:
            if not isinstance(got, Message):
                logger.warning("messages on %s were missed", self._pattern)
                continue
            try:
                kept = await self._log.append(self._journal, [_event(got)])
                answer = {"id": kept[0].id}
            except PostbusError as error:
                logger.warning("a message on %s was not kept: %s", got.topic, error)
                answer = {"error": error.message}
            if got.reply:
                try:
                    await self._broker.publish(got.reply, answer)
                except PostbusError as error:
                    logger.info("nobody was told of it: %s", error)


def _event(got: Message) -> Draft:
    headers = dict(got.headers)
    native_id, correlation_id = headers.pop(NATIVE_ID, None), headers.pop(CORRELATION_ID, None)
    return draft(
        got.topic,
        SOURCE,
        got.payload_json,
        correlation_id=correlation_id,
        headers=headers or None,
        native_id=native_id,
        trust=Trust.UNTRUSTED,
    )
