"""The connections to Kafka: one producer, one admin client, and whether the cluster is there."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar, cast

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # it does not say what it exports
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from postbus.log.kafka.posting import Postman, Sending, code_of
from postbus.model import Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from postbus.clock import Clock
    from postbus.log.kafka.posting import Letter, Record

__all__ = [
    "END",
    "FIRST",
    "GONE",
    "ConfigResource",
    "Link",
    "NewTopic",
    "OffsetSpec",
    "ResourceType",
    "is_passing",
]

K = TypeVar("K")
T = TypeVar("T")

FIRST: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
END: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
RETRY_S = 0.05
PROBE_S = 2.0
GONE = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 - public there, and so below
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
        KafkaError._NOENT,  # noqa: SLF001 - nobody leads it: there is no such topic
    }
)
_QUIET = {"log_level": 0, "log.connection.close": False, "log.thread.name": False}
# Each attempt in an outage costs the client a thread that ends with it.
_BACK_SOON = {"reconnect.backoff.ms": 100, "reconnect.backoff.max.ms": 500, "socket.timeout.ms": 10_000}
# What is asked to see whether Kafka is there: any broker knows it, and it makes no difference whether there is such a
# topic. Not the description of the cluster: while no broker is alive for Kafka's controller, as after a hang of the
# only one, the answer names none, and librdkafka ends the process (rd_kafka_admin_response_parse: assert rko_result).
_PROBE = ConfigResource(ResourceType.TOPIC, "postbus")


class Link:
    """Connects when it is first used, and finds back by itself."""

    def __init__(self, address: str, answer_s: float, clock: Clock, config: Mapping[str, str]) -> None:
        self.address = address
        self.answer_s = answer_s
        self.clock = clock
        self.came_up: list[Callable[[], None]] = []
        self.closed = False
        self.config: dict[str, Any] = {**config, "bootstrap.servers": address, **_QUIET, **_BACK_SOON}
        self._admin: AdminClient | None = None
        self._reason = ""
        self._asked: set[Future[Any]] = set()
        self._postman: Postman | None = None
        self._retired: list[Postman] = []
        self._up = asyncio.Event()
        self._up.set()
        self._probe: asyncio.Task[None] | None = None
        self._outbox: list[Letter] = []
        self._due: dict[Sending, float] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._doubtful: dict[Sending, Sequence[str]] = {}

    # --- whether it is there ---

    def unreachable(self, why: str = "") -> Unreachable:
        """Return the error that says so, and why, if the client knows."""
        if self._admin is not None:
            self._admin.poll(0)  # it tells of its errors when it is asked
        why = why or self._reason
        return Unreachable(f"Kafka at {self.address} does not answer{why and ': '}{why}")

    async def ready(self) -> None:
        """Return at once when Kafka answered lately, else wait for it. Raises ``Unreachable``."""
        if not self._up.is_set() and not self.closed:
            await self.clock.wait(self._up, self.answer_s)
        if self.closed:
            raise Unreachable("the log is closed")
        if not self._up.is_set():
            raise self.unreachable()

    def lost(self, why: str = "") -> Unreachable:
        """Note that it does not answer, and begin to look for it. Returns the error to raise."""
        if not self.closed and self._up.is_set():
            self._up.clear()
            self._probe = asyncio.get_running_loop().create_task(self._look())
        return self.unreachable(why)

    async def _look(self) -> None:
        while not self.closed:
            try:
                asked = self.admin.describe_configs([_PROBE], request_timeout=PROBE_S)[_PROBE]
                await self._answer(asked, PROBE_S + 1)
                break
            except KafkaException as error:
                if code_of(error).code() in GONE or not is_passing(code_of(error)):
                    break
            except TimeoutError:
                pass
            await self.look_again()  # who answers such questions may be the one that has gone
        self._up.set()
        self._reason = ""
        for call in self.came_up if not self.closed else ():
            call()

    def _noted(self, error: KafkaError) -> None:
        if error.code() in _TELLING:
            self._reason = error.str()

    def _complained(self, error: KafkaError) -> None:
        self._noted(error)
        if error.code() == KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001 - public there
            self.lost()

    # --- questions ---

    @property
    def admin(self) -> AdminClient:
        """The client for everything that is not an event. Raises ``Unreachable`` when it is closed."""
        if self.closed:
            raise Unreachable("the log is closed")
        if self._admin is None:
            config: dict[str, Any] = {**self.config, "error_cb": self._noted}
            self._admin = AdminClient(config)
        return self._admin

    async def ask(
        self, make: Callable[[AdminClient], Mapping[K, Future[T]]], deadline: float | None = None
    ) -> dict[K, T | KafkaError]:
        """Ask until Kafka has answered yes or no to everything. Raises ``Unreachable``."""
        await self.ready()
        answers: dict[K, T | KafkaError] = {}
        deadline = self.clock.monotonic_s() + self.answer_s if deadline is None else deadline
        while True:
            again = False
            try:
                for key, future in make(self.admin).items():
                    try:
                        left = max(deadline - self.clock.monotonic_s(), 0.001)
                        answers[key] = await self._answer(cast("Future[T | KafkaError]", future), left)
                    except KafkaException as error:
                        answers[key] = said = code_of(error)
                        again = again or (said.code() not in GONE and is_passing(said))
            except TimeoutError:
                raise self.lost() from None
            except KafkaException as error:
                raise self.lost(str(code_of(error).str())) from None
            if not again:
                return answers
            if self.clock.monotonic_s() >= deadline:
                raise self.lost()
            await self.look_again()

    async def look_again(self) -> None:
        """Wait a moment and have the client ask anew who leads what; by itself it does so every five minutes."""
        await self.clock.sleep(RETRY_S)
        with contextlib.suppress(KafkaException, Unreachable):
            await asyncio.to_thread(self.admin.list_topics, timeout=PROBE_S)

    async def led(self, topic: str, partitions: int) -> None:
        """Wait until a topic is known everywhere, to our own client too. Raises ``Unreachable``."""
        deadline = self.clock.monotonic_s() + self.answer_s
        while self.clock.monotonic_s() < deadline:
            with contextlib.suppress(KafkaException):
                seen = (await asyncio.to_thread(self.admin.list_topics, topic, PROBE_S)).topics.get(topic)
                if seen is not None and sum(one.leader >= 0 for one in seen.partitions.values()) == partitions:
                    return
            await self.clock.sleep(RETRY_S)
        raise self.lost(f"the topic {topic} has no leader")

    async def exists(self, topic: str, deadline: float) -> bool:
        """Say whether there is a topic, even if nobody leads it at the moment. Raises ``Unreachable``."""
        place = ConfigResource(ResourceType.TOPIC, topic)  # asking for the topic itself may make it
        said = await self.ask(lambda admin: admin.describe_configs([place], request_timeout=self.answer_s), deadline)
        answer = said[place]
        return not isinstance(answer, KafkaError) or answer.code() not in GONE

    async def cluster(self) -> str:
        """Return the cluster's own name. Raises ``Unreachable``."""
        await self.ready()
        try:
            seen = await asyncio.to_thread(self.admin.list_topics, timeout=self.answer_s)
        except KafkaException as error:
            raise self.lost(code_of(error).str()) from None
        if (name := cast("str | None", seen.cluster_id)) is None:
            raise self.lost("it does not say which cluster it is")
        return name

    async def _answer(self, future: Future[T], seconds: float) -> T:
        """Wait for a client's answer without cancelling it: the client would trip over that."""
        loop = asyncio.get_running_loop()
        came = asyncio.Event()

        def tell(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(came.set)

        self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        future.add_done_callback(tell)
        if not await self.clock.wait(came, seconds):
            raise TimeoutError
        return future.result()

    # --- records ---

    async def send(self, records: Sequence[Record], ids: Sequence[str] = ()) -> Sending:
        """Put records on their topics, and wait for Kafka's word on each of them.

        Raises ``Unreachable`` when that takes too long; ``settled`` says later when the word has come.
        """
        deadline = self.clock.monotonic_s() + self.answer_s
        await self.ready()
        sending = Sending(len(records))
        if not records:
            sending.end()
            return sending
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._post)
        self._outbox.append((records, sending))
        self._doubtful[sending] = ids
        self._due[sending] = deadline
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        try:
            if not await sending.answer:
                raise self.lost()
        finally:
            del self._due[sending]
        del self._doubtful[sending]
        return sending

    def _post(self) -> None:
        """Hand over everything that was sent in this turn of the loop at once, so that it travels together."""
        if not self.closed:
            letters, self._outbox = self._outbox, []
            self._current().post(letters)

    def _told(self, ended: list[Sending]) -> None:
        """Wake who waits for any of these; one that comes after its time shows that Kafka is back."""
        late = any(
            sending.answer.done() and not sending.answer.cancelled() and sending.failed is None for sending in ended
        )
        for sending in ended:
            sending.end()
        if late and not self.closed:
            for call in self.came_up:
                call()

    async def _sweep(self) -> None:
        """Tell those who wait too long: one timer for all, in the order in which they began to wait."""
        while self._due:
            sending, deadline = next(iter(self._due.items()))
            left = deadline - self.clock.monotonic_s()
            if left > 0:
                await self.clock.sleep(left)
            elif not sending.answer.done():
                sending.answer.set_result(False)
            else:
                await asyncio.sleep(0)  # it is about to go
        self._sweeper = None

    async def settled(self, ids: Sequence[str]) -> None:
        """Wait until nothing with these ids is on its way any more. Raises ``Unreachable``."""
        wanted = set(ids)
        for sending, theirs in list(self._doubtful.items()):
            if sending.ended:
                del self._doubtful[sending]
            elif not wanted.isdisjoint(theirs) and not await sending.wait(self.clock, self.answer_s):
                raise self.lost()

    def _current(self) -> Postman:
        if self._postman is not None and self._postman.broken:
            self._retired.append(self._postman)
            self._postman = None
        if self._postman is None:
            self._postman = Postman(self.config, asyncio.get_running_loop(), self._told, self._complained)
        return self._postman

    async def close(self) -> None:
        """Wait a little for what is on its way, then let go of everything. Idempotent."""
        if self.closed:
            return
        self.closed = True
        up = self._up.is_set()
        self._up.set()
        for task in (self._probe, self._sweeper):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        ended: list[Sending] = []
        for _, sending in self._outbox:
            sending.give_up(0, ended, KafkaError(KafkaError._DESTROY))  # noqa: SLF001 - public there
        self._told(ended)
        self._outbox = []
        for sending in self._due:
            if not sending.answer.done():
                sending.answer.set_result(False)
        for postman in [*self._retired, *([self._postman] if self._postman else [])]:
            await asyncio.to_thread(postman.close, self.answer_s if up else 0.0)
        self._postman = None
        self._retired = []
        await self._answered()
        held, self._admin = [self._admin], None
        await asyncio.to_thread(held.clear)  # it ends here and now, and nobody waits for its threads on the loop

    async def _answered(self) -> None:
        """Wait for what was asked: the client is not taken apart before. Each question has its own time limit."""
        asked = [asyncio.wrap_future(future) for future in list(self._asked)]
        if asked:
            await asyncio.wait(asked, timeout=max(self.answer_s, PROBE_S) + 1)
            for answered in asked:
                if answered.done() and not answered.cancelled():
                    answered.exception()


def is_passing(error: KafkaError) -> bool:
    """Say whether an error is one of those that an outage, or a moment of it, explains."""
    return error.retriable() or error.code() in _PASSING


_TELLING = {
    KafkaError._AUTHENTICATION,  # noqa: SLF001 - public there, and so below
    KafkaError._SSL,  # noqa: SLF001
    KafkaError._RESOLVE,  # noqa: SLF001
}
_PASSING = {
    KafkaError._TRANSPORT,  # noqa: SLF001 - public there, and so below
    KafkaError._TIMED_OUT,  # noqa: SLF001
    KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
    KafkaError._WAIT_COORD,  # noqa: SLF001
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.NOT_CONTROLLER,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_COORDINATOR,
}
