"""Replies: what an agent sends back through the delivery handle of an event, from an outbox on disk."""

from postbus.inbox.replies.actions import Action
from postbus.inbox.replies.outbox import Replies, Reply
from postbus.inbox.replies.rules import ReplyRules

__all__ = ["Action", "Replies", "Reply", "ReplyRules"]
