"""Live fan-out between listeners, request and reply, circuit breaker, spool, and agents that call each other.

The broker carries hints, the log carries the truth: a listener that was too slow is told to read the log again. What
needs NATS is imported from ``postbus.broker.nats`` and ``postbus.broker.nats_remote``, with the extra ``nats``.
"""

from postbus.broker.agents import Agent, Task
from postbus.broker.breaker import Breaker, BreakerState, Change
from postbus.broker.bridge import Bridge
from postbus.broker.contract import Broker, Message, Missed, Remote
from postbus.broker.heartbeats import Heartbeats, Liveness
from postbus.broker.listener import Listener
from postbus.broker.local import LocalBroker
from postbus.broker.relay import Relay
from postbus.broker.spool import Spool, SpoolStatus

__all__ = [
    "Agent",
    "Breaker",
    "BreakerState",
    "Bridge",
    "Broker",
    "Change",
    "Heartbeats",
    "Listener",
    "Liveness",
    "LocalBroker",
    "Message",
    "Missed",
    "Relay",
    "Remote",
    "Spool",
    "SpoolStatus",
    "Task",
]
