"""The rules for a stream's settings, shared by every kind of log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postbus.envelope import check_labels
from postbus.model import Conflict, Invalid, LimitExceeded, StreamSettings

if TYPE_CHECKING:
    from postbus.model import Stream

__all__ = ["PARTITIONS_MAX", "accept", "check_settings"]

PARTITIONS_MAX = 1024
BOUND_MAX = 1 << 50


def check_settings(settings: StreamSettings) -> StreamSettings:
    """Refuse settings no stream can have."""
    if type(settings.partitions) is not int or settings.partitions < 1:
        raise Invalid(f"a stream has at least 1 partition, not {settings.partitions}")
    if settings.partitions > PARTITIONS_MAX:
        raise LimitExceeded(f"a stream has at most {PARTITIONS_MAX} partitions, not {settings.partitions}")
    bounds = {
        "retention.age_s": settings.retention.age_s,
        "retention.bytes": settings.retention.bytes,
        "retention.count": settings.retention.count,
        "identity_window_s": settings.identity_window_s,
    }
    for name, value in bounds.items():
        if value is not None and (isinstance(value, bool) or not 0 <= value < BOUND_MAX):
            raise Invalid(f"{name} is a number of at least 0 and below {BOUND_MAX}, not {value}")
    check_labels(settings.labels)
    return settings


def accept(stream: Stream, settings: StreamSettings | None) -> Stream:
    """Return an existing stream, or refuse it when it was made with other settings."""
    if settings is not None and settings != stream.settings:
        message = f"stream {stream.name} exists with other settings"
        raise Conflict(message, hint="leave the settings out to use it as it is, or delete it first")
    return stream
