"""What our topics are called on Kafka, and how they are made."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postbus.model import Stream

__all__ = ["EVENTS", "KEPT", "MESSAGE_BYTES_MAX", "REGISTRY", "identities_topic", "registry_topic", "topic_of"]

MESSAGE_BYTES_MAX = 8 << 20
NAME_CHARS_MAX = 249 - 4  # room for the ending of the topic beside it
READABLE_CHARS = 160

_ALWAYS = {
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "max.message.bytes": str(MESSAGE_BYTES_MAX),
    "unclean.leader.election.enable": "false",
}
EVENTS = {**_ALWAYS, "cleanup.policy": "delete", "message.timestamp.type": "CreateTime"}
REGISTRY = {**_ALWAYS, "cleanup.policy": "delete"}
KEPT = {**_ALWAYS, "cleanup.policy": "compact"}


def registry_topic(prefix: str) -> str:
    """Return the topic that says which streams there are."""
    return f"{prefix}.streams"


def topic_of(prefix: str, stream: Stream) -> str:
    """Return the topic that keeps a stream.

    Kafka takes names of 249 characters and no two that differ only in ``.`` and ``_``: a name that is too long or has
    a ``_`` is made safe, and told from the others by a digest.
    """
    name = f"{prefix}.{stream.name}.{stream.epoch}"
    if "_" not in stream.name and len(name) <= NAME_CHARS_MAX:
        return name
    digest = sha256(stream.name.encode()).hexdigest()[:16]
    return f"{prefix}.{stream.name.replace('_', '-')[:READABLE_CHARS]}.{digest}.{stream.epoch}"


def identities_topic(topic: str) -> str:
    """Return the topic that remembers the identities of what was trimmed."""
    return f"{topic}-ids"
