"""A log on a NATS server: ``JetStream`` is an ``Upstream``. Needs the extra ``nats``."""

from postbus.log.jetstream.upstream import JetStream

__all__ = ["JetStream"]
