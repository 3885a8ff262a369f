"""Waking agents: never for nothing, once for many items, and not again while the agent is at work."""

from postbus.inbox.wakes.records import Counters, TargetState
from postbus.inbox.wakes.table import reachable
from postbus.inbox.wakes.waker import Waker

__all__ = ["Counters", "TargetState", "Waker", "reachable"]
