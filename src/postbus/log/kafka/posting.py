"""Sending records to Kafka: in groups, from a thread that also hears what became of each."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from postbus.log.kafka.names import MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from postbus.clock import Clock

__all__ = ["Headers", "Letter", "Postman", "Record", "Sending", "code_of"]

IDLE_S = 0.1
GROUP_S = 0.005  # how long what is sent next waits at most for what is on its way
FULL_S = 0.005
FIRST_S = 1.0
# Never gives up by itself: what was sent once keeps its sequence number until Kafka has said yes or no to it, so that
# it is in the log once or not at all, and ``find`` can know which.
_SAFE = {
    "enable.idempotence": True,
    "acks": "all",
    "message.timeout.ms": 0,
    "message.max.bytes": MESSAGE_BYTES_MAX,
    "linger.ms": 5,  # nothing waits for it: see ``Postman``
    "retry.backoff.ms": 50,
    "queue.buffering.max.messages": 500_000,
    "topic.metadata.propagation.max.ms": 3_000,  # how long a topic that was deleted may be thought to be new
}

Headers = dict[str, str | bytes | None]
Record = tuple[str, int, bytes | None, Headers, bytes | None]
"""What is put on a topic: the topic and partition, a body, headers, a key."""
Letter = tuple["Sequence[Record]", "Sending"]


def code_of(error: BaseException) -> KafkaError:
    """Return what a client's exception says."""
    said = error.args[0] if isinstance(error, KafkaException) and error.args else None
    return said if isinstance(said, KafkaError) else KafkaError(KafkaError._FAIL, str(error))  # noqa: SLF001 - public there


class Sending:
    """Some records on their way. ``outcomes`` has an offset or an error for each once it has ended."""

    __slots__ = ("_left", "_waiter", "answer", "ended", "outcomes")

    def __init__(self, count: int) -> None:
        self.outcomes: list[int | KafkaError] = [-1] * count
        self.ended = False
        self.answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiter: asyncio.Event | None = None
        self._left = count  # belongs to the producer's thread

    @property
    def failed(self) -> KafkaError | None:
        """The first error among the outcomes."""
        return next((said for said in self.outcomes if isinstance(said, KafkaError)), None)

    @property
    def offsets(self) -> list[int]:
        """The outcomes, if none has failed."""
        return cast("list[int]", self.outcomes)

    def take(self, index: int, ended: list[Sending], error: KafkaError | None, message: Message) -> None:
        """Note one outcome; the last one adds this to those that have ended. On the producer's thread."""
        self.outcomes[index] = (message.offset() or 0) if error is None else error
        self._left -= 1
        if not self._left:
            ended.append(self)

    def give_up(self, start: int, ended: list[Sending], error: KafkaError) -> None:
        """Note that the records from ``start`` on were never handed over; else as ``take``."""
        count = len(self.outcomes) - start
        self.outcomes[start:] = [error] * count
        self._left -= count
        if not self._left:
            ended.append(self)

    def end(self) -> None:
        """Wake who waits; called on the loop, perhaps twice."""
        self.ended = True
        if not self.answer.done():
            self.answer.set_result(True)
        if self._waiter is not None:
            self._waiter.set()

    async def wait(self, clock: Clock, seconds: float) -> bool:
        """Wait until every outcome is known; False when the time is over first."""
        if not self.ended:
            self._waiter = self._waiter or asyncio.Event()
            return await clock.wait(self._waiter, seconds)
        return True


class Postman:
    """A producer and the thread that hands it records and hears what became of them, which is ``told`` on the loop.

    What waits when the thread comes by travels together, at once: the client would wait for more by itself (its
    linger), but not while it is being flushed. Without a linger it would send the first records of a group before it
    has the others, and while too many requests are on their way, turn in circles on a processor of its own.
    """

    def __init__(
        self,
        config: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
        told: Callable[[list[Sending]], None],
        failed: Callable[[KafkaError], None],
    ) -> None:
        self.broken = False
        self._loop = loop
        self._told = told
        self._failed = failed
        self._box: queue.SimpleQueue[list[Letter] | None] = queue.SimpleQueue()
        self._ended: list[Sending] = []
        self._closing: float | None = None
        self._producer = Producer({**config, **_SAFE, "error_cb": self._complaint})
        self._thread = threading.Thread(target=self._work, name="postbus-kafka-producer", daemon=True)
        self._thread.start()

    def post(self, letters: list[Letter]) -> None:
        """Send records; called on the loop."""
        self._box.put(letters)

    def close(self, seconds: float) -> None:
        """Wait a little for what is on its way, then let go."""
        self._closing = seconds
        self._box.put(None)
        self._thread.join()
        with contextlib.suppress(KafkaException):
            self._producer.close()  # here and now, not when the collector comes by on some thread

    def _work(self) -> None:
        with contextlib.suppress(KafkaException):  # asking anything makes it connect now, not within half a second
            self._producer.list_topics(timeout=FIRST_S)
        closing = False
        while not closing:
            closing = self._empty()
            self._producer.flush(GROUP_S)
            self._tell()
        with contextlib.suppress(KafkaException):
            self._producer.flush(self._closing or 0)
            self._producer.purge()
            self._producer.flush(0)
        self._tell()

    def _empty(self) -> bool:
        """Hand over everything that is in the box; wait for it a while if nothing is on its way. True for the end."""
        with contextlib.suppress(queue.Empty):
            letters = self._box.get(timeout=0 if len(self._producer) else IDLE_S)
            while letters is not None:
                for records, sending in letters:
                    self._hand_over(records, sending)
                letters = self._box.get_nowait()
            return True
        return False

    def _hand_over(self, records: Sequence[Record], sending: Sending) -> None:
        produce, take, ended = self._producer.produce, sending.take, self._ended
        for index, (topic, partition, body, headers, key) in enumerate(records):
            while True:
                try:
                    produce(topic, body, key, partition, partial(take, index, ended), headers=headers)
                    break
                except BufferError as error:  # full: it empties as Kafka acknowledges
                    if self._closing is not None:
                        sending.give_up(index, ended, code_of(error))
                        return
                    self._producer.flush(FULL_S)
                    self._tell()
                except KafkaException as error:
                    self.broken = self.broken or code_of(error).fatal()
                    sending.give_up(index, ended, code_of(error))
                    return

    def _tell(self) -> None:
        if self._ended:
            ended, self._ended[:] = self._ended[:], []
            with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits any more
                self._loop.call_soon_threadsafe(self._told, ended)

    def _complaint(self, error: KafkaError) -> None:
        self.broken = self.broken or error.fatal()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._failed, error)
