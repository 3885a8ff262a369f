"""A log on Kafka: ``Kafka`` is an ``Upstream``. Needs the extra ``kafka``."""

from postbus.log.kafka.upstream import Kafka

__all__ = ["Kafka"]
