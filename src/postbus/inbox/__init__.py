"""Inboxes: subscriptions become items, items become wakes, and replies go back where the events came from."""

from postbus.inbox.agents import Agent, Cleanup, Digest, InboxSubscription
from postbus.inbox.digests import DigestEntry
from postbus.inbox.inboxes import Inboxes
from postbus.inbox.items import Item, Receipts, item_json
from postbus.inbox.messages import Timer
from postbus.inbox.targets import Target

__all__ = [
    "Agent",
    "Cleanup",
    "Digest",
    "DigestEntry",
    "InboxSubscription",
    "Inboxes",
    "Item",
    "Receipts",
    "Target",
    "Timer",
    "item_json",
]
