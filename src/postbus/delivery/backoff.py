"""When a failed delivery is tried again."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postbus.model import RetryPolicy

__all__ = ["retry_delay_s"]


def retry_delay_s(policy: RetryPolicy, attempt: int) -> float:
    """Return how long to wait after the given failed attempt (1 for the first): doubling, capped, with jitter."""
    delay = min(policy.backoff_s * 2 ** min(attempt - 1, 60), policy.backoff_s_max)
    return float(delay * random.uniform(1 - policy.jitter, 1 + policy.jitter))  # noqa: S311 - jitter
