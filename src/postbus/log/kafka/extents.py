"""Where partitions begin and end, and whether there is such a topic at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, TopicPartition

from postbus.log.kafka.link import GONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.log.kafka.link import Link, OffsetSpec

__all__ = ["offsets"]


async def offsets(link: Link, topic: str, partitions: Sequence[int], spec: OffsetSpec) -> list[int] | None:
    """Return an offset of each partition, or None when there is no such topic. Raises ``Unreachable``."""
    places = [TopicPartition(topic, partition) for partition in partitions]
    wanted = dict.fromkeys(places, spec)
    deadline = link.clock.monotonic_s() + link.answer_s
    while True:
        said = await link.ask(lambda admin: admin.list_offsets(wanted, request_timeout=link.answer_s), deadline)
        errors = [one for one in said.values() if isinstance(one, KafkaError)]
        if not errors:
            return [one.offset for place in places if not isinstance(one := said[place], KafkaError)]
        if any(one.code() not in GONE for one in errors):
            raise link.lost(errors[0].str())
        # The client says the same of a topic that is gone and of one that nobody leads while its broker is away.
        if not await link.exists(topic, deadline):
            return None
        if link.clock.monotonic_s() >= deadline:
            raise link.lost(f"nobody leads {topic}")
        await link.look_again()
