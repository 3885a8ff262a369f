"""Sources: what feeds the log from outside, and the host that runs them."""

from postbus.sources.contract import NotReady, Polled, Poller, Received, Receiver
from postbus.sources.host import SourceHost
from postbus.sources.ingress import Turn
from postbus.sources.kinds import KINDS
from postbus.sources.registry import Sources

__all__ = ["KINDS", "NotReady", "Polled", "Poller", "Received", "Receiver", "SourceHost", "Sources", "Turn"]
