"""Reading topics by position: one consumer, with a lane for each partition somebody reads.

Kafka answers a fetch when there is something (the long poll), so a lane that has reached the end hears of the next
record at once. The client fetches ahead by itself; a reader takes from that on the event loop, where the records are
used. Only when there is nothing yet, a thread waits for it. That thread also does what may block: it carries out the
orders to move, to pause and to end a lane. The consumer is used by one of the two at a time: by the loop while the
thread *rests*, which it does from the batch it hands over until the next order.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable

    from postbus.log.kafka.link import Link

__all__ = ["Entry", "Reader", "Trimmed"]

Entry = Message | None
"""What is at an offset; None for what Kafka keeps for itself (the end of somebody's transaction)."""

POLL_S = 0.01  # how long a change of the lanes may have to wait for the consumer
TAKE = 1_000
TOPIC_S = 1.0
AHEAD_MESSAGES = 5_000
AHEAD_BYTES = 32 << 20
SPENT_MAX = 4_096
_CONFIG: dict[str, Any] = {
    "group.id": "postbus",  # a name the client insists on; no group is joined and nothing is committed
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "isolation.level": "read_uncommitted",
    "fetch.error.backoff.ms": 50,
    "fetch.queue.backoff.ms": 10,
    "fetch.message.max.bytes": 4 << 20,
    "fetch.max.bytes": 32 << 20,
    "queued.max.messages.kbytes": 32 << 10,
    "topic.metadata.refresh.interval.ms": 60_000,
}

_TOPIC, _PARTITION, _OFFSET, _ERROR = Message.topic, Message.partition, Message.offset, Message.error
_OUT_OF_RANGE = {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}  # noqa: SLF001 - public there


class Trimmed(Exception):
    """The offset is not there any more, or not yet; ask for the extent of the partition."""


class _Lane:
    """One partition being read: what came from Kafka, from ``start`` to ``position``, and was not taken yet."""

    __slots__ = (
        "ahead", "bytes", "changed", "end", "failed", "lock", "paused", "place", "position", "since", "start", "taken",
        "waiting",
    )  # fmt: skip

    def __init__(self, place: TopicPartition) -> None:
        self.place = place
        self.lock = asyncio.Lock()
        self.changed = asyncio.Event()
        self.ahead: list[Entry] = []
        self.taken = 0
        self.waiting = 0
        self.paused = False
        self.end = -1
        self.failed: KafkaError | None = None
        self.begin(-1, 0)

    def begin(self, offset: int, since: int) -> None:
        self.ahead, self.taken, self.bytes = [], 0, 0
        self.start = self.position = offset
        if self.failed is not None:
            self.failed, self.end = None, -1  # what was known may have been wrong
        self.since = since

    def add(self, offset: int, message: Message | None) -> None:
        self.ahead += [None] * (offset - self.position)
        self.position = offset
        if message is not None:
            self.ahead.append(message)
            self.bytes += len(message)
            self.position = offset + 1

    def extend(self, messages: list[Message]) -> None:
        """Add messages that follow on each other and on what is there."""
        self.ahead += messages
        self.bytes += sum(map(len, messages))
        self.position += len(messages)

    @property
    def left(self) -> int:
        return len(self.ahead) - self.taken

    def drop(self, count: int) -> list[Entry]:
        left, first = self.left, self.taken
        self.taken += count
        self.start += count
        self.bytes -= self.bytes * count // max(left, 1)  # by their average
        found = self.ahead[first : self.taken]
        if count == left:
            self.ahead, self.taken, self.bytes = [], 0, 0
        elif self.taken > SPENT_MAX:
            del self.ahead[: self.taken]
            self.taken = 0
        return found


class Reader:
    """Reads any partition at any offset; sequential reading is fast, and ``heard`` tells of what comes at the end.

    ``long_poll_ms`` is how long Kafka waits for something new, and so how long a move to another place may take.
    """

    def __init__(self, link: Link, long_poll_ms: int) -> None:
        self._link = link
        self._config = {**link.config, **_CONFIG, "fetch.wait.max.ms": long_poll_ms}
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._orders: queue.SimpleQueue[tuple[int, Callable[[Consumer], None]] | None] = queue.SimpleQueue()
        self._serial = 0
        self._thread: threading.Thread | None = None
        self._resting: Consumer | None = None  # the consumer, while the thread rests

    async def read(self, topic: str, partition: int, offset: int, end: int) -> list[Entry]:
        """Return what is at each offset from ``offset`` up to ``end``, which all exist.

        Raises ``Trimmed`` when they do not, ``Unreachable`` when Kafka does not send them.
        """
        lane = self._lane(topic, partition)
        async with lane.lock:
            if lane.failed is not None or not lane.start <= offset <= lane.position:
                self._move(lane, offset)
            lane.drop(offset - lane.start)
            taken: list[Entry] = []
            deadline = self._link.clock.monotonic_s() + self._link.answer_s
            while offset + len(taken) < end:
                if not lane.left:
                    await self._more(lane, deadline)
                taken += lane.drop(min(lane.left, end - offset - len(taken)))
            self._flow(lane)
            return taken

    async def _more(self, lane: _Lane, deadline: float) -> None:
        self._flow(lane)
        while not lane.left:
            if lane.failed is not None:
                if lane.failed.code() in _OUT_OF_RANGE:
                    raise Trimmed
                raise self._link.lost(lane.failed.str())
            left = deadline - self._link.clock.monotonic_s()
            if left <= 0 or not await self._change(lane, left):
                raise self._link.lost()

    async def _change(self, lane: _Lane, seconds: float) -> bool:
        """Wait until something came for a lane, or for that long; say whether something came, maybe for another."""
        if self._take():
            await asyncio.sleep(0)  # there may be much more, and others want the loop as well
            return True
        if self._resting is not None:
            self._order(_listen)
        lane.changed.clear()
        lane.waiting += 1
        try:
            return await self._link.clock.wait(lane.changed, seconds)
        finally:
            lane.waiting -= 1

    def follow(self, topic: str, partition: int, offset: int) -> None:
        """Begin to listen from an offset on, unless the lane is there or beyond already."""
        lane = self._lane(topic, partition)
        if lane.failed is not None or lane.position < offset or lane.position < 0:
            self._move(lane, offset)

    def has(self, topic: str, partition: int, offset: int, end: int) -> bool:
        """Say whether a range goes on where the lane is, and all of it is there."""
        lane = self._lanes.get((topic, partition))
        return (
            lane is not None
            and lane.failed is None
            and lane.start <= offset <= lane.position
            and end <= max(lane.position, lane.end)
        )

    def learn(self, topic: str, partition: int, end: int) -> None:
        """Take note of where a partition ends, so that reading on need not ask."""
        lane = self._lane(topic, partition)
        lane.end = max(lane.end, end)

    def listens(self, topic: str, partition: int, offset: int) -> bool:
        """Say whether the lane is at the end, and this is it."""
        lane = self._lanes.get((topic, partition))
        return lane is not None and lane.failed is None and lane.end == lane.position == offset

    def known_end(self, topic: str, partition: int) -> int:
        """Return the highest offset that the lane knows to be taken, and one; -1 for none."""
        lane = self._lanes.get((topic, partition))
        return -1 if lane is None else max(lane.position, lane.end)

    async def heard(self, topic: str, partition: int, offset: int, seconds: float) -> None:
        """Wait until the lane changes, or for that long; not at all when it knows of something at the offset."""
        lane = self._lane(topic, partition)
        if lane.failed is None and max(lane.position, lane.end) <= offset:
            await self._change(lane, seconds)

    def forget(self, topic: str, partition: int) -> None:
        """Stop reading a partition."""
        lane = self._lanes.pop((topic, partition), None)
        if lane is not None and lane.position >= 0:
            self._order(lambda consumer: consumer.incremental_unassign([lane.place]))
            lane.failed = KafkaError(KafkaError._DESTROY)  # noqa: SLF001 - public there
            lane.changed.set()

    async def close(self) -> None:
        """End the thread and the consumer. Idempotent."""
        if self._thread is not None:
            self._resting = None
            self._serial += 1  # so that nobody takes the thread for one that rests
            self._orders.put(None)
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    # --- lanes, on the loop ---

    def _lane(self, topic: str, partition: int) -> _Lane:
        lane = self._lanes.get((topic, partition))
        if lane is None:
            lane = self._lanes[topic, partition] = _Lane(TopicPartition(topic, partition))
        return lane

    def _move(self, lane: _Lane, offset: int) -> None:
        fresh = lane.position < 0
        place = TopicPartition(lane.place.topic, lane.place.partition, offset)

        def move(consumer: Consumer) -> None:
            if fresh:
                with contextlib.suppress(KafkaException):  # else it looks for a topic it does not know once a second
                    consumer.list_topics(place.topic, timeout=TOPIC_S)
            else:
                consumer.incremental_unassign([lane.place])
            consumer.incremental_assign([place])
            consumer.resume([place])  # a pause outlives the assignment it was made in

        lane.paused = False
        lane.begin(offset, self._order(move))

    def _flow(self, lane: _Lane) -> None:
        """Stop what is read ahead when it is much, and go on when it is used up."""
        much = lane.left > AHEAD_MESSAGES or lane.bytes > AHEAD_BYTES
        if much and not lane.paused:
            lane.paused = True
            self._order(lambda consumer: consumer.pause([lane.place]))
        elif lane.paused and lane.left < AHEAD_MESSAGES // 4:
            lane.paused = False
            self._order(lambda consumer: consumer.resume([lane.place]))

    def _order(self, work: Callable[[Consumer], None]) -> int:
        self._serial += 1
        self._resting = None
        self._orders.put((self._serial, work))
        if self._thread is None:
            run = threading.Thread(
                target=self._run, args=(asyncio.get_running_loop(),), name="postbus-kafka-reader", daemon=True
            )
            self._thread = run
            run.start()
        return self._serial

    def _take(self) -> bool:
        """Take what the client has, if the thread rests; say whether there was anything."""
        if self._resting is None:
            return False
        try:
            batch = self._resting.consume(TAKE, 0)
        except KafkaException:
            return False
        if batch:
            self._file(self._serial, batch)
        return bool(batch)

    def _took(self, consumer: Consumer, serial: int, batch: list[Message]) -> None:
        """Be given a batch by the thread, which rests now, unless there were orders since."""
        if serial == self._serial and self._thread is not None:
            self._resting = consumer
        touched = self._file(serial, batch)
        if self._resting is not None and any(lane.waiting and lane not in touched for lane in self._lanes.values()):
            self._order(_listen)

    def _file(self, serial: int, batch: list[Message]) -> set[_Lane]:
        """Give the lanes what has come; return those that it was for."""
        touched: set[_Lane] = set()
        for message in self._rest(serial, batch, touched):
            lane = self._lanes.get((message.topic() or "", message.partition() or 0))
            if lane is None or lane.position < 0 or serial < lane.since:  # of a lane that was there before
                continue
            touched.add(lane)
            offset, error = message.offset() or 0, message.error()
            if error is None:
                if offset >= lane.position:
                    lane.add(offset, message)
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - public there
                lane.add(max(offset, lane.position), None)
                lane.end = lane.position
            else:
                lane.failed = error
        for lane in touched:
            self._flow(lane)
            lane.changed.set()
        return touched

    def _rest(self, serial: int, batch: list[Message], touched: set[_Lane]) -> list[Message]:
        """Take a batch as a whole if it goes on where one lane is, the common case; return what is left to look at."""
        topic, partition, count = batch[0].topic(), batch[0].partition(), len(batch)
        lane = self._lanes.get((topic or "", partition or 0))
        if (
            lane is None
            or serial < lane.since
            or any(map(_ERROR, batch))
            or list(map(_TOPIC, batch)).count(topic) != count
            or list(map(_PARTITION, batch)).count(partition) != count
            or list(map(_OFFSET, batch)) != list(range(lane.position, lane.position + count))
        ):
            return batch
        lane.extend(batch)
        touched.add(lane)
        return []

    # --- the thread ---

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        consumer = Consumer(self._config)
        serial, resting = 0, True
        try:
            while True:
                while resting or not self._orders.empty():
                    order = self._orders.get()
                    if order is None:
                        return
                    serial = order[0]
                    with contextlib.suppress(KafkaException, RuntimeError):  # a lane that is not there any more
                        order[1](consumer)
                    resting = not consumer.assignment()
                batch = _batch(consumer)
                if batch:
                    resting = True
                    loop.call_soon_threadsafe(self._took, consumer, serial, batch)
        except RuntimeError:  # the loop is closed
            return
        finally:
            consumer.close()


def _listen(_consumer: Consumer) -> None:
    """Carry out the order to do nothing but go on listening."""


def _batch(consumer: Consumer) -> list[Message]:
    try:
        first = consumer.poll(POLL_S)
        return [] if first is None else [first, *consumer.consume(TAKE, 0)]
    except KafkaException:
        return []
