"""Cursors shown as Kafka consumer groups, so that Kafka's own tools see the lag; nobody joins a group.

Not through the admin client: when the connection to the group's coordinator breaks, librdkafka ends the process
(rd_kafka_enq_once_del_source_return: assert eonce->refcnt > 0).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from postbus.log.kafka.link import is_passing
from postbus.log.kafka.posting import code_of
from postbus.model import Refused

if TYPE_CHECKING:
    from postbus.log.kafka.link import Link

__all__ = ["Groups"]

POLL_S = 0.1

Outcome = tuple[KafkaError | None, list[TopicPartition]]


class Groups:
    """Commits offsets for groups, one after the other for each.

    A commit that finds Kafka away goes on in its own thread until it has an answer, also after nobody waits for it: a
    consumer cannot be closed before that.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._turns: dict[str, asyncio.Lock] = {}
        self._open: dict[str, asyncio.Future[Outcome]] = {}

    async def commit(self, group: str, places: list[TopicPartition]) -> None:
        """Set the offsets of a group. Raises ``Refused`` and ``Unreachable``."""
        await self._link.ready()
        async with self._turns.setdefault(group, asyncio.Lock()):
            before = self._open.get(group)
            if before is not None:
                await self._outcome(before)
            self._open[group] = answer = asyncio.get_running_loop().create_future()
            threading.Thread(
                target=self._run, args=(answer, group, places), name="postbus-kafka-group", daemon=True
            ).start()
            error, placed = await self._outcome(answer)
            del self._open[group]
        if error is not None and is_passing(error):
            raise self._link.lost(error.str())
        for said in (error, *(place.error for place in placed)):
            if said is not None:
                raise Refused(f"Kafka does not keep the offsets of group {group}: {said.str()}")

    async def _outcome(self, answer: asyncio.Future[Outcome]) -> Outcome:
        done, _ = await asyncio.wait([answer], timeout=self._link.answer_s)
        if not done:
            raise self._link.lost()
        return answer.result()

    def _run(self, answer: asyncio.Future[Outcome], group: str, places: list[TopicPartition]) -> None:
        told: list[Outcome] = []
        consumer = Consumer(
            {
                **self._link.config,
                "group.id": group,
                "enable.auto.commit": False,
                "on_commit": lambda error, placed: told.append((error, placed or [])),
            }
        )
        try:
            consumer.commit(offsets=places, asynchronous=True)
            while not told:
                consumer.poll(POLL_S)
        except KafkaException as error:
            told.append((code_of(error), []))
        consumer.close()
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits any more
            answer.get_loop().call_soon_threadsafe(_tell, answer, told[0])


def _tell(answer: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not answer.done():
        answer.set_result(outcome)
